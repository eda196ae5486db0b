"""Checks the kernels on the device at hand, and measures them and whole models against predictions and peers.

    python scripts/kernels/device_check.py [--table FILE] [--json FILE] [--write] [--only kernels start ...] [--tiny]

Run it in a clone on a machine with a GPU or TPU. It ends within twelve minutes, and names the lines that did not fit.
The table, `--table`, is written after each line, so that a run which is killed leaves it. The command ends with 1 if a
kernel is wrong or cannot run. Each line has its bytes and operations, the data sheet's time for them,
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
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402

from jaxinfer.plan.devices import CHIPS  # noqa: E402
from scripts.kernels.on_device import checkpoint, checks, engine, lines, report, timer, torch_peers  # noqa: E402
from scripts.kernels.on_device.device import Record, describe_device, kernel_of_platform  # noqa: E402

GRACE = 2.0  # seconds after its own in which a group ends by itself
# Seconds by group, in order of worth; twelve minutes have room for them and the ends of processes. Each group has a
# process of its own, for a broken kernel can end one, and a device has memory for one. A group may use the time that
# earlier ones left.
GROUPS = {
    "start": 120.0,
    "elsewhere": 80.0,
    "kernels": 190.0,
    "0.6B, single steps": 60.0,
    "0.6B": 80.0,
    "8B": 90.0,
    "8B, single steps": 45.0,
    "peers": 30.0,
}
# The part of its group's seconds that a start may take with nothing on disk.
COLD = 0.6
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
        model = "0.6B" if group in ("start", "elsewhere", "peers") else group.partition(",")[0]
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
    run.checkpoint("start")  # its writing is no part of a start
    cold = time.time() + COLD * (deadline - time.time())
    for case, end in (("cold", cold), ("from disk", deadline)):
        yield from timed_start("start", case, run, end, environment_of(run))


def timed_start(section: str, case: str, run: Run, deadline: float, environment: dict[str, str]) -> Iterator[Record]:
    """Yields the device, and the seconds from a process's start to its first token."""
    record: Record = {"section": section, "case": case, "timer": "clock"}
    log = run.scratch / "start.txt"
    try:
        timeout = max(deadline - time.time(), 0.1)
        seconds, about = engine.time_start(worker_command("start", run), environment, timeout, log)
        yield about
        yield record | {"seconds": seconds}
    except subprocess.TimeoutExpired:
        print(log.read_text()[-4000:], file=sys.stderr)
        yield left_out(section, case)
    except RuntimeError as error:
        yield record | {"passes": False, "note": str(error)}


def elsewhere_records(run: Run, deadline: float) -> Iterator[Record]:
    """Yields the seconds to compile a start without the device, and of the start that finds these steps.

    The start is wrong if it compiles a step anew, for then its key is another.
    """
    steps, log = run.scratch / "elsewhere", run.scratch / "compile.txt"
    compiled: Record = {"section": "elsewhere", "case": "compile", "timer": "clock"}
    run.checkpoint("elsewhere")
    began = time.time()
    try:
        command = compile_command(run, steps, deadline)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        yield compiled | {"passes": False, "note": f"the device cannot be described: {error}"}
        return
    # This process leaves the device alone, and its own one ends with it.
    alone: dict[str, Any] = {"cwd": ROOT, "env": {**environment_of(run), "JAX_PLATFORMS": "cpu"}}
    with (
        log.open("w") as errors,
        subprocess.Popen(command, stdout=errors, stderr=errors, start_new_session=True, **alone) as process,
    ):
        try:
            process.wait(max(deadline - time.time(), 0.1))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            yield left_out("elsewhere", "compile")
            return
    if process.returncode:  # such as a compiler that is not installed
        yield compiled | {"note": f"not available: {log.read_text()[-300:].strip()}"}
        return
    yield compiled | {"seconds": time.time() - began}
    before = num_steps(steps)
    environment = environment_of(run) | {"JAX_COMPILATION_CACHE_DIR": str(steps)}
    for record in timed_start("elsewhere", "start", run, deadline, environment):
        missed = num_steps(steps) - before
        found = {"passes": missed == 0, "note": f"{before} steps there, {missed} compiled anew"}
        yield record | found if "seconds" in record else record


def compile_command(run: Run, steps: Path, deadline: float) -> list[str]:
    """Returns the command that compiles a start for the device into a folder, and needs no device for it."""
    chip = [] if run.is_tiny else ["--chip", chip_at_hand(run, deadline)]
    return [sys.executable, "-m", "jaxinfer", "compile", str(run.checkpoint("elsewhere")), *chip, "--out", str(steps)]


def num_steps(folder: Path) -> int:
    return len(list(folder.glob("jaxinfer-*")))


def chip_at_hand(run: Run, deadline: float) -> str:
    """Returns the device by the name that `jaxinfer compile` takes, from a process that looks at it and ends."""
    described = subprocess.run(
        worker_command("describe", run),
        env=environment_of(run),
        stdout=subprocess.PIPE,
        timeout=max(deadline - time.time(), 0.1),
        check=True,
    )
    kind = json.loads(described.stdout.splitlines()[-1])["about"]["device"]
    name, platform = next(((chip.name, chip.platform) for chip in CHIPS.values() if chip.kind == kind), (kind, "gpu"))
    return f"{name}-1" if platform == "tpu" else f"{name}x1"


def worker_command(group: str, run: Run, deadline: float = 0.0) -> list[str]:
    tiny = ["--tiny"] if run.is_tiny else []
    # An aborted process prints where it is.
    return [sys.executable, "-X", "faulthandler", __file__, "--worker", group, str(run.scratch), str(deadline), *tiny]


def environment_of(run: Run) -> dict[str, str]:
    """Returns the environment of workers, which keep compiled steps in the folder of the run."""
    return {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(run.scratch / "compiled"), "TF_CPP_MIN_LOG_LEVEL": "3"}


def run_group(group: str, run: Run, deadline: float) -> Iterator[Record]:
    """Yields the records of a group's process, and ends the process at the deadline."""
    if group in ("start", "elsewhere"):
        yield from (start_records if group == "start" else elsewhere_records)(run, deadline)
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
    if group == "describe":
        return None
    for record in records_of(group, run, deadline):
        print(json.dumps(record), flush=True)


def measure_all(
    groups: list[str], run: Run, keep: Callable[[Record, list[Record]], object]
) -> tuple[Record, list[Record]]:
    """Runs groups in order, prints and keeps their records as they come, and returns the device and all records."""
    by_name = {line.name: line for line in (*lines.kernel_lines(run.lines), *engine.engine_lines(run.models))}
    about: Record = {}
    records: list[Record] = []
    deadline = time.time()
    for group in groups:
        deadline += GROUPS[group]
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
            keep(about, records)
    return about, records


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, default=Path("device-check.md"), help="where the table goes")
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

    def keep(about: Record, records: list[Record]) -> None:
        options.table.write_text(report.result_table(about, records))
        if options.json:
            options.json.write_text(json.dumps({**about, "records": records}, indent=1) + "\n")

    with tempfile.TemporaryDirectory(prefix="device-check-") as scratch:
        about, records = measure_all(options.only, Run(Path(scratch), is_tiny=options.tiny), keep)
    report.print_summary(records)
    if options.write:
        report.write_measured(about, records)
    return 0 if all(record.get("passes", True) for record in records) else 1


if __name__ == "__main__":
    sys.exit(main())
