"""The Hopper kernel for prefill, interpreted on CPU, against the definition of attention; run by test_hopper_prefill.

The interpreter runs each warpgroup in a thread that waits for others, so it needs several CPU devices: their number is
that of jax's threads.
"""

from __future__ import annotations

import functools
import json
import sys
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.paged_attention.gpu import entry
from scripts.kernels.named_calls import by_name
from tests.kernels.paged_attention.mutants import mutant
from tests.kernels.paged_attention.oracle import check_pages, expected_output, make_call

SINKS = np.array([3.0, -20.0], np.float32)
# Rows of (tokens, context), and what differs from heads of 64 in bfloat16, two on one KV head, pages of 16.
CASES: dict[str, tuple[list[tuple[int, int]], dict[str, Any]]] = {
    "rows that begin anywhere, a single token, padding": (
        [(5, 33), (1, 20), (70, 90)],
        {"table_width": 8, "num_padding": 9},
    ),
    "two tiles of a row, more blocks than stages": ([(150, 700), (0, 0), (7, 30)], {"table_width": 44}),
    "whole blocks to the last token": ([(64, 640)], {"page_size": 64, "table_width": 10, "dtype": jnp.float16}),
    "pages of 32, several KV heads": (
        [(3, 50), (62, 190)],
        {"page_size": 32, "table_width": 6, "num_heads": 4, "num_kv_heads": 2},
    ),
    "pages of 128, heads of 128, soft cap": (
        [(90, 200)],
        {"page_size": 128, "table_width": 2, "head_dim": 128, "softcap": 2.0},
    ),
    "pages of 256, sinks": ([(70, 500)], {"page_size": 256, "table_width": 2, "sinks": SINKS}),
    "a window within pages of 16": ([(150, 700), (7, 300)], {"table_width": 44, "window": 130, "num_padding": 3}),
    "a window over half pages, soft cap, sinks": (
        [(66, 600)],
        {"page_size": 256, "table_width": 3, "window": 200, "softcap": 2.0, "sinks": SINKS},
    ),
}
# Of the first case but one each, the kernel as it should not be.
MUTATIONS = {
    "queries that see what follows them": ("is_visible = key <= ", "is_visible = key - 1 <= "),
    "a window that is a key too wide": ("(key > lax", "(key + 1 > lax"),
    "what lies behind the end is not cleared": ("row + i < num_seen", "row + i < BLOCK"),
    "results of neighbours that are written": ("tile.num_queries - half * HALF, 0, HALF)", "HALF, 0, HALF)"),
    "a block that is replaced while it is read": ("plgpu.barrier_wait(refs.keys_read.at[slot])", "pass"),
}
MUTATED_CASE = {
    "a window that is a key too wide": "a window within pages of 16",
    "a block that is replaced while it is read": "two tiles of a row, more blocks than stages",
}


def error(name: str, kernels: Any = entry) -> float:
    """Returns the largest error of a case's results; inf if one is not finite, where padding is, or if threads race."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks  # there is no public way to ask for races

    lens, changes = CASES[name]
    options = {key: changes[key] for key in ("window", "softcap", "sinks") if key in changes}
    sizes = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 64, "dtype": jnp.bfloat16, "layout": "gpu"}
    call = make_call(lens, **sizes | {key: value for key, value in changes.items() if key not in options})
    if "window" in options:
        call = call.with_freed_pages(options["window"])
    statics = {key: value for key, value in options.items() if key != "sinks"}
    attend = functools.partial(
        by_name(kernels.paged_attention_gpu), scale=0.25, prefill="mosaic", interpret=True, **statics
    )
    arrays = {"sinks": options["sinks"]} if "sinks" in options else {}

    out, pages = jax.jit(attend)(**call.arguments, **arrays)

    actual, expected = np.asarray(out).astype(np.float32), expected_output(call, 0.25, **options)
    check_pages(call, call.arguments["pages"], pages)
    if not np.isfinite(actual).all() or gpu_callbacks.get_races().races_found:
        return np.inf
    is_real = ~np.isnan(expected)
    return float(np.abs(actual[: call.num_tokens] - expected)[is_real].max())


def mutated(line: str, replacement: str) -> ModuleType:
    """Returns the entry with a line of the kernel replaced; the entry imports its kernel when it is called."""
    from kernels_pallas.paged_attention.gpu import hopper_prefill

    sys.modules[hopper_prefill.__name__] = mutant((hopper_prefill,), line, replacement)
    return entry


def error_of_mutation(name: str) -> float:
    """Returns the error of a mutated kernel, inf also if the interpreter refuses it."""
    try:
        return error(MUTATED_CASE.get(name, next(iter(CASES))), mutated(*MUTATIONS[name]))
    except Exception:  # as the interpreter raises it: a barrier that is not waited for, a copy past the end
        return np.inf


if __name__ == "__main__":
    if sys.argv[1:]:
        print(json.dumps({name: error_of_mutation(name) for name in sys.argv[1:]}))
    else:
        print(json.dumps({name: error(name) for name in CASES}))
