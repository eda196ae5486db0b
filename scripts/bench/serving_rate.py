"""Finds the highest rate of requests that a server answers within limits of TTFT and TPOT, and what is predicted.

    python scripts/bench/serving_rate.py
    python scripts/bench/serving_rate.py --llama-server PATH    # and that of llama.cpp's server

Requests arrive at random. A rate holds if TTFT p99 and TPOT p99 stay within the limits. The simulator gets the times of
the engine's steps, measured in this run without a server; it knows neither the server nor the client beside it.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable

import numpy as np

from jaxinfer import LLM
from jaxinfer.engine.scheduling.metrics import Targets
from jaxinfer.simulation import (
    RealEngine,
    StepTimes,
    TracedRequest,
    drive,
    fit_step_times,
    load_simulated_engine,
    measured_steps,
    random_trace,
)
from scripts.bench.against_transformers import BUNDLED_MODEL
from scripts.bench.http_load import Ask, Load, percentiles, prompt_of
from scripts.bench.servers import CONFIG, Server, jaxinfer_server, llama_cpp_servers

LIMITS = Targets(ttft=0.3, tpot=0.05)
SECONDS = 20.0  # of arrivals
INPUT_LENS, OUTPUT_LENS = (16, 112), (16, 112)
FIRST_RATE, PRECISION = 8.0, 1.06
FITTED_RATES = (4.0, 16.0, 32.0)


def trace_of(rate: float) -> list[TracedRequest]:
    count = round(rate * SECONDS)
    return list(random_trace(count, input_lens=INPUT_LENS, output_lens=OUTPUT_LENS, rate=rate, seed=round(1e3 * rate)))


def highest_rate(holds: Callable[[float], bool]) -> float:
    """Bisects between a rate that holds and one that does not, until they are close."""
    low, high = 0.0, FIRST_RATE
    while holds(high):
        low, high = high, 2 * high
    while low < 1.0 or high / low > PRECISION:
        middle = (low * high) ** 0.5 if low else high / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def engine_step_times() -> StepTimes:
    """Returns the times of the engine's steps in real time, fitted on loads of several rates."""
    llm, fitted = LLM(BUNDLED_MODEL, config=CONFIG), []
    for rate in FITTED_RATES:
        engine = RealEngine(llm)
        steps = measured_steps(llm)
        print(f"engine alone at {rate:.0f}: {drive(trace_of(rate), engine)}", flush=True)
        fitted += steps
    llm.close()
    return fit_step_times(fitted)


def predicted_rate(times: StepTimes) -> float:
    def holds(rate: float) -> bool:
        report = drive(trace_of(rate), load_simulated_engine(BUNDLED_MODEL, CONFIG, times))
        ttft, tpot = report.ttft["p99"], report.tpot["p99"]
        print(f"simulated at {rate:.1f}: TTFT p99 {1e3 * ttft:.0f} ms, TPOT p99 {1e3 * tpot:.1f} ms")
        return ttft <= LIMITS.ttft and tpot <= LIMITS.tpot

    return highest_rate(holds)


def asks_of(trace: list[TracedRequest], seed: str) -> list[Ask]:
    draw = random.Random(seed)
    return [Ask(prompt=prompt_of(draw, one.input_len), num_tokens=one.output_len, arrival=one.arrival) for one in trace]


def served_rate(server: Server) -> float:
    def holds(rate: float) -> bool:
        load = Load()
        load.run(server, asks_of(trace_of(rate), f"{server.name} {rate}"))
        print(
            f"{server.name} at {rate:.1f}: TTFT {percentiles(load.ttft)} ms, TPOT {percentiles(load.tpot)} ms (p50 /"
            f" p99), {load.tokens_per_second[0]:.0f} tokens/s, client {load.client_cores[0]:.2f} of a core",
            flush=True,
        )
        return bool(np.percentile(load.ttft, 99) <= LIMITS.ttft and np.percentile(load.tpot, 99) <= LIMITS.tpot)

    # The first run of a step takes several times longer, as in `RealEngine`, which leaves it out too.
    Load().run(server, asks_of(trace_of(2 * FIRST_RATE), "warm"))
    return highest_rate(holds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-server", metavar="PATH", help="the server of llama.cpp")
    arguments = parser.parse_args()
    rates = {"simulator": predicted_rate(engine_step_times())}
    with (
        jaxinfer_server(BUNDLED_MODEL) as ours,
        llama_cpp_servers(BUNDLED_MODEL, arguments.llama_server, None) as theirs,
    ):
        rates |= {server.name: served_rate(server) for server in [ours, *theirs]}
    for name, rate in rates.items():
        print(f"{name}: {rate:.1f} requests/s")


if __name__ == "__main__":
    main()
