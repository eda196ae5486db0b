"""The compiled steps of a model that drafts, and how they are laid out."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jaxinfer.batch import Row, lay_out_batch, padded
from jaxinfer.cache import KVCache, abstract_cache
from jaxinfer.config import ModelConfig
from jaxinfer.engine.batching import sampling_of_requests
from jaxinfer.engine.device_drafter import DeviceDrafter, Target
from jaxinfer.engine.executables import compile_or_load
from jaxinfer.engine.request import Request
from jaxinfer.params import Params
from jaxinfer.plan.memory import step_bytes
from jaxinfer.steps import draft_step

Shape = tuple[int, int]  # rows and tokens


class DraftSteps:
    """`draft_step` for requests of a target's engine, in some shapes, on a cache with as many pages as the target's."""

    def __init__(self, params: Params, config: ModelConfig, target: Target, shapes: Iterable[Shape]) -> None:
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
