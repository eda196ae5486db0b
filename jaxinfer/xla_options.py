"""Options of XLA that must be set before JAX starts its devices."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version

# The last jaxlib that is known to take the option. XLA ends the process at an option that it does not know.
NEWEST_JAXLIB = (0, 12)
# For users of a process in which the option has no effect.
FUSED_PRODUCTS = (
    "XLA adds to products before they are rounded, so on this CPU last bits of results may depend on the batch; on x86,"
    " --xla_cpu_max_isa=AVX in XLA_FLAGS prevents it, which `import jaxinfer` sets with jaxlib up to"
    f" {'.'.join(map(str, NEWEST_JAXLIB))} unless JAX has started its devices"
)
# For users of several host devices.
SHARED_THREADS = (
    "several CPU devices that share threads can wait for each other without end; set XLA_FLAGS to"
    " --xla_cpu_multi_thread_eigen=false before JAX starts, which `import jaxinfer` does beside"
    " --xla_force_host_platform_device_count in XLA_FLAGS"
)


# The part of a GPU's memory that JAX takes. The rest is for the driver, and for what XLA allocates beside its pool.
MEMORY_FRACTION = 0.92
# The name that JAX's documentation has. JAX ends with an error if its newer name is set as well.
FRACTION_VARIABLE, NEWER_VARIABLE = "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"
# With one of these the user has said how JAX takes memory.
MEMORY_VARIABLES = (
    *(FRACTION_VARIABLE, NEWER_VARIABLE),
    *("XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_ALLOCATOR"),
)


def set_xla_options() -> None:
    """Sets the options of XLA for this process and those it starts; what the user's variables say stays."""
    forbid_fused_products()
    give_devices_threads()
    if not any(os.environ.get(name) for name in MEMORY_VARIABLES):
        take_memory(MEMORY_FRACTION)


def take_memory(fraction: float) -> None:
    """Has JAX take this part of a GPU's memory, in place of what the user's variables say."""
    os.environ.pop(NEWER_VARIABLE, None)
    os.environ[FRACTION_VARIABLE] = str(fraction)


def taken_memory() -> float | None:
    """Returns the part of a GPU's memory that the variables name; None if they name none."""
    named = os.environ.get(NEWER_VARIABLE) or os.environ.get(FRACTION_VARIABLE)
    return float(named) if named else None


def give_devices_threads() -> None:
    """Gives each of several host devices a thread of its own, if XLA_FLAGS has asked for such devices.

    With a pool of threads for all, collectives that wait for another device can take the threads that this one needs.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_force_host_platform_device_count" in flags and "xla_cpu_multi_thread_eigen" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_multi_thread_eigen=false"


def has_threads_per_device() -> bool:
    """True if XLA_FLAGS gives each host device a thread of its own."""
    return "xla_cpu_multi_thread_eigen=false" in os.environ.get("XLA_FLAGS", "").lower()


def forbid_fused_products() -> None:
    """Keeps XLA for x86 CPUs from adding to products before they are rounded, in this process and those it starts.

    XLA fuses a product with a sum in some loops and not in others, so results would depend on the batch. AVX is the
    newest set of instructions without fused products. Products of matrices still use all that the CPU has, because a
    library computes them. If the user's XLA_FLAGS has `xla_cpu_max_isa`, it stays.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    jaxlib = tuple(map(int, version("jaxlib").split(".")[:2]))
    if platform.machine() in ("x86_64", "AMD64") and jaxlib <= NEWEST_JAXLIB and "xla_cpu_max_isa" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_max_isa=AVX".strip()
