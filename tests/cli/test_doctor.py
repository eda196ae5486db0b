"""`jaxinfer doctor` passes exact products, and names what depends on the batch in others."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import device
from jaxinfer.cli import doctor
from jaxinfer.cli.main import main
from jaxinfer.config import EngineConfig
from kernels_pallas import row_products
from kernels_pallas.row_products import BY_MATRICES, BY_WEIGHTS, CHANNEL_BLOCK, PRODUCTS, ROW_BLOCK
from tests.engine.engines import save_small_checkpoint

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="bit-equality is promised on CPU")

SMALL = EngineConfig(max_num_seqs=3, max_num_batched_tokens=20, page_size=16, num_pages=8, max_drafts=2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = save_small_checkpoint(tmp_path_factory.mktemp("small"), with_tokenizer=False)
    (folder / "model.safetensors").unlink()  # config.json is enough
    return folder


def next_up(y, where):
    return jnp.where(where, jnp.nextafter(y, jnp.inf), y)


def in_the_third_place(rows):
    return jnp.arange(rows.shape[-2])[:, None] == 2


def with_other_than_a_block(rows):
    return jnp.array(rows.shape[-2] == 5)


def beside_what_is_not_finite(rows):
    return ~jnp.isfinite(rows).all(axis=(-1, -2), keepdims=True)


def beside_other_products(rows):
    return jnp.array(rows.shape[0] > 1)


# Rows whose results are off by the least bit, and what the doctor says of that.
FAULTS = {
    in_the_third_place: [f"other bits {n} places further down" for n in range(1, ROW_BLOCK)],
    with_other_than_a_block: [f"other bits with 5 rows than with {ROW_BLOCK}"],
    beside_what_is_not_finite: ["other bits beside other rows"],
    beside_other_products: [
        f"other bits with 5 rows than with {ROW_BLOCK}",
        *(f"other bits beside {n} other products" for n in (1, 7, 63)),
    ],
}


@pytest.mark.parametrize("form", [BY_WEIGHTS, BY_MATRICES])
def test_products_in_blocks_have_no_faults(form):
    assert doctor.find_faults(form, 64, 48, "float32", {ROW_BLOCK}) == []


@pytest.mark.parametrize("rows_with", FAULTS, ids=lambda function: function.__name__)
def test_each_fault_of_a_product_is_found(rows_with, monkeypatch):
    name, exact = rows_with.__name__, PRODUCTS[BY_MATRICES]
    monkeypatch.setitem(PRODUCTS, name, lambda rows, matrices: next_up(exact(rows, matrices), rows_with(rows)))

    assert doctor.find_faults(name, 64, 48, "float32", {5, ROW_BLOCK}) == FAULTS[rows_with]


def test_a_product_outside_of_row_products_is_a_fault():
    assert doctor.find_faults("", 64, 48, "float32", {3}) == ["not a product of kernels_pallas.row_products"]


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_every_product_of_an_engine_is_examined(checkpoint, quantization):
    config = EngineConfig(**{**vars(SMALL), "quantization": quantization})

    findings = list(doctor.examine(checkpoint, config, "float32"))

    assert [finding.faults for finding in findings] == [()] * len(findings)
    sizes = {(finding.form, finding.num_inputs, finding.num_outputs) for finding in findings}
    D, F, V, H, S = 144, 272, 96, 32, 16
    weights = {(D, 6 * H), (D, 2 * H), (6 * H, D), (D, F), (F, D), (D, V)}
    if quantization is not None:  # two blocks of channels, or what there is of them
        first = {(inputs, min(channels, CHANNEL_BLOCK)) for inputs, channels in weights}
        second = {(inputs, min(channels - CHANNEL_BLOCK, CHANNEL_BLOCK)) for inputs, channels in weights}
        weights = first | {(inputs, channels) for inputs, channels in second if channels > 0}
    assert sizes == {(BY_WEIGHTS, *size) for size in weights} | {(BY_MATRICES, H, S), (BY_MATRICES, S, H)}


def test_the_command_describes_the_machine_and_prints_a_line_per_product(checkpoint, capsys):
    argv = ["doctor", "--model", str(checkpoint), "--max-num-seqs", "2", "--page-size", "16", "--num-pages", "8"]
    assert main(argv) == 0
    cpu, *lines, verdict = capsys.readouterr().out.splitlines()
    assert "jax " in cpu
    products = [line for line in lines if " -> [n, " in line]
    described = [line.partition(":")[0] for line in lines[: len(lines) - len(products)]]
    assert list(dict.fromkeys(described))[:6] == ["device", "versions", "compiled steps", "kernel", "cache", "extra"]
    assert set(described) <= {"device", "versions", "compiled steps", "kernel", "cache", "extra", "slow"}
    assert len(products) == 8
    assert all(line.endswith("the same bits") for line in products)
    assert verdict == "8 products: on this CPU no bit of them depends on the batch"


def test_the_command_fails_and_names_what_is_wrong(checkpoint, capsys, monkeypatch):
    # A machine on which trials say yes to all, and on which three rows have other bits than eight.
    monkeypatch.setattr(row_products, "equal_row_counts", lambda form, counts, *_: frozenset(counts))
    monkeypatch.setattr(doctor, "equal_row_counts", doctor.equal_row_counts.__wrapped__)  # tries anew
    exact = row_products.multiply_each

    def differs(parts, operand, *, form):
        is_other = [form == BY_MATRICES and rows.shape[-2] == 3 for rows in parts]
        products = exact(parts, operand, form=form)
        return [np.nextafter(y, np.inf) if other else y for y, other in zip(products, is_other, strict=True)]

    monkeypatch.setattr(row_products, "multiply_each", differs)
    argv = ["doctor", "--model", str(checkpoint), "--max-num-seqs", "5", "--page-size", "16", "--num-pages", "9"]
    assert main([*argv, "--quiet"]) == 1
    _, named, *faulty, verdict = capsys.readouterr().out.splitlines()
    assert named.startswith("device: ")
    assert len(faulty) == 2
    assert all(line.startswith("rows_by_matrices ") and "other bits with 3 rows than with 8" in line for line in faulty)
    assert verdict == "2 of 8 products depend on the batch: so do the bits of a request on this CPU"


def test_a_quiet_doctor_names_the_device_and_those_that_are_idle(checkpoint, capsys, monkeypatch):
    monkeypatch.setattr(device, "idle_accelerators", lambda: ["JAX computes on the CPU though /dev/nvidia0 is there"])
    monkeypatch.setattr(doctor, "examine", lambda *_: [])

    assert main(["doctor", "--quiet", "--model", str(checkpoint)]) == 0

    _, named, idle, _ = capsys.readouterr().out.splitlines()
    assert named.startswith(f"device: {jax.devices()[0].device_kind} (cpu), ")
    assert idle == "JAX computes on the CPU though /dev/nvidia0 is there"


def test_another_device_is_refused_by_name(checkpoint, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(ValueError, match="the device is a gpu, on which bits depend on the batch"):
        list(doctor.examine(checkpoint, SMALL, "float32"))
