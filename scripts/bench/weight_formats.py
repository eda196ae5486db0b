"""Measures products by weights of 8 and 4 bits and in bfloat16, and decode steps with them, against float32's.

Formats take turns within a round, so that all of them meet the same load of the machine. A figure is the least of all
rounds, in ms, and behind it the median over the rounds of its share of float32's time in the same round.

python scripts/bench/weight_formats.py --rounds 7
python scripts/bench/weight_formats.py --only steps --random-shape qwen3-0.6b --layers 4
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer import LLM, EngineConfig
from jaxinfer.device import describe_cpu
from jaxinfer.model.components.layers import TensorSpec, product
from jaxinfer.model.quantized_params import quantize_weight
from scripts.bench.against_transformers import integers
from scripts.bench.engine import measure_decode
from scripts.bench.workload import LOWER, RANDOM_SHAPES, Task, Workload, checkpoint

# Channels and inputs of weights: of layers and of unembeddings, small and large.
WEIGHTS = ((768, 768), (3072, 768), (32_000, 768), (8192, 4096), (14_336, 4096))
ROWS = (1, 8, 64)
FORMATS = ("float32", "int8", "int4", "bfloat16")
CONTEXT = 64  # tokens in the cache of a decoding row: few, as attention is the same in all formats


def take_turns(runs: dict[str, Callable[[int], float]], rounds: int) -> str:
    """Returns the figures of functions (round) -> ms that are called in turn; the first round is not counted."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(rounds + 1):
        for name, run in runs.items():
            times[name].append(run(index))
    least = {name: min(values[1:]) for name, values in times.items()}
    shares = {name: median(map(float.__truediv__, values[1:], times["float32"][1:])) for name, values in times.items()}
    return ", ".join(f"{name} {least[name]:.2f} ({shares[name]:.2f})" for name in runs)


def milliseconds_of(function: Callable[..., jax.Array], *operands: Any) -> float:
    began = time.perf_counter()
    function(*operands).block_until_ready()
    return 1e3 * (time.perf_counter() - began)


def measure_products(rounds: int) -> None:
    multiply = jax.jit(product)
    for channels, inputs in WEIGHTS:
        w = jax.random.normal(jax.random.key(0), (channels, inputs), jnp.float32)
        spec = TensorSpec(w.shape, ("outputs", "inputs"), None, num_inputs=1)
        weights = {
            "float32": w,
            "int8": quantize_weight(w, spec, "int8"),
            "int4": quantize_weight(w, spec, "int4"),
            "bfloat16": w.astype(jnp.bfloat16),
        }
        for rows in ROWS:
            x = jax.random.normal(jax.random.key(1), (rows, inputs), jnp.float32)
            runs = {}
            for name, own in weights.items():
                activations = x.astype(jnp.bfloat16) if name == "bfloat16" else x
                runs[name] = lambda _, own=own, x=activations: milliseconds_of(multiply, x, own)
            print(f"product {channels} x {inputs}, {rows} rows, ms: {take_turns(runs, rounds)}", flush=True)


def measure_steps(model: Path, formats: tuple[str, ...], batches: tuple[int, ...], rounds: int) -> None:
    llms = {}
    for name in formats:
        is_dtype = name in ("float32", "bfloat16")
        config = EngineConfig(max_num_seqs=max(batches), max_model_len=512, quantization=None if is_dtype else name)
        llms[name] = LLM(model, config=config, dtype=name if is_dtype else "float32")
    vocab_size = min(llm.model_config.vocab_size for llm in llms.values())
    sizes = {"batches": batches, "contexts": (CONTEXT,), "sections": ("decode",), "steps": 20, "repeats": 1}
    workload = Workload(vocab_size=vocab_size, threads=0, **sizes)
    tasks = [Task(section="decode", label="decode", better=LOWER, batch=n, context=CONTEXT) for n in batches]

    def measure(llm: LLM, task: Task, index: int) -> float:
        return measure_decode(llm, workload, task, f"round {index} of {task.batch}")

    for task in tasks:
        runs = {name: functools.partial(measure, llm, task) for name, llm in llms.items()}
        print(f"decode step, batch {task.batch}, ms: {take_turns(runs, rounds)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("products", "steps"), help="measure these alone")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=integers, default=(1, 8), help="decoding rows")
    parser.add_argument("--random-shape", choices=RANDOM_SHAPES, default="125m", help="size of the random checkpoint")
    parser.add_argument("--layers", type=int, help="layers of the random checkpoint; those of its shape by default")
    parser.add_argument("--formats", default=",".join(FORMATS), help="formats of the steps' weights, float32 first")
    arguments = parser.parse_args()
    print(f"{describe_cpu()}, jax {jax.__version__}, {time.strftime('%F')}")
    if arguments.only != "steps":
        measure_products(arguments.rounds)
    if arguments.only != "products":
        formats = tuple(arguments.formats.split(","))
        with checkpoint(Path(), arguments.random_shape, arguments.layers) as folder:
            measure_steps(folder, formats, arguments.batches, arguments.rounds)


if __name__ == "__main__":
    main()
