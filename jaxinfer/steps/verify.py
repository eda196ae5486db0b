"""Verification of drafts by the target's own draws: a draft is accepted where the target would have drawn it.

The token after every draft is drawn as decoding would draw it, from the same (seed, sample index, position) and the
logits of the same context, and as many drafts stand as agree with the draws from the first on. The draw after the
last of them is emitted as well: the correction of a rejected draft, or one token more after the last.

So a request yields the tokens of plain decoding, whatever is drafted, by whom and how many: the distribution is kept
because the draws are, and a seed gives the same output with and without speculation. The rejection rule (Leviathan et
al. 2023; Chen et al. 2023) keeps the distribution but not the draws: its output changes with the drafts, and so with
the drafter, with K and with the schedule. For a draft that is a guess and no draw, both accept with the probability
that the target gives it. A draft model that draws with the target's noise is accepted with probability at least
(1 - d) / (1 + d) where the rejection rule has 1 - d, d being the total variation between the two (Daliri et al. 2024).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxinfer.model.batch import Batch, StepOutput, VerifyOutput, num_evicted_tokens
from jaxinfer.sampling.batch import SamplingBatch
from kernels_pallas.paged_attention.shapes import token_rows

NO_DRAFT = -2  # equal to no token that is drawn, nor to NO_TOKEN or BAD_LOGITS


def accept_drafts(drawn: jax.Array, drafts: jax.Array) -> jax.Array:
    """Returns how many of drawn i32[B, Q] each row emits, i32[B]: those that follow accepted drafts only.

    drafts i32[B, Q - 1] are padded with NO_DRAFT; drawn[:, j] is the target's draw after j of them.

    drafts 5 6 7, drawn 5 6 9 4 -> 3: 5 and 6 were right, and 9 is the correction
    """
    is_accepted = jnp.cumprod((drawn[:, :-1] == drafts).astype(jnp.int32), axis=1)
    return 1 + is_accepted.sum(axis=1, dtype=jnp.int32)


def batch_of_tokens(batch: Batch) -> Batch:
    """Returns the batch with every token as a row of its own, whose context ends with it; padding stays padding."""
    rows, is_real = rows_of_tokens(batch)
    return Batch(
        tokens=batch.tokens,
        positions=batch.positions,
        slot_mapping=batch.slot_mapping,
        cu_q_lens=jnp.arange(batch.tokens.shape[0] + 1, dtype=jnp.int32),
        kv_lens=jnp.where(is_real, batch.positions + 1 - num_evicted_tokens(batch)[rows], 0),
        block_tables=batch.block_tables[rows],
    )


def sampling_of_tokens(batch: Batch, sampling: SamplingBatch) -> SamplingBatch:
    """Returns each token's row of the sampling parameters; allowed_bits has one for each token already."""
    rows, _ = rows_of_tokens(batch)
    bits = sampling.processors.allowed_bits
    per_token = jax.tree.map(lambda field: field[rows], sampling)
    return per_token.replace(processors=per_token.processors.replace(allowed_bits=bits))


def rows_of_tokens(batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Returns the row i32[T] of each token, and whether it is none of the padding, bool[T]."""
    num_tokens = batch.tokens.shape[0]
    row = token_rows(batch.cu_q_lens, num_tokens)
    return row, (jnp.arange(num_tokens) < batch.cu_q_lens[-1]) & (batch.kv_lens[row] > 0)


def emit(drawn: StepOutput, batch: Batch, q_len: int) -> VerifyOutput:
    """Turns what was drawn after each token of the batch into what each row emits; no row has more than q_len."""
    last = batch.tokens.shape[0] - 1
    index = batch.cu_q_lens[:-1, None] + jnp.arange(q_len)[None]
    is_draft = index[:, 1:] < batch.cu_q_lens[1:, None]
    index = jnp.minimum(index, last)  # past a row's end is nothing that it emits
    drafts = jnp.where(is_draft, batch.tokens[index[:, 1:]], NO_DRAFT)
    tokens = drawn.tokens[index]
    return VerifyOutput(
        tokens=tokens,
        log_probs=drawn.log_probs[index],
        top_tokens=drawn.top_tokens[index],
        top_log_probs=drawn.top_log_probs[index],
        num_emitted=jnp.where(batch.kv_lens > 0, accept_drafts(tokens, drafts), 0),
    )
