"""The side of transformers in `against_transformers.py`, to be run in a process of its own.

A measurement is a function (model, workload, task, purpose) -> figure in the unit of the task's label.
Prefill, TTFT and decode steps are the bare forward with argmax, without the host work of `generate`; TPOT and
the jobs are its public ways to generate. End tokens are switched off: outputs have the length asked for.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers

from scripts.bench.workload import (
    JOB_OUTPUT_RANGE,
    JOB_PROMPT_RANGE,
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

PAD_TOKEN = 0
# The engine's own limits, so that continuous batching means the same on both sides.
MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 32, 512
PAGE_SIZE = 256  # the default of transformers


def load(folder: Path, workload: Workload) -> Any:
    """Returns the model with scaled-dot-product attention, its end tokens off."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(workload.threads)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, workload.dtype), attn_implementation="sdpa"
    ).eval()
    model.to("cuda" if workload.device == "gpu" else "cpu")
    # An unset end token in a call falls back to these two.
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    generate(model, workload.prompts(2, 16, "warm-up"), 4)
    return model


def forward(model: Any, tokens: torch.Tensor, cache: Any = None) -> tuple[torch.Tensor, Any]:
    """Returns the next tokens i64[B, 1] and the cache after `tokens` i64[B, T]; waits for the tokens."""
    output = model(input_ids=tokens.to(model.device), past_key_values=cache, use_cache=True, logits_to_keep=1)
    return output.logits[:, -1].argmax(-1, keepdim=True).cpu(), output.past_key_values


def generate(model: Any, prompts: list[list[int]], max_tokens: int, streamer: Any = None) -> None:
    """Generates greedily for prompts padded on the left to one length."""
    longest = max(len(prompt) for prompt in prompts)
    padding = [longest - len(prompt) for prompt in prompts]
    tokens = [[PAD_TOKEN] * n + prompt for n, prompt in zip(padding, prompts, strict=True)]
    mask = [[0] * n + [1] * len(prompt) for n, prompt in zip(padding, prompts, strict=True)]
    output = model.generate(
        input_ids=torch.tensor(tokens, device=model.device),
        attention_mask=torch.tensor(mask, device=model.device),
        max_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=PAD_TOKEN,
        streamer=streamer,
    )
    if output.shape[1] != longest + max_tokens:
        raise RuntimeError(f"generate() ended after {output.shape[1] - longest} of {max_tokens} tokens")


@torch.inference_mode()
def measure_prefill(model: Any, workload: Workload, task: Task, purpose: str) -> float:
    tokens = torch.tensor(workload.prompts(PREFILL_BATCH, PREFILL_LEN, purpose))
    return 1e3 * tokens.numel() / milliseconds(lambda _: forward(model, tokens), workload.repeats)


@torch.inference_mode()
def measure_ttft(model: Any, workload: Workload, task: Task, purpose: str) -> float:
    tokens = torch.tensor(workload.prompts(1, TTFT_LEN, purpose))
    return milliseconds(lambda _: forward(model, tokens), workload.repeats)


class TokenTimes:
    """A streamer, in the sense of `generate`, that notes when each token came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


@torch.inference_mode()
def measure_tpot(model: Any, workload: Workload, task: Task, purpose: str) -> float:
    results = []
    for index in range(workload.repeats + 1):
        streamer = TokenTimes()
        generate(model, workload.prompts(1, TPOT_PROMPT_LEN, f"{purpose} {index}"), TPOT_OUTPUT_LEN, streamer)
        _, first, *_, last = streamer.times  # the prompt is the first to be put
        results.append(1e3 * (last - first) / (TPOT_OUTPUT_LEN - 1))
    return median(results[1:])


@torch.inference_mode()
def measure_decode(model: Any, workload: Workload, task: Task, purpose: str) -> float:
    """All rows are prefilled with one prompt: what they hold makes no difference to the time of a dense step."""
    prompts = torch.tensor(workload.prompts(1, task.context, purpose)).repeat(task.batch, 1)
    tokens, cache = forward(model, prompts)
    times = []
    for _ in range(WARM_STEPS + workload.steps):
        began = time.perf_counter()
        tokens, cache = forward(model, tokens, cache)
        times.append(1e3 * (time.perf_counter() - began))
    return median(times[WARM_STEPS:])


@torch.inference_mode()
def measure_job(model: Any, workload: Workload, task: Task, purpose: str) -> float:
    """Batches in arrival order, each run to its longest output; only the wanted tokens count."""
    job = workload.job(purpose)
    began = time.perf_counter()
    for first in range(0, len(job), task.batch):
        batch = job[first : first + task.batch]
        generate(model, [prompt for prompt, _ in batch], max(length for _, length in batch))
    return sum(length for _, length in job) / (time.perf_counter() - began)


def measure_continuous(model: Any, workload: Workload, task: Task, purpose: str) -> float:
    """The clock starts after the manager has warmed up."""
    job = workload.job(purpose)
    pages_per_request = math.ceil((JOB_PROMPT_RANGE[1] + JOB_OUTPUT_RANGE[1]) / PAGE_SIZE)
    limits = transformers.ContinuousBatchingConfig(
        page_size=PAGE_SIZE,
        num_blocks=MAX_NUM_SEQS * pages_per_request,
        max_batch_tokens=MAX_NUM_BATCHED_TOKENS,
        max_requests_per_batch=MAX_NUM_SEQS,
        auto_switch_to_flash=False,
    )
    greedy = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=JOB_OUTPUT_RANGE[1])
    with model.continuous_batching_context_manager(greedy, continuous_batching_config=limits) as manager:
        began = time.perf_counter()
        for prompt, length in job:
            manager.add_request(prompt, max_new_tokens=length)
        emitted = finished = 0
        while finished < len(job):
            result = manager.get_result(timeout=1)
            if result is None and not manager.is_running():
                raise RuntimeError("the generation thread of transformers ended early")
            if result is not None and result.is_finished():
                finished, emitted = finished + 1, emitted + len(result.generated_tokens)
        seconds = time.perf_counter() - began
    if emitted != sum(length for _, length in job):
        raise RuntimeError(f"continuous batching brought {emitted} tokens, not the ones that were asked for")
    return emitted / seconds


MEASURES = {
    "prefill": measure_prefill,
    "decode": measure_decode,
    "ttft": measure_ttft,
    "tpot": measure_tpot,
    "job": measure_job,
    "continuous": measure_continuous,
}
