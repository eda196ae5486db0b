"""The script for whoever has a GPU or TPU, on the CPU at hand."""

from __future__ import annotations

import functools
import json

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas.grouped_matmul import api as grouped_api
from kernels_pallas.latent_attention import api as latent_api
from kernels_pallas.paged_attention.api import IMPLEMENTATIONS
from scripts.kernels import device_check
from tests.unoptimised import UNOPTIMISED


def test_everything_is_checked_measured_and_written_down(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(device_check.jax, "jit", functools.partial(jax.jit, compiler_options=UNOPTIMISED))

    assert device_check.main(["--small", "--json", str(tmp_path / "out.json")]) == 0

    written = json.loads((tmp_path / "out.json").read_text())
    assert written["platform"] == "cpu"
    assert all(written[name] for name in ("device", "jax", "jaxlib", "date"))
    records = written["records"]
    assert {r["section"] for r in records} == {"check", "copy", "product", "decode", "prefill", "int4", "experts"}
    assert all(r["passes"] for r in records if r["section"] == "check")
    assert all(r["microseconds"] > 0 and r["of_plain"] > 0 for r in records if r["section"] != "check")
    printed = capsys.readouterr().out
    assert all(r["case"] in printed for r in records)


def test_a_wrong_kernel_is_told(monkeypatch):
    right = IMPLEMENTATIONS["reference"]

    def wrong(*args, **kwargs):
        out, pages = right(*args, **kwargs)
        return out + jnp.asarray(0.1, out.dtype), pages

    monkeypatch.setitem(IMPLEMENTATIONS, "reference", wrong)

    assert next(device_check.check_kernels())["passes"] is False


@pytest.mark.parametrize(("offset", "passes"), [(0.0, True), (0.1, False)])
def test_the_results_that_are_timed_are_right(offset, passes, monkeypatch):
    kernel = IMPLEMENTATIONS["gpu_interpret"]

    def moved(*args, **kwargs):
        out, pages = kernel(*args, **kwargs)
        return out + jnp.asarray(offset, out.dtype), pages

    monkeypatch.setitem(IMPLEMENTATIONS, "gpu_interpret", moved)
    monkeypatch.setattr(device_check, "kernel_of_platform", lambda: "gpu_interpret")

    records = [r for r in device_check.measure_attention(is_small=True) if r["implementation"] == "gpu_interpret"]

    assert [(r["section"], r["passes"]) for r in records] == [("decode", passes), ("prefill", passes)]


@pytest.mark.parametrize(
    ("table", "error_of"),
    [
        (grouped_api.IMPLEMENTATIONS, functools.partial(device_check.error_of_experts, (3, 0, 2), {})),
        (
            latent_api.IMPLEMENTATIONS,
            functools.partial(device_check.error_of_latents, device_check.Check([(1, 70)], 1, {"num_heads": 16})),
        ),
    ],
    ids=["experts", "latents"],
)
def test_results_of_other_kernels_that_are_wrong_are_told(table, error_of, monkeypatch):
    right = table["reference"]

    def wrong(*args, **kwargs):
        result = right(*args, **kwargs)  # of attention with the pages
        out = result[0] if isinstance(result, tuple) else result
        moved = out + jnp.asarray(0.1, out.dtype)
        return (moved, *result[1:]) if isinstance(result, tuple) else moved

    assert error_of("reference") < device_check.TOLERANCE
    monkeypatch.setitem(table, "reference", wrong)

    assert error_of("reference") > device_check.TOLERANCE


def test_a_kernel_that_refuses_a_check_is_not_wrong_but_says_why(monkeypatch):
    def refuse(*args, **kwargs):
        raise NotImplementedError("8-bit floats need another GPU")

    monkeypatch.setitem(IMPLEMENTATIONS, "reference", refuse)

    record = next(device_check.check_kernels())

    assert "passes" not in record
    assert record["note"] == "refused: 8-bit floats need another GPU"


@pytest.mark.parametrize(("is_ours", "passes"), [(True, False), (False, None)])
def test_a_kernel_of_ours_that_cannot_be_timed_is_a_fault(is_ours, passes):
    def fail():
        raise RuntimeError("out of shared memory")

    record = device_check.timed({}, fail, repeats=1, size=1.0, unit="bytes_per_s", is_ours=is_ours)

    assert record.get("passes") is passes
    assert record["note"] == "not available: RuntimeError: out of shared memory"


def test_what_a_device_does_not_have_says_why():
    def unavailable():
        raise ImportError("no cuDNN here")

    record = device_check.vendor_record({"section": "decode"}, unavailable, 1.0, "bytes_per_s")

    assert record == {"section": "decode", "note": "not available: ImportError: no cuDNN here"}


def test_rates_are_fractions_of_the_plain_ones(monkeypatch):
    monkeypatch.setattr(device_check, "DATA_SHEETS", {device_check.jax.devices()[0].device_kind: (8e9, 1e9)})
    records = [
        {"section": "copy", "bytes_per_s": 4e9},
        {"section": "product", "flops_per_s": 5e8},
        {"section": "decode", "bytes_per_s": 3e9},
        {"section": "prefill", "flops_per_s": 4e8},
        {"section": "decode", "note": "not available"},
    ]

    rates = device_check.rates_of(records)
    for record in records:
        device_check.add_fractions(record, rates)

    fractions = [(r.get("of_plain"), r.get("of_data_sheet")) for r in records]
    assert fractions == [(1.0, 0.5), (1.0, 0.5), (0.75, pytest.approx(0.375)), (0.8, 0.4), (None, None)]
