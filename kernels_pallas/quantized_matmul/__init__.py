"""Products of activations and weights that are stored in 8 or 4 bits with a scale per group."""

from kernels_pallas.quantized_matmul.api import quantized_matmul, split_groups
from kernels_pallas.quantized_matmul.reference import layer_of

__all__ = ["layer_of", "quantized_matmul", "split_groups"]
