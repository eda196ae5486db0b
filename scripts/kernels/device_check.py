"""Checks the kernels on the device at hand, and measures them and whole models against predictions and peers.

    python scripts/kernels/device_check.py [--json FILE] [--write] [--only kernels start ...] [--tiny]

Run it in a clone on a machine with a GPU or TPU. It ends within nine minutes, and names the lines that did not fit. It
ends with 1 if a kernel is wrong or cannot run. Each line has its bytes and operations, the data sheet's time for them,
the predicted and the measured time. The device's profiler times kernels, and a clock times whole models. Rates are
fractions of the data sheet, and of the best that plain reading, copying and multiplying reach in the same run.

`--write` puts the measured figures into docs/kernels.md. `--tiny` is for a CPU: every line in small sizes.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402

from scripts.kernels.on_device import checkpoint, checks, engine, lines, report, timer, torch_peers  # noqa: E402
from scripts.kernels.on_device.device import Record, describe_device, kernel_of_platform  # noqa: E402

# Seconds of a whole run; the rest of nine minutes is for starts and ends of processes.
LIMIT = 520.0
GRACE = 2.0  # seconds after its part in which a group ends by itself
# Parts of them by group, in order of worth. Each group has a process of its own, for a broken kernel can end one, and a
# device has memory for one. A group may use the time that earlier ones left.
GROUPS = {
    "kernels": 0.38,
    "start": 0.18,
    "0.6B": 0.12,
    "8B": 0.14,
    "0.6B, single steps": 0.06,
    "8B, single steps": 0.06,
    "peers": 0.06,
}
# Parts of the kernels' seconds, also in order of worth.
KERNEL_SECTIONS = {"yardstick": 0.15, "attention": 0.35, "check": 0.3, "product": 0.1, "experts": 0.1}


class Run:
    """One run of the command: where it keeps its checkpoints, and which sizes it takes."""

    def __init__(self, scratch: Path, *, is_tiny: bool) -> None:
        self.scratch, self.is_tiny = scratch, is_tiny
        self.lines = lines.TINY if is_tiny else lines.FULL
        self.models = engine.TINY if is_tiny else engine.FULL

    def checkpoint(self, group: str) -> Path:
        """Returns the folder of a group's model, which is written at its first use."""
        model = "0.6B" if group in ("start", "peers") else group.partition(",")[0]
        folder = self.scratch / model
        if not folder.exists():
            checkpoint.write_random_checkpoint(folder, self.models.models[model])
        return folder


def records_of(group: str, run: Run, deadline: float) -> Iterator[Record]:
    """Yields the records of a group in this process, up to a time of `time.time`."""
    if group == "kernels":
        yield from kernel_records(run, deadline)
    elif group == "peers":
        yield from torch_peers.records(run.lines, run.models, run.checkpoint(group), deadline)
    else:
        yield from engine.measure_model(group, run.checkpoint(group), run.models)


def kernel_records(run: Run, deadline: float) -> Iterator[Record]:
    """Yields yardsticks, lines and checks. A section that overruns its part leaves out its last cases, by name."""
    seconds, end = deadline - time.time(), time.time()
    everything = lines.kernel_lines(run.lines)
    for section, part in KERNEL_SECTIONS.items():
        end += part * seconds
        cases = check_cases(run) if section == "check" else line_cases(everything, section)
        for case, measure in cases:
            if time.time() < end:
                yield from measure()
            else:
                yield left_out(section, case)


def left_out(section: str, case: str) -> Record:
    return {"section": section, "case": case, "is_left_out": True, "note": "left out: the time was spent"}


def check_cases(run: Run) -> Iterator[tuple[str, Callable[[], list[Record]]]]:
    kernel = kernel_of_platform()
    for name, error_of_case in checks.all_checks(kernel, is_tiny=run.is_tiny).items():
        yield name, lambda name=name, error_of=error_of_case: [checks.run_check(name, error_of, kernel)]


def line_cases(everything: list[lines.Line], section: str) -> Iterator[tuple[str, Callable[[], Iterator[Record]]]]:
    for line in everything:
        if line.section == section:
            yield line.case, lambda line=line: measure_line(line)


def measure_line(line: lines.Line) -> Iterator[Record]:
    """Yields the time of each implementation of a line, or the reason why there is none, which for ours is a fault."""
    for name, make in {**line.implementations, **line.peers.get(jax.default_backend(), {})}.items():
        record: Record = {"section": line.section, "case": line.case, "implementation": name}
        try:
            function, argument_sets = make()
            timed = timer.device_seconds(function, argument_sets)
            record |= {"seconds": timed.seconds, "timer": timed.timer} | ({"note": timed.note} if timed.note else {})
            if name == lines.OURS and line.expected is not None:
                error = lines.error_of(function, argument_sets[0], line.expected)
                record |= {"error": error, "passes": error < checks.TOLERANCE}
        except Exception as error:
            fault = {"passes": False} if name in (lines.OURS, "xla") else {}
            record |= {"note": f"not available: {type(error).__name__}: {str(error)[:160]}", **fault}
        yield record


def start_records(run: Run, deadline: float) -> Iterator[Record]:
    """Yields the seconds from a process's start to its first token: with nothing on disk, then with compiled steps."""
    command = worker_command("start", run)
    run.checkpoint("start")  # its writing is no part of a start
    for case in ("cold", "from disk"):
        record: Record = {"section": "start", "case": case, "timer": "clock"}
        try:
            timeout = max(deadline - time.time(), 0.1)
            seconds, about = engine.time_start(command, environment_of(run), timeout, run.scratch / "start.txt")
            yield about
            yield record | {"seconds": seconds}
        except subprocess.TimeoutExpired:
            print((run.scratch / "start.txt").read_text()[-4000:], file=sys.stderr)
            yield left_out("start", case)
        except RuntimeError as error:
            yield record | {"passes": False, "note": str(error)}


def worker_command(group: str, run: Run, deadline: float = 0.0) -> list[str]:
    tiny = ["--tiny"] if run.is_tiny else []
    # An aborted process prints where it is.
    return [sys.executable, "-X", "faulthandler", __file__, "--worker", group, str(run.scratch), str(deadline), *tiny]


def environment_of(run: Run) -> dict[str, str]:
    """Returns the environment of workers, which keep compiled steps in the folder of the run."""
    return {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(run.scratch / "compiled"), "TF_CPP_MIN_LOG_LEVEL": "3"}


def run_group(group: str, run: Run, deadline: float) -> Iterator[Record]:
    """Yields the records of a group's process, and ends the process at the deadline."""
    if group == "start":
        yield from start_records(run, deadline)
        return
    command, environment = worker_command(group, run, deadline), environment_of(run)
    with (
        (run.scratch / "errors.txt").open("w+") as errors,
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors) as process,
    ):
        yield from read_records(process, deadline + GRACE)
        if process.poll() is None:
            process.kill()
            yield left_out(group, "its last cases")
        elif process.returncode:
            errors.seek(0)
            note = f"the process ended with {process.returncode}: {errors.read()[-400:].strip()}"
            yield {"section": group, "case": "its process", "passes": False, "note": note}


def read_records(process: subprocess.Popen, deadline: float) -> Iterator[Record]:
    """Yields the lines of JSON that a process prints until it ends or the deadline comes."""
    assert process.stdout is not None
    stream, rest = process.stdout.fileno(), b""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while selector.select(max(deadline - time.time(), 0)):
            piece = os.read(stream, 2**16)
            if not piece:
                process.wait(5)
                return
            *complete, rest = (rest + piece).split(b"\n")
            yield from (json.loads(line) for line in complete if line.startswith(b"{"))


def work(group: str, run: Run, deadline: float) -> None:
    """Is the process of a group: prints the device, then each record, as a line of JSON."""
    if group == "start":
        return engine.start(run.checkpoint(group))
    if group != "peers":  # jax would take the memory that they need
        about = describe_device()
        if about["platform"] == "cpu" and not run.is_tiny:
            sys.exit("this machine has no GPU or TPU that jax can use; --tiny runs every line on a CPU")
        print(json.dumps({"about": about}), flush=True)
    for record in records_of(group, run, deadline):
        print(json.dumps(record), flush=True)


def measure_all(groups: list[str], run: Run) -> tuple[Record, list[Record]]:
    """Runs groups in order, prints their records as they come, and returns the device and all records."""
    by_name = {line.name: line for line in (*lines.kernel_lines(run.lines), *engine.engine_lines(run.models))}
    about: Record = {}
    records: list[Record] = []
    deadline = time.time()
    for group in groups:
        deadline += LIMIT * GROUPS[group] / sum(GROUPS[each] for each in groups)
        for record in run_group(group, run, deadline):
            if "about" in record:
                if not about:
                    about = record["about"]
                    report.print_heading(about)
                continue
            line = by_name.get(f"{record['section']}, {record['case']}")
            best = report.best_rates(records)
            records.append(report.with_rates(record, line, about.get("device", ""), best))
            report.print_record(records[-1])
    return about, records


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    parser.add_argument("--write", action="store_true", help="put the measured figures into docs/kernels.md")
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS), help="groups; all unless given")
    parser.add_argument("--tiny", action="store_true", help="every line in small sizes, for a CPU")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        group, scratch, deadline = options.worker
        logging.basicConfig(level=logging.INFO, format="%(relativeCreated)6.0f ms %(name)s: %(message)s")
        logging.getLogger("jax").setLevel(logging.WARNING)
        work(group, Run(Path(scratch), is_tiny=options.tiny), float(deadline))
        return 0
    if options.write and options.tiny:
        parser.error("--write wants the figures of a device; leave out --tiny")
    with tempfile.TemporaryDirectory(prefix="device-check-") as scratch:
        about, records = measure_all(options.only, Run(Path(scratch), is_tiny=options.tiny))
    report.print_summary(records)
    if options.json:
        options.json.write_text(json.dumps({**about, "records": records}, indent=1) + "\n")
    if options.write:
        report.write_measured(about, records)
    return 0 if all(record.get("passes", True) for record in records) else 1


if __name__ == "__main__":
    sys.exit(main())
