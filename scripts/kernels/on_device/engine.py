"""Whole models in the engine: steps, prefill, an offline job and the start, with the time of the device apart."""

from __future__ import annotations

import json
import random
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from jaxinfer import LLM, EngineConfig, SamplingParams
from jaxinfer.checkpoint.published import PUBLISHED
from scripts.bench.workload import RANDOM_SHAPES
from scripts.kernels.on_device.device import Record, describe_device
from scripts.kernels.on_device.lines import Line, Work
from scripts.kernels.on_device.timer import busy_seconds

Shape = Mapping[str, Any]


class Job(NamedTuple):
    """An offline job of equal requests."""

    num_requests: int
    prompt_len: int
    output_len: int


class EngineSizes(NamedTuple):
    """The models of the sections, and what they compute."""

    models: Mapping[str, Shape]  # config.json by name
    decodes: Mapping[str, Sequence[tuple[int, int]]]  # rows and context
    prefills: Mapping[str, Sequence[tuple[int, int]]]  # prompts at once and their tokens
    jobs: Mapping[str, Job]
    max_tokens: int  # of a row that decodes
    window: int  # tokens of each row that are timed
    limits: EngineConfig  # of engines that are not measured with their defaults


FULL = EngineSizes(
    models={"0.6B": RANDOM_SHAPES["qwen3-0.6b"] | {"rms_norm_eps": 1e-6}, "8B": PUBLISHED["Llama-3-8B"]},
    decodes={"0.6B": ((1, 128), (8, 128), (32, 1000)), "8B": ((1, 1024), (32, 1000))},
    prefills={"0.6B": ((1, 512), (1, 2048)), "8B": ((8, 2048),)},
    jobs={"0.6B": Job(500, 512, 128)},
    max_tokens=400,
    window=64,
    limits=EngineConfig(max_num_seqs=32, max_model_len=2304),
)
_TINY_SHAPE: Shape = {
    **{"model_type": "qwen3", "tie_word_embeddings": True, "vocab_size": 300, "rms_norm_eps": 1e-6, "head_dim": 16},
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "max_position_embeddings": 128},
    **{"num_attention_heads": 2, "num_key_value_heads": 1},
}
TINY = EngineSizes(
    models={"0.6B": _TINY_SHAPE, "8B": {**_TINY_SHAPE, "model_type": "llama", "tie_word_embeddings": False}},
    decodes={"0.6B": ((2, 8),), "8B": ((1, 8),)},
    prefills={"0.6B": ((1, 16),), "8B": ((2, 16),)},
    jobs={"0.6B": Job(5, 12, 4)},
    max_tokens=40,
    window=8,
    limits=EngineConfig(max_num_seqs=2, max_model_len=64),
)


def num_weights(shape: Shape) -> tuple[int, int]:
    """Returns the weights that a token multiplies in all layers, and those of the output."""
    D, F, H = shape["hidden_size"], shape["intermediate_size"], head_dim(shape)
    N, K = shape["num_attention_heads"], shape["num_key_value_heads"]
    layer = D * (2 * N + 2 * K) * H + 3 * D * F
    return layer * shape["num_hidden_layers"], shape["vocab_size"] * D


def head_dim(shape: Shape) -> int:
    return shape.get("head_dim", shape["hidden_size"] // shape["num_attention_heads"])


def decode_work(shape: Shape, rows: int, context: int) -> Work:
    """Returns the work of one step in bfloat16: every weight once, and every row's keys and values."""
    weights, width = sum(num_weights(shape)), head_dim(shape) * shape["num_hidden_layers"]
    token_bytes = 4.0 * shape["num_key_value_heads"] * width
    attention = 4.0 * shape["num_attention_heads"] * width * context
    return Work(2.0 * weights + rows * context * token_bytes, rows * (2.0 * weights + attention))


def prefill_work(shape: Shape, prompts: int, length: int) -> Work:
    """Returns the work of whole prompts; only their last tokens reach the output."""
    layers, head = num_weights(shape)
    width = shape["num_attention_heads"] * head_dim(shape) * shape["num_hidden_layers"]
    flops = 2.0 * layers * length + 2.0 * head + 2.0 * width * length * (length + 1)
    return Work(2.0 * (layers + head), prompts * flops)


def job_work(shape: Shape, job: Job, rows: int = 256) -> Work:
    """Returns the work of a job that decodes `rows` requests at once."""
    prompts = prefill_work(shape, job.num_requests, job.prompt_len)
    step = decode_work(shape, rows, job.prompt_len + job.output_len // 2)
    num_steps = job.num_requests * job.output_len / rows
    return Work(prompts.num_bytes + num_steps * step.num_bytes, prompts.flops + num_steps * step.flops)


def engine_lines(sizes: EngineSizes) -> list[Line]:
    """Returns the lines of whole models, by section: "0.6B", "0.6B, single steps" …, "start" and "elsewhere"."""
    lines = []
    for model, shape in sizes.models.items():
        for kind, section in (("loop", model), ("step", f"{model}, single steps")):
            for rows, context in sizes.decodes[model]:
                work = decode_work(shape, rows, context)
                lines.append(Line(section, f"decode {rows} x {context:,}", f"{model}, {kind}", work, {}))
        for prompts, length in sizes.prefills[model]:
            work = prefill_work(shape, prompts, length)
            lines.append(Line(model, f"prefill {prompts} x {length:,}", f"{model}, prefill", work, {}))
        if job := sizes.jobs.get(model):
            lines.append(Line(model, job_case(job), f"{model}, job", job_work(shape, job), {}))
    starts = [("start", "cold", "cold"), ("start", "from disk", "from disk"), ("elsewhere", "start", "from disk")]
    return [*lines, *(Line(section, case, f"start, {kind}", Work(0.0, 0.0), {}) for section, case, kind in starts)]


def job_case(job: Job) -> str:
    return f"job of {job.num_requests} x ({job.prompt_len} + {job.output_len})"


def measure_model(section: str, folder: Path, sizes: EngineSizes) -> Iterator[Record]:
    """Yields the records of a section: defaults with a job, a loop by default with few rows, or single steps."""
    model, _, single = section.partition(", ")
    config = EngineConfig() if model in sizes.jobs else sizes.limits
    if single:
        config = replace(sizes.limits, decode_loop_steps=1)
    with LLM(folder, config=config) as llm:
        llm.warm_up()
        for rows, context in sizes.decodes[model]:
            yield {"section": section, "case": f"decode {rows} x {context:,}"} | decode(llm, rows, context, sizes)
        if single:
            return
        for prompts, length in sizes.prefills[model]:
            yield {"section": section, "case": f"prefill {prompts} x {length:,}"} | prefill(llm, prompts, length)
        if job := sizes.jobs.get(model):
            yield {"section": section, "case": job_case(job)} | offline_job(llm, job)


def draw_prompt(draw: random.Random, vocab_size: int, length: int) -> list[int]:
    return draw.choices(range(1, vocab_size), k=length)


def random_prompts(llm: LLM, count: int, length: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [draw_prompt(draw, llm.model_config.vocab_size, length) for _ in range(count)]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def decode(llm: LLM, rows: int, context: int, sizes: EngineSizes) -> Record:
    """Returns the seconds per token of rows that all decode: by the clock, and of the device alone."""
    prompts = random_prompts(llm, rows, context, seed=rows)
    requests = [llm.add(prompt, greedy(sizes.max_tokens)) for prompt in prompts]
    started: set[int] = set()
    while len(started) < rows:
        started |= {delta.request_id for delta in llm.step() if delta.token_ids}
    run_window(llm, rows * sizes.window // 4)
    began = time.perf_counter()
    emitted = run_window(llm, rows * sizes.window)
    seconds = (time.perf_counter() - began) * rows / emitted
    record: Record = {"seconds": seconds, "timer": "clock"} | device_part(
        lambda: run_window(llm, rows * sizes.window // 2), seconds, rows
    )
    for request in requests:
        llm.abort(request)
    while llm.has_unfinished:
        llm.step()
    return record


def run_window(llm: LLM, num_tokens: int) -> int:
    """Runs steps until they have emitted `num_tokens` tokens; returns their number. Raises if a request ends."""
    emitted = 0
    while emitted < num_tokens:
        deltas = llm.step()
        if any(delta.completion is not None for delta in deltas) or not llm.has_unfinished:
            raise RuntimeError("a request ended while decoding was timed; raise max_tokens of the sizes")
        emitted += sum(len(delta.token_ids) for delta in deltas)
    return emitted


def device_part(run: Callable[[], int], seconds: float, rows: int) -> Record:
    """Returns the device's part of `seconds` and the rest; `run` returns the number of tokens it emitted."""
    emitted = []
    try:
        busy = busy_seconds(lambda: emitted.append(run()))
    except RuntimeError as error:
        return {"note": f"no device time: {error}"}
    device = busy * rows / emitted[0]
    return {"device_seconds": device, "host_seconds": max(seconds - device, 0.0)}


def prefill(llm: LLM, prompts: int, length: int) -> Record:
    """Returns the median seconds from prompts to their first tokens."""
    times = []
    for seed in range(4):
        batch = random_prompts(llm, prompts, length, seed)
        began = time.perf_counter()
        llm.generate(batch, greedy(1), show_progress=False)
        times.append(time.perf_counter() - began)
    seconds = statistics.median(times[1:])
    batch = random_prompts(llm, prompts, length, seed=9)
    device = device_part(lambda: len(llm.generate(batch, greedy(1), show_progress=False)), seconds, prompts)
    return {"seconds": seconds, "timer": "clock", **device}


def offline_job(llm: LLM, job: Job) -> Record:
    prompts = random_prompts(llm, job.num_requests, job.prompt_len, seed=77)
    began = time.perf_counter()
    completions = llm.generate(prompts, greedy(job.output_len), show_progress=False)
    seconds = time.perf_counter() - began
    if any(len(completion.token_ids) != job.output_len for completion in completions):
        raise RuntimeError("an output of the job has another length than it should have")
    return {"seconds": seconds, "timer": "clock", "requests_per_s": job.num_requests / seconds}


def start(folder: Path) -> None:
    """Is the process whose start is timed: prints a line at its first token, and ends when everything is compiled."""
    with LLM(folder) as llm:
        llm.generate([[1, 2, 3]], greedy(1), show_progress=False)
        print(json.dumps({"about": describe_device()}), flush=True)
        llm.warm_up()


def time_start(
    command: Sequence[str], environment: Mapping[str, str], timeout: float, log: Path
) -> tuple[float, Record]:
    """Returns the seconds from the start of a process to the line that it prints, and that line.

    Its stderr goes to `log`. Aborts it after `timeout` seconds, so that it can say where it is. Raises
    subprocess.TimeoutExpired if it has printed nothing until then, and RuntimeError if it fails.
    """
    began = time.perf_counter()
    with (
        log.open("w") as errors,
        subprocess.Popen(command, env=dict(environment), stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        alarm = threading.Timer(timeout, process.send_signal, (signal.SIGABRT,))
        alarm.start()
        assert process.stdout is not None
        line = process.stdout.readline()
        seconds = time.perf_counter() - began
        process.wait()
        alarm.cancel()
    if time.perf_counter() - began >= timeout:
        if not line:
            raise subprocess.TimeoutExpired(command, timeout)
    elif process.returncode:
        raise RuntimeError(f"the process ended with {process.returncode}: {log.read_text()[-400:].strip()}")
    return seconds, json.loads(line)
