"""Drafts by trained heads on the target's last hidden states, the drafter's only state.

The heads are Medusa's, EAGLE's, EAGLE-3's or layers for multi-token prediction.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxinfer.engine.drafters.hidden_states import StateWindows, Window
from jaxinfer.engine.execution.batch_builder import sampling_of_requests
from jaxinfer.engine.execution.engine_model import DeviceDrafter, EngineModel
from jaxinfer.engine.execution.executable_cache import compile_or_load
from jaxinfer.engine.request.request import Request
from jaxinfer.engine.scheduling.drafts import Drafts, DraftTree
from jaxinfer.engine.scheduling.step import Step
from jaxinfer.engine.scheduling.step_results import SampledToken
from jaxinfer.model.batch import padded
from jaxinfer.model.params import Params
from jaxinfer.plan.memory import num_bytes, step_bytes
from jaxinfer.plan.step_shapes import decode_sizes, fitting_size, max_rows, plan_buckets
from jaxinfer.steps.eagle import EagleHead
from jaxinfer.steps.medusa import MedusaHeads, Paths, chain_of, draft_from_states, parents_of_paths


class HeadDrafter(DeviceDrafter):
    """Drafts tokens that heads sample from the last hidden states, with the Gumbel noise of the target's sampling.

    It drafts nothing for a request until it has observed a step after the request's last admission. It ignores
    parameters that change logits before the temperature. With `EngineConfig.draft_trees` it drafts the first paths of
    `tree`, or of the heads' own tree if `tree` is empty.
    """

    def __init__(self, heads: MedusaHeads | EagleHead, tree: Paths = ()) -> None:
        self._heads, self._tree = heads, tree

    @property
    def kept_layers(self) -> tuple[int, ...]:
        return self._heads.kept_layers

    @property
    def layer_cuts(self) -> tuple[int, ...]:
        return self._heads.kept_layers

    @property
    def resident_bytes(self) -> int:
        return num_bytes(self._heads)

    @property
    def num_executables(self) -> int:
        return len(self._compiled) + self._windows.num_executables

    @property
    def step_bytes(self) -> int:
        return self._step_bytes

    def prepare(self, target: EngineModel) -> int:
        """Compiles the heads for the engine's batch sizes; ValueError if they have another hidden size."""
        config, width = target.engine_config, target.model_config.hidden_size
        if self._heads.hidden_size != width:
            raise ValueError(
                f"the draft heads are for a hidden size of {self._heads.hidden_size}, the target has {width};"
                " speculation needs heads that were trained on the target"
            )
        self._target, self._draft_trees = target, config.draft_trees
        self._heads = target.placement.put(self._heads)
        self._paths = chain_of(self._heads.most_drafts(config.max_drafts))
        if config.draft_trees:
            self._paths = (self._tree or self._heads.tree)[: config.max_drafts]
        self._parents = parents_of_paths(self._paths)
        sizes, dtype = decode_sizes(config), target.params.final_norm.dtype
        steps = [bucket.num_tokens for bucket in plan_buckets(config, config.max_drafts)]
        state_size, reduction = width * max(len(self.kept_layers), 1), self._heads.reduction
        self._windows = StateWindows(
            max_rows(config), self._heads.window, state_size, dtype, steps, reduction, target.placement
        )
        windows = self._windows.enter()
        replicated = target.placement.replicated
        inputs = [(windows, *replicated(self._lay_out([], [], size))) for size in sizes]
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # the compiler releases the interpreter lock
            self._compiled = dict(zip(sizes, pool.map(self._compile, inputs), strict=True))
        self._step_bytes = max(map(step_bytes, self._compiled.values(), inputs)) + self._windows.num_bytes
        return len(self._paths)

    def observe(self, step: Step, emitted: Sequence[Sequence[SampledToken]], hidden: Any) -> None:
        self._windows.note(step, emitted, hidden)

    def update_target(self, params: Params) -> None:
        self._target = replace(self._target, params=params)
        self._windows.forget_all()

    def draft(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Drafts]:
        drafts: list[Drafts] = [[] for _ in requests]
        windows = self._windows.enter()
        found = [
            self._windows.find(request) if count else None for request, count in zip(requests, counts, strict=True)
        ]
        known = [(i, window) for i, window in enumerate(found) if window is not None]
        if not known:
            return drafts
        size = fitting_size(self._compiled, len(known))
        arguments = self._lay_out([requests[i] for i, _ in known], [window for _, window in known], size)
        drawn = self._compiled[size](self._target.params, self._heads, windows, *arguments)
        for (i, _), row in zip(known, jax.device_get(drawn).tolist(), strict=False):
            tree = DraftTree(row, self._parents) if self._draft_trees else row
            drafts[i] = tree[: counts[i]]
        return drafts

    def forget(self, request: Request) -> None:
        self._windows.forget(request)

    def _lay_out(self, requests: Sequence[Request], windows: Sequence[Window], size: int) -> tuple[Any, ...]:
        """Returns the arguments of `draft_from_states` that follow the windows."""
        sampling = sampling_of_requests(
            requests,
            num_rows=size,
            max_listed_tokens=self._target.engine_config.max_listed_tokens,
            vocab_size=self._target.model_config.vocab_size,
            custom=tuple(self._target.custom),
            sharding=self._target.placement.whole,
        )
        rows, num_known = (
            padded(np.array([getattr(window, name) for window in windows], np.int32), size, 0)
            for name in ("row", "num_known")
        )
        W = self._heads.window
        tokens = np.zeros((size, W), np.int32)
        for row, request in enumerate(requests):
            last = request.token_ids[-W:]
            tokens[row, W - len(last) :] = last
        positions = padded(np.array([len(request.token_ids) for request in requests], np.int32), size, 0)
        return rows, tokens, num_known, replace(sampling, processors=None), positions

    def _compile(self, inputs: tuple[Any, ...]) -> jax.stages.Compiled:
        attention, mesh = self._target.engine_config.attention, self._target.placement.mesh
        statics = {"paths": self._paths, "implementation": attention, "mesh": mesh}
        num_rows = inputs[0].shape[0] * self._heads.window
        return compile_or_load(
            draft_from_states, self._target.params, self._heads, *inputs, num_rows=num_rows, **statics
        )
