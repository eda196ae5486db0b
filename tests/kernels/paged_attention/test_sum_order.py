"""With an order of sums a token's attention on GPU is the same bits in any chunk and beside any rows.

Interpreted on CPU, where a product of one size adds up in one order too: all tiles of an order have one size.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.paged_attention import Pages, SumOrder, init_pages, paged_attention, write_kv
from kernels_pallas.paged_attention.gpu import attend, combine, entry, parts, sum_order
from kernels_pallas.paged_attention.gpu.parts import MAX_PARTIAL_BYTES, cut_batch
from kernels_pallas.triton import Target
from scripts.kernels.named_calls import by_name
from tests.kernels.paged_attention.mutants import mutant
from tests.kernels.paged_attention.oracle import attention, make_call, rows_of_chunks

# Of 150 keys, in 5 parts of 2 blocks.
LENGTH, ORDER = 150, SumOrder(split_keys=32, block_k=16)
NUM_TEXTS, K, H, S = 4, 2, 32, 16
FILES = (sum_order, parts, combine, attend, entry)
CASES: dict[str, dict[str, Any]] = {
    "one head": {"group": 1},
    "4 heads, window, soft cap, sinks": {"group": 4, "window": 45, "softcap": 3.0, "has_sinks": True},
    "8 heads, sinks": {"group": 8, "has_sinks": True},
    "int8 with a scale for each token": {"group": 4, "page_dtype": "int8"},
    "fp8 with scales of heads": {"group": 4, "page_dtype": "float8_e4m3fn", "window": 21},
}
MUTATIONS = {
    "parts that are added in pairs": (
        "return functools.reduce(add_part, parts, sums)",
        "return add_part(sums, functools.reduce(add_part, parts))",
    ),
    "parts that are added from the last": ("load_part(i * ORDERED_PARTS + n)", "load_part(num_parts - 1 - n)"),
    "a sink in a part": ("sums_of_sinks(sinks, is_alone,", "sums_of_sinks(sinks, index == first,"),
    "parts that a program joins": ("jnp.where(is_alone, end, index + 1), attend_part", "end, attend_part"),
}


class Texts:
    """Random texts in a pool, and the attention of chunks of them: a text, its first token and their number."""

    def __init__(
        self, kernels: Any = entry, *, group: int, page_dtype: str = "float32", has_sinks: bool = False, **options: Any
    ) -> None:
        generator, width = np.random.default_rng(0), -(-LENGTH // S)
        heads = K * group, K, K
        self.qkv = [generator.standard_normal((NUM_TEXTS, LENGTH, n, H), np.float32) for n in heads]
        self.tables = generator.permutation(NUM_TEXTS * width).reshape(NUM_TEXTS, width).astype(np.int32)
        places = np.arange(LENGTH)
        slots = self.tables[:, places // S] * S + places % S
        pages = init_pages(self.tables.size, S, K, H, page_dtype, "gpu", has_scales=page_dtype == "int8")
        scales: dict[str, Any] = {}
        if page_dtype == "float8_e4m3fn":
            scales = {name: generator.uniform(0.5, 2, K).astype(np.float32) for name in ("k_scale", "v_scale")}
        k, v = (x.reshape(-1, K, H) for x in self.qkv[1:])
        self.pages: Pages = jax.jit(write_kv)(pages, k, v, slots.reshape(-1), *scales.values())
        self.options = {**options, "sinks": generator.standard_normal(K * group, np.float32)} if has_sinks else options
        call = {"scale": H**-0.5, "interpret": True, "order": ORDER, **self.options, **scales}
        self._attend = jax.jit(functools.partial(by_name(kernels.paged_attention_gpu), **call), static_argnames="q_len")

    def attend(self, chunks: list[tuple[int, int, int]], q_len: int | None = None) -> list[np.ndarray]:
        T, B = {None: (160, 4), 1: (len(chunks), len(chunks))}[q_len]
        lens, rows = rows_of_chunks(chunks, self.tables, B)
        q = np.concatenate([self.qkv[0][i, first : first + n] for i, first, n in chunks])
        out, _ = self._attend(
            np.pad(q, ((0, T - len(q)), (0, 0), (0, 0))),
            None,
            None,
            self.pages,
            **rows,
            q_len=q_len,
        )
        return np.split(np.asarray(out), np.cumsum(lens))[: len(chunks)]


def check_bits(texts: Texts) -> np.ndarray:
    """Returns the attention of the first text, [LENGTH, N, H]."""
    (expected,) = texts.attend([(0, 0, LENGTH)])

    def check(result: np.ndarray, first: int, what: str) -> None:
        np.testing.assert_array_equal(result, expected[first : first + len(result)], what)

    for size in (1, 16, 100):
        for first in range(0, LENGTH, size if size > 1 else 37):
            n = min(size, LENGTH - first)
            check(texts.attend([(0, first, n)])[0], first, f"a chunk of {n} tokens")
            beside = [(1, 5, 20), (0, first, n), (2, 130, 1)]
            check(texts.attend(beside)[1], first, f"a chunk of {n} tokens beside others")
    for first in (0, 15, 31, 32, 64, 100, 149):
        check(texts.attend([(0, first, 1)], 1)[0], first, "decoding alone")
        check(
            texts.attend([(i, (first, 149, 3)[i], 1) for i in (2, 1, 0, 1, 2)], 1)[2], first, "decoding beside others"
        )
    return expected


@pytest.mark.parametrize("case", CASES)
def test_a_token_has_the_same_bits_alone_in_any_chunk_and_beside_any_rows(case):
    texts = Texts(**CASES[case])

    result = check_bits(texts)

    q, k, v = (x[0] for x in texts.qkv)
    expected = attention(q, k, v, H**-0.5, **texts.options)
    # Float32, but for pages of 8 bits: those of fp8 hold three bits after the first of a number.
    tolerance = {"int8": 0.03, "float8_e4m3fn": 0.15}.get(texts.pages.dtype.name, 1e-5)
    np.testing.assert_allclose(result, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", MUTATIONS)
def test_another_order_is_noticed(name):
    texts = Texts(mutant(FILES, *MUTATIONS[name]), **CASES["4 heads, window, soft cap, sinks"])

    with pytest.raises(AssertionError):
        check_bits(texts)


def cut_of(T: int, B: int, *, max_context: int, q_len: int | None = None, window: int | None = None) -> parts.Cut:
    """The cut of a call of 32 heads on 8 KV heads of 128 for an H200."""
    target, order = Target("NVIDIA H200", num_cores=132, capability=9.0), SumOrder()
    heads: dict[str, Any] = {"group": 4, "num_kv_heads": 8, "head_dim": 128, "page_dtype": "bfloat16"}
    sizes = sum_order.ordered_block_sizes(order, **heads, target=target)
    options = {"window": window, "max_context": max_context, "token_bytes": 4 * 32 * 130, "sizes": sizes}
    return cut_batch(T, B, q_len=q_len, block_q=16, order=order, **options)


@pytest.mark.parametrize("seed", range(6))
def test_each_part_of_a_tile_is_in_one_program_and_has_slots_of_its_own(seed):
    generator = np.random.default_rng(seed)
    q_lens = generator.integers(0, 20, 9)
    contexts = generator.choice([0, 900, 5000, 30000], 9) + q_lens
    cut = cut_of(int(q_lens.sum()) + 7, 9, max_context=32768, window=[None, 3000][seed % 2])
    starts = np.append(np.cumsum([0, *q_lens]), cut.T).astype(np.int32)
    index = jnp.arange(10, dtype=jnp.int32)
    kv_lens = jnp.append(jnp.asarray(contexts, jnp.int32), 0)
    rows = parts.cut_rows(index, jnp.asarray(starts[:-1]), jnp.asarray(starts[1:]), kv_lens, cut)

    @jax.jit
    @jax.vmap
    def find(i: jax.Array) -> Any:
        part = parts.find_part(rows, rows.tiles * rows.parts, i, cut)
        assert cut.order is not None
        keys = parts.keys_of(part.chunk, cut, has_tree=False)
        return part, *parts.parts_in_order(part, keys, cut.order)

    part, firsts, begins, ends = jax.tree.map(np.asarray, find(jnp.arange(cut.num_programs, dtype=jnp.int32)))
    covered: dict[tuple[int, int], list[int]] = {}
    slots: list[int] = []
    for i in range(cut.num_programs):
        row, offset, num_queries = (int(x[i]) for x in (part.chunk.row, part.chunk.offset, part.chunk.num_queries))
        own = range(int(begins[i]), int(ends[i]))
        if offset < num_queries:
            covered.setdefault((row, offset), []).extend(own)
        for n in own if part.num_parts[i] > 1 else ():
            first = int(part.first_slot[i]) + (n - int(firsts[i])) * num_queries
            slots += [first + query for query in range(offset, min(offset + cut.block_q, num_queries))]
    for row, (q_len, kv_len) in enumerate(zip(q_lens, contexts, strict=True)):
        for offset in range(0, q_len, cut.block_q):
            position = kv_len - q_len + offset
            start = 0 if cut.window is None else max(position - cut.window + 1, 0)
            end = min(position + cut.block_q, kv_len)
            assert sorted(covered[row, offset]) == list(range(start // 512, -(-end // 512)))
    assert slots
    assert len(set(slots)) == len(slots)
    assert max(slots) < cut.num_slots
    assert cut.num_slots * 4 * 32 * 130 <= MAX_PARTIAL_BYTES


def test_parts_of_a_prompt_that_would_take_too_much_memory_are_added_by_one_program():
    cut = cut_of(2048, 1, max_context=32768)
    index, starts, ends, kv_lens = (jnp.asarray(x, jnp.int32) for x in ([0, 1], [0, 2048], [2048, 2048], [32768, 0]))

    # 64 parts of 2,048 tokens would take 2.2 GB.
    assert parts.cut_rows(index, starts, ends, kv_lens, cut).parts.tolist() == [1, 1]
    assert cut_of(1, 1, q_len=1, max_context=512).num_slots == 0


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tree_mask": np.ones((1, 1), np.uint32)}, "tree_mask=an array"),
        ({"block_sizes": 1}, "block_sizes=1"),
        ({"prefill": "mosaic"}, "prefill=mosaic"),
    ],
)
def test_what_has_no_order_of_sums_is_refused_by_name(options, reason):
    call = make_call([(1, 5)], num_heads=2, num_kv_heads=1, head_dim=16, layout="gpu")
    attend_in_order = functools.partial(by_name(entry.paged_attention_gpu), scale=1.0, order=ORDER, interpret=True)

    with pytest.raises(NotImplementedError, match=f"{reason} is not supported with an order of sums"):
        attend_in_order(**call.arguments, **options)


def test_wide_heads_have_no_order_of_sums():
    call = make_call([(1, 5)], num_heads=1, num_kv_heads=1, head_dim=512, layout="gpu")

    with pytest.raises(NotImplementedError, match="head_dim=512 is not supported with an order of sums"):
        by_name(paged_attention)(**call.arguments, scale=1.0, order=ORDER, implementation="gpu_interpret")


@pytest.mark.parametrize("implementation", ["reference", "tpu", None])
def test_other_implementations_refuse_an_order_of_sums(implementation):
    call = make_call([(1, 5)], num_heads=2, num_kv_heads=1, head_dim=16)

    with pytest.raises(NotImplementedError, match="order is not supported by implementation="):
        by_name(paged_attention)(**call.arguments, scale=1.0, order=ORDER, implementation=implementation)


def test_parts_of_half_a_block_are_refused():
    with pytest.raises(ValueError, match="split_keys=48 must be a multiple of block_k=32"):
        SumOrder(split_keys=48)
