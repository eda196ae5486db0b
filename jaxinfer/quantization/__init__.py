"""Weights in fewer bits: the type that stands for them, and how floating-point weights become one."""

from jaxinfer.quantization.quantized_array import QuantizedArray, quantize

__all__ = ["QuantizedArray", "quantize"]
