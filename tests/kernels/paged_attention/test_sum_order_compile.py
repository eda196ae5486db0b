"""With an order of sums the programs of all batches have one sequence of floating-point operations."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kernels_pallas.paged_attention.gpu.parts import MAX_PARTIAL_BYTES
from scripts.kernels.compile_gpu import can_compile

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(not can_compile(), reason='no CUDA compiler; pip install "jaxinfer[aot]"'),
]

BATCHES: list[dict[str, Any]] = [
    *({"q_len": 1, "num_tokens": rows, "num_rows": rows} for rows in (1, 8, 256)),
    *({"q_len": None, "num_tokens": tokens, "num_rows": 16} for tokens in (128, 2048)),
]
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window, soft cap, sinks": {"window": 1024, "softcap": 30.0, "has_sinks": True},
    "pages of 128": {"page_size": 128},
    "int8": {"page_dtype": "int8", "page_size": 64},
    "heads of 64": {"head_dim": 64},
    "heads of 256": {"head_dim": 256},
}
CASES = [(device, kind) for device in ("H200", "A100") for kind in KINDS]


@functools.cache
def compiled(device: str, kind: str, **options: Any) -> list[list[dict[str, Any]]]:
    """Returns the kernels of each batch; compiled in a process, which a fatal error of the compiler would end."""
    # The kinds beside the plain one are compiled for a step of decoding and one of prefill.
    batches = BATCHES if kind == "plain" else [BATCHES[1], BATCHES[-1]]
    cases = [json.dumps({**batch, **KINDS[kind], **options}) for batch in batches]
    worker = subprocess.run(
        [sys.executable, "-m", "tests.kernels.paged_attention.ptx_sums", device, *cases],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
    )
    assert worker.returncode == 0, worker.stderr[-2000:]
    return [json.loads(line) for line in worker.stdout.splitlines() if line.startswith("[")]


def attending(batches: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return [kernel for batch in batches for kernel in batch if kernel["name"].startswith("paged_attention")]


@pytest.mark.parametrize(("device", "kind"), CASES)
def test_all_batches_add_up_the_same_numbers_in_the_same_order_and_keep_to_registers(device, kind):
    batches = compiled(device, kind)

    for kernels in batches:
        assert [kernel["name"] for kernel in kernels if kernel["spill_bytes"]] == []
        assert kernels[0]["temporary_bytes"] < MAX_PARTIAL_BYTES + 8e6
    first, *others = attending(batches)
    for kernel in others:
        assert {name: kernel[name] for name in ("products", "sums", "threads")} == {
            name: first[name] for name in ("products", "sums", "threads")
        }
    family = {product.split(".")[0] for product in first["products"]}
    assert family == ({"wgmma"} if device == "H200" else {"mma"})
    # Blocks with and without a mask; with a window all have one.
    if "window" not in KINDS[kind]:
        assert len(set(first["sums"])) == 1
        assert first["fused"] == 0


def test_without_an_order_decode_and_prefill_differ():
    decode, prefill = (attending([batch])[-1] for batch in compiled("H200", "pages of 128", is_ordered=False))

    assert decode["products"] != prefill["products"]
    assert not set(decode["sums"]) & set(prefill["sums"])
