"""Kernels for the hot paths of rlx. Imports jax and nothing of rlx."""
