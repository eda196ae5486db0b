"""The side of llama.cpp in `against_transformers.py`, to be run in a process of its own.

It needs the packages llama-cpp-python and gguf, and a checkpoint of Llama. Weights and cache are float32. As for
transformers, a figure times the bare forward with argmax, without the host work of a server.
"""

from __future__ import annotations

import importlib
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from scripts.bench.llama_gguf import write_gguf
from scripts.bench.workload import (
    PREFILL_BATCH,
    PREFILL_LEN,
    TPOT_OUTPUT_LEN,
    TPOT_PROMPT_LEN,
    TTFT_LEN,
    WARM_STEPS,
    Task,
    Workload,
    milliseconds,
)

llama_cpp: Any = importlib.import_module("llama_cpp")

F32 = 0  # ggml's name of the type


@dataclass
class Model:
    """A loaded model, and one batch that all calls fill."""

    context: Any
    batch: Any
    vocab_size: int
    handle: Any  # keeps the weights alive

    def clear(self) -> None:
        """Forgets all sequences."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), False)

    def forward(self, tokens: list[list[int]], begin: int) -> list[int]:
        """Returns the next token of each sequence that gets `tokens`, which begin at the same position in each."""
        batch, count, last = self.batch, 0, []
        for sequence, row in enumerate(tokens):
            for offset, token in enumerate(row):
                batch.token[count], batch.pos[count] = token, begin + offset
                batch.n_seq_id[count], batch.seq_id[count][0] = 1, sequence
                batch.logits[count] = offset == len(row) - 1
                count += 1
            last += [count - 1] if row else []
        batch.n_tokens = count
        if code := llama_cpp.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode ended with {code}")
        rows = (llama_cpp.llama_get_logits_ith(self.context, index) for index in last)
        return [int(np.ctypeslib.as_array(row, (self.vocab_size,)).argmax()) for row in rows]


def load(folder: Path, workload: Workload) -> Model:
    """Returns the model with a float32 cache for the largest batch and context."""
    if workload.device != "cpu":
        raise ValueError("llama.cpp is measured on the CPU; leave it out of --sides")
    llama_cpp.llama_backend_init()
    with tempfile.TemporaryDirectory(prefix="gguf-") as scratch:
        path = Path(scratch) / "model.gguf"
        write_gguf(folder, path)
        options = llama_cpp.llama_model_default_params()
        options.use_mmap = False
        handle = llama_cpp.llama_model_load_from_file(str(path).encode(), options)
    if handle is None:
        raise RuntimeError("llama.cpp could not load the checkpoint; its reason is above")
    num_rows = max(PREFILL_BATCH, *workload.batches)
    lengths = (PREFILL_LEN, TTFT_LEN, TPOT_PROMPT_LEN + TPOT_OUTPUT_LEN, *workload.contexts)
    num_tokens = max(PREFILL_BATCH * PREFILL_LEN, *lengths)
    limits = llama_cpp.llama_context_default_params()
    limits.n_seq_max = num_rows
    limits.n_ctx = num_rows * (max(lengths) + WARM_STEPS + workload.steps)
    limits.n_batch = num_tokens
    limits.n_threads = limits.n_threads_batch = workload.threads
    limits.type_k = limits.type_v = F32
    context = llama_cpp.llama_init_from_model(handle, limits)
    if context is None:
        raise RuntimeError("llama.cpp could not allocate its cache; its reason is above")
    return Model(context, llama_cpp.llama_batch_init(num_tokens, 0, 1), workload.vocab_size, handle)


def measure_prefill(model: Model, workload: Workload, task: Task, purpose: str) -> float:
    prompts = workload.prompts(PREFILL_BATCH, PREFILL_LEN, purpose)
    return 1e3 * PREFILL_BATCH * PREFILL_LEN / milliseconds(lambda _: prefill(model, prompts), workload.repeats)


def measure_ttft(model: Model, workload: Workload, task: Task, purpose: str) -> float:
    prompts = workload.prompts(1, TTFT_LEN, purpose)
    return milliseconds(lambda _: prefill(model, prompts), workload.repeats)


def prefill(model: Model, prompts: list[list[int]]) -> list[int]:
    model.clear()
    return model.forward(prompts, 0)


def measure_tpot(model: Model, workload: Workload, task: Task, purpose: str) -> float:
    results = []
    for index in range(workload.repeats + 1):
        tokens = prefill(model, workload.prompts(1, TPOT_PROMPT_LEN, f"{purpose} {index}"))
        times = step_times(model, tokens, TPOT_PROMPT_LEN, TPOT_OUTPUT_LEN - 1)
        results.append(sum(times) / len(times))
    return median(results[1:])


def measure_decode(model: Model, workload: Workload, task: Task, purpose: str) -> float:
    """All rows hold the same prompt, each in a cache of its own; they are prefilled one after another."""
    model.clear()
    (prompt,) = workload.prompts(1, task.context, purpose)
    tokens: list[int] = []
    for row in range(task.batch):
        nothing: list[list[int]] = [[]] * row
        tokens += model.forward([*nothing, prompt], 0)
    return median(step_times(model, tokens, task.context, WARM_STEPS + workload.steps)[WARM_STEPS:])


def step_times(model: Model, tokens: list[int], begin: int, count: int) -> list[float]:
    """Returns the milliseconds of `count` decode steps after `begin` tokens of each sequence."""
    times = []
    for position in range(begin, begin + count):
        began = time.perf_counter()
        tokens = model.forward([[token] for token in tokens], position)
        times.append(1e3 * (time.perf_counter() - began))
    return times


MEASURES = {"prefill": measure_prefill, "decode": measure_decode, "ttft": measure_ttft, "tpot": measure_tpot}
