"""Checkpoints on disk: Hugging Face safetensors in, Orbax in and out."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from jaxinfer.checkpoint.checkpoint import Checkpoint, name_of, open_checkpoint
from jaxinfer.checkpoint.generation_config import read_sampling_defaults
from jaxinfer.checkpoint.huggingface import resolve_checkpoint
from jaxinfer.config import require_quantization
from jaxinfer.device import resolve_dtype
from jaxinfer.display.progress import is_shown
from jaxinfer.model.config import ModelConfig
from jaxinfer.model.params import Params, check_mesh
from jaxinfer.validation import as_ints, require

__all__ = [
    "Checkpoint",
    "abstract_checkpoint",
    "load_checkpoint",
    "load_params",
    "name_of",
    "open_checkpoint",
    "read_config",
    "read_sampling_defaults",
    "resolve_checkpoint",
]


def load_checkpoint(
    path_or_id: str | Path,
    dtype: str | None = None,
    *,
    layer_cuts: Collection[int] = (),
    quantization: str | None = None,
    mesh: Mesh | None = None,
    show_progress: bool | None = None,
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
    show_progress = is_shown(show_progress)
    require(mesh is None or isinstance(mesh, Mesh), "mesh", mesh, "a jax.sharding.Mesh or None")
    if mesh is not None:
        check_mesh(mesh)
    options: dict[str, Any] = {"quantization": quantization, "mesh": mesh, "show_progress": show_progress}
    return open_checkpoint(path_or_id).load(dtype, layer_cuts=layer_cuts, **options)


def abstract_checkpoint(
    path_or_id: str | Path, dtype: str, *, quantization: str | None = None, mesh: Mesh | None = None
) -> tuple[Params, ModelConfig]:
    """Returns what `load_checkpoint` returns, with a `jax.ShapeDtypeStruct` per tensor, without shardings.

    Tensors that a GPU joins are apart: see `jaxinfer.model.joined_params`. It reads config.json alone, and of packed
    weights the headers of their files.
    """
    checkpoint = open_checkpoint(path_or_id, ["config.json"])
    if checkpoint.packing is not None:
        checkpoint = open_checkpoint(path_or_id)
    return checkpoint.abstract(dtype, quantization=quantization, mesh=mesh)


def read_config(path: str | Path) -> ModelConfig:
    """Returns the model of a folder or a GGUF file; what cannot be honoured in it is a ValueError."""
    return Checkpoint(Path(path)).config


def load_params(path: str | Path, config: ModelConfig, dtype: Any, **options: Any) -> Params:
    """Returns `Checkpoint.load_params` of a folder or a GGUF file, with its options."""
    return Checkpoint(Path(path)).load_params(config, dtype, **options)
