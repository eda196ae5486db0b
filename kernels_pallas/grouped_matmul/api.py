"""The one signature of the grouped product, and the choice among its implementations."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from kernels_pallas.dispatch import call_best
from kernels_pallas.grouped_matmul.gpu import grouped_matmul_gpu
from kernels_pallas.grouped_matmul.reference import grouped_matmul_reference
from kernels_pallas.grouped_matmul.tpu import grouped_matmul_tpu
from kernels_pallas.quantized_matmul.api import fit_zeros, widths_of

# In order of preference. The reference supports every call, so a search ends there; what follows must be named.
IMPLEMENTATIONS: dict[str, Callable[..., jax.Array]] = {
    "gpu": grouped_matmul_gpu,
    "tpu": grouped_matmul_tpu,
    "reference": grouped_matmul_reference,
    "gpu_interpret": functools.partial(grouped_matmul_gpu, interpret=True),
    "tpu_interpret": functools.partial(grouped_matmul_tpu, interpret=True),
}


def grouped_matmul(
    rows: jax.Array,
    weights: jax.Array,
    counts: jax.Array,
    scales: jax.Array | None = None,
    *,
    zeros: jax.Array | None = None,
    first_expert: jax.Array | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Returns each row times the transposed weights of its expert, [R, F].

    Rows lie in the order of their experts. Rows past the last expert's have a result of zeros:

        counts 2 0 3, 6 rows  ->  expert of each row: 0 0 2 2 2 -

    Integers stand for (weights[e, f, d] - zeros[e, f, d // g]) * scales[e, f, d // g], where groups of g = D // groups
    inputs share a scale; one group is a scale per output channel. The product can be differentiated; its derivative is
    the reference's.

    Args:
      rows: [R, D] activations, floating point.
      weights: [S, F, D] in rows' dtype; or with scales as in `quantized_matmul`: i8, i4 or f8_e4m3 [S, F, D], or 4 bits
        packed for each expert, integers i8[S, F, D / 2] or FP4 u8[S, F, D / 2]. S is E, or more in a stack of several
        layers' experts.
      counts: i32[E] rows of each expert, R in all or fewer.
      scales: f[S, F, groups] in any floating type, or u8 as in `quantized_matmul`; or those [E, F, groups] of the E
        experts alone. None for weights in floating point.
      zeros: zero points of the groups of scales, as in `quantized_matmul`; None is 0.
      first_expert: i32[] the first of the E experts in the stack; the kernel of a TPU reads them from there, the other
        implementations copy them. None is 0, for weights of E experts.
      implementation: a name from `IMPLEMENTATIONS`, or None for the best that supports the call.

    Returns:
      [R, F] in rows' dtype, accumulated in float32.

    Raises:
      ValueError: for an unknown implementation or arrays that do not fit together.
      NotImplementedError: if the named implementation cannot do this call, with the reason.
    """
    _check_arrays(rows, weights, counts, scales, zeros, first_expert)
    return call_best(IMPLEMENTATIONS, implementation, (rows, weights, counts, scales, first_expert, zeros))


def _check_arrays(rows, weights, counts, scales, zeros, first_expert) -> None:
    D = rows.shape[-1]
    fits = (rows.ndim, weights.ndim, counts.ndim) == (2, 3, 1) and counts.dtype == "int32"
    fits = fits and jnp.issubdtype(rows.dtype, jnp.floating)
    is_stack = first_expert is not None and fits and counts.shape[0] <= weights.shape[0]
    fits = fits and (is_stack or counts.shape[0] == weights.shape[0])
    if scales is None:
        fits = fits and weights.dtype == rows.dtype and weights.shape[2] == D and zeros is None
    else:
        groups = scales.shape[-1]
        fits = (
            fits
            and weights.shape[2] in widths_of(weights.dtype, D)
            and (jnp.issubdtype(scales.dtype, jnp.floating) or scales.dtype == "uint8")
            and scales.shape[0] in (counts.shape[0], weights.shape[0])
            and scales.shape[1:] == (weights.shape[1], groups)
            and groups > 0
            and D % groups == 0
            and (weights.shape[2] == D or (D // groups) % 2 == 0)
            and (zeros is None or fit_zeros(zeros, weights, scales, D))
        )
    if not fits:
        parts = {"rows": rows, "weights": weights, "counts": counts, "scales": scales, "zeros": zeros}
        listed = ", ".join(f"{n} {a.shape} of {a.dtype}" for n, a in parts.items() if a is not None)
        raise ValueError(f"arrays do not fit together: {listed}; see grouped_matmul")
