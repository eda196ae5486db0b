"""8-bit weights with a scale per output channel, or per group of inputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfer.params import LayerParams, Params

# The largest of a group becomes this; -128 is left out, so that the grid is symmetric.
LARGEST = 127
# The weights of products, and how many of their last axes are inputs. Norms, biases and the embedding, of which rows
# are taken, stay as they are.
NUM_INPUT_AXES = {"q": 1, "k": 1, "v": 1, "o": 2, "gate": 1, "up": 1, "down": 1}


@struct.dataclass
class QuantizedArray:
    """Weights [out..., in...] as integers: weight = value * scale, with one scale per group of inputs.

    The inputs, flattened, are cut into groups of equal size; a single group is a scale per output channel.
    """

    values: Any  # i8[out..., in...]
    scales: Any  # f32[out..., groups]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape


def quantize(w: jax.Array, *, num_input_axes: int = 1, group_size: int | None = None) -> QuantizedArray:
    """Rounds weights [out..., in...] to the nearest of 255 steps per group, of which the largest weight is the last.

    `group_size` is a number of inputs; None makes a group of all inputs of a channel. Raises ValueError where it does
    not divide them.
    """
    outputs, num_inputs = w.shape[: w.ndim - num_input_axes], math.prod(w.shape[w.ndim - num_input_axes :])
    size = num_inputs if group_size is None else group_size
    if size < 1 or num_inputs % size:
        raise ValueError(f"group_size={group_size} does not divide the {num_inputs} inputs of weights {w.shape}")
    groups = w.reshape(*outputs, num_inputs // size, size).astype(jnp.float32)
    largest = jnp.abs(groups).max(-1, keepdims=True)
    scales = jnp.where(largest > 0, largest / LARGEST, 1.0)  # a group of zeros has any scale
    values = jnp.round(groups / scales).astype(jnp.int8)
    return QuantizedArray(values.reshape(w.shape), scales[..., 0])


def quantize_params(params: Params, *, group_size: int | None = None) -> Params:
    """Returns the parameters with the weights of all products quantized; `group_size` as in `quantize`.

    A tied embedding stays in floating point at both ends.
    """
    return _replace_weights(params, lambda w, axes: quantize(w, num_input_axes=axes, group_size=group_size))


def quantized_shardings(placement: Params) -> Params:
    """Returns where the tensors of `quantize_params` go, for weights placed so, with one scale per output channel."""

    def split(sharding: NamedSharding, num_input_axes: int) -> QuantizedArray:
        spec = PartitionSpec(*sharding.spec[: len(sharding.spec) - num_input_axes], None)
        return QuantizedArray(values=sharding, scales=NamedSharding(sharding.mesh, spec))

    return _replace_weights(placement, split)


def _replace_weights(params: Params, change: Callable[[Any, int], QuantizedArray]) -> Params:
    def change_layers(layers: LayerParams) -> LayerParams:
        return replace(layers, **{name: change(getattr(layers, name), axes) for name, axes in NUM_INPUT_AXES.items()})

    unembedding = None if params.unembedding is None else change(params.unembedding, 1)
    return replace(params, layers=tuple(map(change_layers, params.layers)), unembedding=unembedding)
