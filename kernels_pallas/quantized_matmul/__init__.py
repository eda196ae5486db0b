"""Products of activations and weights that are stored in 8 or 4 bits with a scale per group."""

from kernels_pallas.quantized_matmul.api import quantized_matmul, split_groups
from kernels_pallas.quantized_matmul.reference import dequantize, layer_of, pack_int4, unpack_int4, whole_zeros

__all__ = ["dequantize", "layer_of", "pack_int4", "quantized_matmul", "split_groups", "unpack_int4", "whole_zeros"]
