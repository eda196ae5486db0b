"""Measures every drafter for the bundled model against plain decoding and against the best number of drafts.

Prompts are parts of the files that nothing was trained on (scripts/corpus.py), other ones in each round. With all
drafts of a given number verified, a drafter yields so many tokens a step, and a step takes so long, drafting and the
host's work included: the most tokens per second that any number brings, none included, is what acceptance and step
times allow (Leviathan et al. 2023). Against it stands the engine that chooses the number itself. Figures are output
tokens per second of the steps in which all requests decode, against plain decoding just before and after; of rounds
the median counts.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections import defaultdict
from itertools import cycle, islice
from statistics import median
from typing import Any

from benchmark import BUNDLED_MODEL, conditions, confine, integers, some_of
from corpus import held_out_files

from jaxinfer import LLM, EngineConfig, SamplingParams
from jaxinfer.checkpoint import load_checkpoint
from jaxinfer.checkpoint.draft_heads import load_draft_heads
from jaxinfer.engine.draft_model import DraftModel
from jaxinfer.engine.drafters import NgramDrafter, SuffixDrafter
from jaxinfer.engine.speculation_plan import drafter_of
from jaxinfer.engine.step import Step
from jaxinfer.tokenizer import Tokenizer

PROMPT_LEN, OUTPUT_LEN = 192, 128
ASSETS = BUNDLED_MODEL.parent
DRAFTERS = ("ngram", "suffix", "draft", "medusa", "eagle", "exit", "medusa tree", "eagle tree")


def make_drafter(name: str) -> Any:
    if name in ("ngram", "suffix"):
        return {"ngram": NgramDrafter, "suffix": SuffixDrafter}[name]()
    path = ASSETS / f"tiny-{name.removesuffix(' tree')}"
    if name == "draft":
        return DraftModel(*load_checkpoint(path, "float32"))
    return drafter_of(load_draft_heads(path, "float32"))


class Engine:
    """An engine with a drafter, and what its decoding steps took; `adaptive`: it chooses how many are verified."""

    def __init__(self, batch: int, name: str, *, most: int, adaptive: bool) -> None:
        self.most = most  # drafts that a request may get, in later runs fewer
        drafter = make_drafter(name)
        draft = drafter.draft
        drafter.draft = lambda requests, counts: draft(requests, [min(count, self.most) for count in counts])
        config = EngineConfig(
            max_num_seqs=batch,
            max_model_len=PROMPT_LEN + OUTPUT_LEN,
            max_drafts=most,
            adaptive_drafts=adaptive,
            draft_trees=name.endswith("tree"),
        )
        self._llm = LLM(BUNDLED_MODEL, config=config, dtype="float32", speculation=drafter)
        self._llm.warm_up()
        self._llm.on_step = self._enter
        self._seconds, self._num_rows = 0.0, 0

    def _enter(self, step: Step, seconds: float) -> None:
        if step.is_decode or step.is_verify:
            self._seconds += seconds
            self._num_rows += len(step.chunks)

    def run_plain(self, prompts: list[list[int]], temperature: float, salt: str) -> float:
        """Returns tokens per second without drafts: of the same engine, for two of a kind differ by up to 6 %."""
        scheduler = self._llm._scheduler
        scheduler._speculation, speculation = None, scheduler._speculation
        rate, _ = self.run(prompts, temperature, salt)
        scheduler._speculation = speculation
        return rate

    def run(self, prompts: list[list[int]], temperature: float, salt: str) -> tuple[float, float]:
        """Returns tokens per second, and tokens per row and step."""
        self._seconds, self._num_rows = 0.0, 0
        before = self._llm.metrics().num_accepted_tokens
        sampling = SamplingParams(max_tokens=OUTPUT_LEN, temperature=temperature, seed=0, ignore_eos=True)
        self._llm.generate(prompts, sampling, show_progress=False, cache_salt=salt)
        num_tokens = self._num_rows + self._llm.metrics().num_accepted_tokens - before
        return num_tokens / self._seconds, num_tokens / self._num_rows


def held_out_prompts() -> list[list[int]]:
    """Returns the beginning of each file, then the next part of each, and so on."""
    tokenizer = Tokenizer.from_path(BUNDLED_MODEL)
    assert tokenizer is not None
    encoded = [tokenizer.encode(path.read_text(encoding="utf-8")) for path in held_out_files()]
    starts = range(0, max(map(len, encoded)) - PROMPT_LEN, PROMPT_LEN)
    return [t[start : start + PROMPT_LEN] for start in starts for t in encoded if len(t) >= start + PROMPT_LEN]


def measure(name: str, batch: int, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Returns the figures of all rounds by label."""
    counts = [count for count in arguments.counts if name != "medusa" or count <= 4]  # it has as many heads
    adaptive, fixed = (Engine(batch, name, most=max(counts), adaptive=each) for each in (True, False))
    prompts, figures = cycle(held_out_prompts()), defaultdict(list)
    for index in range(arguments.rounds):
        texts = list(islice(prompts, batch))

        def compare(engine: Engine, label: str, texts: list[list[int]] = texts, index: int = index) -> float:
            before = engine.run_plain(texts, arguments.temperature, f"{index} before {label}")
            rate, per_step = engine.run(texts, arguments.temperature, f"{index} {label}")
            after = engine.run_plain(texts, arguments.temperature, f"{index} after {label}")
            figures[f"{label}, against plain"].append(2 * rate / (before + after))
            figures[f"{label}, tokens a step"].append(per_step)
            return 2 * rate / (before + after)

        chosen, possible = compare(adaptive, "as many drafts as pay"), 1.0
        for fixed.most in counts:
            possible = max(possible, compare(fixed, f"{fixed.most} drafts"))
        figures["part of what is possible"].append(chosen / possible)
        last = ", ".join(f"{label} {values[-1]:.2f}" for label, values in figures.items())
        print(f"batch {batch}, {name}: {last}", flush=True)
    return {f"batch {batch}, {name}: {label}": values for label, values in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafters", type=some_of(*DRAFTERS), default=DRAFTERS, help="by comma")
    parser.add_argument("--batches", type=integers, default=(1, 32), help="requests at a time")
    parser.add_argument("--counts", type=integers, default=(1, 2, 4, 7), help="drafts verified in every step")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2, help="cores")
    parser.add_argument("--spin", action="store_true", help="do not stop torch's threads from spinning")
    arguments = parser.parse_args()
    confine(arguments)
    figures: dict[str, list[float]] = {}
    for batch in arguments.batches:
        for name in arguments.drafters:
            figures |= measure(name, batch, arguments)
    width = max(map(len, figures))
    for label, values in figures.items():
        print(f"{label:<{width}}{median(values):>10.2f}   {min(values):.2f} to {max(values):.2f}")
    quoted = conditions(arguments) | {"measured with": shlex.join(["python", *sys.argv])}
    print("\n".join(f"{key}: {value}" for key, value in quoted.items()))


if __name__ == "__main__":
    main()
