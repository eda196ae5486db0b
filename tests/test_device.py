"""The defaults suit the device at hand, and the user's own settings come first."""

from __future__ import annotations

import re
from types import SimpleNamespace

import jax
import pytest

from jaxinfer import LLM, device, load_checkpoint

OPTIONS = (
    "jax_compilation_cache_dir",
    "jax_enable_compilation_cache",
    "jax_persistent_cache_min_compile_time_secs",
)


def option(name: str):
    return getattr(jax.config, name)


@pytest.fixture
def on_device(monkeypatch):
    """Makes the given attributes those of the one device there is."""

    def pretend(platform: str, **attributes) -> None:
        fake = SimpleNamespace(platform=platform, **attributes)
        for name in ("devices", "local_devices"):
            monkeypatch.setattr(jax, name, lambda: [fake])
        monkeypatch.setattr(jax, "default_backend", lambda: platform)

    return pretend


@pytest.fixture
def cache_options():
    """Puts jax's options for its compilation cache back afterwards."""
    before = {name: option(name) for name in OPTIONS}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.parametrize(
    ("platform", "capability", "dtype"),
    [
        ("cpu", None, "float32"),
        ("tpu", None, "bfloat16"),
        ("gpu", "9.0", "bfloat16"),
        ("gpu", "8.0", "bfloat16"),
        ("gpu", "10.0", "bfloat16"),
        ("gpu", "12.1", "bfloat16"),
        ("gpu", "7.5", "float16"),
    ],
)
def test_numbers_are_kept_in_the_widest_format_the_device_multiplies_natively(on_device, platform, capability, dtype):
    on_device(platform, compute_capability=capability)

    assert device.default_dtype() == dtype


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "float32") for name in ("float32", "fp32", "float")),
        *((name, "bfloat16") for name in ("bfloat16", "bf16")),
        *((name, "float16") for name in ("float16", "fp16", "half")),
        *((name, "native") for name in ("auto", None)),
    ],
)
def test_a_number_format_has_its_usual_names(monkeypatch, name, dtype):
    monkeypatch.setattr(device, "default_dtype", lambda: "native")

    assert device.resolve_dtype(name) == dtype


@pytest.mark.parametrize("make", [LLM, load_checkpoint], ids=["LLM", "load_checkpoint"])
@pytest.mark.parametrize("dtype", ["float64", "int8", "FP8", "", 32, ["bf16"]], ids=str)
def test_another_number_format_is_refused_with_those_allowed_before_a_model_is_looked_for(make, dtype):
    message = re.escape(f"dtype={dtype!r} is not allowed: give auto, float32 (or fp32, float), bfloat16 (or bf16)")

    with pytest.raises(ValueError, match=message):
        make("no such model", dtype=dtype)


@pytest.mark.parametrize(("platform", "scans"), [("cpu", False), ("gpu", False), ("tpu", True)])
def test_layers_are_stacked_where_a_scan_reads_them_in_place(on_device, platform, scans):
    on_device(platform)

    assert device.scans_layers() == scans


def test_an_accelerator_has_left_what_is_not_in_use(on_device):
    on_device("gpu", memory_stats=lambda: {"bytes_limit": 80 * 2**30, "bytes_in_use": 16 * 2**30})

    assert device.free_bytes() == 64 * 2**30


@pytest.mark.parametrize("stats", [None, {}, {"bytes_in_use": 5}])
def test_a_cpu_has_no_limit_of_its_own(on_device, stats):
    on_device("cpu", memory_stats=lambda: stats)

    assert device.free_bytes() is None


def test_compiled_steps_are_kept_in_the_users_cache_folder(cache_options):
    jax.config.update("jax_compilation_cache_dir", None)

    device.enable_compilation_cache()

    assert option("jax_compilation_cache_dir") == str(device.COMPILATION_CACHE)


def test_steps_that_compile_quickly_are_kept_as_well(cache_options):
    jax.config.update("jax_compilation_cache_dir", None)

    device.enable_compilation_cache()

    assert option("jax_persistent_cache_min_compile_time_secs") == 0


def test_a_folder_of_the_users_is_left_as_it_is(cache_options):
    jax.config.update("jax_compilation_cache_dir", "/somewhere/else")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 7.0)

    device.enable_compilation_cache()

    assert option("jax_compilation_cache_dir") == "/somewhere/else"
    assert option("jax_persistent_cache_min_compile_time_secs") == 7.0


def test_a_cache_that_is_switched_off_stays_off(cache_options):
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_enable_compilation_cache", False)

    device.enable_compilation_cache()

    assert option("jax_compilation_cache_dir") is None


@pytest.mark.parametrize(
    ("backend", "platforms", "files", "lines"),
    [
        ("cpu", None, [], []),
        (
            "cpu",
            None,
            ["nvidia0", "nvidia1"],
            ["nvidia0 is there: pip install 'jaxinfer[cuda]', see JAX's log, or set"],
        ),
        ("cpu", None, ["3"], ["3 is there: pip install 'jaxinfer[tpu]'"]),
        ("cpu", "cpu", ["nvidia0"], []),
        ("gpu", None, ["nvidia0"], []),
    ],
)
def test_an_accelerator_that_jax_does_not_use_is_named(monkeypatch, tmp_path, backend, platforms, files, lines):
    for name in files:
        (tmp_path / name).touch()
    patterns = {f"{tmp_path}/nvidia[0-9]*": "cuda", f"{tmp_path}/[0-9]*": "tpu"}
    monkeypatch.setattr(device, "DEVICE_FILES", patterns)
    monkeypatch.setattr(device.jax, "default_backend", lambda: backend)
    monkeypatch.setattr(type(device.jax.config), "values", property(lambda _: {"jax_platforms": platforms}))

    found = device.idle_accelerators()

    assert len(found) == len(lines)
    assert all(part in line for part, line in zip(lines, found, strict=True))
