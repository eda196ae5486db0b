"""Writes a Llama of a Hugging Face folder as GGUF, in float32, for llama.cpp. It needs the package gguf."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import ml_dtypes  # noqa: F401, NumPy then knows bfloat16
import numpy as np
from safetensors import safe_open

# By the name in a Hugging Face checkpoint, the name in a GGUF file.
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    """Returns the GGUF name of a Llama tensor of a Hugging Face checkpoint; raises ValueError for another tensor."""
    stem = name.removesuffix(".weight")
    if stem in NAMES:
        return f"{NAMES[stem]}.weight"
    layer, _, inner = stem.removeprefix("model.layers.").partition(".")
    if inner not in LAYER_NAMES:
        raise ValueError(f"tensor {name} is not one of a Llama, so llama.cpp is not measured; leave it out of --sides")
    return f"blk.{layer}.{LAYER_NAMES[inner]}.weight"


def pair_neighbours(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """Returns q or k weights [N·H, D] for a rotation of neighbouring channels instead of the two halves of a head."""
    heads = weights.reshape(num_heads, 2, -1, weights.shape[-1])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(weights.shape)


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    """Adds the vocabulary and the merges of tokenizer.json. Random checkpoints have no merges, so they get none."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    model = tokenizer["model"]
    if not model["merges"]:
        writer.add_tokenizer_model("none")
        return
    special = {token["content"] for token in tokenizer["added_tokens"] if token["special"]}
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    kinds = gguf.TokenType
    writer.add_tokenizer_model("gpt2")
    # It cuts a text as the bundled tokenizer does, but for apostrophes, and begins it with the same token.
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(tokens)
    writer.add_token_types([kinds.CONTROL if token in special else kinds.NORMAL for token in tokens])
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]])
    settings = json.loads((folder / "config.json").read_text())
    writer.add_bos_token_id(settings["bos_token_id"])
    writer.add_eos_token_id(settings["eos_token_id"])


def write_gguf(folder: Path, path: Path) -> None:
    """Writes the Llama of a Hugging Face folder, with its tokenizer if that is byte-level BPE with merges."""
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] != "llama":
        raise ValueError(f"model_type={config['model_type']!r} is not llama; leave llama.cpp out of --sides")
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    theta = config.get("rope_theta") or config.get("rope_parameters", {}).get("rope_theta", 10_000.0)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(num_kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(theta)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    add_tokenizer(writer, folder)
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="np") as tensors:
            for name in tensors.keys():  # noqa: SIM118, no mapping
                weights = tensors.get_tensor(name).astype(np.float32)
                if name.endswith(("q_proj.weight", "k_proj.weight")):
                    weights = pair_neighbours(weights, num_heads if "q_proj" in name else num_kv_heads)
                writer.add_tensor(gguf_name(name), weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
