"""The states of recurrent layers in the cache: the slots of a step, and pages taken out and put back."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.config import CacheConfig
from jaxinfer.model.batch import PADDING_SLOT, Row, make_batch
from jaxinfer.model.cache import abstract_cache, extract_pages, init_cache, insert_pages, move_tokens, page_bytes
from jaxinfer.model.components.attention import Attention
from jaxinfer.model.components.mlp import MLP
from jaxinfer.model.components.recurrent.gated_delta_net import GatedDeltaNet
from jaxinfer.model.components.recurrent.selective_scan import SelectiveScan
from jaxinfer.model.components.recurrent.state_space import StateSpace
from jaxinfer.model.components.recurrent.states import slots_of_layer, state_slots
from jaxinfer.model.config import Branch, Layer, LayerGroup, ModelConfig
from jaxinfer.model.decoder import forward
from jaxinfer.model.params import abstract_params

S = 16
STATE_SPACE = StateSpace(num_heads=6, head_dim=10, num_groups=2, state_size=13, conv_size=4)
DELTA_NET = GatedDeltaNet(num_key_heads=3, num_value_heads=6, key_head_dim=13, value_head_dim=10, conv_size=4)
ATTENTION = Attention(num_heads=2, num_kv_heads=1, head_dim=16)
SCAN = SelectiveScan(inner_size=51, state_size=13, time_step_rank=3, conv_size=4)
# A model with a pool of each kind, layers of one half, and one with two mixers.
LAYERS = (
    Layer(mixer=STATE_SPACE, feed_forward=None),
    Layer(mixer=ATTENTION, feed_forward=None),
    Layer(mixer=DELTA_NET, feed_forward=MLP(intermediate_size=44)),
    Layer(mixer=None, feed_forward=MLP(intermediate_size=44, activation="relu2")),
    Layer(mixer=(Branch(mixer=ATTENTION), Branch(mixer=SCAN, input_scale=0.5, output_scale=1.5)), feed_forward=None),
)
MODEL = ModelConfig(vocab_size=61, hidden_size=36, max_position=256, groups=(LayerGroup(LAYERS, 2),))


def test_a_step_reads_the_slot_of_the_token_before_and_writes_at_the_ends_of_pages_and_rows():
    rows = [
        Row([0] * 20, 14, [7, 3, 9]),  # positions 14 to 33
        Row([0] * 2, 0, [5]),
        Row([0], 16, [2, 8]),  # at the start of a page, after the snapshot of the one before
    ]
    batch = make_batch(rows, page_size=S, num_tokens=26, num_rows=5, table_width=3)

    slots = jax.jit(functools.partial(state_slots, page_size=S, kind=0))(batch)

    none = PADDING_SLOT
    np.testing.assert_array_equal(slots.reads, [7, none, 2, none, none])
    expected = np.full(26, none)
    expected[[1, 17, 19, 21, 22]] = [7, 3, 9, 5, 8]
    np.testing.assert_array_equal(slots.writes, expected)


def test_padding_of_a_decode_step_reads_and_writes_no_slot_of_any_layer():
    batch = make_batch([Row([0], 31, [4, 6])], page_size=S, num_tokens=3, num_rows=3, table_width=2)

    slots = slots_of_layer(state_slots(batch, S, 0), 100)

    np.testing.assert_array_equal(slots.reads, [106, PADDING_SLOT, PADDING_SLOT])
    np.testing.assert_array_equal(slots.writes, [106, PADDING_SLOT, PADDING_SLOT])


def filled_cache(num_pages: int) -> Any:
    """Returns a cache of random numbers."""
    draw = np.random.default_rng(5)
    cache = init_cache(MODEL, CacheConfig(num_pages=num_pages, page_size=S))
    return jax.tree.map(lambda a: jnp.asarray(draw.standard_normal(a.shape) * 9, a.dtype), cache)


def test_pages_take_their_states_along_in_every_layer():
    source, target = filled_cache(5), filled_cache(4)

    bundle = extract_pages(source, jnp.asarray([3, 1, 99]), config=MODEL)
    moved = insert_pages(target, jnp.asarray([0, 2, 99]), bundle, config=MODEL)

    for before, ours, theirs in zip(*map(jax.tree.leaves, (source.pools, moved.pools, target.pools)), strict=True):
        old, new, kept = (np.asarray(a).reshape(2, a.shape[0] // 2, *a.shape[1:]) for a in (before, ours, theirs))
        np.testing.assert_array_equal(new[:, [0, 2]], old[:, [3, 1]])
        np.testing.assert_array_equal(new[:, [1, 3]], kept[:, [1, 3]])


def test_moved_tokens_leave_states_where_they_are():
    cache = filled_cache(4)

    batch: Any = SimpleNamespace(slot_mapping=jnp.asarray([5, 40]), bounded_tables=())
    moved = move_tokens(cache, batch, jnp.asarray([0, 0]), jnp.asarray([False, True]), config=MODEL)

    for before, after, stack in zip(cache.pools, moved.pools, MODEL.mixer_stacks, strict=True):
        pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
        assert all(np.array_equal(*pair) for pair in pairs) == (stack.kind == MODEL.state_kind)


def test_a_page_has_a_float32_state_for_each_recurrent_layer():
    cache_config = CacheConfig(num_pages=7, page_size=S, dtype="bfloat16")

    windows = 3 * (STATE_SPACE.num_channels + DELTA_NET.num_channels + 51)
    states = (windows + 6 * 13 * 10 + 6 * 13 * 10 + 13 * 51) * 4
    # Keys and values of two layers, and tokens.
    assert page_bytes(MODEL, cache_config) == 2 * (states + 2 * S * 2 * 16 * 2) + S * 4


def test_a_tree_of_drafts_is_refused():
    batch = make_batch([], page_size=S, num_tokens=4, num_rows=2, table_width=1)
    arrays = abstract_params(MODEL, jnp.float32), abstract_cache(MODEL, CacheConfig(num_pages=1, page_size=S)), batch
    mask = jax.ShapeDtypeStruct((4, 1), np.uint32)

    with pytest.raises(NotImplementedError, match="tree of drafts"):
        jax.eval_shape(lambda *args: forward(*args[:3], config=MODEL, tree_mask=args[3]), *arrays, mask)
