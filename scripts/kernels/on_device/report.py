"""The table of lines: predicted beside measured, on the screen, in JSON and in the documentation."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kernels_pallas.device import data_sheet
from scripts.kernels.on_device import engine, lines
from scripts.kernels.on_device.device import Record, print_device
from scripts.kernels.on_device.lines import OURS, Line
from scripts.kernels.on_device.peers import PUBLISHED
from scripts.kernels.on_device.predictions import MAX_ERROR, goal_seconds, predicted_seconds, roofline_seconds

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "kernels.md"
# By device kind, its description and by line and implementation the measured seconds.
MEASURED = Path(__file__).parent / "measured.json"
BEGIN, END = "<!-- device_check: begin -->", "<!-- device_check: end -->"
# A device's reading, and its products, are as fast as the best of these lines.
YARDSTICKS = {"bytes": ("read", "copy", "x + 1"), "flops": ("product",)}
COLUMNS = ("MB", "GFLOP", "roofline", "predicted", "measured", "of sheet", "of best", "off by")


def full_lines() -> dict[str, Line]:
    """Returns all lines of a whole run by name."""
    both = [*lines.kernel_lines(lines.FULL), *engine.engine_lines(engine.FULL)]
    return {line.name: line for line in both}


def with_rates(record: Record, line: Line | None, kind: str, best: Mapping[str, float]) -> Record:
    """Returns a record with the work of its line, its roofline, its prediction, and its parts of sheet and yardstick.

    `best` has the rates of the yardsticks so far, bytes and flops per second.
    """
    if line is None:
        return record
    record = record | {"num_bytes": line.work.num_bytes, "flops": line.work.flops}
    roofline = roofline_seconds(kind, line.work)
    # A prediction is about our kernels and the yardsticks; a peer has the same roofline.
    is_predicted = record.get("implementation", OURS) in (OURS, "xla")
    predicted = predicted_seconds(kind, line.family, line.work) if is_predicted else None
    seconds = record.get("seconds")
    goal = goal_seconds(kind, line.name, line.work) if is_predicted else None
    record |= {"roofline_seconds": roofline, "predicted_seconds": predicted, "goal_seconds": goal}
    if seconds is None:
        return record
    at_best = [
        amount / best[unit]
        for unit, amount in (("bytes", line.work.num_bytes), ("flops", line.work.flops))
        if best.get(unit)
    ]
    return record | {
        "of_sheet": roofline / seconds if roofline else None,
        "of_best": max(at_best) / seconds if at_best and max(at_best) > 0 else None,
        "off_by": seconds / predicted - 1 if predicted else None,
    }


def best_rates(records: Iterable[Record]) -> dict[str, float]:
    """Returns the best rates of the yardsticks, bytes and flops per second; a unit without a measurement is missing."""
    rates: dict[str, float] = {}
    for record in records:
        if record["section"] != "yardstick" or "seconds" not in record:
            continue
        unit = "flops" if record["case"].startswith(YARDSTICKS["flops"]) else "bytes"
        amount = record["flops" if unit == "flops" else "num_bytes"]
        rates[unit] = max(rates.get(unit, 0.0), amount / record["seconds"])
    return rates


def print_heading(about: Record) -> None:
    print_device(about)
    if sheet := data_sheet(about.get("device", "")):
        print(f"data sheet: {sheet[0] / 1e12:.2f} TB/s, {sheet[1] / 1e12:.0f} TFLOP/s")
    columns = "".join(f"{name:>11}" for name in COLUMNS)
    print(f"{'line':58}{'implementation':18}{columns}   times in µs", flush=True)


def print_record(record: Record) -> None:
    times = [_microseconds(record.get(f"{name}seconds")) for name in ("roofline_", "predicted_", "")]
    amounts = [f"{record[n] / 10**e:,.1f}" if record.get(n) else "" for n, e in (("num_bytes", 6), ("flops", 9))]
    parts = [f"{record[n]:.2f}" if record.get(n) is not None else "" for n in ("of_sheet", "of_best")]
    off = f"{record['off_by']:+.0%}" if record.get("off_by") is not None else ""
    cells = "".join(f"{cell:>11}" for cell in (*amounts, *times, *parts, off))
    name = f"{record['section']}, {record['case']}"
    print(f"{name:58}{record.get('implementation', OURS):18}{cells}{_remarks(record)}", flush=True)


def _microseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e6:,.1f}"


def _remarks(record: Record) -> str:
    remarks = [("ok" if record["passes"] else "WRONG") if "passes" in record else ""]
    remarks += [f"error {record['error']:.4f}"] if "error" in record else []
    remarks += [f"by the {record['timer']}"] if record.get("timer") in ("clock", "loop") else []
    if "device_seconds" in record:
        device, host = (_microseconds(record[f"{part}_seconds"]) for part in ("device", "host"))
        remarks.append(f"device {device}, host beside it {host}")
    remarks += [f"{record['requests_per_s']:.1f} requests/s"] if "requests_per_s" in record else []
    return "".join(f"  {remark}" for remark in (*remarks, record.get("note", "")) if remark)


def print_summary(records: list[Record]) -> None:
    """Prints predictions that are off, what did not fit, wrong results, and what other projects have published."""
    off = [r for r in records if r.get("off_by") is not None and abs(r["off_by"]) > MAX_ERROR]
    print(f"\npredictions off by more than {MAX_ERROR:.0%}: {len(off)}")
    for record in sorted(off, key=lambda r: -abs(r["off_by"])):
        print(f"  {record['section']}, {record['case']}: {record['off_by']:+.0%}")
    for title, chosen in (
        ("left out, for the time was spent", [r for r in records if r.get("is_left_out")]),
        ("wrong or broken", [r for r in records if r.get("passes") is False]),
    ):
        print(f"{title}: {len(chosen)}")
        for record in chosen:
            print(f"  {record['section']}, {record['case']}")
    print("published by others:")
    for one in PUBLISHED:
        print(f"  {one.job}: {one.engine}, {one.device}: {one.figure} ({one.source})", flush=True)


def result_table(about: Record, records: Iterable[Record]) -> str:
    """Returns what a run has found so far, in Markdown: predicted, measured and goal of each record, in µs."""
    rows = [_row(["line", "predicted", "measured", "goal", "reached", "remarks"]), "|---|" + "--:|" * 3 + "---|---|"]
    for record in records:
        own = record.get("implementation", OURS)
        name = f"{record['section']}, {record['case']}{'' if own == OURS else f', {own}'}"
        predicted, seconds, goal = (record.get(key) for key in ("predicted_seconds", "seconds", "goal_seconds"))
        reached = "" if seconds is None or goal is None else "yes" if seconds <= goal else "no"
        rows.append(
            _row(
                [name, *map(_rounded, (predicted, seconds, goal)), reached, _remarks(record).strip().replace("|", "/")]
            )
        )
    heading = " · ".join(str(value).splitlines()[0] for value in about.values() if value)
    return "\n".join([heading, "", *rows]) + "\n"


def measured_with(measured: Record, about: Record, records: Iterable[Record]) -> Record:
    """Returns the measured figures with those of a run. Lines that this run left out keep their earlier figures."""
    kind = about["device"]
    seconds = {name: dict(figures) for name, figures in measured.get(kind, {}).get("seconds", {}).items()}
    for record in records:
        if "seconds" in record:
            name = f"{record['section']}, {record['case']}"
            seconds.setdefault(name, {})[record.get("implementation", OURS)] = record["seconds"]
    return {**measured, kind: {"about": about, "seconds": seconds}}


def write_measured(about: Record, records: Iterable[Record]) -> None:
    """Writes the figures of a run to `measured.json` and the table of docs/kernels.md anew."""
    measured = measured_with(json.loads(MEASURED.read_text()), about, records)
    MEASURED.write_text(json.dumps(measured, indent=1) + "\n")
    PAGE.write_text(with_tables(PAGE.read_text(), measured))


def with_tables(page: str, measured: Record) -> str:
    """Returns a page with the tables of all measured devices between its marks; raises ValueError without marks."""
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError(f"{PAGE} should have each of {BEGIN} and {END} once; put them where the tables belong")
    before, rest = page.split(BEGIN)
    tables = "\n\n".join(device_table(kind, entry) for kind, entry in measured.items())
    return f"{before}{BEGIN}\n\n{tables}\n\n{END}{rest.split(END)[1]}"


def device_table(kind: str, entry: Record) -> str:
    """Returns the heading and the table of one device, in Markdown; times are in µs."""
    about = ", ".join([f"jax {entry['about']['jax']}", *(entry["about"].get(name, "") for name in ("date", "note"))])
    head = ["line", "MB", "GFLOP", "roofline", "predicted", "measured", "peers"]
    rows = [f"**{kind}**, {about.rstrip(', ')}. Times in µs:", "", _row(head), "|---|" + "--:|" * 5 + "---|"]
    for name, line in full_lines().items():
        figures: dict[str, float] = dict(entry["seconds"].get(name, {}))
        ours = figures.pop(OURS, figures.pop("xla", None))
        others = "; ".join(f"{peer} {_rounded(seconds)}" for peer, seconds in figures.items())
        times = (roofline_seconds(kind, line.work) or None, predicted_seconds(kind, line.family, line.work), ours)
        amounts = (f"{line.work.num_bytes / 1e6:,.0f}", f"{line.work.flops / 1e9:,.0f}") if line.work.num_bytes else ""
        rows.append(_row([name, *(amounts or ("", "")), *map(_rounded, times), others]))
    return "\n".join(rows)


def _rounded(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e6:,.0f}"


def _row(cells: Iterable[Any]) -> str:
    return f"| {' | '.join(map(str, cells))} |".replace("|  |", "| |").replace("|  |", "| |")
