"""Quantized copies of checkpoints: read back by jaxinfer and by `transformers`, resumed, and refused."""

from __future__ import annotations

import json
import math
import shutil
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from jaxinfer.checkpoint import Checkpoint, load_checkpoint, quantized_copy, read_config
from jaxinfer.checkpoint.quantized_copy import write_quantized
from jaxinfer.checkpoint.stored import StoredQuantized
from jaxinfer.cli.main import main
from jaxinfer.quantization.schemes import SCHEMES
from tests.checkpoint.renamed import edit_json, read_tensors, rewrite
from tests.oracles import reference_logits, save_random_checkpoint
from tests.replay import LENGTHS, SHAPE, SPLITS, replay

SIZES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 64, "intermediate_size": 256, "head_dim": 32},
    "qwen3_moe": {"hidden_size": 64, "moe_intermediate_size": 32, "head_dim": 32},
    "phi3": {"hidden_size": 64, "intermediate_size": 128},
}
ROUNDED = [name for name, scheme in SCHEMES.items() if not scheme.needs_texts]


@pytest.fixture(scope="module", params=SIZES)
def source(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    path = save_random_checkpoint(folder / "whole", request.param, shard_size="100KB", **SIZES[request.param])
    (path / "tokenizer.json").write_text("{}")
    return path


@pytest.fixture(scope="module", params=ROUNDED)
def copy(request, source):
    return write_quantized(source, source.parent / request.param, request.param), request.param


def floats(path):
    _, stored = Checkpoint(path).plan(read_config(path))
    return {name: t.floats() if isinstance(t, StoredQuantized) else t.map() for name, t in stored.items()}


def test_each_weight_is_rounded_to_the_nearest_number_of_its_grid(source, copy):
    path, scheme = copy
    exact, rounded = floats(source), floats(path)
    num_rounded = 0

    assert exact.keys() == rounded.keys()
    for name, w in exact.items():
        if np.array_equal(w, rounded[name]):
            continue
        num_rounded += 1
        size = math.gcd(w.shape[1], 128) if scheme == "int4" else w.shape[1]
        largest = np.abs(w.reshape(len(w), -1, size)).max(-1).repeat(size, axis=-1)
        # Half a step of integers; FP8 has three bits behind the first, and steps of 2^-9 of its smallest scale.
        step = largest / 7 if scheme == "int4" else largest / 127
        bound = np.maximum(np.abs(w) / 16, largest / 448 / 2**10) if scheme == "fp8" else step / 2
        assert (np.abs(w - rounded[name]) <= 1.001 * bound).all(), name
    assert num_rounded == sum(name.endswith("_proj.weight") for name in exact)
    assert not any(word in name for name in exact for word in ("embed", "lm_head") if "proj" in name)


def test_logits_are_those_of_transformers_for_the_same_files(copy):
    path, _ = copy
    params, config = load_checkpoint(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    generator = np.random.default_rng(0)
    sequences = [generator.integers(0, config.vocab_size, length) for length in LENGTHS]

    logits = replay(params, sequences, SPLITS["chunks"], config=config, shape=SHAPE)

    for ours, sequence in zip(logits, sequences, strict=True):
        np.testing.assert_allclose(ours, reference_logits(model, sequence), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        # A dense layer before the experts, with groups of another size.
        ("glm4_moe", {"intermediate_size": 192, "moe_intermediate_size": 128, "first_k_dense_replace": 1}),
        ("deepseek_v2", {"intermediate_size": 192, "moe_intermediate_size": 128, "kv_lora_rank": 128}),
        # Experts whose products have inputs of different sizes.
        ("qwen3_moe", {"moe_intermediate_size": 64}),
    ],
)
def test_transformers_reads_a_copy_whose_experts_differ_from_other_weights_in_their_groups(tmp_path, family, sizes):
    source = save_random_checkpoint(tmp_path / "source", family, hidden_size=256, **sizes)
    copy = write_quantized(source, tmp_path / "copy", "int4")
    exact = floats(copy)
    reference = rewrite(shutil.copytree(source, tmp_path / "reference"), lambda tensors: tensors)
    rewrite(
        reference, lambda t: {n: torch.tensor(np.array(exact[n], np.float32)).reshape(w.shape) for n, w in t.items()}
    )
    tokens = np.random.default_rng(0).integers(0, 90, 20)

    ours, theirs = (
        transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        for path in (copy, reference)
    )

    np.testing.assert_allclose(reference_logits(ours, tokens), reference_logits(theirs, tokens), rtol=0, atol=1e-4)


def test_a_copy_has_the_files_and_the_index_of_its_source(source, copy):
    path, _ = copy

    assert {file.name for file in path.iterdir()} == {file.name for file in source.iterdir()}
    index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == read_tensors(path).keys()
    assert all(name in read_tensors_of(path / file) for name, file in index.items())


def read_tensors_of(file):
    from safetensors import safe_open

    with safe_open(file, "pt") as tensors:
        return set(tensors.keys())


def test_an_interrupted_copy_goes_on_with_the_next_file(source, tmp_path, monkeypatch):
    write, written = quantized_copy._write, []

    def interrupted(path, *options):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(path.name)
        write(path, *options)

    expected = write_quantized(source, tmp_path / "whole", "int4")
    with monkeypatch.context() as patch:
        patch.setattr(quantized_copy, "_write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write_quantized(source, tmp_path / "parts", "int4")
    with pytest.raises(ValueError, match="has no config.json"):
        load_checkpoint(tmp_path / "parts")
    monkeypatch.setattr(
        quantized_copy, "_write", lambda path, *options: written.append(path.name) or write(path, *options)
    )

    other = edit_json(shutil.copytree(source, tmp_path / "other"), rms_norm_eps=1e-3)
    with pytest.raises(ValueError, match="or from another checkpoint; give the same"):
        write_quantized(other, tmp_path / "parts", "int4")
    path = write_quantized(source, tmp_path / "parts", "int4")

    files = sorted(file.name for file in source.glob("*.safetensors"))
    assert sorted(written) == files
    assert len(files) > 2
    for file in expected.iterdir():
        assert (path / file.name).read_bytes() == file.read_bytes()


def test_a_file_that_cannot_be_written_whole_leaves_nothing(source, tmp_path, monkeypatch):
    monkeypatch.setattr(quantized_copy, "words", lambda *_: 1 / 0)

    with pytest.raises(ZeroDivisionError):
        write_quantized(source, tmp_path / "copy", "int4")

    assert list((tmp_path / "copy").iterdir()) == []


def test_groups_of_zeros_stay_zeros(source, tmp_path):
    path = save_random_checkpoint(tmp_path / "zeros", "llama", **SIZES["llama"])
    rewrite(path, lambda tensors: {name: t * (not name.endswith("q_proj.weight")) for name, t in tensors.items()})

    for scheme in ROUNDED:
        rounded = floats(write_quantized(path, tmp_path / scheme, scheme))
        assert not rounded["model.layers.0.self_attn.q_proj.weight"].any()


def test_what_cannot_be_copied_is_refused(source, copy, tmp_path):
    path, scheme = copy
    other = next(name for name in ROUNDED if name != scheme)

    with pytest.raises(ValueError, match="packed already, by compressed-tensors"):
        write_quantized(path, tmp_path / "again", "int4")
    with pytest.raises(ValueError, match="exists and is no part of this copy"):
        write_quantized(source, path, other)
    with pytest.raises(ValueError, match="is the checkpoint itself"):
        write_quantized(source, source, scheme)
    with pytest.raises(
        ValueError, match=r"scheme='int5' is not allowed: scheme must be one of int4, int3, int2, int8, fp8"
    ):
        write_quantized(source, tmp_path / "other", "int5")


def test_the_command_says_what_the_copy_takes(source, tmp_path, capsys):
    assert main(["quantize", str(source), str(tmp_path / "copy"), "--scheme", "int8"]) == 0

    shown = capsys.readouterr().out
    assert shown.startswith(f"{tmp_path / 'copy'}: ")
    assert "MB of weights" in shown
    assert (tmp_path / "copy" / "config.json").is_file()
