"""Checks parameters that are to replace those of a running engine, and replaces them tensor by tensor."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.tree_util import keystr, tree_leaves_with_path, tree_structure

from jaxinfer.engine.execution.engine_model import abstract
from jaxinfer.model.config import ModelConfig
from jaxinfer.model.joined_params import Joint, have_same_joints, split_products
from jaxinfer.model.params import Params, fit_params
from jaxinfer.quantization import PACKED
from jaxinfer.validation import require

WAY_OUT = "give parameters like those that load_checkpoint returns for this engine's checkpoint, dtype and quantization"


def fitting(params: Params, old: Params, config: ModelConfig) -> Params:
    """Returns `params` as those that may replace `old`, by `joints` and `replaced`.

    They may be for other devices: without copies of KV heads, and with tensors that are joined in `old` apart, or
    joined in parts for other devices. Raises ValueError that names the first other difference from `old`.
    """
    require(isinstance(params, Params), "params", params, "the Params of `load_checkpoint`")
    if not have_same_joints(params, old, config):
        params = split_products(params, config)
    params = fit_params(params, config)
    _require_alike(params, split_products(abstract(old), config, like=params))
    return params


def _require_alike(params: Params, old: Params) -> None:
    _check_quantization(params, old)
    expected = tree_leaves_with_path(old)
    found = {keystr(path): tensor for path, tensor in tree_leaves_with_path(params)}
    for path, tensor in expected:
        name = keystr(path)
        if name not in found:
            raise ValueError(f"params has no tensor {name}, which the engine's parameters have; {WAY_OUT}")
        _check_tensor(name, found[name], tensor)
    if unknown := sorted(found.keys() - {keystr(path) for path, _ in expected}):
        raise ValueError(f"params has a tensor {unknown[0]}, which the engine's parameters do not have; {WAY_OUT}")
    if tree_structure(params) != tree_structure(old):
        raise ValueError(f"params has logits={params.logits}, the engine's parameters have {old.logits}; {WAY_OUT}")


def _check_quantization(params: Params, old: Params) -> None:
    names = [_quantized_tensors(tree) for tree in (params, old)]
    if different := sorted(names[0] ^ names[1]):
        if different[0] in names[1]:
            raise ValueError(
                f"params{different[0]} is not quantized, and the engine's is; load them by load_checkpoint with the"
                " quantization of the engine's EngineConfig"
            )
        raise ValueError(f"params{different[0]} is quantized, and the engine's is not; load them without quantization")


def _quantized_tensors(params: Params) -> set[str]:
    leaves = tree_leaves_with_path(params, is_leaf=lambda node: isinstance(node, PACKED))
    return {keystr(path) for path, leaf in leaves if isinstance(leaf, PACKED)}


def _check_tensor(name: str, new: Any, old: Any) -> None:
    is_array = isinstance(new, jax.Array | np.ndarray) and not isinstance(new, Tracer)
    require(is_array, f"params{name}", new, "an array of jax or numpy")
    if isinstance(new, jax.Array) and new.is_deleted():
        raise ValueError(f"params{name} was donated or deleted; give arrays that no later step takes donated")
    for aspect in ("shape", "dtype"):
        ours, theirs = getattr(old, aspect), getattr(new, aspect)
        if ours != theirs:
            raise ValueError(f"params{name} has {aspect} {theirs}, but the engine's has {ours}; {WAY_OUT}")


def replaced(old: list[jax.Array | None], params: Params) -> Params:
    """Returns `params` on the devices of `old`, the leaves of the parameters that they replace.

    `params` may have a `Joint` in the place of an array. Empties `old`: frees each tensor, unless other code refers to
    it, before it copies the next. So the device needs room for one set of parameters. Arrays that are on their device
    already are not copied.
    """
    leaves, structure = jax.tree.flatten(params)
    for i, new in enumerate(leaves):
        tensor, old[i] = old[i], None
        assert tensor is not None
        sharding = tensor.sharding
        del tensor
        if isinstance(new, Joint):
            leaves[i], arrays = new.on(sharding), new.arrays
        else:
            leaves[i], arrays = jax.device_put(new, sharding, may_alias=isinstance(new, jax.Array)), (new,)
        # An array of numpy may change later, so it is copied even if the device could read it in place.
        if not all(isinstance(array, jax.Array) for array in arrays):
            jax.block_until_ready(leaves[i])
    return jax.tree.unflatten(structure, leaves)
