"""Block sizes come from the table of the device at hand, or else from rules; scripts/kernels/tune.py makes tables."""

from __future__ import annotations

import functools
import json
import math
import sys
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractMesh

from kernels_pallas import triton
from kernels_pallas.paged_attention import abstract_pages, tuned_tables
from kernels_pallas.paged_attention.gpu.block_sizes import gpu_block_sizes
from kernels_pallas.paged_attention.tpu.block_sizes import (
    INTERPRETED_BUFFERS,
    MAX_HELD_BYTES,
    Blocks,
    decode_blocks,
    ragged_blocks,
)
from kernels_pallas.paged_attention.tuned_tables import KEYS, TABLES, table_name, tuned_table
from kernels_pallas.triton import Target
from scripts.kernels import compile_gpu, compile_matrix, ratings, tune, tuning_candidates

CHIPS = ("v5e", "v5p", "v6e", "7x")
ENTRY = {"kernel": "decode", "page_dtype": "int8", "num_kv_heads": 1, "head_dim": 128, "num_groups": 4}
CHOICE = {"block_tokens": 1024, "buffers": 9}


@pytest.fixture
def chip(monkeypatch, tmp_path):
    """A TPU v6e with a table of one entry."""
    info = SimpleNamespace(
        chip_version=SimpleNamespace(value="v6e"), mem_bw_bytes_per_second=1.64e12, num_cores=1, mxu_column_size=256
    )
    monkeypatch.setattr(pltpu, "get_tpu_info", lambda: info)
    monkeypatch.setattr(tuned_tables, "TABLES", tmp_path)
    (tmp_path / "tpu_v6e.json").write_text(json.dumps({"entries": [ENTRY | CHOICE]}))
    tuned_table.cache_clear()
    yield
    tuned_table.cache_clear()


def pages_of(page_size=128, **changes):
    sizes = ENTRY | changes
    return abstract_pages(64, page_size, sizes["num_kv_heads"], sizes["head_dim"], sizes["page_dtype"], "tpu")


@pytest.mark.usefixtures("chip")
@pytest.mark.parametrize(("page_size", "table_width", "num_pages"), [(128, 64, 8), (32, 64, 32), (128, 3, 3)])
def test_a_tabled_choice_is_used_as_far_as_tables_are_wide(page_size, table_width, num_pages):
    assert decode_blocks(pages_of(page_size), table_width, 4) == Blocks(num_pages, 9)


@pytest.mark.usefixtures("chip")
@pytest.mark.parametrize(("changes", "num_groups"), [({}, 8), ({"page_dtype": "bfloat16"}, 4), ({"head_dim": 64}, 4)])
def test_what_is_not_tabled_goes_by_the_rules(changes, num_groups):
    pages = pages_of(**changes)

    blocks = decode_blocks(pages, 64, num_groups)

    # 3.28 MB answer two microseconds of 1.64 TB/s: one block of 512 tokens is computed with, the rest are under way.
    block_bytes = 512 * ratings.token_bytes({**ENTRY, **changes})
    assert blocks == Blocks(4, min(1 + math.ceil(3.28e6 / block_bytes), 12))


@pytest.mark.usefixtures("chip")
@pytest.mark.parametrize(
    ("num_kv_heads", "num_groups", "num_rows", "queries"),
    [(8, 4, 8, 128), (1, 8, 32, 128), (1, 8, 64, 64), (8, 8, 8, 64), (16, 32, 8, 8), (1, 1024, 8, 8)],
)
def test_a_tile_has_128_queries_unless_heads_or_rows_are_many(num_kv_heads, num_groups, num_rows, queries):
    (pool,) = pages_of(num_kv_heads=num_kv_heads).arrays

    blocks = ragged_blocks(pool, 64, 512, num_rows, num_kv_heads, num_groups, None, None)

    assert blocks.queries == queries


@pytest.mark.usefixtures("chip")
def test_rows_of_few_tokens_wait_for_memory_and_keep_more_of_it_busy():
    blocks = ragged_blocks(pages_of().arrays[0], 64, 160, 32, 8, 4, 5, None)

    assert blocks == Blocks(4, 12, 5, 256)


def test_without_a_tpu_no_table_is_read():
    assert decode_blocks(pages_of(), 64, 4) == Blocks(4, INTERPRETED_BUFFERS)


GPU = Target("NVIDIA H200", num_cores=132, capability=9.0)
GPU_CHOICE = {"block_k": 32, "num_warps": 8, "num_stages": 4}
GPU_CALL = {"num_kv_heads": 1, "head_dim": 128, "group": 4, "max_context": 4096, "has_tree": False, "num_rows": 64}


@pytest.fixture
def gpu_table(tmp_path, monkeypatch):
    """A table of one entry for an H200."""
    monkeypatch.setattr(tuned_tables, "TABLES", tmp_path)
    (tmp_path / "gpu_nvidia_h200.json").write_text(json.dumps({"entries": [ENTRY | GPU_CHOICE]}))
    tuned_table.cache_clear()
    yield
    tuned_table.cache_clear()


@pytest.mark.usefixtures("gpu_table")
def test_a_gpu_decodes_as_tabled_with_splits_and_tiles_by_rule():
    by_rule = gpu_block_sizes(**GPU_CALL, page_dtype="bfloat16", queries=1, target=GPU)

    tabled = gpu_block_sizes(**GPU_CALL, page_dtype="int8", queries=1, target=GPU)

    assert tabled == replace(by_rule, **GPU_CHOICE) != by_rule


@pytest.mark.usefixtures("gpu_table")
@pytest.mark.parametrize(("queries", "kind"), [(2, "NVIDIA H200"), (1, "NVIDIA H100 80GB HBM3")])
def test_other_calls_and_other_gpus_go_by_the_rules(queries, kind):
    target = GPU._replace(kind=kind)
    by_rule = gpu_block_sizes(**GPU_CALL, page_dtype="bfloat16", queries=queries, target=target)

    assert gpu_block_sizes(**GPU_CALL, page_dtype="int8", queries=queries, target=target) == by_rule


def test_a_gpu_at_hand_is_tuned_by_time_and_its_table_is_found_again(monkeypatch, tmp_path):
    """The kernel is interpreted; that its table is used on a GPU follows from the tests above."""
    small = ENTRY | {"page_dtype": "float32", "head_dim": 16}
    monkeypatch.setattr(tuned_tables, "TABLES", tmp_path)
    monkeypatch.setattr(tune, "shapes", lambda kernel: [small])
    monkeypatch.setattr(tuning_candidates, "GPU_CHOICES", {name: (value,) for name, value in GPU_CHOICE.items()})
    interpreted = functools.partial(compile_gpu.attention, q_len=1, num_tokens=2, num_rows=2, dtype="float32")
    monkeypatch.setattr(compile_gpu, "decode", functools.partial(interpreted, interpret=True))
    monkeypatch.setattr(triton, "target", lambda: GPU)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(sys, "argv", ["tune.py", "--by-time"])
    monkeypatch.setattr(tuning_candidates, "CONTEXTS", (256,))

    tune.main()

    (path,) = tmp_path.iterdir()
    assert path.name == f"{table_name(jax.devices()[0].device_kind)}.json"
    (entry,) = json.loads(path.read_text())["entries"]
    assert entry == small | GPU_CHOICE | {"seconds": entry["seconds"]}
    assert entry["seconds"] > 0


@pytest.mark.parametrize(("offset", "kernels"), [(0.0, {"triton", "mosaic"}), (1.0, {"triton"})])
def test_the_faster_kernel_for_prefill_is_tabled_if_its_results_are_those_of_the_other(
    monkeypatch, tmp_path, offset, kernels
):
    """Nothing is computed here; what goes by the name "mosaic" is off by the offset."""
    small = ENTRY | {"kernel": "ragged", "page_dtype": "float32", "head_dim": 16}
    decode = ENTRY | GPU_CHOICE
    monkeypatch.setattr(tuned_tables, "TABLES", tmp_path)
    path = tmp_path / f"{table_name(jax.devices()[0].device_kind)}.json"
    path.write_text(json.dumps({"entries": [decode]}))
    tuned_table.cache_clear()
    attention, timed = compile_gpu.attention, []

    def stand_in(mesh, *, prefill, num_rows, num_tokens, **sizes):
        def call(**arguments):
            timed.append(prefill)
            return jnp.full_like(arguments["q"], offset if prefill == "mosaic" else 0.0), arguments["pages"]

        case = attention(mesh, **sizes, num_rows=2, num_tokens=8, dtype="float32", interpret=True)
        return case._replace(function=call)

    monkeypatch.setattr(compile_gpu, "attention", stand_in)
    monkeypatch.setattr(tune, "shapes", lambda kernel: [small])
    monkeypatch.setattr(tuning_candidates, "CONTEXTS", (256,))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(sys, "argv", ["tune.py", "--by-time", "--kernel", "ragged"])

    tune.main()

    kept, chosen = json.loads(path.read_text())["entries"]
    assert kept == decode
    assert chosen == small | {"prefill": chosen["prefill"], "seconds": chosen["seconds"]}
    assert chosen["prefill"] in kernels
    assert {name for name in timed if timed.count(name) > 2} == kernels


@pytest.mark.parametrize(
    "make", [functools.partial(compile_gpu.decode, max_context=512), functools.partial(compile_matrix.decode_case)]
)
def test_what_is_timed_reads_no_page_twice_and_appends_each_token_to_a_page_of_its_own(make):
    mesh = AbstractMesh((1,), ("model",))
    case = make(mesh, num_heads=2, num_kv_heads=1, head_dim=16, page_size=128)

    arguments = tune.full_arguments(case)

    (num_rows, width), pages = arguments["block_tables"].shape, arguments["pages"]
    assert sorted(np.ravel(arguments["block_tables"])) == list(range(num_rows * width)) == list(range(pages.num_pages))
    assert set(np.ravel(arguments["kv_lens"])) == {width * pages.page_size}
    assert set(np.diff(arguments["cu_q_lens"])) == {1}


def test_a_device_that_cannot_be_measured_is_named(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["tune.py", "--by-time"])

    with pytest.raises(RuntimeError, match="needs one of .* or a GPU, not 'cpu'; leave --by-time out"):
        tune.main()


@pytest.mark.parametrize("chip_name", CHIPS)
def test_the_tables_have_choices_that_fit_for_every_shape_they_are_made_for(chip_name):
    tuned_table.cache_clear()
    table = tuned_table(f"tpu_{chip_name}")

    wanted = [tuple(shape[key] for key in KEYS) for shape in tune.shapes("decode")]
    assert sorted(table) == sorted(wanted)
    for entry in table.values():
        held = entry["block_tokens"] * entry["buffers"] * ratings.token_bytes(entry)
        assert entry["block_tokens"] % 128 == 0
        assert held <= MAX_HELD_BYTES


def test_a_table_says_what_it_was_made_by():
    for path in TABLES.glob("*.json"):
        head = json.loads(path.read_text())
        assert path.stem.partition("_")[2] == head["device"]
        assert {"date", "jax", "ranked_by"} <= set(head)
        assert "libtpu" in head or head["ranked_by"] == "time"


@pytest.mark.parametrize(("bundles", "expected"), [(100, 1.0), (4000, None)])
def test_a_choice_is_rated_by_what_takes_longer_reading_or_computing(bundles, expected):
    # A token of 8 heads of 128 has 4,096 bytes: 512 of them take 2,238 cycles of 1.75 GHz at 1,640 GB/s.
    shape = {"page_dtype": "bfloat16", "num_kv_heads": 8, "head_dim": 128, "num_groups": 4}
    if expected is None:
        parts = [-(-n // 512) * bundles / (n * 4096 * 1.75 / 1640) for n in ratings.CONTEXTS]
        expected = sum(parts) / len(parts)

    rated = ratings.rate_decode("v6e", shape, {"block_tokens": 512, "buffers": 4}, bundles)

    assert rated == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(("block_tokens", "times"), [(512, 0), (1024, 1)])
def test_a_loop_over_heads_counts_as_often_as_it_turns(block_tokens, times):
    # Eight pieces of up to 512 keys stand side by side: all 8 heads of a block of 512, or 4 of one of 1,024.
    figures = {"bundles": 1000, "inner_bundles": [600]}

    bundles = ratings.bundles_of_turn({"num_kv_heads": 8}, {"block_tokens": block_tokens}, figures)

    assert bundles == 1000 + times * 600


def test_prefill_is_rated_by_the_turns_of_the_loop_with_a_mask_and_of_the_one_without(monkeypatch):
    monkeypatch.setattr(ratings, "CHUNKS", (256,))
    monkeypatch.setattr(ratings, "TOKENS_BEFORE", (512,))
    shape = {"page_dtype": "bfloat16", "num_kv_heads": 8, "head_dim": 128, "num_groups": 4}
    figures = {"bundles": 2500, "inner_bundles": [400, 500]}

    rated = ratings.rate_ragged("v6e", shape, {"block_tokens": 512, "queries": 128}, figures, piece_rows=256)

    # Two tiles, each of two blocks, one without a mask; 8 heads of two pieces a block.
    cycles = 2 * (2 * (2500 - 900) / 2 + 16 * (400 + 500))
    flops = 4 * 32 * 128 * sum(range(513, 769))
    assert rated == pytest.approx(cycles / (flops / 918e12 * 1.75e9))
