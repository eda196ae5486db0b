"""Chooses block sizes of the kernels: tables for decoding, and how far off the rules are for all else.

    python scripts/kernels/tune.py [--devices v5e v6e] [--kernel decode] [--by-time]

Candidates for TPUs are ranked by the real compiler (extra `aot`), see `ratings.py`; with `--by-time` the TPU or
GPU at hand is measured instead. (Of a GPU's candidates the compiler can say no more than which keep to registers.) What
decodes fastest is written to kernels_pallas/paged_attention/tuned. For prefill (`--kernel ragged`) on TPU the ranking
is printed, to hold the rules of `block_sizes.py` against: no table beats them. On a GPU, with `--by-time`, it compares
Triton's kernel with Mosaic's where that can run, and writes the faster one to the same table. `--kernel product` ranks
the tiles of dense products there.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib.metadata
import json
import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scripts.kernels.compile_matrix import compile_for, mesh_of
from scripts.kernels.compilers import Case, print_figures
from scripts.kernels.figures import compile_on_tpu
from scripts.kernels.ratings import CHIPS, PAGE_SIZE, bundles_of_turn, rate_decode, rate_ragged
from scripts.kernels.tuning_candidates import PAGE_DTYPES, candidates, make_case, shapes

# What the compiler's figures rate a choice by: how many times as long as reading, or the matrix units' work, it takes.
RATINGS = {"decode": "times_reading", "ragged": "times_computing"}

LARGEST_CACHE = 2**27  # bytes; weights that are read in turn exceed the caches of any GPU
TOLERANCE = 0.03  # of results that differ by the rounding of weights to 8 bits


def full_arguments(case: Case) -> dict[str, Any]:
    """Returns arrays for a case: full contexts in shuffled pages, of which each belongs to one row.

    As in use, then, nothing is read twice, and caches are of no more help than in use.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    from kernels_pallas.paged_attention import abstract_pages

    (num_rows, width), num_tokens = case.arguments["block_tables"].shape, case.arguments["q"].shape[0]
    pool = case.arguments["pages"]
    sizes = pool.page_size, pool.num_kv_heads, pool.head_dim, pool.dtype, pool.layout
    shapes = {**case.arguments, "pages": abstract_pages(num_rows * width, *sizes)}
    tables = np.random.default_rng(0).permutation(num_rows * width).reshape(num_rows, width)
    return {
        **jax.tree.map(lambda a: jnp.ones(a.shape, a.dtype), shapes),
        "page_offset": jnp.zeros((), jnp.int32),
        "block_tables": jnp.asarray(tables, jnp.int32),
        "kv_lens": jnp.full(num_rows, width * pool.page_size, jnp.int32),
        "cu_q_lens": jnp.arange(num_rows + 1, dtype=jnp.int32) * (num_tokens // num_rows),
    }


def seconds_of(case: Case) -> float:
    """Returns the device's seconds for a call with full contexts, whose keys and values are in the pages already."""
    from scripts.kernels.on_device.timer import device_seconds

    arguments = {**full_arguments(case), "k": None, "v": None}
    return device_seconds(lambda arguments: case.function(**arguments)[0], [(arguments,)]).seconds


def seconds_of_product(shape: dict[str, Any], choice: dict[str, Any]) -> float:
    """Returns the device's seconds for a dense product in a tile, whose weights are read from memory.

    Raises AssertionError if it is wrong: it multiplies ones, so each part is the number of inputs.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    from kernels_pallas.gpu_products.product import multiply
    from kernels_pallas.gpu_products.tiles import ProductTile
    from scripts.kernels.on_device.timer import device_seconds

    parts, inputs = shape["parts"], shape["inputs"]
    sizes, tile = (parts, shape["channels"], inputs), ProductTile(**{"block_rows": shape["block_rows"], **choice})
    combine = None if parts == 1 else jnp.add

    def product(rows: Any, weights: Any) -> Any:
        return multiply(rows, weights, combine=combine, tile=tile, interpret=jax.default_backend() == "cpu")

    rows = jnp.ones((shape["rows"], inputs), jnp.bfloat16)
    sets = [(rows, jnp.ones(sizes, jnp.bfloat16)) for _ in range(LARGEST_CACHE // (2 * math.prod(sizes)) + 1)]
    np.testing.assert_array_equal(jax.jit(product)(*sets[0]), parts * inputs)
    return device_seconds(product, sets).seconds


def result_of(case: Case) -> Any:
    """Returns the attention of random queries to random pages, f32[T, N, H], computed on the device at hand."""
    import jax
    import jax.numpy as jnp

    def random(a: Any) -> Any:
        key = jax.random.key(a.size)
        return jax.random.normal(key, a.shape, a.dtype) if jnp.issubdtype(a.dtype, jnp.floating) else a

    return case.function(**jax.tree.map(random, full_arguments(case)))[0].astype(jnp.float32)


def rate_by_compiler(device: str, kernel: str) -> list[list[dict[str, Any]]]:
    """Returns the candidates for each of `shapes`, rated by their schedules; what they spill is among the bundles."""
    names = [json.dumps([device, s, choice]) for s in shapes(kernel) for choice in candidates(device, s)]
    results = compile_for(device, names, __file__)
    rated = []
    for shape in shapes(kernel):
        rated.append([])
        for choice in candidates(device, shape):
            figures = results[json.dumps([device, shape, choice])]
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


def rate_by_time(device: str, kernel: str) -> list[list[dict[str, Any]]]:
    """Returns the candidates for each of `shapes` with their seconds on the device at hand, which has that name."""
    import jax
    import numpy as np
    from jax.sharding import Mesh

    mesh, rated = Mesh(np.array(jax.devices()[:1]), ("model",)), []
    for shape in shapes(kernel):
        rated.append([])
        expected = None
        for choice in candidates(device, shape):
            try:
                if kernel == "product":
                    rated[-1].append({**choice, "seconds": seconds_of_product(shape, choice)})
                    continue
                case = make_case(json.dumps([device, shape, choice]), mesh)
                if "prefill" in choice:  # kernels of their own; the first of them has been held against NumPy
                    result = np.asarray(result_of(case))
                    expected = result if expected is None else expected
                    np.testing.assert_allclose(result, expected, rtol=TOLERANCE, atol=TOLERANCE)
                seconds = seconds_of(case)
            except Exception as error:  # no room for it, nothing that the device computes, or a wrong result
                print(device, shape, choice, f"{type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
            else:
                rated[-1].append({**choice, "seconds": seconds})
    return rated


def device_at_hand(kernel: str) -> str:
    """Returns the name of the TPU or GPU at hand; raises RuntimeError where there is none that can be tuned for."""
    import jax

    from kernels_pallas.paged_attention.tpu.block_sizes import chip_at_hand
    from kernels_pallas.paged_attention.tuned_tables import table_name

    if jax.default_backend() == "gpu":
        return table_name(jax.devices()[0].device_kind)
    chip = chip_at_hand()
    device = "tpu7x" if chip == "7x" else chip
    if device is None or device not in CHIPS:
        raise RuntimeError(
            f"--by-time --kernel {kernel} needs one of {sorted(CHIPS)} at hand or a GPU, not"
            f" {jax.devices()[0].device_kind!r}; leave --by-time out to rank TPUs by the compiler"
        )
    return device


def write_table(device: str, entries: list[dict[str, Any]], ranked_by: str) -> Path:
    """Writes a device's table, with what it was made by; entries that it has for other kernels stay."""
    from kernels_pallas.paged_attention.tuned_tables import TABLES, tuned_entries

    versions = {"jax": importlib.metadata.version("jax")}
    if ranked_by == "compiler":
        versions["libtpu"] = importlib.metadata.version("libtpu")
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    name = f"tpu_{device.removeprefix('tpu')}" if device in CHIPS else device
    head = {"device": name.partition("_")[2], "date": date, **versions, "ranked_by": ranked_by, "page_size": PAGE_SIZE}
    written = {entry["kernel"] for entry in entries}
    kept = [entry for entry in tuned_entries(name) if entry["kernel"] not in written]
    lines = ",\n    ".join(json.dumps(entry) for entry in [*kept, *entries])
    path = TABLES / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(head, indent=2)[:-2] + f',\n  "entries": [\n    {lines}\n  ]\n}}\n')
    return path


def compile_named(mesh: Any, dump: Path, name: str) -> dict[str, Any]:
    """Returns what a candidate needs, and how many rows of queries make a piece."""
    import jax

    from kernels_pallas.paged_attention.tpu.block_sizes import matrix_unit

    figures = compile_on_tpu(mesh, dump, functools.partial(make_case, name))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return figures | {"piece_rows": matrix_unit()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs="+", choices=CHIPS, default=list(CHIPS))
    kinds = (*PAGE_DTYPES, "product")
    parser.add_argument(
        "--kernel", choices=kinds, default="decode", help="ragged is prefill, product a dense one on a GPU"
    )
    parser.add_argument("--by-time", action="store_true", help="measure the TPU or GPU at hand")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--cases", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        device, dump = arguments.worker
        return print_figures(arguments.cases, functools.partial(compile_named, mesh_of(device), Path(dump)))
    kernel = arguments.kernel
    if kernel == "product" and not arguments.by_time:
        parser.error("--kernel product needs --by-time, and the GPU at hand")
    rating = "seconds" if arguments.by_time else RATINGS[kernel]
    for device in [device_at_hand(kernel)] if arguments.by_time else arguments.devices:
        rated = rate_by_time(device, kernel) if arguments.by_time else rate_by_compiler(device, kernel)
        entries = []
        for shape, choices in zip(shapes(kernel), rated, strict=True):
            choices.sort(key=lambda choice: choice[rating])
            print(device, shape, *choices, sep="\n  ", flush=True)
            entries += [{**shape, **choices[0]}] if choices else []
        if kernel == "decode" or (device not in CHIPS and entries):
            print(write_table(device, entries, "time" if arguments.by_time else "compiler"))


if __name__ == "__main__":
    main()
