"""Block sizes come from the table of the chip at hand, or else from rules; scripts/tune_kernels.py makes the tables."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from kernels_pallas.paged_attention import abstract_pages, block_sizes
from kernels_pallas.paged_attention.block_sizes import KEYS, TABLES, Blocks, decode_blocks, tuned_table
from kernels_pallas.paged_attention.tpu import VMEM_BYTES
from scripts import tune_kernels

CHIPS = ("v5e", "v6e")
ENTRY = {"kernel": "decode", "page_dtype": "int8", "num_kv_heads": 1, "head_dim": 128, "num_groups": 4}
CHOICE = {"block_tokens": 1024, "buffers": 9}


@pytest.fixture
def chip(monkeypatch, tmp_path):
    """A TPU v6e with a table of one entry."""
    info = SimpleNamespace(chip_version=SimpleNamespace(value="v6e"))
    monkeypatch.setattr(block_sizes.pltpu, "get_tpu_info", lambda: info)
    monkeypatch.setattr(block_sizes, "TABLES", tmp_path)
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
    assert decode_blocks(pages_of(**changes), 64, num_groups) == Blocks(4, block_sizes.DECODE_BUFFERS)


def test_without_a_tpu_no_table_is_read():
    assert decode_blocks(pages_of(), 64, 4) == Blocks(4, block_sizes.DECODE_BUFFERS)


@pytest.mark.parametrize("chip_name", CHIPS)
def test_the_tables_have_choices_that_fit_for_every_shape_they_are_made_for(chip_name):
    tuned_table.cache_clear()
    table = tuned_table(chip_name)

    wanted = [tuple({"kernel": "decode", **shape}[key] for key in KEYS) for shape in tune_kernels.shapes()]
    assert sorted(table) == sorted(wanted)
    for entry in table.values():
        held = entry["block_tokens"] * entry["buffers"] * tune_kernels.token_bytes(entry)
        assert entry["block_tokens"] % 128 == 0
        assert held <= VMEM_BYTES / 2


def test_a_table_says_what_it_was_made_by():
    for path in TABLES.glob("*.json"):
        head = json.loads(path.read_text())
        assert path.name == f"tpu_{head['device']}.json"
        assert {"date", "jax", "libtpu", "ranked_by"} <= set(head)


@pytest.mark.parametrize(("bundles", "expected"), [(100, 1.0), (4000, None)])
def test_a_choice_is_rated_by_what_takes_longer_reading_or_computing(bundles, expected):
    # A token of 8 heads of 128 has 4,096 bytes: 512 of them take 2,238 cycles of 1.75 GHz at 1,640 GB/s.
    shape = {"page_dtype": "bfloat16", "num_kv_heads": 8, "head_dim": 128, "num_groups": 4}
    if expected is None:
        parts = [-(-n // 512) * bundles / (n * 4096 * 1.75 / 1640) for n in tune_kernels.CONTEXTS]
        expected = sum(parts) / len(parts)

    rated = tune_kernels.slowdown("v6e", shape, {"block_tokens": 512, "buffers": 4}, bundles)

    assert rated == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(("block_tokens", "times"), [(512, 0), (1024, 1)])
def test_a_loop_over_heads_counts_as_often_as_it_turns(block_tokens, times):
    # Eight pieces of up to 512 keys stand side by side: all 8 heads of a block of 512, or 4 of one of 1,024.
    figures = {"bundles": 1000, "inner_bundles": [600]}

    bundles = tune_kernels.bundles_of_turn({"num_kv_heads": 8}, {"block_tokens": block_tokens}, figures)

    assert bundles == 1000 + times * 600
