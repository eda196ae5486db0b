"""Writes small GGUF files by the `gguf` package, each with its reference: the model on the dequantized weights.

Names are those of the package's own tables. The order of rows, the norms plus 1 and the metadata follow llama.cpp's
converter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file, save_file

from jaxinfer.gguf.blocks import BLOCK_TYPES
from tests.oracles import random_config, save_random_checkpoint

TYPES = {block.name: block for block in BLOCK_TYPES.values()}
# Inputs that blocks of 256 divide, and heads whose sizes differ from hidden_size // num_attention_heads.
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
ARCHITECTURES = {
    **{name: name for name in ("gemma", "gemma2", "granite", "llama", "olmo2", "phi3", "qwen2", "qwen3", "smollm3")},
    **{name: name for name in ("exaone4", "olmoe", "seed_oss")},
    "gemma3_text": "gemma3",
    "gpt_oss": "gpt-oss",
    "mixtral": "llama",
    "qwen3_moe": "qwen3moe",
}
PERMUTED = ("llama", "granite", "smollm3")
EXPERT = re.compile(r"experts\.(\d+)\.")


def random_blocks(name: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Returns rows of blocks u8[..., row bytes] for numbers of the given shape, of the size of weights.

    They are random bytes with small scales.
    """
    block, rng = TYPES[name], np.random.default_rng(seed)
    count = int(np.prod(shape)) // block.length
    blocks = rng.integers(0, 256, (count, block.num_bytes), np.uint8)
    # Integers of a super-block are scaled twice, by factors up to 63.
    sizes = {"Q2_K": 3e-3, "Q3_K": 1e-3, "Q4_K": 1e-4, "Q5_K": 5e-5, "Q6_K": 3e-5, "IQ4_XS": 5e-5, "IQ4_NL": 1e-3}
    size = sizes.get(name, 1e-2)
    at = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}
    pair = (0, 2) if name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else (0,)
    for place in at.get(name, pair):
        # The minimum lies under the middle of the range.
        numbers = size * (0.5 + rng.random(count)) * (-8 if name in ("Q4_1", "Q5_1") and place else 1)
        blocks[:, place : place + 2] = numbers.astype(np.float16)[:, None].view(np.uint8)
    if name == "MXFP4":
        blocks[:, 0] = 118 + blocks[:, 0] % 4
    return blocks.reshape(*shape[:-1], -1)


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """Returns the rows of queries or keys with the pairs of a rotation as neighbours."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def unpermuted(rows: np.ndarray, heads: int) -> np.ndarray:
    return rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def split_experts(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns tensors with gates and up projections of GPT-OSS apart, outputs before inputs, as a converter does."""
    found = {}
    for name, tensor in tensors.items():
        own = name.replace("_proj_bias", "_proj.bias") if "experts" in name else name
        if name.endswith(("gate_up_proj", "down_proj")):
            own, tensor = f"{name}.weight", tensor.swapaxes(1, 2)
        if "gate_up_proj" in own:
            found |= {own.replace("gate_up", part): tensor[:, i::2] for i, part in enumerate(("gate", "up"))}
        else:
            found[own + ".weight" * own.endswith("sinks")] = tensor
    return found


def joined_experts(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The inverse of `split_experts`."""
    found = {}
    for name, tensor in tensors.items():
        if ".experts." not in name:
            found[name.replace("sinks.weight", "sinks")] = tensor
        elif "up_proj" not in name:
            own = name.replace("gate_proj", "gate_up_proj").replace("proj.bias", "proj_bias").removesuffix(".weight")
            if "gate_proj" in name:
                up = tensors[name.replace("gate_proj", "up_proj")]
                tensor = np.stack([tensor, up], axis=2).reshape(tensor.shape[0], -1, *tensor.shape[2:])
            found[own] = np.ascontiguousarray(tensor.swapaxes(1, 2) if name.endswith(".weight") else tensor)
    return found


class SmallModel:
    """A random model of a family, and the ways between its names and those of a GGUF."""

    def __init__(self, folder: Path, family: str, seed: int = 0, **overrides: Any) -> None:
        self.family, self.arch = family, ARCHITECTURES[family]
        self.config = random_config(family, **{**SIZES, **overrides})
        self.settings = {**SIZES, **overrides}
        save_random_checkpoint(folder, family, seed=seed, **self.settings)
        self.hf = json.loads((folder / "config.json").read_text())
        tensors = load_file(folder / "model.safetensors")
        self.tensors = split_experts(tensors) if family == "gpt_oss" else tensors
        arch = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[self.arch]
        self._names = gguf.get_tensor_name_map(arch, self.config.num_hidden_layers)

    def _heads(self, name: str) -> int | None:
        if self.arch in PERMUTED and re.search(r"[qk]_proj\.(weight|bias)$", name):
            config = self.config
            return config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        return None

    def stored_name(self, name: str) -> str:
        stored = self._names.get_name(EXPERT.sub("experts.", name), (".weight", ".bias"))
        assert stored is not None, name
        return stored

    def stored(self) -> dict[str, np.ndarray]:
        """Returns the tensors as a converter stores them, f32."""
        found: dict[str, np.ndarray] = {}
        experts: dict[str, dict[int, np.ndarray]] = {}
        for name, tensor in self.tensors.items():
            heads = self._heads(name)
            own = tensor if heads is None else permuted(tensor, heads)
            own = own + 1 if self.arch.startswith("gemma") and name.endswith("norm.weight") else own
            match = EXPERT.search(name)
            if match is None:
                found[self.stored_name(name)] = own
            else:
                experts.setdefault(self.stored_name(name), {})[int(match[1])] = own
        return found | {name: np.stack([own[i] for i in sorted(own)]) for name, own in experts.items()}

    def restored(self, stored: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns tensors of a GGUF by the names of transformers, in its order."""
        found = {}
        for name in self.tensors:
            tensor, match, heads = stored[self.stored_name(name)], EXPERT.search(name), self._heads(name)
            tensor = tensor if match is None else tensor[int(match[1])]
            tensor = tensor if heads is None else unpermuted(tensor, heads)
            is_norm = self.arch.startswith("gemma") and name.endswith("norm.weight")
            found[name] = np.ascontiguousarray(tensor - 1 if is_norm else tensor, np.float32)
        return joined_experts(found) if self.family == "gpt_oss" else found


def write_metadata(writer: gguf.GGUFWriter, model: SmallModel) -> None:
    """States what llama.cpp's converter states."""
    config, hf, arch = model.config, model.hf, model.arch
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_vocab_size(config.vocab_size)
    rope = hf.get("rope_parameters") or {}
    full = rope.get("full_attention", rope)
    if arch not in ("gemma", "gemma2"):
        writer.add_rope_freq_base(full.get("rope_theta", 10_000.0))
    if arch in ("llama", "granite", "smollm3"):
        writer.add_rope_dimension_count(head_dim)
    if full.get("rope_type") == "longrope":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
        writer.add_rope_scaling_attn_factors(full["attention_factor"])
    if arch == "phi3":
        writer.add_rope_dimension_count(int(head_dim * full.get("partial_rotary_factor", 1.0)))
        writer.add_rope_scaling_orig_ctx_len(rope.get("original_max_position_embeddings", 4096))
    if full.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(full["factor"])
    if full.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(full["factor"])
        writer.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
    if arch == "exaone4" and config.sliding_window is not None:
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if arch in ("gemma2", "gemma3", "phi3", "gpt-oss"):
        is_full = set(hf.get("layer_types") or ["windows"]) == {"full_attention"}
        writer.add_sliding_window(0 if is_full else config.sliding_window or 0)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if arch == "granite":
        writer.add_logit_scale(config.logits_scaling)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_attention_scale(config.attention_multiplier)
    if "num_experts_per_tok" in hf:
        writer.add_expert_count(hf.get("num_local_experts") or hf["num_experts"])
        writer.add_expert_used_count(hf["num_experts_per_tok"])
    if arch in ("qwen3moe", "gpt-oss"):
        writer.add_expert_feed_forward_length(hf.get("moe_intermediate_size", config.intermediate_size))


def llama3_factors(parameters: Mapping[str, Any], head_dim: int) -> np.ndarray:
    """Returns what the converter divides frequencies by (generate_extra_tensors of llama.cpp's LlamaModel)."""
    factors = []
    for frequency in parameters["rope_theta"] ** (-np.arange(0, head_dim, 2) / head_dim):
        wavelength, length = 2 * np.pi / frequency, parameters["original_max_position_embeddings"]
        low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
        smooth = min(max((length / wavelength - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / parameters["factor"] + smooth))
    return np.array(factors, np.float32)


def add_vocabulary(writer: gguf.GGUFWriter) -> None:
    """Adds a vocabulary of 97 tokens: the end, the space, printable ASCII, and a word of two letters."""
    words = ["<end>", "Ġ", *map(chr, range(33, 127)), "ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(words)
    writer.add_token_types([3, *[1] * (len(words) - 1)])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)
    writer.add_chat_template("{{ messages }}")
    writer.add_float32("general.sampling.temp", 0.7)


def save_gguf(
    folder: Path,
    family: str,
    kind: str | Callable[[str], str],
    *,
    seed: int = 0,
    add: Callable[[gguf.GGUFWriter], None] = lambda _: None,
    routers: str = "F32",
    **overrides: Any,
) -> tuple[Path, Path]:
    """Writes a random model with its matrices in blocks of a kind, which may depend on their names.

    Returns the file, and the folder of a float32 checkpoint of the dequantized weights.
    """
    model = SmallModel(folder / "random", family, seed, **overrides)
    path, reference = folder / "model.gguf", folder / "reference"
    writer = gguf.GGUFWriter(str(path), model.arch)
    write_metadata(writer, model)
    add(writer)
    plain = {}
    stored = model.stored()
    rope = model.hf.get("rope_parameters") or {}
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(rope, model.hf["head_dim"]))
    if rope.get("rope_type") == "longrope":
        for length in ("long", "short"):
            writer.add_tensor(f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], np.float32))
    for i, (name, tensor) in enumerate(stored.items()):
        has_blocks = tensor.ndim > 1 and name.endswith("weight")
        own_kind = (kind if isinstance(kind, str) else kind(name)) if has_blocks else "F32"
        own_kind = routers if "ffn_gate_inp.weight" in name else own_kind
        number = gguf.GGMLQuantizationType[own_kind]
        if own_kind in ("F32", "F16", "BF16", "Q8_0", "Q4_0"):
            blocks = gguf.quants.quantize(np.ascontiguousarray(tensor, np.float32), number)
        else:
            blocks = random_blocks(own_kind, tensor.shape, seed=100 * seed + i)
        plain[name] = gguf.quants.dequantize(blocks, number).reshape(tensor.shape)
        is_float = own_kind in ("F32", "F16")
        writer.add_tensor(name, blocks, raw_dtype=None if is_float else number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    reference.mkdir()
    save_file(model.restored(plain), reference / "model.safetensors", {"format": "pt"})
    (reference / "config.json").write_text((folder / "random" / "config.json").read_text())
    return path, reference
