"""Measures every drafter for the bundled model against plain decoding and against the best number of drafts.

Prompts are parts of the files that nothing was trained on (scripts/train/corpus.py), other ones in each round. Each
fixed number of drafts is measured with all drafts verified, drafting and the host's work included. The best of these
numbers and of plain decoding is what acceptance and step times allow (Leviathan et al. 2023). The engine that chooses
the number itself is compared with that best.

Figures are output tokens per second of the steps in which the whole batch decodes, against plain decoding just before
and after. For a batch of several, `WAVES` batches of requests come, so that others follow those that end first. In a
round each figure is the median of `--repeats` runs. Rounds are given with their mean and its standard error.
transformers decodes the same prompts, plainly and with prompt lookup and the draft model, one request at a time.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from itertools import cycle, islice
from statistics import median
from typing import Any

from jaxinfer.checkpoint import load_checkpoint
from jaxinfer.checkpoint.draft_heads import load_draft_heads
from jaxinfer.engine.drafters.draft_model import DraftModel
from jaxinfer.engine.drafters.drafters import NgramDrafter, SuffixDrafter
from jaxinfer.engine.speculation.load import drafter_of
from jaxinfer.text.tokenizer import Tokenizer
from scripts.bench.against_transformers import BUNDLED_MODEL, confine, integers, print_figures, some_of
from scripts.bench.drafting_engine import PROMPT_LEN, DraftingEngine
from scripts.bench.speculation import Peer
from scripts.train.corpus import held_out_files

ASSETS = BUNDLED_MODEL.parent
CHOSEN = "chosen by the engine"
OWN = f"{CHOSEN}, against its own steps without"
WAVES = 2
Figures = dict[str, list[float]]
DRAFTERS = ("ngram", "suffix", "draft", "medusa", "eagle", "exit", "medusa tree", "eagle tree")


def make_drafter(name: str) -> Any:
    if name in ("ngram", "suffix"):
        return {"ngram": NgramDrafter, "suffix": SuffixDrafter}[name]()
    path = ASSETS / f"tiny-{name.removesuffix(' tree')}"
    if name == "draft":
        return DraftModel(*load_checkpoint(path, "float32"))
    return drafter_of(load_draft_heads(path, "float32"))


def held_out_prompts() -> list[list[int]]:
    """Returns the beginning of each file, then the next part of each, and so on."""
    tokenizer = Tokenizer.from_path(BUNDLED_MODEL)
    assert tokenizer is not None
    encoded = [tokenizer.encode(path.read_text(encoding="utf-8")) for path in held_out_files()]
    starts = range(0, max(map(len, encoded)) - PROMPT_LEN, PROMPT_LEN)
    return [t[start : start + PROMPT_LEN] for start in starts for t in encoded if len(t) >= start + PROMPT_LEN]


def texts_of(batch: int, rounds: int) -> list[list[list[int]]]:
    """Returns the prompts of each round, others in each as long as there are any."""
    prompts = cycle(held_out_prompts())
    return [list(islice(prompts, batch if batch == 1 else WAVES * batch)) for _ in range(rounds)]


def measure(name: str, batch: int, arguments: argparse.Namespace) -> Figures:
    """Returns the figures of all rounds by label."""
    counts = [count for count in arguments.counts if name != "medusa" or count <= 4]  # it has four heads
    counts = [] if arguments.only_chosen else counts
    limits = {"max_drafts": max(arguments.counts), "draft_trees": name.endswith("tree")}
    engine, figures = DraftingEngine(BUNDLED_MODEL, batch, make_drafter(name), **limits), defaultdict(list)
    for index, texts in enumerate(texts_of(batch, arguments.rounds)):
        ratios: Figures = defaultdict(list)
        options: dict[str, Any] = {"salt": f"{index}", "temperature": arguments.temperature}
        for repeat in range(arguments.repeats):
            for label, count in [(CHOSEN, None), *((f"{count} drafts", count) for count in counts)]:
                if name == "suffix":  # nothing is to be known of what others were answered
                    options["salt"] = f"{index} {repeat} {label}"
                run, plain = engine.run_beside_plain(texts, count, **options)
                if count is None and run.against_own_steps is not None:
                    figures[OWN].append(run.against_own_steps)
                ratios[label].append(run.tokens_per_second / plain)
                figures[f"{label}, tokens a step"].append(run.tokens_per_step)
                figures[f"{label}, tokens/s"].append(run.tokens_per_second)
                figures["plain, tokens/s"].append(plain)
        medians = {label: median(values) for label, values in ratios.items()}
        for label, value in medians.items():
            figures[f"{label}, against plain"].append(value)
        if counts:
            figures["part of what is possible"].append(medians[CHOSEN] / max(1.0, *medians.values()))
        last = ", ".join(f"{label} {values[-1]:.2f}" for label, values in figures.items())
        print(f"batch {batch}, {name}: {last}", flush=True)
    return {f"batch {batch}, {name}: {label}": values for label, values in figures.items()}


def measure_peer(batch: int, arguments: argparse.Namespace) -> Figures:
    """Returns what transformers makes of the same prompts."""
    peer, figures = Peer(BUNDLED_MODEL, ASSETS / "tiny-draft", arguments.threads), defaultdict(list)
    for texts in texts_of(batch, arguments.rounds):
        for kind, options in peer.kinds(batch).items():
            rate = median(peer.run(texts, None, **options) for _ in range(arguments.repeats))
            print(f"batch {batch}, transformers, {kind}: {rate:.0f} tokens/s", flush=True)
            figures[f"batch {batch}, transformers, {kind}: tokens/s"].append(rate)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafters", type=some_of(*DRAFTERS), default=DRAFTERS, help="by comma")
    parser.add_argument("--batches", type=integers, default=(1, 32), help="requests at a time")
    parser.add_argument("--counts", type=integers, default=(1, 2, 4, 7), help="drafts verified in every step")
    parser.add_argument(
        "--only-chosen", action="store_true", help="leave out those of which a given number is verified"
    )
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=6, help="each of other texts")
    parser.add_argument("--repeats", type=int, default=3, help="how often a round takes each figure")
    parser.add_argument("--no-peer", dest="peer", action="store_false", help="leave out transformers")
    parser.add_argument("--threads", type=int, default=2, help="cores")
    parser.add_argument("--spin", action="store_true", help="do not stop torch's threads from spinning")
    arguments = parser.parse_args()
    confine(arguments)
    figures: Figures = {}
    for batch in arguments.batches:
        figures |= measure_peer(batch, arguments) if arguments.peer else {}
        for name in arguments.drafters:
            figures |= measure(name, batch, arguments)
    print_figures(figures, arguments)


if __name__ == "__main__":
    main()
