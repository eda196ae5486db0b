"""Peers that run in PyTorch, where they are installed: attention of FlashInfer and the offline job of vLLM.

Their process never starts jax on the device, because jax would take most of its memory.
"""

from __future__ import annotations

import importlib
import importlib.util
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from scripts.kernels.on_device import engine, lines
from scripts.kernels.on_device.device import Record

REPEATS = 10
WORKSPACE_BYTES = 2**27


def records(sizes: lines.Sizes, models: engine.EngineSizes, folder: Path, deadline: float) -> Iterator[Record]:
    """Yields the lines of the installed peers up to a time of `time.time`, or a note that says why there are none."""
    measures = {"flashinfer": flashinfer_records(sizes, deadline), "vllm": vllm_records(models, folder)}
    for name, measure in measures.items():
        record = {"section": "peers", "case": name, "implementation": name}
        if importlib.util.find_spec(name) is None:
            yield record | {"note": "not installed"}
            continue
        try:
            yield from measure
        except Exception as error:  # a peer that cannot run here is no fault of ours
            yield record | {"note": f"not available: {type(error).__name__}: {str(error)[:160]}"}


def flashinfer_records(sizes: lines.Sizes, deadline: float) -> Iterator[Record]:
    for case in lines.attention_cases(sizes):
        if time.time() < deadline:
            line = lines.attention_line(sizes, case)
            record = {"section": line.section, "case": line.case, "implementation": "flashinfer", "timer": "events"}
            yield record | {"seconds": flashinfer_seconds(sizes, case, lines.num_sets_of(sizes, line.work))}


def flashinfer_seconds(sizes: lines.Sizes, case: lines.AttentionCase, num_sets: int) -> float:
    """Returns the mean seconds of a call over pages that no other call of the round reads."""
    import torch

    flashinfer = importlib.import_module("flashinfer")

    N, K, H, S = sizes.num_heads, sizes.num_kv_heads, sizes.head_dim, sizes.page_size
    widths = np.array([-(-kv_len // S) for _, kv_len in case.lens])
    ids = np.random.default_rng(0).permutation(num_sets * widths.sum()).reshape(num_sets, -1)
    on_device: dict[str, Any] = {"device": "cuda", "dtype": torch.int32}
    kv_indptr = torch.tensor(np.concatenate([[0], np.cumsum(widths)]), **on_device)
    q_indptr = torch.tensor(np.cumsum([0, *(new for new, _ in case.lens)]), **on_device)
    last = torch.tensor([(kv_len - 1) % S + 1 for _, kv_len in case.lens], **on_device)
    pages = torch.randn(int(ids.size), 2, S, K, H, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(int(q_indptr[-1]), N, H, device="cuda", dtype=torch.bfloat16)
    calls = []
    for row in ids:
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
        tables = (kv_indptr, torch.tensor(row, **on_device), last, N, K, H, S)
        if case.q_len == 1:
            call = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=N // K >= 4)
            call.plan(*tables, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16)
        else:
            call = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
            call.plan(q_indptr, *tables, causal=True, q_data_type=torch.bfloat16)
        call.run(q, pages)
        calls.append(call)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(REPEATS):
        for call in calls:
            call.run(q, pages)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / (REPEATS * num_sets)


def vllm_records(models: engine.EngineSizes, folder: Path) -> Iterator[Record]:
    """Yields the offline job on the same checkpoint, prompts and lengths, with vLLM's defaults."""
    vllm = importlib.import_module("vllm")

    job, vocab_size = models.jobs["0.6B"], models.models["0.6B"]["vocab_size"]
    llm = vllm.LLM(model=str(folder), dtype="bfloat16")
    draw = random.Random(77)
    prompts = [{"prompt_token_ids": engine.draw_prompt(draw, vocab_size, job.prompt_len)} for _ in range(job[0])]
    params = vllm.SamplingParams(temperature=0.0, max_tokens=job.output_len, ignore_eos=True)
    llm.generate(prompts[:1], params, use_tqdm=False)
    began = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    record = {"section": "0.6B", "case": engine.job_case(job), "implementation": "vllm", "timer": "clock"}
    yield record | {"seconds": seconds, "requests_per_s": job.num_requests / seconds}
