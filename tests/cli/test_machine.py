"""`jaxinfer doctor` names the devices, the cache, the kernels that a device gets, missing extras, and what is slow."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from jaxinfer.cli import machine
from jaxinfer.cli.main import main
from jaxinfer.config import NARROW_CACHE_DTYPES, EngineConfig
from jaxinfer.engine.execution.executable_files import Folder
from tests.engine.engines import save_small_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = save_small_checkpoint(tmp_path_factory.mktemp("small"), with_tokenizer=False)
    (folder / "model.safetensors").unlink()  # config.json is enough
    return folder


def on(kind: str, platform: str):
    """The context of a device that need not be here."""
    device = AbstractDevice(kind, 100, platform)
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def choices(checkpoint: Path, dtype: str, **options) -> list[str]:
    return [line.partition(": ")[2] for line in machine.kernel_choices(checkpoint, EngineConfig(**options), dtype)]


def test_a_gpu_gets_its_kernels(checkpoint):
    with on("NVIDIA H200", "gpu"):
        assert choices(checkpoint, "bfloat16") == ["the GPU kernel"] * 4


def test_a_gpu_before_ampere_gets_none_and_says_why(checkpoint):
    with on("Tesla T4", "gpu"):
        attention, _, int4, experts = choices(checkpoint, "float16")

    for line in (attention, int4, experts):
        assert line.startswith("plain JAX: compute capability 7.5 of 'Tesla T4' is not supported by the GPU kernels")


def test_a_tpu_gets_its_kernels(checkpoint):
    with on("TPU v6 lite", "tpu"):
        assert choices(checkpoint, "bfloat16") == ["the TPU kernel"] * 4


def test_attention_that_a_kernel_refuses_is_told_with_the_way_out(checkpoint):
    with on("TPU v6 lite", "tpu"):
        (refused, *_), (chosen, *_) = (choices(checkpoint, "float16", attention=name) for name in (None, "reference"))

    assert refused.startswith("refused: the tpu kernels of paged attention cannot do this call: q of float16")
    assert "EngineConfig.attention" in refused
    assert chosen == "plain JAX, as --attention reference demands"


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the device is no CPU")
def test_a_cpu_has_no_kernels(checkpoint):
    assert {line.partition(":")[0] for line in choices(checkpoint, "float32")} == {"plain JAX"}


# The second kind's capability, and a TPU's table, decide: docs/memory.md has the same in words.
CACHES = [
    ("NVIDIA H200", "gpu", ("", "", "")),
    ("NVIDIA A100-SXM4-80GB", "gpu", ("float8_e4m3fn is not supported on compute capability 8.0", "", "")),
    ("TPU v6 lite", "tpu", ("", "", "pages of int4 have no TPU kernel")),
]


@pytest.mark.parametrize(("kind", "platform", "refusals"), CACHES)
def test_each_type_of_keys_and_values_has_its_bytes_and_what_a_kernel_refuses(checkpoint, kind, platform, refusals):
    with on(kind, platform):
        own, *narrow = machine.cache_choices(checkpoint, EngineConfig(page_size=128), "bfloat16")
        attention = {name: choices(checkpoint, "bfloat16", cache_dtype=name)[0] for name in NARROW_CACHE_DTYPES}

    own_bytes = int(own.removesuffix(" bytes per token in bfloat16").replace(",", ""))
    assert narrow.pop().startswith(f"no int2: cache_dtype='int2' is not built for a {platform.upper()}; use ")
    assert attention.pop("int2").startswith("refused: cache_dtype='int2' is not built")
    for line, name, refusal in zip(narrow, attention, refusals, strict=True):
        ((size, room),) = re.findall(rf"^([\d,]+) in {name}, room for ([\d.]+) times the tokens", line)
        assert own_bytes / int(size.replace(",", "")) == pytest.approx(float(room), abs=0.006)
        assert ("refused: " in line) == attention[name].startswith("refused: ") == bool(refusal)
        assert refusal in line


def test_bytes_of_a_token_are_those_of_the_engines_pages(checkpoint):
    config = EngineConfig(page_size=16)

    own, fp8, int8, int4, int2 = machine.cache_choices(checkpoint, config, "float32")

    heads, numbers, layers, token_id = 2, 32, 2, 4
    assert own == f"{2 * layers * heads * numbers * 4 + token_id:,} bytes per token in float32"
    assert fp8.startswith(f"{2 * layers * heads * numbers + token_id:,} in fp8,")
    assert int8.startswith(f"{2 * layers * heads * (numbers + 4) + token_id:,} in int8,")
    assert int4.startswith(f"{2 * layers * heads * (numbers // 2 + 4) + token_id:,} in int4,")
    # Of 16 tokens a key's channel has a scale and a least in 2 bytes each, and each token's values have both.
    ranges = numbers * 4 / 16 + 4
    assert int2.startswith(f"{layers * heads * (2 * numbers / 4 + ranges) + token_id:,.0f} in int2,")


SLOW = [
    ("Tesla T4", "gpu", "bfloat16", ["Triton compiles for no GPU below", "products in bfloat16", "no tuned table"]),
    ("Tesla T4", "gpu", "float16", ["Triton compiles for no GPU below", "no tuned table"]),
    ("NVIDIA H200", "gpu", "float32", ["float32: each step reads twice the bytes", "no tuned table"]),
    ("TPU v6 lite", "tpu", "bfloat16", []),
]


@pytest.mark.parametrize(("kind", "platform", "dtype", "told"), SLOW)
def test_each_slow_part_is_told_with_its_reason(kind, platform, dtype, told, monkeypatch):
    monkeypatch.setattr(machine, "cache_place", lambda: Folder(Path("here")))
    with on(kind, platform):
        lines = list(machine.slow_parts(dtype))

    assert len(lines) == len(told)
    assert all(part in line for part, line in zip(told, lines, strict=True))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the device is no CPU")
def test_what_slows_a_cpu_is_told(monkeypatch):
    monkeypatch.setattr(machine, "idle_accelerators", lambda: ["nvidia0 is there"])
    monkeypatch.setattr(machine, "describe_cpu", lambda: "a CPU, avx2")
    monkeypatch.setattr(machine.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(machine, "cache_place", lambda: None)

    cache, device, vectors, dtype, narrow_cache = machine.slow_parts("bfloat16", "fp8")

    assert "each start compiles anew" in cache
    assert device == "nvidia0 is there"
    assert "no AVX-512" in vectors
    assert "use float32" in dtype
    assert "keys and values in fp8: a CPU widens them" in narrow_cache


def test_missing_packages_of_an_extra_are_named_through_extras_of_others(monkeypatch):
    needs = {
        "jaxinfer": ["numpy>=2.0", 'jax[cuda12]>=0.10; extra == "cuda"', 'fastapi; extra == "serve"'],
        "jax": ['plugin[libs]<=1; extra == "cuda12"', 'libtpu; extra == "tpu"'],
        "plugin": ["driver; sys_platform == 'linux' and extra == 'libs'"],
    }
    installed = {"jax", "plugin", "fastapi"}

    def version(name: str) -> str:
        if name not in installed:
            raise machine.PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(machine, "requires", needs.get)
    monkeypatch.setattr(machine, "version", version)

    assert machine.missing_packages("jaxinfer", "cuda") == {"driver"}
    assert machine.missing_packages("jaxinfer", "serve") == set()
    installed.remove("plugin")
    assert machine.missing_packages("jaxinfer", "cuda") == {"plugin"}


def test_the_size_of_the_cache_is_that_of_its_files(tmp_path):
    for name, size in (("jaxinfer-0a", 3), ("jaxinfer-0b", 4), ("another", 5)):
        (tmp_path / name).write_bytes(bytes(size))

    assert Folder(tmp_path).sizes()[0] == 7


def test_the_command_on_a_gpu_describes_it_and_promises_no_bits(checkpoint, capsys):
    with on("NVIDIA H200", "gpu"):
        assert main(["doctor", "--model", str(checkpoint), "--dtype", "bfloat16"]) == 0

    *lines, verdict = capsys.readouterr().out.splitlines()
    assert "kernel: products by experts: the GPU kernel" in lines
    assert verdict.startswith("the device is a gpu: bits of a request may depend on the batch")
