"""The slots for adapters on the device, and the compiled function that writes one of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.engine.execution.engine_model import EngineModel
from jaxinfer.engine.execution.executable_cache import compile_or_load
from jaxinfer.model.adapted_params import Slots, insert_adapter, with_slots
from jaxinfer.model.params import Params


class AdapterArrays:
    """The slots of all weights, of which steps read each row's. Nothing is compiled after the constructor.

    Each device of a mesh has all of them.
    """

    def __init__(self, model: EngineModel) -> None:
        slots = model.abstract_slots
        one = jax.tree.map(lambda a: jax.ShapeDtypeStruct((a.shape[0], *a.shape[2:]), a.dtype), slots)
        self._place, place = model.placement.put, model.placement.replicated
        insert = jax.jit(insert_adapter, donate_argnames="slots", out_shardings=model.placement.whole)
        self._compiled = compile_or_load(insert, slots, *place((jax.ShapeDtypeStruct((), jnp.int32), one)))
        self._slots = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype, device=a.sharding), slots)

    @classmethod
    def of(cls, model: EngineModel) -> AdapterArrays | None:
        """Returns the slots of an engine, None if it takes no adapters."""
        return cls(model) if model.engine_config.max_adapters else None

    def beside(self, params: Params) -> Params:
        """Returns the parameters of steps: these with the slots."""
        return with_slots(params, self._slots)

    def insert(self, slot: int, tensors: Slots) -> None:
        """Writes an adapter's tensors into a slot in place, after all launched steps; voids parameters with slots."""
        slots, self._slots = self._slots, None
        self._slots = jax.block_until_ready(self._compiled(slots, *self._place((np.int32(slot), tensors))))
