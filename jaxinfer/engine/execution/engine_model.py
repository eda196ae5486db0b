"""What a drafter that runs on the device beside the target is told of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jaxinfer.config import CacheConfig, EngineConfig, ModelConfig
from jaxinfer.engine.request.request import Request
from jaxinfer.engine.scheduling.drafts import Drafts
from jaxinfer.engine.scheduling.step import Step
from jaxinfer.engine.scheduling.step_results import SampledToken
from jaxinfer.model.cache import KVCache
from jaxinfer.model.params import Params
from jaxinfer.sampling.processors import LogitsProcessor


@dataclass(frozen=True, kw_only=True)
class EngineModel:
    """The model that is drafted for, and its engine's limits."""

    params: Params
    model_config: ModelConfig
    engine_config: EngineConfig
    cache_config: CacheConfig
    table_width: int
    custom: Mapping[str, LogitsProcessor]


# Lets a function of the target's cache have it: takes cache -> (result, cache), returns the result.
LendCache = Callable[[Callable[[KVCache], tuple[Any, KVCache]]], Any]


class PreparesDrafts(Protocol):
    """The part of `Speculation` that is compiled and planned with the steps."""

    @property
    def device_drafter(self) -> DeviceDrafter | None: ...

    def prepare(self, target: EngineModel) -> None:
        """Compiles the drafter's steps for this target; again for a cache of another size."""
        ...


@runtime_checkable
class DeviceDrafter(Protocol):
    """A `Drafter` with steps of its own on the device."""

    @property
    def first_layers(self) -> int | None:
        """After how many of the target's layers a group of them has to end, if it matters."""
        return None

    def page_bytes(self, cache_config: CacheConfig) -> int:
        """Returns what it needs for each page of the target's cache."""
        return 0

    @property
    def resident_bytes(self) -> int:
        """What its parameters take."""
        ...

    @property
    def num_executables(self) -> int: ...

    @property
    def step_bytes(self) -> int:
        """What its steps need beside parameters and pages, once they are compiled."""
        ...

    def prepare(self, target: EngineModel) -> int:
        """Compiles all it needs; returns the most drafts it makes. ValueError for one that it cannot draft for.

        A second time, for a cache of another size, it does so anew.
        """
        ...

    def attach(self, lend_cache: LendCache) -> None:
        """Is told, before it drafts first, how to compute on the target's cache."""

    def observe(self, step: Step, emitted: Sequence[Sequence[SampledToken]], hidden: Any) -> None:
        """Is shown each step, what it emitted and its tokens' states [T, D], on the device."""

    def num_unseen(self, request: Request) -> int:
        """Returns how many of the request's tokens it still has to compute for drafts, the last one among them."""
        return 1

    def draft(self, requests: Sequence[Request], counts: Sequence[int]) -> Sequence[Drafts]: ...

    def forget(self, request: Request) -> None:
        """Is told that a request has ended."""
