"""Memory of this process: its bytes, and its maps. Linux gives it 65,530 maps; each compiled function keeps some."""

from __future__ import annotations

import ctypes
import os

# What a test takes beyond it has to fit too.
MAX_MEMORY_MAPS = 30_000


def are_memory_maps_short() -> bool:
    """False where the operating system does not tell."""
    try:
        with open("/proc/self/maps", "rb") as maps:
            return sum(1 for _ in maps) > MAX_MEMORY_MAPS
    except OSError:
        return False


def return_free_memory() -> None:
    """Gives the operating system what the C library keeps for later; a compiler leaves it hundreds of megabytes."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc alone
    if trim is not None:
        trim(0)


def resident_bytes() -> int:
    """0 where the operating system does not tell."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
