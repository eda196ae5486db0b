"""The device at hand: its name, its fast types, and the implementations that are made for it."""

from __future__ import annotations

from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp

Record = dict[str, Any]


def kernel_of_platform() -> str:
    """Returns the name of the implementation of attention that is made for the device."""
    platform = jax.default_backend()
    return platform if platform in ("gpu", "tpu") else "reference"


def product_kernel(kernel: str) -> str:
    """Returns the implementation of quantized and grouped products beside that of attention: TPUs have no kernel."""
    return "reference" if kernel.startswith("tpu") else kernel


def layout_of(kernel: str) -> str:
    """Returns the layout of the pages that an implementation reads fastest."""
    return "cpu" if kernel == "reference" else kernel.partition("_")[0]


def native_dtype() -> Any:
    """Returns the floating-point type that the device multiplies fast."""
    return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16


def describe_device() -> Record:
    """Returns what figures of the device must be quoted with."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "platform_version": getattr(device.client, "platform_version", ""),
        "jax": jax.__version__,
        "jaxlib": version("jaxlib"),
        "date": datetime.now(UTC).date().isoformat(),
    }


def print_device(about: Record) -> None:
    print(" · ".join(str(value).splitlines()[0] for value in about.values() if value), flush=True)
