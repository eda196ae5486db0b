"""Verification of drafts by the target's own samples: a draft is accepted if the target samples the same token.

The step samples the token after every draft as decoding would, from the same (seed, sample index, position) and the
logits of the same context. It accepts the drafts up to the first that differs from the sample in its place. The sample
after the last accepted draft is emitted as well: the correction of a rejected draft, or one more token.

So a request yields the tokens of plain decoding, for any drafts. The distribution is kept because the samples are, and
a seed gives the same output with and without speculation. The rejection rule (Leviathan et al. 2023; Chen et al. 2023)
keeps the distribution but not the samples: its output changes with the drafts, and so with the drafter, with their
number and with the schedule. If drafts are guesses, both rules accept a draft with its probability under the target. A
draft model that samples with the target's noise is accepted with probability at least (1 - d) / (1 + d), where the
rejection rule has 1 - d; d is the total variation between the two models (Daliri et al. 2024).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh

from jaxinfer.model.batch import PADDING_SLOT, Batch, StepOutput, VerifyOutput, num_evicted_tokens
from jaxinfer.model.cache import KVCache
from jaxinfer.model.components.recurrent.states import StateSlots, move_states, state_slots
from jaxinfer.model.config import MixerStack, ModelConfig
from jaxinfer.model.stages import in_stages
from jaxinfer.sampling.batch import SamplingBatch
from kernels_pallas.paged_attention.call import token_rows

NO_DRAFT = -2  # equal to no sampled token, nor to NO_TOKEN or BAD_LOGITS


def accept_drafts(drawn: jax.Array, drafts: jax.Array) -> jax.Array:
    """Returns the number of tokens that each row emits, i32[B]: one more than its accepted drafts.

    drawn i32[B, Q]: the target's sample after 0, 1, … drafts. drafts i32[B, Q - 1] are padded with NO_DRAFT.

    drafts 5 6 7, drawn 5 6 9 4 -> 3: 5 and 6 were right, and 9 is the correction
    """
    is_accepted = jnp.cumprod((drawn[:, :-1] == drafts).astype(jnp.int32), axis=1)
    return 1 + is_accepted.sum(axis=1, dtype=jnp.int32)


@struct.dataclass
class Ends:
    """The tokens of a batch after which a step samples: N tokens of all rows, one row after another, padding last."""

    places: Any  # i32[N]  in the batch
    rows: Any  # i32[N]
    is_real: Any  # bool[N]
    firsts: Any  # i32[B + 1]  rows with 3, 1, 2 ends -> firsts 0 3 4 6


def ends_of_tokens(batch: Batch) -> Ends:
    """Returns every token of the batch, N = T."""
    rows, is_real = rows_of_tokens(batch)
    return Ends(jnp.arange(batch.tokens.shape[0]), rows, is_real, batch.cu_q_lens)


def ends_of_drafts(batch: Batch, num_drafts: jax.Array, num_ends: int) -> Ends:
    """Returns each row's drafts, its last num_drafts i32[B] tokens, and the token before them; `num_ends` is N."""
    counts = jnp.where(batch.kv_lens > 0, 1 + num_drafts, 0)
    firsts = jnp.pad(jnp.cumsum(counts, dtype=jnp.int32), (1, 0))
    rows, index = token_rows(firsts, num_ends), jnp.arange(num_ends)
    is_real = index < firsts[-1]
    places = batch.cu_q_lens[rows + 1] - counts[rows] + index - firsts[rows]
    return Ends(jnp.where(is_real, places, 0), rows, is_real, firsts)


def batch_of_ends(batch: Batch, ends: Ends) -> Batch:
    """Returns a batch with each end as a row of its own, whose context ends with it; padding stays padding."""
    positions = batch.positions[ends.places]
    return Batch(
        tokens=batch.tokens[ends.places],
        positions=positions,
        slot_mapping=batch.slot_mapping[ends.places],
        cu_q_lens=jnp.arange(ends.places.shape[0] + 1, dtype=jnp.int32),
        kv_lens=jnp.where(ends.is_real, positions + 1 - num_evicted_tokens(batch)[ends.rows], 0),
        block_tables=batch.block_tables[ends.rows],
    )


def draft_state_slots(cache: KVCache, batch: Batch, ends: Ends, *, config: ModelConfig) -> StateSlots:
    """Returns the slots of states in a step that verifies drafts.

    The state after each end goes to a slot of its own at the end of the pool: which of them is needed is known once all
    layers are computed. Raises ValueError if `CacheConfig.num_draft_states` is less than the number of ends.
    """
    slots, T = state_slots(batch, cache.tokens.shape[1], config.state_kind), batch.tokens.shape[0]
    places = jnp.where(ends.is_real, ends.places, T)
    return replace(slots, writes=slots.writes.at[places].set(_draft_slots(cache, ends, config), mode="drop"))


def keep_states(
    cache: KVCache,
    batch: Batch,
    ends: Ends,
    num_emitted: jax.Array,
    *,
    config: ModelConfig,
    mesh: Mesh | None,
) -> KVCache:
    """Returns the cache with the states after the accepted drafts in the slots of their pages.

    num_emitted i32[B]: the tokens that each row emits, one more than its accepted drafts. `mesh`: the mesh that the
    cache is split over, if any.
    """
    S, index = cache.tokens.shape[1], jnp.arange(ends.places.shape[0]) - ends.firsts[ends.rows]
    positions, last = batch.positions[ends.places], num_emitted[ends.rows] - 1
    is_kept = ends.is_real & ((index == last) | ((index < last) & (positions % S == S - 1)))
    pages = batch.tables_of(config.state_kind)[ends.rows, positions // S]
    sources, targets = _draft_slots(cache, ends, config), jnp.where(is_kept, pages, PADDING_SLOT)

    def kept(pool: Any, stack: MixerStack) -> Any:
        if stack.kind != config.state_kind:
            return pool
        return in_stages(move_states, mesh, pool, stack.num_layers, sources, targets)

    return replace(cache, pools=tuple(map(kept, cache.pools, config.mixer_stacks)))


def _draft_slots(cache: KVCache, ends: Ends, config: ModelConfig) -> jax.Array:
    """Returns the slot of the state after each end, i32[N]: the last of each layer."""
    pairs = zip(cache.pools, config.mixer_stacks, strict=True)
    pool, num_layers = next((pool, stack.num_layers) for pool, stack in pairs if stack.kind == config.state_kind)
    num_ends, per_layer = ends.places.shape[0], pool.num_pages // num_layers
    if cache.num_draft_states < num_ends:
        raise ValueError(
            f"num_draft_states={cache.num_draft_states} are too few for a step that verifies {num_ends} tokens; raise"
            " CacheConfig.num_draft_states"
        )
    return per_layer - num_ends + jnp.arange(num_ends, dtype=jnp.int32)


def sampling_of_ends(sampling: SamplingBatch, ends: Ends) -> SamplingBatch:
    """Returns each end's row of the sampling parameters; allowed_bits has one for each end already."""
    bits = sampling.processors.allowed_bits
    per_end = jax.tree.map(lambda field: field[ends.rows], sampling)
    return per_end.replace(processors=per_end.processors.replace(allowed_bits=bits))


def rows_of_tokens(batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Returns the row i32[T] of each token, and True for tokens that are no padding, bool[T]."""
    num_tokens = batch.tokens.shape[0]
    row = token_rows(batch.cu_q_lens, num_tokens)
    return row, (jnp.arange(num_tokens) < batch.cu_q_lens[-1]) & (batch.kv_lens[row] > 0)


def emit(drawn: StepOutput, batch: Batch, ends: Ends, q_len: int) -> VerifyOutput:
    """Turns the tokens sampled after each end into those that each row emits; no row has more than q_len ends."""
    index = ends.firsts[:-1, None] + jnp.arange(q_len)[None]
    is_draft = index[:, 1:] < ends.firsts[1:, None]
    index = jnp.minimum(index, ends.places.shape[0] - 1)  # a row emits nothing past its last end
    drafts = jnp.where(is_draft, batch.tokens[ends.places[index[:, 1:]]], NO_DRAFT)
    tokens = drawn.tokens[index]
    return VerifyOutput(
        tokens=tokens,
        log_probs=drawn.log_probs[index],
        top_tokens=drawn.top_tokens[index],
        top_log_probs=drawn.top_log_probs[index],
        sampling_log_probs=None if drawn.sampling_log_probs is None else drawn.sampling_log_probs[index],
        num_emitted=jnp.where(batch.kv_lens > 0, accept_drafts(tokens, drafts), 0),
    )
