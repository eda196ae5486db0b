"""Stages as functions: which layers they share, and the parts of a step's tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from jaxinfer.model.batch import PADDING_SLOT, Row, make_batch, make_decode_batch
from jaxinfer.model.components.attention import Attention
from jaxinfer.model.config import ModelConfig, uniform_decoder
from jaxinfer.model.params import abstract_params, shardings
from jaxinfer.model.stages import cut_step, for_stages, num_parts_of

SIZES: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "max_position": 256},
    **{"num_heads": 4, "num_kv_heads": 2, "head_dim": 8},
}
MESH: Any = AbstractMesh((2, 1, 1), ("stages", "experts", "model"))
PAGE_SIZE = 16


def model(windows: str, source: int | None = None) -> ModelConfig:
    """A decoder with a layer for each letter; w has a window. The last layer may read the keys of another."""
    config = uniform_decoder(num_layers=len(windows), **SIZES)

    def layer(i: int) -> Any:
        def change(mixer: Any) -> Attention:
            return replace(
                mixer,
                window=8 if windows[i] == "w" else None,
                source=source if source is not None and i == len(windows) - 1 else None,
            )

        return config.layers[i].map_mixers(change)

    layers = tuple(layer(i) for i in range(len(windows)))
    return replace(config, groups=tuple(replace(config.groups[0], layers=(own,), repeats=1) for own in layers))


@pytest.mark.parametrize(
    ("windows", "count", "scans", "pattern"),
    [
        ("ffff", 2, False, 2),
        ("ffff", 2, True, 1),
        ("fffff", 2, True, 1),
        ("fwfwfw", 3, False, 2),
        ("wfwfwfff", 2, True, 2),
        ("wffwff", 2, False, 3),
        ("fwwww", 2, True, 1),
        ("fw" + "wf" * 3, 3, True, 2),
    ],
)
def test_stages_share_the_longest_run_of_equal_parts(windows, count, scans, pattern):
    config = model(windows)
    parts = [
        (first, first + size * count)
        for size in range(len(windows) // count, 0, -1)
        for first in range(len(windows) - size * count + 1)
        if len({windows[first + i * size : first + (i + 1) * size] for i in range(count)}) == 1
    ]

    staged = for_stages(config, count, scans=scans)

    assert staged.layers == config.layers
    groups = [(len(group.layers), group.repeats) for group in staged.groups]
    (index,) = [i for i, (_, repeats) in enumerate(groups) if repeats > 1]
    assert staged.ends_of_groups[index : index + 2] == parts[0]
    assert groups[index][0] == pattern
    assert groups[index][1] % count == 0
    assert {group for i, group in enumerate(groups) if i != index} <= {(1, 1)}


def test_layers_that_read_the_keys_of_others_and_those_that_are_read_are_on_every_stage():
    staged = for_stages(model("ffffff", source=0), 2, scans=False)

    assert [len(group.layers) * group.repeats for group in staged.groups] == [1, 4, 1]


def test_layers_that_are_packed_in_other_ways_are_not_equal():
    staged = for_stages(model("ffff"), 2, scans=True, packings=["a", "b", "a", "b"])

    assert [(len(group.layers), group.repeats) for group in staged.groups] == [(2, 2)]


def test_stages_that_cannot_share_layers_are_refused_with_the_way_out():
    with pytest.raises(
        ValueError, match="stages=3 cannot share the 2 layers of this model: .*; the numbers that can are 1, 2$"
    ):
        for_stages(model("ff"), 3, scans=False)
    with pytest.raises(ValueError, match="the states after layer 2 are needed, .* layers 1 to 4 that stages=2 share"):
        for_stages(model("ffff"), 2, scans=False, cuts=[2])

    assert for_stages(model("ffffw"), 2, scans=False, cuts=[4]).num_layers == 5


def test_a_stage_holds_its_own_layers_and_all_hold_the_others():
    config = for_stages(model("fffff"), 2, scans=True)

    placed = abstract_params(config, "float32", shardings(config, MESH))

    shared, alone = placed.layers[0].mixer.q, placed.layers[1].mixer.q
    assert shared.sharding.shard_shape(shared.shape)[0] == 2
    assert alone.sharding.shard_shape(alone.shape)[0] == 1


@pytest.mark.parametrize(
    ("num_tokens", "count", "expected"),
    [(32, 2, 1), (256, 2, 2), (2048, 2, 8), (8192, 4, 16), (384, 4, 3), (257, 2, 1)],
)
def test_parts_have_as_many_tokens_each_and_not_too_few(num_tokens, count, expected):
    assert num_parts_of(num_tokens, count) == expected


@pytest.mark.parametrize("q_lens", [(3, 5, 600), (512, 1, 128), (1, 1, 1), (640,), (100, 400, 100)])
def test_the_parts_of_ragged_rows_are_those_of_steps_one_after_another(q_lens):
    starts = (40, 0, 7)[: len(q_lens)]
    tables = [list(range(48 * i, 48 * (i + 1))) for i in range(len(q_lens))]
    rows = [Row(list(range(n)), start, pages) for n, start, pages in zip(q_lens, starts, tables, strict=True)]
    sizes = {"page_size": PAGE_SIZE, "num_rows": 4, "table_width": 64}
    batch = make_batch(rows, num_tokens=768, **sizes)

    parts: Any = cut_step(batch, MESH, q_len=None, tree_mask=None, page_size=PAGE_SIZE, kind=None, slots=None)

    M, left = parts.batch.tokens.shape[0], list(rows)
    assert M == 6
    for m in range(M):
        part = jax.tree.map(np.asarray, parts.at(m)).batch
        room, expected = 128, []
        for i, row in enumerate(left):  # a step of 128 tokens computes as many of each row as it has room for
            taken = min(room, len(row.token_ids))
            expected.append(row._replace(token_ids=row.token_ids[:taken]))
            left[i] = row._replace(token_ids=row.token_ids[taken:], start=row.start + taken)
            room -= taken
        present = [(i, row) for i, row in enumerate(expected) if row.token_ids]
        step = make_batch([row for _, row in present], num_tokens=128, **sizes)
        for name in ("tokens", "positions", "slot_mapping"):
            np.testing.assert_array_equal(getattr(part, name), getattr(step, name))
        assert [(i, n) for i, n in enumerate(part.kv_lens.tolist()) if n] == [
            (i, int(n)) for (i, _), n in zip(present, step.kv_lens, strict=False)
        ]
        lens = np.diff(part.cu_q_lens)
        assert [int(lens[i]) for i, _ in present] == [len(row.token_ids) for _, row in present]
        assert lens.sum() == 128 - room


def test_the_parts_of_decoding_rows_are_rows():
    rng = np.random.default_rng(0)
    tables = rng.permutation(512).reshape(256, 2).astype(np.int32)
    batch = make_decode_batch(np.arange(200, dtype=np.int32), np.arange(200, dtype=np.int32) % 32, tables, PAGE_SIZE)

    parts: Any = cut_step(batch, MESH, q_len=1, tree_mask=None, page_size=PAGE_SIZE, kind=None, slots=None)

    assert parts.batch.tokens.shape == (2, 128)
    np.testing.assert_array_equal(parts.batch.kv_lens.reshape(-1), batch.kv_lens)
    np.testing.assert_array_equal(parts.batch.block_tables.reshape(256, 2), tables)
    np.testing.assert_array_equal(parts.batch.cu_q_lens[1], np.arange(129))
    assert (np.asarray(parts.batch.slot_mapping)[1, 72:] == PADDING_SLOT).all()
