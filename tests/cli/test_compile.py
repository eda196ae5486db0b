"""`jaxinfer compile` leaves all steps of a start where the start finds them, for devices here and elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest

from jaxinfer.cli.main import main
from jaxinfer.plan.compiler import ENVIRONMENT
from kernels_pallas import gpu_compiler
from tests.on_devices import with_devices

# An engine whose start has a step of each kind and few of them.
LIMITS = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 32, "max_mixed_tokens": 32, "page_size": 16}
OPTIONS = [part for name, value in LIMITS.items() for part in (f"--{name.replace('_', '-')}", str(value))]

COMPILE = """
import sys
from jaxinfer.checkpoint.checkpoint import Checkpoint
from jaxinfer.cli.main import main

def refuse(*_, **__):
    raise AssertionError("weights are loaded")

load, Checkpoint.load = Checkpoint.load, refuse
assert main(["compile", *sys.argv[1:]]) == 0
Checkpoint.load = load
"""
START = """
from jaxinfer import LLM, EngineConfig, SamplingParams
from jaxinfer.engine.execution import executable_cache

def refuse(*_, **__):
    raise AssertionError("a step is lowered and compiled")

executable_cache._compile = refuse
llm = LLM(config=EngineConfig(**LIMITS))
ready = llm.warm_up()
params = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0)
(completion,) = llm.generate(["one"], params, show_progress=False)
print(ready.num_executables, len(completion.token_ids), llm.metrics().num_late_compiles)
llm.close()
"""


def run(program, *arguments, **variables):
    environment = os.environ | {name: str(value) for name, value in variables.items()}
    command = [sys.executable, "-c", program.replace("LIMITS", repr(LIMITS)), *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=500)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-3000:]
    return result.stdout.splitlines()


@pytest.mark.parametrize("further", [[], ["--max-adapters", "2"]], ids=["plain", "adapters"])
def test_a_start_in_another_process_compiles_and_lowers_nothing(tmp_path, further):
    (compiled,) = run(COMPILE, "--out", str(tmp_path / "steps"), *OPTIONS, *further)
    start = START.replace("**LIMITS", "**LIMITS, max_adapters=2" if further else "**LIMITS")
    (started,) = run(start, JAX_COMPILATION_CACHE_DIR=tmp_path / "steps")

    count, pages = re.findall(r"(\d+) executables for cpu and (\d+) pages ready in", compiled)[0]
    assert pages == str(2 * 64 // 16)
    assert started == f"{count} 8 0"


AS_ACCELERATOR = """
import sys
import jax
from jaxinfer import LLM
from jaxinfer.ahead_of_time import described
from jaxinfer.ahead_of_time.start import Start, compile_start
from jaxinfer.config import EngineConfig, Parallelism
from jaxinfer.engine.execution import executable_key
from jaxinfer.parallel import placement
from jaxinfer.plan.devices import Chip, Devices
from kernels_pallas.device import DataSheet

# Steps have the keys of an accelerator, and the devices of a process of its own are those that are described.
executable_key._COMPILERS["cpu"] = ("jaxlib",)
found, memory_bytes = jax.devices(), 10**8
config = EngineConfig(**LIMITS, parallelism=Parallelism(tensor=len(found)))
if sys.argv[1] == "described":
    described.described_devices = lambda *_: found
    sheet = DataSheet(1e12, 1e12)
    chip = Chip(name="c", kind="cpu", platform="cpu", memory_bytes=memory_bytes, link_bytes=None, sheet=sheet)
    described.stand_in(Devices(chip, len(found)))
    compile_start(Start(model=None, config=config, dtype=None, place=sys.argv[2], show_progress=False))
else:
    placement.free_bytes = lambda devices=None: memory_bytes
    LLM(config=config, show_progress=False).warm_up()
"""


@pytest.mark.parametrize("num_devices", [1, 2])
def test_described_devices_have_the_keys_of_a_start_on_them(tmp_path, num_devices):
    environment = with_devices(num_devices)
    for way in ("described", "own"):
        run(AS_ACCELERATOR, way, str(tmp_path / way), **environment | {"JAX_COMPILATION_CACHE_DIR": tmp_path / way})

    described, own = (sorted(path.name for path in (tmp_path / way).glob("jaxinfer-*")) for way in ("described", "own"))
    assert described == own
    assert len(own) >= 7


def test_a_start_finds_steps_in_a_bucket(tmp_path):
    compiled, started = run(
        COMPILE + START, "--out", "memory://bucket/steps", *OPTIONS, HOME=tmp_path, JAX_ENABLE_COMPILATION_CACHE="true"
    )

    assert started.split()[0] == compiled.split()[0]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--chip", "v6e"], r"chip='v6e' names no devices to compile for; give one of v5e, .* such as v6e-4 or H200x1"),
        (["--chip", "v4-8"], "chip='v4-8' names no devices to compile for"),
        (["--chip", "nonsense"], "chip='nonsense' names no devices to compile for"),
        (["--chip", "H200x1", "--memory-fraction", "0.5"], "--memory-fraction is for a GPU that is here; give"),
        (["--tensor-parallel", "64"], "needs 64 devices, and this process has"),
        (["--speculation", "ngram"], "unrecognized arguments: --speculation"),
    ],
)
def test_what_cannot_be_compiled_ahead_is_refused_by_name(tmp_path, capsys, monkeypatch, options, told):
    monkeypatch.setattr("jaxinfer.ahead_of_time.start._use", lambda _: None)

    assert main(["compile", "--out", str(tmp_path), *options]) == 2

    assert re.search(told, capsys.readouterr().err)


@pytest.mark.skipif(find_spec("libtpu") is not None, reason="the compiler is installed")
def test_a_missing_compiler_is_named_with_the_way_to_get_it(tmp_path, capsys):
    assert main(["compile", "--out", str(tmp_path), "--chip", "v6e-1"]) == 2

    assert "the compiler for TPU (libtpu) is not installed: pip install" in capsys.readouterr().err


def test_a_place_that_cannot_be_used_is_refused(tmp_path):
    (tmp_path / "file").write_text("no folder")
    command = [sys.executable, "-m", "jaxinfer", "compile", "--out", str(tmp_path / "file" / "below"), *OPTIONS]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)

    assert result.returncode == 2
    assert "cannot be used for compiled steps; give another" in result.stderr


NEEDS = {
    "tpu": [pytest.mark.aot, pytest.mark.skipif(not find_spec("libtpu"), reason="no libtpu")],
    "gpu": [pytest.mark.aot, pytest.mark.skipif(not gpu_compiler.is_available(), reason="no CUDA compiler")],
}


def compile_for(chip, folder, *further):
    command = [sys.executable, "-m", "jaxinfer", "compile", "--out", str(folder), *OPTIONS, "--chip", chip, *further]
    command += ["--page-size", "128", "--max-model-len", "256"]
    environment = os.environ | {"PYTHONPATH": ENVIRONMENT["PYTHONPATH"]}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=500)


@pytest.mark.parametrize(
    ("chip", "further", "devices"),
    [
        pytest.param("v6e-1", [], "TPU v6 lite", marks=NEEDS["tpu"]),
        pytest.param("v6e-4", ["--tensor-parallel", "2"], "2 x TPU v6 lite", marks=NEEDS["tpu"]),
        pytest.param("H200x1", [], "NVIDIA H200", marks=NEEDS["gpu"]),
    ],
)
def test_steps_for_devices_elsewhere_have_the_same_names_in_each_run(tmp_path, chip, further, devices):
    runs = [compile_for(chip, tmp_path / folder, *further) for folder in ("first", "again", "again")]

    assert all(f"executables for {devices} and 4 pages ready" in run.stdout for run in runs), runs
    assert all("cannot be" not in run.stderr for run in runs)
    first, again = (sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("first", "again"))
    assert first == again
    assert len(first) == int(runs[0].stdout.split()[0])


@pytest.mark.parametrize(
    ("chip", "told"),
    [
        pytest.param("v6e-3", "3 devices of v6e are no whole slice; the smallest", marks=NEEDS["tpu"]),
        pytest.param("A100x1", "chip=A100 cannot be described: the compiler names the device", marks=NEEDS["gpu"]),
    ],
)
def test_devices_that_a_compiler_describes_otherwise_are_refused(tmp_path, chip, told):
    run = compile_for(chip, tmp_path)

    assert run.returncode == 2
    assert told in run.stderr
