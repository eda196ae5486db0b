"""What the TPU compiler's final schedule of a kernel says: bundles, loops, spills."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def schedule_figures(files: Iterable[Path], kernel: str) -> dict[str, Any]:
    """Returns what libtpu's dump of a kernel says.

    `bundles` are those of its largest loop, in which a loop inside counts once; `inner_bundles` those of the loops that
    use the matrix unit and have no loop inside; spills are stores and loads added for want of registers.
    """
    named = [path for path in files if kernel in path.name]
    bundles = [p for p in named if re.search(r"\d-final_bundles\.txt$", p.name)]
    usage = [p for p in named if p.name.endswith("final_hlo-static-per-bundle-utilization.txt")]
    if len(bundles) != 1 or len(usage) != 1:
        raise RuntimeError(f"the compiler left {len(bundles)} schedules of {kernel} and {len(usage)} of their usage")
    lines = usage[0].read_text().splitlines()
    columns = [column.strip() for column in lines[1].split(",")]
    counts = [[int(n) for n in line.split()] for line in lines[4:] if line.strip()]
    spill_columns = [columns.index("VSTORE:SPILL"), columns.index("VLOAD:FILL")]
    spills = [sum(row[i] for i in spill_columns) for row in counts]
    loops = set(_loops(bundles[0].read_text()))
    innermost = [(a, z) for a, z in loops if not any(a <= x and y <= z and (x, y) != (a, z) for x, y in loops)]
    inner = [(a, z) for a, z in innermost if sum(row[columns.index("MXU")] for row in counts[a : z + 1])]
    return {
        "bundles": max(z - a + 1 for a, z in loops),
        "inner_bundles": sorted(z - a + 1 for a, z in inner),
        "kernel_bundles": len(counts),
        "spills": sum(spills),
        "inner_spills": sum(sum(spills[a : z + 1]) for a, z in inner),
    }


def _loops(schedule: str) -> list[tuple[int, int]]:
    """The first and last bundle of each loop: a branch back to the start of a region."""
    address, starts, branches = 0, {}, []
    for line in schedule.splitlines():
        if match := re.match(r"\s*(0x[0-9a-f]+)\s+(?:LH|LB|LE|PB|PF)?\s*:", line):
            address = int(match[1], 16)
        starts |= dict.fromkeys(re.findall(r"Start(?:/End)?(?: empty)? region (\d+)", line), address)
        branches += [(address, region) for region in re.findall(r"sbr\.rel.*?target = \$region(\d+)", line)]
    return [(starts[region], at) for at, region in branches if region in starts and starts[region] <= at]
