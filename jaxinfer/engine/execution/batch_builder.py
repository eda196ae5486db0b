"""Builds the arrays of a scheduled step, padded to one of the few compiled shapes."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jax.sharding import Sharding

from jaxinfer.config import EngineConfig
from jaxinfer.engine.execution.engine_model import EngineModel
from jaxinfer.engine.request.request import Request
from jaxinfer.engine.scheduling.drafts import parents_of
from jaxinfer.engine.scheduling.step import NO_ROWS, Chunk, Rows, Step
from jaxinfer.model.batch import (
    Batch,
    Row,
    lay_out_batch,
    make_block_tables,
    make_decode_batch,
    padded,
    pending_token,
)
from jaxinfer.plan.step_shapes import Bucket
from jaxinfer.sampling.batch import SamplingBatch, lay_out_sampling, on_devices, shared_no_processors, with_masks
from jaxinfer.sampling.prompt_log_probs import PromptBatch, make_prompt, no_prompt


class BatchBuilder:
    """Builds the arguments of compiled steps from scheduled steps: new host arrays, one row per chunk.

    Consecutive decode steps over the same requests share the arrays that do not change.
    """

    def __init__(
        self,
        *,
        page_size: int,
        table_width: int,
        max_listed_tokens: int = EngineConfig.max_listed_tokens,
        vocab_size: int = 0,
        custom: tuple[str, ...] = (),
        draft_trees: bool = False,
        max_prompt_log_probs: int | None = None,
        num_bounded_kinds: int = 0,
        has_adapters: bool = False,
        sharding: Sharding | None = None,
    ) -> None:
        """`sharding`: that of arrays that are whole on every device of a mesh; None is the default device."""
        self._sharding = sharding
        self._draft_trees = draft_trees
        self._has_adapters = has_adapters
        self._max_prompt_log_probs = max_prompt_log_probs
        self._page_size = page_size
        self._table_width = table_width
        self._max_listed_tokens = max_listed_tokens
        self._vocab_size = vocab_size
        self._custom = custom
        # The shape and rows of the last decode step, and the shared arrays.
        self._last: tuple[Bucket, Rows] | None = None
        self._tables = [DecodeTables(table_width) for _ in range(1 + num_bounded_kinds)]  # per kind of pages
        self._sampling: SamplingBatch | None = None

    @classmethod
    def of(cls, model: EngineModel) -> BatchBuilder:
        """Returns the builder for an engine of this model."""
        config = model.engine_config
        return cls(
            page_size=config.page_size,
            table_width=model.table_width,
            max_listed_tokens=config.max_listed_tokens,
            vocab_size=model.model_config.vocab_size,
            custom=tuple(model.custom),
            draft_trees=config.draft_trees,
            max_prompt_log_probs=config.max_prompt_log_probs,
            num_bounded_kinds=len(model.model_config.page_kinds) - 1,
            has_adapters=config.max_adapters > 0,
            sharding=model.placement.whole,
        )

    def build(self, step: Step, bucket: Bucket, before: Rows = NO_ROWS) -> tuple[Any, ...]:
        """Returns the batch, the sampling batch and the further arguments of a compiled step in the bucket's shape.

        `before`: the rows of the previous step. The batch has `pending_token` for each token that the previous step
        samples. The sampling batch of a verify step has the grammar masks; other steps draw plainly, or apart.
        """
        batch, sampling = (self._build_decode if bucket.is_decode else self._build_rows)(step, bucket, before)
        if self._has_adapters:
            slots = np.array(step.chunks.rows.adapter_slots, np.int32)
            batch = replace(batch, adapters=padded(slots, bucket.num_rows, 0))
        arguments = batch, add_masks(step, sampling) if bucket.is_verify else sampling
        if bucket.num_steps > 1:
            return *arguments, padded(np.array(step.chunks.max_new_tokens, np.int32), bucket.num_rows, 0)
        if bucket.is_verify and self._draft_trees:
            return *arguments, build_parents(step, bucket)
        if bucket.is_mixed:
            return *arguments, None, build_num_drafts(step, bucket)
        has_prompt = bucket.is_prefill and self._max_prompt_log_probs is not None
        return (*arguments, build_prompt(step, bucket, self._sharding)) if has_prompt else arguments

    def _build_rows(self, step: Step, bucket: Bucket, before: Rows) -> tuple[Batch, SamplingBatch]:
        drawn_in = _places(before)
        rows = [row_of(chunk.request, _token_ids(chunk, drawn_in), chunk.start) for chunk in step.chunks]
        batch = lay_out_batch(
            rows,
            page_size=self._page_size,
            num_tokens=bucket.num_tokens,
            num_rows=bucket.num_rows,
            table_width=self._table_width,
            num_bounded_kinds=len(self._tables) - 1,
        )
        return batch, self._make_sampling(step, bucket)

    def _build_decode(self, step: Step, bucket: Bucket, before: Rows) -> tuple[Batch, SamplingBatch]:
        rows, requests = step.chunks.rows, step.chunks.requests
        may_hide = rows.max_len > self._table_width * self._page_size  # requests that fit the table evict nothing
        is_new = (bucket, rows) != self._last
        if is_new:
            self._last, self._sampling = None, None  # until this step is laid out: an exception may come before that
        for tables, own in zip(self._tables, rows.tables or [()] * len(self._tables), strict=True):
            pages = [table.attended for table in own] if may_hide else [table.pages for table in own]
            tables.update(pages, bucket.num_rows, is_new=is_new)
        block_tables, *bounded_tables = [tables.array for tables in self._tables]
        sampling = self._sampling
        if sampling is None:
            sampling = self._make_sampling(step, bucket)
        elif isinstance(sampling.temperature, np.ndarray):
            # The same rows come again, so they may stay: one copy to the device serves all further steps.
            sampling = on_devices(sampling, self._sharding)
        self._last, self._sampling = (bucket, rows), sampling
        if step.is_ahead and rows is before:  # each row computes its own last sample
            token_ids = pending_token(np.arange(len(requests), dtype=np.int32))
        else:
            drawn_in = _places(before)
            token_ids = np.array([_token_ids(chunk, drawn_in)[0] for chunk in step.chunks], np.int32)
        hidden = np.array([table.num_evicted_tokens for table in rows.tables[0]], np.int32) if may_hide else 0
        positions = np.array(step.chunks.starts, np.int32)
        batch = make_decode_batch(token_ids, positions, block_tables, self._page_size, hidden, tuple(bounded_tables))
        return batch, sampling

    def _make_sampling(self, step: Step, bucket: Bucket) -> SamplingBatch:
        return sampling_of_requests(
            step.chunks.requests,
            num_rows=bucket.num_rows,
            max_listed_tokens=self._max_listed_tokens,
            vocab_size=self._vocab_size,
            custom=self._custom,
            num_masks=bucket.num_sampled if bucket.is_verify else None,
            sharding=self._sharding,
        )


class DecodeTables:
    """The block tables of decode steps, which change little from step to step."""

    def __init__(self, table_width: int) -> None:
        self._pages: list[tuple[int, ...]] = []  # of each row
        self.array = np.zeros((0, table_width), np.int32)

    def update(self, pages: list[tuple[int, ...]], num_rows: int, *, is_new: bool) -> None:
        """Enters the pages of each row in `array`; `is_new`: rows or shape are others than in the last step."""
        if is_new:
            self.array = make_block_tables(pages, num_rows, self.array.shape[1])
        elif pages != self._pages:
            self.array = self.array.copy()  # a launched step may still read the old one
            for row, (old, new) in enumerate(zip(self._pages, pages, strict=True)):
                if new is not old:
                    first = len(old) if new[: len(old)] == old else 0
                    self.array[row, first : len(new)] = new[first:]
        self._pages = pages


def row_of(request: Request, token_ids: Sequence[int], start: int) -> Row:
    """Returns the row of a batch with these tokens of a request."""
    first, *bounded = request.table.kinds
    if not bounded and not first.num_evicted_tokens:  # the usual case, for many rows of a step
        return Row(token_ids, start, first.pages)
    return Row(token_ids, start, first.attended, first.num_evicted_tokens, tuple(table.pages for table in bounded))


def sampling_of_requests(
    requests: Sequence[Request], *, num_rows: int, sharding: Sharding | None = None, **options: Any
) -> SamplingBatch:
    """Lays out the sampling parameters of requests, one row each; `options` are those of `lay_out_sampling`.

    `sharding`: that of arrays that are on the device already.
    """
    return lay_out_sampling(
        [request.sampling for request in requests],
        num_rows=num_rows,
        seeds=[request.seed for request in requests],
        sample_index=[request.sample_index for request in requests],
        prompt_lens=[request.num_prompt_tokens for request in requests],
        stop_token_ids=[request.stop_token_ids for request in requests],
        no_processors=functools.partial(shared_no_processors, sharding=sharding),
        **options,
    )


def _places(rows: Rows) -> dict[Request, int]:
    return {request: row for row, request in enumerate(rows.requests)}


def _token_ids(chunk: Chunk, drawn_in: Mapping[Request, int]) -> list[int]:
    token_ids = chunk.request.token_ids[chunk.start : chunk.start + chunk.num_tokens]
    if len(token_ids) < chunk.num_tokens:
        token_ids.append(pending_token(drawn_in[chunk.request]))
    assert len(token_ids) == chunk.num_tokens, "several tokens of a request are not known yet"
    return [*token_ids, *chunk.drafts]


def build_parents(step: Step, bucket: Bucket) -> np.ndarray:
    """Returns each token's parent within its row, i32[T], the `parents` of `verify_step` for draft trees."""
    parents, place = np.full(bucket.num_tokens, -1, np.int32), 0
    for drafts in step.chunks.drafts:
        parents[place + 1 : place + 1 + len(drafts)] = [1 + parent for parent in parents_of(drafts)]
        place += 1 + len(drafts)
    return parents


def build_num_drafts(step: Step, bucket: Bucket) -> np.ndarray:
    """Returns the number of drafts of each row, i32[B], the `num_drafts` of `verify_step` for mixed steps."""
    num_drafts = np.zeros(bucket.num_rows, np.int32)
    num_drafts[: len(step.chunks)] = list(map(len, step.chunks.drafts))
    return num_drafts


def build_prompt(step: Step, bucket: Bucket, sharding: Sharding | None = None) -> PromptBatch:
    """Lays out the prompt tokens whose log-probabilities the step returns."""
    places, token_ids = [], []
    for chunk, place, count in step.prompt_log_prob_chunks:
        places += range(place, place + count)
        token_ids += chunk.request.token_ids[chunk.start + 1 :][:count]
    wants_top = any(chunk.request.sampling.prompt_log_probs for chunk, *_ in step.prompt_log_prob_chunks)
    if not places:
        return no_prompt(bucket.num_tokens, sharding)
    return make_prompt(places, token_ids, bucket.num_tokens, wants_top)


def add_masks(step: Step, sampling: SamplingBatch) -> SamplingBatch:
    """Returns the sampling parameters of a step with the current grammar masks of its requests."""
    return with_masks(sampling, _masks(step)) if step.chunks.rows.has_structures else sampling


def _masks(step: Step) -> dict[int, np.ndarray]:
    """Returns the grammar masks by sampled token: one of each row, in a verify step one after each draft as well."""
    masks, first = {}, 0
    for chunk in step.chunks:
        if (grammar := chunk.request.grammar) is not None:
            began = time.thread_time()
            if chunk.drafts:
                masks |= enumerate(grammar.masks(chunk.drafts, parents_of(chunk.drafts)), first)
            elif chunk.is_last and not chunk.is_stale:
                masks[first] = grammar.mask()
            chunk.request.mask_seconds = time.thread_time() - began
        first += 1 + len(chunk.drafts)
    return masks
