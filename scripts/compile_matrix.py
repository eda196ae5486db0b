"""Compiles kernels and whole steps with the real TPU compiler, without a TPU, and prints what came out.

    python scripts/compile_matrix.py [--devices v5e v6e] [--cases decode] [--json]

Needs the extra `aot` (libtpu). Every device compiles in a process of its own, for a fatal compiler error ends one.
Per case: bytes beside arguments and results, whether the cache is updated in place, seconds to lower and compile, and
from the compiler's final schedule the bundles (instructions of one cycle, where nothing stalls) of the kernel's largest
loop, and its register spills.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
# The name of a topology and the arguments that pick one chip of it.
ONE_CHIP = {"chips_per_host_bounds": [1, 1, 1]}
TOPOLOGIES = {
    "v5e": ("v5e:1x1", ONE_CHIP),
    "v5p": ("v5p:2x2x1", {}),
    "v6e": ("v6e:1x1", ONE_CHIP),
    "tpu7x": ("tpu7x:2x2x1", {}),
    "v5e-8": ("v5e:2x4", {}),
    "v6e-8": ("v6e:2x4", {}),
}
KERNEL_DEVICES = ("v5e", "v5p", "v6e", "tpu7x")


class Case(NamedTuple):
    """A jitted function, its arguments as shapes, and the cache that it must update in place."""

    function: Any
    arguments: dict[str, Any]
    cache: Any
    kernel: str | None = None


def decode_case(mesh: Any, **sizes: Any) -> Case:
    """One decode step of attention: 32 rows of up to 2,048 tokens over 2,048 pages of 128."""
    return _attention_case(mesh, num_tokens=32, num_rows=32, kernel="paged_decode", q_len=1, **sizes)


def prefill_case(mesh: Any, **sizes: Any) -> Case:
    """Attention of 512 tokens in any mix of rows."""
    return _attention_case(mesh, num_tokens=512, num_rows=8, kernel="paged_ragged", **sizes)


def verify_case(mesh: Any, **sizes: Any) -> Case:
    """Attention of 32 rows with 5 tokens each."""
    return _attention_case(mesh, num_tokens=160, num_rows=32, kernel="paged_ragged", q_len=5, **sizes)


def _attention_case(
    mesh: Any,
    *,
    num_tokens: int,
    num_rows: int,
    kernel: str,
    num_heads: int = 32,
    num_kv_heads: int = 8,
    head_dim: int = 128,
    page_size: int = 128,
    dtype: str = "bfloat16",
    page_dtype: str | None = None,
    context: int = 2048,
    tree_words: int = 0,
    has_sinks: bool = False,
    **options: Any,
) -> Case:
    import jax
    import jax.numpy as jnp

    from kernels_pallas.paged_attention import abstract_pages
    from kernels_pallas.paged_attention.tpu import paged_attention_tpu

    T, B, N, K, H, M = num_tokens, num_rows, num_heads, num_kv_heads, head_dim, context // page_size
    pages = abstract_pages(128 * M, page_size, K, H, page_dtype or dtype, "tpu")
    shapes = {"q": (T, N, H), "k": (T, K, H), "v": (T, K, H)}
    arguments: dict[str, Any] = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}
    arguments["pages"] = pages
    tables = {"block_tables": (B, M), "kv_lens": (B,), "cu_q_lens": (B + 1,)}
    arguments |= {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in tables.items()}
    if jnp.dtype(pages.dtype).itemsize == 1:
        arguments |= {name: jax.ShapeDtypeStruct((K,), jnp.float32) for name in ("k_scale", "v_scale")}
    if tree_words:
        arguments["tree_mask"] = jax.ShapeDtypeStruct((T, tree_words), jnp.uint32)
    if has_sinks:
        arguments["sinks"] = jax.ShapeDtypeStruct((N,), jnp.float32)
    attend = functools.partial(paged_attention_tpu, scale=H**-0.5, **options)
    return Case(jax.jit(attend, donate_argnames="pages"), on_mesh(arguments, mesh), pages, kernel)


def forward_case(mesh: Any, *, is_decode: bool) -> Case:
    """All layers of Llama-3-8B and its logits, without sampling; otherwise as `step_case`."""
    import jax

    from jaxinfer.decoder import forward, unembed

    case = step_case(mesh, is_decode=is_decode)
    config = case.function.__wrapped__.keywords["config"]

    def logits(params: Any, cache: Any, batch: Any) -> Any:
        hidden, cache = forward(params, cache, batch, config=config, q_len=1 if is_decode else None, mesh=mesh)
        return unembed(params, hidden[:32]), cache

    arguments = {name: case.arguments[name] for name in ("params", "cache", "batch")}
    return Case(jax.jit(logits, donate_argnames="cache"), arguments, case.cache)


def step_case(mesh: Any, *, is_decode: bool) -> Case:
    """A whole step of Llama-3-8B in bfloat16: 32 rows with contexts up to 8,192; prefill computes 512 tokens.

    The cache is 512 pages of 128, what fits beside 16 GB of weights on a chip of 32 GB.
    """
    import jax

    from jaxinfer.batch import make_batch
    from jaxinfer.cache import abstract_cache, cache_shardings
    from jaxinfer.config import CacheConfig, ModelConfig
    from jaxinfer.params import abstract_params, shardings
    from jaxinfer.sampling_batch import make_sampling
    from jaxinfer.steps import decode_step, prefill_step

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
    )
    cache_config = CacheConfig(num_pages=512, page_size=128, dtype="bfloat16")
    cache = abstract_cache(config, cache_config, "tpu")
    cache = jax.tree.map(
        lambda a, sharding: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding),
        cache,
        cache_shardings(cache, mesh),
    )
    batch = make_batch([], page_size=128, num_tokens=32 if is_decode else 512, num_rows=32, table_width=64)
    arguments = {
        "params": abstract_params(config, "bfloat16", shardings(config, mesh)),
        "cache": cache,
        "batch": jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), batch),
        "sampling": jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), make_sampling([], num_rows=32)),
    }
    step = functools.partial(decode_step if is_decode else prefill_step, config=config, max_log_probs=20, mesh=mesh)
    return Case(jax.jit(step, donate_argnames="cache"), on_mesh(arguments, mesh), cache)


def on_mesh(tree: Any, mesh: Any) -> Any:
    """Returns the shapes placed on every device of a mesh, where they have no place yet."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding or everywhere), tree)


CASES: dict[str, Callable[[Any], Case]] = {
    "decode": decode_case,
    "decode int8": functools.partial(decode_case, page_dtype="int8"),
    "decode fp8": functools.partial(decode_case, page_dtype="float8_e4m3fn"),
    "decode float32": functools.partial(decode_case, dtype="float32"),
    "decode 1 KV head": functools.partial(decode_case, num_heads=4, num_kv_heads=1),
    "decode head_dim 64": functools.partial(decode_case, head_dim=64, window=1024),
    "decode head_dim 80": functools.partial(decode_case, head_dim=80, num_heads=32, num_kv_heads=32),
    "decode head_dim 96": functools.partial(decode_case, head_dim=96, softcap=50.0),
    "decode head_dim 256": functools.partial(decode_case, head_dim=256, num_heads=16, num_kv_heads=4, has_sinks=True),
    "decode pages of 16": functools.partial(decode_case, page_size=16),
    "decode pages of 256": functools.partial(decode_case, page_size=256),
    "prefill": prefill_case,
    "prefill int8": functools.partial(prefill_case, page_dtype="int8"),
    "prefill head_dim 64": functools.partial(prefill_case, head_dim=64, window=1024, has_sinks=True),
    "prefill head_dim 256": functools.partial(prefill_case, head_dim=256, num_heads=16, num_kv_heads=4, softcap=50.0),
    "verify": verify_case,
    "verify a tree": functools.partial(verify_case, tree_words=1),
    "decode int8 pages of 32": functools.partial(decode_case, page_size=32, page_dtype="int8"),
    "forward decode": functools.partial(forward_case, is_decode=True),
    "forward prefill": functools.partial(forward_case, is_decode=False),
    "step decode": functools.partial(step_case, is_decode=True),
    "step prefill": functools.partial(step_case, is_decode=False),
}
KERNEL_CASES = tuple(name for name in CASES if not name.startswith(("forward", "step")))


def can_compile() -> bool:
    """Returns whether the TPU compiler is installed."""
    return find_spec("libtpu") is not None


def compile_in_process(device: str, cases: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Compiles cases for a device in a fresh process; returns each one's figures, or {"error": …}."""
    results: dict[str, dict[str, Any]] = {name: {"error": "the compiler ended the process before"} for name in cases}
    with tempfile.TemporaryDirectory() as dump:
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "JAX_ENABLE_COMPILATION_CACHE": "false",
            # A second process may load libtpu, and there is no cloud machine to ask for its topology.
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "TPU_ACCELERATOR_TYPE": "v5litepod-4",
            "LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true"
            " --xla_jf_dump_llo_pass_label_regex=final",
        }
        command = [sys.executable, __file__, "--worker", device, dump, *results]
        worker = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    for line in worker.stdout.splitlines():
        if line.startswith("{"):
            result = json.loads(line)
            results[result.pop("case")] = result
    unfinished = {name for name, result in results.items() if result.get("error", "").startswith("the compiler ended")}
    for name in unfinished:
        results[name] = {"error": f"the process ended with {worker.returncode}: {worker.stderr[-600:]}"}
    return results


def work(device: str, dump: Path, cases: Iterable[str]) -> None:
    """Compiles cases and prints a line of JSON for each."""
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh

    topology, arguments = TOPOLOGIES[device]
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology, **arguments).devices
    mesh = Mesh(np.array(devices if device.endswith("-8") else devices[:1]), ("model",))
    for name in cases:
        start, seen = time.perf_counter(), set(dump.iterdir())
        try:
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                case = CASES[name](mesh)
                lowered = case.function.lower(**case.arguments)
            memory = lowered.compile().memory_analysis()
            seconds = time.perf_counter() - start
            figures = {
                "temp_bytes": memory.temp_size_in_bytes,
                "in_place": memory.alias_size_in_bytes >= _bytes_per_device(case.cache),
                "seconds": round(seconds, 1),
            }
            if case.kernel is not None:
                figures |= schedule_figures(set(dump.iterdir()) - seen, case.kernel)
        except Exception as error:  # whatever it is belongs in the table
            figures = {"error": f"{type(error).__name__}: {str(error)[:600]}"}
        print(json.dumps({"case": name, **figures}), flush=True)


def _bytes_per_device(cache: Any) -> int:
    import jax

    def size(a: Any) -> int:
        shape = a.shape if a.sharding is None else a.sharding.shard_shape(a.shape)
        return math.prod(shape) * a.dtype.itemsize

    return sum(map(size, jax.tree.leaves(cache)))


def schedule_figures(files: Iterable[Path], kernel: str) -> dict[str, int]:
    """Returns bundles of the largest loop, of the whole kernel, and spills, from libtpu's dump of a kernel."""
    named = [path for path in files if kernel in path.name]
    bundles = [p for p in named if re.search(r"\d-final_bundles\.txt$", p.name)]
    usage = [p for p in named if p.name.endswith("final_hlo-static-per-bundle-utilization.txt")]
    if len(bundles) != 1 or len(usage) != 1:
        raise RuntimeError(f"the compiler left {len(bundles)} schedules of {kernel} and {len(usage)} of their usage")
    lines = usage[0].read_text().splitlines()
    columns = [column.strip() for column in lines[1].split(",")]
    counts = [[int(n) for n in line.split()] for line in lines[4:] if line.strip()]
    spill_columns = [columns.index("VSTORE:SPILL"), columns.index("VLOAD:FILL")]
    loops = sorted(_loops(bundles[0].read_text()), key=lambda loop: loop[0] - loop[1])
    first, last = loops[0]
    return {
        "bundles": last - first + 1,
        "kernel_bundles": len(counts),
        "spills": sum(row[i] for row in counts for i in spill_columns),
    }


def _loops(schedule: str) -> list[tuple[int, int]]:
    """The first and last bundle of each loop: a branch back to the start of a region."""
    address, starts, branches = 0, {}, []
    for line in schedule.splitlines():
        if match := re.match(r"\s*(0x[0-9a-f]+)\s+(?:LH|LB|LE|PB|PF)?\s*:", line):
            address = int(match[1], 16)
        starts |= dict.fromkeys(re.findall(r"Start(?:/End)?(?: empty)? region (\d+)", line), address)
        branches += [(address, region) for region in re.findall(r"sbr\.rel.*?target = \$region(\d+)", line)]
    return [(starts[region], at) for at, region in branches if region in starts and starts[region] <= at]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs="+", choices=TOPOLOGIES, default=KERNEL_DEVICES)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(KERNEL_CASES))
    parser.add_argument("--json", action="store_true", help="one JSON object per line instead of a table")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        device, dump, *cases = arguments.worker
        return work(device, Path(dump), cases)
    if not can_compile():
        sys.exit('libtpu is not installed: pip install "jaxinfer[aot]"')
    columns = ("temp_bytes", "in_place", "seconds", "bundles", "kernel_bundles", "spills")
    if not arguments.json:
        print(f"{'device':8}{'case':28}" + "".join(f"{column:>15}" for column in columns))
    for device in arguments.devices:
        for name, figures in compile_in_process(device, arguments.cases).items():
            if arguments.json:
                print(json.dumps({"device": device, "case": name, **figures}), flush=True)
            else:
                cells = "".join(f"{figures.get(column, '')!s:>15}" for column in columns)
                print(f"{device:8}{name:28}{figures.get('error', cells)}", flush=True)


if __name__ == "__main__":
    main()
