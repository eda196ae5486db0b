"""A draft head that predicts hidden states: one decoder layer over the target's states (EAGLE, Li et al. 2024).

From a state and the token sampled from it, the layer predicts the next state, samples a token from that, and so on. It
attends to a short window of the target's last states and to its own states after them, so it needs no pages.

states  h_3 h_4 h_5 | s_6 s_7      window 3; token 6 was sampled from h_5
tokens   4   5   6  |  7   8       s_6 is predicted from (h_5, token 6) and gives draft 7, …
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxinfer.model.attention import Attention, AttentionParams, project_qkv
from jaxinfer.model.config import ModelConfig
from jaxinfer.model.decoder import feed_forward, unembed
from jaxinfer.model.layers import linear, rms_norm
from jaxinfer.model.params import LayerParams, Params
from jaxinfer.model.rope import rotary_angles
from jaxinfer.sampling.batch import SamplingBatch
from jaxinfer.sampling.sample import best_tokens
from jaxinfer.steps.medusa import Paths, States, at_paths, num_ranks
from kernels_pallas.row_products import rows_by_matrices

# By how often the head that comes with the package is right at each rank (scripts/measure/acceptance.py --ranks 3).
EAGLE_TREE: Paths = (
    *((0,), (0, 0), (1,), (0, 0, 0), (0, 0, 0, 0), (2,), (0, 1), (0, 0, 0, 0, 0)),
    *((0, 2), (0, 0, 1), (0,) * 6, (0, 0, 2), (0,) * 7, (0, 0, 0, 1), (0, 0, 0, 2)),
)
Cache = tuple[jax.Array, jax.Array]  # keys and values [B, slots, K, H]


@struct.dataclass
class EagleHead:
    """The decoder layer, and the weights that make its input from an embedding and a state."""

    embedding_norm: Any  # [D]
    hidden_norm: Any  # [D]
    input: Any  # [D, 2 D]
    layer: LayerParams  # without the axis of layers
    final_norm: Any  # [D]
    config: ModelConfig = struct.field(pytree_node=False)
    window: int = struct.field(pytree_node=False)

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def tree(self) -> Paths:
        """Returns the paths with the most accepted drafts, best first. Only best guesses have children."""
        return EAGLE_TREE

    def most_drafts(self, most: int) -> int:
        """Returns the length of its chain of drafts if at most `most` are wanted."""
        return most

    def draft(
        self, params: Params, states: States, sampling: SamplingBatch, positions: jax.Array, paths: Paths
    ) -> jax.Array:
        """Returns the tokens i32[B, K] of K paths, sampled one after another from `positions` i32[B] on."""
        B, W, _ = states.hidden.shape
        num_drafts = max(map(len, paths))
        slots = W + num_drafts - 1
        attention = self.config.layers[0].mixer
        assert isinstance(attention, Attention)
        shape = (B, slots, attention.num_kv_heads, attention.head_dim)
        cache = jnp.zeros(shape, states.hidden.dtype), jnp.zeros(shape, states.hidden.dtype)
        num_real = (states.num_known > 0).sum()
        is_known = jnp.arange(slots)[None] >= W - states.num_known[:, None]

        def advance(hidden: jax.Array, tokens: jax.Array, first: Any, cache: Cache) -> tuple[jax.Array, Cache]:
            x = self._inputs(params, hidden.reshape(-1, hidden.shape[-1]), tokens.reshape(-1))
            return self._advance(x.reshape(hidden.shape), first, cache, is_known, num_real)

        def draw(state: jax.Array, i: Any) -> jax.Array:
            return best_tokens(unembed(params, state, num_real), sampling, positions + i, num_ranks(paths))

        def go_on(i: jax.Array, carry: tuple[jax.Array, jax.Array, Cache]) -> tuple[jax.Array, jax.Array, Cache]:
            state, drafts, cache = carry
            state, cache = advance(state[:, None], drafts[:, i - 1, :1], W - 1 + i, cache)
            return state, drafts.at[:, i].set(draw(state, i)), cache

        state, cache = advance(states.hidden, states.tokens, 0, cache)
        drafts = jnp.zeros((B, num_drafts, num_ranks(paths)), jnp.int32).at[:, 0].set(draw(state, 0))
        return at_paths(jax.lax.fori_loop(1, num_drafts, go_on, (state, drafts, cache))[1], paths)

    def _advance(
        self, x: jax.Array, first: Any, cache: Cache, is_known: jax.Array, num_real: jax.Array
    ) -> tuple[jax.Array, Cache]:
        """Returns the state [B, D] after the last of the inputs x [B, n, D], which take the slots from `first` on."""
        B, n, D = x.shape
        layer, norm = self.config.layers[0], self.config.norm
        attention, mixer = layer.mixer, self.layer.mixer
        assert isinstance(attention, Attention)
        assert isinstance(mixer, AttentionParams)
        assert attention.rope is not None
        h = rms_norm(x.reshape(B * n, D), self.layer.mixer_norm, norm)
        angles = rotary_angles(jnp.tile(first + jnp.arange(n), B), attention.rope)
        q, k, v = project_qkv(mixer, h, angles, jnp.asarray(B * n), config=attention, norm=norm)
        keys, values = (
            jax.lax.dynamic_update_slice(of, new.reshape(B, n, *new.shape[1:]), (0, first, 0, 0))
            for of, new in zip(cache, (k, v), strict=True)
        )
        is_seen = is_known & (jnp.arange(is_known.shape[1]) < first + n)[None]
        attended = attend(q.reshape(B, n, *q.shape[1:])[:, -1], keys, values, is_seen)
        x = x[:, -1] + linear(attended, mixer.o, None, num_real)
        x = feed_forward(self.layer, x, num_real, layer=layer)
        return rms_norm(x, self.final_norm, norm), (keys, values)

    def _inputs(self, params: Params, hidden: jax.Array, tokens: jax.Array) -> jax.Array:
        embedded = params.embedding[tokens].astype(hidden.dtype)
        embedded = rms_norm(embedded, self.embedding_norm, self.config.norm)
        hidden = rms_norm(hidden, self.hidden_norm, self.config.norm)
        return linear(jnp.concatenate([embedded, hidden], axis=-1), self.input)


def attend(q: jax.Array, keys: jax.Array, values: jax.Array, is_seen: jax.Array) -> jax.Array:
    """Returns attention [B, N, H] of one query [B, N, H] per row to the slots [B, S, K, H] that it sees, bool[B, S]."""
    B, N, H = q.shape
    K = keys.shape[2]
    scores = rows_by_matrices(q.reshape(B, K, N // K, H), keys.transpose(0, 2, 3, 1)) * H**-0.5
    weights = jax.nn.softmax(jnp.where(is_seen[:, None, None], scores, -1e30), axis=-1)
    attended = rows_by_matrices(weights.astype(values.dtype), values.swapaxes(1, 2))
    return attended.astype(values.dtype).reshape(B, N, H)
