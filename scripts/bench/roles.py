"""Compares replicas that prefill and decode with replicas of one role, and routing policies, in the simulator.

    python scripts/bench/roles.py --only roles,routing
    XLA_FLAGS=--xla_force_host_platform_device_count=2 python scripts/bench/roles.py --only hand-over

Steps of the simulated chips take the bytes and FLOPs of Llama 3 8B in bfloat16 over EFFICIENCY of an H100's data sheet.
No simulated figure was measured on a device. The hand-over is measured, between CPU devices with the bundled model.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

from jaxinfer import LLM, EngineConfig, SamplingParams
from jaxinfer.config import Parallelism
from jaxinfer.engine.page_mover import DevicePageMover
from jaxinfer.engine.request.request import Request
from jaxinfer.engine.scheduling import scheduler
from jaxinfer.engine.scheduling.metrics import Targets
from jaxinfer.engine.scheduling.replica import Replica, choose_replica
from jaxinfer.plan.devices import CHIPS
from jaxinfer.simulation import Report, StepTimes, TracedRequest, drive, load_simulated_engine, random_trace
from scripts.bench.against_transformers import some_of

LLAMA: dict[str, Any] = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128_256},
    **{"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192},
    **{"rms_norm_eps": 1e-5, "rope_theta": 5e5, "torch_dtype": "bfloat16"},
}
NUM_PARAMS, KV_BYTES = 8.0e9, 131_072  # and the bytes of a token in the cache
CHIP, EFFICIENCY, HOST_SECONDS = CHIPS["H100"], 0.5, 1e-3
LINK = 5e10  # bytes per second: a PCIe 5 slot of 16 lanes at four fifths of its rate
LIMITS: dict[str, Any] = {"max_num_seqs": 256, "max_num_batched_tokens": 2048, "max_model_len": 4096}
LIMITS |= {"num_pages": 3_000, "decode_loop_steps": 1}  # 50 GB of pages
NUM_PREFIXES = 250  # of the requests among which policies choose
TARGETS = Targets(ttft=0.2, tpot=0.02)


def step_times() -> StepTimes:
    """Returns the seconds of each of `FEATURES`: weights are read once a step, and each token is multiplied by them."""
    bandwidth, flops = EFFICIENCY * CHIP.sheet.bandwidth, EFFICIENCY * CHIP.sheet.flops
    context, attended = KV_BYTES / bandwidth, 4 * LLAMA["hidden_size"] * LLAMA["num_hidden_layers"] / flops
    of_token = 2 * NUM_PARAMS / flops
    weights = (2 * NUM_PARAMS / bandwidth, 0.0, of_token, 0.0, 0.0, context, attended, 0.0, HOST_SECONDS)
    return StepTimes(weights, weights)


def simulated(folder: Path, parallelism: Parallelism, trace: Sequence[TracedRequest], **limits: Any) -> Report:
    config = EngineConfig(parallelism=parallelism, **{**LIMITS, **limits})
    link = LINK if parallelism.prefill else None
    engine = load_simulated_engine(folder, config, step_times(), "bfloat16", link_bandwidth=link)
    return drive(trace, engine, targets=TARGETS)


def line(name: str, report: Report) -> str:
    ttft, tpot = (f"{1e3 * of['p50']:.0f} / {1e3 * of['p99']:.0f}" for of in (report.ttft, report.tpot))
    good = report.goodput * report.makespan / report.num_requests
    return (
        f"{name}: TTFT {ttft} ms, TPOT {tpot} ms (p50 / p99), good {good:.1%}, cached {report.hit_rate:.1%},"
        f" {report.num_preemptions} preemptions"
    )


def compare_roles(folder: Path, num_requests: int, rates: Sequence[float]) -> None:
    """Prints the latencies of four chips at each rate, with each part of them that prefills."""
    for rate in rates:
        trace = list(random_trace(num_requests, input_lens=(256, 2048), output_lens=(64, 384), rate=rate, seed=0))
        for tokens in (2048, 512):
            report = simulated(folder, Parallelism(replicas=4), trace, max_mixed_tokens=tokens)
            print(line(f"{rate:g}/s, 4 together, max_mixed_tokens={tokens}", report), flush=True)
        for num_prefill in (1, 2):
            report = simulated(folder, Parallelism(replicas=4, prefill=num_prefill), trace)
            print(line(f"{rate:g}/s, {num_prefill} for {4 - num_prefill}", report), flush=True)


def with_prefixes(num_requests: int, num_prefixes: int, rate: float) -> Iterator[TracedRequest]:
    """Yields requests of which each begins with one of some prefixes of 1,024 tokens, the first ones most often."""
    draw, arrival = random.Random(0), 0.0
    shares = [1 / (1 + prefix) for prefix in range(num_prefixes)]
    for prefix in draw.choices(range(num_prefixes), shares, k=num_requests):
        blocks = (2 * prefix, 2 * prefix + 1)
        lens = {"input_len": draw.randint(1040, 1400), "output_len": draw.randint(16, 64)}
        yield TracedRequest(arrival=arrival, **lens, block_ids=blocks)
        arrival += draw.expovariate(rate)


def emptiest(request: Request, replicas: Sequence[Replica], home: Replica | None) -> Replica | None:
    found = [one for one in replicas if one.may_run(request, home) and one.running.has_room(request)]
    return min(found, key=lambda one: (len(one.running), one.index), default=None)


def in_turn() -> Callable[[Request, Sequence[Replica], Replica | None], Replica | None]:
    turns = count()

    def choose(request: Request, replicas: Sequence[Replica], home: Replica | None) -> Replica | None:
        for _ in replicas:
            one = replicas[next(turns) % len(replicas)]
            if one.may_run(request, home) and one.running.has_room(request):
                return one
        return None

    return choose


def compare_routing(folder: Path, num_requests: int, num_replicas: int, rates: Sequence[float]) -> None:
    """Prints the latencies of requests with shared prefixes on many chips, for each policy that chooses a replica."""
    for rate in rates:
        trace = list(with_prefixes(num_requests, NUM_PREFIXES, rate))
        for name, policy in (("by prefix", choose_replica), ("emptiest", emptiest), ("in turn", in_turn())):
            began = time.process_time()
            with mock.patch.object(scheduler, "choose_replica", policy):
                report = simulated(folder, Parallelism(replicas=num_replicas), trace)
            seconds = time.process_time() - began
            print(f"{line(f'{rate:g}/s, {name}', report)}; {seconds:.0f} s to simulate", flush=True)


def measure_hand_overs(prompt_lens: Sequence[int], num_each: int) -> None:
    """Prints the bytes and the median milliseconds of hand-overs between two CPU devices that are idle otherwise."""
    moves: list[tuple[int, float]] = []
    move = DevicePageMover.move

    def timed(mover: DevicePageMover, *arguments: Any) -> Any:
        began = time.perf_counter()
        arrival = move(mover, *arguments)
        assert arrival.is_intact()
        moves.append((arrival.num_bytes, time.perf_counter() - began))
        return arrival

    config = EngineConfig(max_model_len=2048, parallelism=Parallelism(replicas=2, prefill=1), prefix_cache=False)
    with mock.patch.object(DevicePageMover, "move", timed), LLM(config=config) as llm:
        llm.warm_up()
        for length in prompt_lens:
            moves.clear()
            for _ in range(num_each + 1):
                llm.generate([5] * length, SamplingParams(max_tokens=2, ignore_eos=True), show_progress=False)
            seconds = [own for _, own in moves[1:]]
            print(
                f"{length} tokens: {moves[-1][0] / 2**20:.2f} MiB in {1e3 * median(seconds):.2f} ms"
                f" ({1e3 * min(seconds):.2f} to {1e3 * max(seconds):.2f}), {num_each} times"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("roles", "routing", "hand-over")
    parser.add_argument("--only", type=some_of(*parts), default=parts, help="by comma")
    parser.add_argument("--requests", type=int, default=2000, help="of each simulated load")
    parser.add_argument("--rates", type=float, nargs="+", default=[10.0, 20.0], help="of arrivals on 4 chips, a second")
    parser.add_argument("--replicas", type=int, default=64, help="among which policies choose")
    parser.add_argument("--routing-rates", type=float, nargs="+", default=[800.0], help="of arrivals on all of these")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        (folder := Path(name)).joinpath("config.json").write_text(json.dumps(LLAMA))
        if "roles" in arguments.only:
            compare_roles(folder, arguments.requests, arguments.rates)
        if "routing" in arguments.only:
            compare_routing(folder, arguments.requests, arguments.replicas, arguments.routing_rates)
    if "hand-over" in arguments.only:
        measure_hand_overs((100, 500, 1500), 20)


if __name__ == "__main__":
    main()
