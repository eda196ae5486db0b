"""Parameters whose products have quantized weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import tree_map_with_path

from jaxinfer.model.params import Params
from jaxinfer.quantization.quantized_array import PRODUCT_WEIGHTS, QuantizedArray, quantize


def quantize_params(params: Params, *, group_size: int | None = None, bits: int = 8, is_packed: bool = True) -> Params:
    """Returns the parameters with the weights of all products quantized; the options are those of `quantize`.

    A tied embedding stays in floating point at both ends.
    """
    options = {"group_size": group_size, "bits": bits, "is_packed": is_packed}
    return _replace_weights(params, lambda w: quantize(w, **options))


def quantized_shardings(placement: Params) -> Params:
    """Returns the shardings of the tensors of `quantize_params`, with one scale per output channel."""

    def split(sharding: NamedSharding) -> QuantizedArray:
        spec = PartitionSpec(*sharding.spec[:-1], None)
        return QuantizedArray(values=sharding, scales=NamedSharding(sharding.mesh, spec))

    return _replace_weights(placement, split)


def _replace_weights(params: Params, change: Callable[[Any], QuantizedArray]) -> Params:
    def change_weight(path: tuple[Any, ...], w: Any) -> Any:
        return change(w) if path[-1].name in PRODUCT_WEIGHTS else w

    return tree_map_with_path(change_weight, params)
