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
from collections.abc import Callable, Iterable
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


def product(
    *, rows: int, bits: int = 4, group_size: int = 128, has_zeros: bool = False, is_plain: bool = False
) -> Case:
    """A product with 14,336 x 4,096 quantized weights; `is_plain` makes them floating point before, as XLA would."""
    import jax
    import jax.numpy as jnp

    from kernels_pallas.quantized_matmul import dequantize, quantized_matmul

    T, D, F = rows, 4096, 14336
    shape = jax.ShapeDtypeStruct
    x, weights = shape((T, D), jnp.bfloat16), shape((F, D * bits // 8), jnp.int8)
    scales = shape((F, D // group_size), jnp.bfloat16)
    zeros = shape(scales.shape, jnp.int8) if has_zeros else None

    def plain(x, weights, scales, zeros):
        w = dequantize(weights, scales, zeros, D).astype(x.dtype)
        return jnp.einsum("td,fd->tf", x, w, preferred_element_type=jnp.float32).astype(x.dtype)

    kernels = () if is_plain or group_size == D else ("quantized_matmul",)
    return Case(plain if is_plain else quantized_matmul, (x, weights, scales, zeros), None, kernels)


def step(name: str, *, num_tokens: int, num_rows: int, max_context: int = 8192, page_size: int = 16) -> Case:
    """A whole step of Llama 3 8B in bfloat16 over a pool of 256 Ki tokens, 34 GB."""
    import jax
    import jax.numpy as jnp

    from jaxinfer import CacheConfig, ModelConfig, Row, SamplingParams, make_batch, make_sampling, steps
    from jaxinfer.cache import abstract_cache
    from jaxinfer.params import abstract_params

    config = ModelConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_position=8192,
        rope_theta=500000.0,
        layer_groups=(1,) * 32,  # as `default_layer_groups` has it on GPU
    )
    cache_config = CacheConfig(num_pages=262144 // page_size, page_size=page_size, dtype="bfloat16")
    sizes = {"num_tokens": num_tokens, "num_rows": num_rows, "table_width": max_context // page_size}
    batch = make_batch([Row([0], 0, [0])], page_size=page_size, **sizes)
    sampling = make_sampling([SamplingParams(temperature=0.0)], num_rows=num_rows)
    arguments = (
        abstract_params(config, jnp.bfloat16),
        abstract_cache(config, cache_config, "gpu"),
        *jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (batch, sampling)),
    )
    function = functools.partial(getattr(steps, name), config=config)
    return Case(function, arguments, 1, ("paged_attention", "append_kv"))


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
    **{f"product int4 x {rows}": functools.partial(product, rows=rows) for rows in (1, 16, 512)},
    "product int4 x 16 groups of 32 zeros": functools.partial(product, rows=16, group_size=32, has_zeros=True),
    "product int8 x 16": functools.partial(product, rows=16, bits=8),
    "product int8 x 512 zeros": functools.partial(product, rows=512, bits=8, has_zeros=True),
    "plain product int4 x 16": functools.partial(product, rows=16, is_plain=True),
    "plain product int8 x 16": functools.partial(product, rows=16, bits=8, is_plain=True),
    "product int8 x 16 per channel": functools.partial(product, rows=16, bits=8, group_size=4096),
    "step decode": functools.partial(step, "decode_step", num_tokens=64, num_rows=64),
    "step prefill": functools.partial(step, "prefill_step", num_tokens=2048, num_rows=16),
}
# Refused there, with a reason; see kernels_pallas/triton.py.
NO_FP8 = ("A100",)


def compile_case(device: str, name: str) -> dict[str, Any]:
    """Returns what a case needs, its Pallas kernels under "kernels"."""
    import jax

    from kernels_pallas import gpu_compiler

    case = CASES[name]()
    donate = () if case.cache is None else (case.cache,)
    compiled = gpu_compiler.compile_for(device, case.function, *case.arguments, donate=donate)
    cache = jax.tree.leaves([case.arguments[i] for i in donate])
    gpu = gpu_compiler.GPUS[device]
    return {
        "temporary_bytes": compiled.temporary_bytes,
        "in_place": compiled.aliased_bytes >= sum(a.size * a.dtype.itemsize for a in cache),
        "num_launches": len(compiled.launches),
        "seconds": round(compiled.seconds, 2),
        "processor_seconds": round(compiled.processor_seconds, 2),
        "kernels": [
            {**launch._asdict(), "programs_per_core": gpu_compiler.programs_per_core(gpu, launch)}
            for kernel in case.kernels
            for launch in compiled.kernels(kernel)
        ],
    }


def can_compile() -> bool:
    """Returns whether the CUDA compiler is installed."""
    from kernels_pallas import gpu_compiler

    return gpu_compiler.is_available()


def compile_in_process(device: str, cases: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Compiles cases for a device in a fresh process; returns each one's figures, or {"error": …}."""
    cases = list(cases)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",  # else jax looks for a driver
        "JAX_ENABLE_COMPILATION_CACHE": "false",  # what comes from there leaves no trace of its kernels
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    command = [sys.executable, __file__, "--worker", device, "--cases", *cases]
    worker = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in worker.stdout.splitlines() if line.startswith("{")]
    results = {line.pop("case"): line for line in lines}
    missing = {"error": f"the process ended with {worker.returncode}: {worker.stderr[-600:]}"}
    return {name: results.get(name, missing) for name in cases}


def work(device: str, cases: Iterable[str]) -> None:
    """Compiles cases and prints a line of JSON for each."""
    for name in cases:
        try:
            figures = compile_case(device, name)
        except Exception as error:  # whatever it is belongs in the table
            figures = {"error": f"{type(error).__name__}: {str(error)[:600]}"}
        print(json.dumps({"case": name, **figures}), flush=True)


def cases_for(device: str, beginnings: Iterable[str] = ("",)) -> list[str]:
    """Returns the cases with names that begin so, less those that the device cannot do."""
    names = [name for name in CASES if name.startswith(tuple(beginnings))]
    return [name for name in names if not (device in NO_FP8 and "fp8" in name)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs="+", default=DEVICES, choices=DEVICES)
    parser.add_argument("--cases", nargs="+", default=[""], help="names of cases, or how they begin")
    parser.add_argument("--json", action="store_true", help="one JSON object per line instead of a table")
    parser.add_argument("--worker", choices=DEVICES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return work(arguments.worker, arguments.cases)
    if not can_compile():
        sys.exit('the CUDA compiler is not installed: pip install "jaxinfer[aot]"')
    program = ("temporary_bytes", "in_place", "num_launches", "seconds", "processor_seconds")
    kernel = ("name", "grid", "threads", "registers", "spill_bytes", "shared_bytes", "programs_per_core")
    if not arguments.json:
        print(f"{'device':8}{'case':38}" + "".join(f" {column:>17}" for column in (*program, *kernel)))
    for device in arguments.devices:
        for name, figures in compile_in_process(device, cases_for(device, arguments.cases)).items():
            if arguments.json:
                print(json.dumps({"device": device, "case": name, **figures}), flush=True)
            elif "error" in figures:
                print(f"{device:8}{name:38}{figures['error']}", flush=True)
            else:
                launches = {json.dumps(launch): launch for launch in figures["kernels"]}  # one per kind
                for launch in launches.values() or [{}]:
                    cells = [figures[column] for column in program] + [launch.get(column, "") for column in kernel]
                    print(f"{device:8}{name:38}" + "".join(f" {cell!s:>17}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
