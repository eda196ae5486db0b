"""Turns the fields of a configuration into options of the command line, with help texts, examples and parsers."""

from __future__ import annotations

import argparse
import dataclasses
import re
import textwrap
from collections.abc import Callable, Container, Mapping
from types import MappingProxyType
from typing import Any, get_args, get_type_hints

from jaxinfer.config import AUTO, Parallelism, SamplingParams
from jaxinfer.validation import cut

# Help texts of the fields, by theme. Logits processors are functions, so they have no option.
HELP = {
    "samples and their length": {
        "n": "samples to draw of the prompt",
        "sample_index": "index of the first sample, to go on with one of an earlier request",
        "best_of": "draw this many samples and give the n most probable",
        "max_tokens": "most tokens to generate",
        "min_tokens": "no stop token or string before this many tokens",
        "stop": "end the text before this string",
        "stop_token_ids": "end the text at this token",
        "ignore_eos": "go on after the model's end tokens",
        "thinking_token_budget": "most tokens of reasoning; 0 leaves none",
        "skip_special_tokens": "leave special tokens, such as end marks, out of the text (default on)",
    },
    "how tokens are drawn": {
        "temperature": "0 takes the most probable token",
        "top_k": "sample from the K most probable tokens; 0 switches it off",
        "top_p": "sample from the most probable tokens that together have this probability",
        "min_p": "drop tokens less probable than this times the most probable one",
        "typical_p": "sample from the tokens nearest to the expected surprise that together have this probability",
        "seed": "fixes every draw; one is drawn and reported otherwise",
    },
    "what makes tokens less or more probable": {
        "repetition_penalty": "divides positive logits of tokens in prompt or output, multiplies negative ones",
        "presence_penalty": "subtracted from the logits of tokens in the output",
        "frequency_penalty": "subtracted from a token's logit for each time it is in the output",
        "no_repeat_ngram_size": "never repeat this many tokens; 0 switches it off",
        "logit_bias": "add BIAS to the logit of token ID",
        "bad_words": "never complete this sequence of token ids",
        "allowed_token_ids": "draw nothing but these tokens",
    },
    "structure of the output": {
        "json_schema": "JSON schema that the output has to follow",
        "regex": "regular expression that the output has to match",
        "choices": "the output is this string or another one given so",
        "grammar": "grammar in Lark's notation that the output has to follow",
    },
    "log probabilities": {
        "log_probs": "print the log probability of each token and of this many alternatives, to standard error",
        "prompt_log_probs": "the same of the prompt's tokens",
    },
    "model": {
        "max_adapters": "adapters (LoRA) that may be loaded at once",
        "max_adapter_rank": "largest rank of an adapter",
        "quantization": "int8 or int4: round the weights of products to so many bits",
    },
    "requests and steps": {
        "tensor": "devices that split each layer's heads and hidden units, and the vocabulary",
        "experts": "groups of devices that split the experts of a mixture",
        "stages": "groups of devices that share the layers; for several hosts",
        "replicas": "copies of the model, each on devices of its own, with one queue; auto: as many as there are"
        " devices for",
        "prefill": "first copies of the model that only prefill, for the others, which then only decode",
        "exact": "on a GPU too, a token's bits do not depend on what is computed beside it; slower",
        "attention": "reference: attention in plain JAX, slow on a GPU or TPU, for what their kernels refuse",
        "max_model_len": "most tokens of prompt and output together",
        "num_sink_tokens": "first tokens that longer requests see beside the last ones; without it there are none",
        "max_num_seqs": "requests computed in one step",
        "max_waiting": "requests queued beyond those that can run",
        "max_num_batched_tokens": "tokens computed in one step",
        "max_mixed_tokens": "tokens computed in a step in which somebody decodes",
        "decode_loop_steps": "decode steps that one dispatch may run; tokens then come in bursts",
    },
    "memory": {
        "memory_bytes": "bytes that parameters, cache and steps may take on the device",
        "cache_bytes": "bytes the cache may take",
        "cache_dtype": "fp8, int8, int4 or int2: keep keys and values in 8, 4 or 2 bits",
        "num_pages": "pages of the cache",
        "page_size": "token slots per page of the cache",
    },
    "prefix cache": {
        "prefix_cache": "share the cache of equal beginnings between requests (default on)",
        "host_cache_bytes": "bytes of the host's memory for pages that the cache has no room for",
        "disk_cache_bytes": "bytes of the disk for pages that the host has no room for",
        "disk_cache_path": "folder for these pages",
    },
    "speculation": {
        "max_drafts": "most drafts verified per request and step",
        "adaptive_drafts": "verify only as many drafts as pay (default on)",
        "draft_trees": "let draft heads guess several tokens for one place",
    },
    "what a request may ask for": {
        "max_samples": "most samples of a prompt that a request may ask for",
        "max_log_probs": "most alternatives per token that a request may ask for",
        "max_prompt_log_probs": "the same per token of the prompt; without it no request may ask",
        "sampling_log_probs": "also report each token's log-probability in the distribution that it was drawn from",
        "max_listed_tokens": "most token ids that a request may name in one parameter",
    },
    "goodput": {
        "ttft_target": "seconds to the first token within which a request counts for the goodput",
        "tpot_target": "seconds per token after it within which a request counts for the goodput",
    },
}

EXAMPLES_TITLE = "examples:"
# At the end of the help of each command: pairs of a line, and what it does.
EXAMPLES: dict[str, tuple[tuple[str, str], ...]] = {
    "generate": (
        ('jaxinfer generate "def add(" --temperature 0', "by the bundled model"),
        ('jaxinfer generate "The capital of France is" -m Qwen/Qwen3-0.6B --max-tokens 32', "by one of the Hub"),
        ("git diff | jaxinfer generate -m ./my-model --quiet > summary.txt", "prompt from standard input"),
    ),
    "chat": (
        ("jaxinfer chat Qwen/Qwen3-0.6B", "a conversation, line by line"),
        ('jaxinfer chat ./my-model --system "Answer briefly." --temperature 0.7', "a folder, with a system prompt"),
        ("jaxinfer chat ./qwen3-8b-q8_0.gguf --load talk.json", "a GGUF file; goes on with what /save wrote"),
    ),
    "batch": (
        ("jaxinfer batch prompts.jsonl answers.jsonl -m Qwen/Qwen3-0.6B", "run it again to go on after a crash"),
        (
            'jaxinfer batch questions.parquet answers.parquet --prompt "{question}" --max-tokens 256 --fields text',
            "a column as the prompt",
        ),
        ("jaxinfer batch prompts.jsonl answers.jsonl --shard 1/8", "the first of eight hosts; then --merge"),
    ),
    "serve": (
        ("jaxinfer serve Qwen/Qwen3-0.6B", "OpenAI's API and a page at http://127.0.0.1:8000/"),
        ("jaxinfer serve ./my-model --host 0.0.0.0 --port 8000 --keys keys.jsonl", "to a network, with keys"),
        ("jaxinfer serve meta-llama/Llama-3.3-70B-Instruct --tensor-parallel 8", "over eight devices"),
    ),
    "warm-up": (
        ("jaxinfer warm-up Qwen/Qwen3-0.6B", "all steps, for the default limits"),
        ("jaxinfer warm-up ./my-model --max-model-len 8192 --max-num-seqs 32", "for a start with these options"),
    ),
    "compile": (
        ("jaxinfer compile Qwen/Qwen3-0.6B --out ./steps", "for the devices here, without loading weights"),
        (
            "jaxinfer compile Qwen/Qwen3-8B --out gs://bucket/steps --chip v6e-1 --num-pages 6144",
            "for a TPU elsewhere",
        ),
    ),
    "plan": (
        ("jaxinfer plan Qwen3-8B --device v6e-1", "a built-in shape on one TPU"),
        ("jaxinfer plan Llama-3-70B --device H100x4 --context 4096", "with 4,096 tokens in each request"),
        ("jaxinfer plan ./my-model --device L4 --quantization int8", "your own config.json, rounded"),
    ),
    "quantize": (
        ("jaxinfer quantize Qwen/Qwen3-0.6B qwen3-int4", "rounded, in a minute or so"),
        (
            "jaxinfer quantize ./my-model my-model-int4 --method gptq --calibration texts.jsonl",
            "calibrated on texts",
        ),
        (
            "jaxinfer quantize ./my-model my-model-int2 --scheme int2 --method gptq",
            "in 2 bits, on texts of the model",
        ),
    ),
    "doctor": (
        ("jaxinfer doctor", "the machine, with the bundled model"),
        ("jaxinfer doctor ./my-model --cache-dtype fp8", "the kernels of a model, with another cache"),
        ("jaxinfer doctor --quiet", "the verdict alone"),
    ),
    "models": (
        ("jaxinfer models", "the families, with published models"),
        ("jaxinfer models Qwen/Qwen3-8B", "yes or no, without its weights"),
        ("jaxinfer models ./model-q4_k_m.gguf", "of a file"),
    ),
    "bench": (
        ("jaxinfer bench Qwen/Qwen3-0.6B --num-requests 64 --rate 4", "four requests a second"),
        ("jaxinfer bench --num-requests 8 --input-len 64 --output-len 64", "a quick look, bundled model"),
    ),
    "replay": (
        ("jaxinfer replay trace.jsonl -m ./my-model", "a recorded load on the engine"),
        ("jaxinfer replay trace.jsonl --save-step-times times.json", "what simulate predicts from"),
    ),
    "simulate": (
        ("jaxinfer simulate trace.jsonl --step-times times.json", "without a device"),
        ("jaxinfer simulate trace.jsonl --step-times times.json --max-num-seqs 16", "with another limit"),
    ),
}


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition(":")
    return int(token_id), float(bias)


def _word(text: str) -> tuple[int, ...]:
    return tuple(int(token_id) for token_id in text.split(","))


def read_replicas(text: str) -> int | str:
    """Returns a number of replicas, or AUTO."""
    return AUTO if text == AUTO else int(text)


# Fields whose own fields are options: the type, and the option of each field.
NESTED: dict[str, tuple[type, dict[str, str]]] = {
    "parallelism": (
        Parallelism,
        {
            **{"tensor": "tensor_parallel", "experts": "expert_parallel"},
            **{"replicas": "replicas", "prefill": "prefill_replicas", "stages": "stages"},
        },
    ),
}


PROCESSES = (
    "One engine with the devices of several processes: the same command in each, and --tensor-parallel times"
    " --expert-parallel times --stages is the number of all devices. Process 0 has the output, and the others end with"
    " it."
)


SIZE = "SIZE"  # form of a number of bytes
UNITS = {f"{prefix}{i}B": (1024 if i else 1000) ** (n + 1) for n, prefix in enumerate("KMGT") for i in ("I", "")}


# Options that may be repeated, with one value each time: (parser of a value, its form in the help).
REPEATED: dict[str, tuple[Callable[[str], Any], str]] = {
    "logit_bias": (_bias, "ID:BIAS"),
    "bad_words": (_word, "ID,ID,..."),
    "allowed_token_ids": (int, "ID"),
    "choices": (str, "TEXT"),
    "stop": (str, "TEXT"),
    "stop_token_ids": (int, "ID"),
}


def add_fields(
    parser: argparse.ArgumentParser,
    config: type,
    *,
    omit: Container[str] = (),
    groups: Mapping[str, argparse._ArgumentGroup] = MappingProxyType({}),
) -> None:
    """Adds an option per field not in `omit`, to the group of its theme: from `groups` by name, else a new one.

    Options that the user leaves out stay out of the namespace, because `config` has the defaults.
    """
    hints = get_type_hints(config)
    fields = {field.name: field for field in dataclasses.fields(config) if field.name not in omit}
    for kind, names in [nested for name, nested in NESTED.items() if name in fields]:
        hints |= get_type_hints(kind)
        fields |= {field.name: field for field in dataclasses.fields(kind) if field.name in names}
    for theme, helps in HELP.items():
        names = [name for name in helps if name in fields]
        group = groups.get(theme) or (parser.add_argument_group(theme) if names else None)
        for name in names:
            assert group is not None
            _add_field(group, fields[name], hints[name], helps[name])


def _add_field(group: argparse._ArgumentGroup, field: dataclasses.Field[Any], hint: Any, text: str) -> None:
    options: dict[str, Any] = {"help": text, "default": argparse.SUPPRESS}
    if hint is bool:
        options["action"] = argparse.BooleanOptionalAction if field.default else "store_true"
    else:
        kind = next(iter(get_args(hint)), hint)  # the first type in int | None is the type of a value
        of_kind = (read_size, SIZE) if field.name.endswith("_bytes") else (kind, kind.__name__.upper())
        if any(AUTO in get_args(part) for part in get_args(hint)):
            of_kind = (read_replicas, f"INT or {AUTO}")
        read, metavar = REPEATED.get(field.name, of_kind)
        options["type"], options["metavar"] = reader(read, metavar), metavar
        if field.name in REPEATED:
            options["action"] = "append"
            options["help"] += "; may be repeated"
        elif field.default is not None:
            options["help"] += f" (default {field.default})"
    named = next((names[field.name] for _, names in NESTED.values() if field.name in names), field.name)
    group.add_argument(option_of(named), **options)


def option_of(parameter: str) -> str:
    """Returns the option that sets a parameter."""
    return "--" + parameter.replace("_", "-")


def one_line(error: object) -> str:
    """Returns an error's message on one line, with the middle of long words left out, and fields as options."""
    text = re.sub(r"\bEngineConfig\.(?!parallelism)(\w+)", lambda found: option_of(found[1]), str(error))
    return " ".join(map(cut, text.split()))


def read_size(text: str) -> int:
    """Returns the bytes that a text states: a number, or one with a unit, such as 16GiB or 1.5GB."""
    if (found := re.fullmatch(r"([0-9.]+) ?([KMGT]I?B)", text.upper())) is None:
        return int(text)
    return round(float(found[1]) * UNITS[found[2]])


def reader(read: Callable[[str], Any], metavar: str) -> Callable[[str], Any]:
    """Wraps the parser of an option's value; its error message shows the expected form."""

    def checked(text: str) -> Any:
        try:
            return read(text)
        except (ValueError, OverflowError):
            example = ", such as 16GiB or 17179869184" if metavar == SIZE else ""
            raise argparse.ArgumentTypeError(f"{text!r} is not of the form {metavar}{example}") from None

    return checked


def add_processes(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `jax.distributed.initialize`, for an engine over several processes."""
    group = parser.add_argument_group("several processes", description=PROCESSES)
    group.add_argument(
        "--coordinator", metavar="HOST:PORT", help="an address of process 0; auto: JAX knows the cluster"
    )
    group.add_argument("--num-processes", type=int, metavar="N", help="number of processes")
    group.add_argument("--process-id", type=int, metavar="I", help="this process, from 0")


def join_processes(arguments: argparse.Namespace) -> None:
    """Connects this process with the others that its options name, if any; afterwards it knows its own number.

    Raises ValueError if an option is missing.
    """
    names = ("coordinator", "num_processes", "process_id")
    given = {name: value for name in names if (value := getattr(arguments, name, None)) is not None}
    if not given:
        return
    is_auto = given == {"coordinator": "auto"}
    if len(given) < len(names) and not is_auto:
        missing = ", ".join(option_of(name) for name in names if name not in given)
        raise ValueError(f"several processes also need {missing}; or give --coordinator auto alone")
    if not is_auto and not 0 <= given["process_id"] < given["num_processes"]:
        raise ValueError(
            f"--process-id {given['process_id']} is not from 0 to {given['num_processes'] - 1}, one less than"
            " --num-processes"
        )
    import jax

    jax.distributed.initialize(*() if is_auto else given.values())
    arguments.process_id = jax.process_index()


def add_adapters(group: argparse._ArgumentGroup, *, takes_one: bool) -> None:
    """Adds the option of LoRA adapters; a command for one request takes one."""
    use = "" if takes_one else ", for requests that name it; may be repeated"
    help_text = f"LoRA adapter that PEFT has saved{use}"
    group.add_argument("--adapter", action="append", metavar="NAME=PATH", help=help_text)
    group.set_defaults(takes_one_adapter=takes_one)


def read_adapters(arguments: argparse.Namespace) -> Mapping[str, str]:
    """Returns the folder or id of each adapter by name, and gives the engine slots for them if nothing else is said.

    Raises ValueError for another form, a repeated name, or several adapters for one request.
    """
    adapters: dict[str, str] = {}
    for text in getattr(arguments, "adapter", None) or ():
        name, _, path = text.partition("=")
        if not name or not path:
            raise ValueError(f"--adapter {text}: give a name and a folder or id, as in NAME=PATH")
        if name in adapters:
            raise ValueError(f"--adapter {text}: the name {name!r} is given twice; give each adapter its own")
        adapters[name] = path
    if len(adapters) > 1 and arguments.takes_one_adapter:
        raise ValueError(f"--adapter is given {len(adapters)} times, and this command computes one request; give one")
    if adapters:
        vars(arguments).setdefault("max_adapters", len(adapters))
    return adapters


def from_arguments(config: type, arguments: argparse.Namespace, defaults: Any = None) -> Any:
    """Returns the configuration from the parsed options of `add_fields`; options left out are as in `defaults`."""
    names = {field.name for field in dataclasses.fields(config)}
    given = {name: value for name, value in vars(arguments).items() if name in names}
    for name, (kind, options) in NESTED.items():
        own = {field: getattr(arguments, option) for field, option in options.items() if hasattr(arguments, option)}
        if own and name in names:
            given[name] = kind(**own)
    return config(**given) if defaults is None else dataclasses.replace(defaults, **given)


def checked_params(arguments: argparse.Namespace) -> SamplingParams:
    """Returns the sampling options, and has the engine allow for them; ValueError before a model is loaded."""
    params = from_arguments(SamplingParams, arguments)
    if params.structure is not None:
        from jaxinfer.text.grammar import check_structure

        check_structure(params)
    if params.prompt_log_probs is not None:
        vars(arguments).setdefault("max_prompt_log_probs", params.prompt_log_probs)
    return params


class HelpFormatter(argparse.HelpFormatter):
    """Wraps each paragraph by itself, and leaves the examples as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        def filled(paragraph: str) -> str:
            return paragraph if paragraph.startswith(EXAMPLES_TITLE) else textwrap.fill(paragraph, width)

        return textwrap.indent("\n\n".join(map(filled, text.split("\n\n"))), indent)


def add_examples(command: argparse.ArgumentParser) -> None:
    """Ends the help of a command with its examples, and has its usage name the arguments that have no name."""
    name = command.prog.split()[-1]
    lines = [f"  {line}\n      {what}" for line, what in EXAMPLES[name]]
    own = [command.epilog] if command.epilog else []
    command.epilog = "\n\n".join((*own, "\n".join((EXAMPLES_TITLE, *lines))))
    command.usage = " ".join((command.prog, "[options]", *_required(command)))


def _required(command: argparse.ArgumentParser) -> list[str]:
    """Returns the options that a command needs, and its arguments without a name, as the usage writes them."""
    options = [action for action in command._actions if action.option_strings and action.required]
    arguments = [action for action in command._actions if not action.option_strings]
    words = [f"{action.option_strings[-1]} {action.metavar}" for action in options]
    for action in arguments:
        name = str(action.metavar or action.dest)
        words.append(f"[{name}]" if action.nargs in ("?", "*") else name)
    return words
