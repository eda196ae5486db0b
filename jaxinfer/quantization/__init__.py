"""Weights in fewer bits: the types that stand for them, and how floating-point weights become one."""

from jaxinfer.quantization.packed_blocks import BLOCKS_ARE_WHOLE, PackedBlocks
from jaxinfer.quantization.quantized_array import QuantizedArray, quantize

PACKED = (QuantizedArray, PackedBlocks)  # the types that stand for weights

__all__ = ["BLOCKS_ARE_WHOLE", "PACKED", "PackedBlocks", "QuantizedArray", "quantize"]
