"""Drafts by trained heads on the target's last hidden states. It keeps nothing but the last step's, on the device."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxinfer.batch import padded
from jaxinfer.draft_heads import draft_from_heads
from jaxinfer.engine.batching import sampling_of_requests
from jaxinfer.engine.buckets import decode_sizes
from jaxinfer.engine.device_drafter import DeviceDrafter, Target
from jaxinfer.engine.emission import Emitted
from jaxinfer.engine.executables import compile_or_load
from jaxinfer.engine.request import Request
from jaxinfer.engine.step import Step
from jaxinfer.plan.memory import num_bytes, step_bytes
from jaxinfer.sampling_batch import SamplingBatch


class HeadDrafter(DeviceDrafter):
    """Drafts what heads [K, D, 2 D] on the last states draw, with the noise of the target's draws.

    Parameters that change logits before the temperature have no part in it.
    """

    def __init__(self, weights: jax.Array) -> None:
        self._weights = weights
        self._hidden: Any = None  # [T, D] of the last step
        self._places: dict[int, tuple[int, int]] = {}  # by request: the state of its last token, and how many it has

    @property
    def resident_bytes(self) -> int:
        return num_bytes(self._weights)

    @property
    def num_executables(self) -> int:
        return len(self._compiled)

    @property
    def step_bytes(self) -> int:
        return self._step_bytes

    def prepare(self, target: Target) -> int:
        """Compiles the heads for the engine's batch sizes; ValueError for heads of a model of another width."""
        num_heads, width, _ = self._weights.shape
        if width != target.model_config.hidden_size:
            raise ValueError(
                f"the draft heads are for a hidden size of {width}, the target has {target.model_config.hidden_size};"
                " speculation needs heads that were trained on the target"
            )
        self._target, self._width = target, width
        self._dtype = target.params.final_norm.dtype
        sizes = decode_sizes(target.engine_config)
        inputs = [self._layout([], np.zeros((0, width), self._dtype), size) for size in sizes]
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # the compiler releases the interpreter lock
            self._compiled = dict(zip(sizes, pool.map(self._compile, inputs), strict=True))
        self._step_bytes = max(map(step_bytes, self._compiled.values(), inputs))
        return num_heads

    def observe(self, step: Step, emitted: Sequence[Sequence[Emitted]], hidden: Any) -> None:
        self._hidden, self._places = hidden, {}
        first = 0
        for chunk, tokens in zip(step.chunks, emitted, strict=True):
            if chunk.is_last:
                # Of a row that emitted n tokens the last was drawn from the state of the n-th that was computed.
                place = first + chunk.num_tokens + len(tokens) - 2
                num_tokens = len(chunk.request.token_ids) + len(tokens)
                self._places[chunk.request.request_id] = (place, num_tokens)
            first += chunk.num_tokens + len(chunk.drafts)

    def draft(self, requests: Sequence[Request], counts: Sequence[int]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in requests]
        known = [i for i, request in enumerate(requests) if counts[i] and self._knows(request)]
        if not known:
            return drafts
        chosen = [requests[i] for i in known]
        size = next(size for size in self._compiled if size >= len(chosen))
        states = np.asarray(self._hidden)[[self._places[request.request_id][0] for request in chosen]]
        drawn = self._compiled[size](self._target.params, self._weights, *self._layout(chosen, states, size))
        for i, row in zip(known, jax.device_get(drawn).tolist(), strict=False):
            drafts[i] = row[: counts[i]]
        return drafts

    def forget(self, request: Request) -> None:
        self._places.pop(request.request_id, None)

    def _knows(self, request: Request) -> bool:
        # One that was set back since has fewer tokens than the step has left it with.
        return self._places.get(request.request_id, (0, -1))[1] == len(request.token_ids)

    def _layout(
        self, requests: Sequence[Request], states: np.ndarray, size: int
    ) -> tuple[np.ndarray, np.ndarray, SamplingBatch, np.ndarray]:
        """Returns what `draft_from_heads` takes after the parameters and the weights."""
        sampling = sampling_of_requests(
            requests,
            num_rows=size,
            max_listed_tokens=self._target.engine_config.max_listed_tokens,
            vocab_size=self._target.model_config.vocab_size,
            custom=tuple(self._target.custom),
        )
        hidden = np.zeros((size, self._width), self._dtype)
        hidden[: len(requests)] = states
        tokens = np.array([request.token_ids[-1] for request in requests], np.int32)
        positions = np.array([len(request.token_ids) for request in requests], np.int32)
        return hidden, padded(tokens, size, 0), replace(sampling, processors=None), padded(positions, size, 0)

    def _compile(self, inputs: tuple[Any, ...]) -> jax.stages.Compiled:
        return compile_or_load(draft_from_heads, self._target.params, self._weights, *inputs)
