"""The side of jaxinfer in `against_transformers.py`, to be run in a process of its own.

A measurement is a function (llm, workload, task, purpose) -> figure in the unit of the task's label, and
times whole engine steps with their host work.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from statistics import median

from jaxinfer import LLM, EngineConfig, SamplingParams
from jaxinfer.plan.step_shapes import max_batched_tokens, max_mixed_tokens
from scripts.bench.workload import (
    JOB_OUTPUT_RANGE,
    JOB_PROMPT_RANGE,
    PREFILL_BATCH,
    PREFILL_LEN,
    PREFIX_LEN,
    PREFIX_OUTPUT_LEN,
    PREFIX_OWN_LEN,
    PREFIX_REQUESTS,
    TPOT_OUTPUT_LEN,
    TPOT_PROMPT_LEN,
    TTFT_LEN,
    WARM_STEPS,
    Task,
    Workload,
    milliseconds,
)

MAX_NUM_SEQS = 32
MAX_NUM_BATCHED_TOKENS = max_batched_tokens(EngineConfig(max_num_seqs=MAX_NUM_SEQS))
MAX_MIXED_TOKENS = max_mixed_tokens(EngineConfig(max_num_seqs=MAX_NUM_SEQS))
# A bound only: the engine takes what its rows can use. Preemption would be measured as slow decoding.
CACHE_BYTES = 8 << 30


def lead_steps(batch: int, context: int) -> int:
    """Bounds the steps until `batch` prompts are prefilled; rows that already decode use budget as well."""
    return math.ceil(batch * context / (MAX_MIXED_TOKENS - batch)) + batch


def output_len(batch: int, context: int, workload: Workload) -> int:
    return lead_steps(batch, context) + WARM_STEPS + workload.steps


def load(model: Path, workload: Workload) -> LLM:
    """Compiles everything; one engine serves all tasks, as it would in use."""
    lengths = {
        "prefill": [PREFILL_LEN + 1],
        "ttft": [TTFT_LEN + 1],
        "tpot": [TPOT_PROMPT_LEN + TPOT_OUTPUT_LEN],
        "job": [JOB_PROMPT_RANGE[1] + JOB_OUTPUT_RANGE[1]],
        "prefix": [PREFIX_LEN + PREFIX_OWN_LEN + PREFIX_OUTPUT_LEN],
        "decode": [c + output_len(b, c, workload) for b in workload.batches for c in workload.contexts],
    }
    config = EngineConfig(
        max_num_seqs=max(MAX_NUM_SEQS, *workload.batches),
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        max_model_len=max(length for section in workload.sections for length in lengths[section]),
        cache_bytes=CACHE_BYTES,
    )
    llm = LLM(model, config=config, dtype=workload.dtype)
    llm.warm_up()
    return llm


def add(llm: LLM, prompts: list[list[int]], max_tokens: int) -> list[int]:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return [llm.add(prompt, params) for prompt in prompts]


def run_to_end(llm: LLM, prompts: list[list[int]], max_tokens: int) -> list[float]:
    """Returns the times at which a step brought tokens."""
    add(llm, prompts, max_tokens)
    times = []
    while llm.has_unfinished:
        if any(delta.token_ids for delta in llm.step()):
            times.append(time.perf_counter())
    return times


def measure_prefill(llm: LLM, workload: Workload, task: Task, purpose: str) -> float:
    count = workload.repeats + 1
    prompts = [workload.prompts(PREFILL_BATCH, PREFILL_LEN, f"{purpose} {index}") for index in range(count)]
    elapsed = milliseconds(lambda index: run_to_end(llm, prompts[index], 1), workload.repeats)
    return 1e3 * PREFILL_BATCH * PREFILL_LEN / elapsed


def measure_ttft(llm: LLM, workload: Workload, task: Task, purpose: str) -> float:
    prompts = [workload.prompts(1, TTFT_LEN, f"{purpose} {index}") for index in range(workload.repeats + 1)]
    return milliseconds(lambda index: run_to_end(llm, prompts[index], 1), workload.repeats)


def measure_tpot(llm: LLM, workload: Workload, task: Task, purpose: str) -> float:
    results = []
    for index in range(workload.repeats + 1):
        times = run_to_end(llm, workload.prompts(1, TPOT_PROMPT_LEN, f"{purpose} {index}"), TPOT_OUTPUT_LEN)
        results.append(1e3 * (times[-1] - times[0]) / (TPOT_OUTPUT_LEN - 1))
    return median(results[1:])


def measure_decode(llm: LLM, workload: Workload, task: Task, purpose: str) -> float:
    """Times steps that emit a token for each row.

    Rows prefilled first decode while the others are prefilled, so contexts are up to `lead_steps` tokens
    longer than the peer's, to our cost.
    """
    max_tokens = output_len(task.batch, task.context, workload)
    request_ids = add(llm, workload.prompts(task.batch, task.context, purpose), max_tokens)
    started: set[int] = set()
    while len(started) < task.batch:
        started |= {delta.request_id for delta in llm.step() if delta.token_ids}
    times = []
    for _ in range(WARM_STEPS + workload.steps):
        began = time.perf_counter()
        emitted = sum(len(delta.token_ids) for delta in llm.step())
        times.append(1e3 * (time.perf_counter() - began))
        if emitted != task.batch:
            raise RuntimeError(f"a step of {task.batch} decoding rows brought {emitted} tokens")
    for request_id in request_ids:
        llm.abort(request_id)
    llm.step()  # hands out what the aborts left, so that the next task does not meet it
    return median(times[WARM_STEPS:])


def measure_job(llm: LLM, workload: Workload, task: Task, purpose: str) -> float:
    prompts, lengths = zip(*workload.job(purpose), strict=True)
    params = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in lengths]
    began = time.perf_counter()
    completions = llm.generate(list(prompts), params, show_progress=False)
    seconds = time.perf_counter() - began
    if [len(completion.token_ids) for completion in completions] != list(lengths):
        raise RuntimeError("an output has not the length that was asked for")
    return sum(lengths) / seconds


def run_shared_prefix(llm: LLM, workload: Workload, purpose: str, *, salts: list[str]) -> tuple[float, float]:
    """Adds all requests at once; returns their mean TTFT in ms and their output tokens per second."""
    shared = workload.prompts(1, PREFIX_LEN, purpose)[0]
    own = workload.prompts(PREFIX_REQUESTS, PREFIX_OWN_LEN, f"{purpose} own")
    params = SamplingParams(max_tokens=PREFIX_OUTPUT_LEN, temperature=0.0, ignore_eos=True)
    began = time.perf_counter()
    for tokens, salt in zip(own, salts, strict=True):
        llm.add([*shared, *tokens], params, cache_salt=salt)
    completions = []
    while llm.has_unfinished:
        completions += [delta.completion for delta in llm.step() if delta.completion is not None]
    seconds = time.perf_counter() - began
    ttfts = [completion.timings.ttft for completion in completions]
    return 1e3 * sum(ttfts) / len(ttfts), PREFIX_REQUESTS * PREFIX_OUTPUT_LEN / seconds


def measure_prefix(llm: LLM, workload: Workload, task: Task, purpose: str) -> float:
    """A salt of one's own is what keeps a request from finding what others have computed."""
    is_cached = task.section.endswith("cached")
    salts = [purpose if is_cached else f"{purpose} {i}" for i in range(PREFIX_REQUESTS)]
    ttft, rate = run_shared_prefix(llm, workload, purpose, salts=salts)
    return ttft if "ttft" in task.section else rate


MEASURES = {
    **{f"prefix {figure} {cache}": measure_prefix for figure in ("ttft", "rate") for cache in ("cached", "computed")},
    "prefill": measure_prefill,
    "decode": measure_decode,
    "ttft": measure_ttft,
    "tpot": measure_tpot,
    "job": measure_job,
}
