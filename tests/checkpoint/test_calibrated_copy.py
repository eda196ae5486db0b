"""Copies that are calibrated by GPTQ: nearer to their source than rounded ones, read by `transformers`, and resumed."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationConfig

from jaxinfer import load_checkpoint
from jaxinfer.checkpoint import quantized_copy
from jaxinfer.checkpoint.quantized_copy import CALIBRATED, write_quantized
from jaxinfer.quantization import schemes
from jaxinfer.quantization.schemes import SCHEMES
from jaxinfer.steps.log_probs import log_probs
from tests.checkpoint.packing import settings_of
from tests.checkpoint.renamed import read_tensors
from tests.checkpoint.test_quantized_copy import SIZES, floats
from tests.oracles import reference_logits, save_random_checkpoint

TEXTS = np.random.default_rng(0).integers(0, 96, (12, 64), np.int32)
CASES = {
    "dense, fused and tied": ("phi3", {"tie_word_embeddings": True, "num_hidden_layers": 2}),
    "experts": ("qwen3_moe", {"num_experts": 8, "num_hidden_layers": 2}),
}


@pytest.fixture(scope="module", params=CASES)
def source(request, tmp_path_factory):
    family, options = CASES[request.param]
    folder = tmp_path_factory.mktemp("source")
    return save_random_checkpoint(folder / "whole", family, shard_size="100KB", **SIZES[family], **options)


@pytest.fixture(scope="module")
def copies(source):
    return functools.cache(
        lambda scheme: write_quantized(source, source.parent / f"calibrated-{scheme}", scheme, calibration=TEXTS)
    )


@pytest.fixture(scope="module")
def copy(copies):
    return copies("int4")


def log_probs_of(path):
    params, config = load_checkpoint(path)
    compute = jax.jit(log_probs, static_argnames="config")
    return np.asarray(compute(params, jnp.asarray(TEXTS), config=config))


def test_a_calibrated_copy_is_nearer_to_its_source_than_a_rounded_one(source, copy):
    exact = log_probs_of(source)
    rounded = write_quantized(source, source.parent / "rounded", "int4")

    errors = [np.square(log_probs_of(path) - exact).mean() for path in (copy, rounded)]

    assert errors[0] < 0.7 * errors[1]
    assert {file.name for file in copy.iterdir()} == {file.name for file in rounded.iterdir()}
    assert (copy / "config.json").read_bytes() == (rounded / "config.json").read_bytes()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_log_probs_of_a_calibrated_copy_are_those_of_transformers(copies, scheme):
    copy = copies(scheme)
    model = transformers.AutoModelForCausalLM.from_pretrained(copy, dtype=torch.float32).eval()
    logits = torch.tensor(reference_logits(model, TEXTS[0]))
    chosen = torch.log_softmax(logits, -1).numpy()[np.arange(63), TEXTS[0, 1:]]

    np.testing.assert_allclose(log_probs_of(copy)[0], chosen, rtol=0, atol=1e-4)


@pytest.mark.parametrize("scheme", ["int4", "int3", "int2"])
def test_weights_of_a_calibrated_copy_are_those_that_compressed_tensors_unpacks(copies, scheme):
    path = copies(scheme)
    stored, weights = read_tensors(path), floats(path)
    groups: Any = QuantizationConfig.model_validate(settings_of(path)).config_groups.values()
    modules = [name.removesuffix(".weight_packed") for name in stored if name.endswith(".weight_packed")]
    signs = set()

    for module in modules:
        parts = {name.rpartition(".")[2]: stored[name] for name in stored if name.startswith(f"{module}.")}
        parts["weight_scale"] = parts["weight_scale"].float()  # bfloat16, in which the library would multiply
        (own,) = (group for group in groups if {"Linear", module} & {*group.targets})
        theirs = PackedQuantizationCompressor.decompress(parts, own)["weight"]
        np.testing.assert_array_equal(weights[f"{module}.weight"], theirs.numpy())
        signs |= {*np.sign(parts["weight_scale"].numpy()).ravel().tolist()}
    assert len(modules) == sum(name.endswith("_proj.weight") for name in weights)
    assert signs == {-1.0, 1.0}


def test_a_copy_of_fewer_bits_is_nearer_to_its_source_than_one_rounded_to_the_nearest(source, copies, monkeypatch):
    exact = log_probs_of(source)
    monkeypatch.setattr(schemes, "LARGEST", {8: 127, 4: 7, 3: 3, 2: 1})  # by which they are not refused

    for scheme in ("int3", "int2"):
        rounded = write_quantized(source, source.parent / f"rounded-{scheme}", scheme)
        errors = [np.square(log_probs_of(path) - exact).mean() for path in (copies(scheme), rounded)]
        assert errors[0] < 0.6 * errors[1]


def test_a_killed_calibration_goes_on_with_the_next_layer(source, copy, tmp_path, monkeypatch):
    write, written = quantized_copy._write, []

    def interrupted(path, *options):
        if len(written) == 1:
            raise KeyboardInterrupt
        written.append(path)
        write(path, *options)

    with monkeypatch.context() as patch:
        patch.setattr(quantized_copy, "_write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write_quantized(source, tmp_path, "int4", calibration=TEXTS)
    assert [path.parent for path in written] == [tmp_path / CALIBRATED]
    monkeypatch.setattr(quantized_copy, "_write", lambda path, *options: written.append(path) or write(path, *options))

    write_quantized(source, tmp_path, "int4", calibration=TEXTS)

    assert len({*written}) == len(written)
    for file in copy.iterdir():
        assert (tmp_path / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize("source", ["experts"], indirect=True)
def test_a_weight_with_too_few_tokens_is_rounded_and_named(source, tmp_path, caplog):
    path = write_quantized(source, tmp_path / "few", "int4", calibration=TEXTS[:1, :8])

    exact, ours, rounded = (floats(p) for p in (source, path, write_quantized(source, tmp_path / "rounded", "int4")))
    for name, w in exact.items():
        # Its scales are those whose squared errors add up to least.
        assert np.square(ours[name] - w).sum() <= np.square(rounded[name] - w).sum()
    lines = [record.getMessage() for record in caplog.records if "fewer tokens" in record.getMessage()]
    assert [line.partition(":")[0] for line in lines] == ["layer 0", "layer 1"]
    assert "model.layers.1.self_attn.o_proj.weight" in lines[1]


@pytest.mark.parametrize("scheme", ["int3", "int2"])
def test_few_bits_without_texts_are_refused(source, tmp_path, scheme):
    with pytest.raises(ValueError, match=rf"scheme='{scheme}' needs calibration texts.*\(--method gptq\)"):
        write_quantized(source, tmp_path / "copy", scheme)
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (TEXTS.astype(np.float32), "must be an array of token ids"),
        (TEXTS[0], "must be an array of token ids"),
        (TEXTS[:0], "at least one"),
        (np.zeros((1, 300), np.int32), "in texts of up to 256"),
        (TEXTS + 1, "ids of the 96 tokens"),
        (TEXTS - 1, "ids of the 96 tokens"),
        (TEXTS[:, ::-1], "was rounded for other calibration texts"),
        (None, "was rounded for other calibration texts"),
    ],
)
def test_texts_that_do_not_fit_are_refused(copy, source, texts, message):
    with pytest.raises(ValueError, match=message):
        write_quantized(source, copy, "int4", calibration=texts)
