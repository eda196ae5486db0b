"""From a GGUF's keys and names to those of Hugging Face: what config.json would say, and which tensor is which.

An architecture of llama.cpp is a row of `ARCHITECTURES`. Its keys begin with its name, and every one of them has to be
known: what an unknown key means for the result, no reader can tell.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxinfer.gguf.blocks import dequantize
from jaxinfer.gguf.file import BlockTensor, GGUFFile
from jaxinfer.validation import is_int, is_real, shown

Settings = dict[str, Any]
# Texts of tokens that end an answer whatever the metadata says of them, as in llama.cpp: it names one or two at most,
# and converters have called some of them normal text.
ENDS = (
    *("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>", "<|end|>", "<end_of_turn>"),
    *("</s>", "<eos>", "<|return|>", "<|call|>"),
)
NO_END, BESIDE = "<|end|>", "<|return|>"  # in GPT-OSS the first ends a message of several
END_KEYS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
BLOCK = re.compile(r"blk\.(0|[1-9]\d*)\.(\w+)\.(weight|bias)")
ATTENTION = "self_attn"
MAX_EXPERTS = 4096
MAX_LISTED = 5  # names in an error
WHOLE_MODEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
BARE = ("attn_sinks",)  # without "weight" at the end of its Hugging Face name
IN_SETTINGS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


@dataclass(frozen=True)
class NamedTensor:
    """A stored tensor as the one of a Hugging Face name: its rows in their order there, less a constant.

    `heads`: within each of them the file has the two halves of the rotary pairs as neighbours, not one after the other.
    """

    stored: BlockTensor
    heads: int | None = None
    added: float = 0.0  # by the converter; Gemma's norms are stored plus 1

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    @property
    def is_as_stored(self) -> bool:
        """True if the tensor lies in the file as it is."""
        return self.stored.type.is_float and self.heads is None and not self.added

    def blocks(self, rows: slice) -> np.ndarray:
        """Returns the blocks of some rows, u8[rows, row bytes]; a tensor of one axis is one row."""
        stored = self.stored.map()
        flat = stored.reshape(-1, stored.shape[-1])
        if self.heads is None:
            return flat[rows]
        is_bias = stored.ndim == 1  # each of its numbers is what a row is of a weight
        flat = flat.reshape(self.stored.shape[0], -1) if is_bias else flat
        order = np.arange(len(flat)).reshape(self.heads, -1, 2).swapaxes(1, 2).reshape(-1)
        return flat[order].reshape(1, -1)[rows] if is_bias else flat[order[rows]]

    def numbers(self, rows: slice) -> np.ndarray:
        """Returns some rows as f32[rows, in]; ValueError if a number is infinite or none."""
        numbers = dequantize(self.blocks(rows), self.stored.type)
        return numbers - np.float32(self.added) if self.added else numbers


def _names(**changed: str) -> dict[str, str]:
    """Returns the modules of a layer by their names in a GGUF, those of Llama but for some."""
    return {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        **{f"attn_{name}": f"{ATTENTION}.{name}_proj" for name in "qkv"},
        "attn_output": f"{ATTENTION}.o_proj",
        **{f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
        **changed,
    }


def _experts(router: str, gate: str, up: str, down: str) -> dict[str, str]:
    return {"ffn_gate_inp": router, "ffn_gate_exps": gate, "ffn_up_exps": up, "ffn_down_exps": down}


_HEAD_NORMS = {f"attn_{name}_norm": f"{ATTENTION}.{name}_norm" for name in "qk"}
_POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA_NORMS = {"ffn_norm": "pre_feedforward_layernorm", **_POST_NORMS}
_GATES = tuple(f"mlp.experts.{{expert}}.{name}_proj" for name in ("gate", "up", "down"))
_MIXTRAL_GATES = tuple(f"block_sparse_moe.experts.{{expert}}.{name}" for name in ("w1", "w3", "w2"))
# Key without the architecture's name -> key of config.json.
_SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_CHOICE = {"expert_used_count": "num_experts_per_tok"}
# Keys without effect, and keys of which one value has none.
_UNUSED = ("vocab_size", "rope.scaling.finetuned", "tensor_data_layout")
_HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "pooling_type": (0, 1, 3),  # none, mean and last; a caller of `LLM.embed` chooses by itself
    "expert_count": (0,),
    "expert_used_count": (0,),
    "expert_shared_count": (0,),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_gating_func": (1,),  # softmax
    "expert_weights_scale": (0.0, 1.0),
    "attention.sliding_window": (0,),
    "final_logit_softcapping": (0.0,),
}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The reading of one architecture of llama.cpp."""

    model_type: str  # of config.json
    names: Mapping[str, str] = field(default_factory=_names)
    settings: Mapping[str, str] = field(default_factory=dict)  # keys of config.json by keys, beside the common ones
    derive: Callable[[_Keys], Settings] = lambda _: {}  # settings that take more than a new name
    has_pairs: bool = False  # rows of queries and keys lie in the order of interleaved rotary pairs
    norms_added: float = 0.0


class _Keys:
    """The keys of an architecture without its name; remembers which of them were asked for."""

    def __init__(self, file: GGUFFile, name: str) -> None:
        prefix = f"{name}."
        self.name = name
        self.tensors = file.tensors
        self._stated = {
            key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)
        }
        self._known: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self._known.add(key)
        return self._stated.get(key, default)

    def size(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if not is_int(value) or value < 1:
            raise ValueError(f"{self.name}.{key}={shown(value)} is not a positive integer; convert the model again")
        return value

    def refuse_others(self) -> None:
        """Raises ValueError for keys that change the result, and for keys that nothing here knows."""
        others = {key: value for key, value in self._stated.items() if key not in (*self._known, *_UNUSED)}
        wrong = {key: value for key, value in others.items() if not _is_harmless(key, value)}
        if wrong:
            listed = ", ".join(f"{self.name}.{key}={shown(value)}" for key, value in sorted(wrong.items()))
            raise ValueError(f"{listed} is not supported; use a GGUF without, or the safetensors of the model")


def _is_harmless(key: str, value: Any) -> bool:
    return not isinstance(value, np.ndarray) and value in _HARMLESS.get(key, ())


def _head_dim(keys: _Keys) -> int:
    heads = keys.size("attention.head_count")
    head_dim = keys.size("attention.key_length", max(keys.size("embedding_length") // heads, 1))
    if keys.get("attention.value_length", head_dim) != head_dim:
        raise ValueError(
            f"attention.key_length={head_dim} and attention.value_length={keys.get('attention.value_length')} differ,"
            " which is not supported; use another model"
        )
    return head_dim


def _gemma_scale(num_layers_of_27b: int, keys: _Keys) -> Settings:
    """Returns the scale of scores, which the metadata leaves out: that of the largest model has another rule."""
    if keys.size("block_count") == num_layers_of_27b:
        return {"query_pre_attn_scalar": keys.size("embedding_length") // keys.size("attention.head_count")}
    return {"query_pre_attn_scalar": _head_dim(keys)}


def _windows(keys: _Keys) -> Settings:
    """Returns which layers have a window: every n-th has none, or the layers that an array names."""
    pattern = keys.get("attention.sliding_window_pattern")
    if pattern is None:
        return {}
    if is_int(pattern):
        return {"sliding_window_pattern": pattern}
    if not isinstance(pattern, np.ndarray) or pattern.dtype != bool:
        raise ValueError(f"attention.sliding_window_pattern={shown(pattern)} is neither a number nor truth values")
    return {"layer_types": ["sliding_attention" if slides else "full_attention" for slides in pattern.tolist()]}


def _gemma_2(keys: _Keys) -> Settings:
    return _gemma_scale(46, keys) | _windows(keys)


def _gemma_3(keys: _Keys) -> Settings:
    settings = _gemma_scale(62, keys) | _windows(keys)
    if not keys.get("attention.sliding_window"):
        # No layer has the window, which config.json states all the same.
        full = ["full_attention"] * keys.size("block_count")
        settings |= {"layer_types": full, "sliding_window": keys.size("context_length")}
    cap = keys.get("final_logit_softcapping")
    return settings | ({"final_logit_softcapping": cap} if cap else {})


def _phi_3(keys: _Keys) -> Settings:
    native = keys.size("rope.scaling.original_context_length", keys.size("context_length"))
    settings: Settings = {
        "original_max_position_embeddings": native,
        "sliding_window": keys.get("attention.sliding_window") or None,  # 0 for none
    }
    short, long = (_factors(keys, f"rope_factors_{name}.weight") for name in ("short", "long"))
    if short is not None:
        scaling = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
        scaling |= {"attention_factor": keys.get("rope.scaling.attn_factor", 1.0)}
        settings |= {"rope_scaling": scaling}
    return settings


def _gpt_oss(keys: _Keys) -> Settings:
    settings = _rope(keys, _head_dim(keys))
    # The bounds of its ramp are not rounded, which the metadata leaves out.
    scaling = {"rope_scaling": {**settings["rope_scaling"], "truncate": False}} if "rope_scaling" in settings else {}
    return {**scaling, **_windows(keys)}


def _exaone_4(keys: _Keys) -> Settings:
    return {"sliding_window": keys.get("attention.sliding_window") or None, **_windows(keys)}


def _factors(keys: _Keys, name: str) -> list[float] | None:
    return NamedTensor(keys.tensors[name]).numbers(slice(1))[0].tolist() if name in keys.tensors else None


def _rope(keys: _Keys, head_dim: int) -> Settings:
    """Returns the rotary embedding's settings, except for those that architectures derive."""
    turned = keys.size("rope.dimension_count", head_dim)
    settings: Settings = {"rope_theta": keys.get("rope.freq_base", 10_000.0)}
    if turned != head_dim:
        settings |= {"partial_rotary_factor": turned / head_dim}
    factor = keys.get("rope.scaling.factor", 0.0)
    if not is_real(factor) or not 0 <= factor < math.inf:
        raise ValueError(
            f"{keys.name}.rope.scaling.factor={shown(factor)} is no finite number from 0 on; convert the model again"
        )
    factor = factor or 1.0  # as in llama.cpp
    kind = keys.get("rope.scaling.type", "linear")
    if kind == "linear":
        settings |= {"rope_scaling": {"rope_type": kind, "factor": factor}} if factor != 1.0 else {}
    elif kind == "yarn":
        native = keys.get("rope.scaling.original_context_length")
        scaling = {"rope_type": kind, "factor": factor, "original_max_position_embeddings": native}
        betas = {name: keys.get(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
        settings |= {"rope_scaling": scaling | {name: beta for name, beta in betas.items() if beta is not None}}
    elif kind not in ("none", "longrope"):
        raise ValueError(f"{keys.name}.rope.scaling.type={shown(kind)} is not supported; use another model")
    factors = _factors(keys, "rope_freqs.weight")
    if factors is not None:
        if "rope_scaling" in settings:
            raise ValueError(f"rope_freqs.weight beside rope.scaling.type={kind!r} is not supported; use another model")
        # What divides the frequencies, as Llama 3 has it; all that LongRoPE does with one length and no further factor.
        settings |= {
            "rope_scaling": {
                **{"rope_type": "longrope", "short_factor": factors, "factor": 1.0, "attention_factor": 1.0},
                "original_max_position_embeddings": keys.size("context_length"),
            }
        }
    return settings


_LLAMA = Architecture(model_type="llama", has_pairs=True)
ARCHITECTURES: Mapping[str, Architecture] = {
    "exaone4": Architecture(
        model_type="exaone4",
        names={**_names(**_POST_NORMS, **_HEAD_NORMS), "attn_norm": "", "ffn_norm": ""},
        derive=_exaone_4,
    ),
    "gemma": Architecture(model_type="gemma", norms_added=1.0),
    "gemma2": Architecture(
        model_type="gemma2",
        names=_names(**_GEMMA_NORMS),
        settings={
            "attention.sliding_window": "sliding_window",
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        derive=_gemma_2,
        norms_added=1.0,
    ),
    "gemma3": Architecture(
        model_type="gemma3_text",
        names=_names(**_GEMMA_NORMS, **_HEAD_NORMS),
        settings={"attention.sliding_window": "sliding_window", "rope.freq_base_swa": "rope_local_base_freq"},
        derive=_gemma_3,
        norms_added=1.0,
    ),
    "gpt-oss": Architecture(
        model_type="gpt_oss",
        names=_names(
            attn_sinks=f"{ATTENTION}.sinks",
            post_attention_norm="post_attention_layernorm",
            **_experts("mlp.router", *(f"mlp.experts.{name}_proj" for name in ("gate", "up", "down"))),
        ),
        settings={
            **_CHOICE,
            "expert_count": "num_local_experts",
            "expert_feed_forward_length": "intermediate_size",
            "attention.sliding_window": "sliding_window",
        },
        derive=_gpt_oss,
    ),
    "granite": Architecture(
        model_type="granite",
        settings={
            "logit_scale": "logits_scaling",
            "residual_scale": "residual_multiplier",
            "embedding_scale": "embedding_multiplier",
            "attention.scale": "attention_multiplier",
        },
        has_pairs=True,
    ),
    "llama": _LLAMA,
    "olmo2": Architecture(
        model_type="olmo2", names={**_names(**_POST_NORMS, **_HEAD_NORMS), "attn_norm": "", "ffn_norm": ""}
    ),
    "olmoe": Architecture(
        model_type="olmoe",
        names=_names(**_HEAD_NORMS, **_experts("mlp.gate", *_GATES)),
        settings={**_CHOICE, "expert_count": "num_experts"},
        derive=lambda _: {"norm_topk_prob": False},  # as llama.cpp computes it
    ),
    "phi3": Architecture(
        model_type="phi3",
        names=_names(attn_qkv=f"{ATTENTION}.qkv_proj", ffn_up="mlp.gate_up_proj"),
        derive=_phi_3,
    ),
    "qwen2": Architecture(model_type="qwen2"),
    "qwen3": Architecture(model_type="qwen3", names=_names(**_HEAD_NORMS)),
    "qwen3moe": Architecture(
        model_type="qwen3_moe",
        names=_names(**_HEAD_NORMS, **_experts("mlp.gate", *_GATES)),
        settings={
            **_CHOICE,
            "expert_count": "num_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        derive=lambda _: {"norm_topk_prob": True},  # as llama.cpp computes it
    ),
    "seed_oss": Architecture(
        model_type="seed_oss", names={**_names(post_attention_norm="post_attention_layernorm"), "ffn_norm": ""}
    ),
    "smollm3": Architecture(model_type="smollm3", has_pairs=True),
}
# llama.cpp calls Mixtral by the name of Llama too.
_MIXTRAL = Architecture(
    model_type="mixtral",
    names=_names(**_experts("block_sparse_moe.gate", *_MIXTRAL_GATES)),
    settings={**_CHOICE, "expert_count": "num_local_experts"},
    has_pairs=True,
)


def config_of(file: GGUFFile) -> Settings:
    """Returns the settings that config.json would have; ValueError for keys that cannot be honoured."""
    name, architecture = _architecture(file)
    keys = _Keys(file, name)
    needed = {ours: keys.get(key) for key, ours in ({**_SIZES, **architecture.settings}).items()}
    head_dim = _head_dim(keys)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ValueError("it has no token_embd.weight of two axes; give the file of a whole model")
    settings = {
        "num_key_value_heads": needed["num_attention_heads"],
        **{key: value for key, value in needed.items() if value is not None},
        "model_type": architecture.model_type,
        "vocab_size": embedding.shape[0],
        "head_dim": head_dim,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        **_rope(keys, head_dim),
        **architecture.derive(keys),
        "eos_token_id": _end_tokens(file.metadata),
    }
    missing = [key for key, ours in _SIZES.items() if ours not in settings]
    if missing:
        raise ValueError(f"it lacks {', '.join(f'{name}.{key}' for key in missing)}; convert the model again")
    keys.refuse_others()
    return settings


def sampling_of(file: GGUFFile) -> Settings:
    """Returns the settings that generation_config.json would have; the file may state some of them."""
    prefix = "general.sampling."
    names = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}
    stated = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    return {names.get(key, key): value for key, value in stated.items()}


def tensors_of(file: GGUFFile) -> dict[str, NamedTensor]:
    """Returns the tensors by their Hugging Face names, experts one by one; ValueError for unknown ones."""
    name, architecture = _architecture(file)
    keys = _Keys(file, name)
    heads = {"attn_q": keys.size("attention.head_count")}
    heads["attn_k"] = keys.size("attention.head_count_kv", heads["attn_q"])
    found: dict[str, NamedTensor] = {}
    unknown = []
    for stored_name, tensor in file.tensors.items():
        target = _target(stored_name, architecture.names)
        if target is None:
            unknown += [stored_name] if stored_name not in IN_SETTINGS else []
            continue
        own_name, module = target
        own_heads = heads.get(module) if architecture.has_pairs else None
        if own_heads is not None and tensor.shape[0] % (2 * own_heads):
            raise ValueError(f"{stored_name} of shape {tensor.shape} has no pairs of rows for {own_heads} heads")
        added = architecture.norms_added if own_name.endswith("norm.weight") else 0.0
        found |= {
            own_name.replace("{expert}", expert): NamedTensor(part, own_heads, added)
            for expert, part in _parts(stored_name, tensor, "{expert}" in own_name)
        }
    if unknown:
        others = f" and {len(unknown) - MAX_LISTED} more" if len(unknown) > MAX_LISTED else ""
        raise ValueError(
            f"the architecture {name!r} has no tensor {', '.join(map(shown, unknown[:MAX_LISTED]))}{others} here; use"
            " another file of the model"
        )
    return found


def _target(stored_name: str, names: Mapping[str, str]) -> tuple[str, str] | None:
    """Returns the Hugging Face name of a tensor and the part of a layer that it is; None for an unknown one."""
    module, _, kind = stored_name.rpartition(".")
    if module in WHOLE_MODEL and kind == "weight":
        return f"{WHOLE_MODEL[module]}.weight", module
    match = BLOCK.fullmatch(stored_name)
    if match is None or not names.get(match[2]):
        return None
    suffix = "" if match[2] in BARE else f".{match[3]}"
    return f"model.layers.{match[1]}.{names[match[2]]}{suffix}", match[2]


def _parts(name: str, tensor: BlockTensor, has_experts: bool) -> Iterator[tuple[str, BlockTensor]]:
    """Yields the number and the tensor of each expert; of others the tensor itself."""
    if not has_experts:
        yield "", tensor
        return
    if len(tensor.shape) != 3 or tensor.shape[0] > MAX_EXPERTS:
        raise ValueError(f"{name} of shape {tensor.shape} is no tensor of up to {MAX_EXPERTS} experts")
    yield from ((str(expert), tensor.part(expert)) for expert in range(tensor.shape[0]))


def _architecture(file: GGUFFile) -> tuple[str, Architecture]:
    kind, parts = file.metadata.get("general.type", "model"), file.metadata.get("split.count", 1)
    if kind != "model":
        raise ValueError(f"general.type={shown(kind)} is no model; give the file of the model itself")
    if parts not in (0, 1):
        raise ValueError(f"it is one of split.count={shown(parts)} parts; join them by llama-gguf-split --merge")
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ValueError(
            f"general.architecture={shown(name)} is not supported; use a model of one of {', '.join(ARCHITECTURES)}, or"
            " the safetensors of this one"
        )
    has_experts = name == "llama" and file.metadata.get("llama.expert_count", 0) != 0
    return name, _MIXTRAL if has_experts else ARCHITECTURES[name]


def _end_tokens(metadata: Mapping[str, Any]) -> list[int]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    texts = tokens if isinstance(tokens, tuple) else ()
    ends = {*ENDS} - ({NO_END} if BESIDE in texts else set())
    stated = [metadata[key] for key in END_KEYS if key in metadata]
    return list(dict.fromkeys([*stated, *(i for i, text in enumerate(texts) if text in ends)]))
