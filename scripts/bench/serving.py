"""Measures an event loop and a server in front of the engine.

    python scripts/bench/serving.py asyncio --random 125m      # AsyncLLM with 64 streams against LLM.generate
    python scripts/bench/serving.py http --random 125m         # jaxinfer serve at 1, 16 and 64 streams
    python scripts/bench/serving.py http --url http://127.0.0.1:8001/v1 --model NAME    # another server of this API

`asyncio` alternates both and prints the median of the ratio of their seconds. `http` prints the time to the first token
and between two tokens (p50 and p99), and tokens per second.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import numpy as np

from jaxinfer import LLM, AsyncLLM, EngineConfig, SamplingParams
from scripts.bench.against_transformers import BUNDLED_MODEL
from scripts.bench.workload import RANDOM_SHAPES, checkpoint

NUM_STREAMS = (1, 16, 64)
PROMPT_LEN, OUTPUT_LEN = 64, 64
CONFIG: dict[str, Any] = {"max_num_seqs": 64, "max_model_len": 512}
WORDS = ["def", "return", "class", "self", "value", "import", "list", "name", "key", "item", "for", "in", "open"]


def measure_asyncio(path: Path, rounds: int) -> None:
    """Prints the seconds of 64 requests by `LLM.generate` and by 64 streams of `AsyncLLM`, in alternation."""
    config = EngineConfig(**CONFIG, prefix_cache=False)
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_LEN, ignore_eos=True)
    llm = LLM(path, config=config)
    llm.warm_up()
    draw = random.Random(0)
    vocab_size = llm.model_config.vocab_size
    prompts = [draw.choices(range(1, vocab_size), k=PROMPT_LEN) for _ in range(max(NUM_STREAMS))]

    async def measure() -> None:
        async_llm = AsyncLLM(path, config=config)
        await async_llm.warm_up()

        async def read(prompt: list[int]) -> int:
            return sum([len(delta.token_ids) async for delta in async_llm.stream(prompt, params)])

        ratios, seconds = [], {False: [], True: []}
        for number in range(rounds + 1):
            for is_async in (True, False) if number % 2 else (False, True):
                began = time.perf_counter()
                if is_async:
                    assert sum(await asyncio.gather(*map(read, prompts))) == len(prompts) * OUTPUT_LEN
                else:
                    llm.generate(prompts, params, show_progress=False)
                seconds[is_async].append(time.perf_counter() - began)
            ratios.append(seconds[True][-1] / seconds[False][-1])
        low, high = np.percentile(ratios[1:], (25, 75))
        tokens = len(prompts) * OUTPUT_LEN
        print(
            f"{len(prompts)} requests of {PROMPT_LEN} + {OUTPUT_LEN} tokens: LLM"
            f" {tokens / median(seconds[False][1:]):.0f} tokens/s, AsyncLLM {tokens / median(seconds[True][1:]):.0f};"
            f" ratio of seconds {median(ratios[1:]):.3f} ({low:.3f} to {high:.3f})"
        )
        await async_llm.close()

    asyncio.run(measure())
    llm.close()


@dataclass
class Latencies:
    """Seconds of the streams of one load."""

    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    num_tokens: int = 0


async def load(url: str, model: str, num_streams: int, num_requests: int) -> tuple[Latencies, float]:
    """Returns the latencies of requests, of which `num_streams` run at a time, and the seconds of all."""
    draw, found = random.Random(num_streams), Latencies()
    prompts = [" ".join(draw.choices(WORDS, k=PROMPT_LEN // 2)) for _ in range(num_requests)]
    turns = asyncio.Semaphore(num_streams)

    async def ask(http: httpx.AsyncClient, prompt: str) -> None:
        body = {"model": model, "prompt": prompt, "max_tokens": OUTPUT_LEN, "temperature": 0, "stream": True}
        async with turns:
            last = began = time.perf_counter()
            is_first = True
            async with http.stream("POST", f"{url}/completions", json=body) as answer:
                answer.raise_for_status()
                async for line in answer.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    if not json.loads(line.removeprefix("data: "))["choices"]:
                        continue
                    now = time.perf_counter()
                    (found.ttft if is_first else found.itl).append(now - (began if is_first else last))
                    last, is_first = now, False
                    found.num_tokens += 1

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=None, limits=limits) as http:
        began = time.perf_counter()
        await asyncio.gather(*(ask(http, prompt) for prompt in prompts))
        return found, time.perf_counter() - began


def measure_http(url: str, model: str, num_requests: int) -> None:
    """Prints latencies and tokens per second at each number of streams."""
    asyncio.run(load(url, model, 4, 8))  # the first requests touch new memory
    for num_streams in NUM_STREAMS:
        found, seconds = asyncio.run(load(url, model, num_streams, max(num_requests, num_streams)))

        def percentiles(values: list[float]) -> str:
            p50, p99 = np.percentile(values, (50, 99)) * 1e3
            return f"{p50:.1f} / {p99:.1f} ms"

        print(
            f"{num_streams} streams: TTFT {percentiles(found.ttft)}, ITL {percentiles(found.itl)} (p50 / p99),"
            f" {found.num_tokens / seconds:.0f} tokens/s"
        )


@contextlib.contextmanager
def serving(path: Path) -> Iterator[str]:
    """Yields the URL of a server of a checkpoint, in a process of its own, whose steps are all compiled."""
    command = [sys.executable, "-m", "jaxinfer", "serve", "--model", str(path), "--served-name", "model", "--port", "0"]
    command += [word for name, value in CONFIG.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                if found := re.search(r"serves at (\S+/v1)", line):
                    threading.Thread(target=process.stderr.read, daemon=True).start()
                    yield found[1]
                    return
            raise RuntimeError("the server has not started")
        finally:
            process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("asyncio", "http"))
    parser.add_argument("--random", choices=RANDOM_SHAPES, help="a random checkpoint in place of the bundled one")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--url", help="of another server, up to /v1")
    parser.add_argument("--model", default="model", help="its name there")
    arguments = parser.parse_args()
    if arguments.url is not None:
        measure_http(arguments.url, arguments.model, arguments.requests)
        return
    with checkpoint(BUNDLED_MODEL, arguments.random) as path:
        if arguments.what == "asyncio":
            measure_asyncio(path, arguments.rounds)
            return
        with serving(path) as url:
            # Steps that are still being compiled would share the processor with the load.
            time.sleep(30)
            measure_http(url, "model", arguments.requests)


if __name__ == "__main__":
    main()
