"""A small model that drafts for a large one: the same tokens in the same pages, in a cache of its own.

Its cache has as many pages as the target's, and the tokens of a request lie in pages of the same numbers, so nothing is
allocated twice. It computes when it is asked for drafts, beginning with what it has missed. Whatever is in its cache, a
draft is but a guess: the target's draws decide.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jaxinfer.batch import Row, make_batch, padded
from jaxinfer.cache import KVCache, abstract_cache, init_cache, page_bytes
from jaxinfer.config import CacheConfig, ModelConfig
from jaxinfer.engine.batching import sampling_of_requests
from jaxinfer.engine.buckets import decode_sizes, max_batched_tokens
from jaxinfer.engine.device_drafter import Target
from jaxinfer.engine.emission import Emitted
from jaxinfer.engine.executables import compile_or_load
from jaxinfer.engine.prefix import num_equal
from jaxinfer.engine.request import Request
from jaxinfer.engine.step import Step
from jaxinfer.params import Params
from jaxinfer.plan.memory import num_bytes, step_bytes
from jaxinfer.steps import draft_step

Shape = tuple[int, int]  # rows and tokens
Span = tuple[int, int, int]  # which request, and from which token to which
# Tokens of a row that most steps begin with: the last one, and one that was accepted without having been computed.
CATCH_UP = 2


class DraftModel:
    """Drafts what a model of the same vocabulary draws with the noise of the target's draws.

    Where the two agree on what is likely, they then agree on what is drawn as well. One dispatch per step.
    """

    def __init__(self, params: Params, config: ModelConfig) -> None:
        self._params = params
        self._config = config
        self.step_bytes = 0
        # What was computed for a request: in which pages, how many of its tokens, and which drafts after them.
        self._computed: dict[int, tuple[list[int], int, list[int]]] = {}
        self._known: dict[int, bytes] = {}  # what full pages hold, by its key in the target's prefix cache

    @property
    def resident_bytes(self) -> int:
        return num_bytes(self._params)

    @property
    def num_executables(self) -> int:
        return len(self._compiled)

    def page_bytes(self, cache_config: CacheConfig) -> int:
        """Returns what a page of this model takes."""
        return page_bytes(self._config, cache_config)

    def prepare(self, target: Target) -> int:
        """Compiles the steps and makes the cache; ValueError for a model of another vocabulary."""
        vocab_size, engine_config, cache_config = (
            target.model_config.vocab_size,
            target.engine_config,
            target.cache_config,
        )
        if self._config.vocab_size != vocab_size:
            raise ValueError(
                f"the draft model has a vocabulary of {self._config.vocab_size} tokens, the target one of {vocab_size};"
                " speculation needs a draft model of the target's"
            )
        self._engine_config, self._page_size = engine_config, cache_config.page_size
        self._table_width, self._custom = target.table_width, dict(target.custom)
        sizes = decode_sizes(engine_config)
        widest = max(max_batched_tokens(engine_config), CATCH_UP * sizes[-1])  # for prompts, too
        shapes = {**{(rows, CATCH_UP * rows): None for rows in sizes}, (sizes[-1], widest): None}
        cache = abstract_cache(self._config, cache_config)
        inputs = [self._layout(shape, [], [], []) for shape in shapes]
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # the compiler releases the interpreter lock
            compiled = pool.map(lambda arguments: self._compile(cache, arguments), inputs)
            self._compiled = dict(zip(shapes, compiled, strict=True))
        self.step_bytes = max(map(step_bytes, self._compiled.values(), inputs))
        self._cache = init_cache(self._config, cache_config)
        return engine_config.max_drafts

    def observe(self, step: Step, emitted: Sequence[Sequence[Emitted]], hidden: Any) -> None:
        """It has states of its own."""

    def draft(self, requests: Sequence[Request], counts: Sequence[int]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in requests]
        # Those with most drafts first: in the last rounds they alone are computed, and padding comes last.
        order = sorted((i for i, count in enumerate(counts) if count), key=lambda i: -counts[i])
        spans = [(i, self._num_computed(requests[i]), len(requests[i].token_ids)) for i in order]
        num_tokens = sum(end - start for _, start, end in spans)
        for shape in self._compiled:
            if shape[0] >= len(spans) and shape[1] >= num_tokens:
                for (i, *_), tokens in zip(spans, self._run(shape, requests, spans, counts), strict=True):
                    drafts[i] = tokens
                return drafts
        # Too much was missed: catch up as far as a step goes, and draft in a later one.
        self._run(shape, requests, _first_tokens(spans, shape[1]), [0] * len(requests))
        return drafts

    def forget(self, request: Request) -> None:
        self._computed.pop(request.request_id, None)

    def _run(
        self, shape: Shape, requests: Sequence[Request], spans: Sequence[Span], counts: Sequence[int]
    ) -> list[list[int]]:
        chosen = [requests[i] for i, *_ in spans]
        rows = [Row(r.token_ids[start:end], start, r.pages) for r, (_, start, end) in zip(chosen, spans, strict=True)]
        limits = [counts[i] for i, *_ in spans]
        arguments = self._layout(shape, rows, chosen, limits)
        drafts, self._cache = self._compiled[shape](self._params, self._cache, *arguments)
        tokens = [row[:limit] for row, limit in zip(jax.device_get(drafts).tolist(), limits, strict=False)]
        for request, (_, start, end), drafted in zip(chosen, spans, tokens, strict=True):
            self._computed[request.request_id] = (list(request.pages), end, drafted[:-1])
            if request.keys is not None:
                for index in range(start // self._page_size, end // self._page_size):
                    self._known[request.pages[index]] = request.keys.key(index, request.token_ids)
        return tokens

    def _num_computed(self, request: Request) -> int:
        """Returns how many of the request's tokens are in the cache, without the last one, which is always computed."""
        pages, num_tokens, drafts = self._computed.get(request.request_id, ([], 0, []))
        num_kept = num_equal(pages, request.pages) * self._page_size
        num_tokens = min(num_tokens + num_equal(drafts, request.token_ids[num_tokens:]), num_kept)
        last = len(request.token_ids) - 1
        while request.keys is not None and (end := (num_tokens // self._page_size + 1) * self._page_size) <= last:
            index = num_tokens // self._page_size
            if self._known.get(request.pages[index]) != request.keys.key(index, request.token_ids):
                break
            num_tokens = end
        return min(num_tokens, last)

    def _layout(self, shape: Shape, rows: Sequence[Row], requests: Sequence[Request], counts: Sequence[int]):
        num_rows, num_tokens = shape
        batch = make_batch(
            rows,
            page_size=self._page_size,
            num_tokens=num_tokens,
            num_rows=num_rows,
            table_width=self._table_width,
        )
        sampling = sampling_of_requests(
            requests,
            num_rows=num_rows,
            max_listed_tokens=self._engine_config.max_listed_tokens,
            # No masks: drafts that a structure rules out are dropped before they are verified.
            vocab_size=self._config.vocab_size,
            custom=tuple(self._custom),
        )
        return batch, sampling, padded(np.array(counts, np.int32), num_rows, 0)

    def _compile(self, cache: KVCache, inputs: tuple[Any, ...]) -> jax.stages.Compiled:
        statics = {"config": self._config, "max_drafts": self._engine_config.max_drafts}
        return compile_or_load(draft_step, self._params, cache, *inputs, **statics, custom=tuple(self._custom.values()))


def _first_tokens(spans: Sequence[Span], room: int) -> list[Span]:
    """Returns the spans as far as there is room for their tokens."""
    chosen = []
    for i, start, end in spans:
        end = min(end, start + room)
        if start < end:
            chosen.append((i, start, end))
            room -= end - start
    return chosen
