"""A small model that drafts for a large one: the same tokens in the same pages, in a cache of its own.

Its cache has as many pages as the target's, and the tokens of a request lie in pages of the same numbers, so nothing is
allocated twice. It computes when it is asked for drafts, beginning with what it has missed. Whatever is in its cache, a
draft is but a guess: the target's draws decide.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jaxinfer.config import CacheConfig, ModelConfig
from jaxinfer.engine.execution.batch_builder import sampling_of_requests
from jaxinfer.engine.execution.engine_model import DeviceDrafter, EngineModel, LendCache
from jaxinfer.engine.execution.executable_cache import compile_or_load
from jaxinfer.engine.execution.step_shapes import decode_sizes, max_batched_tokens
from jaxinfer.engine.request.page_keys import num_equal
from jaxinfer.engine.request.request import Request
from jaxinfer.model.batch import Row, lay_out_batch, padded
from jaxinfer.model.cache import KVCache, abstract_cache, init_cache, page_bytes
from jaxinfer.model.params import Params
from jaxinfer.plan.memory import num_bytes, step_bytes
from jaxinfer.steps.steps import draft_step

Shape = tuple[int, int]  # rows and tokens


class DraftSteps:
    """`draft_step` for requests of a target's engine, in some shapes, on a cache with as many pages as the target's."""

    def __init__(self, params: Params, config: ModelConfig, target: EngineModel, shapes: Iterable[Shape]) -> None:
        self._params, self._target = params, target
        self.shapes = tuple(dict.fromkeys(shapes))
        cache = abstract_cache(config, target.cache_config)
        inputs = [self._lay_out(shape, [], [], []) for shape in self.shapes]
        statics = {
            "config": config,
            "max_drafts": target.engine_config.max_drafts,
            "custom": tuple(target.custom.values()),
            "implementation": target.engine_config.attention,
        }

        def compiled(arguments: tuple[Any, ...]) -> jax.stages.Compiled:
            return compile_or_load(draft_step, params, cache, *arguments, **statics)

        with ThreadPoolExecutor(os.cpu_count()) as pool:  # the compiler releases the interpreter lock
            self._compiled = dict(zip(self.shapes, pool.map(compiled, inputs), strict=True))
        self.step_bytes = max(map(step_bytes, self._compiled.values(), inputs))

    def run(
        self, shape: Shape, cache: KVCache, rows: Sequence[Row], requests: Sequence[Request], counts: Sequence[int]
    ) -> tuple[list[list[int]], KVCache]:
        """Returns so many drafts for each of the requests, those with most of them first, and the cache."""
        drafts, cache = self._compiled[shape](self._params, cache, *self._lay_out(shape, rows, requests, counts))
        tokens = jax.device_get(drafts).tolist()
        return [row[:count] for row, count in zip(tokens, counts, strict=False)], cache

    def _lay_out(
        self, shape: Shape, rows: Sequence[Row], requests: Sequence[Request], counts: Sequence[int]
    ) -> tuple[Any, ...]:
        (num_rows, num_tokens), target = shape, self._target
        batch = lay_out_batch(
            rows,
            page_size=target.cache_config.page_size,
            num_tokens=num_tokens,
            num_rows=num_rows,
            table_width=target.table_width,
        )
        sampling = sampling_of_requests(
            requests,
            num_rows=num_rows,
            max_listed_tokens=target.engine_config.max_listed_tokens,
            # No masks: drafts that a structure rules out are dropped before they are verified.
            vocab_size=target.model_config.vocab_size,
            custom=tuple(target.custom),
        )
        return batch, sampling, padded(np.array(counts, np.int32), num_rows, 0)


class StepDrafter(DeviceDrafter):
    """A drafter by `DraftSteps`, which it makes when it is prepared."""

    _steps: DraftSteps

    @property
    def num_executables(self) -> int:
        return len(self._steps.shapes)

    @property
    def step_bytes(self) -> int:
        return self._steps.step_bytes


def most_drafts_first(counts: Sequence[int]) -> list[int]:
    """Returns the rows that want drafts, those with most first: in the last rounds they alone are computed."""
    return sorted((i for i, count in enumerate(counts) if count), key=lambda i: -counts[i])


Span = tuple[int, int, int]  # which request, and from which token to which
# Tokens of a row that most steps begin with: the last one, and one that was accepted without having been computed.
CATCH_UP = 2


class DraftModel(StepDrafter):
    """Drafts what a model of the same vocabulary draws with the noise of the target's draws.

    Where the two agree on what is likely, they then agree on what is drawn as well. One dispatch per step.
    """

    def __init__(self, params: Params, config: ModelConfig) -> None:
        self._params = params
        self._config = config
        # By request: how many of its tokens were computed last, and the drafts computed after them.
        self._computed: dict[int, tuple[int, list[int]]] = {}
        # By page: the text that was written there last, as the list `token_ids` itself, and the page's place in it.
        self._written: dict[int, tuple[list[int], int]] = {}
        self._known: dict[int, bytes] = {}  # full pages, by their key in the target's prefix cache

    @property
    def resident_bytes(self) -> int:
        return num_bytes(self._params)

    def page_bytes(self, cache_config: CacheConfig) -> int:
        """Returns what a page of this model takes."""
        return page_bytes(self._config, cache_config)

    def prepare(self, target: EngineModel) -> int:
        """Compiles the steps; ValueError for a model of another vocabulary."""
        vocab_size, engine_config = target.model_config.vocab_size, target.engine_config
        if self._config.vocab_size != vocab_size:
            raise ValueError(
                f"the draft model has a vocabulary of {self._config.vocab_size} tokens, the target one of {vocab_size};"
                " speculation needs a draft model of the target's"
            )
        self._cache_config, self._page_size = target.cache_config, target.cache_config.page_size
        sizes = decode_sizes(engine_config)
        widest = max(max_batched_tokens(engine_config), CATCH_UP * sizes[-1])  # for prompts, too
        shapes = [(rows, CATCH_UP * rows) for rows in sizes]
        self._steps = DraftSteps(self._params, self._config, target, [*shapes, (sizes[-1], widest)])
        return engine_config.max_drafts

    def attach(self, lend_cache: LendCache) -> None:
        """Makes the cache, now that its number of pages is settled."""
        self._cache = init_cache(self._config, self._cache_config)

    def num_unseen(self, request: Request) -> int:
        text, last = request.token_ids, len(request.token_ids) - 1  # the last token is always computed
        num_computed, drafts = self._computed.get(request.request_id, (0, []))
        num_computed += num_equal(drafts, text[num_computed:])
        num_seen = 0
        for index, page in enumerate(request.pages):
            end = num_seen + self._page_size
            writer, place = self._written.get(page, ((), 0))
            # A request that is rewound has another list of tokens, one that waits for pages may find them overwritten.
            if writer is text and place == index:
                num_seen = min(num_computed, end)
            elif request.keys is not None and end <= last and self._known.get(page) == request.keys.key(index, text):
                num_seen = end
            if num_seen < end:
                break
        return last + 1 - min(num_seen, last)

    def draft(self, requests: Sequence[Request], counts: Sequence[int]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in requests]
        order = most_drafts_first(counts)
        ends = [len(request.token_ids) for request in requests]
        spans = [(i, ends[i] - self.num_unseen(requests[i]), ends[i]) for i in order]
        num_tokens = sum(end - start for _, start, end in spans)
        for shape in self._steps.shapes:
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
        tokens, self._cache = self._steps.run(shape, self._cache, rows, chosen, limits)
        for request, (_, start, end), limit, drafted in zip(chosen, spans, limits, tokens, strict=True):
            self._computed[request.request_id] = (end, drafted[:-1])
            first = start // self._page_size
            for index, page in enumerate(request.pages[first : -(-(end + limit) // self._page_size)], first):
                self._written[page] = (request.token_ids, index)
                self._known.pop(page, None)
                if request.keys is not None and (index + 1) * self._page_size <= end:
                    self._known[page] = request.keys.key(index, request.token_ids)
        return tokens


def _first_tokens(spans: Sequence[Span], room: int) -> list[Span]:
    """Returns the spans as far as there is room for their tokens."""
    chosen = []
    for i, start, end in spans:
        end = min(end, start + room)
        if start < end:
            chosen.append((i, start, end))
            room -= end - start
    return chosen
