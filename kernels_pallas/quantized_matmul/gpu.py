"""The group-wise quantized product for NVIDIA GPUs from Ampere on: what `gpu_products` takes of it.

XLA writes the weights to memory in floating point before it multiplies by them, which is all the traffic that
quantization saves.
"""

from __future__ import annotations

import jax

from kernels_pallas import triton
from kernels_pallas.device import device_at_hand
from kernels_pallas.dispatch import NoGainError
from kernels_pallas.exact_sums import refuse_if_exact
from kernels_pallas.gpu_products.product import FP8, GROUP_SIZES, can_multiply, multiply
from kernels_pallas.quantized_matmul.reference import layer_of, multiply_widened


def quantized_matmul_gpu(
    x: jax.Array,
    weights: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
    layer: jax.Array | None = None,
    *,
    interpret: bool = False,
) -> jax.Array:
    """The contract is that of `quantized_matmul`."""
    weights, scales, zeros = layer_of((weights, scales, zeros), layer)
    _check(x, weights, scales.shape[1], interpret)
    if not interpret and not can_multiply(x, weights, scales, zeros):
        if scales.shape[1] == 1:
            raise NoGainError(
                f"groups=1 of {weights.dtype} is not supported by the GPU kernel here: XLA fuses the conversion into a"
                " product with one scale per channel; use implementation='reference'"
            )
        refuse_if_exact(f"a product by {weights.dtype} {weights.shape} with scales {scales.shape}")
        return multiply_widened(x, weights, scales, zeros)
    return multiply(x, weights, scales, zeros, dtype=x.dtype, interpret=interpret)


def _check(x: jax.Array, weights: jax.Array, groups: int, interpret: bool) -> None:
    dtypes = ("bfloat16", "float16", "float32") if interpret else ("bfloat16", "float16")
    for what, value, supported in (
        ("x.dtype", x.dtype.name, dtypes),
        ("weights.dtype", weights.dtype.name, ("int8", "uint8", FP8)),  # 4 bits are packed in bytes
        *((("group size", x.shape[1] // groups, GROUP_SIZES),) if groups > 1 else ()),
    ):
        if value not in supported:
            raise NotImplementedError(f"{what}={value} is not supported by the GPU kernel; supported: {supported}")
    if (device := device_at_hand()).is_before_ampere:
        raise NoGainError(
            f"compute capability {device.capability} of {device.kind!r} is not supported by the GPU kernels; sums in"
            " plain JAX read such weights as they are"
        )
    if not interpret:
        triton.target()
