"""Sums over the devices of a mesh: on CPU in the order of devices, wherever these are."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

import jax
from jax.sharding import Mesh


def has_ordered_sums(mesh: Mesh) -> bool:
    """True for several CPU devices.

    Of devices in one process, XLA adds numbers in the order of devices. Over processes it leaves the sum to a library
    in which the order depends on the place of a number in its array, and so on the number of a step's tokens.
    """
    return mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"


def sum_over_devices(x: jax.Array, axes: str | Sequence[str], mesh: Mesh) -> jax.Array:
    """Returns the sum of the arrays x of all devices along axes of a mesh, under `shard_map` over that mesh.

    On CPU all devices get all arrays and add them in the order of devices: the bits do not depend on the processes
    that the devices belong to, nor on the size of x.
    """
    if not has_ordered_sums(mesh):
        return jax.lax.psum(x, axes)
    parts = jax.lax.all_gather(x, axes)
    return functools.reduce(operator.add, [parts[i] for i in range(parts.shape[0])])
