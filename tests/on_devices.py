"""Programs with several CPU devices, which JAX makes at its start only: in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.compiler import flags_with

ROOT = Path(__file__).parents[1]
# Each device computes on a thread of its own, its collectives one after another. With a pool of threads for all,
# collectives that wait for another device can take the threads that this device needs.
ONE_THREAD_EACH = "--xla_cpu_multi_thread_eigen=false"


def with_devices(num_devices: int) -> dict[str, str]:
    """Returns the environment of a process with that many CPU devices."""
    flags = flags_with(f"--xla_force_host_platform_device_count={num_devices}", ONE_THREAD_EACH)
    return os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}


def run_on_devices(num_devices: int, *arguments: str) -> str:
    """Runs python with these arguments and that many CPU devices, and returns its standard output."""
    command = [sys.executable, *arguments]
    run = subprocess.run(command, cwd=ROOT, env=with_devices(num_devices), capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    return run.stdout
