"""The commands bench, replay and simulate: run a load on an engine, or on its scheduler alone."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.cli.options import from_arguments
from jaxinfer.cli.output import show
from jaxinfer.config import EngineConfig
from jaxinfer.validation import cut, shown

if TYPE_CHECKING:
    from jaxinfer import LLM
    from jaxinfer.simulation import RealEngine, Report, SimulatedEngine, TracedRequest

Load = Callable[[argparse.Namespace], "LLM"]

SAMPLE_TRACE = Path(__file__).parents[1] / "assets" / "trace.jsonl"
# EngineConfig fields without effect. The requests of a load have no drafts, and need none of these limits. A
# simulation has no weights and no device, and it knows no times of decode loops or tiers.
NOT_OF_LOADS = (
    "max_drafts",
    "adaptive_drafts",
    "draft_trees",
    "max_samples",
    "max_log_probs",
    "max_prompt_log_probs",
    "sampling_log_probs",
    "max_listed_tokens",
)
NOT_SIMULATED = (
    "quantization",
    "attention",
    "decode_loop_steps",
    "memory_bytes",
    "host_cache_bytes",
    "disk_cache_bytes",
    "disk_cache_path",
)


def add_commands(commands: Any, load: Load) -> dict[argparse.ArgumentParser, tuple[str, ...]]:
    """Adds the parsers of the three commands. `load` makes the engine from the parsed arguments.

    Returns the fields of EngineConfig that each command does not use.
    """
    bench = commands.add_parser("bench", help="measure the engine under a random load", allow_abbrev=False)
    bench.add_argument("--num-requests", type=int, default=64, metavar="N", help="how many (default 64)")
    bench.add_argument("--input-len", type=_lengths, default=(128, 128), metavar="N", help="tokens, or LOW-HIGH (128)")
    bench.add_argument("--output-len", type=_lengths, default=(64, 64), metavar="N", help="tokens, or LOW-HIGH (64)")
    bench.add_argument("--rate", type=float, default=math.inf, help="requests a second; all at once when left out")
    bench.add_argument("--seed", type=int, default=0, help="of arrivals and lengths (default 0)")
    bench.set_defaults(run=lambda arguments: _bench(arguments, load))

    replay = commands.add_parser("replay", help="run a trace of requests, measuring every step", allow_abbrev=False)
    replay.add_argument(
        "--save-step-times", type=_file, metavar="FILE", help="write how long steps take, for `simulate`"
    )
    replay.add_argument(
        "--step-times", type=_file, metavar="FILE", help="simulate as well with these, and print how far off it is"
    )
    replay.set_defaults(run=lambda arguments: _replay(arguments, load))

    simulate = commands.add_parser("simulate", help="run a trace without a device", allow_abbrev=False)
    simulate.add_argument("--step-times", type=_file, metavar="FILE", required=True, help="what `replay` has saved")
    simulate.set_defaults(run=_simulate)

    for command in (replay, simulate):
        link_help = "bytes a second that a hand-over of simulated --prefill-replicas sends"
        command.add_argument("--link-bandwidth", type=float, metavar="BYTES", help=link_help)
        trace_help = f"lines of timestamp, input_length, output_length, …; a sample is {SAMPLE_TRACE}"
        command.add_argument("trace", type=_file, metavar="TRACE.jsonl", help=trace_help.replace("%", "%%"))
    for command in (bench, replay, simulate):
        command.add_argument("--plot", type=_file, metavar="FILE.png", help="draw rows, pages and requests over time")
        command.add_argument("--timeline", type=_file, metavar="FILE.json", help="write a timeline for ui.perfetto.dev")
    return {bench: NOT_OF_LOADS, replay: NOT_OF_LOADS, simulate: NOT_OF_LOADS + NOT_SIMULATED}


def _lengths(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    try:
        lengths = int(low), int(high or low)
    except ValueError:
        lengths = 0, 0
    if not 1 <= lengths[0] <= lengths[1]:
        raise argparse.ArgumentTypeError(f"{cut(text)} is neither a number of at least 1 nor a range LOW-HIGH")
    return lengths


def _file(text: str) -> str:
    if "\0" in text or not text:
        raise argparse.ArgumentTypeError(f"{text!r} is no name of a file")
    return text


def _bench(arguments: argparse.Namespace, load: Load) -> None:
    from jaxinfer.simulation import MAX_LEN, RealEngine, random_trace

    if arguments.num_requests < 1 or not arguments.rate > 0:
        raise ValueError(f"num_requests={arguments.num_requests} and rate={arguments.rate} have to be above 0")
    if arguments.input_len[1] > MAX_LEN:
        raise ValueError(f"input_len={arguments.input_len[1]} is more than a load may have; give at most {MAX_LEN:,}")
    _check_files(arguments)
    trace = random_trace(
        arguments.num_requests,
        input_lens=arguments.input_len,
        output_lens=arguments.output_len,
        rate=arguments.rate,
        seed=arguments.seed,
    )
    engine = RealEngine(load(arguments), show_progress=not arguments.quiet)
    show(_record(trace, engine, arguments, total=arguments.num_requests))


def _replay(arguments: argparse.Namespace, load: Load) -> None:
    from jaxinfer.simulation import (
        RealEngine,
        fit_step_times,
        measured_steps,
        prediction_errors,
        read_trace,
        require_known_steps,
    )

    # A replay takes as long as the trace, so report mistakes before it starts.
    _check_files(arguments)
    if arguments.link_bandwidth is not None and arguments.step_times is None:
        raise ValueError(
            f"link_bandwidth={arguments.link_bandwidth} is that of a simulation; give --step-times, or leave it out"
        )
    num_requests = sum(1 for _ in read_trace(arguments.trace))
    if arguments.save_step_times is not None:
        require_known_steps(from_arguments(EngineConfig, arguments))
    simulated_engine = None if arguments.step_times is None else _simulated_engine(arguments)
    if arguments.save_step_times is not None or simulated_engine is not None:
        vars(arguments).setdefault("decode_loop_steps", 1)  # no loop is simulated
    llm = load(arguments)
    engine = RealEngine(llm, show_progress=not arguments.quiet)
    steps = [] if arguments.save_step_times is None else measured_steps(llm)
    report = _record(read_trace(arguments.trace), engine, arguments, total=num_requests)
    show(report)
    if arguments.save_step_times is not None:
        try:
            fitted = fit_step_times(steps)
        except ValueError as error:
            path = shown(arguments.save_step_times)
            raise ValueError(f"--save-step-times={path} is not written: {error}") from None
        with _written(arguments.save_step_times):
            fitted.save(arguments.save_step_times)
    if simulated_engine is not None:
        simulated = _drive(read_trace(arguments.trace), simulated_engine, arguments)
        errors = prediction_errors(simulated, report)
        show(f"simulated: {simulated}")
        show("simulated is off by " + ", ".join(f"{error:+.1%} in {name}" for name, error in errors.items()))


def _simulate(arguments: argparse.Namespace) -> None:
    from jaxinfer.simulation import read_trace

    _check_files(arguments)
    show(_record(read_trace(arguments.trace), _simulated_engine(arguments), arguments))


def _simulated_engine(arguments: argparse.Namespace) -> SimulatedEngine:
    from jaxinfer.device import require_device
    from jaxinfer.simulation import StepTimes, load_simulated_engine

    require_device()
    times, config = StepTimes.load(arguments.step_times), from_arguments(EngineConfig, arguments)
    link = {"link_bandwidth": arguments.link_bandwidth}
    return load_simulated_engine(arguments.model, config, times, arguments.dtype, **link)


def _check_files(arguments: argparse.Namespace) -> None:
    """Raises ValueError before the run if matplotlib is missing or an output file cannot be written."""
    from jaxinfer.simulation import require_matplotlib

    if arguments.plot is not None:
        require_matplotlib()
    for name in ("plot", "timeline", "save_step_times"):
        path = getattr(arguments, name, None)
        if path is None:
            continue
        is_new = not Path(path).exists()
        with _written(path):
            Path(path).open("ab").close()
            if is_new:  # otherwise a failed load would leave an empty file
                Path(path).unlink()


@contextmanager
def _written(path: str) -> Iterator[None]:
    """Turns an OSError into a ValueError that names the file."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{path} cannot be written ({error.strerror}); give another file") from None


def _record(
    trace: Iterable[TracedRequest], engine: RealEngine | SimulatedEngine, arguments: argparse.Namespace, **options: Any
) -> Report:
    """Runs a trace and writes the plot and the timeline, if requested."""
    from jaxinfer.simulation import plot_timeline

    if arguments.plot is None and arguments.timeline is None:
        return _drive(trace, engine, arguments, **options)
    with engine.timeline() as timeline:
        report = _drive(trace, engine, arguments, **options)
    if arguments.timeline is not None:
        with _written(arguments.timeline):
            timeline.save(arguments.timeline)
    if arguments.plot is not None:
        with _written(arguments.plot):
            plot_timeline(timeline, arguments.plot)
    return report


def _drive(
    trace: Iterable[TracedRequest], engine: RealEngine | SimulatedEngine, arguments: argparse.Namespace, **options: Any
) -> Report:
    from jaxinfer.engine.assembly import plan_targets
    from jaxinfer.simulation import drive

    targets = plan_targets(from_arguments(EngineConfig, arguments))
    return drive(trace, engine, targets=targets, show_progress=not arguments.quiet, **options)
