"""Random adapters in the layout of PEFT, and the models that they stand for, by the formula in NumPy."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file


def linear_modules(checkpoint: Path) -> list[str]:
    """The modules of layers with a matrix, by the names in a checkpoint of one file."""
    stored = load_file(checkpoint / "model.safetensors")
    names = [name for name, w in stored.items() if w.ndim == 2 and re.search(r"layers\.\d+\.", name)]
    return sorted(name.removesuffix(".weight") for name in names if name.endswith(".weight"))


def save_adapter(
    folder: Path,
    checkpoint: Path,
    *,
    seed: int = 0,
    rank: int = 4,
    modules: Collection[str] | None = None,
    dtype: Any = np.float32,
    **settings: Any,
) -> Path:
    """Writes an adapter of these modules, by default all that end in "proj"; `settings` are of adapter_config.json."""
    rng, stored = np.random.default_rng(seed), load_file(checkpoint / "model.safetensors")
    chosen = [name for name in linear_modules(checkpoint) if name.endswith("proj")] if modules is None else modules
    tensors = {}
    for name in chosen:
        outputs, inputs = stored[f"{name}.weight"].shape
        for half, shape in {"A": (rank, inputs), "B": (outputs, rank)}.items():
            size = 0.3 / math.sqrt(shape[1])
            tensors[f"base_model.model.{name}.lora_{half}.weight"] = (rng.standard_normal(shape) * size).astype(dtype)
        if settings.get("use_dora"):
            lengths = np.linalg.norm(stored[f"{name}.weight"], axis=1) * rng.uniform(0.7, 1.4, outputs)
            tensors[f"base_model.model.{name}.lora_magnitude_vector"] = lengths.astype(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    stated = {"peft_type": "LORA", "r": rank, "lora_alpha": 4 * rank, "target_modules": "all-linear", **settings}
    (folder / "adapter_config.json").write_text(json.dumps(stated))
    return folder


def merge(checkpoint: Path, adapter: Path, out: Path) -> Path:
    """Writes the checkpoint whose weights are W + alpha / r B A, or alpha / sqrt(r) with rsLoRA.

    With DoRA each row of them has the length that the adapter says.
    """
    settings = json.loads((adapter / "adapter_config.json").read_text())
    shutil.copytree(checkpoint, out)
    weights, tensors = load_file(checkpoint / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name, up in tensors.items():
        if name.endswith("lora_B.weight"):
            module = name.removeprefix("base_model.model.").removesuffix(".lora_B.weight")
            down, rank = tensors[name.replace("lora_B", "lora_A")].astype(float), up.shape[1]
            patterns = settings.get("alpha_pattern", {})
            alpha = next((a for key, a in patterns.items() if module.endswith(key)), settings["lora_alpha"])
            scale = alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
            w = weights[f"{module}.weight"]
            changed = w + scale * up.astype(float) @ down
            if settings.get("use_dora"):
                lengths = tensors[name.replace("lora_B.weight", "lora_magnitude_vector")].astype(float)
                changed *= (lengths / np.linalg.norm(changed, axis=1))[:, None]
            weights[f"{module}.weight"] = changed.astype(w.dtype)
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    return out
