"""The cache verbs: what is written is found again, layers and padding never touch what is not theirs."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.config import CacheConfig
from jaxinfer.model.batch import Row, make_batch
from jaxinfer.model.cache import (
    abstract_cache,
    extract_pages,
    init_cache,
    insert_pages,
    layer_offset,
    page_bytes,
    turn_pages,
)
from jaxinfer.model.components.attention import Attention
from jaxinfer.model.components.rope import Rope
from jaxinfer.model.config import LayerGroup, uniform_decoder
from kernels_pallas.paged_attention import paged_attention
from kernels_pallas.paged_attention.layout import read_pages
from scripts.kernels.named_calls import by_name

K, H, S, P = 2, 16, 16, 3
SIZES: dict[str, Any] = {
    **{"vocab_size": 2, "hidden_size": 2, "intermediate_size": 2, "num_layers": 5},
    **{"num_heads": K, "num_kv_heads": K, "head_dim": H, "max_position": 64, "layer_groups": (1, 4)},
}
CONFIG = uniform_decoder(**SIZES)
CACHE = CacheConfig(num_pages=P, page_size=S)
extract = jax.jit(functools.partial(extract_pages, config=CONFIG))
turn = jax.jit(functools.partial(turn_pages, config=CONFIG))
insert = jax.jit(functools.partial(insert_pages, config=CONFIG))


@functools.partial(jax.jit, static_argnames="has_keys")
def run_layer(group, q, k, v, batch, index, has_keys=True):
    """Appends keys and values, or does not, and attends at one layer of the group of 4."""
    return by_name(paged_attention)(
        q,
        k if has_keys else None,
        v if has_keys else None,
        group,
        block_tables=batch.block_tables,
        kv_lens=batch.kv_lens,
        cu_q_lens=batch.cu_q_lens,
        page_offset=layer_offset(group, index, 4),
        scale=1.0,
    )


def write_layer(group, k, v, batch, index):
    return run_layer(group, k, k, v, batch, index)[1]


def attend_layer(group, q, batch, index):
    return run_layer(group, q, q, q, batch, index, has_keys=False)[0]


def group_of_four():
    """The group of layers 1 to 4, NaN everywhere."""
    return jax.tree.map(lambda a: np.full(a.shape, np.nan, a.dtype), init_cache(CONFIG, CACHE).pools[1])


def draw(T):
    k, v = np.random.default_rng(0).standard_normal((2, T, K, H), dtype=np.float32)
    return jnp.asarray(k), jnp.asarray(v)


def written_pages(pool):
    """The pages of a pool in which anything was written, and how many numbers were."""
    is_written = np.isfinite(pool).reshape(pool.shape[0], -1)
    return set(np.flatnonzero(is_written.any(1)).tolist()), int(is_written.sum())


@pytest.mark.parametrize("layer", range(4))
def test_a_token_is_written_to_its_page_of_its_layer_and_nowhere_else(layer):
    batch = make_batch([Row([7, 8], 15, [1, 2])], page_size=S, num_tokens=2, num_rows=1, table_width=2)

    written = write_layer(group_of_four(), *draw(2), batch, layer)

    for pool in written.arrays:
        assert written_pages(pool) == ({layer * P + 1, layer * P + 2}, 2 * K * H)


@pytest.mark.parametrize("layer", range(4))
def test_padding_is_written_nowhere_in_any_layer(layer):
    batch = make_batch([], page_size=S, num_tokens=6, num_rows=2, table_width=2)

    written = write_layer(group_of_four(), *draw(6), batch, layer)

    assert all(np.isnan(pool).all() for pool in written.arrays)


def test_what_each_layer_wrote_is_what_it_attends_to():
    batch = make_batch([Row([7], 0, [2]), Row([8], 0, [0])], page_size=S, num_tokens=2, num_rows=2, table_width=1)
    values = [draw(2)[1] * (layer + 1) for layer in range(4)]
    group = group_of_four()
    for layer in range(4):
        group = write_layer(group, values[layer], values[layer], batch, layer)

    for layer in range(4):
        out = attend_layer(group, values[layer], batch, layer)
        # A context of one token attends to that token alone; w * v / w rounds twice.
        np.testing.assert_allclose(out, values[layer], rtol=1e-6)


def test_a_cast_to_the_cache_dtype_is_the_only_change():
    config = dataclasses.replace(CACHE, dtype="bfloat16")
    group = init_cache(CONFIG, config).pools[1]
    k, v = draw(1)
    batch = make_batch([Row([7], 3, [1])], page_size=S, num_tokens=1, num_rows=1, table_width=1)

    written = write_layer(group, k, v, batch, 2)

    for pool, tokens in zip(written.arrays, (k, v), strict=True):
        assert pool.dtype == jnp.bfloat16
        kept = np.asarray(pool[2 * P + 1].astype(jnp.float32))
        assert sorted(kept[kept != 0]) == sorted(np.asarray(tokens.astype(jnp.bfloat16).astype(jnp.float32)).ravel())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int8", "int4"])
@pytest.mark.parametrize("size", [16, 128])
def test_the_pool_is_page_bytes_times_pages(dtype, size):
    config = CacheConfig(num_pages=7, page_size=size, dtype=dtype)

    pools = jax.tree.leaves(abstract_cache(CONFIG, config))

    num_bytes = sum(pool.size * pool.dtype.itemsize for pool in pools)
    assert num_bytes == 7 * page_bytes(CONFIG, config)
    bytes_per_number = {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1, "int8": 1, "int4": 0.5}[dtype]
    scale_bytes = 4 * (dtype in ("int8", "int4"))
    # A CPU's vector has 16 numbers, also those of a byte with two of them.
    own_bytes = max(H * bytes_per_number, 16)
    bytes_per_slot = 2 * 5 * K * (own_bytes + scale_bytes) + 4  # and the token's id
    assert page_bytes(CONFIG, config) == size * bytes_per_slot


def test_the_pool_is_page_bytes_times_pages_for_a_head_dim_that_fills_no_vector():
    config = uniform_decoder(**dict(SIZES, head_dim=20))

    pools = jax.tree.leaves(abstract_cache(config, CACHE))

    assert sum(pool.size * 4 for pool in pools) == P * page_bytes(config, CACHE)
    assert page_bytes(config, CACHE) >= 2 * 5 * S * K * 20 * 4


def test_an_initial_cache_has_the_abstract_shapes_and_no_nan():
    cache = init_cache(CONFIG, CACHE)

    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), cache)
    assert shapes == abstract_cache(CONFIG, CACHE)
    assert [pool.num_pages for pool in cache.pools] == [1 * P, 4 * P]
    assert all(np.isfinite(pool).all() for pool in jax.tree.leaves(cache))


def test_a_pool_with_more_slots_than_can_be_counted_is_refused():
    too_many = CacheConfig(num_pages=2**31 // 4 // 128, page_size=128)

    with pytest.raises(ValueError, match=r"4 layers of 4194304 pages of 128 slots .* \(2147483647\); use fewer pages"):
        abstract_cache(CONFIG, too_many)


# ---- bundles


def numbered_cache(num_pages, layout, dtype="float32"):
    """A cache in which every number is another one."""
    cache = init_cache(CONFIG, dataclasses.replace(CACHE, num_pages=num_pages, dtype=dtype), layout)
    counts = iter(range(1, 100))
    return jax.tree.map(
        lambda a: jnp.asarray((np.arange(a.size).reshape(a.shape) % 251 + next(counts)).astype(a.dtype)), cache
    )


def pages_of(cache, num_pages) -> dict[Any, list[np.ndarray]]:
    """All numbers by layer and page: what `layer_offset` says is there."""
    pools = zip(cache.pools, CONFIG.layer_groups, strict=True)
    tokens: dict[Any, list[np.ndarray]] = {
        ("tokens", 0, page): [np.asarray(cache.tokens)[page]] for page in range(num_pages)
    }
    return tokens | {
        (group, layer, page): [np.asarray(a)[layer_offset(pool, layer, n) + page] for a in jax.tree.leaves(pool)]
        for group, (pool, n) in enumerate(pools)
        for layer in range(n)
        for page in range(num_pages)
    }


@pytest.mark.parametrize("layout", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize("dtype", ["float32", "int8", "int4"])
def test_a_bundle_put_into_another_pool_is_found_on_its_new_pages_and_nothing_else_changes(layout, dtype):
    source, target = numbered_cache(5, layout, dtype), numbered_cache(3, layout, dtype)
    bundle = extract(source, jnp.array([4, 1]))

    filled = insert(target, jnp.array([0, 2]), bundle)

    before, after, given = pages_of(target, 3), pages_of(filled, 3), pages_of(source, 5)
    for group, layer, page in after:
        from_page = {0: 4, 2: 1}.get(page)
        expected = before[group, layer, page] if from_page is None else given[group, layer, from_page]
        np.testing.assert_equal(after[group, layer, page], expected)


@pytest.mark.parametrize("layout", ["cpu", "gpu", "tpu"])
def test_a_page_past_the_pool_is_inserted_nowhere_not_even_in_the_next_layer(layout):
    cache = numbered_cache(3, layout)
    bundle = extract(numbered_cache(5, layout), jnp.array([4, 0]))

    filled = insert(cache, jnp.array([3, 2**30]), bundle)

    np.testing.assert_equal(pages_of(filled, 3), pages_of(cache, 3))


def test_a_page_past_the_pool_is_extracted_as_zeros():
    bundle = extract(numbered_cache(3, "cpu"), jnp.array([3]))

    assert not any(np.asarray(a).any() for a in jax.tree.leaves(bundle))


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "int8"])
def test_a_bundle_survives_the_way_over_the_host_bit_for_bit(dtype):
    cache = numbered_cache(4, "cpu", dtype)
    bundle = jax.device_get(extract(cache, jnp.array([0, 1, 2, 3])))

    empty = init_cache(CONFIG, dataclasses.replace(CACHE, num_pages=4, dtype=dtype))
    filled = insert(empty, jnp.array([0, 1, 2, 3]), bundle)

    np.testing.assert_equal(pages_of(filled, 4), pages_of(cache, 4))


def keys_and_values(pages, num_layers) -> tuple[np.ndarray, np.ndarray]:
    """Both as [layer, page, slot, head, H], whatever the layout."""
    k, v = read_pages(jax.tree.map(np.asarray, pages), np.arange(pages.num_pages))
    keys, values = np.asarray(k).transpose(0, 3, 1, 2)[..., :H], np.asarray(v).transpose(0, 2, 1, 3)[..., :H]
    by_layer = (num_layers, -1, S, K, H)
    return keys.reshape(by_layer).astype(np.float32), values.reshape(by_layer).astype(np.float32)


def test_keys_with_a_norm_after_their_rotation_are_not_turned():
    rope = Rope(dim=H, max_position=64)
    mixer = Attention(num_heads=K, num_kv_heads=K, head_dim=H, rope=rope, qk_norm="head", has_rotated_norm=True)
    layer = dataclasses.replace(CONFIG.layers[0], mixer=mixer)
    config = dataclasses.replace(CONFIG, groups=(LayerGroup((layer,), 5),))

    with pytest.raises(NotImplementedError, match="a norm after their rotation cannot be turned; leave out sinks"):
        turn_pages(init_cache(config, CACHE), np.array([0]), np.array([1]), 48, config=config)


@pytest.mark.parametrize(("layout", "dtype"), [("cpu", "float32"), ("gpu", "bfloat16"), ("tpu", "bfloat16")])
def test_turned_pages_have_the_keys_of_later_positions_and_nothing_else_changes(layout, dtype):
    cache, sources, targets = numbered_cache(5, layout, dtype), [4, 1, 0], [0, 2, 5]  # the last is past the pool
    turns = np.exp(48j * 10_000.0 ** (-np.arange(0, H, 2) / H))

    rotated = turn(cache, np.array(sources), np.array(targets), 48)

    for before, after, n in zip(cache.pools, rotated.pools, CONFIG.layer_groups, strict=True):
        (keys, values), (new_keys, new_values) = keys_and_values(before, n), keys_and_values(after, n)
        pairs = (keys[..., : H // 2] + 1j * keys[..., H // 2 :])[:, [4, 1]] * turns
        expected = np.concatenate([pairs.real, pairs.imag], axis=-1)
        # bfloat16 has 8 bits of mantissa, and a pair of numbers up to 251 has a length of up to 355.
        np.testing.assert_allclose(new_keys[:, [0, 2]], expected, rtol=0, atol=355 * (2**-8, 2**-20)[layout == "cpu"])
        np.testing.assert_equal(new_values[:, [0, 2]], values[:, [4, 1]])
    before, after = pages_of(cache, 5), pages_of(rotated, 5)
    is_written = {place: place[2] in (0, 2) for place in before}
    np.testing.assert_equal(
        [after[p] for p in after if not is_written[p]], [before[p] for p in before if not is_written[p]]
    )
    np.testing.assert_equal(after["tokens", 0, 2], before["tokens", 0, 1])


def test_bundles_run_under_jit_and_the_cache_is_written_in_place():
    cache = numbered_cache(4, "cpu")
    in_place = jax.jit(functools.partial(insert_pages, config=CONFIG), donate_argnums=0)
    expected = pages_of(cache, 4)

    bundle = extract(cache, jnp.array([2, 3]))
    compiled = in_place.lower(cache, jnp.array([1, 0]), bundle).compile()
    filled = pages_of(compiled(cache, jnp.array([1, 0]), bundle), 4)

    pool_bytes = 4 * page_bytes(CONFIG, CACHE)
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == pool_bytes
    for group, layer, page in filled:
        np.testing.assert_equal(filled[group, layer, page], expected[group, layer, {0: 3, 1: 2}.get(page, page)])
