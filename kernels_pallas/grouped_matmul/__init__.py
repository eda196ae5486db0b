"""Products of rows that are grouped by expert with the weights of their experts."""

from kernels_pallas.grouped_matmul.api import grouped_matmul

__all__ = ["grouped_matmul"]
