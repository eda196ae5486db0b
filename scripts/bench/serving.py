"""Measures an event loop and a server in front of the engine.

    python scripts/bench/serving.py asyncio --random 125m      # AsyncLLM with 64 streams against LLM.generate
    python scripts/bench/serving.py http                       # jaxinfer serve at 1, 16 and 64 streams
    python scripts/bench/serving.py http --llama-server PATH --llama-cpp-python PYTHON    # beside those of llama.cpp

`asyncio` alternates both and prints the median of the ratio of their seconds. `http` lets the servers take turns. It
prints p50 and p99 over all rounds of the time to the first token, and of that between two events of a stream. Tokens
per second are medians of the rounds. PYTHON has the package llama-cpp-python[server].
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np

from jaxinfer import LLM, AsyncLLM, SamplingParams
from scripts.bench.against_transformers import BUNDLED_MODEL
from scripts.bench.http_load import Ask, Load, percentiles, prompt_of
from scripts.bench.servers import CONFIG, Server, jaxinfer_server, llama_cpp_servers
from scripts.bench.workload import RANDOM_SHAPES, checkpoint

NUM_STREAMS = (1, 16, 64)
PROMPT_LEN, OUTPUT_LEN = 64, 64


def measure_asyncio(path: Path, rounds: int) -> None:
    """Prints the seconds of 64 requests by `LLM.generate` and by 64 streams of `AsyncLLM`, in alternation."""
    config = replace(CONFIG, prefix_cache=False)
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


def measure_http(servers: list[Server], rounds: int, num_requests: int) -> None:
    """Prints a row per number of streams and server, and how many answers of the servers agree."""
    loads = {(num_streams, server.name): Load() for num_streams in NUM_STREAMS for server in servers}
    agreed: dict[str, list[bool]] = {server.name: [] for server in servers[1:]}
    for server in servers:
        Load().run(server, make_asks("warm", 8), 4)  # the first requests touch new memory
    for number in range(rounds):
        for num_streams in NUM_STREAMS:
            asks = make_asks(f"{number} {num_streams}", num_requests if num_streams > 1 else num_requests // 8)
            for server in servers[:: 1 if number % 2 else -1]:
                loads[num_streams, server.name].run(server, asks, num_streams)
            ours = loads[num_streams, servers[0].name].answers
            for name, equal in agreed.items():
                theirs = loads[num_streams, name].answers
                equal += [theirs[prompt] == text for prompt, text in ours.items()]
    print("| streams | server | TTFT p50 / p99, ms | ITL p50 / p99, ms | tokens/s | cores of the client |")
    print("|--:|---|--:|--:|--:|--:|")
    for (num_streams, name), load in loads.items():
        print(
            f"| {num_streams} | {name} | {percentiles(load.ttft)} | {percentiles(load.itl)}"
            f" | {median(load.tokens_per_second):.0f} | {median(load.client_cores):.2f} |"
        )
    for name, equal in agreed.items():
        print(f"{name} gives the answer of {servers[0].name} to {sum(equal)} of {len(equal)} prompts")


def make_asks(seed: str, count: int) -> list[Ask]:
    """Returns requests of equal lengths; a new seed gives new prompts, so that no prefix cache answers."""
    draw = random.Random(seed)
    return [Ask(prompt=prompt_of(draw, PROMPT_LEN), num_tokens=OUTPUT_LEN) for _ in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("asyncio", "http"))
    parser.add_argument("--random", choices=RANDOM_SHAPES, help="for asyncio, a checkpoint in place of the bundled one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=128, help="of a load, and an eighth of them for one stream")
    parser.add_argument("--llama-server", metavar="PATH", help="the server of llama.cpp")
    parser.add_argument("--llama-cpp-python", metavar="PYTHON", help="a Python that has llama_cpp.server")
    arguments = parser.parse_args()
    if arguments.what == "asyncio":
        with checkpoint(BUNDLED_MODEL, arguments.random) as path:
            measure_asyncio(path, arguments.rounds)
        return
    peers = llama_cpp_servers(BUNDLED_MODEL, arguments.llama_server, arguments.llama_cpp_python)
    with jaxinfer_server(BUNDLED_MODEL) as ours, peers as theirs:
        measure_http([ours, *theirs], arguments.rounds, arguments.requests)


if __name__ == "__main__":
    main()
