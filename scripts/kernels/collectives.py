"""The sums and gathers over devices in a compiled program."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Any

KINDS = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
NUM_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}


def collectives(hlo: str) -> dict[str, Any]:
    """Returns the collectives of a program in HLO, and the most bytes that one of them gives that is no sum.

    They are counted by kind and shape, such as "all-reduce bf16[32,4096]", as often as the program names them: in a
    loop once for all of its turns.
    """
    counts: Counter[str] = Counter()
    for types, opcode in re.findall(r"^\s+(?:ROOT )?%[\w.\-]+ = (.*?) ([\w\-]+)\(", hlo, re.MULTILINE):
        kind = opcode.removesuffix("-start")
        if kind in KINDS:
            shapes = re.findall(r"\w+\[[\d,]*\]", types)
            # One that starts has its operand beside its result.
            counts.update(f"{kind} {shape}" for shape in (shapes if kind == opcode else [max(shapes, key=_num_bytes)]))
    gathered = [_num_bytes(name.split()[1]) for name in counts if not name.startswith("all-reduce")]
    return {"collectives": dict(sorted(counts.items())), "largest_gather_bytes": max(gathered, default=0)}


def _num_bytes(shape: str) -> int:
    dtype, sizes = shape.removesuffix("]").split("[")
    return NUM_BYTES[dtype] * math.prod(int(size) for size in sizes.split(",") if size)
