"""Latent attention against a formula, its cache, and its bits in any step."""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.checkpoint.families import family_of
from jaxinfer.config import CacheConfig
from jaxinfer.model.batch import Row, StepTokens, make_batch
from jaxinfer.model.cache import init_cache, move_tokens, page_bytes, turn_pages
from jaxinfer.model.components.latent_attention import LatentAttention, attend_to_latents
from jaxinfer.model.components.mixer_inputs import MixerInputs, StepContext, with_angles
from jaxinfer.model.components.mlp import MLP
from jaxinfer.model.components.rope import Rope
from jaxinfer.model.config import RMS_NORM, Layer, LayerGroup, ModelConfig
from kernels_pallas.latent_attention import abstract_latents, latent_attention
from scripts.kernels.named_calls import by_name
from tests.oracles import LATENT, MOE, SIZES
from tests.replay import lively_params, nan_cache, poisoned, replay

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}
# No size is a multiple of the vectors of a CPU.
ATTENTION = LatentAttention(
    num_heads=3,
    q_lora_rank=20,
    kv_lora_rank=28,
    qk_nope_head_dim=10,
    qk_rope_head_dim=6,
    v_head_dim=14,
    rope=Rope(dim=6, max_position=256, is_interleaved=True),
)
D, S = 36, 16


def model_of(attention: LatentAttention, hidden_size: int = D) -> ModelConfig:
    layer = Layer(mixer=attention, feed_forward=MLP(intermediate_size=44))
    return ModelConfig(
        vocab_size=61,
        hidden_size=hidden_size,
        max_position=256,
        groups=(LayerGroup((layer,), 1), LayerGroup((layer,), 2)),
    )


MODEL = model_of(ATTENTION)


def rotated(x, positions, rope):
    """x [T, heads, r], neighbours of which are turned as pairs."""
    angles = positions[:, None, None] * rope.theta ** (-np.arange(0, rope.dim, 2) / rope.dim)
    turned = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)
    return np.stack([turned.real, turned.imag], -1).reshape(x.shape)


def naive_attention(params, x, config):
    """The output of the layer for x [T, D], with a key and a value per head, by definition."""

    def normed(y, weight):
        return y / np.sqrt((y * y).mean(-1, keepdims=True) + config.norm.epsilon) * weight

    p: dict[str, Any] = {name: None if w is None else np.asarray(w[0], np.float64) for name, w in vars(params).items()}
    R, H, positions = config.kv_lora_rank, config.qk_nope_head_dim, np.arange(len(x))
    q = np.einsum("nhq,tq->tnh", p["q_up"], normed(x @ p["q_down"].T, p["q_norm"]))
    down = x @ p["kv_down"].T
    latents = normed(down[:, :R], p["kv_norm"])
    shared = rotated(down[:, None, R:], positions, config.rope)
    keys = np.einsum("nhr,tr->tnh", p["k_up"], latents)
    keys = np.concatenate([keys, np.broadcast_to(shared, (*keys.shape[:2], shared.shape[-1]))], -1)
    q = np.concatenate([q[..., :H], rotated(q[..., H:], positions, config.rope)], -1)
    scores = np.einsum("tnh,snh->nts", q, keys) / math.sqrt(q.shape[-1])
    weights = np.exp(np.where(np.tri(len(x), dtype=bool), scores, -np.inf))
    weights /= weights.sum(-1, keepdims=True)
    values = np.einsum("nrv,tr->tnv", p["v_up"], latents)
    return np.einsum("nts,snv->tnv", weights, values).reshape(len(x), -1) @ p["o"].T


def test_absorbed_queries_attend_as_queries_do_to_the_keys_and_values_of_each_head():
    T = 40
    params = lively_params(MODEL).layers[0].mixer
    x = np.random.default_rng(1).standard_normal((T, D), dtype=np.float32)
    batch = make_batch([Row([0] * T, 0, [2, 0, 3])], page_size=S, num_tokens=T, num_rows=1, table_width=3)
    pages: Any = nan_cache(MODEL, CacheConfig(num_pages=4, page_size=S)).pools[0]

    @jax.jit
    def run(params, pages, x, batch):
        inputs = MixerInputs(with_angles(StepContext(batch), [ATTENTION]), StepTokens(jnp.asarray(T)))
        own = jax.tree.map(lambda w: w[0], params)
        return attend_to_latents(own, pages, x, inputs, config=ATTENTION, norm=RMS_NORM)[0]

    # Outputs of order 1, in float32 against float64.
    np.testing.assert_allclose(run(params, pages, x, batch), naive_attention(params, x, ATTENTION), rtol=0, atol=1e-5)


BIT_CASES = {
    "odd sizes": (ATTENTION, D),
    "sizes of two vectors, 16 heads": (
        LatentAttention(
            **{"num_heads": 16, "q_lora_rank": None, "kv_lora_rank": 64, "qk_nope_head_dim": 32},
            **{"qk_rope_head_dim": 16, "v_head_dim": 32, "rope": Rope(dim=16, max_position=256)},
        ),
        128,
    ),
}


@pytest.mark.bits
@pytest.mark.parametrize("name", BIT_CASES)
def test_logits_are_the_same_bits_for_any_split(name):
    config, T = model_of(*BIT_CASES[name]), 75
    sequences = list(np.random.default_rng(1).integers(0, config.vocab_size, (9, T), dtype=np.int32))
    run = functools.partial(replay, lively_params(config), sequences, config=config, page_size=S)
    expected = run([[(0, T)]], shape=(T, 8))[0]

    def check(steps, shape, q_len=None):
        logits = run(steps, shape=shape, q_len=q_len)[0]
        np.testing.assert_array_equal(logits, expected[: len(logits)], err_msg=f"{steps[:2]} {shape} {q_len}")

    for size in (2, 7, 8, 31, 32, 33):
        sizes = [min(size, T - first) for first in range(0, T, size)]
        check([[(0, n)] for n in sizes], (T, 8))
        check([[(1, 1), (0, n), (2, min(n, 13))] for n in sizes[:3]], (T, 8))
    check([[(0, 8)] for _ in range(T // 8)], (8, 1))
    check([[(0, 1)]] * T, (1, 1), 1)
    check([[(i, 1) for i in reversed(range(9))]] * 40, (9, 9), 1)
    check([[(i, 1) for i in reversed(range(8))]] * 40, (8, 8), 1)
    for count in (1, 4, 9):
        check([[(1, count), (0, count + 1)]] * (T // (count + 1)), (2 * count + 2, 2), count + 1)


@pytest.mark.bits
def test_a_draft_in_a_tree_attends_as_it_does_at_the_end_of_its_own_path():
    context, parents = 21, (-1, 0, 0, 1, 2, 2)  # of the row's 6 tokens, the first of which is no draft
    generator = np.random.default_rng(3)
    pages: Any = jax.tree.map(lambda a: poisoned(jnp.zeros(a.shape, a.dtype)), abstract_latents(4, S, 28, 6, "float32"))
    q = generator.standard_normal((context + 6, 3, 34), dtype=np.float32)
    latents = generator.standard_normal((context + 6, 34), dtype=np.float32)
    tables = jnp.asarray([[2, 0, 3]])

    @functools.partial(jax.jit, static_argnames="q_len")
    def attend(pages, rows, kv_len, q_len, tree_mask=None):
        arrays = {"block_tables": tables, "kv_lens": kv_len[None], "cu_q_lens": jnp.asarray([0, len(rows)])}
        options = {"scale": 0.2, "q_len": q_len, "tree_mask": tree_mask}
        return by_name(latent_attention)(jnp.asarray(q)[rows], jnp.asarray(latents)[rows], pages, **arrays, **options)

    _, pages = attend(pages, jnp.arange(context), jnp.asarray(context), None)
    paths = []
    for parent in parents:
        paths.append([*(paths[parent] if parent >= 0 else []), len(paths)])
    mask = jnp.asarray([[sum(1 << i for i in path)] for path in paths], jnp.uint32)
    together, _ = attend(pages, context + jnp.arange(6), jnp.asarray(context + 6), 6, mask)

    for token, path in enumerate(paths):
        alone, own = None, pages
        for length, i in enumerate(path):
            alone, own = attend(own, jnp.asarray([context + i]), jnp.asarray(context + length + 1), 1)
        assert alone is not None
        np.testing.assert_array_equal(together[token], alone[0])


@pytest.mark.parametrize(("dtype", "num_bytes"), [("float32", 4), ("bfloat16", 2)])
def test_the_cache_holds_a_latent_and_a_rotated_key_per_token(dtype, num_bytes):
    cache_config = CacheConfig(num_pages=5, page_size=S, dtype=dtype)

    per_layer = (ATTENTION.kv_lora_rank + ATTENTION.qk_rope_head_dim) * num_bytes
    assert page_bytes(MODEL, cache_config) == S * (3 * per_layer + 4)  # and the token's id


def test_the_cache_of_deepseek_v3_holds_576_numbers_per_token_and_layer():
    config = family_of({"model_type": "deepseek_v3"}).config_from_hf(
        {
            "vocab_size": 8,
            "hidden_size": 16,
            "intermediate_size": 8,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
        }
    )

    num_bytes = page_bytes(config, CacheConfig(num_pages=1, page_size=S, dtype="bfloat16"))
    assert num_bytes == S * (61 * 576 * 2 + 4)


def test_moved_tokens_take_their_latents_along_in_every_layer():
    cache: Any = init_cache(MODEL, CacheConfig(num_pages=4, page_size=S))
    numbers = iter(range(1, 100))
    fill = jax.tree.map(lambda a: jnp.arange(a.size, dtype=a.dtype).reshape(a.shape) + next(numbers), cache)

    # Tokens in slots 5, 40 and 17: the second takes what the first has.
    batch: Any = SimpleNamespace(slot_mapping=jnp.asarray([5, 40, 17]), bounded_tables=())
    is_moved = jnp.asarray([False, True, False])
    moved: Any = move_tokens(fill, batch, jnp.asarray([0, 0, 2]), is_moved, config=MODEL)

    for before, after, n in zip(fill.pools, moved.pools, (1, 2), strict=True):
        old, new = (np.array(pool.array).reshape(n, 4 * S, -1) for pool in (before, after))
        old[:, 40] = old[:, 5]
        np.testing.assert_array_equal(new, old)


def test_turned_pages_have_the_keys_of_later_positions_and_the_same_latents():
    cache: Any = init_cache(MODEL, CacheConfig(num_pages=4, page_size=S))
    draw = np.random.default_rng(5)
    cache = jax.tree.map(lambda a: jnp.asarray(draw.standard_normal(a.shape), a.dtype), cache)

    turned: Any = turn_pages(cache, jnp.asarray([1]), jnp.asarray([3]), 48, config=MODEL)

    R = ATTENTION.kv_lora_rank
    for before, after, n in zip(cache.pools, turned.pools, (1, 2), strict=True):
        old, new = (np.asarray(pool.array).reshape(n, 4, S, -1) for pool in (before, after))
        np.testing.assert_array_equal(new[:, 3, :, :R], old[:, 1, :, :R])
        keys = rotated(old[:, 1, :, R:].reshape(-1, 1, 6), np.full(n * S, 48), ATTENTION.rope)
        np.testing.assert_allclose(new[:, 3, :, R:].reshape(-1, 1, 6), keys, rtol=0, atol=1e-5)
        np.testing.assert_array_equal(new[:, :3], old[:, :3])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"model_type": "deepseek_v2", "norm_topk_prob": True}, "norm_topk_prob=True"),
        ({"model_type": "deepseek_v2", "topk_method": "noaux_tc"}, "topk_method='noaux_tc'"),
        ({"model_type": "deepseek_v2", "mlp_bias": True}, "mlp_bias=True"),
        ({"model_type": "deepseek_v3", "scoring_func": "softmax"}, "scoring_func='softmax'"),
        ({"model_type": "deepseek_v3", "moe_layer_freq": 2}, "moe_layer_freq=2"),
        ({"model_type": "deepseek_v3", "num_key_value_heads": 2}, "num_key_value_heads=2"),
        ({"model_type": "deepseek_v3", "quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value,
)
def test_a_setting_that_would_change_the_result_is_refused_by_name(overrides, message):
    hf = {**SIZES, **LATENT, **MOE, **overrides}

    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        family_of(hf).config_from_hf(hf)
