"""Settings of packed weights that stand beside config.json, or in it in another form.

AutoGPTQ and AutoAWQ at first wrote files of their own, which are read. MLX and ModelOpt have formats of their own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from jaxinfer.checkpoint.huggingface import read_json

READ = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
MODELOPT_FILE = "hf_quant_config.json"
MLX_KEY = "quantization"


def settings_beside(folder: Path, stored: Collection[str]) -> Mapping[str, Any] | None:
    """Returns the settings of early GPTQ and AWQ in files of their own, if the stored tensors are packed so."""
    if not any(name.endswith(".qweight") for name in stored):
        return None
    found = next((name for name in READ if (folder / name).is_file()), None)
    return None if found is None else {"quant_method": READ[found], **read_json(folder / found)}


def unread_format(folder: Path, hf: Mapping[str, Any]) -> str | None:
    """Returns the way out for weights packed in a format that is not read, by the place of its settings."""
    if isinstance(hf.get(MLX_KEY), Mapping):
        place = f"MLX ({MLX_KEY} in config.json)"
    elif (folder / MODELOPT_FILE).is_file():
        place = f"ModelOpt ({MODELOPT_FILE})"
    else:
        return None
    return (
        f"its weights are packed in the format of {place}, which is not read; use the unquantized checkpoint, or one"
        " of a format that is read, such as GPTQ, AWQ or compressed-tensors"
    )
