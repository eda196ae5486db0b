"""Names that are unknown here: those of other engines, with what says the same, and misspelt ones."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

C = TypeVar("C", bound=type)
NEARNESS = 0.75  # of a misspelt name, by difflib
MAX_LENGTH = 64  # of a name that is compared with others: a client may send one of megabytes
NONE: Mapping[str, Collection[str]] = MappingProxyType({})

# From names of vLLM, SGLang, transformers, llama.cpp and OpenAI's API to the same parameters here.
SAME: Mapping[str, str] = {
    # Of a request.
    "logprobs": "log_probs",
    "top_logprobs": "log_probs",
    "prompt_logprobs": "prompt_log_probs",
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "num_return_sequences": "n",
    "temp": "temperature",
    "random_seed": "seed",
    "sampling_seed": "seed",
    "repeat_penalty": "repetition_penalty",
    "stop_sequences": "stop",
    "stop_strings": "stop",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choices",
    "guided_grammar": "grammar",
    "ebnf": "grammar",
    "use_tqdm": "show_progress",
    "lora_request": "adapter",
    "lora_path": "adapter",
    # Of an engine.
    "kv_cache_dtype": "cache_dtype",
    "block_size": "page_size",
    "enable_prefix_caching": "prefix_cache",
    "num_gpu_blocks_override": "num_pages",
    "kv_cache_memory_bytes": "cache_bytes",
    "context_length": "max_model_len",
    "max_seq_len": "max_model_len",
    "n_ctx": "max_model_len",
    "ctx_size": "max_model_len",
    "max_batch_size": "max_num_seqs",
    "max_running_requests": "max_num_seqs",
    "max_queued_requests": "max_waiting",
    "chunked_prefill_size": "max_num_batched_tokens",
    "max_prefill_tokens": "max_num_batched_tokens",
    "num_scheduler_steps": "decode_loop_steps",
    "max_loras": "max_adapters",
    "max_lora_rank": "max_adapter_rank",
    "max_logprobs": "max_log_probs",
    "speculative_config": "speculation",
    "speculative_model": "speculation",
    "num_speculative_tokens": "max_drafts",
    "speculative_num_draft_tokens": "max_drafts",
    "model_path": "model",
    # Of the command line.
    "tensor_parallel_size": "tensor_parallel",
    "tp_size": "tensor_parallel",
    "data_parallel_size": "replicas",
    "dp_size": "replicas",
    "pipeline_parallel_size": "stages",
    "pp_size": "stages",
    "gpu_memory_utilization": "memory_fraction",
    "mem_fraction_static": "memory_fraction",
    "served_model_name": "served_name",
    "lora_modules": "adapter",
    "lora_paths": "adapter",
    "allowed_origins": "cors_origin",
    "ssl_certfile": "tls_certificate",
    "ssl_keyfile": "tls_key",
}
# What to do about other names.
ANSWERS: Mapping[str, str] = {
    "tensor_parallel_size": "give parallelism=jaxinfer.config.Parallelism(tensor=…)",
    "data_parallel_size": "give parallelism=jaxinfer.config.Parallelism(replicas=…)",
    "enable_expert_parallel": "give parallelism=jaxinfer.config.Parallelism(experts=…), --expert-parallel",
    "pipeline_parallel_size": "give parallelism=jaxinfer.config.Parallelism(stages=…)",
    "gpu_memory_utilization": "set the variable XLA_PYTHON_CLIENT_MEM_FRACTION before JAX starts, 0.92 by default",
    "revision": "write it behind the id of the model: 'owner/name@revision'",
    "trust_remote_code": "leave it out: no code of a checkpoint is run",
    "enforce_eager": "leave it out: steps are always compiled",
    "tokenizer": "leave it out: the tokenizer is that of the checkpoint",
    "tokenizer_mode": "leave it out: the tokenizer is that of the checkpoint",
    "skip_tokenizer_init": "leave it out: prompts may be lists of token ids",
    "download_dir": "set the variable HF_HOME",
    "enable_lora": "load adapters by LLM.load_adapter in Python, by --adapter NAME=PATH on the command line",
    "cpu_offload_gb": "weights stay on the device; quantize them, or split the model over more devices",
    "swap_space": "host_cache_bytes, in bytes, keeps pages on the host that the device has no room for",
    "enable_chunked_prefill": "leave it out: prompts are always computed in chunks",
    "disable_log_stats": "leave it out: metrics have the figures, and no log",
    "load_format": "leave it out: the format is read from the checkpoint",
    "structured_outputs": "give json_schema, regex, choices or grammar",
    "guided_decoding": "give json_schema, regex, choices or grammar",
    "do_sample": "give temperature=0 for the most probable tokens",
    "num_beams": "beams are searched by LLM.beam_search",
    "use_beam_search": "beams are searched by LLM.beam_search",
    "length_penalty": "beams are searched by LLM.beam_search",
    "detokenize": "leave it out: a completion has text and token_ids",
    "include_stop_str_in_output": "add the stop string to the text",
    "truncate_prompt_tokens": "cut the prompt to its last tokens yourself",
    "prompt_token_ids": "give the list of token ids as the prompt",
    "enable_auto_tool_choice": "leave it out: calls are read wherever tools are given",
    "tool_call_parser": "leave it out: the chat template shows the style of calls; or give answer_style",
    "reasoning_parser": "leave it out: the chat template shows the style of reasoning",
}


def way_out(
    name: str,
    known: Collection[str],
    others: Mapping[str, Collection[str]] = NONE,
    *,
    write: Callable[[str], str] = str,
) -> str:
    """Returns what to write in place of a name that is unknown at some place, "" if nothing is near.

    `known` are the names that the place takes, and `others` those of other places, by what they belong to. `write`
    spells a name as the place does.
    """
    ours = SAME.get(name, name)
    if ours in known:
        return f"write {write(ours)}" if ours == name else f"{write(name)} is {write(ours)} here"
    for owner, names in others.items():
        if ours in names:
            return f"{write(ours)} belongs to {owner}"
    if name in ANSWERS:
        return ANSWERS[name]
    near = difflib.get_close_matches(name, known, 1, NEARNESS) if len(name) <= MAX_LENGTH else []
    return f"did you mean {write(near[0])}?" if near else ""


def explains_names(cls: C) -> C:
    """Class decorator: an unknown keyword of the constructor raises a TypeError with the way out."""
    initialise = cls.__init__
    known = frozenset(inspect.signature(initialise).parameters) - {"self"}

    @functools.wraps(initialise)
    def __init__(self: Any, *args: Any, **fields: Any) -> None:  # noqa: N807
        if not known.issuperset(fields):
            refuse(cls.__name__, fields.keys() - known, known)
        initialise(self, *args, **fields)

    setattr(cls, "__init__", __init__)  # noqa: B010  a checker would take the assignment for a method's redefinition
    return cls


def refuse(
    place: str, unknown: Collection[str], known: Collection[str], others: Mapping[str, Collection[str]] = NONE
) -> NoReturn:
    """Raises TypeError for the first unknown name, with the way out."""
    name = min(unknown)
    answer = way_out(name, known, others) or f"it takes {', '.join(sorted(known))}"
    raise TypeError(f"{place} has no parameter {name}: {answer}")
