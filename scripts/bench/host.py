"""Measures the host's work in a step: all that an engine does around the device's part, which is left out.

"same rows": steps in which the same requests decode as in the step before. "new rows": requests come and go all the
time; steps whose requests are not those of the step before.

python scripts/bench/host.py --batches 64,256
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from statistics import median
from types import SimpleNamespace

import numpy as np

from jaxinfer.checkpoint import open_checkpoint
from jaxinfer.config import EngineConfig, SamplingParams
from jaxinfer.engine.assembly import plan_host
from jaxinfer.engine.engine import BUNDLED_MODEL
from jaxinfer.engine.execution.batch_builder import BatchBuilder
from jaxinfer.engine.execution.compiled_steps import choose_bucket
from jaxinfer.engine.execution.pipeline import Device, Pipeline
from jaxinfer.engine.frontend.outputs import DeltaBuffer, OutputRoutes
from jaxinfer.engine.frontend.sample_group import SampleGroup
from jaxinfer.engine.scheduling.step import NO_ROWS, Step
from jaxinfer.plan.cache import MemoryQuestion
from jaxinfer.plan.step_shapes import max_rows, plan_buckets
from jaxinfer.text.tokenizer import Tokenizer
from scripts.bench.against_transformers import integers

PROMPT_LEN, OUTPUT_LEN, MAX_MODEL_LEN = 100, 300, 1024
NUM_COMING = 2000  # requests that come while others run


class NoDevice(Device):
    """Lays steps out as `Runner` does, computes nothing, and has drawn the same token for all."""

    def __init__(self, config: EngineConfig, vocab_size: int) -> None:
        self._buckets = plan_buckets(config)
        self._builder = BatchBuilder(
            page_size=config.page_size, table_width=-(-MAX_MODEL_LEN // config.page_size), vocab_size=vocab_size
        )
        self._before = NO_ROWS
        rows = max_rows(config)
        self._output = SimpleNamespace(
            tokens=np.full(rows, 70, np.int32), log_probs=np.zeros(rows, np.float32), sampling_log_probs=None
        )

    def launch(self, step: Step) -> None:
        self._builder.build(step, choose_bucket(self._buckets, step), self._before)
        self._before = step.chunks.rows

    def read(self, output: None) -> SimpleNamespace:
        return self._output


def measure(batch: int, *, is_changing: bool) -> list[float]:
    """Returns the seconds of each step with the same rows or with new ones, text and deltas included."""
    checkpoint = open_checkpoint(BUNDLED_MODEL)
    model_config = checkpoint.config
    most = max(512, batch)
    # With fewer tokens in mixed steps, requests would start at different steps, and some need a page in every step.
    config = EngineConfig(
        max_num_seqs=batch,
        max_num_batched_tokens=most,
        max_mixed_tokens=most,
        max_model_len=MAX_MODEL_LEN,
        cache_bytes=2**40,
    )
    question = MemoryQuestion(model=model_config, config=config, dtype="float32")
    admission, scheduler = plan_host(checkpoint, question, Tokenizer.from_path(BUNDLED_MODEL))
    buffer = DeltaBuffer()
    pipeline, routes = Pipeline(scheduler, NoDevice(config, model_config.vocab_size)), OutputRoutes()
    draw, ids, seconds = random.Random(0), itertools.count(), []
    num_left, rows = batch + NUM_COMING * is_changing, NO_ROWS
    while num_left or scheduler.num_unfinished:
        while num_left and scheduler.num_unfinished < batch + 1:
            num_left -= 1
            length = draw.randint(1, OUTPUT_LEN) if is_changing else OUTPUT_LEN
            params = SamplingParams(max_tokens=length, ignore_eos=True, seed=num_left)
            prompt = draw.choices(range(1, model_config.vocab_size), k=PROMPT_LEN)
            (request,) = admission.admit(ids, prompt, params)
            routes.open(SampleGroup([request]), buffer.append)
            scheduler.add(request)
        began = time.perf_counter()
        scheduler.expire()
        advance = pipeline.advance()
        assert advance is not None
        routes.deliver(advance.deltas)
        buffer.take()
        if len(advance.step.chunks) == batch and (advance.step.chunks.rows is rows) != is_changing:
            seconds.append(time.perf_counter() - began)
        rows = advance.step.chunks.rows
    return seconds


def empty_loop() -> float:
    """Returns the seconds of ten million turns of an empty loop: how fast Python is on this machine now."""
    began = time.perf_counter()
    for _ in range(10_000_000):
        pass
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=integers, default=(64, 256), help="requests that decode")
    for batch in parser.parse_args().batches:
        for is_changing in (False, True):
            speed, seconds = empty_loop(), measure(batch, is_changing=is_changing)
            figures = f"median {1e6 * median(seconds):.0f} us, p90 {1e6 * np.percentile(seconds, 90):.0f} us"
            rows = "new" if is_changing else "same"
            print(f"batch {batch}, {rows} rows: {figures} of {len(seconds)} steps (empty loop {speed:.2f} s)")


if __name__ == "__main__":
    main()
