"""Compiles the GPU kernels and whole steps with the real CUDA compiler, without a GPU, and prints what they need.

    python scripts/compile_gpu.py [--devices A100 L4 H200] [--cases decode step] [--json FILE]

Needs the extra `aot`. Per case: what ptxas gives each Pallas kernel (registers and bytes spilled per thread), shared
memory, programs that fit on a multiprocessor at once, bytes beside arguments and results, whether the cache is updated
in place, launches, and seconds to lower and compile. Every device has a process of its own, for a fatal compiler error
ends one.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
DEVICES = ("A100", "L4", "H200")


class Case(NamedTuple):
    """A function, its arguments as shapes, which of them is the cache, and the Pallas kernels to look at."""

    function: Callable
    arguments: tuple
    cache: int | None
    kernels: tuple[str, ...]


def attention(
    *,
    q_len: int | None,
    num_tokens: int,
    num_rows: int,
    head_dim: int = 128,
    num_heads: int = 32,
    num_kv_heads: int = 8,
    page_size: int = 16,
    max_context: int = 8192,
    dtype: str = "bfloat16",
    page_dtype: str | None = None,
    has_tree: bool = False,
    has_sinks: bool = False,
    **options: Any,
) -> Case:
    """One call of paged attention over a pool with room for 64 Ki tokens."""
    import jax
    import jax.numpy as jnp

    from kernels_pallas.paged_attention import abstract_pages, paged_attention

    shape = jax.ShapeDtypeStruct
    page_dtype = page_dtype or dtype
    arrays = {
        "block_tables": shape((num_rows, max_context // page_size), jnp.int32),
        "kv_lens": shape((num_rows,), jnp.int32),
        "cu_q_lens": shape((num_rows + 1,), jnp.int32),
        "page_offset": shape((), jnp.int32),
    }
    if page_dtype != dtype:
        arrays |= {name: shape((num_kv_heads,), jnp.float32) for name in ("k_scale", "v_scale")}
    if has_tree:
        arrays["tree_mask"] = shape((num_tokens, 1), jnp.uint32)
    if has_sinks:
        arrays["sinks"] = shape((num_heads,), jnp.float32)
    pages = abstract_pages(65536 // page_size, page_size, num_kv_heads, head_dim, page_dtype, "gpu")
    q, k = (shape((num_tokens, heads, head_dim), dtype) for heads in (num_heads, num_kv_heads))
    attend = functools.partial(paged_attention, scale=head_dim**-0.5, q_len=q_len, implementation="gpu", **options)
    return Case(
        lambda q, k, v, pages, arrays: attend(q, k, v, pages, **arrays),
        (q, k, k, pages, arrays),
        3,
        ("paged_attention", "append_kv"),
    )


decode = functools.partial(attention, q_len=1, num_tokens=64, num_rows=64)
verify = functools.partial(attention, q_len=8, num_tokens=128, num_rows=16)
prefill = functools.partial(attention, q_len=None, num_tokens=4096, num_rows=16)

CASES: dict[str, Callable[[], Case]] = {
    **{f"decode H={H}": functools.partial(decode, head_dim=H) for H in (64, 80, 96, 128, 256)},
    "decode float16": functools.partial(decode, dtype="float16"),
    "decode int8 KV": functools.partial(decode, page_dtype="int8", page_size=64),
    "decode fp8 KV": functools.partial(decode, page_dtype="float8_e4m3fn", page_size=256),
    "decode split": functools.partial(decode, num_tokens=2, num_rows=2),
    "decode split G=1 window cap sinks": functools.partial(
        decode, num_tokens=2, num_rows=2, num_heads=8, window=4096, softcap=30.0, has_sinks=True
    ),
    "verify": verify,
    "verify tree": functools.partial(verify, has_tree=True),
    **{f"prefill H={H}": functools.partial(prefill, head_dim=H) for H in (64, 80, 96, 128, 256)},
    "prefill int8 KV": functools.partial(prefill, page_dtype="int8", page_size=64),
    "prefill fp8 KV": functools.partial(prefill, page_dtype="float8_e4m3fn", page_size=64),
    "prefill window cap sinks": functools.partial(prefill, window=1024, softcap=30.0, has_sinks=True),
    "prefill tree": functools.partial(prefill, has_tree=True),
}
# Refused there, with a reason; see kernels_pallas/triton.py.
NO_FP8 = ("A100",)


def compile_case(device: str, name: str) -> list[dict[str, Any]]:
    """Returns a record per Pallas kernel of a case."""
    import jax

    from kernels_pallas import gpu_compiler

    case = CASES[name]()
    donate = () if case.cache is None else (case.cache,)
    compiled = gpu_compiler.compile_for(device, case.function, *case.arguments, donate=donate)
    cache = jax.tree.leaves(case.arguments[case.cache]) if donate else []
    program = {
        "device": device,
        "case": name,
        "temporary_bytes": compiled.temporary_bytes,
        "cache_bytes": sum(a.size * a.dtype.itemsize for a in cache),
        "aliased_bytes": compiled.aliased_bytes,
        "num_launches": len(compiled.launches),
        "seconds": round(compiled.seconds, 2),
    }
    gpu = gpu_compiler.GPUS[device]
    return [
        {**program, **launch._asdict(), "programs_per_core": gpu_compiler.programs_per_core(gpu, launch)}
        for kernel in case.kernels
        for launch in compiled.kernels(kernel)
    ]


def compile_device(device: str, cases: list[str]) -> list[dict[str, Any]]:
    """Compiles cases for one device in a process of its own; RuntimeError with its output when that fails."""
    # Without the platform jax looks for a driver; without the warning level the compiler reports its progress.
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, __file__, "--worker", device, "--cases", *cases]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"compiling {cases} for {device} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout)


def cases_for(device: str, selected: list[str]) -> list[str]:
    """Returns the cases whose name begins with one of those selected, less those that the device cannot do."""
    names = [name for name in CASES if any(name.startswith(prefix) for prefix in selected)]
    return [name for name in names if not (device in NO_FP8 and "fp8" in name)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs="+", default=DEVICES, choices=DEVICES)
    parser.add_argument("--cases", nargs="+", default=[""], help="names of cases, or how they begin")
    parser.add_argument("--json", type=Path, help="also write the records to this file")
    parser.add_argument("--worker", choices=DEVICES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        print(json.dumps([record for name in arguments.cases for record in compile_case(arguments.worker, name)]))
        return
    columns = "device case name grid threads registers spill_bytes shared_bytes programs_per_core temporary_bytes"
    row = "{:6} {:34} {:18} {:>7} {:>7} {:>9} {:>11} {:>12} {:>17} {:>15} {:>8} {:>12} {:>7}"
    print(row.format(*columns.split(), "in_place", "num_launches", "seconds"))
    records = []
    for device in arguments.devices:
        records += compile_device(device, cases_for(device, arguments.cases))
        for record in [r for r in records if r["device"] == device]:
            in_place = "yes" if record["aliased_bytes"] >= record["cache_bytes"] else "NO"
            values = [record[column] for column in columns.split()]
            print(row.format(*values, in_place, record["num_launches"], record["seconds"]))
    if arguments.json:
        arguments.json.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
