"""Changes the tensors of a checkpoint on disk, as published ones differ from those that transformers writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


def read_tensors(path: Path) -> Tensors:
    """Returns all tensors of a checkpoint of one file or several, by name."""
    return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def rewrite(path: Path, change: Callable[[Tensors], Tensors], *, num_files: int = 1) -> Path:
    """Replaces the tensors by those that `change` returns, in `num_files` files with an index, or in one."""
    tensors = change(read_tensors(path))
    for file in path.glob("*.safetensors*"):
        file.unlink()
    names = sorted(tensors)
    files = {f"model-{i + 1:05}-of-{num_files:05}.safetensors": names[i::num_files] for i in range(num_files)}
    if num_files == 1:
        files = {"model.safetensors": names}
    for file, own in files.items():
        save_file({name: tensors[name].contiguous().clone() for name in own}, path / file, metadata={"format": "pt"})
    if num_files > 1:
        weight_map = {name: file for file, own in files.items() for name in own}
        (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def edit_json(path: Path, file: str = "config.json", **changes: Any) -> Path:
    """Changes entries of a JSON file; an ellipsis removes one."""
    content = json.loads((path / file).read_text()) if (path / file).is_file() else {}
    content = {key: value for key, value in (content | changes).items() if value is not ...}
    (path / file).write_text(json.dumps(content))
    return path


def unembedding_of(tensors: Tensors) -> str:
    """Returns the stored name of the unembedding."""
    return next(name for name in tensors if name.endswith("lm_head.weight"))


def embedding_of(tensors: Tensors) -> str:
    """Returns the stored name of the embedding."""
    return next(name for name in tensors if name.endswith(("embed_tokens.weight", "embeddings.weight")))
