"""What the families share: the sizes every config.json states, and the settings that are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxinfer.checkpoint.families.fields import is_enabled, require_number, require_size
from jaxinfer.checkpoint.families.rope import translate_rope
from jaxinfer.model.config import ModelConfig

# (path in `Params`, einops pattern from the stored axes to ours)
Target = tuple[str, str]


@dataclass(frozen=True)
class Fused:
    """The targets of a stored tensor that holds several of ours along one of its axes."""

    targets: tuple[Target, ...]  # in the order in which they lie there
    axis: int = 0
    is_interleaved: bool = False  # entry i along the axis belongs to target i % len(targets)


# Stored name -> its targets. `{layer}` and `{expert}` in a name stand for their numbers.
WeightTable = Mapping[str, Target | Fused]


@dataclass(frozen=True)
class Family:
    """How checkpoints of one `model_type` are read.

    `weights` may name more tensors than a model has: those that `ModelConfig` does not declare are skipped.
    """

    config_from_hf: Callable[[Mapping[str, Any]], ModelConfig]
    weights: WeightTable


# Every layer is a few entries in tables, which a damaged number would fill the memory with.
MAX_LAYERS = 10_000
# Key -> (values that change nothing, what to do about any other). An absent key is as good as the first.
_HONOURED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "hidden_act": (("silu", "swish"), "use a checkpoint whose MLP is gated by silu"),
    "partial_rotary_factor": ((1.0, None), "use a checkpoint that rotates whole heads"),
    "rope_interleaved": ((False, None), "use a checkpoint that rotates the two halves of a head"),
    "is_causal": ((True, None), "use a checkpoint of a causal language model"),
    "quantization_config": ((None, {}), "use the unquantized checkpoint"),
    "compression_config": ((None, {}), "use the unquantized checkpoint"),
}


def translate_common(hf: Mapping[str, Any], *, architecture: str, max_position: int) -> dict[str, Any]:
    """Returns the arguments of `uniform_decoder` that all families take from the same keys.

    `architecture` is the one task head that is run; `max_position` the family's default. What is absent gets
    the default of transformers; a setting that would change the result and is not implemented is a
    ValueError.
    """
    _refuse_what_is_not_honoured(hf, architecture)
    return {
        "vocab_size": require_size(hf, "vocab_size"),
        "hidden_size": require_size(hf, "hidden_size"),
        "intermediate_size": require_size(hf, "intermediate_size"),
        "num_layers": require_size(hf, "num_hidden_layers", most=MAX_LAYERS),
        "num_heads": require_size(hf, "num_attention_heads"),
        "max_position": require_size(hf, "max_position_embeddings", max_position),
        "norm_epsilon": require_number(hf, "rms_norm_eps", 1e-6),
        "has_tied_embeddings": is_enabled(hf, "tie_word_embeddings"),
        **translate_rope(hf, max_position),
    }


def _refuse_what_is_not_honoured(hf: Mapping[str, Any], architecture: str) -> None:
    for key, (harmless, way_out) in _HONOURED.items():
        if key in hf and hf[key] not in harmless:
            raise ValueError(f"{key}={hf[key]!r} is not supported; {way_out}")
    architectures = hf.get("architectures")
    if architectures and architectures != [architecture]:
        raise ValueError(
            f"architectures={architectures!r} is not supported: only {architecture} is;"
            " use a checkpoint of the language model itself"
        )
