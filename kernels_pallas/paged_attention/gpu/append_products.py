"""Norms and rotates the products of queries, keys and values, and appends the latter two, in one launch of a GPU.

XLA takes five before the append, in which it reads the products three times and writes keys and values once more.
"""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels_pallas import triton
from kernels_pallas.paged_attention.call import AttentionCall, HeadOptions
from kernels_pallas.paged_attention.gpu.append import append_tile, find_tile
from kernels_pallas.paged_attention.gpu.chunks import arrays_of, for_kernels, num_chunks
from kernels_pallas.paged_attention.layout import Pages


def append_products(
    products: jax.Array, pages: Pages, call: AttentionCall, heads: HeadOptions, *, interpret: bool = False
) -> tuple[jax.Array, Pages]:
    """The contract is that of `paged_attention.append_products`, for the heads of one device, products [T, S, H]."""
    call, (T, S, H), B, q_len = for_kernels(call), products.shape, call.kv_lens.shape[0], call.q_len
    (block_q, num_warps), K = append_tile(q_len, H), pages.num_kv_heads
    arrays = {**arrays_of(call), "products": products, **heads.arrays()}
    names = (*arrays, "k_pages", "v_pages", "queries")
    flags = {name: getattr(heads, name) for name in ("epsilon", "adds_one", "is_interleaved")}
    kernel = functools.partial(_kernel, names=names, block_q=block_q, q_len=q_len, **flags)
    *pools, queries = triton.launch(
        kernel,
        *arrays.values(),
        *pages.arrays,
        grid=(num_chunks(T, B, block_q, q_len), S),
        out=[
            *(jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pages.arrays),
            jax.ShapeDtypeStruct((T, S - 2 * K, H), products.dtype),
        ],
        aliases={len(arrays): 0, len(arrays) + 1: 1},
        num_warps=num_warps,
        num_stages=1,
        name="append_products",
        interpret=interpret,
    )
    return queries, dataclasses.replace(pages, arrays=tuple(pools))


def _kernel(
    *refs: Any,
    names: tuple[str, ...],
    block_q: int,
    q_len: int | None,
    epsilon: float,
    adds_one: bool,
    is_interleaved: bool,
) -> None:
    """One program: tile `program_id(0)` of tokens, head `program_id(1)` of the products."""
    # The pools come as inputs and as outputs, which are one and the same.
    arrays = SimpleNamespace(**dict(zip(names, (*refs[: len(names) - 3], *refs[-3:]), strict=True)))
    head, (T, num_heads, H), dtype = pl.program_id(1), arrays.products.shape, arrays.products.dtype
    _, S, K, _ = arrays.k_pages.shape
    N = num_heads - 2 * K
    has_norm, has_turns = "q_norm" in names, "cos" in names
    tile = find_tile(arrays, T, block_q, q_len)
    tokens, is_token = tile.tokens, tile.is_token
    # Whether the head is of this kind, and its index among those.
    is_q, is_k, is_v = head < N, (head >= N) & (head < N + K), head >= N + K
    kinds = {"q": (is_q, head), "k": (is_k, head - N), "v": (is_v, head - N - K)}
    columns = jnp.arange(pl.next_power_of_2(H), dtype=jnp.int32)

    def of_head(columns: jax.Array, field: str, mask: jax.Array) -> Any:
        """Returns the numbers of this head in that of three arrays [heads, H] or [H] that is of its kind, in f32."""
        total = jnp.zeros(columns.shape, jnp.float32)
        for kind, (is_own, index) in kinds.items():
            ref = getattr(arrays, f"{kind}_{field}", None)
            if ref is not None:
                at = (columns,) if len(ref.shape) == 1 else (jnp.clip(index, 0, ref.shape[0] - 1), columns)
                total += triton.load(ref, at, mask & is_own).astype(jnp.float32)
        return total

    def numbers(columns: jax.Array) -> jax.Array:
        """Returns the products [block_q, H] with the bias, in float32 as rounded to their dtype."""
        is_there = (columns >= 0) & (columns < H)
        x = triton.load(arrays.products, (tokens[:, None], head, columns[None]), is_token[:, None] & is_there[None])
        return (x.astype(jnp.float32) + of_head(columns, "bias", is_there)[None]).astype(dtype).astype(jnp.float32)

    def normed(x: jax.Array, columns: jax.Array) -> jax.Array:
        weight = of_head(columns, "norm", (columns >= 0) & (columns < H))
        if adds_one:
            return (x * scale * (1.0 + weight)[None]).astype(dtype).astype(jnp.float32)
        return ((x * scale).astype(dtype).astype(jnp.float32) * weight[None]).astype(dtype).astype(jnp.float32)

    raw = numbers(columns)
    x = raw
    if has_norm:
        scale = jax.lax.rsqrt(jnp.sum(raw * raw, axis=1, keepdims=True) / H + epsilon)
        x = normed(raw, columns)
    if has_turns:
        R = 2 * arrays.cos.shape[-1]
        if is_interleaved:
            partners, pairs, is_first = columns ^ 1, columns // 2, columns % 2 == 0
        else:
            is_first = columns < R // 2
            pairs = jnp.where(is_first, columns, columns - R // 2)
            partners = jnp.where(is_first, columns + R // 2, columns - R // 2)
        partner = numbers(partners)
        partner = normed(partner, partners) if has_norm else partner
        turned = columns < R
        mask = is_token[:, None] & turned[None]
        cos, sin = (triton.load(ref, (tokens[:, None], 0, pairs[None]), mask) for ref in (arrays.cos, arrays.sin))
        x = jnp.where(turned[None], x * cos + jnp.where(is_first[None], -partner, partner) * sin, x)
    page_ids, slots = tile.slots(arrays, S)
    own, real = is_token[:, None] & (columns < H)[None], tile.is_real[:, None] & (columns < H)[None]
    of_k, of_v = (jnp.clip(kinds[kind][1], 0, K - 1) for kind in "kv")
    triton.store(arrays.queries, (tokens[:, None], jnp.minimum(head, N - 1), columns[None]), x, own & is_q)
    for pool, values, of_pool, is_own in ((arrays.k_pages, x, of_k, is_k), (arrays.v_pages, raw, of_v, is_v)):
        triton.store(pool, (page_ids[:, None], slots[:, None], of_pool, columns[None]), values, real & is_own)
