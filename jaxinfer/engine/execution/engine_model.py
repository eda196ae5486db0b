"""The interface between the engine and a drafter that runs on the device beside the target model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxinfer.config import CacheConfig, EngineConfig
from jaxinfer.engine.request.request import Request
from jaxinfer.engine.scheduling.drafts import Drafts
from jaxinfer.engine.scheduling.step import Step
from jaxinfer.engine.scheduling.step_results import SampledToken
from jaxinfer.model.adapted_params import Slots, abstract_slots
from jaxinfer.model.cache import KVCache
from jaxinfer.model.config import ModelConfig
from jaxinfer.model.params import Params
from jaxinfer.parallel.placement import DEFAULT_DEVICE, Placement
from jaxinfer.plan.cache import MemoryQuestion, PlannedDrafter
from jaxinfer.plan.memory import num_bytes
from jaxinfer.sampling.processors import LogitsProcessor


@dataclass(frozen=True, kw_only=True)
class EngineModel:
    """The target model and its engine's limits."""

    params: Params
    model_config: ModelConfig
    engine_config: EngineConfig
    cache_config: CacheConfig
    table_width: int  # pages per row of the block table
    custom: Mapping[str, LogitsProcessor]  # logits processors of the user, by name
    placement: Placement = DEFAULT_DEVICE

    def question(self, drafter: DeviceDrafter | None = None) -> MemoryQuestion:
        """Returns the question of the memory that this model takes, beside a drafter if there is one."""
        weights: dict[str, Any] = {"dtype": self._dtype.name, "param_bytes": num_bytes(self.params)}
        devices: dict[str, Any] = {"placement": self.placement, "drafter": drafter}
        return MemoryQuestion(model=self.model_config, config=self.engine_config, **weights, **devices)

    @property
    def _dtype(self) -> np.dtype:
        return np.dtype(self.params.final_norm.dtype)

    @property
    def adapter_options(self) -> dict[str, Any]:
        """The options of `read_adapter` for an adapter of this engine's slots."""
        return {"max_rank": self.engine_config.max_adapter_rank, "dtype": self._dtype}

    @property
    def abstract_slots(self) -> Slots:
        """The slots for adapters as `jax.ShapeDtypeStruct`s, whole on every device; None if the engine has none."""
        config = self.engine_config
        slots = abstract_slots(self.model_config, config.max_adapters, config.max_adapter_rank, self._dtype)
        return self.placement.replicated(slots)


def abstract(params: Params) -> Params:
    """Returns a `jax.ShapeDtypeStruct` per tensor; it compiles the same steps and keeps no memory."""

    def shape_of(tensor: jax.Array) -> jax.ShapeDtypeStruct:
        sharding = getattr(tensor, "sharding", None)  # an array of the host has none, and one device needs none
        sharding = sharding if isinstance(sharding, NamedSharding) else None
        return jax.ShapeDtypeStruct(tensor.shape, tensor.dtype, sharding=sharding)

    return jax.tree.map(shape_of, params)


# Calls a function cache -> (result, cache) with the target's cache, keeps the returned cache, returns the result.
LendCache = Callable[[Callable[[KVCache], tuple[Any, KVCache]]], Any]


class PreparesDrafts(Protocol):
    """The part of `Speculation` that takes part in compilation and memory planning."""

    @property
    def device_drafter(self) -> DeviceDrafter | None: ...

    def prepare(self, target: EngineModel) -> None:
        """Compiles the drafter's steps for this target. Called again if the cache size changes."""
        ...


@runtime_checkable
class DeviceDrafter(PlannedDrafter, Protocol):
    """A `Drafter` with steps of its own on the device."""

    @property
    def layer_cuts(self) -> tuple[int, ...]:
        """Returns the numbers of target layers after which a layer group must end."""
        return ()

    @property
    def kept_layers(self) -> tuple[int, ...]:
        """Returns the numbers of target layers after which `observe` receives states; () if after the final norm."""
        return ()

    @property
    def num_executables(self) -> int: ...

    @property
    def step_bytes(self) -> int:
        """Returns the bytes that its compiled steps need beside parameters and pages; call `prepare` first."""
        ...

    def prepare(self, target: EngineModel) -> int:
        """Compiles its steps; returns the most drafts that it makes. Raises ValueError for an unsupported target.

        Compiles anew if called again with a cache of another size.
        """
        ...

    def attach(self, lend_cache: LendCache) -> None:
        """Receives access to the target's cache, before the first draft."""

    def update_target(self, params: Params) -> None:
        """Receives the target's new parameters; drops all states that the old ones have computed."""

    def observe(self, step: Step, emitted: Sequence[Sequence[SampledToken]], hidden: Any) -> None:
        """Receives each step, its emitted tokens, and its tokens' hidden states [T, S], on the device.

        S is the target's hidden size, or that of each of `kept_layers`, in their order.
        """

    def num_unseen(self, request: Request) -> int:
        """Returns the number of the request's tokens, the last one included, that the drafter has not cached."""
        return 1

    def draft(self, requests: Sequence[Request], counts: Sequence[int]) -> Sequence[Drafts]: ...

    def forget(self, request: Request) -> None:
        """Drops the state of a request that has ended."""
