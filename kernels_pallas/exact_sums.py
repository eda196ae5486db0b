"""Sums in one order on a GPU, so that the bits of a row do not depend on the rows computed beside it.

Inside `exact_sums` every float that a token passes is added up by a kernel whose order goes by the row alone: products
(`gpu_products`), attention and what it appends (`paged_attention.gpu`), and norms and sums along a row (here). XLA
chooses an order by the shape of an operation, so it computes element by element only. What has no such kernel refuses.
A CPU adds up in one order always (`row_products`).
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels_pallas import triton
from kernels_pallas.device import device_at_hand

# Numbers of a row that a program has at once; they are in registers.
BLOCK = 2048
# A context of tracing, so that a function is traced anew inside it.
_EXACT = jax.make_user_context(False)


def exact_sums(is_wanted: bool) -> contextlib.AbstractContextManager[None]:
    """Programs that are traced meanwhile have sums in one order, if that is wanted.

    Raises NotImplementedError on devices that are neither GPUs nor CPUs.
    """
    platform = device_at_hand().platform if is_wanted else "cpu"
    if platform not in ("cpu", "gpu"):
        raise NotImplementedError(f"exact=True is not built for a {platform}; leave out EngineConfig.exact")
    return _EXACT(is_wanted)


def sums_are_exact() -> bool:
    """Returns whether a GPU must add up in one order."""
    return bool(_EXACT.value) and device_at_hand().platform == "gpu"


def refuse_if_exact(what: str) -> None:
    """Raises NotImplementedError for something that has no fixed order of sums, if that is wanted."""
    if sums_are_exact():
        raise NotImplementedError(
            f"exact=True is not built for {what} on a GPU; leave out EngineConfig.exact, or compute on a CPU, where"
            " results are exact without it"
        )


def sum_rows(x: jax.Array, *, interpret: bool = False) -> jax.Array:
    """Returns the sums f32[...] of rows x f32[..., n], each by a program of its own."""
    rows = x.reshape(-1, x.shape[-1])
    out = _by_rows(_sum_kernel, rows, [], jax.ShapeDtypeStruct((len(rows),), x.dtype), "sum_rows", interpret)
    return out.reshape(x.shape[:-1])


def highest_enough(keys: jax.Array, weights: jax.Array, wanted: jax.Array, *, interpret: bool = False) -> jax.Array:
    """Returns the largest t u32[B] of each row so that the weights f32[B, V] of keys u32[B, V] >= t are enough.

    They are enough if they add up to `wanted` f32[B]. A program finds that of its row bit by bit.
    """
    out = jax.ShapeDtypeStruct(wanted.shape, jnp.uint32)
    return _by_rows(_threshold_kernel, weights, [keys, wanted], out, "highest_enough", interpret)


def norm_rows(
    x: jax.Array, weight: jax.Array | None, *, epsilon: float, adds_one: bool, interpret: bool = False
) -> jax.Array:
    """Returns rows x [..., n] divided by the root of their mean square, as `rms_norm`; weight is [n] or None."""
    rows = x.reshape(-1, x.shape[-1])
    kernel = functools.partial(_norm_kernel, epsilon=epsilon, adds_one=adds_one)
    weights = [] if weight is None else [weight]
    out = _by_rows(kernel, rows, weights, jax.ShapeDtypeStruct(rows.shape, x.dtype), "norm_rows", interpret)
    return out.reshape(x.shape)


def _by_rows(
    kernel: Any, rows: jax.Array, others: list[jax.Array], out: jax.ShapeDtypeStruct, name: str, interpret: bool
) -> jax.Array:
    """Returns what a kernel makes of rows [R, n], of which each program has one; warps and blocks go by n alone."""
    block = min(pl.next_power_of_2(rows.shape[1]), BLOCK)
    (result,) = triton.launch(
        functools.partial(kernel, block=block),
        *(rows, *others),
        grid=(len(rows),),
        out=[out],
        num_warps=1 if block <= 256 else 4,
        num_stages=1,
        name=name,
        interpret=interpret,
    )
    return result


def _sum_kernel(x_ref: Any, out_ref: Any, *, block: int) -> None:
    row = pl.program_id(0)
    _store_one(out_ref, row, _total(x_ref, row, block, lambda x, i: x))


def _threshold_kernel(weights: Any, keys: Any, wanted: Any, out_ref: Any, *, block: int) -> None:
    row = pl.program_id(0)
    enough = triton.load(wanted, (row,))

    def set_bit(i: jax.Array, threshold: jax.Array) -> jax.Array:
        candidate = threshold | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))

        def above(weight: jax.Array, i: jax.Array) -> jax.Array:
            columns = i * block + jnp.arange(block, dtype=jnp.int32)
            return jnp.where(triton.load(keys, (row, columns), columns < keys.shape[1]) >= candidate, weight, 0.0)

        return jnp.where(_total(weights, row, block, above) >= enough, candidate, threshold)

    _store_one(out_ref, row, jax.lax.fori_loop(0, 32, set_bit, jnp.uint32(0)))


def _store_one(out_ref: Any, row: jax.Array, value: jax.Array) -> None:
    triton.store(out_ref, (row + jnp.arange(1, dtype=jnp.int32),), value[None], jnp.ones(1, bool))


def _norm_kernel(x_ref: Any, *refs: Any, block: int, epsilon: float, adds_one: bool) -> None:
    (*weights, out_ref), row, n = refs, pl.program_id(0), x_ref.shape[1]
    scale = jax.lax.rsqrt(_total(x_ref, row, block, lambda x, _: x * x) / n + epsilon)

    def write(i: jax.Array, _: None) -> None:
        columns, x = _block(x_ref, row, i, block)
        y = x * scale
        for weight in weights:
            own = triton.load(weight, (columns,), columns < n).astype(jnp.float32)
            y = y * (1.0 + own) if adds_one else y.astype(out_ref.dtype).astype(jnp.float32) * own
        triton.store(out_ref, (row, columns), y, columns < n)

    jax.lax.fori_loop(0, pl.cdiv(n, block), write, None)


def _total(x_ref: Any, row: jax.Array, block: int, change: Any) -> jax.Array:
    """Returns the sum f32[] of change(numbers, i) of a row's blocks, added up block upon block, then in the block."""

    def add(i: jax.Array, total: jax.Array) -> jax.Array:
        return total + change(_block(x_ref, row, i, block)[1], i)

    zeros = jnp.zeros(block, jnp.float32)
    return jnp.sum(jax.lax.fori_loop(0, pl.cdiv(x_ref.shape[1], block), add, zeros))


def _block(x_ref: Any, row: jax.Array, i: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    columns = i * block + jnp.arange(block, dtype=jnp.int32)
    return columns, triton.load(x_ref, (row, columns), columns < x_ref.shape[1]).astype(jnp.float32)
