"""From logits to tokens, on the device, inside the step.

Filters are cuts on the logits of a row, found by bisection over the bit patterns of floats: passes of compare and add
give the exact k-th largest value or the exact nucleus, without a sort, which is slow on every device. A filter is
computed only if a request in the batch uses it, but for the filtered form on GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.model.batch import StepOutput
from jaxinfer.model.decoder import is_split, logits_sharding
from jaxinfer.sampling.batch import SamplingBatch
from jaxinfer.sampling.processors import when_used
from jaxinfer.sampling_params import BAD_LOGITS, NO_TOKEN, Form
from kernels_pallas.exact_sums import highest_enough, sums_are_exact
from kernels_pallas.mesh_axes import over_devices
from kernels_pallas.row_products import row_sum

T = TypeVar("T")


class Purpose(IntEnum):
    """What a random draw is for, so that no two draws of one position are the same."""

    TOKEN = 0


def sample(logits: jax.Array, sampling: SamplingBatch, positions: jax.Array, *, form: Form = "full") -> jax.Array:
    """Draws a token i32[B] per row of logits f32[B, V].

    Temperature first, then top-k, top-p, min-p and typical-p on what is left, then one draw by the Gumbel-max rule. The
    draw is a function of the row's (seed, sample index, position) and its logits alone. `positions` i32[B] are those of
    the drawn tokens. Temperature 0 takes the most probable token, the lowest id among equals. Where all logits of a row
    are -inf, its token is NO_TOKEN; where one is NaN or inf, BAD_LOGITS. `form`: as in `steps`.
    """
    greedy = _most_probable(logits)

    def draw() -> jax.Array:
        return _drawn(perturb(logits, sampling, positions, form=form), greedy, sampling, form)

    return _if_used(draw, lambda: greedy, sampling, form)


def sample_with_log_probs(
    logits: jax.Array, sampling: SamplingBatch, positions: jax.Array, *, form: Form = "full"
) -> tuple[jax.Array, jax.Array]:
    """Returns the tokens i32[B] of `sample`, and the log-probability f32[B] of each in the distribution of the draw.

    That is the distribution after temperature and filters; at temperature 0 it has one token, so 0.0.
    """
    greedy = _most_probable(logits)

    def draw() -> tuple[jax.Array, jax.Array]:
        kept = keep(logits, sampling, form=form)
        tokens = _drawn(kept + _noise(sampling, positions, logits.shape[1]), greedy, sampling, form)
        chosen, log_total = chosen_logits(kept, jnp.maximum(tokens, 0))
        return tokens, jnp.where(sampling.temperature > 0, chosen - log_total, 0.0)

    return _if_used(draw, lambda: (greedy, jnp.zeros(greedy.shape)), sampling, form)


def _most_probable(logits: jax.Array) -> jax.Array:
    """Returns the most probable token i32[B] of each row, NO_TOKEN or BAD_LOGITS."""
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    greatest = jnp.take_along_axis(logits, greedy[:, None], axis=-1)[:, 0]
    return jnp.where(jnp.isfinite(greatest), greedy, jnp.where(greatest == -jnp.inf, NO_TOKEN, BAD_LOGITS))


def _drawn(perturbed: jax.Array, greedy: jax.Array, sampling: SamplingBatch, form: Form) -> jax.Array:
    """Returns the token i32[B] of each row: the greatest of `perturb`, or `greedy` if the row draws none."""
    if form == "full":
        # For a v6e, noise of 64 rows of 151,936 tokens in one operation with the argmax takes 5.8 s to compile, apart
        # from it 2.5 s (libtpu 0.0.42.1). The other forms, which draw most tokens, do not write the noise to memory.
        perturbed = jax.lax.platform_dependent(perturbed, tpu=jax.lax.optimization_barrier, default=lambda x: x)
    drawn = jnp.argmax(perturbed, axis=-1).astype(jnp.int32)
    return jnp.where((sampling.temperature > 0) & (greedy >= 0), drawn, greedy)


def _if_used(draw: Callable[[], T], take_greedy: Callable[[], T], sampling: SamplingBatch, form: Form) -> T:
    """Returns draw(), or take_greedy() if no row has a temperature above 0."""

    def draw_if_used() -> T:
        return jax.lax.cond(jnp.any(sampling.temperature > 0), draw, take_greedy)

    if form == "full":
        return draw_if_used()
    # The host of a GPU waits for each condition, and noise takes a GPU less than that; elsewhere noise takes longer.
    return jax.lax.platform_dependent(cuda=draw, rocm=draw, default=draw_if_used)


def perturb(logits: jax.Array, sampling: SamplingBatch, positions: jax.Array, *, form: Form = "full") -> jax.Array:
    """Returns logits f32[B, V] by temperature, filters and noise; the greatest is what a temperature above 0 draws.

    `form`: as in `steps`.
    """
    return keep(logits, sampling, form=form) + _noise(sampling, positions, logits.shape[1])


def keep(logits: jax.Array, sampling: SamplingBatch, *, form: Form = "full") -> jax.Array:
    """Returns logits f32[B, V] after temperature and filters, as `scale` and `filter_logits` define them.

    `form`: as in `steps`.
    """
    scaled = scale(logits, sampling)
    return scaled if form == "plain" else filter_logits(scaled, sampling, form=form)


def scale(logits: jax.Array, sampling: SamplingBatch) -> jax.Array:
    """Returns logits f32[B, V] less the greatest of their row, divided by the row's temperature unless that is 0."""
    # Below the most probable by the maximum, so that no temperature can overflow; the smallest are all the same.
    temperature = jnp.where(sampling.temperature > 0, jnp.maximum(sampling.temperature, 1e-30), 1.0)
    return (logits - logits.max(-1, keepdims=True)) / temperature[:, None]


def _noise(sampling: SamplingBatch, positions: jax.Array, vocab_size: int) -> jax.Array:
    """Returns Gumbel noise f32[B, V] by the keys of the rows' draws."""
    return jax.vmap(lambda key: jax.random.gumbel(key, (vocab_size,)))(draw_keys(sampling, positions))


def best_tokens(logits: jax.Array, sampling: SamplingBatch, positions: jax.Array, count: int) -> jax.Array:
    """Returns what `sample` draws, and what it would draw were that ruled out, and so on, i32[B, count]."""
    if count == 1:
        return sample(logits, sampling, positions)[:, None]
    is_drawn = sampling.temperature > 0
    scores = jax.lax.cond(
        jnp.any(is_drawn),
        lambda: jnp.where(is_drawn[:, None], perturb(logits, sampling, positions), logits),
        lambda: logits,
    )
    best = []
    for _ in range(count):
        best.append(jnp.argmax(scores, axis=-1).astype(jnp.int32))
        scores = jnp.where(jnp.arange(scores.shape[1])[None] == best[-1][:, None], -jnp.inf, scores)
    return jnp.stack(best, axis=1)


def draw_keys(sampling: SamplingBatch, positions: jax.Array, purpose: Purpose = Purpose.TOKEN) -> jax.Array:
    """Returns one key per row: fold_in(fold_in(fold_in(key(seed), sample index), position), purpose)."""

    def row_key(seed: jax.Array, sample_index: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        for number in (sample_index, position, int(purpose)):
            key = jax.random.fold_in(key, number)
        return key

    return jax.vmap(row_key)(sampling.seeds, sampling.sample_index, positions)


def filter_logits(logits: jax.Array, sampling: SamplingBatch, *, form: Form = "full") -> jax.Array:
    """Returns logits f32[B, V] with -inf where top-k, top-p, min-p, then typical-p of the row rules a token out.

    Definitions as in `transformers`: top-k keeps values not below the k-th largest; top-p keeps the smallest set of the
    most probable tokens whose probability, among what top-k kept, reaches p; min-p keeps tokens at least p times as
    probable as the most probable one; typical-p keeps the smallest set of tokens, the nearest to the expected surprise
    first, whose probability reaches p (Meister et al. 2022). Equal logits stay or go together. The filtered form knows
    no typical-p.
    """

    if form == "full":
        return _filter_if_used(logits, sampling)
    options = {"cuda": _filter_always, "rocm": _filter_always, "default": _filter_if_used}
    return jax.lax.platform_dependent(logits, sampling, **options)


def _filter_if_used(logits: jax.Array, sampling: SamplingBatch) -> jax.Array:
    is_used = jnp.stack([sampling.top_k > 0, sampling.top_p < 1, sampling.typical_p < 1])

    def cut(mass: jax.Array, x: jax.Array) -> jax.Array:
        x = jnp.where(mass == Mass.TYPICAL, _cut_by_min_p(x, sampling), x)
        return when_used(is_used[mass], lambda x: _cut_by_mass(x, mass, sampling), x)

    # A loop, for a bisection is long to compile. Min-p has none; its turn is before the last.
    return jax.lax.fori_loop(0, len(Mass), cut, logits)


def _filter_always(logits: jax.Array, sampling: SamplingBatch) -> jax.Array:
    """The filters of the filtered form, without conditions and loops, for which the host of a GPU would wait."""
    for mass, is_used in ((Mass.TOP_K, sampling.top_k > 0), (Mass.TOP_P, sampling.top_p < 1)):
        logits = jnp.where(is_used[:, None], _cut_by_mass(logits, jnp.int32(mass), sampling), logits)
    return _cut_by_min_p(logits, sampling)


def _cut_by_min_p(logits: jax.Array, sampling: SamplingBatch) -> jax.Array:
    return jnp.where(logits < (logits.max(-1) + jnp.log(sampling.min_p))[:, None], -jnp.inf, logits)


class Mass(IntEnum):
    """The filters that keep the tokens of highest value up to some total weight."""

    TOP_K = 0  # values: logits; a weight of 1 each, up to k
    TOP_P = 1  # values: logits; their probabilities, up to p
    TYPICAL = 2  # values: minus the distance from the expected surprise; their probabilities, up to p


def _cut_by_mass(logits: jax.Array, mass: jax.Array, sampling: SamplingBatch) -> jax.Array:
    below_top = logits - logits.max(-1, keepdims=True)
    weights = jnp.exp(below_top)
    total = row_sum(weights)
    p = jnp.where(mass == Mass.TOP_P, sampling.top_p, sampling.typical_p)
    # Not 0, even where p is too small for a float: the greatest value stays.
    wanted = jnp.where(mass == Mass.TOP_K, sampling.top_k.astype(jnp.float32), jnp.maximum(p * total, 1e-30))
    values = jnp.where(mass == Mass.TYPICAL, _typicality(below_top, weights, total), logits)
    weights = jnp.where(mass == Mass.TOP_K, 1.0, weights)
    threshold = _bisect(values, weights, wanted)
    return jnp.where(values < threshold[:, None], -jnp.inf, logits)


def _typicality(below_top: jax.Array, weights: jax.Array, total: jax.Array) -> jax.Array:
    """Minus the distance of each token's surprise from the expected one, f32[B, V] (Meister et al. 2022)."""
    surprise = jnp.log(total)[:, None] - below_top
    expected = row_sum(jnp.where(weights > 0, weights * surprise, 0.0)) / total
    return -jnp.abs(surprise - expected[:, None])


def _bisect(values: jax.Array, weights: jax.Array, wanted: jax.Array) -> jax.Array:
    """Returns the largest value t of each row so that the weights of values >= t add up to `wanted` f32[B]; else the
    least value. values and weights: f32[B, V].

    A CPU finds the threshold bit by bit. Other devices find four bits at a time, in a quarter of the launches; a TPU
    in a loop, a GPU without one, for its host launches each turn.
    """
    keys = _ordered_bits(values)
    bit_by_bit, by_digits = (partial(_highest_enough, num_bits=num_bits) for num_bits in (1, 4))
    elsewhere = highest_enough if sums_are_exact() else partial(_highest_enough_unrolled, num_bits=4)
    forms = {"cpu": bit_by_bit, "tpu": by_digits, "default": elsewhere}
    threshold = jax.lax.platform_dependent(keys, weights, wanted, **forms)
    # From the bit pattern back to the value: the smallest that the threshold lets through.
    return jnp.where(keys >= threshold[:, None], values, jnp.inf).min(-1)


def _highest_enough(keys: jax.Array, weights: jax.Array, wanted: jax.Array, *, num_bits: int) -> jax.Array:
    """Returns the largest u32[B] so that the weights f32[B, V] of keys u32[B, V] at or above it add up to `wanted`."""
    set_digit = _setter_of_digits(keys, weights, wanted, num_bits)
    return jax.lax.fori_loop(0, 32 // num_bits, set_digit, jnp.zeros(keys.shape[:1], jnp.uint32))


def _highest_enough_unrolled(keys: jax.Array, weights: jax.Array, wanted: jax.Array, *, num_bits: int) -> jax.Array:
    """`_highest_enough` without a loop."""
    set_digit = _setter_of_digits(keys, weights, wanted, num_bits)
    threshold = jnp.zeros(keys.shape[:1], jnp.uint32)
    for i in range(32 // num_bits):
        threshold = set_digit(i, threshold)
    return threshold


def _setter_of_digits(
    keys: jax.Array, weights: jax.Array, wanted: jax.Array, num_bits: int
) -> Callable[[jax.Array | int, jax.Array], jax.Array]:
    """Returns the function (i, threshold u32[B]) -> threshold with digit i, counted from the highest, of `num_bits`.

    The sums of all digits come from one pass over the row, and the number of them that are enough is the digit, for a
    higher digit never adds more weights.
    """

    def set_digit(i: jax.Array | int, threshold: jax.Array) -> jax.Array:
        shift = jnp.uint32(32 - num_bits) - jnp.uint32(num_bits) * jnp.uint32(i)
        candidates = threshold[:, None] | (jnp.arange(1, 2**num_bits, dtype=jnp.uint32)[None] << shift)
        is_above = keys[:, None] >= candidates[..., None]
        are_enough = row_sum(jnp.where(is_above, weights[:, None], 0.0)) >= wanted[:, None]
        return threshold | (are_enough.sum(-1, dtype=jnp.uint32) << shift)

    return set_digit


def _ordered_bits(x: jax.Array) -> jax.Array:
    """Maps f32 to u32 with the same order: flip all bits of negatives, the sign bit of the rest."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def describe(
    logits: jax.Array, tokens: jax.Array, sampling: SamplingBatch, max_log_probs: int, *, mesh: Mesh | None = None
) -> StepOutput:
    """Returns the tokens i32[B] with their log-probabilities under the unfiltered logits f32[B, V].

    `mesh` is the one that logits are split over, if any.

    Of a row in which these have NaN or inf, or no finite one, the token is BAD_LOGITS, whatever was drawn.
    """
    wants_top = jnp.any(sampling.num_log_probs > 0)
    log_probs, top_tokens, top_log_probs = log_probs_of(logits, tokens, wants_top, max_log_probs, mesh=mesh)
    tokens = jnp.where(jnp.isnan(log_probs), BAD_LOGITS, tokens)
    return StepOutput(tokens=tokens, log_probs=log_probs, top_tokens=top_tokens, top_log_probs=top_log_probs)


def with_vocabulary(logits: jax.Array, vocab_size: int) -> jax.Array:
    """Returns logits f32[B, V] of the first `vocab_size` tokens; those of tokens past V are -inf."""
    missing = vocab_size - logits.shape[1]
    if missing <= 0:
        return logits[:, :vocab_size]
    return jnp.pad(logits, ((0, 0), (0, missing)), constant_values=-jnp.inf)


def sample_nothing(hidden: jax.Array, max_log_probs: int) -> StepOutput:
    """Returns the output of a model without logits after states [B, D]: NO_TOKEN, or BAD_LOGITS for bad states."""
    B = hidden.shape[0]
    tokens = jnp.where(jnp.isfinite(hidden).all(-1), jnp.int32(NO_TOKEN), jnp.int32(BAD_LOGITS))
    ids = jnp.zeros((B, max_log_probs), jnp.int32)
    return StepOutput(tokens=tokens, log_probs=jnp.zeros(B), top_tokens=ids, top_log_probs=ids.astype(jnp.float32))


def chosen_logits(logits: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the logits f32[B] of tokens i32[B], and log(sum(exp(logits))): the difference is a log-probability."""
    maximum = jax.lax.stop_gradient(logits.max(-1))
    log_total = maximum + jnp.log(row_sum(jnp.exp(logits - maximum[:, None])))
    return jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0], log_total


def split_top_k(logits: jax.Array, count: int, sharding: NamedSharding | None) -> tuple[jax.Array, jax.Array]:
    """Returns the `count` greatest of each row of logits f32[B, V] and their places, as `jax.lax.top_k` does.

    Devices that share the rows by `sharding` first take the greatest of their own part. So none gets all logits, as it
    does by XLA over a mesh of two axes.
    """
    axis = None if sharding is None else sharding.spec[1]
    if sharding is None or axis is None:
        return jax.lax.top_k(logits, count)

    def take_own(own: jax.Array) -> tuple[jax.Array, jax.Array]:
        values, ids = jax.lax.top_k(own, min(count, own.shape[1]))
        return values, ids + jax.lax.axis_index(axis) * own.shape[1]

    of_rows, whole = PartitionSpec(None, axis), NamedSharding(sharding.mesh, PartitionSpec())
    take = over_devices(take_own, sharding.mesh, in_specs=of_rows, out_specs=of_rows)
    # Of equal ones the first is taken in both turns, which has the least place.
    values, ids = jax.lax.with_sharding_constraint(take(logits), whole)
    values, places = jax.lax.top_k(values, count)
    return values, jnp.take_along_axis(ids, places, axis=1)


def log_probs_of(
    logits: jax.Array, tokens: jax.Array, wants_top: jax.Array, max_log_probs: int, *, mesh: Mesh | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the log-probabilities f32[B] of tokens i32[B] under logits f32[B, V], and the most probable tokens with
    theirs, i32[B, A] and f32[B, A], best first. These are zeros unless `wants_top` (bool[]).
    """
    B = logits.shape[0]
    chosen, log_total = chosen_logits(logits, tokens)

    def top() -> tuple[jax.Array, jax.Array]:
        sharding = logits_sharding(mesh, logits.shape[1]) if is_split(mesh) else None
        values, ids = split_top_k(logits, max_log_probs, sharding)
        return ids.astype(jnp.int32), values - log_total[:, None]

    def nothing() -> tuple[jax.Array, jax.Array]:
        return jnp.zeros((B, max_log_probs), jnp.int32), jnp.zeros((B, max_log_probs), jnp.float32)

    ids, values = jax.lax.cond(wants_top, top, nothing) if max_log_probs else nothing()
    return chosen - log_total, ids, values
