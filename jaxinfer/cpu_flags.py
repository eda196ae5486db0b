"""Options of XLA for CPUs that must be set before JAX starts its devices."""

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
