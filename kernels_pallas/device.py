"""The device that a program is compiled for."""

from __future__ import annotations

import re
from typing import NamedTuple

import jax

# Compute capabilities of GPUs that programs are compiled for ahead of time, by a word of their kind.
CAPABILITIES = {"T4": 7.5, "A100": 8.0, "L4": 8.9, "H100": 9.0, "H200": 9.0}
# The compute capability of the oldest GPUs that Triton compiles for, of the first with warpgroup products, and of those
# after them.
AMPERE, HOPPER, BLACKWELL = 8.0, 9.0, 10.0

# The columns of a register of a TPU.
LANES = 128
# What kernels may use of a TPU's vector memory: half of the smallest that a chip since v5e has.
VMEM_BYTES = 2**25


class DataSheet(NamedTuple):
    """What a device can do per second, by its maker's data sheet."""

    bandwidth: float  # bytes of its memory
    flops: float  # of bfloat16 without sparsity, of float16 on a T4


# By the beginning of a device's kind; the first that fits counts. A chip of TPU7x is two devices.
DATA_SHEETS = {
    "NVIDIA B200": DataSheet(8.0e12, 2250e12),
    "NVIDIA H200": DataSheet(4.8e12, 989e12),
    "NVIDIA H100 PCIe": DataSheet(2.0e12, 756e12),
    "NVIDIA H100 NVL": DataSheet(3.9e12, 835e12),
    "NVIDIA H100": DataSheet(3.35e12, 989e12),
    "NVIDIA A100-SXM4-80GB": DataSheet(2.04e12, 312e12),
    "NVIDIA A100": DataSheet(1.555e12, 312e12),
    "NVIDIA L4": DataSheet(3.0e11, 121e12),
    "Tesla T4": DataSheet(3.2e11, 65e12),
    "TPU v5 lite": DataSheet(8.19e11, 197e12),
    "TPU v6 lite": DataSheet(1.64e12, 918e12),
    "TPU v5": DataSheet(2.77e12, 459e12),
    "TPU v5p": DataSheet(2.77e12, 459e12),
    "TPU7x": DataSheet(3.69e12, 1155e12),
}


def data_sheet(kind: str) -> DataSheet | None:
    """Returns the data sheet of a device kind as its driver names it, None if it is not listed."""
    return next((sheet for name, sheet in DATA_SHEETS.items() if re.match(rf"{re.escape(name)}\b", kind)), None)


class Device(NamedTuple):
    """A device as jax describes it."""

    kind: str  # as the driver names it, e.g. "NVIDIA H200"
    platform: str  # "cpu", "gpu", "tpu"
    num_cores: int | None  # multiprocessors of a GPU
    capability: float | None  # of an NVIDIA GPU, e.g. 8.9

    @property
    def is_before_ampere(self) -> bool:
        return self.capability is not None and self.capability < AMPERE


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


def lies_turned(num_channels: int, num_inputs: int) -> bool:
    """True if weights lie with channels along lanes and not inputs: XLA for TPU lays an array out with least padding.

    The kernel reads what lies there; any other view of it would be a copy.
    """
    F, D = num_channels, num_inputs
    return F * -(-D // LANES) > D * -(-F // LANES)
