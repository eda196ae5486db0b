"""Measures what sharing costs where nothing is shared, interactive requests over a saturating batch job, and drafts.

python scripts/bench/load.py --only sharing,mixed,drafts
"""

from __future__ import annotations

import argparse
import contextlib
import random
import time
from dataclasses import dataclass, field, replace
from operator import truediv
from statistics import median
from unittest.mock import patch

import numpy as np

from jaxinfer import LLM, EngineConfig, SamplingParams
from jaxinfer.checkpoint import read_config
from jaxinfer.engine.speculation.speculation import Speculation
from jaxinfer.plan.step_shapes import max_rows
from jaxinfer.text.tokenizer import Tokenizer
from scripts.bench.against_transformers import BUNDLED_MODEL, some_of
from scripts.bench.drafting_engine import OUTPUT_LEN
from scripts.bench.speculation import Texts, processor_of

SHARING_REQUESTS, SHARING_LEN, SHARING_OUTPUT_LEN = 16, 200, 16
BATCH_LEN, BATCH_OUTPUT_LEN = 64, 96
INTERACTIVE_LEN, INTERACTIVE_OUTPUT_LEN = 64, 8
IDLE_REQUESTS = 20
DRAFTING_ROWS, NUM_EDITS = (4, 16), 64  # rows of engines, and files to edit


def random_prompts(llm: LLM, count: int, length: int, draw: random.Random) -> list[list[int]]:
    return [draw.choices(range(1, llm.model_config.vocab_size), k=length) for _ in range(count)]


def params(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)


def measure_sharing(rounds: int) -> None:
    """Prints what prompts that share nothing take with the prefix cache and without it, in alternation."""
    engines = {on: LLM(config=EngineConfig(max_model_len=512, prefix_cache=on)) for on in (True, False)}
    for llm in engines.values():
        llm.warm_up()
    draw, ratios = random.Random(0), []
    for number in range(rounds + 1):
        prompts = random_prompts(engines[True], SHARING_REQUESTS, SHARING_LEN, draw)
        seconds = {}
        for on in (True, False) if number % 2 else (False, True):
            began = time.process_time()
            engines[on].generate(prompts, params(SHARING_OUTPUT_LEN), show_progress=False)
            seconds[on] = time.process_time() - began
        ratios.append(seconds[True] / seconds[False])
    ratios = ratios[1:]
    low, high = np.percentile(ratios, (25, 75))
    print(
        f"nothing shared: processor time with the prefix cache / without {median(ratios):.4f} ({low:.3f} to {high:.3f})"
    )


@dataclass
class Load:
    """What came of a batch job that always has requests waiting, with interactive requests or without."""

    num_batch_tokens: int = 0
    ttfts: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)


def run_load(llm: LLM, seconds: float, rate: float, draw: random.Random) -> Load:
    """Runs the job for so long; interactive requests come at random, `rate` a second, and none if 0."""
    load, arrivals = Load(), {}  # the moment of arrival of interactive requests without a token
    llm.on_step = lambda step, taken: load.steps.append(taken)
    ids = set()
    warm = time.perf_counter() + 5.0
    end, upcoming = warm + seconds, warm if rate else float("inf")
    while (now := time.perf_counter()) < end:
        while len(ids) < 2 * max_rows(llm.engine_config):
            (prompt,) = random_prompts(llm, 1, BATCH_LEN, draw)
            length = draw.randint(BATCH_OUTPUT_LEN // 2, BATCH_OUTPUT_LEN)
            ids.add(llm.add(prompt, params(length), priority="batch"))
        while upcoming <= now:
            (prompt,) = random_prompts(llm, 1, INTERACTIVE_LEN, draw)
            arrivals[llm.add(prompt, params(INTERACTIVE_OUTPUT_LEN))] = upcoming
            upcoming += draw.expovariate(rate)
        deltas, now = llm.step(), time.perf_counter()
        for delta in deltas:
            if delta.request_id in arrivals:
                load.ttfts.append(now - arrivals.pop(delta.request_id))
            elif delta.request_id in ids and now >= warm:
                load.num_batch_tokens += len(delta.token_ids)
            if delta.completion is not None:
                ids.discard(delta.request_id)
    with llm.engine() as engine:
        engine.abort_all()
    llm.step()
    return load


def measure_mixed(seconds: float, rate: float, max_mixed_tokens: int) -> None:
    """Prints the TTFT of interactive requests on an idle engine and over a batch job, and what the job loses."""
    llm = LLM(config=EngineConfig(max_model_len=512, max_mixed_tokens=max_mixed_tokens))
    llm.warm_up()
    draw, idle = random.Random(0), []
    for prompt in random_prompts(llm, IDLE_REQUESTS + 1, INTERACTIVE_LEN, draw):
        began = time.perf_counter()
        stream = llm.stream(prompt, params(INTERACTIVE_OUTPUT_LEN))
        next(stream)
        idle.append(time.perf_counter() - began)
        list(stream)
    alone, mixed = run_load(llm, seconds, 0.0, draw), run_load(llm, seconds, rate, draw)
    p99, idle_p99, step = np.percentile(mixed.ttfts, 99), np.percentile(idle[1:], 99), median(mixed.steps)
    print(
        f"interactive TTFT p99: idle {1e3 * idle_p99:.0f} ms, over the batch job {1e3 * p99:.0f} ms"
        f" (p50 {1e3 * median(mixed.ttfts):.0f}) of {len(mixed.ttfts)} requests at {rate} a second;"
        f" 2 x idle + one step of {1e3 * step:.0f} ms is {1e3 * (2 * idle_p99 + step):.0f} ms"
    )
    print(
        f"batch job: {alone.num_batch_tokens / seconds:.0f} tokens/s alone,"
        f" {mixed.num_batch_tokens / seconds:.0f} beside ({mixed.num_batch_tokens / alone.num_batch_tokens:.1%})"
    )


def run_edits(llm: LLM, prompts: list[list[int]], draw: random.Random, seconds: float) -> float:
    """Returns output tokens per second while every row is taken: requests end and others arrive all the time."""
    rows = max_rows(llm.engine_config)
    warm = time.perf_counter() + 2.0
    num_tokens, ids = 0, set()
    while (now := time.perf_counter()) < warm + seconds:
        while len(ids) < rows + 2:
            script = draw.randrange(len(prompts))
            edit = replace(
                params(draw.randint(OUTPUT_LEN // 4, OUTPUT_LEN)), logits_processors={"script": float(script)}
            )
            ids.add(llm.add(prompts[script], edit))
        deltas = llm.step()
        num_tokens += sum(len(delta.token_ids) for delta in deltas) * (now >= warm)
        ids -= {delta.request_id for delta in deltas if delta.completion is not None}
    for request_id in ids:
        llm.abort(request_id)
    llm.step()
    return num_tokens / seconds


def measure_drafts(rounds: int, seconds: float, rows: int, max_mixed_tokens: int) -> None:
    """Prints tokens/s of edited files with arrivals: no drafts, drafts where all rows decode, drafts in all steps."""
    tokenizer = Tokenizer.from_path(BUNDLED_MODEL)
    assert tokenizer is not None
    texts = Texts(tokenizer.encode, read_config(BUNDLED_MODEL).vocab_size)
    config = EngineConfig(max_num_seqs=rows, max_model_len=512, max_mixed_tokens=max_mixed_tokens, prefix_cache=False)
    prompts, scripts = texts.prompts(NUM_EDITS), texts.scripts(NUM_EDITS)
    engines = {
        name: LLM(
            config=config,
            dtype="float32",
            speculation=None if name == "no drafts" else "ngram",
            logits_processors={"script": processor_of(scripts)},
        )
        for name in ("no drafts", "drafts where all decode", "drafts beside prefills")
    }
    figures: dict[str, list[float]] = {name: [] for name in engines}
    for llm in engines.values():
        llm.warm_up()
    for number in range(rounds):
        for name, llm in list(engines.items())[:: 1 if number % 2 else -1]:
            mixing = patch.object(Speculation, "_can_mix", lambda _, others: not any(True for _ in others))
            with mixing if name == "drafts where all decode" else contextlib.nullcontext():
                figures[name].append(run_edits(llm, prompts, random.Random(number), seconds))
    for name, values in figures.items():
        ratio = median(map(truediv, values, figures["no drafts"]))
        print(f"{rows} rows, {name}: {median(values):.0f} tokens/s, {ratio:.2f} of no drafts")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sections = ("sharing", "mixed", "drafts")
    parser.add_argument("--only", type=some_of(*sections), default=sections, help="by comma")
    parser.add_argument(
        "--rounds", type=int, default=12, help="of the job without sharing, and of drafts; medians count"
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="that each load is measured for")
    parser.add_argument("--rate", type=float, default=0.7, help="interactive requests a second")
    parser.add_argument("--max-mixed-tokens", type=int, default=96, help="see EngineConfig")
    arguments = parser.parse_args()
    if "sharing" in arguments.only:
        measure_sharing(arguments.rounds)
    if "mixed" in arguments.only:
        measure_mixed(arguments.seconds, arguments.rate, arguments.max_mixed_tokens)
    if "drafts" in arguments.only:
        for rows in DRAFTING_ROWS:
            measure_drafts(arguments.rounds, arguments.seconds / arguments.rounds, rows, arguments.max_mixed_tokens)


if __name__ == "__main__":
    main()
