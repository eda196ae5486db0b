"""Simulates how many drafts the engine chooses, without a model: thousands of outputs in a minute, always the same.

The engine's own choice runs under a virtual clock, on a machine made up after a shared CPU: its speed wanders by a
fifth, steps vary by an eighth, and one in a hundred is interrupted. The drafts of a request are right about each token
with a given probability. So requests of several kinds can follow each other, and what distinguishes two ways to choose
is not lost in what distinguishes two runs.

A figure is tokens per second against plain decoding, by what steps take on average: what drafts cost and bring, not how
lucky the machine was. "all", "first" and "low": the mean of all outputs of a kind, that of the first ones of their
engines, and what one in twenty does not reach. "bound": the best of plain decoding and of every number of drafts
(Leviathan et al. 2023).
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Sequence
from statistics import harmonic_mean, quantiles
from typing import Any

from jaxinfer import EngineConfig, SamplingParams
from jaxinfer.config import CacheConfig
from jaxinfer.engine.execution.engine_model import DeviceDrafter, EngineModel
from jaxinfer.engine.kv_cache.block_tables import BlockTables
from jaxinfer.engine.request.request import Request
from jaxinfer.engine.scheduling.step import Chunk, Chunks, Step
from jaxinfer.engine.speculation.policy import num_to_come
from jaxinfer.engine.speculation.speculation import Speculation
from jaxinfer.engine.speculation.step_times import StepTimeTable
from jaxinfer.plan.step_shapes import max_mixed_tokens, plan_buckets

# Seconds of a step: of one that is launched ahead, of one that has waited for tokens, of one that verifies drafts.
# These and the times below are those of the bundled model on two threads.
PLAIN, WAITED, VERIFIED = 4.5e-3, 6.0e-3, 7.2e-3
# What the host does while a step runs, drafting, takes that much of it from the step.
HOST_SHARE = 0.3
PROMPT_LEN, OUTPUT_LEN = 192, 128
MAX_DRAFTS = EngineConfig.max_drafts
RIGHT, WRONG = 0, 1


class Machine:
    """Step times and a clock."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.work = 0.0  # seconds that everything would have taken at the speed of an average step
        self._random = random.Random(seed)
        self._drift = 0.0

    def clock(self) -> float:
        return self.now

    def launch(self, step: Step) -> None:
        self.compute(step)

    def read(self, output: None) -> Any:
        return argparse.Namespace(hidden=None)

    def compute(self, step: Step) -> None:
        seconds = VERIFIED if step.is_verify else PLAIN if step.is_ahead else WAITED
        self.work += seconds
        passed = seconds / 2.0  # of the seconds after which little is left of what the machine's speed was
        self._drift += 0.2 * math.sqrt(2 * passed) * self._random.gauss() - self._drift * passed
        interruption = 2.5 if self._random.random() < 0.01 else 1.0
        self.now += seconds * math.exp(self._drift + 0.12 * self._random.gauss()) * interruption

    def spend(self, seconds: float) -> None:
        """Has the host, or a drafter on the device, take its time."""
        self.now += seconds
        self.work += seconds


class HostDrafter:
    """Right about each token with the probability that holds for the request at hand, in a tenth of a millisecond."""

    seconds = (0.1e-3, 0.0)  # of any drafts, and of each

    def __init__(self, machine: Machine, seed: int) -> None:
        self.machine, self.rate = machine, 0.0
        self._random = random.Random(seed)

    def draft(self, requests: Sequence[Request], counts: Sequence[int]) -> list[list[int]]:
        (count,), (once, each) = counts, self.seconds
        self.machine.spend(once + each * count)
        return [[RIGHT if self._random.random() < self.rate else WRONG for _ in range(count)]]

    def forget(self, request: Request) -> None:
        pass


class DraftModel(HostDrafter, DeviceDrafter):
    """The same with the times of a draft model, which first reads a prompt, `most_tokens` at a time."""

    seconds = (1.1e-3, 0.72e-3)
    seconds_per_token, most_tokens = 0.038e-3, 128

    def __init__(self, machine: Machine, seed: int) -> None:
        super().__init__(machine, seed)
        self._num_read: dict[int, int] = {}

    @property
    def resident_bytes(self) -> int:
        return 0

    @property
    def num_executables(self) -> int:
        return 0

    @property
    def step_bytes(self) -> int:
        return 0

    def prepare(self, target: EngineModel) -> int:
        return MAX_DRAFTS

    def num_unseen(self, request: Request) -> int:
        return max(len(request.token_ids) - self._num_read.get(request.request_id, 0), 1)

    def draft(self, requests: Sequence[Request], counts: Sequence[int]) -> list[list[int]]:
        (request,), num_unseen = requests, self.num_unseen(requests[0])
        num_read = min(num_unseen, self.most_tokens)
        self._num_read[request.request_id] = len(request.token_ids) - num_unseen + num_read
        self.machine.spend(self.seconds_per_token * num_read)
        return super().draft(requests, counts if num_read == num_unseen else [0])

    def forget(self, request: Request) -> None:
        self._num_read.pop(request.request_id, None)


class SimulatedEngine:
    """An engine of one row, whose requests draw the same token again and again."""

    def __init__(self, drafter_type: type[HostDrafter], seed: int) -> None:
        self._machine = Machine(seed)
        self._drafter = drafter_type(self._machine, seed)
        config = EngineConfig(max_num_seqs=1, max_model_len=PROMPT_LEN + OUTPUT_LEN)
        self._speculation = Speculation(
            self._drafter,
            max_drafts=MAX_DRAFTS,
            max_tokens=max_mixed_tokens(config),
            times=StepTimeTable(plan_buckets(config, MAX_DRAFTS)),
            clock=self._machine.clock,
        )
        device: Any = self._machine
        self._speculation.rehearse(device, CacheConfig(num_pages=8, page_size=128))
        self._tables = BlockTables(8, 128)
        self._num_requests = 0

    def run(self, rate: float) -> float:
        """Returns tokens per second of an output against plain decoding."""
        machine, speculation = self._machine, self._speculation
        self._num_requests += 1
        self._drafter.rate = rate
        prompt, params = [1] * PROMPT_LEN, SamplingParams(temperature=0)
        limits: dict[str, Any] = {"max_tokens": OUTPUT_LEN, "stop_token_ids": (), "detokenizer": None}
        request = Request(self._num_requests, prompt, params, seed=0, **limits)
        self._tables.reserve(request, PROMPT_LEN)
        request.num_computed = PROMPT_LEN
        request.token_ids.append(RIGHT)
        before, is_ahead = machine.work, False
        while num_to_come(request) > 0:
            chunks, began = Chunks.of([Chunk(request, len(request.token_ids) - 1, 1)]), machine.now
            if not is_ahead:
                chunks = speculation.add_drafts(chunks, self._tables)
            step = Step(chunks, is_ahead=is_ahead)
            now, work = machine.now, machine.work
            is_ahead = num_to_come(request) > 1 and speculation.decide_overlap(step)
            machine.now = now + HOST_SHARE * (machine.now - now)
            machine.work = work + HOST_SHARE * (machine.work - work)
            machine.compute(step)
            drafts = [*chunks.drafts[0], WRONG]
            emitted = [RIGHT] * min(drafts.index(WRONG) + 1, num_to_come(request))
            speculation.observe(step, [[(token, 0.0, {}, None) for token in emitted]], machine.now - began)
            request.token_ids.extend(emitted)
            request.num_computed += len(emitted)
        request.finish_reason = "length"
        speculation.forget(request)
        self._tables.release(request)
        return (OUTPUT_LEN - 1) * PLAIN / (machine.work - before)


def bound(rate: float, costs: dict[int, float]) -> float:
    """The most tokens in the time of plain decoding, by what a step with 1, 2, … drafts of each row takes in steps
    without (Leviathan et al. 2023).
    """
    return max(1.0, *(sum(rate**i for i in range(count + 1)) / cost for count, cost in costs.items()))


def costs_of(drafter_type: type[HostDrafter]) -> dict[int, float]:
    """Returns the time of a step by its number of drafts, drafting included, in plain steps."""
    once, each = drafter_type.seconds
    return {count: (VERIFIED + once + each * count) / PLAIN for count in range(1, MAX_DRAFTS + 1)}


def rates(text: str) -> tuple[float, ...]:
    """Parses probabilities by comma."""
    values = tuple(map(float, text.split(",")))
    if not all(0 <= value <= 1 for value in values):
        raise argparse.ArgumentTypeError(f"{text!r}: give probabilities from 0 to 1 by comma")
    return values


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=rates, default=(0.0,), help="of requests in turn, by comma")
    parser.add_argument("--drafter", choices=("host", "model"), default="host", help="whose times drafts take")
    parser.add_argument("--outputs", type=int, default=10, help="of an engine")
    parser.add_argument("--engines", type=int, default=24, help="one for each seed")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    drafter_type = {"host": HostDrafter, "model": DraftModel}[arguments.drafter]
    rate_of = [arguments.rates[i % len(arguments.rates)] for i in range(arguments.outputs)]
    figures = []
    for seed in range(arguments.engines):
        engine = SimulatedEngine(drafter_type, seed)
        figures.append([engine.run(rate) for rate in rate_of])
    print("rate   all    first  low    bound")
    for rate in dict.fromkeys(rate_of):
        of_engines = [[x for x, own in zip(row, rate_of, strict=True) if own == rate] for row in figures]
        outputs = [x for row in of_engines for x in row]
        first, low = harmonic_mean([row[0] for row in of_engines]), quantiles(outputs, n=20)[0]
        columns = (harmonic_mean(outputs), first, low, bound(rate, costs_of(drafter_type)))
        print(f"{rate:<6g}", "  ".join(f"{value:<5.3f}" for value in columns), flush=True)


if __name__ == "__main__":
    main()
