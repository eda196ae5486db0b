"""The making of each tensor of `Params`: of which stored tensors, rearranged and stacked how."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from einops import rearrange
from jax.tree_util import GetAttrKey, SequenceKey

from jaxinfer.checkpoint.config_json.family import Either, Fused, WeightTable
from jaxinfer.checkpoint.stored import Blocks, Grid, Stored
from jaxinfer.device import packs_integers
from jaxinfer.model.components.layers import TensorSpec
from jaxinfer.model.config import ModelConfig
from jaxinfer.model.params import Params, declare


@dataclass(frozen=True)
class Assembly:
    """The making of one tensor of `Params`: from one stored tensor, or from one per layer (and expert), stacked."""

    spec: TensorSpec
    names: tuple[str, ...]
    pattern: str
    num_stacked: int = 0  # leading axes over which the stored tensors are stacked: layers, or layers and experts
    stored_size: int | None = None  # length of the stored axis of a `Fused` tensor
    part: tuple[int | None, ...] = (None,)  # the slice of that axis
    axis: int = 0
    unfold: str | None = None  # pattern from the stored axes to those that `axis` counts

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    @property
    def axes(self) -> dict[str, int]:
        """Length of each axis that the pattern names, as stored; the axes of the stack have no name there."""
        sizes = self.spec.own_shape[self.num_stacked :]
        return dict(zip(self.pattern.partition(" -> ")[2].split(), sizes, strict=True))

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

    @property
    def is_packable(self) -> bool:
        """True for the weight of a product, an embedding or a matrix, if its last stored axis counts its inputs.

        The axis may then be one of groups, or of bytes. Of all but a matrix it must be our last one, too.
        """
        stored, _, ours = self.pattern.partition(" -> ")
        before, _, unfolded = (self.unfold or "D -> D").partition(" -> ")
        is_packable = self.spec.num_inputs == 1 or self.spec.is_of_vocabulary
        is_packable = is_packable and stored.split()[-1] == ours.split()[-1]
        return (is_packable or self.spec.is_matrix) and before.split()[-1] == unfolded.split()[-1]

    @functools.cached_property
    def packed(self) -> Assembly:
        """The making of a packable tensor if it is packed: with its inputs last."""
        stored, _, ours = self.pattern.partition(" -> ")
        axes, inputs = ours.split(), stored.split()[-1]
        places = sorted(range(len(axes)), key=lambda place: axes[place] == inputs)
        order = (*range(self.num_stacked), *(self.num_stacked + place for place in places))
        sizes, names = (tuple(each[i] for i in order) for each in (self.spec.shape, self.spec.axes))
        pattern = f"{stored} -> {' '.join(axes[place] for place in places)}"
        return replace(self, spec=replace(self.spec, shape=sizes, axes=names), pattern=pattern)

    def of_groups(self, num_groups: int) -> Assembly:
        """Returns the making of the scales of our tensor, or of its bytes: with these in the place of inputs."""
        return self.of_shape((*self.shape[:-1], num_groups))

    def of_shape(self, shape: tuple[int, ...]) -> Assembly:
        """Returns the making of a tensor of another shape."""
        return replace(self, spec=replace(self.spec, shape=shape))

    def view(self, array: np.ndarray, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """Returns a stored array as its part of ours, or an index of that; nothing is read without need.

        Copies of KV heads and padding of the vocabulary are made here.
        """
        index = (slice(None),) * (len(self.shape) - self.num_stacked) if index is None else index
        places = {axis - self.num_stacked: all_[index[axis - self.num_stacked]] for axis, all_ in self._places.items()}
        own = tuple(slice(None) if axis in places else slice_ for axis, slice_ in enumerate(index))
        array = self._stored_view(array)[own]
        for axis, chosen in places.items():
            num_kept = np.count_nonzero(chosen >= 0)
            array = array.take(chosen[:num_kept], axis)
            if num_kept < len(chosen):  # only the last ones are padding
                size = (*array.shape[:axis], len(chosen) - num_kept, *array.shape[axis + 1 :])
                array = np.concatenate([array, np.zeros(size, array.dtype)], axis)
        return array

    @functools.cached_property
    def rows(self) -> np.ndarray:
        """Returns the row i64[rows] of a stored tensor in each row of ours; -1 for padding. It must be packable."""
        *outputs, _ = self.stored_shape
        numbers = np.arange(1, math.prod(outputs) + 1).reshape(*outputs, 1)
        return self.of_groups(1).view(numbers).reshape(-1) - 1

    @functools.cached_property
    def _places(self) -> dict[int, np.ndarray]:
        return self.spec.places()

    def _stored_view(self, array: np.ndarray) -> np.ndarray:
        if self.unfold is not None:
            names = self.unfold.partition(" -> ")[2].split()
            array = rearrange(array, self.unfold, **dict(zip(names, self._whole_shape, strict=True)))
        if self.stored_size is not None:
            array = array[(*(slice(None),) * self.axis, slice(*self.part))]
        return rearrange(array, self.pattern, **self.axes)


def turned_as_stored(plan: Params, stored: Mapping[str, Stored], ends: tuple[str, ...]) -> Params:
    """Returns the plan for files that have the last two of three axes of some tensors in the other order.

    Names of such tensors end in one of `ends`. If both orders fit a tensor's shape, it is as the plan has it.
    """

    def as_stored(assembly: Assembly) -> Assembly:
        tensor = stored.get(assembly.names[0]) if assembly.names[0].endswith(ends) else None
        if tensor is None or tensor.shape == assembly.stored_shape:
            return assembly
        turned = replace(assembly, unfold="E X Y -> E Y X")
        return turned if tensor.shape == turned.stored_shape else assembly

    return jax.tree.map(as_stored, plan, is_leaf=is_assembly)


def is_assembly(node: Any) -> bool:
    """True for a leaf of a plan."""
    return isinstance(node, Assembly)


def assemblies_of(plan: Any) -> list[Assembly]:
    """Returns the leaves of a plan, or of a part of it."""
    return jax.tree.leaves(plan, is_leaf=is_assembly)


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
    specs = {(_field(path), _stack(path)): spec for path, spec in leaves}
    if len(specs) < len(leaves):
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
            assembly = Assembly(spec, (source.name,), source.pattern)
        else:
            layers = config.layers_of_stacks[stack]
            experts = range(spec.shape[1]) if "{expert}" in source.name else (0,)
            try:
                names = tuple(source.name.format(layer=layer, expert=expert) for layer in layers for expert in experts)
            except (KeyError, IndexError, ValueError):
                raise RuntimeError(
                    f"the family's table names {source.name!r}; braces hold {{layer}} or {{expert}} alone"
                ) from None
            assembly = Assembly(spec, names, source.pattern, 2 if "{expert}" in source.name else 1)
        if source.fused is None:
            return assembly
        fused, axis = source.fused, source.fused.axis
        sizes = [
            Assembly(specs[target, stack], (), pattern, assembly.num_stacked).own_shape[axis]
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


def grid_of(assembly: Assembly, stored: Mapping[str, Stored]) -> Grid | Blocks | None:
    """Returns how a tensor of `Params` is packed, None if it is floating point there.

    On TPU, where all blocks become integers of one kind, blocks of several types count as those of one. Raises
    ValueError if its stored tensors are packed in different ways, as the experts of a layer could be.
    """
    if not assembly.is_packable:
        return None
    grids = {getattr(stored[name], "grid", None) for name in assembly.names}
    if len(grids) == 1 or (all(isinstance(grid, Blocks) for grid in grids) and not packs_integers()):
        return min(grids, key=repr)
    names = ", ".join(assembly.names[:2])
    raise ValueError(f"{names} and others of one tensor are packed in different ways, which is not supported: {grids}")
