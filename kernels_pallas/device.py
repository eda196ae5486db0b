"""The device that a program is compiled for."""

from __future__ import annotations

from typing import NamedTuple

import jax

# Compute capabilities of GPUs that programs are compiled for ahead of time, by a word of their kind.
CAPABILITIES = {"T4": 7.5, "A100": 8.0, "L4": 8.9, "H100": 9.0, "H200": 9.0}


class Device(NamedTuple):
    """A device as jax describes it."""

    kind: str  # as the driver names it, e.g. "NVIDIA H200"
    platform: str  # "cpu", "gpu", "tpu"
    num_cores: int | None  # multiprocessors of a GPU
    capability: float | None  # of an NVIDIA GPU, e.g. 8.9


def device_at_hand() -> Device:
    """Returns the device at hand, or that of the abstract mesh in use if a program is compiled ahead of time."""
    abstract, device = jax.sharding.get_abstract_mesh().abstract_device, jax.devices()[0]
    if abstract is not None and abstract.device_kind != device.device_kind:
        kind, platform, num_cores = abstract.device_kind, abstract.platform, abstract.num_cores
        capability = next((CAPABILITIES[word] for word in kind.split("-")[0].split() if word in CAPABILITIES), None)
    else:
        kind, platform = device.device_kind, device.platform
        num_cores = getattr(device, "core_count", None)
        capability = _number(getattr(device, "compute_capability", None))
    return Device(kind, "gpu" if platform == "cuda" else platform, num_cores, capability)


def _number(capability: object) -> float | None:
    """Returns a compute capability as "8.9" as a number; None for what is none, as "gfx942"."""
    try:
        return float(str(capability))
    except ValueError:
        return None
