"""Any value in any place of a checkpoint's files is read, or refused by the file's path, the key and the value."""

from __future__ import annotations

import copy
import json
import math

import numpy as np
import pytest
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from jaxinfer.checkpoint import Checkpoint, load_params, read_config
from jaxinfer.checkpoint.draft_heads import DESCRIPTION, FURTHER, SHAPES, TENSORS, load_draft_heads
from jaxinfer.checkpoint.safetensors_file import read_header
from jaxinfer.engine.speculation.load import drafter_of
from jaxinfer.model.config import ModelConfig
from jaxinfer.text.tokenizer import Tokenizer
from tests.hostile.mutations import MUTATIONS, mutated_json, mutated_safetensors, read_mutants
from tests.oracles import CONFIGS, FAMILY_SIZES, SIZES, save_random_checkpoint

WRONG = [
    *(None, True, False, -1, 0, 7, 2**31, 10**30, 0.5, -2.5, 1e300, math.nan, math.inf),
    *("", "x", "[1]", [], [1], [None], ["x"], [[]], {}, {"x": 1}, {"x": {}}),
]
SIZE_KEYS = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
CONFIG_KEYS = [
    *SIZE_KEYS,
    *("model_type", "architectures", "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps"),
    *("rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings", "tie_word_embeddings"),
    *("attention_bias", "mlp_bias", "hidden_act", "partial_rotary_factor", "rope_interleaved", "is_causal"),
    *("quantization_config", "compression_config", "use_sliding_window", "sliding_window", "max_window_layers"),
    *("layer_types", "eos_token_id"),
]
ROPE_KEYS = [
    *("rope_type", "type", "factor", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"),
    *("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor"),
    "truncate",
]
ROPES = {
    "linear": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
}


def config_of(folder, hf):
    (folder / "config.json").write_text(json.dumps(hf))
    return read_config(folder)


def assert_named(refusal, *names):
    for name in names:
        assert any(form in str(refusal) for form in (str(name), repr(name)))


@pytest.mark.parametrize("value", WRONG, ids=repr)
@pytest.mark.parametrize("family", CONFIGS)
def test_a_wrong_value_in_config_json_is_refused_by_its_own_name(tmp_path, family, value):
    for key in CONFIG_KEYS:
        for window in ({}, {"use_sliding_window": True, "sliding_window": 8}):
            hf = {"model_type": family, **SIZES, **FAMILY_SIZES.get(family, {}), **window, key: value}
            try:
                assert isinstance(config_of(tmp_path, hf), ModelConfig)
                _ = Checkpoint(tmp_path).eos_token_ids
            except ValueError as refusal:
                if not window:
                    assert_named(refusal, tmp_path / "config.json", key, value)


@pytest.mark.parametrize("value", WRONG, ids=repr)
@pytest.mark.parametrize("kind", ROPES)
def test_a_wrong_value_among_the_rope_parameters_is_refused_by_its_own_name(tmp_path, kind, value):
    for key in ROPE_KEYS:
        rope = {"type": kind, **ROPES[kind], key: value}
        try:
            config_of(tmp_path, {"model_type": "llama", **SIZES, "rope_scaling": rope})
        except ValueError as refusal:
            assert_named(refusal, tmp_path / "config.json", key, value)


@pytest.mark.parametrize("value", WRONG, ids=repr)
def test_a_wrong_value_in_generation_config_json_is_refused(tmp_path, value):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    try:
        assert all(isinstance(token_id, int) for token_id in Checkpoint(tmp_path).eos_token_ids)
    except ValueError as refusal:
        assert_named(refusal, tmp_path / "generation_config.json", "eos_token_id", value)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    path = save_random_checkpoint(tmp_path_factory.mktemp("sharded"), "llama", shard_size="20KB")
    return path, read_config(path)


@pytest.mark.parametrize("value", [value for value in WRONG if not value or not isinstance(value, str)], ids=repr)
def test_a_wrong_file_name_in_the_index_is_refused(sharded, value):
    path, config = sharded
    file = path / "model.safetensors.index.json"
    content = json.loads(file.read_text())
    try:
        file.write_text(json.dumps({"weight_map": content["weight_map"] | {"lm_head.weight": value}}))
        with pytest.raises(ValueError, match="download") as refusal:
            load_params(path, config, "float32")
        assert_named(refusal.value, file, "lm_head.weight", value)
        file.write_text(json.dumps({"weight_map": value}))
        with pytest.raises(ValueError, match="no weight_map|no file for x|do not fit") as refusal:
            load_params(path, config, "float32")
    finally:
        file.write_text(json.dumps(content))


@pytest.mark.parametrize("value", WRONG, ids=repr)
def test_a_wrong_entry_in_a_safetensors_header_is_refused(tmp_path, value):
    entry = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
    file = tmp_path / "model.safetensors"
    wrong = [
        value,
        *({**entry, key: value} for key in entry),
        *({**entry, key: [value, entry[key][1]]} for key in ("shape", "data_offsets")),
    ]
    for content in wrong:
        header = json.dumps({"lm_head.weight": content}).encode()
        file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
        try:
            (tensor,) = read_header(file).values()
        except ValueError as refusal:
            assert_named(refusal, file, "lm_head.weight", content)
        else:
            assert content == entry or not isinstance(content["dtype"], str) or tensor.dtype != "F32"


@pytest.mark.parametrize("content", ["[" * 100_000, '{"a": ' * 100_000, "9" * 5000, "", "\0", "[1]", "null"])
def test_what_is_no_json_object_is_refused_wherever_it_stands(tmp_path, content):
    names = ["config.json", "generation_config.json", "tokenizer.json"]
    reads = (read_config, lambda path: Checkpoint(path).eos_token_ids, Tokenizer.from_path)
    for name, read in zip(names, reads, strict=True):
        (tmp_path / name).write_text(content)
        with pytest.raises(ValueError, match="download it again") as refusal:
            read(tmp_path)
        assert str(tmp_path / name) in str(refusal.value)
        (tmp_path / name).unlink()
    file, header = tmp_path / "model.safetensors", content.encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ValueError, match=r"model\.safetensors .*download it again"):
        read_header(file)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_mutated_checkpoint_is_refused_by_its_path_or_read_whole(tmp_path, name):
    path = save_random_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    whole, rng = (path / name).read_bytes(), np.random.default_rng(0)

    def mutant():
        return mutated_json(json.loads(whole), rng) if name == "config.json" else mutated_safetensors(whole, rng)

    assert len(read_mutants(path, ({name: mutant()} for _ in range(MUTATIONS)))) > MUTATIONS / 4


def places_of(node, path=()):
    """Yields the place of every value in JSON."""
    for key, child in node.items() if isinstance(node, dict) else enumerate(node):
        yield (*path, key)
        if isinstance(child, dict | list):
            yield from places_of(child, (*path, key))


@pytest.mark.parametrize("value", WRONG, ids=repr)
def test_a_wrong_value_in_tokenizer_json_is_refused(tmp_path, value):
    backend = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2, "<end>": 3}, [("a", "b")]))
    backend.add_special_tokens(["<end>"])
    backend.normalizer, backend.decoder = normalizers.NFC(), decoders.ByteLevel()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.post_processor = processors.TemplateProcessing(single="$A <end>", special_tokens=[("<end>", 3)])
    content = json.loads(backend.to_str())
    for place in places_of(content):
        wrong = copy.deepcopy(content)
        parent = wrong
        for key in place[:-1]:
            parent = parent[key]
        parent[place[-1]] = value
        (tmp_path / "tokenizer.json").write_text(json.dumps(wrong))
        try:
            tokenizer = Tokenizer.from_path(tmp_path)
            assert tokenizer is not None
            tokenizer.decode(tokenizer.encode("ab"))
        except ValueError as refusal:
            assert_named(refusal, tmp_path / "tokenizer.json")


@pytest.mark.parametrize("value", [value for value in WRONG if value != 7], ids=repr)
@pytest.mark.parametrize("kind", SHAPES)
def test_a_wrong_number_of_draft_heads_is_refused(tmp_path, kind, value):
    names = {name.removeprefix("2 ") for axes in SHAPES[kind].values() for name in axes}
    numbers = dict.fromkeys([*names, *FURTHER[kind]], 2)
    shapes = {name: [4 if axis.startswith("2 ") else 2 for axis in axes] for name, axes in SHAPES[kind].items()}
    save_file({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, tmp_path / TENSORS)
    for key in ["drafter", *numbers]:
        (tmp_path / DESCRIPTION).write_text(json.dumps({"drafter": kind, **numbers, key: value}))
        try:
            drafter_of(load_draft_heads(tmp_path, "float32"))
        except ValueError as refusal:
            assert_named(refusal, tmp_path, key.replace("drafter", "kind"), value)
        else:
            assert key in FURTHER[kind]
