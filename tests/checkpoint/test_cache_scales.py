"""Scales of keys and values that a checkpoint states: a cache in fp8 rounds by them, and no other cache does."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.llama import modeling_llama

from jaxinfer import load_checkpoint
from jaxinfer.checkpoint import read_config
from jaxinfer.model.params import fit_params
from tests.checkpoint.packing import WRITERS, settings_of
from tests.checkpoint.renamed import Tensors, edit_json, rewrite
from tests.compiler import layers_apart
from tests.oracles import load_reference, reference_logits, save_random_checkpoint
from tests.replay import LENGTHS, SHAPE, SPLITS, replay

SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True, "group_size": None}
SETTINGS: dict[str, Any] = {
    **{"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}},
    "kv_cache_scheme": SCHEME | {"observer": "minmax"},
}
# Of keys and of values, for layers in turn. By the last one most values are larger than 448.
SCALES = ((0.013, 0.021), (0.37, 1e-3))


def with_scales(folder: Path, shape: tuple[int, ...] = (1,), dtype: torch.dtype = torch.float32) -> Path:
    """Adds the scales to a checkpoint, as llm-compressor writes them."""

    def change(tensors: Tensors) -> Tensors:
        for name in [name for name in tensors if name.endswith("self_attn.k_proj.weight")]:
            module, layer = name.removesuffix("k_proj.weight"), int(name.split(".")[2])
            for part, scale in zip(("k_scale", "v_scale"), SCALES[layer % 2], strict=True):
                tensors[module + part] = torch.full(shape, scale, dtype=dtype)
        return tensors

    return rewrite(edit_json(folder, quantization_config=SETTINGS), change)


@pytest.fixture(autouse=True)
def each_layer_has_its_own_scales():
    with layers_apart():
        yield


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    return save_random_checkpoint(tmp_path_factory.mktemp("plain"), "llama", num_hidden_layers=2)


@pytest.fixture
def scaled(plain, tmp_path) -> Path:
    return with_scales(shutil.copytree(plain, tmp_path / "scaled"))


def through_fp8(x: torch.Tensor, scale: float) -> torch.Tensor:
    """Returns x as it reads after it was divided by the scale and kept in fp8, which holds up to 448."""
    return (x / torch.tensor(scale)).clamp(-448, 448).to(torch.float8_e4m3fn).float() * torch.tensor(scale)


def attend_through_fp8(module, query, key, value, *args, **kwargs):
    k_scale, v_scale = SCALES[module.layer_idx]
    return attend(module, query, through_fp8(key, k_scale), through_fp8(value, v_scale), *args, **kwargs)


attend = modeling_llama.eager_attention_forward


@pytest.mark.parametrize(("dtype", "attention"), [("float8_e4m3fn", attend_through_fp8), ("float32", attend)])
def test_a_cache_in_fp8_rounds_by_the_scales_and_a_wider_one_does_not(plain, scaled, dtype, attention, monkeypatch):
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", attention)
    params, config = load_checkpoint(scaled)
    generator = np.random.default_rng(0)
    sequences = [generator.integers(0, config.vocab_size, n) for n in LENGTHS]

    logits = replay(params, sequences, SPLITS["chunks"], config=config, shape=SHAPE, cache_dtype=dtype)

    reference = load_reference(plain)
    for own, tokens in zip(logits, sequences, strict=True):
        expected = reference_logits(reference, tokens)
        # A number on the edge between two of fp8 may be rounded to either.
        np.testing.assert_allclose(own, expected, rtol=0, atol=1e-4 if dtype == "float32" else 2e-3)


def test_scales_are_those_of_all_copies_of_a_head(tmp_path):
    """The parameters of eight devices, on one of them."""
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2}
    folder = with_scales(save_random_checkpoint(tmp_path / "scaled", "llama", **sizes))
    params, config = load_checkpoint(folder)
    wide = config.for_devices(8)
    sequences = [np.random.default_rng(0).integers(0, config.vocab_size, n) for n in LENGTHS]
    options: dict[str, Any] = {"shape": SHAPE, "cache_dtype": "float8_e4m3fn"}

    fitted = fit_params(params, wide)
    logits = replay(fitted, sequences, SPLITS["chunks"], config=wide, **options)

    expected = replay(params, sequences, SPLITS["chunks"], config=config, **options)
    for own, one in zip(logits, expected, strict=True):
        np.testing.assert_allclose(own, one, rtol=0, atol=1e-5)
    assert fitted.layers[0].mixer.k.shape[1] == 8


@pytest.mark.parametrize(("shape", "dtype"), [((), torch.float32), ((1,), torch.bfloat16)], ids=str)
def test_a_scale_may_have_any_type_of_floats_and_no_axis(plain, tmp_path, shape, dtype):
    params, _ = load_checkpoint(with_scales(shutil.copytree(plain, tmp_path / "scaled"), shape, dtype))

    for layer, scales in zip(params.layers, SCALES, strict=True):
        read = [np.asarray(scale).tolist() for scale in (layer.mixer.k_scale, layer.mixer.v_scale)]
        assert read == [[[float(torch.tensor(scale, dtype=dtype))]] for scale in scales]


FORMER = {
    "of products": {"k_scale": "k_proj.output_scale", "v_scale": "v_proj.output_scale"},
    "in products": {"k_scale": "k_proj.k_scale", "v_scale": "v_proj.v_scale"},
    "of both": {"k_scale": "kv_scale"},
}


def renamed(path: Path, names: dict[str, str]) -> Path:
    def change(tensors: Tensors) -> Tensors:
        found = {name: w for name, w in tensors.items() if not name.endswith(("k_scale", "v_scale"))}
        for name in tensors.keys() - found.keys():
            module, _, own = name.rpartition(".")
            found |= {f"{module}.{names[own]}": tensors[name]} if own in names else {}
        return found

    return rewrite(path, change)


@pytest.mark.parametrize("names", FORMER.values(), ids=FORMER)
def test_scales_under_older_names_are_the_same(scaled, names):
    params, _ = load_checkpoint(renamed(scaled, names))

    for layer, (k, v) in zip(params.layers, SCALES, strict=True):
        scales = [np.asarray(scale).item() for scale in (layer.mixer.k_scale, layer.mixer.v_scale)]
        np.testing.assert_allclose(scales, [k, v if "v_scale" in names else k], rtol=1e-6)


@pytest.mark.parametrize("names", FORMER.values(), ids=FORMER)
def test_the_static_scheme_of_autofp8_has_scales_of_keys_and_values(plain, tmp_path, names):
    packed = WRITERS["fp8"](plain, tmp_path / "both", block=None).path
    settings = settings_of(packed) | {"kv_cache_scheme": "static"}
    path = edit_json(renamed(with_scales(packed), names), quantization_config=settings)

    params, _ = load_checkpoint(path)

    assert [np.asarray(layer.mixer.k_scale).item() for layer in params.layers] == pytest.approx([k for k, _ in SCALES])


@pytest.mark.parametrize("scheme", ["dynamic", {"num_bits": 4}, ["static"]], ids=str)
def test_another_scheme_of_fp8_is_refused_by_name(plain, tmp_path, scheme):
    path = WRITERS["fp8"](plain, tmp_path / "both", block=None, kv_cache_scheme=scheme).path

    with pytest.raises(ValueError, match="kv_cache_scheme=.*a static scale per tensor of FP8 is read"):
        load_checkpoint(path)


def test_a_scale_under_two_names_is_refused(scaled):
    name = "model.layers.0.self_attn.kv_scale"
    rewrite(scaled, lambda tensors: tensors | {name: torch.ones(1)})

    with pytest.raises(ValueError, match=f"k_scale is there twice, once as {name}"):
        load_checkpoint(scaled)


@pytest.mark.parametrize(
    "changes",
    [{"num_bits": 4}, {"type": "int"}, {"strategy": "attn_head"}, {"dynamic": True}, {"symmetric": False}],
    ids=str,
)
def test_a_scheme_that_is_not_honoured_is_refused_by_name(scaled, changes):
    edit_json(scaled, quantization_config=SETTINGS | {"kv_cache_scheme": SCHEME | changes})

    with pytest.raises(ValueError, match="kv_cache_scheme=.*a static scale per tensor of FP8 is read; remove it"):
        read_config(scaled)


def test_layers_with_latents_are_refused_with_a_scheme(tmp_path):
    path = save_random_checkpoint(tmp_path / "latents", "deepseek_v3")
    edit_json(path, quantization_config=SETTINGS)

    with pytest.raises(ValueError, match="kv_cache_scheme is not supported for layers with latent attention"):
        read_config(path)


NAME = "model.layers.1.self_attn.v_scale"
WRONG = {
    "absent": (None, rf"missing: {NAME}"),
    "of heads": (torch.ones(2, 1, 1), rf"{NAME} is F32 \(2, 1, 1\), not one number of F16 or BF16 or F32"),
    "integers": (torch.ones(1, dtype=torch.int32), rf"{NAME} is I32 \(1,\), not one number"),
    "zero": (torch.zeros(1), rf"{NAME} is 0.0, not between"),
    "no number": (torch.full((1,), torch.nan), rf"{NAME} is nan, not between"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_scale_that_is_none_is_refused_by_name(scaled, case):
    tensor, message = WRONG[case]

    def change(tensors: Tensors) -> Tensors:
        del tensors[NAME]
        return tensors if tensor is None else tensors | {NAME: tensor}

    rewrite(scaled, change)

    with pytest.raises(ValueError, match=message):
        load_checkpoint(scaled)


def test_scales_without_a_scheme_are_refused_by_name(scaled):
    edit_json(scaled, quantization_config=...)

    with pytest.raises(ValueError, match=r"unexpected: model.layers.0.self_attn.k_scale \(1,\)"):
        load_checkpoint(scaled)
