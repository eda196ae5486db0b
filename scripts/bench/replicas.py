"""Measures the prefixes that replicas find, against one engine: requests of few shared beginnings, all at once.

XLA_FLAGS=--xla_force_host_platform_device_count=2 python scripts/bench/replicas.py
"""

from __future__ import annotations

import argparse
import random
import time

from jaxinfer import LLM, EngineConfig, SamplingParams
from jaxinfer.config import Parallelism

PREFIX_LEN, ENDING_LENS, OUTPUT_LEN = 256, (20, 80), 32  # tokens


def prompts_of(num_prefixes: int, num_each: int, *, vocab_size: int, is_mixed: bool) -> list[list[int]]:
    """Returns prompts that begin alike in groups, group by group or mixed."""
    draw = random.Random(0)

    def tokens(count: int) -> list[int]:
        return draw.choices(range(1, vocab_size), k=count)

    prefixes = [tokens(PREFIX_LEN) for _ in range(num_prefixes)]
    prompts = [[*prefix, *tokens(draw.randint(*ENDING_LENS))] for prefix in prefixes for _ in range(num_each)]
    if is_mixed:
        draw.shuffle(prompts)
    return prompts


def measure(num_replicas: int, num_prefixes: int, num_each: int, *, is_mixed: bool) -> str:
    """Returns a line for one load: the part of the prompts' tokens that were found, and the seconds."""
    config = EngineConfig(max_model_len=512, parallelism=Parallelism(replicas=num_replicas))
    with LLM(config=config) as llm:
        llm.warm_up()
        sizes = {"vocab_size": llm.model_config.vocab_size, "is_mixed": is_mixed}
        prompts = prompts_of(num_prefixes, num_each, **sizes)
        params = SamplingParams(max_tokens=OUTPUT_LEN, temperature=0.0, ignore_eos=True)
        began = time.perf_counter()
        llm.generate(prompts, params, show_progress=False)
        seconds, metrics = time.perf_counter() - began, llm.metrics()
    steps = [replica.num_steps for replica in metrics.replicas] or [metrics.num_steps]
    order = "mixed" if is_mixed else "prefix by prefix"
    load = f"{num_prefixes} prefixes of {num_each} requests, {order}, replicas={num_replicas}"
    return f"{load}: found {metrics.prefix_hit_rate:.3f}, {seconds:.1f} s, steps {steps}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--prefixes", type=int, nargs="+", default=[10, 40], help="numbers of shared beginnings")
    parser.add_argument("--requests", type=int, default=200, help="of all prefixes together")
    arguments = parser.parse_args()
    for num_prefixes in arguments.prefixes:
        for is_mixed in (False, True):
            for num_replicas in arguments.replicas:
                num_each = arguments.requests // num_prefixes
                print(measure(num_replicas, num_prefixes, num_each, is_mixed=is_mixed), flush=True)


if __name__ == "__main__":
    main()
