"""Parameters saved and restored with Orbax: every device writes and reads its own slices, on any mesh.

A checkpoint is a directory with `params/`, which is Orbax's, and `jaxinfer.json`, which holds the
`ModelConfig` and the dtype of each tensor. Orbax is imported by the functions because importing it takes more
than a second.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import keystr, tree_leaves_with_path, tree_map_with_path

from jaxinfer.model.components.attention import QueryGrowth
from jaxinfer.model.components.dense_and_experts import DenseAndExperts
from jaxinfer.model.components.layer_embedding import LayerEmbedding
from jaxinfer.model.components.layers import Norm
from jaxinfer.model.components.mlp import MLP
from jaxinfer.model.components.moe import MoE, Router
from jaxinfer.model.components.rope import Rope, RopeScaling
from jaxinfer.model.config import Branch, Layer, LayerGroup, ModelConfig
from jaxinfer.model.joined_params import split_products
from jaxinfer.model.layer_parts import MIXERS
from jaxinfer.model.params import Params, abstract_params

PARAMS_FOLDER = "params"
DESCRIPTION_FILE = "jaxinfer.json"
VERSION = 3


def save_params(path: str | Path, params: Params, config: ModelConfig) -> None:
    """Writes a checkpoint to a directory that holds none yet; returns when all of it is on disk.

    Sharded parameters are written from where they are. Every process of a multi-process run has to call this. Raises
    ValueError if the directory holds a checkpoint, or if the parameters are not those of `config`.
    """
    import orbax.checkpoint

    # On the host, for devices may have no room for the parts beside the joined tensors.
    params = split_products(params, config, on_host=jax.process_count() == 1)
    path = Path(path).resolve()
    if (path / PARAMS_FOLDER).exists() or (path / DESCRIPTION_FILE).exists():
        raise ValueError(f"{path} already holds a checkpoint; choose another path or remove that one")
    _require_fit(params, config)
    dtypes = {keystr(name): leaf.dtype.name for name, leaf in tree_leaves_with_path(params)}
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / PARAMS_FOLDER, params)
    # Written last: an interrupted save leaves no description and is therefore not taken for a checkpoint.
    if jax.process_index() == 0:
        description = {"version": VERSION, "config": _describe(config), "dtypes": dtypes}
        (path / DESCRIPTION_FILE).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")


def read_saved_config(path: str | Path) -> ModelConfig:
    """Returns the model whose parameters were saved, from which to build a placement for `restore_params`."""
    return _parse(_read_description(Path(path))["config"])


def restore_params(path: str | Path, *, placement: Params | None = None) -> tuple[Params, ModelConfig]:
    """Returns the parameters that `save_params` wrote, in the dtypes they had, and their config.

    `placement` (see `jaxinfer.model.params.shardings`) puts them on any mesh, whatever mesh they were saved from;
    without it all go to the default device. The layer groups are those of the saved config: a placement made
    for others is a ValueError, since restacking would have to hold both versions of a weight.
    """
    import orbax.checkpoint

    path = Path(path).resolve()
    description = _read_description(path)
    config = _parse(description["config"])
    target = abstract_params(config, jnp.float32)
    if placement is None:
        on_default_device = jnp.zeros(()).sharding
        placement = jax.tree.map(lambda _: on_default_device, target)
    if jax.tree.structure(placement) != jax.tree.structure(target):
        raise ValueError(
            f"placement does not have the tensors of {path}, which was saved with"
            f" layer_groups={config.layer_groups}; build it from read_saved_config(path)"
        )

    def with_saved_dtype(name: Any, leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, description["dtypes"][keystr(name)], sharding=sharding)

    target = tree_map_with_path(with_saved_dtype, target, placement)
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path / PARAMS_FOLDER, target), config


def _require_fit(params: Params, config: ModelConfig) -> None:
    expected = abstract_params(config, jnp.float32)
    shapes = [{keystr(name): leaf.shape for name, leaf in tree_leaves_with_path(tree)} for tree in (expected, params)]
    if shapes[0] != shapes[1]:
        names = sorted(name for name in shapes[0] | shapes[1] if shapes[0].get(name) != shapes[1].get(name))
        raise ValueError(
            f"params do not have the tensors that config declares, they differ in {', '.join(names)};"
            " save them with the config they were made with"
        )


def _read_description(path: Path) -> dict[str, Any]:
    file = path / DESCRIPTION_FILE
    if not path.is_dir():
        raise ValueError(f"{path} is not a directory; give the path that save_params was given")
    if not (file.is_file() and (path / PARAMS_FOLDER).is_dir()):
        raise ValueError(
            f"{path} is not a checkpoint of jaxinfer: it lacks {DESCRIPTION_FILE} or {PARAMS_FOLDER}/;"
            " give the path that save_params was given, or load Hugging Face checkpoints with load_params"
        )
    try:
        description = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON ({error}); save the parameters again") from error
    version = description.get("version") if isinstance(description, dict) else None
    if version != VERSION:
        raise ValueError(f"{file} has version {version!r} but {VERSION} is needed; save the parameters again")
    return description


# The dataclasses that describe a model, by their names in a description.
_PARTS = (ModelConfig, LayerGroup, Layer, Branch, LayerEmbedding, MLP, MoE, Router, DenseAndExperts)
_DESCRIBED = {kind.__name__: kind for kind in (*_PARTS, *MIXERS, QueryGrowth, Rope, RopeScaling, Norm)}


def _describe(value: Any) -> Any:
    """Returns a description of a model as JSON values; a dataclass becomes its fields and its "class"."""
    if dataclasses.is_dataclass(value):
        fields = {field.name: _describe(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"class": type(value).__name__, **fields}
    return [_describe(item) for item in value] if isinstance(value, tuple) else value


def _parse(value: Any) -> Any:
    """Returns the model that `_describe` described."""
    if isinstance(value, list):
        return tuple(map(_parse, value))
    if isinstance(value, dict):
        fields = {name: _parse(item) for name, item in value.items() if name != "class"}
        return _DESCRIBED[value["class"]](**fields)
    return value
