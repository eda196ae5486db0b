"""Checkpoints of random weights, written at the speed of the disk."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from scripts.bench.workload import write_tokenizer

# Numbers that are drawn; each tensor repeats them from another place.
BLOCK = 2**22
ARCHITECTURES = {"llama": ["LlamaForCausalLM"], "qwen3": ["Qwen3ForCausalLM"]}


def tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns the tensors of a Llama or Qwen3 checkpoint by their published names."""
    D, F, V = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    N, K = config["num_attention_heads"], config["num_key_value_heads"]
    H = config.get("head_dim", D // N)
    layer = {
        **{f"self_attn.{name}_proj": (heads * H, D) for name, heads in (("q", N), ("k", K), ("v", K))},
        "self_attn.o_proj": (D, N * H),
        **{f"mlp.{name}_proj": (F, D) for name in ("gate", "up")},
        "mlp.down_proj": (D, F),
        **dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (D,)),
    }
    if config["model_type"] == "qwen3":
        layer |= {f"self_attn.{name}_norm": (H,) for name in ("q", "k")}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    for i in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return shapes if config["tie_word_embeddings"] else {**shapes, "lm_head.weight": (V, D)}


def write_random_checkpoint(folder: Path, config: Mapping[str, Any]) -> None:
    """Writes a checkpoint of a Llama or Qwen3 with random bfloat16 weights and a tokenizer into a new folder."""
    folder.mkdir(parents=True)
    shapes, header, end = tensor_shapes(config), {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    numbers = np.random.default_rng(0).standard_normal(BLOCK, np.float32) * 0.02
    block = memoryview(numbers.astype(jnp.bfloat16).tobytes())
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for index, shape in enumerate(shapes.values()):
            left, first = 2 * int(np.prod(shape)), 2 * (index * 9973 % BLOCK)
            while left:
                piece = block[first : first + left]
                file.write(piece)
                left, first = left - len(piece), 0
    fields = {"architectures": ARCHITECTURES[config["model_type"]], "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps({**config, **fields, "bos_token_id": None, "eos_token_id": 0}))
    write_tokenizer(folder, config["vocab_size"])
