"""Chooses block sizes of the TPU decode kernel and writes them to kernels_pallas/paged_attention/tuned.

    python scripts/tune_kernels.py [--devices v5e v6e] [--by-time]

Without a TPU candidates are ranked by the real compiler (extra `aot`): a turn of the kernel's loop takes as many cycles
as its schedule has bundles or as its block takes to read, whichever is more, averaged over contexts from 256 to 8,192
tokens. With `--by-time` the TPU at hand is measured instead.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib.metadata
import json
import math
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from scripts.compile_matrix import compile_case, compile_for, decode_case, mesh_of
from scripts.compilers import Case, print_figures

# Bytes per second and cycles per second of one chip, and how long its memory takes to answer.
BANDWIDTH = {"v5e": 819e9, "v6e": 1640e9}
CLOCK = {"v5e": 1.5e9, "v6e": 1.75e9}
LATENCY = 2e-6
PAGE_SIZE = 128
CONTEXTS = (256, 512, 1024, 2048, 4096, 8192)
BLOCK_TOKENS = (256, 512, 1024)
# All blocks that are held at once, half of what kernels may use of the vector memory.
MAX_HELD_BYTES = 2**24
MAX_BUFFERS = 12
# Query heads, KV heads and head_dim: Llama 3 8B, it and 70B on one of eight chips, Qwen2.5 7B, Llama 3.2 1B.
SHAPES = ((32, 8, 128), (4, 1, 128), (8, 1, 128), (28, 4, 128), (32, 8, 64))
PAGE_DTYPES = ("bfloat16", "int8", "float8_e4m3fn")


def token_bytes(shape: dict[str, Any]) -> int:
    """Returns the bytes of a token's keys and values in a TPU pool."""
    from kernels_pallas.paged_attention import abstract_pages

    pages = abstract_pages(1, PAGE_SIZE, shape["num_kv_heads"], shape["head_dim"], shape["page_dtype"], "tpu")
    return math.prod(pages.arrays[0].shape) * pages.dtype.itemsize // PAGE_SIZE


def candidates(device: str, shape: dict[str, Any]) -> Iterable[dict[str, int]]:
    """Yields block sizes, each with as many buffers as keep the memory busy while it answers (Little's law)."""
    under_way = LATENCY * BANDWIDTH[device]
    for tokens in BLOCK_TOKENS:
        block_bytes = tokens * token_bytes(shape)
        buffers = min(max(3, 1 + math.ceil(under_way / block_bytes)), MAX_BUFFERS, MAX_HELD_BYTES // block_bytes)
        if buffers >= 3:
            yield {"block_tokens": tokens, "buffers": buffers}


def slowdown(device: str, shape: dict[str, Any], choice: dict[str, int], bundles: int) -> float:
    """Returns how many times as long as reading it takes to attend to a context, the mean over CONTEXTS."""
    cycles_per_byte = CLOCK[device] / BANDWIDTH[device]
    block_bytes = choice["block_tokens"] * token_bytes(shape)
    # Where too little is under way, the memory waits.
    waiting = max(1.0, LATENCY * BANDWIDTH[device] / ((choice["buffers"] - 1) * block_bytes))
    ratios = []
    for context in CONTEXTS:
        least = context * token_bytes(shape) * cycles_per_byte
        turns = math.ceil(context / choice["block_tokens"])
        ratios.append(max(turns * bundles, least * waiting) / least)
    return sum(ratios) / len(ratios)


def make_case(name: str, mesh: Any) -> Case:
    """Returns the decode case that a name, in JSON, describes."""
    from kernels_pallas.paged_attention.block_sizes import Blocks

    shape, choice = json.loads(name)
    shape = dict(shape)
    shape["num_heads"] = shape["num_kv_heads"] * shape.pop("num_groups")
    blocks = Blocks(choice["block_tokens"] // PAGE_SIZE, choice["buffers"])
    return decode_case(mesh, **shape, page_size=PAGE_SIZE, context=max(CONTEXTS), blocks=blocks)


def seconds_of(case: Case, repeats: int = 20) -> float:
    """Returns the seconds that a call takes on the device at hand, with full contexts; the least of several."""
    import jax
    import jax.numpy as jnp

    arguments = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), case.arguments)
    num_rows, width = arguments["block_tables"].shape
    arguments["kv_lens"] = jnp.full_like(arguments["kv_lens"], width * PAGE_SIZE)
    arguments["cu_q_lens"] = jnp.arange(num_rows + 1, dtype=jnp.int32)
    pages, times = arguments.pop("pages"), []
    for _ in range(repeats):
        start = time.perf_counter()
        out, pages = case.function(pages=pages, **arguments)
        jax.block_until_ready(out)
        times.append(time.perf_counter() - start)
    return min(times)


def shapes() -> list[dict[str, Any]]:
    """Returns what there is to tune for, by the fields that an entry of a table has for it."""
    return [
        {"page_dtype": dtype, "num_kv_heads": K, "head_dim": H, "num_groups": N // K}
        for N, K, H in SHAPES
        for dtype in PAGE_DTYPES
    ]


def rate_by_compiler(device: str) -> list[list[dict[str, Any]]]:
    """Returns the candidates for each of `shapes`, rated by their schedules; what they spill is among the bundles."""
    pairs = [(shape, choice) for shape in shapes() for choice in candidates(device, shape)]
    results = compile_for(device, [json.dumps(pair) for pair in pairs], __file__)
    rated = []
    for shape in shapes():
        rated.append([])
        for choice in candidates(device, shape):
            figures = results[json.dumps([shape, choice])]
            if "error" in figures:
                print(device, shape, choice, figures["error"], file=sys.stderr)
            else:
                bundles = bundles_of_turn(shape, choice, figures)
                rating = round(slowdown(device, shape, choice, bundles), 3)
                rated[-1].append({**choice, "bundles": bundles, "spills": figures["spills"], "times_reading": rating})
    return rated


def bundles_of_turn(shape: dict[str, Any], choice: dict[str, int], figures: dict[str, Any]) -> int:
    """Returns the bundles of a turn of the kernel's loop, where the compiler's figures count a loop inside once."""
    from kernels_pallas.paged_attention.tpu_attend import heads_together

    num_groups = shape["num_kv_heads"] // heads_together(shape["num_kv_heads"], choice["block_tokens"])
    return figures["bundles"] + (num_groups - 1) * sum(figures["inner_bundles"])


def rate_by_time() -> list[list[dict[str, Any]]]:
    """Returns the candidates for each of `shapes` with their seconds on the TPU at hand."""
    import jax
    import numpy as np
    from jax.sharding import Mesh

    device, mesh = device_at_hand(), Mesh(np.array(jax.devices()[:1]), ("model",))
    return [
        [
            {**choice, "seconds": seconds_of(make_case(json.dumps([shape, choice]), mesh))}
            for choice in candidates(device, shape)
        ]
        for shape in shapes()
    ]


def device_at_hand() -> str:
    """Returns the name of the TPU at hand; raises RuntimeError where there is none whose speed is known here."""
    from kernels_pallas.paged_attention.block_sizes import chip_at_hand

    device = chip_at_hand()
    if device not in BANDWIDTH:
        raise RuntimeError(f"--by-time needs one of {sorted(BANDWIDTH)} at hand, not {device}; leave it out elsewhere")
    return device


def write_table(device: str, entries: list[dict[str, Any]], ranked_by: str) -> Path:
    """Writes a device's table, with what it was made by."""
    from kernels_pallas.paged_attention.block_sizes import TABLES

    versions = {name: importlib.metadata.version(name) for name in ("jax", "libtpu")}
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    head = {"device": device, "date": date, **versions, "ranked_by": ranked_by, "page_size": PAGE_SIZE}
    lines = ",\n    ".join(json.dumps(entry) for entry in entries)
    path = TABLES / f"tpu_{device}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(head, indent=2)[:-2] + f',\n  "entries": [\n    {lines}\n  ]\n}}\n')
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs="+", choices=BANDWIDTH, default=list(BANDWIDTH))
    parser.add_argument("--by-time", action="store_true", help="measure the TPU at hand")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--cases", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        device, dump = arguments.worker
        compile_named = functools.partial(compile_case, mesh_of(device), Path(dump))
        return print_figures(arguments.cases, lambda name: compile_named(functools.partial(make_case, name)))
    for device in [device_at_hand()] if arguments.by_time else arguments.devices:
        rated = rate_by_time() if arguments.by_time else rate_by_compiler(device)
        rating = "seconds" if arguments.by_time else "times_reading"
        entries = []
        for shape, choices in zip(shapes(), rated, strict=True):
            choices.sort(key=lambda choice: choice[rating])
            print(device, shape, *choices, sep="\n  ", flush=True)
            entries += [{"kernel": "decode", **shape, **choices[0]}] if choices else []
        print(write_table(device, entries, "time" if arguments.by_time else "compiler"))


if __name__ == "__main__":
    main()
