"""Measures what the structure of an output costs: its masks are worked out on the host while the device computes.

In one engine, in turn: requests without a structure; with one; with one whose masks cost nothing, for a mask that was
worked out once stands for all; and with one where each step waits for the masks, as it does until the executables that
draw apart are compiled. A figure is the time of a step in which all requests decode, the median of rounds. "busy"
is the part of the steps whose forward pass was still running when their masks were there.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator
from statistics import mean, median
from typing import Any
from unittest.mock import patch

from jaxinfer import LLM, EngineConfig, SamplingParams
from jaxinfer.engine.execution import runner
from jaxinfer.engine.scheduling.step import Step
from jaxinfer.text.grammar import Grammar
from scripts.bench.against_transformers import BUNDLED_MODEL, confine, integers, print_figures
from scripts.bench.drafting_engine import all_decode
from scripts.bench.workload import RANDOM_SHAPES, checkpoint

PROMPT, OUTPUT_LEN = "A reader meets each idea once.", 96
# Long enough for every output, whatever its tokens are.
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "names": {"type": "array", "items": {"type": "string", "pattern": "^[A-Z][a-z]{2,9}$"}, "minItems": 200},
    },
    "required": ["names"],
    "additionalProperties": False,
}


@contextlib.contextmanager
def free_masks() -> Iterator[None]:
    """Masks take no time: the first of each request stands for all that follow, and no token is looked at."""
    masks: dict[int, Any] = {}
    mask = Grammar.mask

    def kept(grammar: Grammar) -> Any:
        if id(grammar) not in masks:
            masks[id(grammar)] = mask(grammar)
        return masks[id(grammar)]

    with (
        patch.object(Grammar, "mask", kept),
        patch.object(Grammar, "accept", lambda *_: None),
        patch.object(Grammar, "is_complete", False),
    ):
        yield


class Engine:
    """An engine, and the seconds of its steps in which all requests decode."""

    def __init__(self, model: Any, batch: int) -> None:
        config = EngineConfig(max_num_seqs=batch, max_model_len=256)
        self._llm, self._batch = LLM(model, config=config, dtype="float32"), batch
        self._llm.warm_up()
        self._llm.on_step = self._enter
        self._seconds: list[float] = []
        self.mask_seconds: list[float] = []
        self.were_busy: list[bool] = []

    def _enter(self, step: Step, seconds: float) -> None:
        if all_decode(step, self._batch):
            self._seconds.append(seconds)

    def run(self, schema: Any, salt: str) -> float:
        """Returns the seconds of a step."""
        self._seconds.clear()
        prompts = [f"{PROMPT} {index}" for index in range(self._batch)]
        params = [
            SamplingParams(max_tokens=OUTPUT_LEN, seed=seed, ignore_eos=True, json_schema=schema)
            for seed in range(self._batch)
        ]
        self._llm.generate(prompts, params, show_progress=False, cache_salt=salt)
        return mean(self._seconds)

    def run_waiting(self, schema: Any, salt: str) -> float:
        """The same where no step is launched before its masks are known."""
        with patch.object(self._llm._engine._runners[0].compiled_steps, "_draws", {}):
            return self.run(schema, salt)

    def run_watched(self, schema: Any, salt: str) -> float:
        """The same with an eye on the masks of each step."""
        add_masks, draw = runner.add_masks, self._llm._engine._runners[0].draw

        def watched(step: Step, output: Any) -> Any:
            def timed(step: Step, sampling: Any) -> Any:
                began = time.perf_counter()
                sampling = add_masks(step, sampling)
                self.mask_seconds.append(time.perf_counter() - began)
                self.were_busy.append(not output.hidden.is_ready())
                return sampling

            with patch.object(runner, "add_masks", timed):
                return draw(step, output)

        with patch.object(self._llm._engine._runners[0], "draw", watched):
            return self.run(schema, salt)


def measure(model: Any, batch: int, rounds: int) -> dict[str, list[float]]:
    """Returns the figures of all rounds by label."""
    engine, figures = Engine(model, batch), {}
    title = f"batch {batch}"

    def note(label: str, value: float) -> None:
        figures.setdefault(f"{title}, {label}", []).append(value)
        print(f"{title}, {label}: {value:.2f}", flush=True)

    for index in range(-1, rounds):
        plain = engine.run(None, f"plain {index}")
        engine.mask_seconds.clear()
        engine.were_busy.clear()
        structured = engine.run_watched(SCHEMA, f"structure {index}")
        waiting = engine.run_waiting(SCHEMA, f"waiting {index}")
        with free_masks():
            free = engine.run(SCHEMA, f"free {index}")
        if index < 0:  # touches new memory
            continue
        note("no structure, ms a step", 1e3 * plain)
        note("structure, ms a step", 1e3 * structured)
        note("masks of a step, ms", 1e3 * median(engine.mask_seconds))
        note("busy", mean(engine.were_busy))
        note("structure, speed against masks that cost nothing", free / structured)
        note("structure, speed against steps that wait for masks", waiting / structured)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--random-shape", choices=RANDOM_SHAPES, help="size of a random checkpoint; bundled by default")
    parser.add_argument("--batches", type=integers, default=(1, 8, 32), help="requests at a time")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2, help="cores")
    parser.add_argument("--spin", action="store_true", help="do not stop torch's threads from spinning")
    arguments = parser.parse_args()
    confine(arguments)
    figures: dict[str, list[float]] = {}
    with checkpoint(BUNDLED_MODEL, arguments.random_shape) as folder:
        for batch in arguments.batches:
            figures |= measure(folder, batch, arguments.rounds)
    print_figures(figures, arguments)


if __name__ == "__main__":
    main()
