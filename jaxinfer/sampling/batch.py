"""How the next tokens of one step's rows are chosen, as the device sees it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import chain
from typing import Any, TypeVar

import jax
import numpy as np
from flax import struct
from jax.sharding import Sharding

from jaxinfer.config import MAX_SEED, EngineConfig, SamplingParams
from jaxinfer.model.batch import MAX_BATCH, PADDING_TOKEN, padded, require_entries
from jaxinfer.validation import as_ints, as_tuple, require, require_int

Tree = TypeVar("Tree")
NUM_LISTS = 6  # fields of ProcessorBatch with N token ids, or N values, per row


@struct.dataclass
class ProcessorBatch:
    """What changes each row's logits before the temperature. Lists of N token ids are padded with PADDING_TOKEN.

    A bad word lies in `bad_word_tokens` from its first token to its last, with their distances to the last beside:
    words (5, 6, 7) and (8,)  ->  tokens 5 6 7 8 - -, distances 2 1 0 0 0 0
    """

    is_used: Any  # bool[B]  whether any field of the row has an effect
    prompt_lens: Any  # i32[B]
    min_tokens: Any  # i32[B]
    repetition_penalty: Any  # f32[B]  1 is off
    presence_penalty: Any  # f32[B]
    frequency_penalty: Any  # f32[B]
    no_repeat_ngram_size: Any  # i32[B]  0 is off
    biased_token_ids: Any  # i32[B, N]
    biases: Any  # f32[B, N]
    bad_word_tokens: Any  # i32[B, N]
    bad_word_distances: Any  # i32[B, N]
    allowed_token_ids: Any  # i32[B, N]  none allows all
    stop_token_ids: Any  # i32[B, N]  not before min_tokens
    uses_custom: Any  # bool[B, C]  of C processors of the user
    custom_arguments: Any  # f32[B, C]
    # i32[B, W], in a verify step a row per sampled token; bit i of word w allows token 32 w + i; W is ceil(V / 32), or
    # 0 without masks
    allowed_bits: Any


@struct.dataclass
class SamplingBatch:
    """How each row's next token is chosen; every field always present, for an optional one would be a recompile."""

    temperature: Any  # f32[B]  0 takes the most probable token
    top_k: Any  # i32[B]  0 is off
    top_p: Any  # f32[B]  1 is off
    min_p: Any  # f32[B]  0 is off
    typical_p: Any  # f32[B]  1 is off
    seeds: Any  # u32[B, 2]  high and low word of the seed
    sample_index: Any  # i32[B]  which of several samples of one prompt
    num_log_probs: Any  # i32[B]  alternatives wanted per token
    processors: ProcessorBatch


def make_sampling(
    params: Sequence[SamplingParams],
    *,
    num_rows: int,
    seeds: Sequence[int] | None = None,
    sample_index: Sequence[int] = (),
    prompt_lens: Sequence[int] | None = None,
    stop_token_ids: Sequence[Collection[int]] | None = None,
    max_listed_tokens: int = EngineConfig.max_listed_tokens,
    vocab_size: int = 0,
    num_masks: int | None = None,
    custom: Sequence[str] = (),
) -> SamplingBatch:
    """Lays out the sampling parameters of a batch's rows, on the host; padding rows are greedy.

    `seeds` holds each row's seed; without it every row must carry its own in its parameters. `sample_index` tells
    several samples of one prompt and seed apart; 0 where it is left out. `prompt_lens`, in tokens,
    tell prompt from output where a row's presence_penalty, frequency_penalty or min_tokens needs it. `stop_token_ids`
    are all that end each row, by default those of its parameters. A row may list `max_listed_tokens` token ids per
    parameter. With a `vocab_size` there is room for the masks of structures, whether there are any or not; `num_masks`:
    for how many, one per row if None; a verify step has one per token. `custom` names the user's processors, in their
    order. Raises ValueError for rows that do not fit or lack what they need.
    """
    require_int("num_rows", num_rows, 1, MAX_BATCH)
    require_int("max_listed_tokens", max_listed_tokens, 1, MAX_BATCH)
    num_listed = NUM_LISTS * num_rows * max_listed_tokens
    require_entries(num_listed, num_rows=num_rows, max_listed_tokens=max_listed_tokens)
    require_int("vocab_size", vocab_size, 0)
    masks = {"num_rows": num_rows}
    if num_masks is not None:
        require_int("num_masks", num_masks, 1, MAX_BATCH)
        masks = {"num_masks": num_masks}
    require_entries(sum(masks.values()) * -(-vocab_size // 32), **masks, vocab_size=vocab_size)
    params = as_tuple("params", params, "several SamplingParams")
    require(all(isinstance(p, SamplingParams) for p in params), "params", params, "several SamplingParams")
    seeds = None if seeds is None else as_ints("seeds", seeds, 0, MAX_SEED)
    sample_index = as_ints("sample_index", sample_index)
    prompt_lens = None if prompt_lens is None else as_ints("prompt_lens", prompt_lens)
    if stop_token_ids is not None:
        several = "the token ids of every row"
        stop_token_ids = [as_ints("stop_token_ids", ids) for ids in as_tuple("stop_token_ids", stop_token_ids, several)]
    custom = as_tuple("custom", custom, "several names")
    require(all(isinstance(name, str) for name in custom), "custom", custom, "several names")
    given = {"sample_index": sample_index or None, "prompt_lens": prompt_lens, "stop_token_ids": stop_token_ids}
    for name, rows in given.items():
        if rows is not None and len(rows) != len(params):
            raise ValueError(f"{name} is given for {len(rows)} of {len(params)} rows of params; give it for each")
    unknown = sorted({name for p in params for name, _ in p.logits_processors} - set(custom))
    require(not unknown, "custom", custom, f"the names of all processors in params, of which {unknown} are missing")
    if prompt_lens is not None:
        params = tuple(p.after(prompt_len) for p, prompt_len in zip(params, prompt_lens, strict=True))
    return lay_out_sampling(
        params,
        num_rows=num_rows,
        seeds=seeds,
        sample_index=sample_index,
        prompt_lens=prompt_lens,
        stop_token_ids=stop_token_ids,
        max_listed_tokens=max_listed_tokens,
        vocab_size=vocab_size,
        num_masks=num_masks,
        custom=custom,
    )


def lay_out_sampling(
    params: Sequence[SamplingParams],
    *,
    num_rows: int,
    seeds: Sequence[int] | None,
    sample_index: Sequence[int],
    prompt_lens: Sequence[int] | None,
    stop_token_ids: Sequence[Collection[int]] | None,
    max_listed_tokens: int,
    vocab_size: int,
    num_masks: int | None = None,
    custom: Sequence[str],
    no_processors: Callable[[int, int, tuple[int, int], tuple[str, ...]], ProcessorBatch] | None = None,
) -> SamplingBatch:
    """Does the work of `make_sampling` for values of the right types, without looking at each of them.

    `no_processors` returns the processors of rows that use none; by default they are made anew.
    """
    if len(params) > num_rows or (seeds is not None and len(seeds) != len(params)):
        num_seeds = "no" if seeds is None else len(seeds)
        raise ValueError(f"{len(params)} rows of params with {num_seeds} seeds do not fit num_rows={num_rows}")
    if seeds is None:
        if any(p.seed is None and p.temperature > 0 for p in params):
            raise ValueError("a row with temperature above 0 needs a seed: set SamplingParams.seed or pass seeds")
        seeds = [p.seed or 0 for p in params]
    words = np.zeros((num_rows, 2), np.uint32)
    words[: len(params)] = np.stack(np.divmod(np.array(seeds, np.uint64), 2**32), axis=1)
    mask_shape = (num_rows if num_masks is None else num_masks, -(-vocab_size // 32))
    if any(p.changes_logits for p in params):
        stop_ids = [p.stop_token_ids for p in params] if stop_token_ids is None else stop_token_ids
        processors = _make_processors(params, prompt_lens, stop_ids, num_rows, max_listed_tokens, tuple(custom))
        if mask_shape[1] == 0 and any(p.structure for p in params):
            raise ValueError("json_schema, regex, choices and grammar need room for masks: pass vocab_size")
        processors = replace(processors, allowed_bits=np.full(mask_shape, -1, np.int32))
    else:
        processors = (no_processors or make_no_processors)(num_rows, max_listed_tokens, mask_shape, tuple(custom))
    column = partial(_column, params, num_rows)
    return SamplingBatch(
        temperature=column("temperature", np.float32, 0),
        top_k=column("top_k", np.int32, 0),
        top_p=column("top_p", np.float32, 1),
        min_p=column("min_p", np.float32, 0),
        typical_p=column("typical_p", np.float32, 1),
        seeds=words,
        sample_index=padded(np.array(sample_index, np.int32), num_rows, 0),
        num_log_probs=column("log_probs", np.int32, 0),
        processors=processors,
    )


def with_masks(sampling: SamplingBatch, masks: Mapping[int, np.ndarray]) -> SamplingBatch:
    """Returns the sampling parameters with what structures allow, i32[ceil(V / 32)] by row, in a verify step by token.

    V is the size of the vocabulary, and bit `i` of a mask allows token `i`: the lowest bit of its first number is that
    of token 0. Rows without a mask allow all tokens. `sampling` is that of `make_sampling`, and stays as it is.
    """
    bits = np.full(sampling.processors.allowed_bits.shape, -1, np.int32)
    for row, mask in masks.items():
        bits[row] = mask
    return replace(sampling, processors=replace(sampling.processors, allowed_bits=bits))


def make_no_processors(
    num_rows: int, max_listed_tokens: int, mask_shape: tuple[int, int], custom: tuple[str, ...]
) -> ProcessorBatch:
    """Returns the processors of rows that use none, on the host."""
    processors = _make_processors([], None, [], num_rows, max_listed_tokens, custom)
    return replace(processors, allowed_bits=np.full(mask_shape, -1, np.int32))


@lru_cache(maxsize=64)  # several engines' buckets; without a bound, the sizes of past engines would stay
def shared_no_processors(
    num_rows: int,
    max_listed_tokens: int,
    mask_shape: tuple[int, int],
    custom: tuple[str, ...],
    sharding: Sharding | None = None,
) -> ProcessorBatch:
    """Returns `make_no_processors` on the device: steps whose rows use none share it and copy nothing there.

    `sharding`: that of arrays that are whole on every device of a mesh; None is the default device.
    """
    return on_devices(make_no_processors(num_rows, max_listed_tokens, mask_shape, custom), sharding)


def on_devices(tree: Tree, sharding: Sharding | None) -> Tree:
    """Returns arrays of the host on the devices of a sharding, for all steps that take them; None: the default device.

    For devices of several processes they stay on the host: each process gives them to each step.
    """
    return tree if sharding is not None and not sharding.is_fully_addressable else jax.device_put(tree, sharding)


def _make_processors(
    params: Sequence[SamplingParams],
    prompt_lens: Sequence[int] | None,
    stop_token_ids: Sequence[Collection[int]],
    num_rows: int,
    max_listed_tokens: int,
    custom: tuple[str, ...],
) -> ProcessorBatch:
    if prompt_lens is None:
        if any(p.needs_prompt_len for p in params):
            raise ValueError("presence_penalty, frequency_penalty and min_tokens need prompt_lens: pass them")
        prompt_lens = [0] * len(params)
    column = partial(_column, params, num_rows)

    def lists(name: str, rows: Sequence[Collection[float]], dtype: type, padding: float) -> np.ndarray:
        table = np.full((num_rows, max_listed_tokens), padding, dtype)
        for i, row in enumerate(rows):
            if len(row) > max_listed_tokens:
                raise ValueError(f"{name} of {len(row)} tokens do not fit max_listed_tokens={max_listed_tokens}")
            table[i, : len(row)] = list(row)
        return table

    allowed = [p.allowed_token_ids or () for p in params]
    bad_words = [list(chain.from_iterable(p.bad_words)) for p in params]
    distances = [[d for word in p.bad_words for d in range(len(word) - 1, -1, -1)] for p in params]
    stop_ids = [ids if p.min_tokens else () for p, ids in zip(params, stop_token_ids, strict=True)]
    uses_custom = np.zeros((num_rows, len(custom)), np.bool_)
    custom_arguments = np.zeros((num_rows, len(custom)), np.float32)
    for row, p in enumerate(params):
        for name, argument in p.logits_processors:
            uses_custom[row, custom.index(name)] = True
            custom_arguments[row, custom.index(name)] = argument
    return ProcessorBatch(
        is_used=padded(np.array([p.changes_logits for p in params], np.bool_), num_rows, False),
        prompt_lens=padded(np.array(prompt_lens, np.int32), num_rows, 0),
        min_tokens=column("min_tokens", np.int32, 0),
        repetition_penalty=column("repetition_penalty", np.float32, 1),
        presence_penalty=column("presence_penalty", np.float32, 0),
        frequency_penalty=column("frequency_penalty", np.float32, 0),
        no_repeat_ngram_size=column("no_repeat_ngram_size", np.int32, 0),
        biased_token_ids=lists("logit_bias", [dict(p.logit_bias).keys() for p in params], np.int32, PADDING_TOKEN),
        biases=lists("logit_bias", [dict(p.logit_bias).values() for p in params], np.float32, 0),
        bad_word_tokens=lists("bad_words", bad_words, np.int32, PADDING_TOKEN),
        bad_word_distances=lists("bad_words", distances, np.int32, 0),
        allowed_token_ids=lists("allowed_token_ids", allowed, np.int32, PADDING_TOKEN),
        stop_token_ids=lists("stop_token_ids", stop_ids, np.int32, PADDING_TOKEN),
        uses_custom=uses_custom,
        custom_arguments=custom_arguments,
        allowed_bits=np.zeros((num_rows, 0), np.int32),
    )


def _column(params: Sequence[SamplingParams], num_rows: int, name: str, dtype: type, padding: float) -> np.ndarray:
    return padded(np.array([getattr(p, name) for p in params], dtype), num_rows, padding)
