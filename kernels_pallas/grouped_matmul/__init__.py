"""Products of rows that are grouped by expert with the weights of their experts."""

from kernels_pallas.grouped_matmul.api import grouped_matmul
from kernels_pallas.grouped_matmul.reference import dequantize_experts

__all__ = ["dequantize_experts", "grouped_matmul"]
