"""Runs jaxinfer and its peers on the same checkpoint, prompts and precision; prints figures and ratios.

The peers are transformers and, on a CPU with the packages llama-cpp-python and gguf, llama.cpp in float32. With
`--against FOLDER` the jaxinfer of another checkout takes the place of transformers.

Each side lives in a child process of its own, so that memory peaks and thread pools do not mix; the parent
asks one child at a time for one figure at a time. Everything computes in float32 on the CPU, or with
`--device gpu` in bfloat16 on a GPU, for which torch needs CUDA. All children are bound to `--threads` cores:
XLA sizes its thread pool by the cores it may run on, and torch gets the number as an argument. Run it on a
quiet machine; `--rounds` alternates the sides and quotes medians.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import multiprocessing
import os
import resource
import shlex
import sys
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from scripts.bench.workload import (
    DTYPES,
    HIGHER,
    LOWER,
    RANDOM_SHAPES,
    SECTIONS,
    Task,
    Workload,
    checkpoint,
    table_rows,
)

BUNDLED_MODEL = Path(__file__).resolve().parents[2] / "jaxinfer" / "assets" / "tiny"
OURS, THEIRS, CONTINUOUS, LLAMA_CPP = "jaxinfer", "transformers", "continuous", "llama.cpp"
# Continuous batching allocates its pool at once, so it gets a process, and a memory peak, of its own.
MODULES = {
    OURS: "scripts.bench.engine",
    THEIRS: "scripts.bench.peer",
    CONTINUOUS: "scripts.bench.peer",
    LLAMA_CPP: "scripts.bench.llama_cpp_peer",
}
LLAMA_CPP_SECTIONS = ("prefill", "decode", "ttft", "tpot")
COLUMNS = (OURS, THEIRS, LLAMA_CPP)
SPAWN = multiprocessing.get_context("spawn")


def log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def serve(pipe: Connection, module: str, checkout: Path | None, folder: Path, workload: Workload) -> None:
    """Is the child: loads a side, then answers (task, purpose) with (figure, error) until told None."""
    try:
        if checkout is not None:
            sys.path[:0] = [str(checkout / "scripts"), str(checkout)]
        side = importlib.import_module(module)
        model = side.load(folder, workload)
        pipe.send((None, None))
        while (request := pipe.recv()) is not None:
            task, purpose = request
            pipe.send((side.MEASURES[task.section](model, workload, task, purpose), None))
        pipe.send((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, None))
    except Exception:
        pipe.send((None, traceback.format_exc()))


class Side:
    """A child process that holds one loaded model and measures what it is sent."""

    def __init__(self, name: str, checkout: Path | None, folder: Path, workload: Workload) -> None:
        """`checkout` is the folder of another jaxinfer to measure, or None for this one or the peer."""
        self.label = name if checkout is None else str(checkout)
        self._pipe, remote = SPAWN.Pipe()
        arguments = (remote, MODULES[name if checkout is None else OURS], checkout, folder, workload)
        self._process = SPAWN.Process(target=serve, args=arguments, daemon=True)
        self._process.start()
        # With the parent's copy closed, the death of the child ends recv() instead of leaving it waiting.
        remote.close()
        self._receive()
        log(f"{self.label} is ready")

    def measure(self, task: Task, purpose: str) -> float:
        self._pipe.send((task, purpose))
        return self._receive()

    def finish(self) -> float:
        """Ends the process; returns the most MiB it has ever held."""
        self._pipe.send(None)
        peak = self._receive()
        self._process.join()
        return peak

    def _receive(self) -> Any:
        try:
            value, error = self._pipe.recv()
        except EOFError:
            raise RuntimeError(f"the process of {self.label} died; see its output above") from None
        if error is not None:
            raise RuntimeError(f"{self.label} failed:\n{error}")
        return value


def measure_row(sides: dict[str, Side], ours: Task, theirs: list[Task], index: int) -> dict[str, dict[str, float]]:
    """Returns by side and by label what round `index` measured, the sides in turn beginning."""
    pairs = [(OURS, ours), *((CONTINUOUS if task.section == CONTINUOUS else THEIRS, task) for task in theirs)]
    pairs += [(LLAMA_CPP, ours)] if ours.section in LLAMA_CPP_SECTIONS else []
    figures: dict[str, dict[str, float]] = {column: {} for column in COLUMNS}
    for name, task in pairs if index % 2 == 0 else reversed(pairs):
        if name not in sides:
            continue
        try:
            value = sides[name].measure(task, f"round {index} {task.section} {task.batch} {task.context}")
        except RuntimeError as error:
            if name != CONTINUOUS:
                raise
            # A feature of the peer that may not run here; its static batches still stand.
            print(f"continuous batching of {THEIRS} is left out: {error}")
            del sides[name]
            continue
        log(f"round {index + 1}: {sides[name].label}: {task.label}: {value:.2f}")
        figures[THEIRS if name == CONTINUOUS else name][task.label] = value
    return figures


def summarize(label: str, better: str, rounds: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Returns a row of the table: medians over rounds, and by peer the ratio of each round."""
    choose = max if better == HIGHER else min
    best = {c: [choose(figures[c].values()) for figures in rounds if figures.get(c)] for c in COLUMNS}
    row: dict[str, Any] = {"figure": label, "better": better, "rounds": rounds}
    row |= {column: median(values) if values else None for column, values in best.items()}
    row["ratios"] = {
        peer: [ours / theirs for ours, theirs in zip(best[OURS], best[peer], strict=False)] for peer in COLUMNS[1:]
    }
    return row


def print_table(table: list[dict[str, Any]], peer: str) -> None:
    """Prints the table; `peer` is the name of the second column."""
    columns = [column for column in COLUMNS if any(row[column] is not None for row in table)]
    names = {THEIRS: peer}
    heads = [names.get(column, column) for column in columns] + [f"ours/{names.get(c, c)}" for c in columns[1:]]
    print(f"{'':<34}{''.join(f'{head:>18}' for head in heads)}  better")
    for row in table:
        cells = "".join(f"{cell:>18}" for cell in cells_of(row, columns))
        spreads = [f"{min(ratios):.2f} to {max(ratios):.2f}" for ratios in row["ratios"].values() if len(ratios) > 1]
        spread = f" (rounds {', '.join(spreads)})" if spreads else ""
        print(f"{row['figure']:<34}{cells}  {row['better']}{spread}")
    for row in table:
        variants = row["rounds"][0][THEIRS]
        if len(variants) > 1:
            medians = (f"{v} {median(r[THEIRS][v] for r in row['rounds'] if v in r[THEIRS]):.2f}" for v in variants)
            print(f"{row['figure']}: best of {peer}, which reached: {'; '.join(medians)}")


def cells_of(row: dict[str, Any], columns: list[str]) -> list[str]:
    """Returns the figures of the columns and the ratios of ours to the others', "-" if there is none."""
    ratios = [row["ratios"][column] for column in columns[1:]]
    values = [row[column] for column in columns] + [median(each) if each else None for each in ratios]
    return ["-" if value is None else f"{value:,.2f}" if abs(value) < 100 else f"{value:,.0f}" for value in values]


def print_markdown(table: list[dict[str, Any]]) -> None:
    """Prints the table of the README."""
    columns = [column for column in COLUMNS if any(row[column] is not None for row in table)]
    heads = ["", *columns, *(f"ours / {column}" for column in columns[1:])]
    print(f"| {' | '.join(heads)} |\n|---|{'--:|' * (len(heads) - 1)}")
    for row in table:
        print(f"| {row['figure']} | {' | '.join(cells_of(row, columns))} |")


def conditions(arguments: argparse.Namespace, device: str = "cpu") -> dict[str, str]:
    """Returns what a figure must be quoted with."""
    import jax  # after `confine`

    from jaxinfer.device import describe_cpu

    if device == "gpu":
        described = f"{jax.devices()[0].device_kind}, {DTYPES[device]}"
    else:
        spins = f"{'' if arguments.spin else 'no '}spinning in OpenMP"
        described = f"CPU, {describe_cpu()}, {arguments.threads} threads, {DTYPES[device]}, {spins}"
    packages = ("jax", "transformers", "torch", "llama-cpp-python")
    return {
        "measured with": shlex.join(["python", "scripts/bench/against_transformers.py", *sys.argv[1:]]),
        "device": described,
        "versions": ", ".join(f"{name} {version(name)}" for name in packages if is_installed(name)),
        "date": datetime.now(UTC).date().isoformat(),
    }


def is_installed(package: str) -> bool:
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


def print_figures(figures: dict[str, list[float]], arguments: argparse.Namespace) -> None:
    """Prints by label the median of all rounds, their range, their mean and its standard error, and the conditions."""
    width = max(map(len, figures))
    for label, values in figures.items():
        spread = f"{min(values):.2f} to {max(values):.2f}"
        if len(values) > 1:
            spread += f", in the mean {mean(values):.3f} +- {stdev(values) / len(values) ** 0.5:.3f}"
        print(f"{label:<{width}}{median(values):>12.2f}   {spread}")
    quoted = conditions(arguments) | {"measured with": shlex.join(["python", *sys.argv])}
    print("\n".join(f"{key}: {value}" for key, value in quoted.items()))


def confine(arguments: argparse.Namespace, device: str = "cpu") -> None:
    """Sets what the children inherit: their cores, their thread counts and their platform."""
    cores = sorted(os.sched_getaffinity(0))
    if arguments.threads > len(cores):
        raise SystemExit(f"--threads {arguments.threads} is more than the {len(cores)} cores of this process")
    os.sched_setaffinity(0, cores[: arguments.threads])
    os.environ |= {
        "OMP_NUM_THREADS": str(arguments.threads),
        "JAX_PLATFORMS": "cuda" if device == "gpu" else "cpu",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # torch needs some of a GPU as well
        "TOKENIZERS_PARALLELISM": "false",
    }
    # Spinning threads suit an idle machine; beside other processes they cost torch most of its speed.
    if not arguments.spin:
        os.environ["OMP_WAIT_POLICY"] = "passive"


def integers(text: str) -> tuple[int, ...]:
    return tuple(int(item) for item in text.split(","))


def some_of(*allowed: str) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        if unknown := set(text.split(",")) - set(allowed):
            raise argparse.ArgumentTypeError(f"{sorted(unknown)} not in {', '.join(allowed)}")
        return tuple(text.split(","))

    return parse


def default_sides(device: str) -> tuple[str, ...]:
    """Returns all sides; llama.cpp only on a CPU and if its packages are installed."""
    has_llama_cpp = device == "cpu" and all(map(importlib.util.find_spec, ("llama_cpp", "gguf")))
    return tuple(name for name in MODULES if name != LLAMA_CPP or has_llama_cpp)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", type=Path, default=BUNDLED_MODEL, help="checkpoint folder")
    model.add_argument("--random-shape", choices=RANDOM_SHAPES, help="size of a random checkpoint")
    parser.add_argument("--device", choices=DTYPES, default="cpu", help="of every side")
    parser.add_argument("--threads", type=int, default=2, help="cores for every side")
    parser.add_argument("--batches", type=integers, default=(1, 8, 16, 32), help="rows of a decode step")
    parser.add_argument("--contexts", type=integers, default=(128, 1000), help="tokens before a decode step")
    parser.add_argument("--static-batches", type=integers, default=(16,), help="the peer's batches in the job")
    parser.add_argument("--repeats", type=int, default=5, help="of prefill, TTFT and TPOT; the median counts")
    parser.add_argument("--steps", type=int, default=24, help="timed decode steps; the median counts")
    parser.add_argument("--rounds", type=int, default=1, help="of all figures, sides alternating; as above")
    parser.add_argument("--only", type=some_of(*SECTIONS), help="sections, by comma; all unless --against is given")
    parser.add_argument(
        "--sides", type=some_of(*MODULES), help="sides, by comma; all that are installed unless --against is given"
    )
    parser.add_argument("--against", type=Path, help="checkout of another jaxinfer to measure instead of transformers")
    parser.add_argument("--spin", action="store_true", help="do not stop torch's threads from spinning")
    parser.add_argument("--json", type=Path, help="file for all figures of all rounds")
    parser.add_argument("--markdown", action="store_true", help="print the table as the README has it")
    arguments = parser.parse_args()
    if arguments.against is None:
        arguments.only, arguments.sides = arguments.only or SECTIONS, arguments.sides or default_sides(arguments.device)
        return arguments
    if not (arguments.against / "jaxinfer").is_dir():
        parser.error(f"--against {arguments.against} is not a checkout of jaxinfer: it has no folder jaxinfer")
    if arguments.sides is not None:
        parser.error("--against measures two sides of its own; leave out --sides")
    if "job" in (arguments.only or ()):
        parser.error("--against cannot measure the section job; leave it out of --only")
    arguments.only = arguments.only or tuple(section for section in SECTIONS if section != "job")
    arguments.sides = (OURS, THEIRS)
    return arguments


def main() -> None:
    arguments = parse_arguments()
    confine(arguments, arguments.device)
    with checkpoint(arguments.model, arguments.random_shape) as folder:
        workload = Workload(
            vocab_size=json.loads((folder / "config.json").read_text())["vocab_size"],
            batches=arguments.batches,
            contexts=arguments.contexts,
            sections=arguments.only,
            steps=arguments.steps,
            repeats=arguments.repeats,
            threads=arguments.threads,
            device=arguments.device,
        )
        names = [name for name in arguments.sides if name != CONTINUOUS or "job" in workload.sections]
        sides = {name: Side(name, arguments.against if name == THEIRS else None, folder, workload) for name in names}
        rows = table_rows(workload, arguments.static_batches)
        rounds = [
            {label: measure_row(sides, *tasks, index) for label, tasks in rows.items()}
            for index in range(arguments.rounds)
        ]
        table = [summarize(label, rows[label][0].better, [figures[label] for figures in rounds]) for label in rows]
        peaks = {name: {"peak": side.finish()} for name, side in sides.items()}
    main_peaks = {column: peaks.get(column, {}) for column in COLUMNS}
    table.append(summarize("peak memory, MiB", LOWER, [main_peaks]))
    if CONTINUOUS in peaks:
        table.append(summarize("peak memory, continuous, MiB", LOWER, [{OURS: {}, THEIRS: peaks[CONTINUOUS]}]))
    if arguments.markdown:
        print_markdown(table)
    else:
        print_table(table, THEIRS if arguments.against is None else "other")
    quoted = conditions(arguments, arguments.device)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(quoted | {"table": table}, indent=2) + "\n")
    print("\n".join(f"{key}: {value}" for key, value in quoted.items()))


if __name__ == "__main__":
    main()
