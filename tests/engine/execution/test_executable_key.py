"""The key of an executable has all that its code depends on; the host is a part of it on CPU alone."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxinfer.engine.execution import executable_key
from jaxinfer.plan.compiler import ENVIRONMENT, TPU_ENVIRONMENT
from kernels_pallas import gpu_compiler
from tests.on_devices import with_devices

KINDS = {"cpu": "cpu", "tpu": "TPU v6 lite", "gpu": "NVIDIA H200"}
PACKAGES = {"tpu": "libtpu", "gpu": "jax-cuda12-pjrt"}


@jax.jit
def double(x):
    return 2 * x


def devices(platform, count=1, kind=None, told="PJRT C API"):
    """Returns devices that are not here."""
    client = SimpleNamespace(platform_version=told)
    made = [
        SimpleNamespace(id=i, platform=platform, device_kind=kind or KINDS[platform], coords=[i, 0, 0], client=client)
        for i in range(count)
    ]
    client.devices = lambda: made
    return [Device(each) for each in made]


class Device:
    """A device that is equal to itself alone, as JAX's are."""

    def __init__(self, facts):
        vars(self).update(vars(facts))


def key(devices, shape=(8,)):
    """Returns the key of a call with an array on devices."""
    executable_key._of_host.cache_clear()
    executable_key._compiler_packages.cache_clear()
    array = SimpleNamespace(shape=shape, dtype=np.dtype("float32"), sharding=Sharding(devices))
    return executable_key.executable_key(double, [array], {}, {}, compiler=__name__)


class Sharding:
    def __init__(self, devices):
        self.device_set = set(devices)

    def __repr__(self):
        return f"over {len(self.device_set)} devices"


@pytest.fixture(autouse=True)
def _packages(monkeypatch):
    """Compilers of both accelerators are installed."""
    install(monkeypatch, PACKAGES)
    yield
    monkeypatch.undo()
    executable_key._of_host.cache_clear()
    executable_key._compiler_packages.cache_clear()


def install(monkeypatch, packages, number="1.2.3"):
    def version(name):
        if name in ("jax", "jaxlib", *packages.values()):
            return number
        raise PackageNotFoundError(name)

    monkeypatch.setattr(executable_key, "version", version)


def another_processor(monkeypatch):
    read = Path.read_text
    flags = "flags : avx512f amx_tile\nmodel name : Another\n"

    def read_changed(path, *rest, **options):
        return flags if path == Path("/proc/cpuinfo") else read(path, *rest, **options)

    monkeypatch.setattr(Path, "read_text", read_changed)


def more_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(192)), raising=False)


def another_architecture(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")


def flags_for_its_cpu(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=SSE4_2 --xla_dump_to=/there")


@pytest.mark.parametrize("change", [another_processor, more_cores, another_architecture, flags_for_its_cpu])
@pytest.mark.parametrize("name", KINDS)
def test_another_host_has_another_key_for_its_cpu_and_the_same_for_accelerators(monkeypatch, name, change):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=AVX")
    before = key(devices(name))
    change(monkeypatch)

    assert (key(devices(name)) == before) == (name != "cpu")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("jax_platforms", "cpu,tpu"),
        ("jax_log_compiles", True),
        ("jax_dump_ir_to", "there"),
        ("jax_traceback_in_locations_limit", 0),
    ],
)
def test_options_by_which_a_process_finds_devices_and_reports_are_in_no_key_of_an_accelerator(option, value):
    before = key(devices("tpu"))
    old = jax.config.values[option]
    jax.config.update(option, value)
    try:
        assert key(devices("tpu")) == before
    finally:
        jax.config.update(option, old)


@pytest.mark.parametrize("name", PACKAGES)
def test_what_code_for_accelerators_depends_on_is_in_their_key(monkeypatch, name):
    before = key(devices(name))

    others = [key(devices(name, kind="another")), key(devices(name, count=2)), key(devices(name), shape=(9,))]
    with jax.default_matmul_precision("highest"):
        others.append(key(devices(name)))
    for variable, value in {"XLA_FLAGS": "--xla_gpu_x=1", "LIBTPU_INIT_ARGS": "--xla_tpu_x=1"}.items():
        monkeypatch.setenv(variable, value)
        others.append(key(devices(name)))
        monkeypatch.delenv(variable)
    install(monkeypatch, PACKAGES, "1.2.4")
    others.append(key(devices(name)))

    assert len({before, *others}) == 8


@pytest.mark.parametrize("name", PACKAGES)
def test_the_compilers_package_is_in_the_key_or_else_the_version_that_the_device_tells(monkeypatch, name):
    told = [devices(name, told=each) for each in ("cuda 12080", "NVIDIA H200")]

    assert len(set(map(key, told))) == 1
    install(monkeypatch, {})
    assert len(set(map(key, told))) == 2


def test_only_another_libtpu_than_the_packages_counts_by_the_version_that_the_device_tells(monkeypatch):
    installed = "/packages/libtpu/libtpu.so"
    monkeypatch.setattr(executable_key, "find_spec", lambda _: SimpleNamespace(origin="/packages/libtpu/__init__.py"))

    def keys(name):
        found = []
        for path in (None, installed, "/elsewhere/libtpu.so"):
            if path is not None:
                monkeypatch.setenv("TPU_LIBRARY_PATH", path)
            found.append(key(devices(name, told="a build")))
            monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
        return found

    gpu, tpu = keys("gpu"), keys("tpu")

    assert len({*gpu}) == 1
    assert tpu[0] == tpu[1] != tpu[2]


def test_a_step_of_one_gpu_has_the_key_of_a_host_with_more_of_them_and_that_of_a_tpu_has_its_slice():
    one, four = ({name: key(devices(name, count)[:1]) for name in PACKAGES} for count in (1, 4))

    assert one["gpu"] == four["gpu"]
    assert one["tpu"] != four["tpu"]


DESCRIBED = """
import os, pathlib, platform, sys
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from jaxinfer.engine.execution import executable_key
from jaxinfer.plan.compiler import tpu_mesh
from kernels_pallas.gpu_compiler import mesh_of

@jax.jit
def double(x):
    return 2 * x

def keys():
    executable_key._of_host.cache_clear()
    args = [jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding) for sharding in shardings]
    return [executable_key.executable_key(double, [arg], {}, {}, compiler=executable_key.__name__) for arg in args]

name = sys.argv[1]
mesh = {"cpu": jax.make_mesh, "tpu": tpu_mesh, "gpu": mesh_of}[name]
mesh = mesh((2,), ("model",)) if name == "cpu" else mesh({"tpu": "v6e", "gpu": "H200"}[name], {"model": 2})
shardings = [NamedSharding(mesh, PartitionSpec("model")), SingleDeviceSharding(mesh.devices.flat[0])]
before = keys()
read = pathlib.Path.read_text
pathlib.Path.read_text = lambda path, *rest, **options: (
    "flags : another" if str(path) == "/proc/cpuinfo" else read(path, *rest, **options)
)
os.sched_getaffinity = lambda _: range(192)
platform.machine = lambda: "riscv64"
print([key == other for key, other in zip(before, keys(), strict=True)])
"""
DESCRIBED_IN = {
    "cpu": {},
    "tpu": ENVIRONMENT | TPU_ENVIRONMENT,
    "gpu": ENVIRONMENT,
}


@pytest.mark.parametrize(
    "name",
    [
        "cpu",
        pytest.param("tpu", marks=[pytest.mark.aot, pytest.mark.skipif(not find_spec("libtpu"), reason="no libtpu")]),
        pytest.param(
            "gpu", marks=[pytest.mark.aot, pytest.mark.skipif(not gpu_compiler.is_available(), reason="no CUDA")]
        ),
    ],
)
def test_described_accelerators_have_the_same_key_on_another_host(name):
    command = [sys.executable, "-c", DESCRIBED, name]
    environment = with_devices(2) | DESCRIBED_IN[name]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)

    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.strip() == str([name != "cpu"] * 2)
