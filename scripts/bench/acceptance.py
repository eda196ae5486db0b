"""Measures what speculation makes of a drafter that is right with a given probability.

The drafter knows beforehand what follows each prompt. The script measures in the same engine how long a step with a
given number of drafts takes, against plain decoding before and after. From that and the probability follows the most
that speculation could bring (Leviathan et al. 2023). A drafter is as good in one run as in
the last: one run before the first that counts lets the engine see it.

A figure is output tokens per second of the steps in which all requests decode, drafting and host work included, against
plain decoding before and after in the same engine.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

from jaxinfer.checkpoint import read_config
from jaxinfer.config import EngineConfig
from jaxinfer.engine.request.completion import Completion
from jaxinfer.engine.request.request import Request
from jaxinfer.plan.step_shapes import max_mixed_tokens
from jaxinfer.text.tokenizer import Tokenizer
from scripts.bench.against_transformers import BUNDLED_MODEL, confine, integers, print_figures
from scripts.bench.drafting_engine import MAX_DRAFTS, DraftingEngine, Run
from scripts.bench.speculation import Texts
from scripts.bench.workload import RANDOM_SHAPES, checkpoint
from scripts.measure.simulate_drafts import bound

RATES = (0.0, 0.3, 0.5, 0.7, 0.9)


class ScriptedDrafter:
    """Right about each token of what it was told with probability `rate`, wrong otherwise."""

    def __init__(self) -> None:
        self.rate = 1.0
        self._answers: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._of_request: dict[int, tuple[int, ...]] = {}  # for a prompt takes long to look up
        self._random = random.Random(0)

    def learn(self, completions: Iterable[Completion]) -> None:
        self._answers |= {c.prompt_token_ids: c.token_ids for c in completions}

    def draft(self, requests: Sequence[Request], counts: Sequence[int]) -> list[list[int]]:
        return [self._draft(*pair) for pair in zip(requests, counts, strict=True)]

    def forget(self, request: Request) -> None:
        self._of_request.pop(request.request_id, None)

    def _draft(self, request: Request, count: int) -> list[int]:
        answer = self._of_request.get(request.request_id)
        if answer is None:
            answer = self._answers.get(tuple(request.token_ids[: request.num_prompt_tokens]), ())
            self._of_request[request.request_id] = answer
        start = request.num_output_tokens
        return [token if self._random.random() < self.rate else token ^ 1 for token in answer[start : start + count]]


class Measured:
    """The runs of one engine on the same prompts, each beside plain decoding."""

    def __init__(self, model: Path, batch: int) -> None:
        tokenizer = Tokenizer.from_path(model)
        assert tokenizer is not None
        self._prompts = Texts(tokenizer.encode, read_config(model).vocab_size).prompts(batch)
        # Of each row, as a verify step holds no more tokens.
        self.max_drafts = max_mixed_tokens(EngineConfig(max_num_seqs=batch)) // batch - 1
        self.drafter = ScriptedDrafter()
        self._engine = DraftingEngine(model, batch, self.drafter)
        self.drafter.learn(self._engine.run_plain(self._prompts, salt=None).completions)

    def run(self, count: int | None = None) -> tuple[float, Run]:
        """Returns tokens per second against plain decoding before and after, and the run.

        `count` is the number of drafts of each row; None leaves it to the engine.
        """
        run, plain = self._engine.run_beside_plain(self._prompts, count, salt=None)
        return run.tokens_per_second / plain, run


def measure(model: Path, batch: int, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Returns the figures of all rounds by label."""
    measured, figures = Measured(model, batch), dict[str, list[float]]()

    def note(label: str, value: float) -> None:
        figures.setdefault(f"batch {batch}, {label}", []).append(value)
        print(f"batch {batch}, {label}: {value:.2f}", flush=True)

    costs: dict[int, float] = {}
    for count in (count for count in arguments.counts if count <= measured.max_drafts):
        for _ in range(arguments.rounds):
            against_plain, run = measured.run(count)
            note(f"a step with {count} drafts, in steps without", run.tokens_per_step / against_plain)
        costs[count] = median(figures[f"batch {batch}, a step with {count} drafts, in steps without"])
    for rate in RATES:
        measured.drafter.rate = rate
        for index in range(1 + arguments.rounds):
            against_plain, run = measured.run()
            if index == 0:
                note(f"right with {rate}, first run, against plain", against_plain)
                continue
            note(f"right with {rate}, against plain", against_plain)
            note(f"right with {rate}, part of the bound", against_plain / bound(rate, costs))
            note(f"right with {rate}, tokens a row and step", run.tokens_per_step)
            if run.against_own_steps is not None:
                note(f"right with {rate}, against its own steps without", run.against_own_steps)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", type=Path, default=BUNDLED_MODEL, help="checkpoint folder")
    model.add_argument("--random-shape", choices=RANDOM_SHAPES, help="size of a random checkpoint")
    parser.add_argument("--batch", type=int, default=1, help="requests at a time")
    parser.add_argument("--counts", type=integers, default=(1, 2, 3, MAX_DRAFTS), help="drafts of each row to cost")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2, help="cores")
    parser.add_argument("--spin", action="store_true", help="do not stop torch's threads from spinning")
    arguments = parser.parse_args()
    confine(arguments)
    with checkpoint(arguments.model, arguments.random_shape) as folder:
        print_figures(measure(folder, arguments.batch, arguments), arguments)


if __name__ == "__main__":
    main()
