"""Weights arrive where they belong, bit for bit, or are all named in one error."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from jax.tree_util import keystr, tree_leaves_with_path

from jaxinfer.checkpoint import load_params, read_config
from jaxinfer.checkpoint.config_json.family import EMBEDDING, embedding_name
from jaxinfer.checkpoint.families.llama import WEIGHTS
from jaxinfer.checkpoint.making.assemblies import plan_assembly
from jaxinfer.model.config import Branch, LayerGroup, scan_sizes
from jaxinfer.model.params import shardings
from jaxinfer.quantization import QuantizedArray
from tests.oracles import load_reference, save_random_checkpoint

VARIANTS = [
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"tie_word_embeddings": True, "head_dim": 10}),
    ("qwen2", {}),
    ("qwen3", {}),
    ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_random_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture
def copied(llama, tmp_path):
    """A copy to damage, its tensors, and a function that writes them back."""
    path = shutil.copytree(llama, tmp_path / "copy")
    tensors = safetensors.numpy.load_file(path / "model.safetensors")
    return path, tensors, lambda: safetensors.numpy.save_file(tensors, path / "model.safetensors")


def load(path, dtype="float32", **options):
    config = dataclasses.replace(read_config(path), **options)
    return load_params(path, config, dtype)


def assert_same(params, others) -> None:
    assert jax.tree.structure(params) == jax.tree.structure(others)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), params, others)


def heads_first(tensor: np.ndarray, num_heads: int) -> np.ndarray:
    return tensor.reshape(num_heads, -1, *tensor.shape[1:])


def expected_layer(state: dict[str, np.ndarray], layer: int, config) -> dict[str, np.ndarray]:
    """The tensors of one layer in our layout, built from the state dict by hand."""
    attention = config.layers[layer].mixer
    module = {f"mixer.{name}": f"self_attn.{name}_proj" for name in ("q", "k", "v", "o")}
    module |= {f"feed_forward.{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    names = {name: f"{stored}.weight" for name, stored in module.items()}
    names |= {f"{name}_bias": f"{stored}.bias" for name, stored in module.items()}
    names |= {f"mixer.{name}": f"self_attn.{name}.weight" for name in ("q_norm", "k_norm")}
    names |= {"mixer_norm": "input_layernorm.weight", "feed_forward_norm": "post_attention_layernorm.weight"}
    names = {ours: f"model.layers.{layer}.{stored}" for ours, stored in names.items()}
    tensors = {ours: state[stored] for ours, stored in names.items() if stored in state}
    heads = {"q": attention.num_heads, "k": attention.num_kv_heads, "v": attention.num_kv_heads}
    for name in {f"mixer.{name}{suffix}" for name in heads for suffix in ("", "_bias")} & tensors.keys():
        tensors[name] = heads_first(tensors[name], heads[name.removeprefix("mixer.")[0]])
    return tensors


@pytest.mark.parametrize("layer_groups", [(3,), (1, 1, 1), (1, 2)])
@pytest.mark.parametrize(("family", "overrides"), VARIANTS)
def test_every_tensor_equals_that_of_the_state_dict(tmp_path, family, overrides, layer_groups):
    path = save_random_checkpoint(tmp_path, family, **overrides)
    config = read_config(path).regrouped(layer_groups)
    params = load_params(path, config, jnp.float32)
    state = {name: tensor.numpy() for name, tensor in load_reference(path).state_dict().items()}
    np.testing.assert_array_equal(params.embedding, state.pop("model.embed_tokens.weight"))
    np.testing.assert_array_equal(params.final_norm, state.pop("model.norm.weight"))
    if config.has_tied_embeddings:
        assert params.unembedding is None
    else:
        np.testing.assert_array_equal(params.unembedding, state.pop("lm_head.weight"))
    layers = [(group, i) for group, n in zip(params.layers, layer_groups, strict=True) for i in range(n)]
    for layer, (group, i) in enumerate(layers):
        expected = expected_layer(state, layer, config)
        loaded = {keystr(path, simple=True, separator="."): leaf for path, leaf in tree_leaves_with_path(group)}
        assert set(loaded) == set(expected)
        for name, tensor in expected.items():
            np.testing.assert_array_equal(loaded[name][i], tensor, err_msg=name)


def test_sharded_checkpoint_equals_single_file(llama, tmp_path):
    sharded = save_random_checkpoint(tmp_path, "llama", shard_size="20KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert_same(load(sharded), load(llama))


def test_bfloat16_checkpoint_keeps_every_bit(llama, tmp_path):
    model = load_reference(llama).bfloat16()
    model.save_pretrained(tmp_path)
    bits = model.lm_head.weight.view(torch.int16).detach().numpy()
    loaded = load(tmp_path, jnp.bfloat16).unembedding
    assert loaded.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(loaded).view(np.int16), bits)


def test_bfloat16_checkpoint_widens_exactly(llama, tmp_path):
    model = load_reference(llama).bfloat16()
    model.save_pretrained(tmp_path)
    np.testing.assert_array_equal(load(tmp_path).unembedding, model.lm_head.weight.detach().float().numpy())


def test_float32_checkpoint_is_rounded_to_bfloat16_as_torch_rounds(llama):
    expected = load_reference(llama).lm_head.weight.detach().to(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(load(llama, "bfloat16").unembedding.astype(jnp.float32), expected)


def rounded(w: np.ndarray, largest: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the integers i8[..., inputs] and scales f32[..., groups] of weights, in float32 as they always were."""
    groups = np.asarray(w, np.float32).reshape(*w.shape[:-1], -1, size)
    most = np.abs(groups).max(-1, keepdims=True)
    scales = np.where(most > 0, most * np.float32(1 / largest), np.float32(1))
    return np.rint(groups * (np.float32(1) / scales)).astype(np.int8).reshape(w.shape), scales[..., 0]


def halves_packed(integers: np.ndarray, size: int) -> np.ndarray:
    """Returns the bytes of groups of integers, of which the second half lies in the high bits."""
    low, high = np.split(integers.reshape(*integers.shape[:-1], -1, size), 2, axis=-1)
    return (low & 15 | high << 4).reshape(*integers.shape[:-1], -1)


# One tensor per layer, per layer and expert, and per layer with all experts, whose inputs are not its last axis.
@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt_oss"])
def test_weights_are_rounded_as_they_are_read_to_the_bits_of_numpy(tmp_path, monkeypatch, family):
    path = save_random_checkpoint(tmp_path, family)
    config = read_config(path)
    config = config.regrouped(scan_sizes(config.layers))
    floats = load_params(path, config, "bfloat16")
    # Some rows of a head or of an expert.
    monkeypatch.setattr("jaxinfer.checkpoint.making.reading.NUMBERS_AT_ONCE", 100)
    for quantization in ("int8", "int4"):
        loaded = load_params(path, config, "bfloat16", quantization=quantization)
        leaves = jax.tree.leaves(loaded, is_leaf=lambda leaf: isinstance(leaf, QuantizedArray))
        pairs = list(zip(leaves, jax.tree.leaves(floats), strict=True))
        for own, w in pairs:
            if not isinstance(own, QuantizedArray):
                np.testing.assert_array_equal(own, w)
                continue
            bits = 8 if quantization == "int8" or own is loaded.unembedding else 4
            size = w.shape[-1] if bits == 8 else math.gcd(w.shape[-1], 128)
            values, scales = rounded(np.asarray(w), 127 if bits == 8 else 7, size)
            np.testing.assert_array_equal(own.values, values if bits == 8 else halves_packed(values, size))
            np.testing.assert_array_equal(own.scales, scales)
        assert sum(isinstance(own, QuantizedArray) for own, _ in pairs) >= 8


def test_every_misfit_is_listed_in_one_error(copied):
    path, tensors, write = copied
    del tensors["model.norm.weight"], tensors["lm_head.weight"]
    tensors["model.layers.3.mlp.up_proj.weight"] = np.zeros((48, 32), np.float32)
    tensors["model.layers.1.self_attn.k_proj.weight"] = np.zeros((16, 31), np.float32)
    tensors["model.layers.0.self_attn.q_proj.weight"] = np.zeros((32, 32), np.int8)
    write()
    with pytest.raises(ValueError, match=r"5 tensors in .* do not fit its config\.json") as refusal:
        load(path)
    lines = {line.strip() for line in str(refusal.value).splitlines()[1:]}
    assert lines == {
        "missing: model.norm.weight (32,)",
        "missing: lm_head.weight (96, 32)",
        "unexpected: model.layers.3.mlp.up_proj.weight (48, 32)",
        "mis-shaped: model.layers.1.self_attn.k_proj.weight expected (16, 32), found (16, 31)",
        "unsupported dtype: model.layers.0.self_attn.q_proj.weight is I8, not one of F64, F32, F16, BF16",
    }


def test_a_table_without_some_tensors_of_the_model_is_refused_with_their_fields(llama):
    weights = {name: target for name, target in WEIGHTS.items() if "q_proj" not in name and "up_proj" not in name}

    with pytest.raises(RuntimeError, match=r"tensors layers\.feed_forward\.up, layers\.mixer\.q, which"):
        plan_assembly(read_config(llama), weights)


Q_PROJ = "model.layers.{layer}.self_attn.q_proj.weight"
WRONG_LINES = {
    "another field": (Q_PROJ, ("layers.mixer.qq", "(N H) D -> N H D"), r"layers\.mixer\.q, which.*names .*mixer\.qq"),
    "no pattern": (
        Q_PROJ,
        ("layers.mixer.q",),
        r"has \('layers\.mixer\.q',\) for 'model.*a field of Params and a pattern",
    ),
    "another brace": (
        "model.layers.{i}.q",
        ("layers.mixer.q", "(N H) D -> N H D"),
        r"names 'model\.layers\.\{i\}\.q'; ",
    ),
}


@pytest.mark.parametrize(("name", "target", "message"), WRONG_LINES.values(), ids=WRONG_LINES)
def test_a_wrong_line_of_a_table_is_named(llama, name, target, message):
    weights = {name: target for name, target in WEIGHTS.items() if "q_proj" not in name}

    with pytest.raises(RuntimeError, match=message):
        plan_assembly(read_config(llama), {**weights, name: target})


def test_branches_whose_tensors_have_the_same_names_are_refused(llama):
    config = read_config(llama)
    twins = tuple(Branch(mixer=mixer) for mixer in 2 * config.layers[0].mixers)
    layer = dataclasses.replace(config.layers[0], mixer=twins)

    with pytest.raises(RuntimeError, match="two Branches whose mixers have tensors of the same names"):
        plan_assembly(dataclasses.replace(config, groups=(LayerGroup((layer,), config.num_layers),)), WEIGHTS)


def test_a_table_without_an_embedding_is_refused():
    weights = {name: target for name, target in WEIGHTS.items() if target != EMBEDDING}

    with pytest.raises(RuntimeError, match="Family.weights.* has no name for .*embedding"):
        embedding_name(weights)


def test_stored_rotary_frequencies_are_ignored(copied, llama):
    path, tensors, write = copied
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
    write()
    assert_same(load(path), load(llama))


def test_tied_checkpoint_may_repeat_its_embedding(copied):
    path, tensors, write = copied
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    write()
    assert load(path, has_tied_embeddings=True).unembedding is None


@pytest.mark.parametrize("kept", [0.9999, 0.5, 0.0001, 0.0])
def test_truncated_file_is_refused_with_its_name_and_size(copied, kept):
    path, *_ = copied
    file = path / "model.safetensors"
    size = int(file.stat().st_size * kept)
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ValueError, match=r"model\.safetensors.*download it again") as refusal:
        load(path)
    assert f"{size} bytes" in str(refusal.value)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 12]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [8, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]},
        {"dtype": "F32", "shape": [1]},
        "nothing",
    ],
)
def test_damaged_header_is_refused(copied, entry):
    path, *_ = copied
    header = json.dumps({"lm_head.weight": entry}).encode()
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ValueError, match=r"model\.safetensors has a damaged header.*download the file again"):
        load(path)


def test_missing_shard_is_named(tmp_path):
    path = save_random_checkpoint(tmp_path, "llama", shard_size="20KB")
    shard = sorted(path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ValueError, match=f"lacks {shard.name}"):
        load(path)


def test_index_without_weight_map_is_refused(copied):
    path, *_ = copied
    (path / "model.safetensors").unlink()
    (path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match="no weight_map"):
        load(path)


def test_pickled_checkpoint_is_refused_with_the_command_that_converts_it(copied):
    path, *_ = copied
    expected = load(path)
    torch.save(safetensors.torch.load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()

    with pytest.raises(ValueError, match=r"only pytorch_model\.bin: pickles.* python -c ") as refusal:
        load(path)

    program = str(refusal.value).partition('python -c "')[2].removesuffix('"')
    exec(program, {})
    assert_same(load(path), expected)


def test_placement_for_other_layer_groups_is_refused(llama):
    config = read_config(llama)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("model",))
    placement = shardings(config.regrouped((1, 2)), mesh)
    with pytest.raises(ValueError, match=r"layer_groups=\(3,\); build it from the config"):
        load_params(llama, config, "float32", placement=placement)


def test_progress_is_shown_only_when_asked_for(llama, lines_at_once, capsys):
    config = read_config(llama)
    load_params(llama, config, "float32")
    assert capsys.readouterr().err == ""
    load_params(llama, config, "float32", show_progress=True)
    assert "loading: 100%, 30 of 30" in capsys.readouterr().err
