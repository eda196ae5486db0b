"""Products by dense weights on a GPU: a kernel for few rows, and XLA's own without measuring for all others."""

from kernels_pallas.gpu_products.product import can_multiply, multiply
from kernels_pallas.gpu_products.xla_options import PASSES, compiler_options, weight_itemsize

__all__ = ["PASSES", "can_multiply", "compiler_options", "multiply", "weight_itemsize"]
