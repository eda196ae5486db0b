"""Grouped products from their definition, in NumPy float64, and calls of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from kernels_pallas.packed_numbers import pack_int4


def product_by_expert(rows: np.ndarray, weights: np.ndarray, counts: Sequence[int]) -> np.ndarray:
    """Returns the rows [R, D] times the transposed weights [E, F, D] of their expert; zeros after the last expert."""
    out, first = np.zeros((rows.shape[0], weights.shape[1])), 0
    for w, count in zip(weights.astype(np.float64), counts, strict=True):
        out[first : first + count] = rows[first : first + count].astype(np.float64) @ w.T
        first += count
    return out


def make_call(
    counts: Sequence[int],
    num_rows: int,
    num_inputs: int = 96,
    num_channels: int = 70,
    *,
    dtype: Any = jnp.float32,
    bits: int | None = None,
    group_size: int | None = None,
    is_packed: bool = True,
    has_zeros: bool = False,
    is_fp4: bool = False,
) -> tuple[dict[str, Any], np.ndarray]:
    """Returns the arguments of a call, and its result in float64.

    The weights are in `dtype`, or integers of `bits` bits with a scale per channel or per `group_size` inputs. Those of
    4 bits go two to a byte if `is_packed`, and so do zero points, which are taken from them. FP4 has scales that are
    powers of two.
    """
    generator, E, F, D = np.random.default_rng(0), len(counts), num_channels, num_inputs
    rows = jnp.asarray(generator.standard_normal((num_rows, D)), dtype)
    call: dict[str, Any] = {"rows": rows, "counts": jnp.asarray(counts, jnp.int32)}
    if bits is None:
        weights = jnp.asarray(generator.standard_normal((E, F, D)) / D**0.5, dtype)
        call["weights"] = weights
        wide = np.asarray(weights.astype(jnp.float32))
    else:
        size, high = group_size or D, 2 ** (bits - 1) - 1
        integers = generator.integers(-high - 1, high, (E, F, D), np.int8, endpoint=True)
        scales = generator.uniform(0.5, 2.0, (E, F, D // size)).astype(np.float32) / (high * D**0.5)
        weights = jnp.asarray(integers)
        if bits == 4:
            weights = (
                pack_int4(weights.reshape(E * F, D), size).reshape(E, F, -1) if is_packed else weights.astype("int4")
            )
        call |= {"weights": weights, "scales": jnp.asarray(scales)}
        if is_fp4:
            return _fp4_call(call, generator, size)
        wide = integers.astype(int)
        if has_zeros:
            zeros = generator.integers(-high - 1, high, scales.shape, np.int8, endpoint=True)
            wide = wide - np.repeat(zeros.astype(int), size, axis=2)
            if bits == 4:
                zeros = pack_pairs(zeros) if is_packed else zeros.astype("int4")
            call["zeros"] = jnp.asarray(zeros)
        wide = wide * np.repeat(scales.astype(np.float64), size, axis=2)
    return call, product_by_expert(np.asarray(rows.astype(jnp.float32)), wide, counts)


def pack_pairs(zeros: np.ndarray) -> np.ndarray:
    """Returns zero points i8[..., n] of 4 bits two to a byte; a single one stays as it is."""
    n = zeros.shape[-1]
    padded = np.pad(zeros, [*[(0, 0)] * (zeros.ndim - 1), (0, n % 2)])
    return zeros if n == 1 else (padded[..., ::2] & 15 | padded[..., 1::2] << 4).astype(np.int8)


def _fp4_call(call: dict[str, Any], generator: np.random.Generator, size: int) -> tuple[dict[str, Any], np.ndarray]:
    E, F, groups = call["scales"].shape
    codes = generator.integers(0, 16, (E * F, groups * size), np.uint8)
    exponents = generator.integers(118, 126, (E, F, groups)).astype(np.uint8)
    call |= {"weights": pack_int4(jnp.asarray(codes), size).reshape(E, F, -1), "scales": jnp.asarray(exponents)}
    numbers = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64).reshape(E, F, -1)
    wide = numbers * np.repeat(2.0 ** (exponents.astype(int) - 127), size, axis=2)
    rows, counts = np.asarray(call["rows"].astype(jnp.float32)), np.asarray(call["counts"]).tolist()
    return call, product_by_expert(rows, wide, counts)
