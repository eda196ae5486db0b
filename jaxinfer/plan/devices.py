"""The devices that a model may run on, by the names that clouds, shops and data sheets use."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxinfer.validation import require_positive, require_real, shown
from jaxinfer.xla_options import MEMORY_FRACTION
from kernels_pallas.device import DataSheet, data_sheet

GIBIBYTE = 2**30
MAX_DEVICES = 4096
MAX_HYPHENATED = 8  # GPUs of a machine; a larger number behind a hyphen is that of another card
# Slices of TPUs that Google's clouds lend, in chips, and GPUs of a machine.
FLAT_SLICES = (1, 4, 8, 16, 32, 64, 128, 256)
DEEP_SLICES = (4, 8, 16, 32, 64, 128, 256, 512)
MACHINES = (1, 2, 4, 8)
PCIE_4, PCIE_5 = 3.2e10, 6.4e10  # bytes per second in one direction, 16 lanes


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The parts of the data sheet's rates that docs/performance.md has measured on a device."""

    decode: float  # of the bandwidth
    prefill: float  # of the FLOP/s
    model: str  # with which they were measured


@dataclass(frozen=True, kw_only=True)
class Chip:
    """A device as its maker's data sheet describes it.

    * `kind`: as its driver names it.
    * `memory_bytes`: of the device; on a TPU those that programs may use.
    * `link_bytes`: that it sends to other devices in a second: over NVLink, PCIe or a TPU's interconnect; None if that
      is not known.
    * `sheet`: bytes of its memory and FLOPs in a second.
    * `dtype`: that it multiplies natively.
    * `num_counted`: what clouds count for one device in names such as v5p-64; a v5p has two cores.
    * `counts`: numbers of devices that can be had.
    """

    name: str
    kind: str
    platform: str
    memory_bytes: float
    link_bytes: float | None
    sheet: DataSheet
    num_counted: int = 1
    dtype: str = "bfloat16"
    counts: tuple[int, ...] = MACHINES
    measured: Measured | None = None

    @property
    def usable_bytes(self) -> int:
        """Bytes that JAX takes, unless the user's variables say otherwise."""
        return int(self.memory_bytes * (MEMORY_FRACTION if self.platform == "gpu" else 1))


def _chip(
    name: str, kind: str, memory_bytes: float, link_bytes: float, sheet: DataSheet | None = None, **others: Any
) -> Chip:
    platform = "tpu" if kind.startswith("TPU") else "gpu"
    others |= {"memory_bytes": memory_bytes, "link_bytes": link_bytes, "sheet": sheet or _listed(kind)}
    return Chip(name=name, kind=kind, platform=platform, **others)


def _listed(kind: str) -> DataSheet:
    sheet = data_sheet(kind)
    assert sheet is not None
    return sheet


MEASURED_H200 = Measured(decode=0.60, prefill=0.53, model="Llama 3 8B in bfloat16 on one")
# TPUs: docs.cloud.google.com/tpu, a page per generation; GPUs: NVIDIA's data sheet of the name, dense and without
# sparsity. The sheets of those that kernels know are in `kernels_pallas.device`.
CHIPS: Mapping[str, Chip] = {
    chip.name: chip
    for chip in (
        # "TPU v4": 275 TFLOP/s, 1,228 GB/s, 6 links of 50 GB/s. XLA says "of 30.75G hbm".
        _chip("v4", "TPU v4", 30.75 * GIBIBYTE, 3.0e11, DataSheet(1.228e12, 275e12), num_counted=2, counts=DEEP_SLICES),
        _chip("v5e", "TPU v5 lite", 15.75 * GIBIBYTE, 2.0e11, counts=FLAT_SLICES),
        _chip("v5p", "TPU v5p", 95.74 * GIBIBYTE, 6.0e11, num_counted=2, counts=DEEP_SLICES),
        _chip("v6e", "TPU v6 lite", 31.25 * GIBIBYTE, 4.48e11, counts=FLAT_SLICES),
        # "TPU7x (Ironwood)": 192 GiB, 7.37 TB/s, 2,307 TFLOP/s and 1.2 TB/s of links a chip, which is two devices to
        # JAX. XLA says "of 94.75G hbm".
        _chip("tpu7x", "TPU7x", 94.75 * GIBIBYTE, 6.0e11, counts=tuple(2 * chips for chips in DEEP_SLICES)),
        _chip("T4", "Tesla T4", 16e9, 1.6e10, dtype="float16"),
        _chip("L4", "NVIDIA L4", 24e9, PCIE_4),
        # "NVIDIA A10G" of Amazon's G5: 600 GB/s, 70 TFLOP/s.
        _chip("A10G", "NVIDIA A10G", 24e9, PCIE_4, DataSheet(6.0e11, 70e12)),
        # "NVIDIA L40S": 864 GB/s, 362 TFLOP/s.
        _chip("L40S", "NVIDIA L40S", 48e9, PCIE_4, DataSheet(8.64e11, 362e12)),
        # "NVIDIA Ampere GA102 GPU Architecture", table of GeForce: bfloat16 summed in float32.
        _chip("RTX3090", "NVIDIA GeForce RTX 3090", 24e9, PCIE_4, DataSheet(9.36e11, 71e12)),
        # "NVIDIA Ada GPU Architecture", the same table.
        _chip("RTX4090", "NVIDIA GeForce RTX 4090", 24e9, PCIE_4, DataSheet(1.008e12, 165.2e12)),
        # "NVIDIA RTX Blackwell GPU Architecture", the same table.
        _chip("RTX5090", "NVIDIA GeForce RTX 5090", 32e9, PCIE_5, DataSheet(1.792e12, 209.5e12)),
        # The same document, the Workstation Edition.
        _chip("RTXPRO6000", "NVIDIA RTX PRO 6000 Blackwell", 96e9, PCIE_5, DataSheet(1.792e12, 503.8e12)),
        _chip("A100", "NVIDIA A100-SXM4-40GB", 40e9, 3.0e11),
        _chip("A100-80GB", "NVIDIA A100-SXM4-80GB", 80e9, 3.0e11),
        _chip("H100", "NVIDIA H100 80GB HBM3", 80e9, 4.5e11),
        _chip("H200", "NVIDIA H200", 141e9, 4.5e11, measured=MEASURED_H200),
        _chip("B200", "NVIDIA B200", 180e9, 9.0e11),
    )
}
# Other names, without spaces and hyphens.
ALIASES = {
    **{"v5litepod": "v5e", "v5lite": "v5e", "trillium": "v6e", "ironwood": "tpu7x", "v7x": "tpu7x"},
    **{"a10080": "A100-80GB", "rtxpro6000blackwell": "RTXPRO6000"},
}
WAYS_TO_COUNT = "with its number, such as v6e-8, H200x4 or 4xH100"


@dataclass(frozen=True, kw_only=True)
class HostLink:
    """What a host and another send each other: bytes in a second one way, and the seconds that any message takes."""

    bytes_per_second: float
    latency_seconds: float

    def __post_init__(self) -> None:
        require_positive("bytes_per_second", self.bytes_per_second)
        require_real("latency_seconds", self.latency_seconds, 0)

    def __str__(self) -> str:
        return f"{self.bytes_per_second / 1e9:,.4g} GB/s, {self.latency_seconds * 1e6:,.4g} us"


@dataclass(frozen=True)
class Devices:
    """A number of equal devices; None: as few as hold the model.

    They lie in equal parts on `num_hosts` machines or slices of TPUs, which reach each other by a `host_link`. Those of
    one host reach each other directly.
    """

    chip: Chip
    count: int | None = 1
    num_hosts: int = 1
    host_link: HostLink | None = None

    @property
    def per_host(self) -> int | None:
        """The devices of each host; None if their number is free."""
        return None if self.count is None else self.count // self.num_hosts

    def __str__(self) -> str:
        hosts = f"{self.num_hosts} hosts of " if self.num_hosts > 1 else ""
        return self.chip.name if self.count is None else f"{hosts}{self.per_host} x {self.chip.name}"

    def of_each(self, num_replicas: int) -> Devices:
        """Returns the devices of each replica; ValueError if they are not enough, or are left over.

        A replica has whole hosts, or a part of one.
        """
        if num_replicas >= 1 and self.count is None:
            return self
        count, hosts = self.count or 1, self.num_hosts
        fitting = [n for n in range(1, count + 1) if count % n == 0 and (n % hosts == 0 or hosts % n == 0)]
        if num_replicas not in fitting:
            on_hosts = f" of {hosts} hosts" if hosts > 1 else ""
            raise ValueError(
                f"replicas={num_replicas} cannot share {count} devices{on_hosts} evenly; the numbers that can are"
                f" {', '.join(map(str, fitting))}"
            )
        hosts = max(hosts // num_replicas, 1)
        return replace(
            self, count=count // num_replicas, num_hosts=hosts, host_link=self.host_link if hosts > 1 else None
        )


def parse_devices(
    text: str,
    *,
    memory_bytes: float | None = None,
    bandwidth: float | None = None,
    flops: float | None = None,
    link_bytes: float | None = None,
    host_link: HostLink | None = None,
) -> Devices:
    """Returns what a name such as "v6e-8", "H200x4", "4xH100", "v5litepod-8" or "RTX 4090" stands for.

    Without a number they are as few as hold the model. A number behind v4 or v5p counts cores, of which a chip has two,
    as Google's names do. GPUs have up to eight behind a hyphen; the gigabytes of a card stand there too, as in
    "H100-80". A number before all that counts hosts, as in "2xv5e-8", which need a `host_link`. The rates, if given,
    replace those of the data sheet; a device that is not known needs `memory_bytes`, `bandwidth` and `flops`, and
    `link_bytes` if there are several. Raises ValueError for other names.
    """
    num_hosts, each = _hosts(text)
    name, number = _name_and_number(each)
    rates = {"memory_bytes": memory_bytes, "bandwidth": bandwidth, "flops": flops, "link_bandwidth": link_bytes}
    for what, value in rates.items():
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{what}={value!r} is not a positive number; give that of one device's data sheet")
    chip = _known(name)
    if chip is not None:
        sheet = DataSheet(bandwidth or chip.sheet.bandwidth, flops or chip.sheet.flops)
        measured = chip.measured if sheet == chip.sheet else None
        chip = replace(chip, sheet=sheet, measured=measured, link_bytes=link_bytes or chip.link_bytes)
    elif memory_bytes is not None and bandwidth is not None and flops is not None:
        own: dict[str, Any] = {"memory_bytes": memory_bytes, "link_bytes": link_bytes}
        chip = Chip(name=name, kind=name, platform="gpu", sheet=DataSheet(bandwidth, flops), **own)
    else:
        raise ValueError(
            f"device={shown(text)} is not known; give one of {', '.join(CHIPS)}, {WAYS_TO_COUNT}, or --memory-bytes,"
            " --bandwidth and --flops of yours"
        )
    _refuse_many_behind_a_hyphen(each, name, chip, number)
    count = _checked_count(each, chip, number)
    if not 1 <= num_hosts <= MAX_DEVICES // (count or 1):
        raise ValueError(f"device={shown(text)} has {num_hosts} hosts; give 1 to {MAX_DEVICES // (count or 1)} of them")
    if num_hosts > 1 and host_link is None:
        raise ValueError(
            f"device={shown(text)} has {num_hosts} hosts, and no link between them is given; add --host-link"
            " RATE,LATENCY, such as 25GB,50us"
        )
    if num_hosts == 1 and host_link is not None:
        raise ValueError(
            f"host_link={host_link} does not go with device={shown(text)}, which is one host; give several, such as"
            f" 2x{each.strip()}, or leave --host-link out"
        )
    return Devices(chip, None if count is None else count * num_hosts, num_hosts, host_link)


def _hosts(text: str) -> tuple[int, str]:
    """Returns the number of hosts, and the name of the devices of each."""
    before = re.fullmatch(r"(\d{1,6})\s*x\s*(\S.*)", text.strip(), re.ASCII | re.IGNORECASE)
    if before is None or _known(before[2]) is not None:
        return 1, text
    name, number = _name_and_number(before[2])
    return (1, text) if number is None or _known(name) is None else (int(before[1]), before[2])


def _refuse_many_behind_a_hyphen(text: str, name: str, chip: Chip, number: int | None) -> None:
    """Raises ValueError for a GPU with a larger number than a machine has, which may be the name of another card."""
    is_many = chip.platform == "gpu" and number is not None and number > MAX_HYPHENATED
    if is_many and re.fullmatch(rf"{re.escape(name)}\s*-\s*\d+", text.strip()):
        raise ValueError(
            f"device={shown(text)} has {number} behind a hyphen, which is neither the gigabytes of {name} nor a number"
            f" up to {MAX_HYPHENATED}; give {name}x{number} for {number} devices, or {name} for the card"
        )


def _checked_count(text: str, chip: Chip, number: int | None) -> int | None:
    """Returns the number of devices for one as clouds count; ValueError for one that cannot be."""
    if number is None:
        return None if chip.link_bytes is not None else 1
    if number % chip.num_counted or not 1 <= number // chip.num_counted <= MAX_DEVICES:
        unit = f"a multiple of {chip.num_counted}, for it counts cores, and " if chip.num_counted > 1 else ""
        most = MAX_DEVICES * chip.num_counted
        raise ValueError(f"device={shown(text)} has the number {number}; give {unit}from 1 to {most}")
    if number > 1 and chip.link_bytes is None:
        raise ValueError(
            f"device={shown(text)} has several devices that are not known; give the bytes a second between them by"
            " --link-bandwidth"
        )
    return number // chip.num_counted


def _name_and_number(text: str) -> tuple[str, int | None]:
    """Returns the two parts of a name; the number is None if there is none."""
    plain = text.strip()
    if _known(plain) is not None:
        return plain, None
    before = re.fullmatch(r"(\d{1,6})\s*x\s*(\S.*)", plain, re.ASCII | re.IGNORECASE)
    if before is not None:  # of devices, not of what clouds count
        chip = _known(before[2])
        return before[2], int(before[1]) * (1 if chip is None else chip.num_counted)
    behind = re.fullmatch(r"(.*\S)\s*[-x]\s*(\d{1,6})", plain, re.ASCII | re.IGNORECASE)
    return (plain, None) if behind is None else (behind[1], int(behind[2]))


def _known(name: str) -> Chip | None:
    plain = {_plain(known): chip for known, chip in CHIPS.items()}
    return plain.get(_plain(name)) or CHIPS.get(ALIASES.get(_plain(name), "")) or _known_by_size(name)


def _known_by_size(name: str) -> Chip | None:
    """Returns the GPU whose gigabytes follow its name, as in "H100-80GB" or "L40S-48"."""
    parts = re.fullmatch(r"(.*\S)[\s_-]+(\d{1,4})\s*(?:GB)?", name.strip(), re.ASCII | re.IGNORECASE)
    chip = None if parts is None else _known(parts[1])
    if parts is None or chip is None or chip.platform != "gpu":
        return None
    return chip if chip.memory_bytes == int(parts[2]) * 1e9 else None


def _plain(name: str) -> str:
    return re.sub("nvidia|geforce|google|tpu(?=v)", "", re.sub(r"[\s_-]", "", name.lower()))
