"""The parameters of vLLM's engine: the same of this package, or the reason why there is none."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax

from jaxinfer.checkpoint import open_checkpoint
from jaxinfer.config import EngineConfig, Parallelism
from jaxinfer.names import ANSWERS, NONE, SAME, way_out
from jaxinfer.validation import require, require_int, shown
from jaxinfer.xla_options import FRACTION_VARIABLE, take_memory, taken_memory

MAX_LOG_PROBS = 20  # vLLM's default
# Parameters of the constructor that are fields of EngineConfig under other names.
TRANSLATED: Mapping[str, str] = MappingProxyType(
    {
        name: SAME[name]
        for name in ("block_size", "num_gpu_blocks_override", "kv_cache_memory_bytes", "enable_prefix_caching")
    }
)
# How vLLM computes, downloads or logs, which changes no token and has no counterpart here: every value is taken.
WITHOUT_EFFECT = frozenset(
    (
        *("async_scheduling", "compilation_config", "cudagraph_capture_sizes", "disable_async_output_proc"),
        *("disable_custom_all_reduce", "distributed_executor_backend", "enable_chunked_prefill"),
        *("enforce_eager", "max_seq_len_to_capture", "swap_space", "trust_remote_code"),
    )
)
# Parameters that are taken with None and these values only: what this package does in any case.
ONLY: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "cpu_offload_gb": (0,),
        "disable_log_stats": (True,),
        "enable_expert_parallel": (False,),
        "hf_overrides": ({},),
        "load_format": ("auto", "safetensors", "hf"),
        "runner": ("auto", "generate", "pooling"),
        "skip_tokenizer_init": (False,),
        "task": ("auto", "generate", "embed"),
        "tokenizer_mode": ("auto", "hf", "slow"),
    }
)
FIELDS = frozenset(field.name for field in dataclasses.fields(EngineConfig))
DTYPES: Mapping[str, str | None] = MappingProxyType({"half": "float16", "float": "float32", "auto": None})
CACHE_DTYPES: Mapping[str, str | None] = MappingProxyType({"auto": None, "fp8": "fp8", "fp8_e4m3": "fp8"})


def model_place(
    model: str | Path | None, revision: str | None, tokenizer: str | None, tokenizer_revision: str | None
) -> str | Path | None:
    """Returns the model with its revision; ValueError for a tokenizer that is not the checkpoint's own.

    A folder has no revisions: as in vLLM, it is taken as it is.
    """
    if tokenizer not in (None, model, str(model)):
        raise ValueError(f"tokenizer={shown(tokenizer)}: {ANSWERS['tokenizer']}")
    if tokenizer_revision not in (None, revision):
        raise ValueError(f"tokenizer_revision={shown(tokenizer_revision)}: {ANSWERS['tokenizer']}")
    if revision is None or (model is not None and Path(model).expanduser().exists()):
        return model
    if model is None:
        raise ValueError(f"revision={shown(revision)} needs a model on the Hub; give its id")
    return f"{model}@{revision}"


def dtype_of(dtype: Any) -> str | None:
    """Returns the name of a type that is given by vLLM's name or as PyTorch's; None for the engine's choice."""
    name = str(dtype).removeprefix("torch.")
    return DTYPES.get(name, name)


def engine_config(
    *,
    tensor_parallel_size: int,
    data_parallel_size: int,
    kv_cache_dtype: str,
    max_logprobs: int,
    max_adapters: int,
    max_lora_rank: int,
    num_speculative_tokens: int | None,
    others: Mapping[str, Any],
    named: Collection[str],
) -> EngineConfig:
    """Returns the configuration that says the same.

    `others` are further parameters of vLLM's constructor, or fields of EngineConfig; the constructor names `named`.
    """
    known = {*named, *TRANSLATED, *FIELDS, *ONLY, *WITHOUT_EFFECT, "pipeline_parallel_size"}
    given = {name: value for name, value in others.items() if value is not None and name not in WITHOUT_EFFECT}
    pipeline_parallel_size = given.pop("pipeline_parallel_size", 1)
    require_int("pipeline_parallel_size", pipeline_parallel_size, 1)
    fields = {TRANSLATED.get(name, name): given[name] for name in given.keys() & {*TRANSLATED, *FIELDS}}
    for name in given.keys() & ONLY.keys():
        require_one_of(name, given[name], ONLY[name])
    refuse("LLM", {name: given[name] for name in given.keys() - {*TRANSLATED, *FIELDS, *ONLY}}, known)
    require_int("tensor_parallel_size", tensor_parallel_size, 1)
    require_int("data_parallel_size", data_parallel_size, 1)
    require_one_of("kv_cache_dtype", kv_cache_dtype, tuple(CACHE_DTYPES))
    sizes = {"tensor": tensor_parallel_size, "replicas": data_parallel_size, "stages": pipeline_parallel_size}
    if max(sizes.values()) > 1:
        fields["parallelism"] = Parallelism(**sizes)
    if num_speculative_tokens is not None:
        fields["max_drafts"] = num_speculative_tokens
    own = {
        "cache_dtype": CACHE_DTYPES[kv_cache_dtype],
        "max_log_probs": max_logprobs,
        "max_prompt_log_probs": max_logprobs,
        "max_adapters": max_adapters,
        "max_adapter_rank": max_lora_rank,
    }
    return EngineConfig(**own | fields)


def refuse(
    place: str, others: Mapping[str, Any], known: Collection[str] = (), elsewhere: Mapping[str, Collection[str]] = NONE
) -> None:
    """Raises TypeError for the first argument that has a value, with the way out.

    `known` are the names that the place takes, and `elsewhere` those of other places, by what they belong to.
    """
    for name, value in others.items():
        if value is not None:
            answer = way_out(name, known, elsewhere) or "leave it out, or use the LLM of this package, LLM.native"
            raise TypeError(f"{place} of jaxinfer.compat.vllm has no parameter {name}={shown(value)}: {answer}")


def require_one_of(name: str, value: Any, allowed: Sequence[Any]) -> None:
    """Raises ValueError for a value that is not among the `allowed` ones."""
    if value not in allowed:
        answer = f"; {ANSWERS[name]}" if name in ANSWERS else ""
        raise ValueError(f"{name}={shown(value)} is not allowed: give {' or '.join(map(repr, allowed))}{answer}")


def speculation_of(given: Mapping[str, Any] | None) -> tuple[str | None, int | None]:
    """Returns the source of drafts, and the most of them in a step, None for the engine's choice."""
    if given is None:
        return None, None
    options = dict(given)
    method, model = options.pop("method", None), options.pop("model", None)
    num_drafts = options.pop("num_speculative_tokens", None)
    for name in ("prompt_lookup_max", "prompt_lookup_min", "draft_tensor_parallel_size"):  # about speed alone
        options.pop(name, None)
    if options:
        raise ValueError(f"speculative_config has {', '.join(options)}; see jaxinfer's docs/speculation.md")
    is_mtp = isinstance(method, str) and method.endswith("mtp")
    speculation = "mtp" if is_mtp else method if method in ("ngram", "suffix") else model
    if speculation is None:
        raise ValueError(f"speculative_config={shown(given)} names no model; give 'model', or the method 'ngram'")
    return speculation, num_drafts


def require_packing(model: str | Path | None, quantization: str) -> None:
    """Raises ValueError unless the checkpoint is packed in this format."""
    packing = None if model is None else open_checkpoint(model, ["config.json"]).packing
    stored = "" if packing is None else str(packing.get("quant_method", ""))
    if not stored or not quantization.lower().replace("_", "-").startswith(stored.replace("_", "-")):
        state = f"is packed by {stored}" if stored else "is not packed"
        raise ValueError(
            f"quantization={shown(quantization)}: the checkpoint {state}; leave it out, or round a checkpoint in"
            " floating point by jaxinfer.LLM(model, quantization='int8')"
        )


def reserve_memory(fraction: float) -> None:
    """Has JAX take this part of a GPU's memory; ValueError if it has started its GPU with another part.

    A TPU or CPU has no such part: there the engine takes what `memory_bytes` allows.
    """
    require(0 < fraction <= 1, "gpu_memory_utilization", fraction, "above 0 and at most 1")
    if not jax._src.xla_bridge.backends_are_initialized():  # pyright: ignore[reportAttributeAccessIssue]
        take_memory(fraction)
    elif jax.default_backend() == "gpu" and taken_memory() != fraction:
        raise ValueError(
            f"gpu_memory_utilization={fraction}: JAX has taken another part of the GPU's memory already"
            f" ({taken_memory()}); give the same part to every LLM of a process, or set the variable"
            f" {FRACTION_VARIABLE}"
        )
