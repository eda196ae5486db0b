"""A draft head that predicts hidden states: one decoder layer over the target's states (EAGLE, Li et al. 2024).

From a state and the token sampled from it, the layer predicts the next state, samples a token from that, and so on. It
attends to a short window of the target's last states and to its own states after them. Their keys and values lie in
pages that are made anew for each call, so the head keeps none.

states  h_3 h_4 h_5 | s_6 s_7      window 3; token 6 was sampled from h_5
tokens   4   5   6  |  7   8       s_6 is predicted from (h_5, token 6) and gives draft 7, …

Layers for multi-token prediction (DeepSeek-V3, 2024) are such heads, and so are those of EAGLE-3 (Li et al. 2025).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh

from jaxinfer.config import CacheConfig
from jaxinfer.model.batch import PADDING_SLOT, Batch, StepTokens, last_places, step_rows, step_tokens
from jaxinfer.model.cache import init_cache
from jaxinfer.model.components.layers import linear, product, rms_norm
from jaxinfer.model.components.mixer_inputs import MixerInputs
from jaxinfer.model.config import ModelConfig
from jaxinfer.model.decoder import embed, feed_forward, mix, step_context, unembed
from jaxinfer.model.layer_parts import Pool
from jaxinfer.model.params import LayerParams, Params
from jaxinfer.sampling.batch import SamplingBatch
from jaxinfer.sampling.sample import best_tokens
from jaxinfer.steps.medusa import Paths, States, at_paths, num_ranks
from kernels_pallas.paged_attention.call import token_rows

# By how often the head that comes with the package is right at each rank (scripts/measure/acceptance.py --ranks 3).
EAGLE_TREE: Paths = (
    *((0,), (0, 0), (1,), (0, 0, 0), (0, 0, 0, 0), (2,), (0, 1), (0, 0, 0, 0, 0)),
    *((0, 2), (0, 0, 1), (0,) * 6, (0, 0, 2), (0,) * 7, (0, 0, 0, 1), (0, 0, 0, 2)),
)
PAGE_SIZE = 16  # the smallest: pages of a window are rarely full


@struct.dataclass
class EagleHead:
    """The decoder layer, and the weights that make its input from an embedding and a state.

    The layer's input is a product of both. In EAGLE-3 it is the state, and queries, keys and values are products of
    both. `d` is the target's hidden size, `V` its vocabulary.
    """

    embedding_norm: Any  # [D]
    hidden_norm: Any  # [D]
    layer: LayerParams  # without the axis of layers; in EAGLE-3 its q, k and v are [..., 2 D]
    final_norm: Any  # [D]
    config: ModelConfig = struct.field(pytree_node=False)  # of one layer
    window: int = struct.field(pytree_node=False)
    input: Any = None  # [D, 2 D]  None in EAGLE-3
    reduction: Any = None  # [D, S]  from the target's states, side by side, to one; None if S = D
    embedding: Any = None  # [V, D]  None: the target's
    unembedding: Any = None  # [W, D]  None: the target's
    token_ids: Any = None  # i32[W]  of the rows of the unembedding; None: W = V
    kept_layers: tuple[int, ...] = struct.field(pytree_node=False, default=())  # see `forward_with_states`
    continues_normed: bool = struct.field(pytree_node=False, default=True)  # from states after the final norm
    adds_normed: bool = struct.field(pytree_node=False, default=False)  # EAGLE-3: the layer's input is normed

    @property
    def hidden_size(self) -> int:
        """Returns the target's hidden size d."""
        if self.reduction is None:
            return self.config.hidden_size
        return self.reduction.shape[1] // max(len(self.kept_layers), 1)

    @property
    def tree(self) -> Paths:
        """Returns the paths with the most accepted drafts, best first. Only best guesses have children."""
        return EAGLE_TREE

    def most_drafts(self, most: int) -> int:
        """Returns the length of its chain of drafts if at most `most` are wanted."""
        return most

    def draft(
        self,
        params: Params,
        states: States,
        sampling: SamplingBatch,
        positions: jax.Array,
        paths: Paths,
        implementation: str | None = None,
        mesh: Mesh | None = None,
    ) -> jax.Array:
        """Returns the tokens i32[B, K] of K paths, sampled one after another from `positions` i32[B] on."""
        B, W, D = states.hidden.shape
        num_drafts, rows = max(map(len, paths)), StepTokens((states.num_known > 0).sum())
        options: dict[str, Any] = {"implementation": implementation, "mesh": mesh}
        pages_per_row = -(-(W + num_drafts - 1) // PAGE_SIZE)
        pages = init_cache(
            self.config,
            CacheConfig(num_pages=B * pages_per_row, page_size=PAGE_SIZE, dtype=states.hidden.dtype.name),
        ).pools[0]

        def draw(state: jax.Array, i: Any) -> jax.Array:
            logits = self._logits(params, state, rows)
            return best_tokens(logits, sampling, positions + i, num_ranks(paths))

        def go_on(i: jax.Array, carry: tuple[jax.Array, jax.Array, Pool]) -> tuple[jax.Array, jax.Array, Pool]:
            state, drafts, pages = carry
            batch = batch_of_drafts(drafts[:, i - 1, 0], states.num_known, i, pages_per_row)
            state, normed, pages = self._advance(params, state, batch, pages, q_len=1, **options)
            return state, drafts.at[:, i].set(draw(normed, i)), pages

        batch, sources = batch_of_windows(states, pages_per_row)
        hidden = states.hidden.reshape(B * W, D)[sources]
        state, normed, pages = self._advance(params, hidden, batch, pages, **options)
        drafts = jnp.zeros((B, num_drafts, num_ranks(paths)), jnp.int32).at[:, 0].set(draw(normed, 0))
        return at_paths(jax.lax.fori_loop(1, num_drafts, go_on, (state, drafts, pages))[1], paths)

    def _advance(
        self,
        params: Params,
        hidden: jax.Array,
        batch: Batch,
        pages: Pool,
        *,
        q_len: int | None = None,
        implementation: str | None,
        mesh: Mesh | None,
    ) -> tuple[jax.Array, jax.Array, Pool]:
        """Returns the state [B, D] after each row to continue from, the one to unembed, and the pages.

        hidden [T, D]: the states from which the batch's tokens were sampled.
        """
        layer, norm = self.config.layers[0], self.config.norm
        options: dict[str, Any] = {"q_len": q_len, "implementation": implementation, "mesh": mesh}
        context = step_context(batch, config=self.config, page_size=PAGE_SIZE, **options)
        inputs = MixerInputs(context, step_tokens(batch))
        x, h = self._inputs(params, hidden, batch.tokens, inputs.tokens, mesh)
        x, (pages,) = mix(self.layer, (pages,), x, h, [inputs], layer=layer)
        # Of the tokens before the last only keys and values are needed.
        x = feed_forward(self.layer, x[last_places(batch)], step_rows(batch), layer=layer)
        normed = rms_norm(x, self.final_norm, norm)
        return normed if self.continues_normed else x, normed, pages

    def _inputs(
        self, params: Params, hidden: jax.Array, token_ids: jax.Array, tokens: StepTokens, mesh: Mesh | None
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the layer's input [T, D], and that of its mixer, [T, D] or [T, 2 D]."""
        table = params if self.embedding is None else replace(params, embedding=self.embedding)
        embedded = embed(table, token_ids, config=self.config, mesh=mesh).astype(hidden.dtype)
        normed = rms_norm(hidden, self.hidden_norm, self.config.norm)
        both = jnp.concatenate([rms_norm(embedded, self.embedding_norm, self.config.norm), normed], axis=-1)
        if self.input is None:
            return normed if self.adds_normed else hidden, both
        x = linear(both, self.input, None, tokens)
        return x, x

    def _logits(self, params: Params, hidden: jax.Array, rows: StepTokens) -> jax.Array:
        """Returns logits f32[rows, V] of hidden states [rows, D]; -inf for tokens that it never drafts."""
        if self.unembedding is None:
            return unembed(params, hidden, rows)
        logits = product(hidden, self.unembedding, rows)
        if self.token_ids is None:
            return logits
        none = jnp.full((hidden.shape[0], params.embedding.shape[0]), -jnp.inf, logits.dtype)
        return none.at[:, self.token_ids].set(logits)


def batch_of_windows(states: States, pages_per_row: int) -> tuple[Batch, jax.Array]:
    """Returns the known tokens of all windows as a batch, and the places i32[B * W] of their states.

    num_known 2, 3 of 3: tokens  - a b | c d e  ->  a b c d e -  from places 1 2 3 4 5 0
    """
    B, W = states.tokens.shape
    cu_q_lens = jnp.pad(jnp.cumsum(states.num_known, dtype=jnp.int32), (1, 0))
    rows, index = token_rows(cu_q_lens, B * W), jnp.arange(B * W)
    is_real, positions = index < cu_q_lens[-1], index - cu_q_lens[rows]
    sources = jnp.where(is_real, rows * W + W - states.num_known[rows] + positions, 0)
    positions = jnp.where(is_real, positions, 0)
    tokens = states.tokens.reshape(-1)[sources]
    return _batch(tokens, positions, cu_q_lens, states.num_known, pages_per_row), sources


def batch_of_drafts(tokens: jax.Array, num_known: jax.Array, i: jax.Array, pages_per_row: int) -> Batch:
    """Returns a batch of each row's draft i32[B] before its i-th; rows of no known states are padding."""
    B = tokens.shape[0]
    lens = jnp.where(num_known > 0, num_known + i, 0)
    return _batch(tokens, jnp.maximum(lens - 1, 0), jnp.arange(B + 1, dtype=jnp.int32), lens, pages_per_row)


def _batch(
    tokens: jax.Array, positions: jax.Array, cu_q_lens: jax.Array, kv_lens: jax.Array, pages_per_row: int
) -> Batch:
    B = kv_lens.shape[0]
    return Batch(
        tokens=tokens,
        positions=positions,
        slot_mapping=jnp.full(tokens.shape, PADDING_SLOT, jnp.int32),  # no token id is stored
        cu_q_lens=cu_q_lens,
        kv_lens=kv_lens,
        block_tables=jnp.arange(B * pages_per_row, dtype=jnp.int32).reshape(B, pages_per_row),
    )
