"""A small draft model with a KV cache of its own, addressed by the target's block tables.

Its cache has the same number of pages as the target's, and a request's tokens lie in pages with the same ids, so
nothing is allocated twice. When asked for drafts, it first computes the tokens it has missed. A stale cache costs only
acceptance: the target's own samples decide the output.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxinfer.config import CacheConfig
from jaxinfer.engine.execution.batch_builder import sampling_of_requests
from jaxinfer.engine.execution.engine_model import DeviceDrafter, EngineModel, LendCache, abstract
from jaxinfer.engine.execution.executable_cache import compile_or_load
from jaxinfer.engine.request.page_keys import num_equal
from jaxinfer.engine.request.request import Request
from jaxinfer.model.batch import Row, lay_out_batch, padded
from jaxinfer.model.cache import KVCache, abstract_cache, page_bytes
from jaxinfer.model.config import ModelConfig
from jaxinfer.model.params import Params
from jaxinfer.plan.memory import num_bytes, step_bytes
from jaxinfer.plan.step_shapes import decode_sizes, max_batched_tokens
from jaxinfer.steps.steps import StepOptions, draft_step

Shape = tuple[int, int]  # rows and tokens


class DraftSteps:
    """`draft_step`, compiled in some shapes, on a cache of the target's cache configuration.

    Parameters and cache lie on the devices of the target's placement.
    """

    def __init__(self, params: Params, config: ModelConfig, target: EngineModel, shapes: Iterable[Shape]) -> None:
        self.params, self._target = params, replace(target, params=abstract(target.params))
        self.shapes = tuple(dict.fromkeys(shapes))
        cache = target.placement.cache(config, abstract_cache(config, target.cache_config))
        inputs = [target.placement.replicated(self._lay_out(shape, [], [], [])) for shape in self.shapes]
        options = StepOptions(
            config=config,
            vocab_size=target.model_config.vocab_size,
            max_drafts=target.engine_config.max_drafts,
            custom=tuple(target.custom.values()),
            implementation=target.engine_config.attention,
            mesh=target.placement.mesh,
        )

        def compiled(shape: Shape, arguments: tuple[Any, ...]) -> jax.stages.Compiled:
            return compile_or_load(draft_step, params, cache, *arguments, num_rows=max(shape), options=options)

        with ThreadPoolExecutor(os.cpu_count()) as pool:  # the compiler releases the interpreter lock
            self._compiled = dict(zip(self.shapes, pool.map(compiled, self.shapes, inputs), strict=True))
        self.step_bytes = max(map(step_bytes, self._compiled.values(), inputs))

    def run(
        self, shape: Shape, cache: KVCache, rows: Sequence[Row], requests: Sequence[Request], counts: Sequence[int]
    ) -> tuple[list[list[int]], KVCache]:
        """Returns `counts[i]` drafts for each request i, and the cache. `counts` must be in descending order."""
        drafts, cache = self._compiled[shape](self.params, cache, *self._lay_out(shape, rows, requests, counts))
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
            num_bounded_kinds=len(target.cache_config.num_bounded_pages),
        )
        sampling = sampling_of_requests(
            requests,
            num_rows=num_rows,
            max_listed_tokens=target.engine_config.max_listed_tokens,
            # No grammar masks: drafts that a grammar rules out are dropped before they are verified.
            vocab_size=target.model_config.vocab_size,
            custom=tuple(target.custom),
            sharding=target.placement.whole,
        )
        return batch, sampling, padded(np.array(counts, np.int32), num_rows, 0)


class StepDrafter(DeviceDrafter):
    """A drafter that runs `DraftSteps`; its `prepare` compiles them."""

    _steps: DraftSteps

    @property
    def num_executables(self) -> int:
        return len(self._steps.shapes)

    @property
    def step_bytes(self) -> int:
        return self._steps.step_bytes


def most_drafts_first(counts: Sequence[int]) -> list[int]:
    """Returns the indices of counts above 0, largest count first: later rounds compute only the first rows."""
    return sorted((i for i, count in enumerate(counts) if count), key=lambda i: -counts[i])


Span = tuple[int, int, int]  # index of a request, first token to compute, end
# Tokens per row that most steps have to compute: the last one, and an accepted draft that was never computed.
CATCH_UP = 2
# The most rows by which two vocabularies of the same tokens differ: training pads them to a multiple of 128 for each of
# up to 8 devices. Qwen2.5 has 151,936 rows or 152,064.
MAX_PADDING = 1_024


class DraftModel(StepDrafter):
    """Drafts tokens that a model of the same vocabulary samples, with the Gumbel noise of the target's sampling.

    If both models agree on the likely tokens, the shared noise makes them sample the same one. One dispatch per step.
    The padding of their vocabularies may differ: only ids that both have are drafted.
    """

    def __init__(self, params: Params, config: ModelConfig) -> None:
        if not config.has_logits:
            raise ValueError(
                "the draft model is an embedding model, which samples no tokens; give a language model of the target's"
                " vocabulary, or another drafter"
            )
        self._params = params
        self._config = config
        # By request id: the number of its tokens computed so far, and the drafts computed after them.
        self._computed: dict[int, tuple[int, list[int]]] = {}
        # By page: the `token_ids` list of the request that last wrote it (the object), and the page's index there.
        self._written: dict[int, tuple[list[int], int]] = {}
        self._known: dict[int, bytes] = {}  # full page -> its key in the target's prefix cache

    @property
    def resident_bytes(self) -> int:
        return num_bytes(self._params)

    def page_bytes(self, cache_config: CacheConfig) -> int:
        """Returns the bytes of one page of this model's cache."""
        return page_bytes(self._config, cache_config)

    def prepare(self, target: EngineModel) -> int:
        """Compiles the steps; ValueError if the vocabulary is not the target's, or the layers keep states."""
        vocab_size, engine_config = target.model_config.vocab_size, target.engine_config
        if abs(self._config.vocab_size - vocab_size) > MAX_PADDING:
            raise ValueError(
                f"the draft model has a vocabulary of {self._config.vocab_size} tokens, the target one of {vocab_size},"
                f" more than {MAX_PADDING} rows of padding apart; speculation needs a draft model of the target's"
            )
        if self._config.is_recurrent:
            raise ValueError(
                "the draft model has recurrent layers, whose states cannot leave out drafts that are rejected; give one"
                " of attention layers alone, or another drafter"
            )
        # Each of its layers has keys in the pages of the target's first kind, which are those of all tokens. It is so
        # small that one of the devices computes it alone.
        cache_config, placement = replace(target.cache_config, num_bounded_pages=()), target.placement.first
        target = replace(target, cache_config=cache_config, placement=placement)
        self._placement, self._params = placement, placement.put(self._params)
        self._cache_config, self._page_size = target.cache_config, target.cache_config.page_size
        sizes = decode_sizes(engine_config)
        widest = max(max_batched_tokens(engine_config), CATCH_UP * sizes[-1])  # large enough for prompts
        shapes = [(rows, CATCH_UP * rows) for rows in sizes]
        self._steps = DraftSteps(self._params, self._config, target, [*shapes, (sizes[-1], widest)])
        return engine_config.max_drafts

    def attach(self, lend_cache: LendCache) -> None:
        """Allocates the cache, now that its number of pages is final."""
        self._cache = self._placement.init_cache(self._config, self._cache_config)

    def num_unseen(self, request: Request) -> int:
        text, last = request.token_ids, len(request.token_ids) - 1  # the last token is always computed
        num_computed, drafts = self._computed.get(request.request_id, (0, []))
        num_computed += num_equal(drafts, text[num_computed:])
        num_seen = 0
        for index, page in enumerate(request.table.pages):
            end = num_seen + self._page_size
            writer, place = self._written.get(page, ((), 0))
            # A rewound request has a new token list. A preempted one may get pages that others have overwritten.
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
        # No shape holds all missed tokens: compute those that fit, and draft in a later step.
        self._run(shape, requests, _first_tokens(spans, shape[1]), [0] * len(requests))
        return drafts

    def forget(self, request: Request) -> None:
        self._computed.pop(request.request_id, None)

    def _run(
        self, shape: Shape, requests: Sequence[Request], spans: Sequence[Span], counts: Sequence[int]
    ) -> list[list[int]]:
        chosen = [requests[i] for i, *_ in spans]
        pairs = zip(chosen, spans, strict=True)
        rows = [Row(r.token_ids[start:end], start, r.table.pages) for r, (_, start, end) in pairs]
        limits = [counts[i] for i, *_ in spans]
        tokens, self._cache = self._steps.run(shape, self._cache, rows, chosen, limits)
        for request, (_, start, end), limit, drafted in zip(chosen, spans, limits, tokens, strict=True):
            self._computed[request.request_id] = (end, drafted[:-1])
            first = start // self._page_size
            for index, page in enumerate(request.table.pages[first : -(-(end + limit) // self._page_size)], first):
                self._written[page] = (request.token_ids, index)
                self._known.pop(page, None)
                if request.keys is not None and (index + 1) * self._page_size <= end:
                    self._known[page] = request.keys.key(index, request.token_ids)
        return tokens


def _first_tokens(spans: Sequence[Span], room: int) -> list[Span]:
    """Returns the spans cut to `room` tokens in all."""
    chosen = []
    for i, start, end in spans:
        end = min(end, start + room)
        if start < end:
            chosen.append((i, start, end))
            room -= end - start
    return chosen
