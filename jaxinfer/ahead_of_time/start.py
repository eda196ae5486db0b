"""Compiles all steps of an engine's start into a folder or bucket, from the shapes of its weights alone."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import jax

from jaxinfer.ahead_of_time.described import environment_for, read_chip, stand_in
from jaxinfer.config import EngineConfig
from jaxinfer.device import COMPILATION_CACHE, compilation_cache, enable_compilation_cache, resolve_dtype
from jaxinfer.engine.device_choice import chosen_parallelism, memory_question
from jaxinfer.engine.engine import BUNDLED_MODEL, open_checkpoint
from jaxinfer.engine.execution.engine_model import EngineModel
from jaxinfer.engine.execution.executable_files import Bucket, cache_place
from jaxinfer.engine.execution.runner import compile_insertion
from jaxinfer.engine.execution.warm_up import Ready, WarmUp, plan_target
from jaxinfer.parallel.placement import Placement
from jaxinfer.plan.limits import fit_limits, plan_limit

WORKER = "from jaxinfer.ahead_of_time import start; start.main()"


@dataclass(frozen=True, kw_only=True)
class Start:
    """An engine's start whose steps are compiled: the arguments of `LLM`, and the folder or URL of the steps."""

    model: str | Path | None
    config: EngineConfig
    dtype: str | None
    place: str
    show_progress: bool


@dataclass(frozen=True, kw_only=True)
class CompiledStart:
    """The steps of a start that are compiled, or were there already."""

    num_executables: int
    seconds: float  # spent on them, summed over all threads
    num_pages: int
    device_kind: str
    num_devices: int

    def __str__(self) -> str:
        devices = f"{self.num_devices} x {self.device_kind}" if self.num_devices > 1 else self.device_kind
        return (
            f"{self.num_executables} executables for {devices} and {self.num_pages} pages ready in {self.seconds:.1f} s"
        )


def compile_start(start: Start) -> CompiledStart:
    """Compiles the steps of a start for the devices of this process, and writes those that are not there yet.

    Raises ValueError for what a start refuses, and OSError if the place cannot be written.
    """
    _use(start.place)
    dtype = resolve_dtype(start.dtype)
    models = list(_models(start, dtype))
    warm_ups = []
    for model in models:
        limit = plan_limit(model.question())
        warm_ups.append(WarmUp(model, None, limit_bytes=limit, show_progress=start.show_progress))
        warm_ups[-1].steps.wait(show_progress=start.show_progress)
        compile_insertion(model)
    place = cache_place()
    if isinstance(place, Bucket) and place.failure is not None:
        raise OSError(f"{place} cannot be written ({place.failure}); correct the URL or the credentials")
    ready = Ready.of_all([warm_up.ready() for warm_up in warm_ups])
    return CompiledStart(
        num_executables=ready.num_executables,
        seconds=ready.seconds,
        num_pages=ready.memory.num_pages,
        device_kind=jax.devices()[0].device_kind,
        num_devices=sum(model.placement.num_devices for model in models),
    )


def _models(start: Start, dtype: str) -> Iterator[EngineModel]:
    """Yields the model of each replica with the limits of its start, whose weights are shapes."""
    checkpoint = open_checkpoint(BUNDLED_MODEL if start.model is None else start.model)
    parallelism = chosen_parallelism(checkpoint, start.config, dtype, None, speculates=False)
    config = replace(start.config, parallelism=parallelism)
    placements = Placement.of_replicas(checkpoint.config, config.parallelism)
    for placement in placements:
        placement.require_one_process("compiling ahead of time")
    question, params = memory_question(checkpoint, config, dtype, placements[0])
    question = replace(question, config=fit_limits(question))
    checkpoint.plan(question.model)  # raises for weights that a start would refuse
    for placement in placements:
        yield plan_target(placement.params(question.model, params), replace(question, placement=placement), {})


def _use(place: str) -> None:
    """Makes a folder or URL that of the compiled steps of this process; raises OSError if it cannot be used."""
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", place)
    enable_compilation_cache()
    if cache_place() is None:  # a warning has said why
        raise OSError(f"{compilation_cache() or COMPILATION_CACHE} cannot be used for compiled steps; give another")


def compile_start_for(start: Start, chip: str) -> CompiledStart:
    """Does what `compile_start` does for devices that need not be here, such as "v6e-4", in a process of its own.

    Raises ValueError for devices that the installed compilers do not know, and RuntimeError if a compiler fails.
    """
    devices = read_chip(chip)
    worker = subprocess.run(
        [sys.executable, "-c", WORKER],
        env=environment_for(devices, os.environ),
        input=pickle.dumps((start, devices)),
        stdout=subprocess.PIPE,
        check=False,
    )
    if worker.returncode:
        raise RuntimeError(f"the compiler failed with {worker.returncode}")
    answer = json.loads(worker.stdout.splitlines()[-1])
    if (refusal := answer.get("refusal")) is not None:
        raise ValueError(refusal)
    return CompiledStart(**answer)


def main() -> None:
    """Compiles the start in the standard input for the devices there, and prints the result as JSON."""
    start, devices = pickle.load(sys.stdin.buffer)
    try:
        stand_in(devices)
        answer = asdict(compile_start(start))
    except (ValueError, OSError, NotImplementedError) as error:  # a user's mistake
        answer = {"refusal": str(error)}
    print(json.dumps(answer), flush=True)
