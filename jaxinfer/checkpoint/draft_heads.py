"""Draft heads on disk: a folder with a description and one tensor, as scripts/train_draft_heads.py writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
from safetensors.flax import load_file

DESCRIPTION, TENSORS = "draft_heads.json", "draft_heads.safetensors"


def has_draft_heads(path: str | Path) -> bool:
    """Whether a folder holds draft heads and no model."""
    return Path(path, DESCRIPTION).is_file()


def load_draft_heads(path: str | Path, dtype: Any) -> jax.Array:
    """Returns the weights [K, D, 2 D] of Medusa heads; ValueError where the folder holds anything else."""
    try:
        description = json.loads(Path(path, DESCRIPTION).read_text(encoding="utf-8"))
        weights = load_file(Path(path, TENSORS))["weights"]
        shape = tuple(int(description[name]) for name in ("num_heads", "hidden_size"))
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise ValueError(f"{path} holds no draft heads that can be read: {error!r}") from None
    if description.get("drafter") != "medusa":
        raise ValueError(f"{path} holds draft heads of kind {description.get('drafter')!r}; there is 'medusa'")
    wanted = (*shape, 2 * shape[1])
    if weights.shape != wanted:
        raise ValueError(f"{path} has weights of shape {weights.shape}, but {DESCRIPTION} there says {wanted}")
    return weights.astype(dtype)
