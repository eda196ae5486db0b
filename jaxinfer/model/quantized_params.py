"""Parameters whose products have quantized weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from jaxinfer.model.params import LayerParams, Params
from jaxinfer.quantization.quantized_array import NUM_INPUT_AXES, QuantizedArray, quantize


def quantize_params(params: Params, *, group_size: int | None = None, bits: int = 8, is_packed: bool = True) -> Params:
    """Returns the parameters with the weights of all products quantized; the options are those of `quantize`.

    A tied embedding stays in floating point at both ends.
    """
    options = {"group_size": group_size, "bits": bits, "is_packed": is_packed}
    return _replace_weights(params, lambda w, axes: quantize(w, num_input_axes=axes, **options))


def quantized_shardings(placement: Params) -> Params:
    """Returns the shardings of the tensors of `quantize_params`, with one scale per output channel."""

    def split(sharding: NamedSharding, num_input_axes: int) -> QuantizedArray:
        spec = PartitionSpec(*sharding.spec[: len(sharding.spec) - num_input_axes], None)
        return QuantizedArray(values=sharding, scales=NamedSharding(sharding.mesh, spec))

    return _replace_weights(placement, split)


def _replace_weights(params: Params, change: Callable[[Any, int], QuantizedArray]) -> Params:
    def change_layers(layers: LayerParams) -> LayerParams:
        axes = {name: n for name, n in NUM_INPUT_AXES.items() if name != "unembedding"}
        return replace(layers, **{name: change(getattr(layers, name), n) for name, n in axes.items()})

    unembedding = None if params.unembedding is None else change(params.unembedding, NUM_INPUT_AXES["unembedding"])
    return replace(params, layers=tuple(map(change_layers, params.layers)), unembedding=unembedding)
