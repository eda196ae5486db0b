"""The axes of a mesh that split a dimension of an array, as an entry of a `PartitionSpec`, and functions over them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

# None: each device has the whole dimension.
Axes = str | tuple[str, ...] | None

# The axes that heads are split over.
HEADS_AXES = ("experts", "model")
# The axis that layers are split over.
STAGES_AXIS = "stages"


def dividing_axes(size: int, mesh: Mesh | AbstractMesh, axes: Sequence[str]) -> Axes:
    """Returns the axes of a mesh that split a dimension: all of `axes`, or the last ones whose devices divide its size.

    None if there are no such axes. Axes that the mesh does not have do not count, and neither do those of one device,
    unless all are.
    """
    present = [axis for axis in axes if axis in mesh.axis_names]
    wide = [axis for axis in present if mesh.shape[axis] > 1] or present[-1:]
    fitting = (wide[first:] for first in range(len(wide)))
    found = next((own for own in fitting if size % num_parts(mesh, tuple(own)) == 0), [])
    return tuple(found) if len(found) > 1 else next(iter(found), None)


def num_parts(mesh: Mesh | AbstractMesh, axes: Axes) -> int:
    """Returns the number of parts that axes of a mesh split a dimension into."""
    return math.prod(mesh.shape[axis] for axis in names_of(axes))


def names_of(axes: Axes) -> tuple[str, ...]:
    """Returns the names of axes, none for None."""
    if axes is None:
        return ()
    return (axes,) if isinstance(axes, str) else axes


def num_stages(mesh: Mesh | AbstractMesh | None) -> int:
    """Returns the number of stages of a mesh, 1 for none."""
    return 1 if mesh is None else mesh.shape.get(STAGES_AXIS, 1)


def devices_per_stage(mesh: Mesh | AbstractMesh) -> int:
    """Returns the number of devices that share each layer."""
    return mesh.size // num_stages(mesh)


def over_devices(
    function: Callable[..., Any], mesh: Mesh | AbstractMesh, *, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """Returns the function by which each device of a mesh computes its own parts, as `jax.shard_map` does."""
    context, options = jax.sharding.get_abstract_mesh(), {}
    own: Any = mesh
    # All stages trace one program, in which `mesh` has the names of the axes, but the devices of one stage alone.
    if STAGES_AXIS in context.manual_axes:
        own, options = context, {"axis_names": {*mesh.axis_names}}
    # Kernels are opaque to the replication check.
    return jax.shard_map(function, mesh=own, in_specs=in_specs, out_specs=out_specs, check_vma=False, **options)


def is_within_device() -> bool:
    """True where arrays are a device's own: in functions of `over_devices`, and in a stage of one device.

    A stage of several devices has axes that XLA splits, and only STAGES_AXIS is its own.
    """
    manual = {*jax.sharding.get_abstract_mesh().manual_axes}
    return bool(manual - {STAGES_AXIS})
