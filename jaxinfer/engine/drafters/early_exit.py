"""Self-speculation: drafts by the target's own first layers, on the target's own pages (Zhang et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import jax

from jaxinfer.engine.drafters.draft_model import DraftSteps, StepDrafter, most_drafts_first
from jaxinfer.engine.execution.batch_builder import row_of
from jaxinfer.engine.execution.engine_model import EngineModel, LendCache
from jaxinfer.engine.request.request import Request
from jaxinfer.model.cache import KVCache
from jaxinfer.model.params import Params
from jaxinfer.plan.memory import num_bytes
from jaxinfer.plan.step_shapes import decode_sizes, fitting_size


class ExitDrafter(StepDrafter):
    """Drafts tokens sampled after `num_layers` layers, a norm [D] and a lens [D, D], with the target's Gumbel noise.

    The target's pages hold the keys and values of these layers already, so it can draft for every request, even after
    a preemption or rewind. It writes past the computed tokens, and the next step overwrites that.
    """

    def __init__(self, num_layers: int, norm: jax.Array, lens: jax.Array) -> None:
        self._num_layers, self._norm, self._lens = num_layers, norm, lens

    @property
    def layer_cuts(self) -> tuple[int, ...]:
        return (self._num_layers,)

    @property
    def resident_bytes(self) -> int:
        return num_bytes((self._norm, self._lens))

    def prepare(self, target: EngineModel) -> int:
        """Compiles the steps; ValueError if the exit does not fit the target's hidden size or layer groups."""
        config = target.model_config
        if self._lens.shape[0] != config.hidden_size:
            raise ValueError(
                f"the early exit is for a hidden size of {self._lens.shape[0]}, the target has {config.hidden_size};"
                " speculation needs one that was trained on the target"
            )
        ends = list(accumulate(config.layer_groups))
        if self._num_layers not in ends[:-1]:
            raise ValueError(
                f"the early exit is after layer {self._num_layers}, but the target's groups of layers end after {ends};"
                " an exit is after one of them, before the last"
            )
        first = replace(config, groups=config.groups[: ends.index(self._num_layers) + 1])
        if first.is_recurrent:
            raise ValueError(
                f"the early exit is after layer {self._num_layers}, before which the target has recurrent layers; their"
                " states cannot leave out drafts that are rejected: use another drafter"
            )
        if first.page_kinds != config.page_kinds:
            raise ValueError(
                f"the early exit is after layer {self._num_layers}, before which the target has not every kind of"
                " attention window; an exit is after layers of every kind"
            )
        self._num_stacks, self._num_pools = len(first.stacks), len(first.mixer_stacks)
        self._norm, self._lens = target.placement.put((self._norm, self._lens))
        params = self._first_layers(target.params)
        self._steps = DraftSteps(params, first, target, [(rows, rows) for rows in decode_sizes(target.engine_config)])
        return target.engine_config.max_drafts

    def update_target(self, params: Params) -> None:
        self._steps.params = self._first_layers(params)

    def attach(self, lend_cache: LendCache) -> None:
        self._lend_cache = lend_cache

    def draft(self, requests: Sequence[Request], counts: Sequence[int]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in requests]
        order = most_drafts_first(counts)
        if not order:
            return drafts
        chosen = [requests[i] for i in order]
        rows = [row_of(request, request.token_ids[-1:], len(request.token_ids) - 1) for request in chosen]
        num_rows = fitting_size((rows for rows, _ in self._steps.shapes), len(chosen))

        def compute(cache: KVCache) -> tuple[list[list[int]], KVCache]:
            first = replace(cache, pools=cache.pools[: self._num_pools])
            tokens, first = self._steps.run((num_rows, num_rows), first, rows, chosen, [counts[i] for i in order])
            return tokens, replace(first, pools=first.pools + cache.pools[self._num_pools :])

        for i, tokens in zip(order, self._lend_cache(compute), strict=True):
            drafts[i] = tokens
        return drafts

    def _first_layers(self, params: Params) -> Params:
        layers = params.layers[: self._num_stacks]
        return replace(params, layers=layers, final_norm=self._norm, lens=self._lens)
