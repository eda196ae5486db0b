"""The one signature of the weight-only quantized product, and the choice among its implementations."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax

from kernels_pallas.dispatch import call_best
from kernels_pallas.quantized_matmul.gpu import quantized_matmul_gpu
from kernels_pallas.quantized_matmul.reference import quantized_matmul_reference
from kernels_pallas.quantized_matmul.tpu import quantized_matmul_tpu

# In order of preference. The reference supports every call, so a search ends there; what follows must be named.
IMPLEMENTATIONS: dict[str, Callable[..., jax.Array]] = {
    "gpu": quantized_matmul_gpu,
    "tpu": quantized_matmul_tpu,
    "reference": quantized_matmul_reference,
    "gpu_interpret": functools.partial(quantized_matmul_gpu, interpret=True),
    "tpu_interpret": functools.partial(quantized_matmul_tpu, interpret=True),
}


def quantized_matmul(
    x: jax.Array,
    weights: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None = None,
    *,
    layer: jax.Array | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Returns x wᵀ [T, F], where w[f, d] = (weights[f, d] - zeros[f, d // g]) * scales[f, d // g].

    Groups of g = D // groups inputs share a scale; one group is a scale per output channel. With a `layer`, weights,
    scales and zeros are those of a stack of n layers [n, F..., ...], and the channels F may have several axes.

    Args:
      x: [T, D] activations, floating point.
      weights: i8[F, D], i4[F, D], or i8[F, D / 2] as `pack_int4` lays out 4-bit integers.
      scales: f[F, groups], in any floating type.
      zeros: i8[F, groups] zero points; None is 0.
      layer: i32[] the layer of a stack; the kernel of a TPU reads its weights there, the other implementations copy
        them. None if there is no stack.
      implementation: a name from `IMPLEMENTATIONS`, or None for the best that supports the call.

    Returns:
      [T, F] in x's dtype, accumulated in float32.

    Raises:
      ValueError: for an unknown implementation or arrays that do not fit together.
      NotImplementedError: when the named implementation cannot do this call, with the reason.
    """
    _check_shapes(x, weights, scales, zeros, layer)
    return call_best(IMPLEMENTATIONS, implementation, (x, weights, scales, zeros, layer))


def _check_shapes(x, weights, scales, zeros, layer) -> None:
    D, groups = x.shape[-1], scales.shape[-1]
    fits = (
        x.ndim == 2
        and (weights.ndim == 2 if layer is None else weights.ndim > 2)
        and weights.dtype in ("int8", "int4")
        and weights.shape[-1] in ((D, D // 2) if weights.dtype == "int8" else (D,))
        and scales.shape == (*weights.shape[:-1], groups)
        and groups > 0
        and D % groups == 0
        and (weights.shape[-1] == D or (D // groups) % 2 == 0)
        and (zeros is None or (zeros.shape == scales.shape and zeros.dtype == "int8"))
    )
    if not fits:
        parts = {"x": x, "weights": weights, "scales": scales, "zeros": zeros}
        listed = ", ".join(f"{n} {a.shape} of {a.dtype}" for n, a in parts.items() if a is not None)
        raise ValueError(f"arrays do not fit together: {listed}; see quantized_matmul")
