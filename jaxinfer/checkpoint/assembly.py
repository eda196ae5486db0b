"""From a checkpoint's tensors to those of `Params`: which ones, rearranged, stacked and placed how."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from einops import rearrange
from jax.sharding import Sharding
from jax.tree_util import GetAttrKey, SequenceKey

from jaxinfer.checkpoint.config_json.family import Either, Fused, WeightTable
from jaxinfer.checkpoint.safetensors_file import StoredTensor
from jaxinfer.model.components.layers import TensorSpec
from jaxinfer.model.config import ModelConfig
from jaxinfer.model.params import Params, declare

ALIGNMENT = 64


@dataclass(frozen=True)
class Assembly:
    """The making of one tensor of `Params`: from one stored tensor, or from one per layer (and expert), stacked."""

    shape: tuple[int, ...]
    names: tuple[str, ...]
    pattern: str
    num_stacked: int = 0  # leading axes over which the stored tensors are stacked: layers, or layers and experts
    stored_size: int | None = None  # length of the stored axis of a `Fused` tensor
    part: tuple[int | None, ...] = (None,)  # the slice of that axis
    axis: int = 0
    unfold: str | None = None  # pattern from the stored axes to those that `axis` counts

    @property
    def axes(self) -> dict[str, int]:
        """Length of each axis that the pattern names; the axes of the stack have no name there."""
        return dict(zip(self.pattern.partition(" -> ")[2].split(), self.shape[self.num_stacked :], strict=True))

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape that each of the stored tensors must have."""
        shape = self._whole_shape
        return shape if self.unfold is None else _stored_shape(self.unfold, shape)

    @property
    def _whole_shape(self) -> tuple[int, ...]:
        """Shape of the stored tensor, unfolded."""
        shape = self.own_shape
        if self.stored_size is None:
            return shape
        return (*shape[: self.axis], self.stored_size, *shape[self.axis + 1 :])

    @property
    def own_shape(self) -> tuple[int, ...]:
        """Shape of the part of each stored tensor that this one is made of."""
        return _stored_shape(self.pattern, tuple(self.axes.values()))

    def view(self, stored: Mapping[str, StoredTensor], name: str) -> np.ndarray:
        """Returns one of the stored tensors as its part of ours, without reading it."""
        array = stored[name].map()
        if self.unfold is not None:
            names = self.unfold.partition(" -> ")[2].split()
            array = rearrange(array, self.unfold, **dict(zip(names, self._whole_shape, strict=True)))
        if self.stored_size is not None:
            array = array[(*(slice(None),) * self.axis, slice(*self.part))]
        return rearrange(array, self.pattern, **self.axes)


@functools.cache  # all layers have the same few, and a trace takes 0.3 ms
def _stored_shape(pattern: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    stored, _, ours = pattern.partition(" -> ")
    tensor = jax.ShapeDtypeStruct(shape, np.dtype(np.int8))
    return jax.eval_shape(lambda x: rearrange(x, f"{ours} -> {stored}"), tensor).shape


@dataclass(frozen=True)
class _Source:
    """A stored name, the pattern from its axes to ours, and its place in a fused tensor."""

    name: str
    pattern: str
    fused: Fused | None = None
    place: int = 0


def plan_assembly(config: ModelConfig, weights: WeightTable) -> Params:
    """Returns `Params` with an `Assembly` in the place of every tensor that `config` declares.

    Raises RuntimeError if the table of `weights` has no name for some of them.
    """
    sources = _sources(weights)
    declared = declare(config)
    leaves, structure = jax.tree_util.tree_flatten_with_path(declared, is_leaf=lambda x: isinstance(x, TensorSpec))
    shapes = {(_field(path), _stack(path)): spec.shape for path, spec in leaves}
    if len(shapes) < len(leaves):
        raise RuntimeError(
            "a layer has two Branches whose mixers have tensors of the same names, so no table can tell their stored"
            " names apart; give the mixers different fields"
        )
    fields = {_field(path) for path, _ in leaves}
    if nameless := fields - sources.keys():
        others = sorted(sources.keys() - fields)
        raise RuntimeError(
            f"the model has the tensors {', '.join(sorted(nameless))}, which the family's table does not name; add"
            " their stored names to `Family.weights`, or declare no such tensors"
            + (f". The table also names {', '.join(others)}, which this model does not have" if others else "")
        )

    def plan(path: tuple[Any, ...], spec: TensorSpec) -> Assembly:
        field, stack = _field(path), _stack(path)
        source = sources[field]
        if stack is None:
            assembly = Assembly(spec.shape, (source.name,), source.pattern)
        else:
            layers = config.layers_of_stacks[stack]
            experts = range(spec.shape[1]) if "{expert}" in source.name else (0,)
            try:
                names = tuple(source.name.format(layer=layer, expert=expert) for layer in layers for expert in experts)
            except (KeyError, IndexError, ValueError):
                raise RuntimeError(
                    f"the family's table names {source.name!r}; braces hold {{layer}} or {{expert}} alone"
                ) from None
            assembly = Assembly(spec.shape, names, source.pattern, 2 if "{expert}" in source.name else 1)
        if source.fused is None:
            return assembly
        fused, axis = source.fused, source.fused.axis
        sizes = [
            replace(assembly, shape=shapes[target, stack], pattern=pattern).own_shape[axis]
            for target, pattern in fused.targets
        ]
        first = sum(sizes[: source.place])
        part = (first, first + sizes[source.place])
        if fused.is_interleaved:
            part = (source.place, None, len(sizes))
        return replace(assembly, stored_size=sum(sizes), part=part, axis=axis, unfold=fused.unfold)

    return jax.tree.unflatten(structure, [plan(path, spec) for path, spec in leaves])


def _sources(weights: WeightTable) -> dict[str, _Source]:
    """Returns the source of each tensor, by its path in `Params` without the index of the stack."""
    sources = {}
    pairs = (
        (name, targets)
        for name, either in weights.items()
        for targets in (either.alternatives if isinstance(either, Either) else (either,))
    )
    for name, targets in pairs:
        if isinstance(targets, Fused):
            for place, (field, pattern) in enumerate(targets.targets):
                sources[field] = _Source(name, pattern, targets, place)
        elif isinstance(targets, tuple) and len(targets) == 2:
            field, pattern = targets
            sources[field] = _Source(name, pattern)
        else:
            raise RuntimeError(
                f"the family's table has {targets!r} for {name!r}; give a field of Params and a pattern, such as"
                ' ("layers.mixer.q", "(N H) D -> N H D")'
            )
    return sources


def _field(path: tuple[Any, ...]) -> str:
    """Returns "layers.mixer.q" for the path of `params.layers[3].mixer.q`."""
    return ".".join(key.name for key in path if isinstance(key, GetAttrKey))


def _stack(path: tuple[Any, ...]) -> int | None:
    return next((key.idx for key in path if isinstance(key, SequenceKey)), None)


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
    views = [assembly.view(stored, name) for name in assembly.names]
    num_stacked = assembly.num_stacked

    def read(index: Any) -> np.ndarray:
        if num_stacked == 0:
            whole = views[0][index]
            array = empty_aligned(whole.shape, dtype)
            np.copyto(array, whole, casting="unsafe")
            return array
        chosen = np.arange(len(views)).reshape(assembly.shape[:num_stacked])[index[:num_stacked]]
        slices = [views[i][index[num_stacked:]] for i in chosen.flat]
        stack = empty_aligned((len(slices), *slices[0].shape), dtype)
        return np.stack(slices, out=stack, casting="unsafe").reshape(*chosen.shape, *slices[0].shape)

    if sharding is None:
        array = jax.device_put(read((slice(None),) * len(assembly.shape)))
    else:
        array = jax.make_array_from_callback(assembly.shape, sharding, read, dtype=dtype)
    # Otherwise transfers still under way would keep several tensors in host memory.
    return array.block_until_ready()
