"""An engine on a GGUF: tokens, texts and settings come from the one file."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import huggingface_hub
import jax
import numpy as np
import pytest
import torch

from jaxinfer.checkpoint import (
    Checkpoint,
    abstract_checkpoint,
    load_checkpoint,
    read_config,
    resolve_checkpoint,
)
from jaxinfer.checkpoint.draft_layers import is_eagle3
from jaxinfer.checkpoint.quantized_copy import write_quantized
from jaxinfer.config import SamplingParams
from jaxinfer.parallel.placement import Placement
from jaxinfer.quantization import PACKED, PackedBlocks
from jaxinfer.quantization.quantized_array import QuantizedArray
from tests.compiler import integers_as_on_tpu, layers_apart
from tests.engine.engines import (
    content_of,
    crowded_engine,
    forget_prefixes,
    random_prompts,
    run_with_arrivals,
    small_engine,
    spelled,
)
from tests.gguf.gguf_files import add_vocabulary, save_gguf
from tests.oracles import load_reference

PROMPT = "Say a word"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Returns a file like those of Q4_K_M, whose types differ by layer, and its float32 reference."""
    kinds = {"token_embd": "Q6_K", "blk.1.ffn_down": "Q6_K", "attn_v": "Q6_K", "blk.2.attn_q": "Q8_0", "output": "Q5_0"}
    return save_gguf(
        tmp_path_factory.mktemp("gguf"),
        "llama",
        lambda name: next((kind for part, kind in kinds.items() if part in name), "Q4_K"),
        add=add_vocabulary,
        vocab_size=97,
        num_hidden_layers=3,
    )


@pytest.fixture(scope="module")
def llm(files):
    return small_engine(files[0])


def test_greedy_tokens_are_those_of_transformers_on_the_dequantized_weights(llm, files):
    ids = llm.tokenizer.encode(PROMPT)
    prompt = torch.tensor([ids])
    options = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    reference: Any = load_reference(files[1])
    tokens = reference.generate(prompt, max_new_tokens=24, **options)
    expected = tokens[0, len(ids) :].tolist()

    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, log_probs=0)
    (completion,) = llm.generate([PROMPT], greedy)

    logits = reference(tokens).logits[0, len(ids) - 1 : -1].detach()
    log_probs = torch.log_softmax(logits, -1).numpy()[range(len(expected)), expected]
    np.testing.assert_allclose(completion.log_probs, log_probs, atol=1e-4)
    assert ids[0] == 0
    assert list(completion.token_ids) == expected
    assert completion.text == spelled(expected)


def test_settings_come_from_the_metadata(llm, files):
    assert llm.default_sampling_params.temperature == 0.7
    (completion,) = llm.chat([{"role": "user", "content": "a"}], SamplingParams(max_tokens=1))
    assert len(completion.token_ids) == 1


def test_packed_weights_keep_their_bytes(files):
    abstract, config = abstract_checkpoint(files[0], "float32")
    params, loaded_config = load_checkpoint(files[0], "float32")

    assert config == loaded_config
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(lambda x: (x.shape, x.dtype), abstract)
    q = params.layers[2].mixer.q
    assert isinstance(q, QuantizedArray)
    assert (q.values.dtype, q.scales.dtype) == (np.int8, np.float16)
    assert q.values.nbytes + q.scales.nbytes == q.values.size // 32 * 34
    types = [getattr(w, "type", None) for w in (params.embedding, params.layers[0].mixer.q, params.unembedding)]
    assert types == ["Q6_K", "Q4_K", "Q5_0"]


def test_blocks_lie_on_a_chosen_device_and_are_split_over_none(files):
    one = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("experts", "model"))
    expected, config = load_checkpoint(files[0], "float32")

    params, _ = load_checkpoint(files[0], "float32", mesh=one)

    for own, other in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(own, other)
    abstract, _ = abstract_checkpoint(files[0], "float32")
    placed = Placement(one).params(config, abstract)
    assert jax.tree.structure(placed) == jax.tree.structure(params)
    two: Any = jax.sharding.AbstractMesh((2, 1), ("experts", "model"))
    with pytest.raises(
        ValueError, match="blocks of a GGUF are not split by tensor or experts yet.*embedding has blocks of"
    ):
        Placement(two).params(config, abstract)


def test_a_tpu_has_integers_in_place_of_blocks(files, caplog):
    with layers_apart():
        blocks, config = load_checkpoint(files[0], "float32")
        with integers_as_on_tpu(), caplog.at_level(logging.WARNING, logger="jaxinfer"):
            params, _ = load_checkpoint(files[0], "float32")
            abstract, _ = abstract_checkpoint(files[0], "float32")

    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(lambda x: (x.shape, x.dtype), abstract)
    is_packed: Any = lambda node: isinstance(node, PACKED)  # noqa: E731
    pairs = zip(*(jax.tree.leaves(tree, is_leaf=is_packed) for tree in (params, blocks)), strict=True)
    repacked = [(w, other) for w, other in pairs if isinstance(other, PackedBlocks)]
    assert len(repacked) > 5
    for w, other in repacked:
        assert isinstance(w, QuantizedArray)
        numbers, inputs = np.asarray(other.widened()), w.values.shape[-1]
        groups = numbers.reshape(*numbers.shape[:-1], w.scales.shape[-1], -1)
        assert groups.shape[-1] == (inputs if len(numbers) == config.vocab_size else math.gcd(inputs, 128))
        # The nearest of 255 steps, of which the largest number of a group is the last.
        found = np.asarray(w.values, np.float32).reshape(groups.shape) * np.asarray(w.scales)[..., None]
        step = np.abs(groups).max(-1, keepdims=True) / 127
        assert (np.abs(found - groups) <= step * 0.5001).all()
    lines = [record.getMessage() for record in caplog.records if "become" in record.getMessage()]
    assert any("become integers of 8 bits, for no kernel of a TPU reads such blocks" in line for line in lines)
    two: Any = jax.sharding.AbstractMesh((2, 1), ("experts", "model"))
    Placement(two).params(config, abstract)  # devices share them


def test_layers_of_blocks_of_several_types_are_one_stack_on_a_tpu(tmp_path):
    path, _ = save_gguf(tmp_path, "llama", lambda name: "Q6_K" if "blk.1" in name else "Q4_K", num_hidden_layers=4)
    with layers_apart():
        expected = [layer.mixer.q.values for layer in load_on_tpu(path).layers]

    assert [stack.mixer.q.type for stack in load_checkpoint(path, "float32")[0].layers] == ["Q4_K", "Q6_K", "Q4_K"]
    (stack,) = load_on_tpu(path).layers
    np.testing.assert_array_equal(stack.mixer.q.values, np.concatenate(expected))


def load_on_tpu(path: Path) -> Any:
    with integers_as_on_tpu():
        return load_checkpoint(path, "float32")[0]


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="bit-equality is promised on CPU")
def test_a_request_has_the_same_bits_alone_and_beside_others_in_chunks_and_with_drafts(files):
    prompts = random_prompts(5, max_len=24, seed=2)
    params = [SamplingParams(max_tokens=3 + i, seed=i, ignore_eos=True, log_probs=2) for i in range(5)]
    llm = crowded_engine(files[0])

    together = run_with_arrivals(llm, prompts, params, seed=3, mean_arrivals=0.7)

    for one, prompt, own in zip(together, prompts, params, strict=True):
        forget_prefixes(llm)
        (alone,) = llm.generate([prompt], own, show_progress=False)
        assert content_of(alone) == content_of(one)


def test_a_line_says_which_weights_take_more_memory(tmp_path, caplog):
    path, _ = save_gguf(tmp_path, "mixtral", "Q4_K", routers="Q8_0", num_hidden_layers=1)
    with caplog.at_level(logging.WARNING, logger="jaxinfer"):
        params, _ = load_checkpoint(path, "float32")

    (line,) = [record.getMessage() for record in caplog.records if "become" in record.getMessage()]
    feed_forward: Any = params.layers[0].feed_forward
    size = feed_forward.router.size
    assert line.endswith(f"of type Q8_0 become float32: {4e-6 * size:.2f} MB in place of {34e-6 * size / 32:.2f} MB")


def test_quantization_of_packed_weights_is_refused(files):
    with pytest.raises(ValueError, match="packed already by gguf"):
        load_checkpoint(files[0], "float32", quantization="int8")


def test_a_file_in_floating_point_may_be_quantized(tmp_path):
    path, _ = save_gguf(tmp_path, "llama", "F16", num_hidden_layers=1)
    params, _ = load_checkpoint(path, "float32", quantization="int8")

    assert isinstance(params.layers[0].mixer.q, QuantizedArray)


def test_a_quantized_copy_of_a_file_is_refused(tmp_path):
    path, _ = save_gguf(tmp_path, "llama", "F16", num_hidden_layers=1, hidden_size=32, intermediate_size=32)

    with pytest.raises(ValueError, match="is one file; give a folder or Hub id with safetensors"):
        write_quantized(path, tmp_path / "copy", "int8")
    assert not (tmp_path / "copy").exists()


def test_a_file_may_be_a_draft_model(files):
    assert not is_eagle3(Checkpoint(files[0]))


def test_the_digest_is_that_of_the_file(files, tmp_path):
    copy = tmp_path / "model.gguf"
    content = bytearray(files[0].read_bytes())
    copy.write_bytes(content)
    other = tmp_path / "other" / "model.gguf"
    other.parent.mkdir()
    content[-1] ^= 1
    other.write_bytes(content)

    assert Checkpoint(files[0]).digest() == Checkpoint(copy).digest() != Checkpoint(other).digest()


def test_a_file_of_another_kind_is_refused_with_the_way_out(tmp_path):
    path = tmp_path / "model.bin"
    path.touch()

    with pytest.raises(ValueError, match=r"is a file; give the directory that it is in, or a file .gguf"):
        resolve_checkpoint(path)


@pytest.mark.parametrize("name", ["model.gguf", "folder/model.gguf", "/folder/folder/model.gguf"])
def test_a_file_that_is_not_there_is_no_hub_id(name):
    with pytest.raises(ValueError, match="does not exist; give the path of a GGUF file"):
        resolve_checkpoint(name)


def test_a_hub_id_may_name_a_file(files, monkeypatch):
    asked = []

    def download(repository, file, revision):
        assert revision is None
        asked.append((repository, file))
        return str(files[0])

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)

    assert resolve_checkpoint("owner/name/folder/model-Q8_0.gguf") == Path(files[0])
    assert asked == [("owner/name", "folder/model-Q8_0.gguf")]


def ends(tmp_path: Path, tokens: dict[str, int], eos: int) -> list[str]:
    """Returns the tokens that end a text of a file with this vocabulary."""

    def add(writer):
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(list(tokens))
        writer.add_token_types(list(tokens.values()))
        writer.add_eos_token_id(eos)

    path, _ = save_gguf(tmp_path, "llama", "F16", add=add, num_hidden_layers=1, hidden_size=32, intermediate_size=32)
    return [list(tokens)[i] for i in Checkpoint(path).eos_token_ids]


def test_a_text_ends_at_tokens_of_the_usual_names_too_whatever_their_kind(tmp_path):
    vocabulary = {"a": 1, "<|im_end|>": 3, "<|end|>": 4, "</s>": 1, "<|other|>": 3, "<own>": 3, "<eos>": 5}

    assert ends(tmp_path, vocabulary, eos=5) == ["<own>", "<|im_end|>", "<|end|>", "</s>", "<eos>"]


def test_the_end_of_a_message_of_gpt_oss_ends_no_text(tmp_path):
    vocabulary = {"<|return|>": 3, "<|end|>": 3, "<|call|>": 3}

    assert ends(tmp_path, vocabulary, eos=0) == ["<|return|>", "<|call|>"]


def with_keys(folder: Path, family: str = "llama", **keys: Any) -> Path:
    """Writes a small model with further keys of its architecture."""

    def add(writer):
        for key, value in keys.items():
            name = f"{writer.arch}.{key.replace('__', '.')}"
            add_value = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
            add_value(name, value)

    sizes: Any = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32}
    return save_gguf(folder, family, "F16", add=add, **sizes)[0]


@pytest.mark.parametrize("pooling", [0, 1, 3])
def test_the_way_that_a_file_pools_states_changes_no_state(tmp_path, pooling):
    assert read_config(with_keys(tmp_path / "a", "qwen3", pooling_type=pooling)) == read_config(
        with_keys(tmp_path / "b", "qwen3")
    )


@pytest.mark.parametrize("keys", [{"rope__scaling__type": "linear"}, {"rope__scaling__factor": 0.0}], ids=str)
def test_a_scaling_of_positions_without_a_factor_is_none(tmp_path, keys):
    assert read_config(with_keys(tmp_path / "a", **keys)) == read_config(with_keys(tmp_path / "b"))


def test_yarn_without_a_factor_turns_nothing(tmp_path):
    mixer: Any = read_config(with_keys(tmp_path, rope__scaling__type="yarn")).layers[0].mixer

    assert mixer.rope.scaling.factor == mixer.rope.scaling.attention_factor == 1.0


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rope__scaling__factor": -2.0}, r"llama.rope.scaling.factor=-2.0 is no finite number .* convert"),
        (
            {"rope__scaling__factor": math.inf},
            r"llama.rope.scaling.factor=inf is no finite number .* convert",
        ),
        ({"rope__scaling__type": "linear", "rope__scaling__factor": "4"}, r"factor='4' is no finite number"),
        ({"pooling_type": 2}, r"llama.pooling_type=2 is not supported"),
        ({"pooling_type": 4}, r"llama.pooling_type=4 is not supported"),
    ],
)
def test_a_key_with_a_value_that_cannot_be_honoured_is_refused_by_name(tmp_path, keys, message):
    with pytest.raises(ValueError, match=message):
        read_config(with_keys(tmp_path, **keys))


def change(path: Path, folder: Path, old: bytes, new: bytes) -> Path:
    content = path.read_bytes()
    assert content.count(old) >= 1
    assert len(old) == len(new)
    (folder / "model.gguf").write_bytes(content.replace(old, new))
    return folder / "model.gguf"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"llama.rope.freq_base", b"llama.rope.freq_bass", r"llama.rope.freq_bass=10000.0 is not supported"),
        (b"llama.embedding_length", b"llama.embedding_lengtH", r"embedding_length=None is not a positive integer"),
        (b"llama.block_count", b"llama.block_cound", r"llama.block_count"),
        (b"blk.0.attn_q.weight", b"blk.0.attn_Q.weight", r"'llama' has no tensor 'blk.0.attn_Q.weight' here"),
        (b"token_embd.weight", b"token_embD.weight", r"no token_embd.weight"),
        (b"blk.2.ffn_up.weight", b"blk.3.ffn_up.weight", r"missing: model.layers.2.mlp.up_proj.weight"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(files, tmp_path, old, new, message):
    path = change(files[0], tmp_path, old, new)

    with pytest.raises(ValueError, match=message) as error:
        load_checkpoint(path, "float32")

    assert str(path) in str(error.value)


def test_another_architecture_is_refused_with_those_that_are_known(files, tmp_path):
    path = change(
        files[0], tmp_path, b"\x05\x00\x00\x00\x00\x00\x00\x00llama", b"\x05\x00\x00\x00\x00\x00\x00\x00rwkv7"
    )

    with pytest.raises(ValueError, match="general.architecture='rwkv7' is not supported; use a model of one of"):
        read_config(path)
