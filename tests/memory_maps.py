"""The memory maps of this process. Linux gives it 65,530, of which each compiled function keeps some."""

from __future__ import annotations

# What a test takes beyond it has to fit too.
MAX_MEMORY_MAPS = 30_000


def are_memory_maps_short() -> bool:
    """False where the operating system does not tell."""
    try:
        with open("/proc/self/maps", "rb") as maps:
            return sum(1 for _ in maps) > MAX_MEMORY_MAPS
    except OSError:
        return False
