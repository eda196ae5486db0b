"""The parts of GPU attention cover every key of every query once, and keep all places of a device busy to the end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels_pallas.paged_attention.gpu.block_sizes import gpu_block_sizes, heads_of_tile
from kernels_pallas.paged_attention.gpu.parts import MAX_PARTIAL_BYTES, Cut, cut_batch
from kernels_pallas.triton import Target
from scripts.kernels.simulate_grid import against_ideal, makespan, program_blocks, program_parts

H200 = Target("NVIDIA H200", num_cores=132, capability=9.0)
PLACES = 2 * 132  # programs that run at once, PROGRAMS_PER_CORE on each multiprocessor
K, G, H = 8, 4, 128


def cut_of(T: int, B: int, *, max_context: int, q_len: int | None = None, window: int | None = None) -> Cut:
    """The cut of a call of 32 heads on 8 KV heads of 128, as `entry.attend_rows` chooses it."""
    queries, num_rows = (q_len, B) if q_len else (min(T, 128), T // 128 + 1)
    sizes: Any = gpu_block_sizes(
        num_rows=num_rows,
        queries=queries,
        group=G,
        num_kv_heads=K,
        head_dim=H,
        page_dtype="bfloat16",
        max_context=max_context,
        has_tree=False,
        target=H200,
    )
    block_q = sizes.block_m // heads_of_tile(G, sizes.block_m)
    return cut_batch(
        T,
        B,
        q_len=q_len,
        block_q=block_q,
        window=window,
        max_context=max_context,
        token_bytes=4 * K * G * (H + 2),
        sizes=sizes,
    )


def ratio(cut: Cut, q_lens: list[int], kv_lens: list[int]) -> float:
    return against_ideal(program_blocks(cut, q_lens, kv_lens, K), PLACES)


@pytest.mark.parametrize("tokens", [1024, 2048, 4096, 8192, 16384, 32768])
def test_prefill_of_a_prompt_keeps_a_device_busy_to_the_end(tokens):
    assert ratio(cut_of(tokens, 1, max_context=131072), [tokens], [tokens]) <= 1.05
    # In a step of 2,048 tokens, after what was computed before.
    if tokens >= 2048:
        assert ratio(cut_of(2048, 16, max_context=131072), [2048], [tokens]) <= 1.05


@pytest.mark.parametrize("num_rows", [8, 64, 128, 256])
@pytest.mark.parametrize("place", [0.0, 0.5, 1.0])
def test_one_long_row_holds_up_no_decode_step(num_rows, place):
    kv_lens = [2048] * num_rows
    kv_lens[int(place * (num_rows - 1))] = 131072

    assert ratio(cut_of(num_rows, num_rows, q_len=1, max_context=131072), [1] * num_rows, kv_lens) <= 1.3


@pytest.mark.parametrize("own", [16, 128, 512])
@pytest.mark.parametrize("place", [0, 15])
def test_one_long_row_holds_up_no_prefill_step(own, place):
    q_lens, kv_lens = [(2048 - own) // 15] * 16, [2048] * 16
    q_lens[place], kv_lens[place] = own, 131072

    assert ratio(cut_of(2048, 16, max_context=131072), q_lens, kv_lens) <= 1.3


@pytest.mark.parametrize("seed", range(6))
def test_every_block_that_a_tile_sees_is_in_one_part_and_partial_results_have_slots_of_their_own(seed):
    generator = np.random.default_rng(seed)
    q_lens = generator.integers(0, 60, 9).tolist()
    kv_lens = [q + int(n) for q, n in zip(q_lens, generator.choice([0, 900, 5000, 60000], 9), strict=True)]
    window = [None, 3000][seed % 2]
    cut = cut_of(sum(q_lens) + 7, 9, max_context=65536, window=window)
    found = program_parts(cut, q_lens, kv_lens)

    covered: dict[tuple[int, int], list[int]] = {}
    slots: list[int] = []
    for part, lo, hi in found:
        chunk = part.chunk
        covered.setdefault((int(chunk.row), int(chunk.offset)), []).extend(range(lo, hi))
        if part.num_parts > 1:
            own = range(int(chunk.offset), min(int(chunk.offset) + cut.block_q, int(chunk.num_queries)))
            slots += [int(part.first_slot) + int(part.index) * int(chunk.num_queries) + i for i in own]
    for row, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        for offset in range(0, q_len, cut.block_q):
            first = kv_len - q_len + offset
            start = 0 if window is None else max(first - window + 1, 0)
            end = min(first + cut.block_q, kv_len)
            blocks = range(start // cut.sizes.block_k, -(-end // cut.sizes.block_k))
            assert sorted(covered[row, offset]) == list(blocks)
    assert len(set(slots)) == len(slots)
    assert max(slots, default=-1) < cut.num_slots
    assert cut.num_slots * 4 * K * G * (H + 2) <= MAX_PARTIAL_BYTES


def test_the_next_program_runs_on_the_first_free_place():
    #  place 0: 4 | 1 |    place 1: 2 | 2 | 2
    assert makespan([4, 2, 2, 1, 2], 2) == 6
