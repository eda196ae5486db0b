"""Measures how often drafts of the bundled model's drafters are right on held-out text.

Prompts are beginnings of the files that nothing was trained on (scripts/train/corpus.py). All drafts are verified. The
rate of draft k is how often it is right if those before it are. scripts/bench/drafters.py measures the gain.

With `--trees` heads draft trees with the same number of drafts. With `--ranks R` they draft the R best guesses for each
of some places. The script then counts how often the text followed each path of ranks, which says what nodes a tree
should have, in which order.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer import LLM, EngineConfig, SamplingParams
from jaxinfer.checkpoint.draft_heads import load_draft_heads
from jaxinfer.engine.request.request import Request
from jaxinfer.engine.scheduling.drafts import first_of, rest_of
from jaxinfer.engine.scheduling.step import Step
from jaxinfer.engine.speculation.load import drafter_of
from scripts.bench.against_transformers import BUNDLED_MODEL, conditions, confine
from scripts.bench.drafters import held_out_prompts
from scripts.bench.drafting_engine import OUTPUT_LEN, PROMPT_LEN

MOST_DRAFTS = 15


class Engine:
    """An engine, which of its drafts were right, and what its steps of decoding took."""

    def __init__(self, batch: int, speculation: Any, **limits: Any) -> None:
        config = EngineConfig(max_num_seqs=batch, max_model_len=PROMPT_LEN + OUTPUT_LEN, **limits)
        self._llm = LLM(BUNDLED_MODEL, config=config, dtype="float32", speculation=speculation)
        self._llm.warm_up()
        self._llm.on_step = self._enter
        self.drafted: list[tuple[Request, int, Sequence[int]]] = []  # for whom, from which place on, and what
        self.right, self.made = np.zeros(config.max_drafts), np.zeros(config.max_drafts)
        self.num_rows = self.num_tokens = 0

    def _enter(self, step: Step, _: float) -> None:
        if not (step.is_decode or step.is_verify):
            return
        for chunk in step.chunks:
            self.drafted.append((chunk.request, chunk.start + 1, chunk.drafts))
            drafts, num_right = chunk.drafts, 0
            for token in chunk.request.token_ids[chunk.start + 1 :]:
                is_right = token in first_of(drafts)
                if drafts:
                    self.made[num_right] += 1
                    self.right[num_right] += is_right
                drafts = rest_of(drafts, token)
                num_right += is_right
                if not is_right:
                    break
            self.num_rows += 1
            self.num_tokens += 1 + num_right

    def run(self, prompts: list[list[int]], temperature: float, salt: str) -> None:
        sampling = SamplingParams(max_tokens=OUTPUT_LEN, temperature=temperature, seed=0, ignore_eos=True)
        self._llm.generate(prompts, sampling, show_progress=False, cache_salt=salt)


def measure_ranks(folder: Path, prompts: list[list[int]], ranks: int) -> None:
    """Prints how often the text follows each path of ranks, the most frequent first."""
    depth = MOST_DRAFTS // ranks
    tree = tuple((*(0,) * place, rank) for place in range(depth) for rank in range(ranks))
    for temperature in (0.0, 1.0):
        drafter = drafter_of(load_draft_heads(folder, "float32"), tree)
        engine = Engine(8, drafter, max_drafts=len(tree), adaptive_drafts=False, draft_trees=True)
        engine.run(prompts, temperature, "ranks")
        counts: Counter[tuple[int, ...]] = Counter()
        for request, start, drafts in engine.drafted:
            path = []
            for place, token in enumerate(request.token_ids[start : start + depth] if len(drafts) == len(tree) else ()):
                guesses = list(drafts)[ranks * place :][:ranks]
                if token not in guesses:
                    break
                path.append(guesses.index(token))
                counts[tuple(path)] += 1
        total = sum(len(drafts) == len(tree) for *_, drafts in engine.drafted)
        listed = ", ".join(f"{path}: {count / total:.3f}" for path, count in counts.most_common(24))
        print(f"{folder.name}, temperature {temperature:.0f}, {total} places: {listed}", flush=True)


def measure_rates(folder: Path, prompts: list[list[int]], num_drafts: int, *, trees: bool) -> None:
    """Prints how often each draft is right if those before it are; in trees, one of those for each place."""
    for temperature in (0.0, 1.0):
        engine = Engine(8, folder, max_drafts=num_drafts, adaptive_drafts=False, draft_trees=trees)
        engine.run(prompts, temperature, "all")
        rates = ", ".join(f"{rate:.2f}" for rate in engine.right / np.maximum(engine.made, 1))
        per_step = engine.num_tokens / engine.num_rows
        print(f"{folder.name}, temperature {temperature:.0f}: {rates}; {per_step:.2f} tokens a step", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("drafters", type=Path, nargs="+", help="folders of draft models, heads or exits")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--num-drafts", type=int, default=4, help="drafts verified in every step")
    parser.add_argument("--trees", action="store_true", help="trees of so many drafts")
    parser.add_argument(
        "--ranks", type=int, metavar="R", help="measure how often texts follow which of R guesses instead"
    )
    parser.add_argument("--threads", type=int, default=2, help="cores")
    parser.add_argument("--spin", action="store_true", help="do not stop torch's threads from spinning")
    arguments = parser.parse_args()
    confine(arguments)
    prompts = held_out_prompts()[: arguments.prompts]
    if arguments.ranks:
        for folder in arguments.drafters:
            measure_ranks(folder, prompts, arguments.ranks)
    else:
        for folder in arguments.drafters:
            measure_rates(folder, prompts, arguments.num_drafts, trees=arguments.trees)
    quoted = conditions(arguments) | {"measured with": shlex.join(["python", *sys.argv])}
    print("\n".join(f"{key}: {value}" for key, value in quoted.items()))


if __name__ == "__main__":
    main()
