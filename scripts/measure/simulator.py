"""Holds the simulator against real runs, and measures what simulating itself takes.

python scripts/measure/simulator.py --only errors --rounds 10
python scripts/measure/simulator.py --only scale --requests 1000000
"""

from __future__ import annotations

import argparse
import itertools
import random
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from jaxinfer import LLM, EngineConfig
from jaxinfer.simulation import (
    RealEngine,
    Report,
    StepTimes,
    TracedRequest,
    drive,
    fit_step_times,
    load_simulated_engine,
    measured_steps,
    prediction_errors,
    random_trace,
)
from scripts.bench.against_transformers import some_of

CONFIG = EngineConfig(max_model_len=1024)
NUM_REQUESTS, RATE = 16, 4.0  # of each load in each round
SHARED_LEN = 512  # one block of a trace
# About those of the bundled model on two cores: what simulating takes depends on them by how many requests meet.
STEP_TIMES = StepTimes(
    decode=(4.2e-3, 1.9e-4, 0.0, 0.0, 5e-6, 0.0, 1.4e-6, 0.0, 0.0),
    prefill=(9.3e-3, 0.0, 1.7e-6, 3.3e-3, 0.0, 1.2e-6, 1.1e-7, 0.0, 0.0),
)


def fitted_load(seed: int, ids: Iterator[int]) -> list[TracedRequest]:
    """Short and long prompts and outputs."""
    return _own(random_trace(NUM_REQUESTS, input_lens=(16, 300), output_lens=(8, 96), rate=RATE, seed=seed), ids)


def even_load(seed: int, ids: Iterator[int]) -> list[TracedRequest]:
    """Prompts and outputs of about the same length."""
    return _own(random_trace(NUM_REQUESTS, input_lens=(64, 128), output_lens=(32, 64), rate=RATE, seed=seed), ids)


def shared_load(seed: int, ids: Iterator[int]) -> list[TracedRequest]:
    """Prompts with one of three long beginnings, and short outputs."""
    trace = random_trace(NUM_REQUESTS, input_lens=(8, 100), output_lens=(4, 32), rate=RATE, seed=seed)
    beginnings, draw = [next(ids) for _ in range(3)], random.Random(seed)
    return [
        replace(request, input_len=SHARED_LEN + request.input_len, block_ids=(draw.choice(beginnings), next(ids)))
        for request in trace
    ]


def _own(trace: Iterator[TracedRequest], ids: Iterator[int]) -> list[TracedRequest]:
    """Lets no prompt be that of an earlier round, which the prefix cache may hold."""
    return [replace(request, block_ids=(next(ids),)) for request in trace]


LOADS = {"fitted": fitted_load, "even": even_load, "shared": shared_load}
FIGURES: dict[str, Callable[[Report], float]] = {
    "mean TTFT": lambda report: report.ttft["mean"],
    "mean TPOT": lambda report: report.tpot["mean"],
    "makespan": lambda report: report.makespan,
}


def measure_errors(rounds: int) -> None:
    """Prints how far off predictions are with step times fitted on the first load.

    The loads take turns, for a machine's speed changes within minutes; the predictions know the mean of all rounds.
    """
    llm, ids, fitted = LLM(config=CONFIG), itertools.count(), []
    runs: dict[str, list[tuple[list[TracedRequest], Report]]] = {name: [] for name in LOADS}
    for number, (name, load) in itertools.product(range(rounds), LOADS.items()):
        engine, trace = RealEngine(llm), load(number, ids)
        steps = measured_steps(llm)
        runs[name].append((trace, drive(trace, engine)))
        fitted += steps if name == "fitted" else []
    times = fit_step_times(fitted)
    print(times)
    for name, pairs in runs.items():
        real = [report for _, report in pairs]
        predicted = [drive(trace, load_simulated_engine(None, CONFIG, times)) for trace, _ in pairs]
        each = [prediction_errors(*pair) for pair in zip(predicted, real, strict=True)]
        for what, figure in FIGURES.items():
            error = sum(map(figure, predicted)) / sum(map(figure, real)) - 1
            low, high = np.percentile([errors[what] for errors in each], (25, 75))
            print(f"{name} load, {what}: {error:+.1%}, quartiles of {rounds} rounds {low:+.1%} and {high:+.1%}")


def measure_scale(num_requests: int, rate: float) -> None:
    """Prints what simulating many requests takes; peak memory where nothing else was measured before."""
    trace = random_trace(num_requests, input_lens=(16, 512), output_lens=(8, 128), rate=rate, seed=0)
    engine, began = load_simulated_engine(None, CONFIG, STEP_TIMES), time.process_time()
    report = drive(trace, engine)
    seconds = time.process_time() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{num_requests} requests simulated in {seconds:.1f} s of processor time, peak memory {peak:.0f} MiB")
    print(report)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=some_of("errors", "scale"), default=("errors", "scale"), help="by comma")
    parser.add_argument("--rounds", type=int, default=10, help="of all loads, about 15 s each")
    parser.add_argument("--requests", type=int, default=20_000, help="to simulate at once")
    parser.add_argument("--rate", type=float, default=7.0, help="of these, a second of the simulated time")
    arguments = parser.parse_args()
    if "errors" in arguments.only:
        measure_errors(arguments.rounds)
    if "scale" in arguments.only:
        measure_scale(arguments.requests, arguments.rate)


if __name__ == "__main__":
    main()
