"""The predicted time of every line, from its bytes and operations and the device's data sheet.

A prediction is `fixed + roofline / fraction`. The roofline is the data sheet's time for the bytes or for the operations
of a line, whichever is longer. Both numbers have a basis: a measurement, a compiler's schedule, or an estimate.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kernels_pallas.device import data_sheet
from scripts.kernels.on_device.lines import Work

# A prediction that is off by more says that its basis is wrong, or that a kernel has changed.
MAX_ERROR = 0.2


class Prediction(NamedTuple):
    """The fraction of the roofline that a family of lines reaches, beside the seconds that all its calls need."""

    fraction: float
    fixed: float
    basis: str


class Goal(NamedTuple):
    """Either the seconds of a line, or the fraction of its roofline."""

    seconds: float = 0.0
    fraction: float = 1.0


US, MS = 1e-6, 1e-3
GPU: Mapping[str, Prediction] = {
    "read": Prediction(0.95, 3 * US, "H200, 2026-11-27"),
    "copy": Prediction(0.89, 3 * US, "H200, 2026-11-27"),
    "x + 1": Prediction(0.65, 3 * US, "H200, 2026-11-26"),
    "product": Prediction(0.85, 3 * US, "H200, 2026-11-26"),
    "decode": Prediction(0.68, 10 * US, "H200, 2026-11-26, 32 and 64 rows of 8,192 by the clock"),
    "uneven decode": Prediction(0.52, 10 * US, "estimate: 1.3 times the bytes' time at the rate of even rows"),
    "prefill": Prediction(0.27, 20 * US, "H200, 2026-11-26, 16,384 tokens at once by the clock"),
    "int8, few rows": Prediction(0.5, 5 * US, "estimate"),
    "int8, many rows": Prediction(0.3, 5 * US, "estimate"),
    "int4, few rows": Prediction(0.3, 5 * US, "estimate: bounded by 52 µs by the clock, launch included"),
    "int4, many rows": Prediction(0.15, 5 * US, "H200, 2026-11-26, 256 rows by the clock"),
    "experts, decode, bfloat16": Prediction(0.67, 5 * US, "H200, 2026-11-26, by the clock"),
    "experts, decode, int4": Prediction(0.16, 5 * US, "H200, 2026-11-26, by the clock"),
    "experts, prefill, bfloat16": Prediction(0.53, 5 * US, "H200, 2026-11-26, by the clock"),
    "experts, prefill, int4": Prediction(0.12, 5 * US, "H200, 2026-11-26, by the clock"),
    "0.6B, step": Prediction(0.8, 2.4 * MS, "H200, 2026-11-27: the host's 2.4 to 3.1 ms hide the GPU's 1.0"),
    "0.6B, loop": Prediction(0.8, 0.9 * MS, "H200, 2026-11-27: 8 rows in loops of 4 steps"),
    "0.6B, prefill": Prediction(0.4, 3 * MS, "estimate: the launch of one step, and products of 2,048 tokens"),
    "0.6B, job": Prediction(0.2, 0.0, "estimate: the rate of vLLM on an H100"),
    "8B, step": Prediction(0.8, 1.3 * MS, "H200, 2026-11-27: the device's time, for the host's is hidden"),
    "8B, loop": Prediction(0.8, 1.3 * MS, "H200, 2026-11-27: single steps, by default"),
    "8B, prefill": Prediction(0.53, 3 * MS, "H200, 2026-11-27"),
    "start, from disk": Prediction(1.0, 10.0, "the goal"),
}
TPU: Mapping[str, Prediction] = {
    "read": Prediction(0.9, 5 * US, "estimate"),
    "copy": Prediction(0.85, 5 * US, "estimate"),
    "x + 1": Prediction(0.85, 5 * US, "estimate"),
    "product": Prediction(0.9, 5 * US, "estimate"),
    "decode": Prediction(0.9, 10 * US, "the compiler's schedule: a turn takes less than reading its block"),
    "uneven decode": Prediction(0.9, 10 * US, "the compiler's schedule: rows follow one another"),
}
# By the first words of the device kind, the most specific first.
PREDICTIONS: Mapping[str, Mapping[str, Prediction]] = {
    "NVIDIA": GPU,
    "Tesla": GPU,  # a T4 has no kernels of attention, so the lines of those are off
    "TPU v5 lite": {**TPU, "prefill": Prediction(0.64, 20 * US, "the compiler's schedule, tiles of 128 rows")},
    "TPU v6 lite": {**TPU, "prefill": Prediction(0.28, 20 * US, "the compiler's schedule, tiles of 256 rows")},
    "TPU": TPU,
    "TPU7x": TPU,
}


# Goals of a device kind by line: seconds, or a fraction of the data sheet's rate.
GOALS: Mapping[str, Mapping[str, Goal]] = {
    "NVIDIA H200": {
        "start, cold": Goal(seconds=20.0),
        "start, from disk": Goal(seconds=8.0),
        "elsewhere, start": Goal(seconds=8.0),
        "0.6B, single steps, decode 1 x 128": Goal(seconds=1.6 * MS),
        "0.6B, decode 32 x 1,000": Goal(seconds=2.0 * MS),
        "0.6B, job of 500 x (512 + 128)": Goal(seconds=5.0),
        "8B, decode 1 x 1,024": Goal(fraction=0.77),
    }
}


def goal_seconds(kind: str, name: str, work: Work) -> float | None:
    """Returns the seconds that a line of this name should take at most, None if there is no goal for the device."""
    goal = GOALS.get(kind, {}).get(name)
    if goal is None or goal.seconds:
        return goal and goal.seconds
    roofline = roofline_seconds(kind, work)
    return None if roofline is None else roofline / goal.fraction


def prediction_of(kind: str, family: str) -> Prediction | None:
    """Returns the prediction for a family of lines on a device kind, None if there is none."""
    table = next((table for name, table in PREDICTIONS.items() if f"{kind} ".startswith(f"{name} ")), {})
    return table.get(family)


def roofline_seconds(kind: str, work: Work) -> float | None:
    """Returns the data sheet's time for a line, None if the device's sheet is not listed."""
    sheet = data_sheet(kind)
    return None if sheet is None else max(work.num_bytes / sheet[0], work.flops / sheet[1])


def predicted_seconds(kind: str, family: str, work: Work) -> float | None:
    """Returns the predicted time of a line, None without a data sheet or a prediction."""
    roofline, prediction = roofline_seconds(kind, work), prediction_of(kind, family)
    if roofline is None or prediction is None:
        return None
    return prediction.fixed + roofline / prediction.fraction
