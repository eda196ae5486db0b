"""The steps: pure functions from (parameters, cache, batch, sampling) to (output, cache), one dispatch each.

The cache is donated: the caller loses it and takes its successor from the result. If parameters and cache are split
over a mesh, pass that mesh to the step.

A step draws its tokens in one of three forms (`sampling_params.FORMS`):

* plain: knows the temperature alone;
* filtered: knows top_k, top_p and min_p too;
* full: honours every parameter, with a condition around each, so that a batch pays only for what it uses.

The host of a GPU waits for the device at every condition, so the first two have none there. They return the logits,
from which `draw_step` draws in another form.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxinfer.model.batch import Batch, StepOutput, VerifyOutput, last_places, next_batch, num_evicted_tokens
from jaxinfer.model.cache import KVCache, read_tokens
from jaxinfer.model.config import ModelConfig
from jaxinfer.model.decoder import forward, forward_with_states, unembed
from jaxinfer.model.params import Params
from jaxinfer.sampling.batch import SamplingBatch
from jaxinfer.sampling.processors import Context, LogitsProcessor, process_logits
from jaxinfer.sampling.prompt_log_probs import PromptBatch, describe_prompt
from jaxinfer.sampling.sample import describe, sample, sample_nothing, sample_with_log_probs, with_vocabulary
from jaxinfer.sampling_params import FORMS, Form
from jaxinfer.steps.multi_step import run_loop
from jaxinfer.steps.trees import along_paths, keep_paths, make_trees, stand_in_trees, tree_mask
from jaxinfer.steps.verify import (
    batch_of_ends,
    draft_state_slots,
    emit,
    ends_of_drafts,
    ends_of_tokens,
    keep_states,
    sampling_of_ends,
)
from jaxinfer.validation import require, require_bool, require_int, require_name, shown

_STATICS = ("config", "implementation", "mesh", "custom")
_jit_step = functools.partial(
    jax.jit,
    static_argnames=("form", "max_log_probs", "sampling_log_probs", "kept_layers", *_STATICS),
    donate_argnames="cache",
)


@functools.partial(
    jax.jit,
    static_argnames=(
        *("form", "max_log_probs", "max_prompt_log_probs", "sampling_log_probs", "kept_layers"),
        *_STATICS,
    ),
    donate_argnames="cache",
)
def prefill_step(
    params: Params,
    cache: KVCache,
    batch: Batch,
    sampling: SamplingBatch,
    prompt: PromptBatch | None = None,
    *,
    config: ModelConfig,
    form: Form = "full",
    max_log_probs: int = 0,
    max_prompt_log_probs: int = 0,
    sampling_log_probs: bool = False,
    implementation: str | None = None,
    mesh: Mesh | None = None,
    custom: tuple[LogitsProcessor, ...] = (),
    kept_layers: tuple[int, ...] = (),
) -> tuple[StepOutput, KVCache]:
    """Computes any mix of chunks and samples one token per row, after its last position.

    A decoding request in the mix is a chunk of one token. The sampled token of a row whose prompt is not finished has
    no meaning. With a `prompt`, the output has the log-probabilities of the prompt tokens in it. `kept_layers` names
    the states for drafters, see `forward_with_states`. Only the full form takes max_log_probs and custom. With
    `sampling_log_probs` the output also has the tokens' log-probabilities in the distribution that they are drawn from.
    Raises ValueError at trace time if max_log_probs exceeds the vocabulary.
    """
    _check(params, cache, batch, sampling, config, mesh)
    finish = _make_finish(sampling, config, form, max_log_probs, sampling_log_probs, custom)
    statics = {"config": config, "kept_layers": kept_layers, "implementation": implementation, "mesh": mesh}
    hidden, states, cache = forward_with_states(params, cache, batch, **statics)
    output = finish(params, cache, hidden[last_places(batch)], batch)
    described = None if prompt is None else describe_prompt(params, hidden, prompt, max_prompt_log_probs)
    return replace(output, hidden=states, prompt=described), cache


@_jit_step
def decode_step(
    params: Params,
    cache: KVCache,
    batch: Batch,
    sampling: SamplingBatch,
    *,
    config: ModelConfig,
    form: Form = "full",
    max_log_probs: int = 0,
    sampling_log_probs: bool = False,
    implementation: str | None = None,
    mesh: Mesh | None = None,
    custom: tuple[LogitsProcessor, ...] = (),
    kept_layers: tuple[int, ...] = (),
) -> tuple[StepOutput, KVCache]:
    """Computes one token per row (T = B, `cu_q_lens` = 0, 1, … B) and samples the next token of each.

    `form` and `sampling_log_probs` are those of `prefill_step`.
    """
    _check(params, cache, batch, sampling, config, mesh)
    finish = _make_finish(sampling, config, form, max_log_probs, sampling_log_probs, custom)
    statics = {"config": config, "kept_layers": kept_layers, "implementation": implementation, "mesh": mesh}
    hidden, states, cache = forward_with_states(params, cache, batch, q_len=1, **statics)
    return replace(finish(params, cache, hidden, batch), hidden=states), cache


@functools.partial(jax.jit, static_argnames=("form", "max_log_probs", "sampling_log_probs", "custom"))
def draw_step(
    cache: KVCache,
    batch: Batch,
    sampling: SamplingBatch,
    logits: jax.Array,
    *,
    form: Form = "full",
    max_log_probs: int = 0,
    sampling_log_probs: bool = False,
    custom: tuple[LogitsProcessor, ...] = (),
) -> StepOutput:
    """Samples in a form from the `logits` f32[B, V] in the output of a prefill or decode step in a lesser form.

    `batch`: the step's `last_tokens`. `sampling`: the step's own, `with_masks` if rows have structures. Returns the
    tokens that the step would have sampled in this form.
    """
    _check_form(form, max_log_probs, sampling_log_probs, custom)
    return _draw(logits, cache, batch, sampling, form, max_log_probs, sampling_log_probs, custom)


@functools.partial(
    jax.jit,
    static_argnames=("q_len", "max_log_probs", "sampling_log_probs", "kept_layers", *_STATICS),
    donate_argnames="cache",
)
def verify_step(
    params: Params,
    cache: KVCache,
    batch: Batch,
    sampling: SamplingBatch,
    parents: jax.Array | None = None,
    num_drafts: jax.Array | None = None,
    *,
    q_len: int,
    config: ModelConfig,
    max_log_probs: int = 0,
    sampling_log_probs: bool = False,
    implementation: str | None = None,
    mesh: Mesh | None = None,
    custom: tuple[LogitsProcessor, ...] = (),
    kept_layers: tuple[int, ...] = (),
) -> tuple[VerifyOutput, KVCache]:
    """Computes each row's last token and its drafts, up to `q_len` tokens a row, and emits the accepted tokens.

    Rows may have fewer drafts, or none. `allowed_bits` of the sampling has a row per token, all other fields one per
    row. The cache of rejected drafts lies past the row's context: the next step overwrites it.

    With `num_drafts` i32[B] a row is any chunk, whose last num_drafts tokens are drafts, at most q_len - 1: other rows
    prefill. Then `allowed_bits` i32[N, W] has a row for each draft and for the token before them. N is at least the
    number of rows and drafts.

    With `parents` i32[T] the drafts of a row are a tree: the index in its row of the token that each token follows, -1
    for the first. `hidden` and the cache are left as if only the accepted path had been drafted, so the masks of all
    rows must be known.
    """
    trees = None if parents is None else make_trees(batch, parents, q_len)
    batch = batch if trees is None else stand_in_trees(batch, trees)
    mask = None if trees is None else tree_mask(trees)
    statics = {"config": config, "kept_layers": kept_layers, "implementation": implementation, "mesh": mesh}
    row_len = q_len if num_drafts is None else None  # rows that prefill may be longer
    if num_drafts is None:
        ends = ends_of_tokens(batch)
    else:
        ends = ends_of_drafts(batch, num_drafts, sampling.processors.allowed_bits.shape[0])
    slots = draft_state_slots(cache, batch, ends, config=config) if config.is_recurrent else None
    options: dict[str, Any] = {"tree_mask": mask, "q_len": row_len, "slots": slots}
    hidden, states, cache = forward_with_states(params, cache, batch, **options, **statics)
    rows = batch_of_ends(batch, ends), sampling_of_ends(sampling, ends)
    finish = _make_finish(rows[1], config, "full", max_log_probs, sampling_log_probs, custom)
    draw = functools.partial(finish, params, cache, hidden[ends.places], rows[0])
    if trees is not None:
        drawn = draw(lambda context: along_paths(context, batch, trees))
        return keep_paths(drawn, cache, batch, trees, states, config=config)
    output = emit(draw(), batch, ends, q_len)
    if config.is_recurrent:
        cache = keep_states(cache, batch, ends, output.num_emitted, config=config)
    return replace(output, hidden=states), cache


@functools.partial(
    jax.jit,
    static_argnames=("num_steps", "form", "max_log_probs", "sampling_log_probs", *_STATICS),
    donate_argnames="cache",
)
def decode_loop(
    params: Params,
    cache: KVCache,
    batch: Batch,
    sampling: SamplingBatch,
    max_tokens: jax.Array,
    *,
    num_steps: int,
    config: ModelConfig,
    form: Form = "full",
    max_log_probs: int = 0,
    sampling_log_probs: bool = False,
    implementation: str | None = None,
    mesh: Mesh | None = None,
    custom: tuple[LogitsProcessor, ...] = (),
) -> tuple[VerifyOutput, KVCache]:
    """Runs `decode_step` `num_steps` times, each on the tokens that the last one sampled.

    Row b emits `max_tokens` i32[B] tokens, from 1 to num_steps, for which `block_tables` must have pages; 0 on padding.
    No token ends a row: drop those after its last. The `allowed_bits` of a row hold for its next token only, so a row
    with a grammar may sample one token at most. `form` is that of `prefill_step`; the output has no logits.
    """
    _check(params, cache, batch, sampling, config, mesh)
    finish = _make_finish(sampling, config, form, max_log_probs, sampling_log_probs, custom)
    statics = {"config": config, "implementation": implementation, "mesh": mesh}

    def decode(cache: KVCache, batch: Batch) -> tuple[StepOutput, KVCache]:
        hidden, cache = forward(params, cache, batch, q_len=1, **statics)
        return finish(params, cache, hidden, batch), cache

    return run_loop(decode, cache, batch, max_tokens, num_steps)


@functools.partial(jax.jit, static_argnames=("max_drafts", "vocab_size", *_STATICS), donate_argnames="cache")
def draft_step(
    params: Params,
    cache: KVCache,
    batch: Batch,
    sampling: SamplingBatch,
    counts: jax.Array,
    *,
    max_drafts: int,
    config: ModelConfig,
    vocab_size: int | None = None,
    implementation: str | None = None,
    mesh: Mesh | None = None,
    custom: tuple[LogitsProcessor, ...] = (),
) -> tuple[jax.Array, KVCache]:
    """Computes any mix of chunks and samples several tokens for each row, one after another, i32[B, max_drafts].

    Row b has `counts[b]` tokens, and all but the last are in the cache as well. Rows with more tokens come first. The
    tokens are those of `decode_step`. `vocab_size` is that of the sampling, if its vocabulary has more or less padding
    than the model's. Only tokens of both are sampled.
    """
    V = config.vocab_size if vocab_size is None else vocab_size

    def run(cache: KVCache, batch: Batch, q_len: int | None) -> tuple[jax.Array, KVCache]:
        if config.vocab_size < V:  # the model has no embedding of the last ids, so another one stands for it
            batch = replace(batch, tokens=jnp.minimum(batch.tokens, config.vocab_size - 1))
        return forward(params, cache, batch, q_len=q_len, config=config, implementation=implementation, mesh=mesh)

    def sampled(hidden: jax.Array, batch: Batch, context: Callable[[], Context]) -> jax.Array:
        logits = with_vocabulary(unembed(params, hidden, _num_rows(batch)), V)
        return sample(process_logits(logits, sampling.processors, context, custom), sampling, _positions(batch))

    # Every row has a token, so if there are no more tokens than rows, each row has one.
    hidden, cache = run(cache, batch, q_len=1 if len(batch.tokens) == len(batch.kv_lens) else None)
    tokens = sampled(hidden[last_places(batch)], batch, functools.partial(_context, cache, batch))
    drafts = jnp.zeros((tokens.shape[0], max_drafts), jnp.int32).at[:, 0].set(tokens)

    def draft(i: jax.Array, carry: tuple[jax.Array, jax.Array, KVCache]) -> tuple[jax.Array, jax.Array, KVCache]:
        drafts, tokens, cache = carry
        one = next_batch(batch, tokens, jnp.where(i < counts, batch.kv_lens + i, 0), cache.tokens.shape[1])
        hidden, cache = run(cache, one, q_len=1)
        tokens = sampled(hidden, one, functools.partial(_context, cache, one))
        return drafts.at[:, i].set(tokens), tokens, cache

    drafts, _, cache = jax.lax.fori_loop(1, counts.max(), draft, (drafts, tokens, cache))
    return drafts, cache


def _check(params: Any, cache: Any, batch: Any, sampling: Any, config: Any, mesh: Any) -> None:
    """Raises ValueError for an argument of another type. It runs when a step is traced, so it takes no time later."""
    require(isinstance(params, Params), "params", params, "the Params of `load_checkpoint`")
    require(isinstance(cache, KVCache), "cache", cache, "the KVCache of `init_cache` or of the step before")
    require(isinstance(batch, Batch), "batch", batch, "the Batch of `make_batch`")
    require(isinstance(sampling, SamplingBatch), "sampling", sampling, "the SamplingBatch of `make_sampling`")
    require(isinstance(config, ModelConfig), "config", config, "the ModelConfig of `load_checkpoint`")
    require(mesh is None or isinstance(mesh, Mesh), "mesh", mesh, "a jax.sharding.Mesh or None")


def _check_sampling(sampling: SamplingBatch, config: ModelConfig, max_log_probs: Any, custom: Any) -> None:
    """Raises ValueError, when a step is traced, for options of the full form that do not fit the model or the batch."""
    require_int("max_log_probs", max_log_probs, 0, config.vocab_size)
    require(isinstance(custom, tuple) and all(map(callable, custom)), "custom", custom, "a tuple of functions")
    names = sampling.processors.uses_custom.shape[-1]
    require(len(custom) == names, "custom", custom, f"the functions of the {names} names that make_sampling was given")


# (parameters, cache, states [B, D] of each row's last token, batch[, change]) -> output of a step; `change` changes the
# context of the logits processors.
Finish = Callable[..., StepOutput]
Change = Callable[[Context], Context]


def _make_finish(
    sampling: SamplingBatch, config: ModelConfig, form: Any, max_log_probs: Any, sampling_log_probs: Any, custom: Any
) -> Finish:
    """Returns the end of a step, which samples a token after each row."""
    _check_form(form, max_log_probs, sampling_log_probs, custom)
    if form == "full":
        _check_sampling(sampling, config, max_log_probs, custom)

    def finish(
        params: Params, cache: KVCache, hidden: jax.Array, batch: Batch, change: Change = lambda context: context
    ) -> StepOutput:
        if params.logits is None:
            return sample_nothing(hidden, max_log_probs)
        logits = unembed(params, hidden, _num_rows(batch))
        output = _draw(logits, cache, batch, sampling, form, max_log_probs, sampling_log_probs, custom, change)
        return output if form == "full" else replace(output, logits=logits)

    return finish


def _check_form(form: Any, max_log_probs: Any, sampling_log_probs: Any, custom: Any) -> None:
    require_name("form", form, FORMS)
    require_bool("sampling_log_probs", sampling_log_probs)
    if form != "full" and (max_log_probs or custom):
        raise ValueError(
            f"form={form!r} leaves no place for max_log_probs={max_log_probs} and custom={shown(custom)}; give them to"
            " draw_step, or draw in the full form"
        )


def _draw(
    logits: jax.Array,
    cache: KVCache,
    batch: Batch,
    sampling: SamplingBatch,
    form: Form,
    max_log_probs: int,
    sampling_log_probs: bool,
    custom: tuple[LogitsProcessor, ...],
    change: Change = lambda context: context,
) -> StepOutput:
    """Samples after each row in a form; `change` changes the context of the logits processors."""
    processed = logits
    if form == "full":
        processed = process_logits(logits, sampling.processors, lambda: change(_context(cache, batch)), custom)
    if not sampling_log_probs:
        return describe(logits, sample(processed, sampling, _positions(batch), form=form), sampling, max_log_probs)
    tokens, values = sample_with_log_probs(processed, sampling, _positions(batch), form=form)
    return replace(describe(logits, tokens, sampling, max_log_probs), sampling_log_probs=values)


def _positions(batch: Batch) -> jax.Array:
    """Returns the position of each row's sampled token, i32[B]."""
    return batch.kv_lens + num_evicted_tokens(batch)


def _num_rows(batch: Batch) -> jax.Array:
    return (batch.kv_lens > 0).sum()


def _context(cache: KVCache, batch: Batch) -> Context:
    return Context(tokens=read_tokens(cache, batch), lens=batch.kv_lens, num_evicted_tokens=num_evicted_tokens(batch))
