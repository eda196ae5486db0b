"""Options of the command line from the fields of a configuration: what each is for, and how its value is read."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any, get_args, get_type_hints

HELP = {
    "n": "samples to draw of the prompt",
    "best_of": "draw this many samples and give the n most probable",
    "max_tokens": "most tokens to generate",
    "temperature": "0 takes the most probable token",
    "top_k": "sample from the K most probable tokens; 0 switches it off",
    "top_p": "sample from the most probable tokens that together have this probability",
    "min_p": "drop tokens less probable than this times the most probable one",
    "typical_p": "sample from the tokens nearest to the expected surprise that together have this probability",
    "repetition_penalty": "divides positive logits of tokens in prompt or output, multiplies negative ones",
    "presence_penalty": "subtracted from the logits of tokens in the output",
    "frequency_penalty": "subtracted from a token's logit for each time it is in the output",
    "no_repeat_ngram_size": "never repeat this many tokens; 0 switches it off",
    "logit_bias": "add BIAS to the logit of token ID",
    "logits_processors": "use this processor of the engine's, with this argument",
    "bad_words": "never complete this sequence of token ids",
    "allowed_token_ids": "draw nothing but these tokens",
    "json_schema": "JSON schema that the output has to follow",
    "regex": "regular expression that the output has to match",
    "choices": "the output is this string or another one given so",
    "grammar": "grammar in Lark's notation that the output has to follow",
    "min_tokens": "no stop token or string before this many tokens",
    "seed": "fixes every draw; one is drawn and reported otherwise",
    "log_probs": "print the log probability of each token and of this many alternatives, to standard error",
    "prompt_log_probs": "print those of the prompt's tokens, with this many alternatives, to standard error",
    "stop": "end the text before this string",
    "stop_token_ids": "end the text at this token",
    "ignore_eos": "go on after the model's end tokens",
    "max_num_seqs": "requests computed in one step",
    "max_num_batched_tokens": "tokens computed in one step",
    "max_model_len": "most tokens of prompt and output together",
    "num_sink_tokens": "first tokens that longer requests go on to see beside the last ones; without it there are none",
    "page_size": "token slots per page of the cache",
    "num_pages": "pages of the cache",
    "memory_bytes": "bytes that parameters, cache and steps may take on the device",
    "cache_bytes": "bytes the cache may take",
    "max_samples": "most samples of a prompt that a request may ask for",
    "max_log_probs": "most alternatives per token that a request may ask for",
    "max_prompt_log_probs": "the same per token of the prompt; without it no request may ask",
    "max_listed_tokens": "most token ids that a request may name in one parameter",
    "decode_loop_steps": "decode steps that one dispatch may run; tokens then come in bursts",
    "prefix_cache": "share the cache of equal beginnings between requests (default on)",
    "max_mixed_tokens": "tokens computed in a step in which somebody decodes",
    "max_waiting": "requests queued beyond those that can run",
    "host_cache_bytes": "bytes of the host's memory for pages that the cache has no room for",
    "disk_cache_bytes": "bytes of the disk for pages that the host has no room for",
    "disk_cache_path": "folder for these",
    "max_drafts": "most drafts verified per request and step",
    "adaptive_drafts": "verify only as many drafts as pay (default on)",
    "draft_trees": "let draft heads guess several tokens for one place",
    "ttft_target": "seconds to the first token within which a request counts for the goodput",
    "tpot_target": "seconds per token after it within which a request counts for the goodput",
    "quantization": "int8 or int4: round the weights of products to so many bits",
}


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition(":")
    return int(token_id), float(bias)


def _argument(text: str) -> tuple[str, float]:
    name, _, argument = text.rpartition(":")
    return name, float(argument)


def _word(text: str) -> tuple[int, ...]:
    return tuple(int(token_id) for token_id in text.split(","))


# Options that take one value each time they are given: how it is read, and what it looks like.
REPEATED: dict[str, tuple[Callable[[str], Any], str]] = {
    "logit_bias": (_bias, "ID:BIAS"),
    "logits_processors": (_argument, "NAME:ARGUMENT"),
    "bad_words": (_word, "ID,ID,..."),
    "allowed_token_ids": (int, "ID"),
    "choices": (str, "TEXT"),
    "stop": (str, "TEXT"),
    "stop_token_ids": (int, "ID"),
}


def add_fields(group: argparse._ArgumentGroup, config: type) -> None:
    """Adds an option per field; those not given stay out of the namespace, for defaults live in `config`."""
    hints = get_type_hints(config)
    for field in dataclasses.fields(config):
        options: dict[str, Any] = {"help": HELP[field.name], "default": argparse.SUPPRESS}
        if hints[field.name] is bool:
            options["action"] = argparse.BooleanOptionalAction if field.default else "store_true"
        else:
            # int | None names the type of one value first.
            kind = next(iter(get_args(hints[field.name])), hints[field.name])
            options["type"], options["metavar"] = REPEATED.get(field.name, (kind, kind.__name__.upper()))
            if field.name in REPEATED:
                options["action"] = "append"
                options["help"] += "; may be repeated"
            elif field.default is not None:
                options["help"] += f" (default {field.default})"
        group.add_argument("--" + field.name.replace("_", "-"), **options)


def from_arguments(config: type, arguments: argparse.Namespace) -> Any:
    """Returns the configuration that the options of `add_fields` ask for."""
    names = {field.name for field in dataclasses.fields(config)}
    return config(**{name: value for name, value in vars(arguments).items() if name in names})
