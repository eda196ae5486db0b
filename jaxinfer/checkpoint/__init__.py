"""Checkpoints on disk: Hugging Face safetensors in, Orbax in and out."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxinfer.checkpoint.generation_config import read_sampling_defaults
from jaxinfer.checkpoint.huggingface import (
    abstract_packed,
    layers_packed_anew,
    load_params,
    read_config,
    read_eos_token_ids,
    read_settings,
    refuse_both,
    require_fitting_tensors,
    resolve_checkpoint,
)
from jaxinfer.config import require_quantization
from jaxinfer.device import packs_integers, resolve_dtype, scans_layers
from jaxinfer.model.config import ModelConfig, scan_sizes
from jaxinfer.model.params import Params, abstract_params, check_mesh, over_mesh, shardings
from jaxinfer.model.quantized_params import quantize_weights
from jaxinfer.validation import as_bool, as_ints, require

__all__ = [
    "abstract_checkpoint",
    "load_checkpoint",
    "load_params",
    "read_config",
    "read_eos_token_ids",
    "read_sampling_defaults",
    "require_fitting_tensors",
    "resolve_checkpoint",
]


def load_checkpoint(
    path_or_id: str | Path,
    dtype: str | None = None,
    *,
    layer_cuts: Collection[int] = (),
    quantization: str | None = None,
    mesh: Mesh | None = None,
    show_progress: bool = False,
) -> tuple[Params, ModelConfig]:
    """Loads a Hugging Face checkpoint from a folder or the Hub, in the format and groups that suit the device.

    A group of layers ends after each of the numbers of layers in `layer_cuts`. `quantization` is "int8" or "int4", see
    `jaxinfer.model.quantized_params.quantize_weight`; None leaves weights as they are. Over a `mesh` with the axes
    "experts", "model" or both, each device has its part, see `jaxinfer.model.params.shardings`; the configuration says
    which KV heads are there several times, and how much padding follows the vocabulary. Raises ValueError for a
    checkpoint that cannot be used, with everything that is wrong with it.
    """
    dtype = resolve_dtype(dtype)
    layer_cuts = as_ints("layer_cuts", layer_cuts, 0)
    require_quantization(quantization)
    show_progress = as_bool("show_progress", show_progress)
    require(mesh is None or isinstance(mesh, Mesh), "mesh", mesh, "a jax.sharding.Mesh or None")
    if mesh is not None:
        check_mesh(mesh)
    path = resolve_checkpoint(path_or_id)
    config = over_mesh(_grouped_config(path, layer_cuts), mesh)
    placement = None if mesh is None else shardings(config, mesh)
    options: dict[str, Any] = {"quantization": quantization, "placement": placement, "show_progress": show_progress}
    return load_params(path, config, dtype, **options), config


def abstract_checkpoint(
    path_or_id: str | Path, dtype: str, *, quantization: str | None = None, mesh: Mesh | None = None
) -> tuple[Params, ModelConfig]:
    """Returns what `load_checkpoint` returns, with a `jax.ShapeDtypeStruct` per tensor, without shardings.

    It reads config.json alone, and of packed weights the headers of their files.
    """
    path = resolve_checkpoint(path_or_id, ["config.json"])
    if read_settings(path)[1] is not None:
        path = resolve_checkpoint(path_or_id)
        refuse_both(path, quantization)
        config = over_mesh(_grouped_config(path), mesh)
        return abstract_packed(path, config, dtype), config
    config = over_mesh(_grouped_config(path), mesh)

    params = abstract_params(config, dtype)
    if quantization is not None:
        options: dict[str, Any] = {"config": config, "quantization": quantization, "is_packed": packs_integers()}
        params = jax.eval_shape(partial(quantize_weights, **options), params)
    return params, config


def _grouped_config(path: Path, layer_cuts: Collection[int] = ()) -> ModelConfig:
    config = read_config(path)
    if not scans_layers():
        return config.regrouped((1,) * config.num_layers)
    return config.regrouped(scan_sizes(config.layers, {*layer_cuts, *layers_packed_anew(path, config)}))
