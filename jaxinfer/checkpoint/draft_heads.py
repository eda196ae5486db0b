"""What drafts from the target's states, on disk: a folder with a description and tensors.

scripts/train/train_draft_heads.py writes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from safetensors import SafetensorError
from safetensors.flax import load_file

from jaxinfer.validation import require_int, require_real

DESCRIPTION, TENSORS = "draft_heads.json", "draft_heads.safetensors"
# The numbers that describe a drafter of each kind, and the shapes of its tensors by them.
SHAPES: dict[str, dict[str, tuple[str, ...]]] = {
    "medusa": {"weights": ("num_heads", "hidden_size", "2 hidden_size")},
    "eagle": {
        **dict.fromkeys(("embedding_norm", "hidden_norm", "final_norm"), ("hidden_size",)),
        **dict.fromkeys(("attention_norm", "mlp_norm"), ("hidden_size",)),
        "input": ("hidden_size", "2 hidden_size"),
        "q": ("num_heads", "head_dim", "hidden_size"),
        "k": ("num_kv_heads", "head_dim", "hidden_size"),
        "v": ("num_kv_heads", "head_dim", "hidden_size"),
        "o": ("hidden_size", "num_heads", "head_dim"),
        "gate": ("intermediate_size", "hidden_size"),
        "up": ("intermediate_size", "hidden_size"),
        "down": ("hidden_size", "intermediate_size"),
    },
    "exit": {"norm": ("hidden_size",), "lens": ("hidden_size", "hidden_size")},
}
FURTHER: dict[str, tuple[str, ...]] = {
    "medusa": (),
    "eagle": ("vocab_size", "window", "rope_theta", "norm_epsilon"),
    "exit": ("num_layers",),
}

LEAST = {"rope_theta": 1.0, "norm_epsilon": 0.0}  # of the numbers that need be no integers


@dataclass(frozen=True)
class DraftHeads:
    """A drafter of one of the kinds: what describes it, and its tensors."""

    kind: str
    numbers: dict[str, Any]
    tensors: dict[str, jax.Array]


def has_draft_heads(path: str | Path) -> bool:
    """Whether a folder holds draft heads and no model."""
    return Path(path, DESCRIPTION).is_file()


def load_draft_heads(path: str | Path, dtype: Any) -> DraftHeads:
    """Returns what a folder holds; ValueError where that is not what its description says."""
    try:
        description = json.loads(Path(path, DESCRIPTION).read_text(encoding="utf-8"))
        tensors = load_file(Path(path, TENSORS))
        kind = description.get("drafter")
    except (OSError, ValueError, AttributeError, RecursionError, SafetensorError) as error:
        raise ValueError(f"{path} holds no draft heads that can be read: {error!r}") from None
    if kind not in list(SHAPES):
        raise ValueError(f"{path} holds draft heads of kind {kind!r}; there are {', '.join(map(repr, SHAPES))}")
    wanted = SHAPES[kind]
    names = {axis.removeprefix("2 ") for axes in wanted.values() for axis in axes}
    numbers = {name: _number(path, description, name) for name in (*sorted(names), *FURTHER[kind])}
    shapes = {name: tuple(_size(numbers, axis) for axis in axes) for name, axes in wanted.items()}
    found = {name: tensor.shape for name, tensor in tensors.items()}
    if found != shapes:
        raise ValueError(f"{path} has tensors of shapes {found}, but {DESCRIPTION} there says {shapes}")
    return DraftHeads(kind, numbers, {name: tensor.astype(dtype) for name, tensor in tensors.items()})


def _number(path: str | Path, description: Mapping[str, Any], name: str) -> Any:
    value = description.get(name)
    try:
        if name in LEAST:
            require_real(name, value, LEAST[name])
        else:
            require_int(name, value, 1)
    except ValueError as error:
        raise ValueError(f"{Path(path, DESCRIPTION)}: {error}; train the heads again") from None
    return value


def _size(numbers: Mapping[str, Any], axis: str) -> int:
    return 2 * numbers[axis[2:]] if axis.startswith("2 ") else numbers[axis]
