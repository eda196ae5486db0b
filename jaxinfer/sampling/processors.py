"""What the parameters of a request do to its logits before the temperature, on the device, inside the step.

Each processor is a function (logits f32[B, V], processors, context) -> logits f32[B, V], computed only where some row
of the batch uses it, and changing only the rows that do. Order and definitions are those of `transformers`; presence
and frequency penalties, which it does not have, follow OpenAI's API.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from flax import struct

from jaxinfer.model.batch import PADDING_TOKEN
from jaxinfer.sampling.batch import ProcessorBatch
from jaxinfer.sampling.token_counts import count_tokens, lists_tokens, rule_out
from jaxinfer.validation import require, shown


@struct.dataclass
class Context:
    """The tokens of each row so far, prompt and output, as far as it sees them."""

    tokens: jax.Array  # i32[B, L]  PADDING_TOKEN past the row's length
    lens: jax.Array  # i32[B]
    num_evicted_tokens: jax.Array  # i32[B]  tokens of its request that the row does not see any more


# What a user may add: (logits f32[V], tokens i32[L], their number i32[], the request's argument f32[]) -> logits
# f32[V]. Past their number, tokens are PADDING_TOKEN. It is traced into the step and called for one row under vmap.
LogitsProcessor = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


def checked_processors(processors: Mapping[str, LogitsProcessor] | None) -> dict[str, LogitsProcessor]:
    """Returns a user's processors by name; ValueError for anything but functions with names."""
    are_named = processors is None or isinstance(processors, Mapping)
    require(are_named, "logits_processors", processors, "a mapping from names to functions")
    checked = dict(processors or {})
    for name, function in checked.items():
        require(isinstance(name, str) and bool(name), "logits_processors", name, "named by text that is not empty")
        require(callable(function), f"logits_processors[{shown(name)}]", function, "a function")
    return checked


def process_logits(
    logits: jax.Array,
    processors: ProcessorBatch,
    make_context: Callable[[], Context],
    custom: Sequence[LogitsProcessor] = (),
    num_padding: int = 0,
) -> jax.Array:
    """Returns the logits f32[B, V] that each row's parameters make of the model's; -inf rules a token out.

    `custom` are processors of the user, in the order of the columns of `custom_arguments`; no structure is broken by
    them, which comes last. They do not get the last `num_padding` logits of a row, which stay -inf. `make_context` is
    called inside the branch that is taken only when some row uses a processor.
    """
    p = processors

    def process(logits: jax.Array) -> jax.Array:
        context = make_context()
        changes_counts = (p.presence_penalty != 0) | (p.frequency_penalty != 0)
        steps: tuple[tuple[jax.Array, Callable[..., jax.Array]], ...] = (
            (_lists_any(p.biased_token_ids), add_biases),
            (p.repetition_penalty != 1, penalise_repetition),
            (changes_counts, penalise_output),
            (p.no_repeat_ngram_size > 0, rule_out_ngrams),
            (_lists_any(p.bad_word_tokens), rule_out_bad_words),
            (context.lens + context.num_evicted_tokens - p.prompt_lens < p.min_tokens, rule_out_stop_tokens),
            (_lists_any(p.allowed_token_ids), rule_out_all_but_allowed),
            *((p.uses_custom[:, i], _batched(processor, i, num_padding)) for i, processor in enumerate(custom)),
            ((p.allowed_bits != -1).any(axis=1), rule_out_by_bits),
        )
        for is_used, change in steps:
            logits = when_used(is_used, lambda x, change=change: change(x, p, context), logits)
        return logits

    return jax.lax.cond(jnp.any(p.is_used), process, lambda x: x, logits)


def when_used(is_used: jax.Array, change: Callable[[jax.Array], jax.Array], logits: jax.Array) -> jax.Array:
    """Returns change(logits) in the rows of is_used bool[B]; where there are none, it is not computed."""
    return jax.lax.cond(jnp.any(is_used), lambda x: jnp.where(is_used[:, None], change(x), x), lambda x: x, logits)


def add_biases(logits: jax.Array, p: ProcessorBatch, context: Context) -> jax.Array:
    """Adds the biases of logit_bias (`SequenceBiasLogitsProcessor` of single tokens)."""
    return logits.at[_rows(logits), p.biased_token_ids].add(p.biases, mode="drop")


def penalise_repetition(logits: jax.Array, p: ProcessorBatch, context: Context) -> jax.Array:
    """Makes tokens of prompt and output less probable (`RepetitionPenaltyLogitsProcessor`; Keskar et al. 2019)."""
    penalty = p.repetition_penalty[:, None]
    penalised = jnp.where(logits < 0, logits * penalty, logits / penalty)
    return jnp.where(lists_tokens(context.tokens, logits.shape[1]), penalised, logits)


def penalise_output(logits: jax.Array, p: ProcessorBatch, context: Context) -> jax.Array:
    """Subtracts frequency_penalty times a token's count in the output, and presence_penalty once."""
    is_output = jnp.arange(context.tokens.shape[1])[None, :] >= p.prompt_lens[:, None]
    tokens = jnp.where(is_output, context.tokens, PADDING_TOKEN)
    counts = count_tokens(tokens, logits.shape[1])
    return logits - p.frequency_penalty[:, None] * counts - jnp.where(counts > 0, p.presence_penalty[:, None], 0.0)


def rule_out_ngrams(logits: jax.Array, p: ProcessorBatch, context: Context) -> jax.Array:
    """Rules out what would repeat n tokens of the row, n = no_repeat_ngram_size (`NoRepeatNGramLogitsProcessor`)."""
    n, lens = p.no_repeat_ngram_size[:, None], context.lens[:, None]
    longest = jnp.max(jnp.where(n <= lens, n, 1))

    def row_by_row(*rows: jax.Array) -> jax.Array:
        return jax.lax.map(lambda row: _ends_of_repeats(*(a[None] for a in row), longest=longest)[0], rows)

    # For a TPU, a loop for all rows at once takes thrice as long to compile: 1.5 s for 64 rows of 40,960 tokens.
    forms = {"tpu": row_by_row, "default": partial(_ends_of_repeats, longest=longest)}
    return rule_out(logits, jax.lax.platform_dependent(context.tokens, lens, n, **forms))


def _ends_of_repeats(tokens: jax.Array, lens: jax.Array, n: jax.Array, *, longest: jax.Array) -> jax.Array:
    """Returns the tokens i32[B, L] that would be the last of n repeated ones, and PADDING_TOKEN in the other places.

    lens and n: i32[B, 1]; longest i32[]: the greatest n of a row that is long enough.
    """
    positions = jnp.arange(tokens.shape[1])[None, :]
    is_long_enough = n <= lens

    # A token may not follow again where the n - 1 tokens before it are the last n - 1:
    # n = 3, tokens 5 6 7 5 6 -> 7;  distance 1 compares with the last 6, distance 2 with the last 5
    def compare(distance: jax.Array, is_repeated: jax.Array) -> jax.Array:
        wanted = jnp.take_along_axis(tokens, jnp.maximum(lens - distance, 0), axis=1)
        is_same = jnp.roll(tokens, distance, axis=1) == wanted
        return is_repeated & (is_same | (distance >= n))

    is_inside = is_long_enough & (positions >= n - 1) & (positions < lens)
    is_repeated = jax.lax.fori_loop(1, longest, compare, is_inside)
    return jnp.where(is_repeated, tokens, PADDING_TOKEN)


def rule_out_bad_words(logits: jax.Array, p: ProcessorBatch, context: Context) -> jax.Array:
    """Rules out the last token of each bad word whose others are the row's last (`NoBadWordsLogitsProcessor`)."""
    words, distances = p.bad_word_tokens, p.bad_word_distances
    index = context.lens[:, None] - distances
    written = jnp.take_along_axis(context.tokens, jnp.maximum(index, 0), axis=1)
    is_missing = (distances > 0) & ((index < 0) | (written != words))
    places = jnp.arange(words.shape[1])[None, :]
    ends = places + distances  # distances 2 1 0 0 1 0 -> ends 2 2 2 3 5 5
    misses = (is_missing[:, :, None] & (ends[:, :, None] == places[:, None, :])).any(axis=1)
    return rule_out(logits, jnp.where((distances == 0) & ~misses, words, PADDING_TOKEN))


def rule_out_stop_tokens(logits: jax.Array, p: ProcessorBatch, context: Context) -> jax.Array:
    """Rules out what would end the row (`MinNewTokensLengthLogitsProcessor`)."""
    return rule_out(logits, p.stop_token_ids)


def rule_out_all_but_allowed(logits: jax.Array, p: ProcessorBatch, context: Context) -> jax.Array:
    """Rules out all tokens but those of allowed_token_ids (`PrefixConstrainedLogitsProcessor`)."""
    return jnp.where(lists_tokens(p.allowed_token_ids, logits.shape[1]), logits, -jnp.inf)


def rule_out_by_bits(logits: jax.Array, p: ProcessorBatch, context: Context) -> jax.Array:
    """Rules out the tokens whose bit in allowed_bits is 0."""
    B, V = logits.shape
    if not p.allowed_bits.size:
        return logits
    bits = p.allowed_bits[:, :, None] >> jnp.arange(32)[None, None, :] & 1
    bits = bits.reshape(B, -1)[:, :V]
    if bits.shape[1] < V:  # padding of the vocabulary has no bits
        bits = jnp.pad(bits, ((0, 0), (0, V - bits.shape[1])))
    return jnp.where(bits == 1, logits, -jnp.inf)


def _batched(processor: LogitsProcessor, column: int, num_padding: int) -> Callable[..., jax.Array]:
    def process(logits: jax.Array, p: ProcessorBatch, context: Context) -> jax.Array:
        own = logits[:, : logits.shape[1] - num_padding] if num_padding else logits
        changed = jax.vmap(processor)(own, context.tokens, context.lens, p.custom_arguments[:, column])
        return jnp.pad(changed, ((0, 0), (0, num_padding)), constant_values=-jnp.inf) if num_padding else changed

    return process


def _rows(logits: jax.Array) -> jax.Array:
    return jnp.arange(logits.shape[0])[:, None]


def _lists_any(token_ids: jax.Array) -> jax.Array:
    return (token_ids != PADDING_TOKEN).any(axis=1)
