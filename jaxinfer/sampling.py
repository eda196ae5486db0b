"""From logits to tokens, on the device, inside the step.

Filters are cuts on the logits of a row, found by bisection over the bit patterns of floats: 32 passes of compare and
add give the exact k-th largest value or the exact nucleus, without a sort, which is slow on every device. A filter
that nobody in the batch uses is not computed.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

import jax
import jax.numpy as jnp

from jaxinfer.batch import StepOutput
from jaxinfer.processors import when_used
from jaxinfer.sampling_batch import SamplingBatch
from jaxinfer.sampling_params import NO_TOKEN
from kernels_pallas.row_sum import row_sum


class Purpose(IntEnum):
    """What a random draw is for, so that no two draws of one position are the same."""

    TOKEN = 0


def sample(logits: jax.Array, sampling: SamplingBatch, positions: jax.Array) -> jax.Array:
    """Draws a token i32[B] per row of logits f32[B, V].

    Temperature first, then top-k, top-p, min-p and typical-p on what is left, then one draw by the Gumbel-max rule. The
    draw is a function of the row's (seed, sample index, position) and its logits alone. `positions` i32[B] are those of
    the drawn tokens. Temperature 0 takes the most probable token, the lowest id among equals. Where all logits of a row
    are -inf, its token is NO_TOKEN.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    greatest = jnp.take_along_axis(logits, greedy[:, None], axis=-1)[:, 0]
    greedy = jnp.where(greatest == -jnp.inf, NO_TOKEN, greedy)

    def draw() -> jax.Array:
        # Below the most probable by the maximum, so that no temperature can overflow; the smallest are all the same.
        temperature = jnp.where(sampling.temperature > 0, jnp.maximum(sampling.temperature, 1e-30), 1.0)
        scaled = (logits - logits.max(-1, keepdims=True)) / temperature[:, None]
        kept = filter_logits(scaled, sampling)
        noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:]))(draw_keys(sampling, positions))
        drawn = jnp.argmax(kept + noise, axis=-1).astype(jnp.int32)
        return jnp.where((sampling.temperature > 0) & (greedy != NO_TOKEN), drawn, greedy)

    return jax.lax.cond(jnp.any(sampling.temperature > 0), draw, lambda: greedy)


def draw_keys(sampling: SamplingBatch, positions: jax.Array, purpose: Purpose = Purpose.TOKEN) -> jax.Array:
    """Returns one key per row: fold_in(fold_in(fold_in(key(seed), sample index), position), purpose)."""

    def row_key(seed: jax.Array, sample_index: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        for number in (sample_index, position, int(purpose)):
            key = jax.random.fold_in(key, number)
        return key

    return jax.vmap(row_key)(sampling.seeds, sampling.sample_index, positions)


def filter_logits(logits: jax.Array, sampling: SamplingBatch) -> jax.Array:
    """Returns logits f32[B, V] with -inf where top-k, top-p, min-p, then typical-p of the row rules a token out.

    Definitions as in `transformers`: top-k keeps values not below the k-th largest; top-p keeps the smallest set of the
    most probable tokens whose probability, among what top-k kept, reaches p; min-p keeps tokens at least p times as
    probable as the most probable one; typical-p keeps the smallest set of tokens, the nearest to the expected surprise
    first, whose probability reaches p (Meister et al. 2022). Equal logits stay or go together.
    """

    def cut(logits: jax.Array, is_used: jax.Array, threshold: Callable[[jax.Array], jax.Array]) -> jax.Array:
        return when_used(is_used, lambda x: jnp.where(x < threshold(x)[:, None], -jnp.inf, x), logits)

    logits = cut(logits, sampling.top_k > 0, lambda x: _top_k_threshold(x, sampling.top_k))
    logits = cut(logits, sampling.top_p < 1, lambda x: _top_p_threshold(x, sampling.top_p))
    logits = cut(logits, sampling.min_p > 0, lambda x: x.max(-1) + jnp.log(sampling.min_p))
    is_used = sampling.typical_p < 1
    return when_used(is_used, lambda x: jnp.where(_is_typical(x, sampling.typical_p), x, -jnp.inf), logits)


def _top_k_threshold(logits: jax.Array, k: jax.Array) -> jax.Array:
    """The k-th largest value of each row, f32[B]."""
    return _bisect(logits, lambda is_above: is_above.sum(-1, dtype=jnp.int32) >= k)


def _top_p_threshold(logits: jax.Array, p: jax.Array) -> jax.Array:
    """The largest value for which the tokens not below it hold probability p, f32[B]."""
    weights = jnp.exp(logits - logits.max(-1, keepdims=True))
    return _mass_threshold(logits, weights, p)


def _is_typical(logits: jax.Array, p: jax.Array) -> jax.Array:
    """Which tokens typical-p keeps, bool[B, V]."""
    below_top = logits - logits.max(-1, keepdims=True)
    weights = jnp.exp(below_top)
    total = row_sum(weights)[:, None]
    surprise = jnp.log(total) - below_top
    expected = row_sum(jnp.where(weights > 0, weights * surprise, 0.0))[:, None] / total
    typicality = -jnp.abs(surprise - expected)
    return typicality >= _mass_threshold(typicality, weights, p)[:, None]


def _mass_threshold(values: jax.Array, weights: jax.Array, p: jax.Array) -> jax.Array:
    """The largest of each row's values for which those not below it have p of the row's weight, f32[B]."""
    # Not 0, even where p is too small for a float: the greatest value stays.
    wanted = jnp.maximum(p * row_sum(weights), 1e-30)
    return _bisect(values, lambda is_above: row_sum(jnp.where(is_above, weights, 0.0)) >= wanted)


def _bisect(logits: jax.Array, is_enough: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """The largest value t of each row for which `is_enough(logits >= t)`; is_enough must hold for all tokens."""
    keys = _ordered_bits(logits)

    def set_bit(i: jax.Array, threshold: jax.Array) -> jax.Array:
        candidate = threshold | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        return jnp.where(is_enough(keys >= candidate[:, None]), candidate, threshold)

    threshold = jax.lax.fori_loop(0, 32, set_bit, jnp.zeros(logits.shape[:1], jnp.uint32))
    # From the bit pattern back to the value: the smallest logit that the threshold lets through.
    return jnp.where(keys >= threshold[:, None], logits, jnp.inf).min(-1)


def _ordered_bits(x: jax.Array) -> jax.Array:
    """Maps f32 to u32 with the same order: flip all bits of negatives, the sign bit of the rest."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def describe(logits: jax.Array, tokens: jax.Array, sampling: SamplingBatch, max_log_probs: int) -> StepOutput:
    """Returns the tokens i32[B] with their log-probabilities under the unfiltered logits f32[B, V]."""
    B = logits.shape[0]
    maximum = logits.max(-1)
    log_total = maximum + jnp.log(row_sum(jnp.exp(logits - maximum[:, None])))
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]

    def top() -> tuple[jax.Array, jax.Array]:
        values, ids = jax.lax.top_k(logits, max_log_probs)
        return ids.astype(jnp.int32), values - log_total[:, None]

    def nothing() -> tuple[jax.Array, jax.Array]:
        return jnp.zeros((B, max_log_probs), jnp.int32), jnp.zeros((B, max_log_probs), jnp.float32)

    top_tokens, top_log_probs = jax.lax.cond(jnp.any(sampling.num_log_probs > 0), top, nothing)
    return StepOutput(tokens=tokens, log_probs=chosen - log_total, top_tokens=top_tokens, top_log_probs=top_log_probs)
