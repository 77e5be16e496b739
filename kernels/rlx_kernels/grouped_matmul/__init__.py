"""The matrix products of a mixture of experts: each group of rows with its own matrix, in the work of the rows."""

from rlx_kernels.grouped_matmul.api import grouped_matmul, unsupported_reason

__all__ = ["grouped_matmul", "unsupported_reason"]
