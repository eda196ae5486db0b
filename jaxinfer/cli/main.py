"""The command line.

* `jaxinfer generate` streams one completion.
* `jaxinfer chat` holds a conversation.
* `jaxinfer batch` runs a file of requests.
* `jaxinfer serve` answers OpenAI's API.
* `jaxinfer warm-up` compiles all steps of a model, for later starts.
* `jaxinfer compile` does so without weights, into a folder or bucket, also for TPUs and GPUs that are not here.
* `jaxinfer bench` measures a random load, `jaxinfer replay` a trace of requests.
* `jaxinfer simulate` predicts a trace without a device.
* `jaxinfer plan` says where a model fits, and how fast it can be there.
* `jaxinfer quantize` writes a quantized copy of a checkpoint.
* `jaxinfer models` lists the families of checkpoints, or says of one checkpoint if it can be read.
* `jaxinfer doctor` describes the machine, and checks that on a CPU no bit of a request depends on the batch.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import time
from importlib.metadata import version
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NoReturn

from jaxinfer._version import __version__

# jax takes seconds to import, so each command imports the modules that need it after parsing its arguments.
from jaxinfer.cli import batch, bench, chat, models, plan, quantize, serve
from jaxinfer.cli.options import (
    HelpFormatter,
    add_adapters,
    add_examples,
    add_fields,
    add_processes,
    checked_params,
    from_arguments,
    join_processes,
    one_line,
    option_of,
    read_adapters,
)
from jaxinfer.cli.output import EXIT_FAULTS, drop_output, require_output, show
from jaxinfer.config import EngineConfig, SamplingParams
from jaxinfer.names import way_out
from jaxinfer.xla_options import MEMORY_FRACTION, take_memory

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from jaxinfer import LLM
    from jaxinfer.engine.llm import Completion
    from jaxinfer.text.tokenizer import Tokenizer

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE

MAX_PROMPT_CHARACTERS = 2**24  # from standard input, which may have no end

OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"  # XLA's status code in its error messages

WARM_UP = "compile all steps of a model, which later starts then load from disk"
WARM_UP_OPTIONS = (
    "Steps are compiled for a machine and for the engine's limits: give the options of the starts to come."
)
COMPILE = "compile all steps of a model without its weights, for starts elsewhere"
COMPILE_OPTIONS = (
    "Steps are compiled for the engine's limits: give the options of the starts to come, and set their"
    " JAX_COMPILATION_CACHE_DIR to the place of --out. They need the same versions of jaxinfer, JAX and its compiler."
)
# The commands whose argument without a name is the model.
TAKE_MODEL = ("chat", "serve", "bench", "warm-up", "compile", "doctor")
# EngineConfig fields without effect on the output of generate and batch.
OMITTED = ("ttft_target", "tpot_target")


class _Parser(argparse.ArgumentParser):
    """Parser of the program or of a command; what it has parsed has itself as `parser`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=HelpFormatter, **options)
        self.set_defaults(parser=self)

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Ends the program for arguments that the command does not know, with the way out for the first option."""
        name = next((each for each in unknown if each.startswith("-")), "").partition("=")[0]
        answer = way_out(_parameter(name), set(map(_parameter, self._option_string_actions)), write=option_of)
        self.error(f"unrecognized arguments: {' '.join(unknown)}" + (f"; {answer}" if answer else ""))

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"jaxinfer: error: {one_line(message)} (try `{self.prog} --help`)\n")

    def parse_args(self, *args: Any, **kwargs: Any) -> Any:
        arguments, unknown = self.parse_known_args(*args, **kwargs)
        if unknown:
            getattr(arguments, "parser", self).refuse(unknown)
        model, named = getattr(arguments, "model", None), vars(arguments).pop("named_model", None)
        if named is not None:
            if model is not None:
                arguments.parser.error(f"the model is given twice, as {model} and as {named}; leave one out")
            arguments.model = named
        for name, value in vars(arguments).items():
            if isinstance(value, list) and (not value or [] in value):  # Python 3.11 parses `--name=--` like this
                self.error(f"argument {option_of(name)}: expected a value, not '--'")
        return arguments


def run() -> NoReturn:
    """Runs this process's command and ends the process.

    It ends at once: Python would wait for the compiler, which cannot stop, and whose step no request needs any more.
    """
    if sys.stderr is None:  # closed; print(file=None) would write to standard output
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  up to the end of the process
    try:
        status = main()
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = EXIT_FAULTS
    if status in (0, EXIT_FAULTS) and not _is_compiling():
        sys.exit(status)
    if sys.stdout is not None:
        sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _is_compiling() -> bool:
    # A command that has compiled steps has imported this; others need not wait for the import of jax.
    module = sys.modules.get("jaxinfer.engine.execution.compiled_steps")
    return module is not None and module.is_compiling()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status: 0, 1 for faults found, 2 for a user's mistake, 130 after Ctrl-C."""
    try:
        arguments = _parser().parse_args(argv)
        if (fraction := getattr(arguments, "memory_fraction", None)) is not None:
            take_memory(fraction)
        join_processes(arguments)
        if arguments.run is not _batch:  # batch prints nothing to standard output
            require_output()
        status = arguments.run(arguments)
    except SystemExit as exit_:  # from --help, --version and the parser's errors
        return exit_.code if isinstance(exit_.code, int) else 0
    except KeyboardInterrupt as interrupt:
        print(f"jaxinfer: {interrupt}" if interrupt.args else "jaxinfer: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        drop_output()  # the reader has closed the pipe
        return EXIT_BROKEN_PIPE
    except (ValueError, OSError, NotImplementedError) as error:
        print(f"jaxinfer: error: {one_line(error)}", file=sys.stderr)
        return EXIT_USAGE
    except (MemoryError, RuntimeError) as error:
        if not (isinstance(error, MemoryError) or OUT_OF_MEMORY in str(error)):
            raise
        limits = "lower the limits of the engine, such as --max-num-seqs, --num-pages or --max-num-batched-tokens"
        print(f"jaxinfer: error: out of memory ({one_line(error)}); {limits}", file=sys.stderr)
        return EXIT_USAGE
    return status or 0


def _parameter(option: str) -> str:
    return option.lstrip("-").replace("-", "_")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="jaxinfer", description="LLM inference in JAX.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"jaxinfer {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    generate = commands.add_parser("generate", help="complete one prompt", allow_abbrev=False)
    generate.add_argument("prompt", nargs="?", help="standard input, less one line end, when it is left out")
    add_fields(generate, SamplingParams, omit=("thinking_token_budget",))
    generate.set_defaults(run=_generate)

    talk = commands.add_parser("chat", help="hold a conversation", epilog=chat.COMMANDS, allow_abbrev=False)
    chat.add_options(talk)
    add_fields(talk, SamplingParams, omit=chat.OMITTED)
    talk.set_defaults(run=_chat)

    job = commands.add_parser(
        "batch", help="run a file of requests; run it again to resume", epilog=batch.STATUSES, allow_abbrev=False
    )
    batch.add_options(job)
    add_fields(job, SamplingParams)
    job.set_defaults(run=_batch)

    server = commands.add_parser("serve", help="answer OpenAI's API over HTTP", allow_abbrev=False)
    serve.add_options(server)
    server.set_defaults(run=serve.serve)

    warmer = commands.add_parser("warm-up", help=WARM_UP, epilog=WARM_UP_OPTIONS, allow_abbrev=False)
    warmer.set_defaults(run=_warm_up)

    compiler = commands.add_parser("compile", help=COMPILE, epilog=COMPILE_OPTIONS, allow_abbrev=False)
    compiler.add_argument("--out", required=True, metavar="PLACE", help="folder or URL of the compiled steps")
    compiler.add_argument(
        "--chip", metavar="NAME", help="devices that need not be here, such as v6e-4; without it, the devices here"
    )
    compiler.set_defaults(run=_compile)

    planner = commands.add_parser("plan", help="say where a model fits, without its weights", allow_abbrev=False)
    plan.add_options(planner)
    add_fields(planner, EngineConfig, omit=plan.OMITTED)
    planner.set_defaults(run=plan.run)

    quantizer = commands.add_parser(
        "quantize", help="write a quantized copy of a checkpoint; run it again to go on", allow_abbrev=False
    )
    quantize.add_options(quantizer)
    quantizer.set_defaults(run=quantize.run)

    doctor = commands.add_parser(
        "doctor", help="describe the machine, and check that on a CPU no bit depends on the batch", allow_abbrev=False
    )
    doctor.set_defaults(run=_doctor)

    readable = commands.add_parser(
        "models", help="say which checkpoints can be read", description=models.DESCRIPTION, allow_abbrev=False
    )
    models.add_options(readable)
    readable.set_defaults(run=models.run)

    omitted = bench.add_commands(commands, _load) | {
        generate: OMITTED,
        talk: OMITTED,
        job: OMITTED,
        server: (),
        warmer: OMITTED,
        compiler: OMITTED,
        doctor: (),
    }
    for command, omit in omitted.items():
        command.add_argument("--quiet", action="store_true", help="no progress and no statistics")
        model = command.add_argument_group("model")
        model.add_argument("-m", "--model", help="folder or name of a checkpoint; without it, the bundled model")
        if command.prog.split()[-1] in TAKE_MODEL:
            command.add_argument("named_model", nargs="?", metavar="MODEL", help="the same as --model")
        model.add_argument("--dtype", help="type of the weights: float32, bfloat16, float16 or auto (default)")
        memory = command.add_argument_group("memory")
        if "memory_bytes" not in omit:
            memory.add_argument(
                "--memory-fraction",
                type=_fraction,
                metavar="FLOAT",
                help=f"part of a GPU's memory that JAX takes (default {MEMORY_FRACTION})",
            )
        groups = {"model": model, "memory": memory}
        if command in (generate, job, server):
            add_processes(command)
        if command in (generate, talk, job, server):
            command.add_argument(
                "--warm-up", action="store_true", default=None, help="compile all steps before the first request"
            )
        if command in (generate, talk, job, server, warmer):
            groups["speculation"] = command.add_argument_group("speculation")
            drafter = "ngram, suffix, mtp, or the folder or id of what drafts"
            groups["speculation"].add_argument("--speculation", metavar="DRAFTER", help=drafter)
            if command is not warmer:
                add_adapters(model, takes_one=command in (generate, talk))
        add_fields(command, EngineConfig, omit=omit, groups=groups)
    for command in commands.choices.values():
        add_examples(command)
    return parser


def _load(arguments: argparse.Namespace) -> LLM:
    named = read_adapters(arguments)
    config = from_arguments(EngineConfig, arguments)
    from jaxinfer import LLM
    from jaxinfer.device import require_device

    require_device(arguments.memory_fraction)
    llm = LLM(
        arguments.model,
        config=config,
        dtype=arguments.dtype,
        speculation=getattr(arguments, "speculation", None),  # a load has no real text to draft from
        show_progress=not arguments.quiet,
    )
    if getattr(arguments, "process_id", None):  # an engine over several processes has ended this one
        raise ValueError(
            "this process has an engine of its own, for it has enough devices; give --tensor-parallel and"
            " --expert-parallel whose product is the number of devices of all processes"
        )
    for name, path in named.items():
        llm.load_adapter(name, path)
    if getattr(arguments, "warm_up", False):
        llm.warm_up(show_progress=not arguments.quiet)
    return llm


def _read_prompt() -> str:
    if sys.stdin.isatty():
        print("jaxinfer: reads the prompt from standard input, up to Ctrl-D", file=sys.stderr)
    text = sys.stdin.read(MAX_PROMPT_CHARACTERS + 2)
    prompt = text.removesuffix("\n")
    if len(prompt) > MAX_PROMPT_CHARACTERS:
        raise ValueError(f"the prompt has more than {MAX_PROMPT_CHARACTERS:,} characters; give a shorter one")
    return prompt


def _generate(arguments: argparse.Namespace) -> int:
    from jaxinfer.engine.request.request import QueueFullError

    checked_params(arguments)
    try:
        prompt = _read_prompt() if arguments.prompt is None else arguments.prompt
        prompt.encode()  # fails on surrogates, which stand for bytes that are not UTF-8
    except UnicodeError:
        raise ValueError("the prompt is not text in UTF-8; convert it") from None
    llm = _load(arguments)
    params = from_arguments(SamplingParams, arguments, llm.default_sampling_params)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Escape characters that the terminal cannot encode.
        sys.stdout.reconfigure(errors="backslashreplace")
    started_at, first_at, status = time.monotonic(), None, 0
    try:
        for delta in llm.stream(prompt, params, adapter=next(iter(llm.adapters), None)):
            if delta.token_ids and first_at is None:
                first_at = time.monotonic()
            # Deltas of several samples are interleaved, so show each sample when it ends.
            text = delta.text if params.n == 1 else delta.completion.text if delta.completion else ""
            show(text, end="" if delta.completion is None else "\n")
            if delta.completion is not None:
                _report(delta.completion, llm.tokenizer, arguments, started_at, first_at or time.monotonic())
                if delta.completion.finish_reason == "error":
                    print(f"jaxinfer: ended by an error: {one_line(delta.completion.error)}", file=sys.stderr)
                    status = EXIT_FAULTS
    except QueueFullError as error:  # more samples than max_num_seqs and max_waiting allow
        raise ValueError(str(error)) from None
    llm.close()
    return status


def _chat(arguments: argparse.Namespace) -> None:
    checked_params(arguments)
    options = chat.read_options(arguments)
    llm = _load(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    params = from_arguments(SamplingParams, arguments, llm.default_sampling_params)
    chat.Chat(llm, params, **options).run()
    llm.close()


def _report(
    completion: Completion,
    tokenizer: Tokenizer | None,
    arguments: argparse.Namespace,
    started_at: float,
    first_at: float,
) -> None:
    assert tokenizer is not None  # because the prompt is text
    if getattr(arguments, "prompt_log_probs", None) is not None:
        rows = zip(completion.prompt_log_probs, completion.prompt_top_log_probs, strict=True)
        _print_log_probs("prompt token", completion.prompt_token_ids, rows, tokenizer)
    if getattr(arguments, "log_probs", 0):
        rows = zip(completion.log_probs, completion.top_log_probs, strict=True)
        _print_log_probs("token", completion.token_ids, rows, tokenizer)
    if not arguments.quiet:
        seconds = time.monotonic() - started_at
        num_tokens = len(completion.token_ids)
        print(
            f"{len(completion.prompt_token_ids)} + {num_tokens} tokens in {seconds:.2f} s, "
            f"{num_tokens / max(seconds, 1e-9):.1f} tokens/s, first after {first_at - started_at:.3f} s, "
            f"ended by {completion.finish_reason}, seed {completion.seed}, sample {completion.sample_index}",
            file=sys.stderr,
        )


def _print_log_probs(
    name: str,
    token_ids: Iterable[int],
    rows: Iterable[tuple[float | None, dict[int, float]]],
    tokenizer: Tokenizer,
) -> None:
    def show(token_id: int, log_prob: float | None) -> str:
        return f"{token_id} {tokenizer.text_of(token_id)!r} {'-' if log_prob is None else f'{log_prob:.4f}'}"

    for token_id, (log_prob, top) in zip(token_ids, rows, strict=False):
        alternatives = ", ".join(show(*pair) for pair in top.items())
        print(f"{name} {show(token_id, log_prob)}  alternatives {alternatives}", file=sys.stderr)


def _fraction(text: str) -> float:
    try:
        fraction = float(text)
    except ValueError:
        fraction = 0.0
    if not 0 < fraction <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no part; give a number above 0 and up to 1, such as 0.9")
    return fraction


def _batch(arguments: argparse.Namespace) -> int:
    return batch.run(arguments, _load)


def _warm_up(arguments: argparse.Namespace) -> None:
    llm = _load(arguments)
    ready = llm.warm_up(show_progress=not arguments.quiet)
    llm.close()
    if not arguments.quiet:
        show(ready.compiled)


def _compile(arguments: argparse.Namespace) -> None:
    config = from_arguments(EngineConfig, arguments)
    from jaxinfer.ahead_of_time.start import Start, compile_start, compile_start_for
    from jaxinfer.device import require_device

    start = Start(
        model=arguments.model,
        config=config,
        dtype=arguments.dtype,
        place=arguments.out,
        show_progress=not arguments.quiet,
    )
    if arguments.chip is None:
        require_device(arguments.memory_fraction)
        compiled = compile_start(start)
    elif arguments.memory_fraction is not None:
        raise ValueError("--memory-fraction is for a GPU that is here; give --memory-bytes beside --chip")
    else:
        compiled = compile_start_for(start, arguments.chip)
    if not arguments.quiet:
        show(f"{compiled} in {arguments.out}")


def _doctor(arguments: argparse.Namespace) -> int:
    config = from_arguments(EngineConfig, arguments)
    from jaxinfer.cli.doctor import examine
    from jaxinfer.cli.machine import describe_machine
    from jaxinfer.device import describe_cpu, idle_accelerators, require_device, resolve_dtype
    from jaxinfer.engine.engine import BUNDLED_MODEL
    from jaxinfer.xla_options import FUSED_PRODUCTS
    from kernels_pallas.device import device_at_hand
    from kernels_pallas.row_products import fuses_products

    require_device(arguments.memory_fraction)
    dtype = resolve_dtype(arguments.dtype)
    model = arguments.model or BUNDLED_MODEL
    show(f"{describe_cpu()}; jax {version('jax')}, jaxlib {version('jaxlib')}")
    machine = describe_machine(model, config, dtype)
    if arguments.quiet:  # its devices alone, which come first
        machine = [*takewhile(lambda line: line.startswith("device: "), machine), *idle_accelerators()]
    for line in machine:
        show(line)
    if (platform := device_at_hand().platform) != "cpu":
        show(f"the device is a {platform}: bits of a request may depend on the batch without --exact")
        return 0
    if not arguments.quiet:
        print("computing each product of the model alone and in batches of every size", file=sys.stderr)
    findings = []
    for finding in examine(model, config, dtype):
        findings.append(finding)
        if finding.faults or not arguments.quiet:
            show(finding)
    num_faulty = sum(bool(finding.faults) for finding in findings)
    if num_faulty:
        show(f"{num_faulty} of {len(findings)} products depend on the batch: so do the bits of a request on this CPU")
    if is_fused := dtype == "float32" and fuses_products():
        show(FUSED_PRODUCTS)
    if num_faulty or is_fused:
        return EXIT_FAULTS
    show(f"{len(findings)} products: on this CPU no bit of them depends on the batch")
    return 0
