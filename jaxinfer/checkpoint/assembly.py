"""From a checkpoint's tensors to those of `Params`: which ones, rearranged, stacked and placed how."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import jax
import numpy as np
from einops import rearrange
from jax.sharding import Sharding

from jaxinfer.checkpoint.families.common import WeightTable
from jaxinfer.checkpoint.safetensors_file import StoredTensor
from jaxinfer.config import ModelConfig
from jaxinfer.model.params import Params, TensorSpec, declare

ALIGNMENT = 64


@dataclass(frozen=True)
class Assembly:
    """How one tensor of `Params` is made: from one stored tensor, or from one per layer, stacked."""

    shape: tuple[int, ...]
    names: tuple[str, ...]
    pattern: str
    is_stacked: bool

    @property
    def axes(self) -> dict[str, int]:
        """Length of each axis that the pattern names; the axis of the stack has no name there."""
        shape = self.shape[1:] if self.is_stacked else self.shape
        return dict(zip(self.pattern.partition(" -> ")[2].split(), shape, strict=True))

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape that each of the stored tensors must have."""
        return _stored_shape(self.pattern, tuple(self.axes.values()))


@functools.cache  # all layers have the same few, and a trace takes 0.3 ms
def _stored_shape(pattern: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    stored, _, ours = pattern.partition(" -> ")
    tensor = jax.ShapeDtypeStruct(shape, np.dtype(np.int8))
    return jax.eval_shape(lambda x: rearrange(x, f"{ours} -> {stored}"), tensor).shape


def plan_assembly(config: ModelConfig, weights: WeightTable) -> Params:
    """Returns `Params` with an `Assembly` in the place of every tensor that `config` declares."""
    sources = {path: (name, pattern) for name, (path, pattern) in weights.items()}
    # layer_groups 2, 2, 1 -> first_layers 0, 2, 4, 5
    first_layers = list(accumulate(config.layer_groups, initial=0))

    def plan(path: tuple[Any, ...], spec: TensorSpec) -> Assembly:
        if len(path) == 1:
            name, pattern = sources[path[0].name]
            return Assembly(spec.shape, (name,), pattern, is_stacked=False)
        field, group, weight = path
        name, pattern = sources[f"{field.name}.{weight.name}"]
        layers = range(first_layers[group.idx], first_layers[group.idx + 1])
        return Assembly(spec.shape, tuple(name.format(layer=layer) for layer in layers), pattern, is_stacked=True)

    return jax.tree_util.tree_map_with_path(plan, declare(config), is_leaf=lambda x: isinstance(x, TensorSpec))


def empty_aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Returns memory that JAX for CPU uses as it is; it copies arrays that do not start at a multiple of 64 bytes."""
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + num_bytes].view(dtype).reshape(shape)


def assemble(
    assembly: Assembly, stored: Mapping[str, StoredTensor], dtype: np.dtype, sharding: Sharding | None
) -> jax.Array:
    """Reads one tensor of `Params` as `dtype` and returns it when it is on its devices.

    Without a sharding it goes, uncommitted, to the default device; with one, each device's slice is read by
    itself.
    """
    views = [rearrange(stored[name].map(), assembly.pattern, **assembly.axes) for name in assembly.names]

    def read(index: Any) -> np.ndarray:
        if not assembly.is_stacked:
            whole = views[0][index]
            array = empty_aligned(whole.shape, dtype)
            np.copyto(array, whole, casting="unsafe")
            return array
        layers, within = index[0], index[1:]
        slices = [view[within] for view in views[layers]]
        stack = empty_aligned((len(slices), *slices[0].shape), dtype)
        return np.stack(slices, out=stack, casting="unsafe")

    if sharding is None:
        array = jax.device_put(read((slice(None),) * len(assembly.shape)))
    else:
        array = jax.make_array_from_callback(assembly.shape, sharding, read, dtype=dtype)
    # Otherwise transfers still under way would keep several tensors in host memory.
    return array.block_until_ready()
