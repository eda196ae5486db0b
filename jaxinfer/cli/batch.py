"""`jaxinfer batch`: runs a file of requests through one engine, or joins the shards of such a job."""

from __future__ import annotations

import argparse
import sys
import textwrap
from dataclasses import replace
from typing import Any

from jaxinfer.cli.bench import Load
from jaxinfer.cli.options import checked_params, from_arguments, one_line, option_of, reader
from jaxinfer.cli.output import EXIT_FAULTS
from jaxinfer.config import SamplingParams
from jaxinfer.validation import cut

STATUSES = "Exit status: 0 if all requests have their completions, 1 if some have an error instead, 2 for a mistake."


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of a job."""
    parser.add_argument(
        "input", metavar="IN.jsonl", help='lines of {"custom_id": "...", "prompt": "...", ...}; gzip, Parquet or a URL'
    )
    parser.add_argument("output", metavar="OUT.jsonl", help="a record for each line; .gz, .parquet or a URL")
    parts = parser.add_mutually_exclusive_group()
    shard_help = "run the lines of one shard only, for example 1/8 to 8/8 on eight hosts; --merge joins them"
    parts.add_argument("--shard", type=reader(_shard, "I/N"), metavar="I/N", help=shard_help)
    parts.add_argument("--merge", action="store_true", help="join the finished shards of the job; needs no model")
    parser.add_argument(
        "--errors", metavar="ERRORS.jsonl", help="file for the records of lines that fail; the output when left out"
    )
    parser.add_argument(
        "--served-name",
        action="append",
        metavar="NAME",
        help="a further name of the model, for lines in OpenAI's format that were written for it; may be repeated",
    )
    lines = parser.add_argument_group("all lines", "What the lines leave out; sampling options are for them too.")
    lines.add_argument(
        "--prompt", metavar="TEMPLATE", help='prompt of each line, with its keys in braces: "Sum up {text}"'
    )
    lines.add_argument("--system", metavar="TEXT", help="system prompt, with which each line is a conversation")
    lines.add_argument(
        "--keep", type=reader(_names, "KEY,KEY"), metavar="KEY,KEY", help="keys of a line that its record repeats"
    )
    lines.add_argument(
        "--fields",
        type=reader(_names, "FIELD,FIELD"),
        metavar="FIELD,FIELD",
        help="what a record has, such as text,finish_reason; everything when left out",
    )
    parser.add_argument("--max-in-flight", type=int, metavar="N", help="requests given to the engine at a time")


def run(arguments: argparse.Namespace, load: Load) -> int:
    """Runs the requests, and returns the exit status."""
    from jaxinfer.batch_job import LineForm, check_job, run_batch, shard_path, wrong_lines

    if arguments.merge:
        return _merge(arguments)
    # Loading a model takes minutes, so report mistakes before.
    names = ("max_in_flight", "shard")
    options: Any = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    options["errors_path"] = arguments.errors
    params = checked_params(arguments)
    texts = {"prompt": arguments.prompt, "system": arguments.system, "kept": arguments.keep or ()}
    form = LineForm(**texts, fields=arguments.fields, sampling_params=params)
    if not arguments.process_id:  # the other processes neither read the input nor write the output
        check_job(arguments.input, arguments.output, **options)
        if not arguments.quiet and (wrong := wrong_lines(arguments.input, form)) is not None:
            print(f"jaxinfer: {one_line(wrong)}", file=sys.stderr, flush=True)
    llm = load(arguments)
    params = from_arguments(SamplingParams, arguments, llm.default_sampling_params)
    is_given = params != llm.default_sampling_params
    options["form"] = replace(form, sampling_params=params if is_given else None)
    options |= {"served_names": arguments.served_name or (), "show_progress": not arguments.quiet}
    summary = run_batch(llm, arguments.input, arguments.output, **options)
    if not arguments.quiet:
        print(
            f"{summary.num_requests} requests: {summary.num_done_before} done before, "
            f"{summary.num_completed} completed, {summary.num_errors} with an error; "
            f"{summary.num_tokens} tokens in {summary.seconds:.1f} s, "
            f"{summary.num_tokens / max(summary.seconds, 1e-9):.1f} tokens/s; "
            f"{summary.num_prompt_tokens} tokens of prompts, {summary.num_cached_tokens} of them from the prefix cache",
            file=sys.stderr,
        )
        for custom_id, text in summary.first_texts:
            print(f"\n{cut(custom_id)}:\n{textwrap.indent(cut(text), '    ')}", file=sys.stderr)
    num_errors = summary.num_errors_before + summary.num_errors
    if num_errors:
        output = arguments.errors or arguments.output
        output = output if arguments.shard is None else shard_path(output, arguments.shard)
        what = "these records" if arguments.errors is None else "this file"
        print(
            f"jaxinfer: {num_errors} of {summary.num_requests} requests have an error in {output}; correct"
            f" their lines, delete {what} and run the job again",
            file=sys.stderr,
        )
    llm.close()
    return EXIT_FAULTS if num_errors else 0


def _merge(arguments: argparse.Namespace) -> int:
    from jaxinfer.batch_job import merge_shards

    own = ("run", "parser", "input", "output", "errors", "merge", "quiet", "takes_one_adapter")
    given = sorted(name for name, value in vars(arguments).items() if name not in own and value is not None)
    if given:
        options = ", ".join(map(option_of, given))
        raise ValueError(f"--merge runs no request, so it takes no {options}; leave it out")
    merged = merge_shards(arguments.input, arguments.output, errors_path=arguments.errors)
    if not arguments.quiet:
        print(f"{merged.num_requests} requests merged, {merged.num_errors} with an error", file=sys.stderr)
    return EXIT_FAULTS if merged.num_errors else 0


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise ValueError
    return names


def _shard(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    return int(index), int(count)
