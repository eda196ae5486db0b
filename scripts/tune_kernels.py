"""Chooses block sizes of the TPU kernels: tables for decoding, and how far off the rules are for all else.

    python scripts/tune_kernels.py [--devices v5e v6e] [--kernel decode] [--by-time]

Without a TPU candidates are ranked by the real compiler (extra `aot`), see `kernel_ratings.py`; with `--by-time` the
TPU at hand is measured instead. What decodes fastest is written to kernels_pallas/paged_attention/tuned. For prefill
(`--kernel ragged`) the ranking is printed, to hold the rules of `block_sizes.py` against: no table beats them.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib.metadata
import json
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from scripts.compile_matrix import compile_case, compile_for, decode_case, mesh_of, prefill_case
from scripts.compilers import Case, print_figures
from scripts.kernel_ratings import (
    CHIPS,
    CHUNKS,
    CONTEXTS,
    PAGE_SIZE,
    bundles_of_turn,
    rate_decode,
    rate_ragged,
    token_bytes,
)

# Tokens of a block that decoding may fetch, and queries of a tile that prefill may compute together.
BLOCK_TOKENS = (256, 512, 1024)
QUERIES = (32, 64, 128, 256)
# Query heads, KV heads and head_dim: Llama 3 8B, it and 70B on one of eight chips, Qwen2.5 7B, Llama 3.2 1B.
SHAPES = ((32, 8, 128), (4, 1, 128), (8, 1, 128), (28, 4, 128), (32, 8, 64))
# The dtype of pages hardly matters to prefill, which does not wait for them.
PAGE_DTYPES = {"decode": ("bfloat16", "int8", "float8_e4m3fn"), "ragged": ("bfloat16",)}
# What the compiler's figures rate a choice by: how many times as long as reading, or the matrix units' work, it takes.
RATINGS = {"decode": "times_reading", "ragged": "times_computing"}


def shapes(kernel: str = "decode") -> list[dict[str, Any]]:
    """Returns what there is to tune for, by the fields that an entry of a table has for it."""
    return [
        {"kernel": kernel, "page_dtype": dtype, "num_kv_heads": K, "head_dim": H, "num_groups": N // K}
        for N, K, H in SHAPES
        for dtype in PAGE_DTYPES[kernel]
    ]


def candidates(device: str, shape: Mapping[str, Any]) -> Iterable[dict[str, int]]:
    """Yields block sizes, each with as many buffers as keep the memory busy."""
    from kernels_pallas.paged_attention.block_sizes import BLOCK_TOKENS as RULE
    from kernels_pallas.paged_attention.block_sizes import MAX_HELD_BYTES, MAX_TILE_SIZE, buffers_for
    from kernels_pallas.paged_attention.tpu_items import LANES

    for tokens in BLOCK_TOKENS if shape["kernel"] == "decode" else [RULE]:
        block_bytes = tokens * token_bytes(shape)
        choice = {"block_tokens": tokens, "buffers": buffers_for(block_bytes, CHIPS[device].bandwidth)}
        if choice["buffers"] * block_bytes > MAX_HELD_BYTES:
            continue
        if shape["kernel"] == "decode":
            yield choice
            continue
        for queries in QUERIES:
            if queries * shape["num_groups"] * shape["num_kv_heads"] * LANES <= MAX_TILE_SIZE:
                yield choice | {"queries": queries}


def make_case(name: str, mesh: Any) -> Case:
    """Returns the case that a name, in JSON, describes."""
    from kernels_pallas.paged_attention.block_sizes import Blocks, matrix_unit

    shape, choice = json.loads(name)
    sizes = {key: shape[key] for key in ("page_dtype", "num_kv_heads", "head_dim")}
    sizes |= {"num_heads": shape["num_kv_heads"] * shape["num_groups"], "page_size": PAGE_SIZE}
    num_pages = choice["block_tokens"] // PAGE_SIZE
    if shape["kernel"] == "decode":
        blocks = Blocks(num_pages, choice["buffers"])
        return decode_case(mesh, **sizes, context=max(CONTEXTS), blocks=blocks)
    blocks = Blocks(num_pages, choice["buffers"], choice["queries"], matrix_unit())
    # With a limit on rows' tokens there is no second kernel for single ones.
    return prefill_case(mesh, **sizes, q_len=max(CHUNKS), blocks=blocks)


def seconds_of(case: Case, repeats: int = 20) -> float:
    """Returns the seconds that a call takes on the device at hand, with full contexts; the least of several."""
    import jax
    import jax.numpy as jnp

    arguments = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), case.arguments)
    num_rows, width = arguments["block_tables"].shape
    each = arguments["q"].shape[0] // num_rows
    arguments["kv_lens"] = jnp.full_like(arguments["kv_lens"], width * PAGE_SIZE)
    arguments["cu_q_lens"] = jnp.arange(num_rows + 1, dtype=jnp.int32) * each
    pages, times = arguments.pop("pages"), []
    for _ in range(repeats):
        start = time.perf_counter()
        out, pages = case.function(pages=pages, **arguments)
        jax.block_until_ready(out)
        times.append(time.perf_counter() - start)
    return min(times)


def rate_by_compiler(device: str, kernel: str) -> list[list[dict[str, Any]]]:
    """Returns the candidates for each of `shapes`, rated by their schedules; what they spill is among the bundles."""
    pairs = [(shape, choice) for shape in shapes(kernel) for choice in candidates(device, shape)]
    results = compile_for(device, [json.dumps(pair) for pair in pairs], __file__)
    rated = []
    for shape in shapes(kernel):
        rated.append([])
        for choice in candidates(device, shape):
            figures = results[json.dumps([shape, choice])]
            if "error" in figures:
                print(device, shape, choice, figures["error"], file=sys.stderr)
            else:
                rated[-1].append({**choice, **rating_of(device, shape, choice, figures)})
    return rated


def rating_of(device: str, shape: dict[str, Any], choice: dict[str, int], figures: dict[str, Any]) -> dict[str, Any]:
    """Returns the rating of a choice by the compiler's figures, with what it comes from."""
    if shape["kernel"] == "decode":
        bundles = bundles_of_turn(shape, choice, figures)
        rating = round(rate_decode(device, shape, choice, bundles), 3)
        return {"bundles": bundles, "spills": figures["spills"], "times_reading": rating}
    rating = round(rate_ragged(device, shape, choice, figures, figures["piece_rows"]), 3)
    return {name: figures[name] for name in ("bundles", "inner_bundles", "spills")} | {"times_computing": rating}


def rate_by_time(kernel: str) -> list[list[dict[str, Any]]]:
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
        for shape in shapes(kernel)
    ]


def device_at_hand() -> str:
    """Returns the name of the TPU at hand; raises RuntimeError where there is none whose speed is known here."""
    from kernels_pallas.paged_attention.block_sizes import chip_at_hand

    chip = chip_at_hand()
    device = "tpu7x" if chip == "7x" else chip
    if device is None or device not in CHIPS:
        raise RuntimeError(f"--by-time needs one of {sorted(CHIPS)} at hand, not {device}; leave it out elsewhere")
    return device


def write_table(device: str, entries: list[dict[str, Any]], ranked_by: str) -> Path:
    """Writes a device's table, with what it was made by."""
    from kernels_pallas.paged_attention.block_sizes import TABLES

    versions = {name: importlib.metadata.version(name) for name in ("jax", "libtpu")}
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    chip = device.removeprefix("tpu")
    head = {"device": chip, "date": date, **versions, "ranked_by": ranked_by, "page_size": PAGE_SIZE}
    lines = ",\n    ".join(json.dumps(entry) for entry in entries)
    path = TABLES / f"tpu_{chip}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(head, indent=2)[:-2] + f',\n  "entries": [\n    {lines}\n  ]\n}}\n')
    return path


def compile_named(mesh: Any, dump: Path, name: str) -> dict[str, Any]:
    """Returns what a candidate needs, and how many rows of queries make a piece."""
    import jax

    from kernels_pallas.paged_attention.block_sizes import matrix_unit

    figures = compile_case(mesh, dump, functools.partial(make_case, name))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return figures | {"piece_rows": matrix_unit()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs="+", choices=CHIPS, default=list(CHIPS))
    parser.add_argument("--kernel", choices=PAGE_DTYPES, default="decode", help="ragged is prefill")
    parser.add_argument("--by-time", action="store_true", help="measure the TPU at hand")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--cases", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        device, dump = arguments.worker
        return print_figures(arguments.cases, functools.partial(compile_named, mesh_of(device), Path(dump)))
    kernel, rating = arguments.kernel, "seconds" if arguments.by_time else RATINGS[arguments.kernel]
    for device in [device_at_hand()] if arguments.by_time else arguments.devices:
        rated = rate_by_time(kernel) if arguments.by_time else rate_by_compiler(device, kernel)
        entries = []
        for shape, choices in zip(shapes(kernel), rated, strict=True):
            choices.sort(key=lambda choice: choice[rating])
            print(device, shape, *choices, sep="\n  ", flush=True)
            entries += [{**shape, **choices[0]}] if choices else []
        if kernel == "decode":
            print(write_table(device, entries, "time" if arguments.by_time else "compiler"))


if __name__ == "__main__":
    main()
