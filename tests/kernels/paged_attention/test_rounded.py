"""Attention to pages of 2 bits beside open pages: what a token reads follows from its position alone."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kernels_pallas.paged_attention import (
    AttentionCall,
    abstract_pages,
    abstract_rounded_pages,
    rounded_attention,
)
from kernels_pallas.paged_attention.rounded import read_rounded_pages

LENGTHS = (75, 40, 9)
ALL = (1 << 20,) * 3
# The tokens of each row in turn that a step computes; a step of one token a row is compiled as a decode step.
SCHEDULES: dict[str, list[tuple[int, ...]]] = {
    "whole prompts": [ALL],
    "chunks of 37": [(37, 37, 37)] * 3,
    "token by token": [(1, 1, 1)] * 75,
    "decoding beside prompts": [(33, 1, 0), (1, 20, 4), (1, 1, 1), *[(5, 2, 1)] * 11],
    "chunks that end with pages": [(16, 16, 16)] * 5,
}


@dataclass(frozen=True)
class Case:
    head_dim: int = 64
    num_heads: int = 4
    num_kv_heads: int = 2
    page_size: int = 16
    num_exact: int = 0
    options: tuple[tuple[str, Any], ...] = ()
    has_sinks: bool = False
    dtype: Any = np.float32


CASES = {
    "heads of 64": Case(),
    "heads of 128, pages of 32": Case(head_dim=128, num_kv_heads=1, page_size=32),
    "heads of 20, one exact page": Case(head_dim=20, num_heads=6, num_exact=1),
    "window of 21": Case(options=(("window", 21),), head_dim=32),
    "sinks and a soft cap": Case(options=(("softcap", 3.0),), head_dim=32, has_sinks=True),
    "bfloat16": Case(dtype=ml_dtypes.bfloat16, head_dim=32),
}


@functools.partial(
    jax.jit, static_argnames=("scale", "window", "softcap", "q_len", "num_exact"), donate_argnames=("full", "opened")
)
def attend(q, k, v, full, opened, tables, kv_lens, cu_q_lens, sinks, *, num_exact, **options):
    calls = [AttentionCall(block_tables=table, kv_lens=kv_lens, cu_q_lens=cu_q_lens, **options) for table in tables]
    return rounded_attention(q, k, v, full, opened, *calls, num_exact=num_exact, sinks=sinks)


@functools.cache
def numbers_of(case: Case) -> tuple[list[tuple[np.ndarray, ...]], np.ndarray | None]:
    """Queries, keys and values of each row, and the sinks. Channels of keys differ, as those of models do."""
    generator = np.random.default_rng(0)
    channels = generator.standard_normal(case.head_dim)
    rows = []
    for length in LENGTHS:
        q, k, v = (
            generator.standard_normal((length, heads, case.head_dim))
            for heads in (case.num_heads, case.num_kv_heads, case.num_kv_heads)
        )
        rows.append(tuple(x.astype(case.dtype) for x in (q, k + 3 * channels, v)))
    return rows, generator.standard_normal(case.num_heads).astype(np.float32) if case.has_sinks else None


def options_of(case: Case) -> dict[str, Any]:
    return {"scale": case.head_dim**-0.5, **dict(case.options)}


def run(case: Case, schedule: list[tuple[int, ...]]) -> tuple[list[np.ndarray], Any, np.ndarray]:
    """Returns each row's output, the pool of full pages and its tables. What no token may read is NaN at any time."""
    rows, sinks = numbers_of(case)
    S, M, B = case.page_size, -(-max(LENGTHS) // case.page_size), len(LENGTHS)
    ids = np.random.default_rng(1).permutation(2 * B * M).astype(np.int32).reshape(2, B, M)
    sizes = (2 * B * M, S, case.num_kv_heads, case.head_dim)

    def poisoned(array: jax.ShapeDtypeStruct) -> jax.Array:
        is_float = jnp.issubdtype(array.dtype, jnp.floating)
        return jnp.full(array.shape, np.nan if is_float else 0xA7, array.dtype)

    full, opened = jax.tree.map(
        poisoned, (abstract_rounded_pages(*sizes, "cpu"), abstract_pages(*sizes, case.dtype, "cpu"))
    )
    outputs, starts = [[] for _ in rows], [0] * B
    for chunks in schedule:
        counts = [min(count, length - start) for count, length, start in zip(chunks, LENGTHS, starts, strict=True)]
        if not any(counts):
            continue
        parts = [[x[s : s + n] for x in row] for row, s, n in zip(rows, starts, counts, strict=True)]
        num_tokens = 128 if max(counts) > 1 else B
        is_decode = all(count <= 1 for count in chunks)
        if is_decode:  # a row that has ended is padding, which has a token
            parts = [[x if n else np.zeros_like(row[i][:1]) for i, x in enumerate(own)]
                     for own, row, n in zip(parts, rows, counts, strict=True)]  # fmt: skip
        flat = [np.concatenate([part[i] for part in parts]) for i in range(3)]
        flat = [np.pad(x, ((0, num_tokens - len(x)), (0, 0), (0, 0))) for x in flat]
        starts = [start + count for start, count in zip(starts, counts, strict=True)]
        kv_lens = np.array([start if count else 0 for start, count in zip(starts, counts, strict=True)], np.int32)
        taken = [1] * B if is_decode else counts
        cu_q_lens = np.concatenate([[0], np.cumsum(taken)]).astype(np.int32)
        q, k, v = map(jnp.asarray, flat)
        out, full, opened = attend(
            q, k, v, full, opened, (*ids,), kv_lens, cu_q_lens, sinks,
            num_exact=case.num_exact, q_len=1 if is_decode else None, **options_of(case),
        )  # fmt: skip
        for row, (first, count) in enumerate(zip(cu_q_lens, counts, strict=False)):
            outputs[row].append(np.asarray(out, np.float32)[first : first + count])
        freed = [ids[1, row, : max(start // S - case.num_exact, 0)] for row, start in enumerate(starts)]
        freed = np.concatenate(freed)
        opened = jax.tree.map(lambda pool, freed=freed: pool.at[freed].set(np.nan), opened)
    return [np.concatenate(parts) for parts in outputs], full, ids[0]


whole = functools.cache(lambda name: run(CASES[name], [ALL]))


def rounded_page(x: np.ndarray, group_axis: int) -> np.ndarray:
    """The numbers that a page gives back for [S, K, H], with ranges of 32 tokens or of a token's heads."""

    def half(x: np.ndarray) -> np.ndarray:
        return x.astype(ml_dtypes.bfloat16).astype(np.float32)

    x = np.asarray(x, np.float32)
    groups = x.reshape(-1, min(32, len(x)), *x.shape[1:]) if group_axis == 0 else x[None]
    axis = 1 if group_axis == 0 else -1
    low, high = groups.min(axis, keepdims=True), groups.max(axis, keepdims=True)
    least, scale = half(low), half((high - low) * np.float32(1 / 3))
    codes = np.clip(np.round((groups - least) / scale), 0, 3)
    assert set(np.unique(codes)) <= {0, 1, 2, 3}
    return (codes * scale + least).astype(np.float32).reshape(x.shape)


def attention_by_definition(case: Case, row: int) -> np.ndarray:
    """The output [T, N, H] of a row, token by token in float64."""
    (rows, sinks), S = numbers_of(case), case.page_size
    q, k, v = (np.asarray(x, np.float64) for x in rows[row])
    T, N, H = q.shape
    num_full = T // S
    rounded = [
        np.concatenate([rounded_page(x[i * S : (i + 1) * S], axis) for i in range(num_full)] or [x[:0]])
        for x, axis in zip(rows[row][1:], (0, -1), strict=True)
    ]
    if case.dtype != np.float32:  # a product takes them in the dtype of queries
        rounded = [x.astype(case.dtype).astype(np.float64) for x in rounded]
    options, out = options_of(case), np.zeros((T, N, H))
    pairs = list(zip(rounded, (k, v), strict=True))
    for p in range(T):
        first_exact = max(p // S - case.num_exact, 0) * S
        keys, values = (np.concatenate([old[:first_exact], own[first_exact : p + 1]]) for old, own in pairs)
        first = 0 if options.get("window") is None else max(p + 1 - options["window"], 0)
        for head in range(N):
            group = head // (N // case.num_kv_heads)
            scores = keys[first:, group] @ q[p, head] * options["scale"]
            if options.get("softcap") is not None:
                scores = np.tanh(scores / options["softcap"]) * options["softcap"]
            weights = np.exp(scores - scores.max())
            total = weights.sum() + (0 if sinks is None else np.exp(sinks[head] - scores.max()))
            out[p, head] = weights @ values[first:, group] / total
    return out


@pytest.mark.parametrize("name", CASES)
def test_attention_is_that_of_the_definition(name):
    case = CASES[name]

    outputs, _, _ = whole(name)

    # In float32 only sums differ. In bfloat16 weights and the output are rounded to 8 bits.
    tolerance = 2e-5 if case.dtype == np.float32 else 3e-2
    for row, output in enumerate(outputs):
        np.testing.assert_allclose(output, attention_by_definition(case, row), atol=tolerance)


@pytest.mark.bits
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="bit-equality is promised on CPU")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "whole prompts"])
def test_every_schedule_has_the_same_bits(name, schedule):
    outputs, _, _ = run(CASES[name], SCHEDULES[schedule])

    for output, expected in zip(outputs, whole(name)[0], strict=True):
        assert np.isfinite(output).all()
        np.testing.assert_array_equal(output, expected)


@pytest.mark.parametrize("name", ["heads of 64", "heads of 128, pages of 32", "heads of 20, one exact page"])
def test_a_full_page_gives_back_what_the_definition_does(name):
    case, (_, full, tables) = CASES[name], whole(name)
    S, H = case.page_size, case.head_dim
    row, num_full = 0, LENGTHS[0] // case.page_size

    k, v = (np.asarray(x) for x in read_rounded_pages(full, jnp.asarray(tables[row, :num_full])))

    for i in range(num_full):
        _, keys, values = numbers_of(case)[0][row]
        page = slice(i * S, (i + 1) * S)
        np.testing.assert_array_equal(k[i, :, :H].transpose(2, 0, 1), rounded_page(keys[page], 0))
        np.testing.assert_array_equal(v[i, ..., :H].transpose(1, 0, 2), rounded_page(values[page], -1))


def test_no_rounding_hides_a_number_that_is_not_finite():
    case = Case(page_size=16)
    rows, _ = numbers_of(case)
    q, k, v = (x[:17].copy() for x in rows[0])
    k[3, 0, 5], v[7, 1, 2] = np.inf, np.nan
    sizes = (2, 16, 2, 64)
    full, opened = jax.tree.map(
        lambda a: jnp.zeros(a.shape, a.dtype),
        (abstract_rounded_pages(*sizes, "cpu"), abstract_pages(*sizes, jnp.float32, "cpu")),
    )
    tables = (np.array([[0, 1]], np.int32),) * 2
    kv_lens, cu_q_lens = np.array([17], np.int32), np.array([0, 17], np.int32)

    out, _, _ = attend(q, k, v, full, opened, tables, kv_lens, cu_q_lens, None, num_exact=0, scale=0.1)

    assert np.isnan(np.asarray(out)[16]).any(-1).all()  # in every head


def test_what_is_not_built_is_refused_by_name():
    pages = abstract_rounded_pages(2, 16, 2, 64, "cpu"), abstract_pages(2, 16, 2, 64, jnp.float32, "cpu")
    arrays = [jax.ShapeDtypeStruct((3, heads, 64), jnp.float32) for heads in (4, 2, 2)]
    tables, lens = jax.ShapeDtypeStruct((1, 2), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
    cu_q_lens = jax.ShapeDtypeStruct((2,), jnp.int32)
    call = AttentionCall(block_tables=tables, kv_lens=lens, cu_q_lens=cu_q_lens, scale=1.0)
    mask = jax.ShapeDtypeStruct((3, 1), jnp.uint32)
    refused = {"a tree of drafts": {"tree_mask": mask}, "implementation='gpu'": {"implementation": "gpu"}}

    for what, options in refused.items():
        with pytest.raises(NotImplementedError, match=f"2 bits is not built for {what}; "):
            jax.eval_shape(
                functools.partial(rounded_attention, num_exact=0), *arrays, *pages, replace(call, **options), call
            )
    for layout in ("gpu", "tpu"):
        with pytest.raises(NotImplementedError, match=f"pages of 2 bits have no layout for a {layout}; use int4"):
            abstract_rounded_pages(2, 16, 2, 64, layout)
