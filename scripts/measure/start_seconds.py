"""Processor seconds to compile what a start waits for, and what comes later, on devices that need not be here.

    python scripts/measure/start_seconds.py v6e-1 H200x1 [--models Qwen3-0.6B Llama-3-8B] [--later]

Needs the extra `aot`. The models are those of `jaxinfer.checkpoint.published`, in float16 for a T4 and in bfloat16
for other chips. Their shapes are compiled one after the other, in a process for each chip and model. Prints a line of
JSON for each: its name, the seconds of the clock and of all threads of the processor, and whether the engine waits for
it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
MODELS = ("Qwen3-0.6B", "Llama-3-8B", "Qwen3-30B-A3B")


def measure(chip: str, model: str, *, later: bool) -> None:
    """Compiles the shapes of an engine for a chip in this process, which computes nothing."""
    from jaxinfer.ahead_of_time.described import read_chip, stand_in
    from jaxinfer.checkpoint.published import published_config
    from jaxinfer.config import EngineConfig
    from jaxinfer.engine.execution.step_compiler import StepCompiler
    from jaxinfer.engine.execution.warm_up import plan_target
    from jaxinfer.model.params import abstract_params
    from jaxinfer.parallel.placement import Placement
    from jaxinfer.plan.cache import MemoryQuestion, guess_memory
    from jaxinfer.plan.limits import fit_limits, plan_limit
    from jaxinfer.plan.memory import num_bytes, usable_pages
    from jaxinfer.plan.step_shapes import first_buckets

    stand_in(devices := read_chip(chip))
    config, placement = published_config(model), Placement(None)
    if devices.chip.platform == "gpu":  # as a checkpoint is loaded there
        config = config.regrouped((1,) * config.num_layers)
    dtype = devices.chip.dtype
    params = abstract_params(config, dtype)
    question = MemoryQuestion(
        model=config, config=EngineConfig(), dtype=dtype, param_bytes=num_bytes(params), placement=placement
    )
    question = replace(question, config=fit_limits(question))
    target = plan_target(params, question, {})
    compiler = StepCompiler(target, 0)
    guess = guess_memory(question, target.cache_config, compiler.buckets, plan_limit(question))
    cache = replace(target.cache_config, num_pages=max(usable_pages(guess, guess.num_pages), 1))
    first = first_buckets(compiler.buckets)
    for bucket in (*first, *(bucket for bucket in compiler.buckets if later and bucket not in first)):
        start, used = time.perf_counter(), sum(os.times()[:4])
        compiler.compile(cache, bucket)
        seconds = {"seconds": time.perf_counter() - start, "processor_seconds": sum(os.times()[:4]) - used}
        rounded = {name: round(value, 1) for name, value in seconds.items()}
        line = {"chip": chip, "model": model, "shape": bucket.name, **rounded, "waited_for": bucket in first}
        print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chips", nargs="+", help="a chip with the number of a machine or slice, such as v6e-1")
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--later", action="store_true", help="compile the shapes as well that come behind requests")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return measure(arguments.chips[0], arguments.models[0], later=arguments.later)
    from jaxinfer.ahead_of_time.described import environment_for, read_chip

    for chip in arguments.chips:
        environment = environment_for(read_chip(chip), os.environ)
        for model in arguments.models:
            command = [sys.executable, __file__, chip, "--models", model, "--worker"]
            subprocess.run([*command, *(["--later"] if arguments.later else [])], env=environment, check=False)


if __name__ == "__main__":
    main()
