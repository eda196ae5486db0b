"""Block sizes that `scripts/kernels/tune.py` has chosen, a table in JSON for each device."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

TABLES = Path(__file__).parent / "tuned"
# What an entry of a table is for; its other fields say what was chosen, and how it was ranked.
KEYS = ("kernel", "page_dtype", "num_kv_heads", "head_dim", "num_groups")
PRODUCT = "product"  # the kernel of the entries for dense products, which have keys of their own
PRODUCT_KEYS = ("block_rows", "itemsize", "parts", "channels", "inputs")


def table_name(kind: str) -> str:
    """Returns the name of a GPU's table: "NVIDIA H200" -> "gpu_nvidia_h200"."""
    return "gpu_" + re.sub("[^a-z0-9]+", "_", kind.lower())


@functools.cache
def tuned_table(device: str) -> dict[tuple, dict[str, Any]]:
    """Returns the table of a device, as "tpu_v6e" or "gpu_nvidia_h200", by `KEYS`; an empty one if there is none."""
    return {tuple(entry[key] for key in KEYS): entry for entry in tuned_entries(device) if entry["kernel"] != PRODUCT}


@functools.cache
def tuned_products(device: str) -> dict[tuple, dict[str, Any]]:
    """Returns the tiles of dense products on a GPU, by PRODUCT_KEYS."""
    entries = [entry for entry in tuned_entries(device) if entry["kernel"] == PRODUCT]
    return {tuple(entry[key] for key in PRODUCT_KEYS): entry for entry in entries}


def tuned_entries(device: str) -> list[dict[str, Any]]:
    """Returns the entries of a device's table as they are; none if there is no table."""
    path = TABLES / f"{device}.json"
    return json.loads(path.read_text())["entries"] if path.exists() else []
