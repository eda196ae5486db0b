"""The key of an executable on disk: a digest of all that its compilation depends on.

A CPU's code depends on its host: on instruction sets and cores. That of a TPU or GPU does not, so any host with such
devices has the same key, and so has a host without them whose compiler is of the same version.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding, SingleDeviceSharding

from jaxinfer.source_digest import source_digest

# Options of JAX's cache folder and upkeep; executables do not depend on them.
_CACHE_OPTIONS = ("jax_compilation_cache", "jax_persistent_cache", "jax_enable_compilation_cache")
# Options by which JAX finds devices, speaks to other hosts and reports. Code for a TPU or GPU does not depend on them.
_HOST_OPTIONS = (
    *("jax_platform", "jax_xla_backend", "jax_backend_target", "jax_default_device", "jax_pjrt_client_create_options"),
    *("jax_cuda_visible_devices", "jax_rocm_visible_devices", "jax_oneapi_visible_devices"),
    *("jax_num_cpu_devices", "jax_cpu_", "jax_mock_gpu_topology", "mock_num_gpu_processes"),
    *("jax_cross_host_", "jax_distributed_debug", "jax_share_binary_between_hosts", "jax_check_proxy_envs"),
    *("jax_enable_preemption_service", "jax_enable_recoverability", "jax_debug_log_modules", "jax_logging_level"),
    *("jax_log_", "jax_explain_cache_misses", "jax_dump_ir_", "jax_include_debug_info_in_dumps", "jax_pprint_"),
    *("jax_compiler_detailed_logging_min_ops", "jax_traceback_", "jax_tracer_error_num_traceback_frames"),
    *("jax_include_full_tracebacks_in_locations", "jax_hlo_source_file_canonicalization_regex"),
)
# Flags of XLA that change only code for CPUs, or that name folders for reports.
_HOST_FLAGS = ("--xla_cpu_", "--xla_force_host_platform_device_count", "--xla_dump_")
# Packages with the compiler of a platform. Of a GPU's, one has XLA, and the other has what lowers Pallas' kernels.
_COMPILERS = {
    "tpu": ("libtpu", "libtpu-nightly"),
    "gpu": tuple(
        f"jax-{backend}-{part}" for backend in ("cuda12", "cuda13", "rocm60", "rocm7") for part in ("pjrt", "plugin")
    ),
}


def executable_key(
    function: Any, args: Sequence[Any], statics: dict[str, Any], options: Mapping[str, Any], *, compiler: str
) -> str:
    """Returns the key of a call of a jitted function that is compiled with these options of XLA.

    `compiler` names the module that compiles it.
    """
    leaves, structure = jax.tree.flatten(args)
    devices = devices_of(args)
    is_portable = devices[0].platform in _COMPILERS
    parts = [
        source_digest(function, args, statics.values(), compiler=compiler),
        _of_device(devices[0]) if is_portable else _of_host(),
        *_options(without=(*_CACHE_OPTIONS, *(_HOST_OPTIONS if is_portable else ()))),
        repr(sorted(options.items())),
        _name(function),
        *(f"{name} {_name(value)}" for name, value in sorted(statics.items())),
        str(structure),
        *(f"{leaf.shape} {leaf.dtype} {_sharding(leaf, is_portable)}" for leaf in leaves),
        # The name of a sharding shows the axes of its mesh, but not the order of devices.
        *(f"{device.id} {device.device_kind}" for device in devices),
    ]
    return blake2b("\n".join(parts).encode(), digest_size=20).hexdigest()


def devices_of(args: Sequence[Any]) -> list[Any]:
    """Returns the devices that hold the arguments; the first device if none of them is placed.

    They are in the order of the arguments' mesh, which an executable depends on, or without one in that of ids.
    """
    shardings = [leaf.sharding for leaf in jax.tree.leaves(args) if getattr(leaf, "sharding", None) is not None]
    meshes: list[Any] = [*{sharding.mesh: None for sharding in shardings if isinstance(sharding, NamedSharding)}]
    if len(meshes) == 1:
        return [*meshes[0].devices.flat]
    placed = {device for sharding in shardings for device in sharding.device_set}
    return sorted(placed, key=lambda device: device.id) or jax.devices()[:1]


def _name(value: Any) -> str:
    """Returns a name that is the same in every process; the `repr` of a function contains its address."""
    return f"{value.__module__} {value.__qualname__}" if hasattr(value, "__qualname__") else repr(value)


def _sharding(leaf: Any, is_portable: bool) -> Any:
    """Returns the sharding of an argument; None if it lies whole in the memory of the only device, as without one."""
    sharding = getattr(leaf, "sharding", None)
    is_plain = isinstance(sharding, SingleDeviceSharding) and sharding.memory_kind in (None, "device")
    return None if is_portable and is_plain else sharding


def _options(without: tuple[str, ...]) -> list[str]:
    """Returns JAX's options with this thread's values; `jax.config.values` has the global ones."""
    values = jax.config.values
    names = sorted(name for name in values if not name.startswith(without))
    return [f"{name} {getattr(jax.config, name, values[name])}" for name in names]


def _of_device(device: Any) -> str:
    """Returns versions, devices and flags, on which code for a TPU or GPU depends beside source, call and options."""
    # Code for TPUs is for their whole slice, of which the call may use a part; that for a GPU ignores the others.
    slice_of = device.client.devices() if device.platform == "tpu" else []
    places = [(each.id, each.device_kind, getattr(each, "coords", None)) for each in slice_of]
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(_HOST_FLAGS)]
    variables = {"XLA_FLAGS": flags, "LIBTPU_INIT_ARGS": os.environ.get("LIBTPU_INIT_ARGS")}
    # A client that only compiles for a GPU tells the device's name, in place of CUDA's version. TPU_LIBRARY_PATH names
    # a file that is of no package.
    packages = "" if device.platform == "tpu" and _is_other_libtpu() else _compiler_packages(device.platform)
    compiler = packages or device.client.platform_version
    return f"{version('jax')} {version('jaxlib')} {compiler} {places} {variables}"


def _is_other_libtpu() -> bool:
    """True if TPU_LIBRARY_PATH names another file than that of the installed package, which sets it on import."""
    path, package = os.environ.get("TPU_LIBRARY_PATH"), find_spec("libtpu")
    if not path or package is None or package.origin is None:
        return bool(path)
    return Path(path).parent.resolve() != Path(package.origin).parent.resolve()


@functools.cache
def _compiler_packages(platform: str) -> str:
    """Returns the installed packages that have the compiler of a platform, and their versions; "" if there is none."""
    found = []
    for name in _COMPILERS[platform]:
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return ", ".join(found)


@functools.cache
def _of_host() -> str:
    """Returns versions, devices, variables and host, on which a CPU's code depends beside source, call and options."""
    variables = {name: os.environ.get(name) for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")}
    devices = [(device.id, device.device_kind) for device in jax.devices()]
    versions = [version("jax"), version("jaxlib"), jax.devices()[0].client.platform_version]
    return f"{versions} {devices} {variables} {_host()}"


def _host() -> str:
    """Returns the properties of the host that CPU code is compiled for: instruction set and number of cores."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
    except OSError:
        processor = [platform.processor()]
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{platform.machine()} {processor} {num_cores}"
