"""The devices that a model may run on, by the names that clouds and data sheets use."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from jaxinfer.validation import shown
from jaxinfer.xla_options import MEMORY_FRACTION
from kernels_pallas.device import DataSheet, data_sheet

GIBIBYTE = 2**30
MAX_DEVICES = 4096


@dataclass(frozen=True, kw_only=True)
class Chip:
    """A device as its maker's data sheet describes it.

    * `kind`: as its driver names it.
    * `memory_bytes`: of the device; on a TPU those that programs may use.
    * `link_bytes`: that it sends to other devices in a second: over NVLink, PCIe or a TPU's interconnect.
    * `dtype`: that it multiplies natively.
    * `num_counted`: what clouds count for one device in names such as v5p-64; a v5p has two cores.
    """

    kind: str
    platform: str
    memory_bytes: float
    link_bytes: float
    num_counted: int = 1
    dtype: str = "bfloat16"

    @property
    def sheet(self) -> DataSheet:
        """Bandwidth and FLOP/s."""
        sheet = data_sheet(self.kind)
        assert sheet is not None
        return sheet

    @property
    def usable_bytes(self) -> int:
        """Bytes that JAX takes, unless the user's variables say otherwise."""
        return int(self.memory_bytes * (MEMORY_FRACTION if self.platform == "gpu" else 1))


CHIPS: Mapping[str, Chip] = {
    "v5e": Chip(kind="TPU v5 lite", platform="tpu", memory_bytes=15.75 * GIBIBYTE, link_bytes=2.0e11),
    "v5p": Chip(kind="TPU v5p", platform="tpu", memory_bytes=95.74 * GIBIBYTE, link_bytes=6.0e11, num_counted=2),
    "v6e": Chip(kind="TPU v6 lite", platform="tpu", memory_bytes=31.25 * GIBIBYTE, link_bytes=4.48e11),
    "T4": Chip(kind="Tesla T4", platform="gpu", memory_bytes=16e9, link_bytes=1.6e10, dtype="float16"),
    "L4": Chip(kind="NVIDIA L4", platform="gpu", memory_bytes=24e9, link_bytes=3.2e10),
    "A100": Chip(kind="NVIDIA A100-SXM4-40GB", platform="gpu", memory_bytes=40e9, link_bytes=3.0e11),
    "A100-80GB": Chip(kind="NVIDIA A100-SXM4-80GB", platform="gpu", memory_bytes=80e9, link_bytes=3.0e11),
    "H100": Chip(kind="NVIDIA H100 80GB HBM3", platform="gpu", memory_bytes=80e9, link_bytes=4.5e11),
    "H200": Chip(kind="NVIDIA H200", platform="gpu", memory_bytes=141e9, link_bytes=4.5e11),
    "B200": Chip(kind="NVIDIA B200", platform="gpu", memory_bytes=180e9, link_bytes=9.0e11),
}


@dataclass(frozen=True)
class Devices:
    """A number of equal devices that reach each other directly."""

    name: str  # of the chip, a key of CHIPS
    count: int

    @property
    def chip(self) -> Chip:
        return CHIPS[self.name]

    def __str__(self) -> str:
        return f"{self.count} x {self.name}"

    def of_each(self, num_replicas: int) -> Devices:
        """Returns the devices of each replica; ValueError if they are not enough, or are left over."""
        if num_replicas < 1 or self.count % num_replicas:
            working = ", ".join(str(n) for n in range(1, self.count + 1) if self.count % n == 0)
            raise ValueError(
                f"replicas={num_replicas} cannot share {self.count} devices evenly; the numbers that can are {working}"
            )
        return replace(self, count=self.count // num_replicas)


def parse_devices(text: str) -> Devices:
    """Returns what a name such as "v6e-8", "H200x4", "H200-4" or "L4" stands for.

    A number behind v5p counts cores, of which a chip has two, as Google's names do. Raises ValueError for other names.
    """
    names = {name.lower(): name for name in CHIPS}
    found = re.fullmatch(r"(.+?)(?:\s*[-x]\s*(\d{1,6}))?", text.strip().lower(), re.ASCII)
    whole = names.get(text.strip().lower())
    name = whole or (names.get(found[1]) if found else None)
    if name is None:
        raise ValueError(
            f"device={shown(text)} is not known; give one of {', '.join(CHIPS)}, with a number behind it, such as"
            " v6e-8 or H200x4"
        )
    counted = CHIPS[name].num_counted
    number = counted if whole or found is None or found[2] is None else int(found[2])
    if number % counted or not 1 <= number // counted <= MAX_DEVICES:
        unit = f"a multiple of {counted}, for it counts cores, and " if counted > 1 else ""
        raise ValueError(f"device={shown(text)} has the number {number}; give {unit}at most {MAX_DEVICES * counted}")
    return Devices(name, number // counted)
