"""Devices that are not here stand in for those of a process, which then compiles for them as an engine there does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from jaxinfer.engine import device_choice
from jaxinfer.engine.execution import executable_cache
from jaxinfer.parallel import placement
from jaxinfer.plan.compiler import ENVIRONMENT, SLICES, TPU_ENVIRONMENT, described_devices, require_compiler
from jaxinfer.plan.devices import Devices, parse_devices
from jaxinfer.validation import shown
from kernels_pallas.gpu_compiler import GPUS

# On a host with TPUs JAX adds this flag, unless it is there, to LIBTPU_INIT_ARGS, which is in the key of steps.
BARRIER = "--xla_tpu_use_enhanced_launch_barrier"


def environment_for(devices: Devices, given: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of a process for `stand_in`, from those `given` to this one."""
    if devices.chip.platform != "tpu":
        return {**given, **ENVIRONMENT}
    flags = given.get("LIBTPU_INIT_ARGS", "")
    flags = flags if BARRIER in flags else f"{flags} {BARRIER}=true"
    return {**given, **ENVIRONMENT, **TPU_ENVIRONMENT, "LIBTPU_INIT_ARGS": flags}


def read_chip(name: str) -> Devices:
    """Returns the devices of a machine or slice by a name such as "v6e-4" or "H200x1".

    Raises ValueError, with the way out, if their compiler is missing or cannot describe them.
    """
    known = ", ".join((*SLICES, *GPUS))
    try:
        devices = parse_devices(name)
    except ValueError:
        devices = None
    if devices is None or devices.count is None or (devices.chip.platform == "tpu" and devices.chip.name not in SLICES):
        raise ValueError(
            f"chip={shown(name)} names no devices to compile for; give one of {known} with the number of a machine or"
            " slice, such as v6e-4 or H200x1"
        )
    require_compiler(devices.chip.name, devices.chip.platform, devices.count)
    return devices


def stand_in(devices: Devices) -> None:
    """Makes described devices those of this process, for as long as it lives. It can compile, but compute nothing.

    All that an engine asks of its devices has their answers: platform, number, kind and free memory. That is the data
    sheet's, less the part that JAX does not take.
    """
    chip, count = devices.chip, devices.count or 1
    found = described_devices(chip.name, chip.platform, count)
    if found[0].device_kind != chip.kind:
        raise ValueError(
            f"chip={chip.name} cannot be described: the compiler names the device {found[0].device_kind}, and its own"
            f" driver {chip.kind}; compile on the device itself"
        )
    answers: dict[str, Any] = {
        **dict.fromkeys(("devices", "local_devices"), lambda *_, **__: found),
        **dict.fromkeys(("device_count", "local_device_count"), lambda *_, **__: count),
        "default_backend": lambda: chip.platform,
        "device_put": _abstract,
    }
    for name, answer in answers.items():
        setattr(jax, name, answer)
    for module in (placement, device_choice):
        setattr(module, "free_bytes", lambda devices=None: chip.usable_bytes)  # noqa: B010
    executable_cache._load = lambda *_: None  # without a device no executable can be loaded
    # The device of arguments without a sharding. It is no part of a key.
    jax.config.update("jax_default_device", found[0])


def _abstract(tree: Any, sharding: Any = None) -> Any:
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding), tree)
