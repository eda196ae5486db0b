"""The steps: pure functions from (parameters, cache, batch, sampling) to (output, cache), one dispatch each.

The cache is donated: the caller loses it and takes its successor from the result. If parameters and cache are split
over a mesh, pass that mesh to the step. All that is static is one `StepOptions`.

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
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.model.batch import Batch, StepOutput, VerifyOutput, last_places, next_batch, num_evicted_tokens, step_rows
from jaxinfer.model.cache import KVCache, cache_shardings, read_tokens
from jaxinfer.model.config import ModelConfig
from jaxinfer.model.decoder import forward_with_states, logits_sharding, step_context, unembed
from jaxinfer.model.params import Params, check_mesh
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
from jaxinfer.validation import as_ints, require, require_bool, require_int, require_name, shown
from kernels_pallas.exact_sums import exact_sums

Output = TypeVar("Output")
_FORM_AND_LOG_PROBS = ("form", "max_log_probs", "sampling_log_probs")
# Every step takes them; `draw_step`, which has no layers, needs only some.
_OF_ALL = frozenset({"config", "custom", "implementation", "exact", "mesh"})


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """The static options of a step.

    The numbers of a step's tokens and turns, `q_len`, `num_steps`, `max_drafts` and `vocab_size`, are for the one step
    that describes them. A step refuses options that it has no use for.

    Raises ValueError for a value that no step takes.
    """

    config: ModelConfig
    form: Form = "full"  # of drawing, see `jaxinfer.steps.steps`
    max_log_probs: int = 0  # most alternatives that a row asks for; in the full form only
    max_prompt_log_probs: int = 0  # most alternatives for each token of a prompt
    # The output also has the tokens' log-probabilities in the distribution that they are drawn from.
    sampling_log_probs: bool = False
    custom: tuple[LogitsProcessor, ...] = ()  # functions of the names in `make_sampling`; in the full form only
    kept_layers: tuple[int, ...] = ()  # the states for drafters, see `forward_with_states`
    implementation: str | None = None  # a kernel of paged attention; None: the best
    exact: bool = False  # a GPU adds up in one order, see `kernels_pallas.exact_sums`
    mesh: Mesh | None = None  # the mesh that parameters and cache are split over, if any
    q_len: int | None = None  # of `verify_step`: most tokens of a row, its drafts and the one before them
    num_steps: int | None = None  # of `decode_loop`
    max_drafts: int | None = None  # of `draft_step`: tokens per row
    vocab_size: int | None = None  # of `draft_step`: that of the sampling; None: the model's

    def __post_init__(self) -> None:
        require(isinstance(self.config, ModelConfig), "config", self.config, "the ModelConfig of `load_checkpoint`")
        require(self.mesh is None or isinstance(self.mesh, Mesh), "mesh", self.mesh, "a jax.sharding.Mesh or None")
        if self.mesh is not None:
            check_mesh(self.mesh)
        require_name("form", self.form, FORMS)
        for name in ("sampling_log_probs", "exact"):
            require_bool(name, getattr(self, name))
        for name in ("max_log_probs", "max_prompt_log_probs"):
            require_int(name, getattr(self, name), 0, self.config.vocab_size)
        for name in ("q_len", "num_steps", "max_drafts", "vocab_size"):
            if getattr(self, name) is not None:
                require_int(name, getattr(self, name), 1)
        are_functions = isinstance(self.custom, tuple) and all(map(callable, self.custom))
        require(are_functions, "custom", self.custom, "a tuple of functions")
        is_name = self.implementation is None or isinstance(self.implementation, str)
        require(is_name, "implementation", self.implementation, "the name of a kernel or None")
        as_ints("kept_layers", self.kept_layers)
        require(isinstance(self.kept_layers, tuple), "kept_layers", self.kept_layers, "a tuple")
        if self.form != "full" and (self.max_log_probs or self.custom):
            raise ValueError(
                f"form={self.form!r} leaves no place for max_log_probs={self.max_log_probs} and"
                f" custom={shown(self.custom)}; give them to draw_step, or draw in the full form"
            )


def check_options(options: Any, step: str, *used: str) -> None:
    """Raises ValueError for options of a step that it does not use, beside the `used` and those of all steps."""
    require(isinstance(options, StepOptions), "options", options, "StepOptions(config=…)")
    for field in fields(options):
        value = getattr(options, field.name)
        if field.name not in {*used, *_OF_ALL} and field.default is not MISSING and value != field.default:
            raise ValueError(f"{field.name}={shown(value)} is not allowed: {step} has no use for it; leave it out")


def _in_order(step: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a step whose sums are exact if its options say so."""

    @functools.wraps(step)
    def run(*arguments: Any, options: StepOptions, **others: Any) -> Any:
        with exact_sums(isinstance(options, StepOptions) and options.exact):
            return step(*arguments, options=options, **others)

    return run


def _jit_step(step: Callable[..., Any]) -> Any:
    return jax.jit(_in_order(step), static_argnames="options", donate_argnames="cache")


@_jit_step
def prefill_step(
    params: Params,
    cache: KVCache,
    batch: Batch,
    sampling: SamplingBatch,
    prompt: PromptBatch | None = None,
    *,
    options: StepOptions,
) -> tuple[StepOutput, KVCache]:
    """Computes any mix of chunks and samples one token per row, after its last position.

    A decoding request in the mix is a chunk of one token. The sampled token of a row whose prompt is not finished has
    no meaning. With a `prompt`, the output has the log-probabilities of the prompt tokens in it. Raises ValueError at
    trace time for wrong arguments.
    """
    check_options(options, "prefill_step", *_FORM_AND_LOG_PROBS, "max_prompt_log_probs", "kept_layers")
    _check(params, cache, batch, sampling, options)
    hidden, states, cache = _forward(params, cache, batch, options)
    output = _finish(params, cache, hidden[last_places(batch)], batch, sampling, options)
    described = None
    if prompt is not None:
        described = describe_prompt(params, hidden, prompt, options.max_prompt_log_probs, mesh=options.mesh)
    return placed(replace(output, hidden=states, prompt=described), cache, options)


@_jit_step
def decode_step(
    params: Params,
    cache: KVCache,
    batch: Batch,
    sampling: SamplingBatch,
    *,
    options: StepOptions,
) -> tuple[StepOutput, KVCache]:
    """Computes one token per row (T = B, `cu_q_lens` = 0, 1, … B) and samples the next token of each."""
    check_options(options, "decode_step", *_FORM_AND_LOG_PROBS, "kept_layers")
    _check(params, cache, batch, sampling, options)
    hidden, states, cache = _forward(params, cache, batch, options, q_len=1)
    return placed(replace(_finish(params, cache, hidden, batch, sampling, options), hidden=states), cache, options)


@functools.partial(jax.jit, static_argnames="options")
@_in_order
def draw_step(
    cache: KVCache,
    batch: Batch,
    sampling: SamplingBatch,
    logits: jax.Array,
    *,
    options: StepOptions,
) -> StepOutput:
    """Samples in `options.form` from the `logits` f32[B, V] in the output of a prefill or decode step in a lesser form.

    `batch`: the step's `last_tokens`. `sampling`: the step's own, `with_masks` if rows have structures. Returns the
    tokens that the step would have sampled in this form.
    """
    check_options(options, "draw_step", *_FORM_AND_LOG_PROBS)
    return replicated(_draw(logits, cache, batch, sampling, options), options.mesh)


@_jit_step
def verify_step(
    params: Params,
    cache: KVCache,
    batch: Batch,
    sampling: SamplingBatch,
    parents: jax.Array | None = None,
    num_drafts: jax.Array | None = None,
    *,
    options: StepOptions,
) -> tuple[VerifyOutput, KVCache]:
    """Computes each row's last token and its drafts, `options.q_len` tokens at most, and emits the accepted tokens.

    Rows may have fewer drafts, or none. `allowed_bits` of the sampling has a row per token, all other fields one per
    row. The cache of rejected drafts lies past the row's context: the next step overwrites it.

    With `num_drafts` i32[B] a row is any chunk, whose last num_drafts tokens are drafts, at most q_len - 1: other rows
    prefill. Then `allowed_bits` i32[N, W] has a row for each draft and for the token before them. N is at least the
    number of rows and drafts.

    With `parents` i32[T] the drafts of a row are a tree: the index in its row of the token that each token follows, -1
    for the first. `hidden` and the cache are left as if only the accepted path had been drafted, so the masks of all
    rows must be known.
    """
    check_options(options, "verify_step", "max_log_probs", "sampling_log_probs", "kept_layers", "q_len")
    _check(params, cache, batch, sampling, options)
    config, q_len = options.config, _given(options, "q_len")
    trees = None if parents is None else make_trees(batch, parents, q_len)
    batch = batch if trees is None else stand_in_trees(batch, trees)
    mask = None if trees is None else tree_mask(trees)
    row_len = q_len if num_drafts is None else None  # rows that prefill may be longer
    if num_drafts is None:
        ends = ends_of_tokens(batch)
    else:
        ends = ends_of_drafts(batch, num_drafts, sampling.processors.allowed_bits.shape[0])
    slots = draft_state_slots(cache, batch, ends, config=config) if config.is_recurrent else None
    hidden, states, cache = _forward(params, cache, batch, options, tree_mask=mask, q_len=row_len, slots=slots)
    rows = batch_of_ends(batch, ends), sampling_of_ends(sampling, ends)
    draw = functools.partial(_finish, params, cache, hidden[ends.places], *rows, options)
    if trees is not None:
        drawn = draw(lambda context: along_paths(context, batch, trees))
        return placed(*keep_paths(drawn, cache, batch, trees, states, config=config, mesh=options.mesh), options)
    output = emit(draw(), batch, ends, q_len)
    if config.is_recurrent:
        cache = keep_states(cache, batch, ends, output.num_emitted, config=config, mesh=options.mesh)
    return placed(replace(output, hidden=states), cache, options)


@_jit_step
def decode_loop(
    params: Params,
    cache: KVCache,
    batch: Batch,
    sampling: SamplingBatch,
    max_tokens: jax.Array,
    *,
    options: StepOptions,
) -> tuple[VerifyOutput, KVCache]:
    """Runs `decode_step` `options.num_steps` times, each on the tokens that the last one sampled.

    Row b emits `max_tokens` i32[B] tokens, from 1 to num_steps, for which `block_tables` must have pages; 0 on padding.
    No token ends a row: drop those after its last. The `allowed_bits` of a row hold for its next token only, so a row
    with a grammar may sample one token at most. The output has no logits.
    """
    check_options(options, "decode_loop", *_FORM_AND_LOG_PROBS, "num_steps")
    _check(params, cache, batch, sampling, options)

    def decode(cache: KVCache, batch: Batch) -> tuple[StepOutput, KVCache]:
        hidden, _, cache = _forward(params, cache, batch, options, q_len=1)
        return _finish(params, cache, hidden, batch, sampling, options), cache

    return placed(*run_loop(decode, cache, batch, max_tokens, _given(options, "num_steps")), options)


@_jit_step
def draft_step(
    params: Params,
    cache: KVCache,
    batch: Batch,
    sampling: SamplingBatch,
    counts: jax.Array,
    *,
    options: StepOptions,
) -> tuple[jax.Array, KVCache]:
    """Computes any mix of chunks and samples several tokens for each row, one after another, i32[B, max_drafts].

    Row b has `counts[b]` tokens, and all but the last are in the cache as well. Rows with more tokens come first. The
    tokens are those of `decode_step`. Give `vocab_size` if the sampling's vocabulary has more or less padding than the
    model's. Only tokens of both are sampled.
    """
    check_options(options, "draft_step", "max_drafts", "vocab_size")
    config, max_drafts = options.config, _given(options, "max_drafts")
    V = config.vocab_size if options.vocab_size is None else options.vocab_size

    def run(cache: KVCache, batch: Batch, q_len: int | None) -> tuple[jax.Array, KVCache]:
        if config.vocab_size < V:  # the model has no embedding of the last ids, so another one stands for it
            batch = replace(batch, tokens=jnp.minimum(batch.tokens, config.vocab_size - 1))
        hidden, _, cache = _forward(params, cache, batch, options, q_len=q_len)
        return hidden, cache

    def sampled(hidden: jax.Array, batch: Batch, context: Callable[[], Context]) -> jax.Array:
        logits = with_vocabulary(unembed(params, hidden, step_rows(batch), mesh=options.mesh), V)
        return sample(process_logits(logits, sampling.processors, context, options.custom), sampling, _positions(batch))

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
    return placed(drafts, cache, options)


def _check(params: Any, cache: Any, batch: Any, sampling: Any, options: StepOptions) -> None:
    """Raises ValueError for an argument of another type. It runs when a step is traced, so it takes no time later."""
    require(isinstance(params, Params), "params", params, "the Params of `load_checkpoint`")
    require(isinstance(cache, KVCache), "cache", cache, "the KVCache of `init_cache` or of the step before")
    require(isinstance(batch, Batch), "batch", batch, "the Batch of `make_batch`")
    require(isinstance(sampling, SamplingBatch), "sampling", sampling, "the SamplingBatch of `make_sampling`")
    if options.form == "full":
        names, custom = sampling.processors.uses_custom.shape[-1], options.custom
        functions = f"the functions of the {names} names that make_sampling was given"
        require(len(custom) == names, "custom", custom, functions)


def _given(options: StepOptions, name: str) -> int:
    value = getattr(options, name)
    require(value is not None, name, value, "given in the options of this step")
    return value


def _forward(
    params: Params, cache: KVCache, batch: Batch, options: StepOptions, **of_step: Any
) -> tuple[jax.Array, jax.Array, KVCache]:
    """Returns the results of `forward_with_states`; `of_step` are options of `step_context`."""
    config, statics = options.config, {"implementation": options.implementation, "mesh": options.mesh}
    context = step_context(batch, config=config, page_size=cache.tokens.shape[1], **statics, **of_step)
    return forward_with_states(params, cache, context, config=config, kept_layers=options.kept_layers)


# Changes the context of the logits processors.
Change = Callable[[Context], Context]


def _finish(
    params: Params,
    cache: KVCache,
    hidden: jax.Array,
    batch: Batch,
    sampling: SamplingBatch,
    options: StepOptions,
    change: Change = lambda context: context,
) -> StepOutput:
    """Returns the output of a step, which samples a token after the state [B, D] of each row's last token."""
    if params.logits is None:
        return sample_nothing(hidden, options.max_log_probs)
    logits = unembed(params, hidden, step_rows(batch), mesh=options.mesh)
    output = _draw(logits, cache, batch, sampling, options, change)
    return output if options.form == "full" else replace(output, logits=logits)


def _draw(
    logits: jax.Array,
    cache: KVCache,
    batch: Batch,
    sampling: SamplingBatch,
    options: StepOptions,
    change: Change = lambda context: context,
) -> StepOutput:
    """Samples after each row in a form; `change` changes the context of the logits processors."""
    processed, form, max_log_probs = logits, options.form, options.max_log_probs
    if form == "full":
        settings = options.custom, options.config.vocab_padding
        processed = process_logits(logits, sampling.processors, lambda: change(_context(cache, batch)), *settings)
    if not options.sampling_log_probs:
        tokens = sample(processed, sampling, _positions(batch), form=form)
        return describe(logits, tokens, sampling, max_log_probs, mesh=options.mesh)
    tokens, values = sample_with_log_probs(processed, sampling, _positions(batch), form=form)
    described = describe(logits, tokens, sampling, max_log_probs, mesh=options.mesh)
    return replace(described, sampling_log_probs=values)


def _positions(batch: Batch) -> jax.Array:
    """Returns the position of each row's sampled token, i32[B]."""
    return batch.kv_lens + num_evicted_tokens(batch)


def _context(cache: KVCache, batch: Batch) -> Context:
    return Context(tokens=read_tokens(cache, batch), lens=batch.kv_lens, num_evicted_tokens=num_evicted_tokens(batch))


def placed(output: Output, cache: KVCache, options: StepOptions) -> tuple[Output, KVCache]:
    """Returns a step's output, whole on every device but for its logits, and its cache, split as it came."""
    if options.mesh is None:
        return output, cache
    at = cache_shardings(cache, options.mesh, config=options.config)
    return replicated(output, options.mesh), jax.lax.with_sharding_constraint(cache, at)


def replicated(tree: Output, mesh: Mesh | None) -> Output:
    """Returns the arrays of a tree whole on every device of a mesh, but for the logits of a step's output."""
    if mesh is None:
        return tree
    whole = NamedSharding(mesh, PartitionSpec())
    if not isinstance(tree, StepOutput) or tree.logits is None:
        return jax.lax.with_sharding_constraint(tree, whole)
    at = replace(jax.tree.map(lambda _: whole, tree), logits=logits_sharding(mesh, tree.logits.shape[1]))
    return jax.lax.with_sharding_constraint(tree, at)
