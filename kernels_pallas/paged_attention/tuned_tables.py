"""Block sizes that `scripts/kernels/tune.py` has chosen, a table in JSON for each device."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

TABLES = Path(__file__).parent / "tuned"
# What an entry of a table is for; its other fields say what was chosen, and how it was ranked.
KEYS = ("kernel", "page_dtype", "num_kv_heads", "head_dim", "num_groups")


@functools.cache
def tuned_table(device: str) -> dict[tuple, dict[str, Any]]:
    """Returns the table of a device, as "tpu_v6e" or "gpu_nvidia_h200", by `KEYS`; an empty one if there is none."""
    path = TABLES / f"{device}.json"
    if not path.exists():
        return {}
    return {tuple(entry[key] for key in KEYS): entry for entry in json.loads(path.read_text())["entries"]}
