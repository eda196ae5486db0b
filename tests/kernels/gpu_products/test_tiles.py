"""Tiles of dense products: room in shared memory, enough bytes on their way, and one choice by the weights if exact."""

from __future__ import annotations

import json
import math

import jax
import pytest

from kernels_pallas.device import HOPPER
from kernels_pallas.gpu_compiler import GPUS
from kernels_pallas.gpu_products.tiles import needed_bytes, product_tile, takes_inputs
from kernels_pallas.gpu_products.xla_options import xla_tile
from kernels_pallas.paged_attention import tuned_tables
from kernels_pallas.triton import Target
from scripts.kernels import compile_gpu, tune, tuning_candidates

TARGETS = {
    name: Target(GPUS[name].kind, GPUS[name].num_cores, capability)
    for name, capability in (("A100", 8.0), ("L4", 8.9), ("H100", 9.0), ("H200", 9.0))
}
SHAPES = [(sizes, rows) for sizes in compile_gpu.DENSE_WEIGHTS for rows in (1, 8, 16, 17, 64, 65, 256)]


def tile_of(target, sizes, rows, itemsize=2, **options):
    parts, channels, inputs = sizes
    numbers = {"rows": rows, "channels": channels, "inputs": inputs, "parts": parts, "itemsize": itemsize}
    return product_tile(target, **numbers, **options)


@pytest.mark.parametrize("itemsize", [1, 2])
@pytest.mark.parametrize("name", TARGETS)
def test_blocks_under_way_have_room_and_divide_the_inputs(name, itemsize):
    target, gpu = TARGETS[name], GPUS[name]
    for sizes, rows in SHAPES:
        tile = tile_of(target, sizes, rows, itemsize)
        held = tile.num_stages - (0 if target.capability >= HOPPER else 1)
        block = tile.block_inputs * (sizes[0] * tile.block_channels * itemsize + 2 * tile.block_rows)

        assert held * block <= gpu.shared_per_block, (sizes, rows, tile)
        assert tile.num_stages >= 3
        assert sizes[2] % tile.block_inputs == 0
        assert tile.block_rows >= min(rows, 64)


@pytest.mark.parametrize("group_size", [32, 64, 128, 256])
@pytest.mark.parametrize("itemsize", [0.5, 1])
@pytest.mark.parametrize("name", TARGETS)
def test_blocks_have_whole_groups_and_room(name, itemsize, group_size):
    target, gpu = TARGETS[name], GPUS[name]
    for sizes in compile_gpu.DENSE_WEIGHTS:
        for rows in (1, 16, 64):
            tile = tile_of(target, sizes, rows, itemsize, group_size=group_size)
            block = tile.block_inputs * (sizes[0] * tile.block_channels * itemsize + 2 * tile.block_rows)

            assert tile.block_inputs % group_size == 0
            assert sizes[2] % tile.block_inputs == 0
            assert (tile.num_stages - (0 if target.capability >= HOPPER else 1)) * block <= gpu.shared_per_block


def bytes_under_way(target, gpu, sizes, programs, block_bytes, program_bytes, stages):
    """Of the weights, on the whole device: one block of a program is in use."""
    fitting = max(gpu.shared_per_core // program_bytes, 1)
    return min(programs, fitting * target.num_cores) * (stages - 1) * block_bytes


@pytest.mark.parametrize("name", TARGETS)
def test_few_rows_have_more_bytes_under_way_than_in_xlas_tile_or_as_many_as_memory_sends(name):
    target, gpu = TARGETS[name], GPUS[name]
    for sizes in compile_gpu.DENSE_WEIGHTS:
        parts, channels, _inputs = sizes
        for rows in (1, 8, 16):
            tile, by_xla = tile_of(target, sizes, rows), xla_tile(target.capability, rows, 2)
            block = parts * tile.block_channels * tile.block_inputs * 2
            held = tile.num_stages - (0 if target.capability >= HOPPER else 1)
            program = held * (block + 2 * tile.block_rows * tile.block_inputs)
            programs = math.ceil(channels / tile.block_channels)
            own = bytes_under_way(target, gpu, sizes, programs, block, program, tile.num_stages)
            # XLA multiplies by both parts as one weight.
            programs = math.ceil(parts * channels / by_xla.block_m)
            block = by_xla.block_m * by_xla.block_k * 2
            program = by_xla.num_stages * (block + 2 * by_xla.block_n * by_xla.block_k)
            others = bytes_under_way(target, gpu, sizes, programs, block, program, by_xla.num_stages)

            assert own >= min(others, needed_bytes(target) * target.num_cores / 1.5), (sizes, rows, own, others)


def test_a_block_has_a_third_of_the_multiprocessors_idle_at_most_where_the_channels_are_enough():
    target = TARGETS["H200"]

    channels = {sizes: tile_of(target, sizes, 8).block_channels for sizes in compile_gpu.DENSE_WEIGHTS}

    assert [channels[sizes] for sizes in compile_gpu.DENSE_WEIGHTS] == [64, 32, 64, 32, 32, 16, 32, 16]


def test_exact_products_choose_their_channels_and_so_their_instruction_by_the_weights_alone():
    for target in TARGETS.values():
        for sizes in compile_gpu.DENSE_WEIGHTS:
            tiles = {tile_of(target, sizes, rows, is_exact=True) for rows in (1, 8, 64, 65, 256, 2048)}
            assert len({tile.block_channels for tile in tiles}) == 1


def test_inputs_that_no_block_of_32_divides_are_for_xla():
    assert [takes_inputs(inputs) for inputs in (4096, 2880, 896, 96, 80, 4104)] == [
        True,
        True,
        True,
        True,
        False,
        False,
    ]


@pytest.fixture
def tables(monkeypatch, tmp_path):
    monkeypatch.setattr(tuned_tables, "TABLES", tmp_path)
    tuned_tables.tuned_products.cache_clear()
    tuned_tables.tuned_table.cache_clear()
    yield tmp_path
    tuned_tables.tuned_products.cache_clear()
    tuned_tables.tuned_table.cache_clear()


def test_a_table_of_the_kind_of_gpu_comes_before_the_rules_for_its_rows_and_weights_alone(tables):
    tile = {"block_channels": 16, "block_rows": 64, "block_inputs": 32, "num_stages": 5, "num_warps": 8}
    sizes = compile_gpu.DENSE_WEIGHTS[0]
    key = {"itemsize": 2, "parts": sizes[0], "channels": sizes[1], "inputs": sizes[2]}
    entry = {"kernel": "product", "rows": 64, **key, **tile, "seconds": 1e-3}
    (tables / "gpu_nvidia_h200.json").write_text(json.dumps({"entries": [entry]}))

    target, other = TARGETS["H200"], TARGETS["H100"]
    for rows, itemsize, is_exact in ((33, 2, False), (64, 2, False), (16, 2, False), (64, 1, False), (64, 2, True)):
        found = tile_of(target, sizes, rows, itemsize, is_exact=is_exact)
        is_own = 32 < rows <= 64 and itemsize == 2 and not is_exact
        assert (found._asdict() == tile) == is_own
    assert tile_of(other, sizes, 64)._asdict() != tile
    assert tile_of(target, compile_gpu.DENSE_WEIGHTS[1], 64)._asdict() != tile


def test_tiles_are_ranked_by_time_and_written_beside_the_kernels_entries(monkeypatch, tables):
    """Interpreted on CPU, where any may win."""
    other = {"kernel": "decode", "page_dtype": "int8", "num_kv_heads": 1, "head_dim": 128, "num_groups": 4}
    path = tables / f"{tuned_tables.table_name(jax.devices()[0].device_kind)}.json"
    path.write_text(json.dumps({"entries": [other]}))
    monkeypatch.setattr(compile_gpu, "DENSE_WEIGHTS", ((1, 32, 64), (2, 16, 32)))
    monkeypatch.setattr(compile_gpu, "DENSE_ROWS", (16, 256))
    monkeypatch.setattr(tune, "LARGEST_CACHE", 1000)
    tiles = {"block_channels": (16, 32), "block_inputs": (32,), "num_stages": (3,)}
    monkeypatch.setattr(tuning_candidates, "TILES", tiles)
    monkeypatch.setattr(tune, "device_at_hand", lambda kernel: path.stem)
    monkeypatch.setattr("sys.argv", ["tune.py", "--by-time", "--kernel", "product"])

    tune.main()

    kept, *found = json.loads(path.read_text())["entries"]
    assert kept == other
    assert [(e["block_rows"], e["parts"], e["inputs"]) for e in found] == [
        (16, 1, 64),
        (128, 1, 64),
        (16, 2, 32),
        (128, 2, 32),
    ]
    assert all(entry["block_channels"] in (16, 32, 64) and entry["seconds"] > 0 for entry in found)
    tuned_tables.tuned_products.cache_clear()
    assert tuned_tables.tuned_products(path.stem)[16, 2, 1, 32, 64] == found[0]


def test_tiles_are_measured_and_never_rated_by_a_compiler(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["tune.py", "--kernel", "product"])

    with pytest.raises(SystemExit):
        tune.main()

    assert "--kernel product needs --by-time" in capsys.readouterr().err
