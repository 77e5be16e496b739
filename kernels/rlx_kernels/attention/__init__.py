"""Causal grouped-query attention over packed rows, without its scores."""

from rlx_kernels.attention.api import attention, unsupported_reason

__all__ = ["attention", "unsupported_reason"]
