"""Compiles kernels and whole steps with the real TPU compiler, without a TPU, and prints what came out.

    python scripts/kernels/compile_matrix.py [--devices v5e v6e] [--cases decode] [--json]

Needs the extra `aot` (libtpu). Every device compiles in a process of its own, for a fatal compiler error ends one.
It prints for each case:

* bytes beside arguments and results, and whether the cache is updated in place; of a draw also those of its code,
* the operations of a whole step that write a copy of a weight,
* seconds to lower and compile, by the clock and of all threads together,
* from the compiler's final schedule: the bundles of the kernel's largest loop (a bundle is the instructions of one
  cycle, if nothing stalls), and its register spills.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from jaxinfer.plan.compiler import TPU_ENVIRONMENT, tpu_mesh
from kernels_pallas.paged_attention.tpu.block_sizes import Blocks
from scripts.kernels.compilers import (
    Case,
    axes_of,
    compile_in_process,
    lower_case,
    on_mesh,
    print_figures,
    step_case,
)
from scripts.kernels.figures import compile_on_tpu
from scripts.kernels.named_calls import by_name

DEVICES = (
    *("v5e", "v5p", "v6e", "tpu7x", "v5e-8", "v6e-8", "v5p-2", "v5p-4", "v6e-4", "v5p-4x4", "v6e-8x2", "v6e-8x8"),
)
KERNEL_DEVICES = ("v5e", "v5p", "v6e", "tpu7x")


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
    has_token_scales: bool = False,
    context: int = 2048,
    tree_words: int = 0,
    has_sinks: bool = False,
    **options: Any,
) -> Case:
    import jax
    import jax.numpy as jnp

    from kernels_pallas.paged_attention import abstract_pages
    from kernels_pallas.paged_attention.tpu.entry import paged_attention_tpu

    T, B, N, K, H, M = num_tokens, num_rows, num_heads, num_kv_heads, head_dim, context // page_size
    pages = abstract_pages(128 * M, page_size, K, H, page_dtype or dtype, "tpu", has_scales=has_token_scales)
    shapes = {"q": (T, N, H), "k": (T, K, H), "v": (T, K, H)}
    arguments: dict[str, Any] = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}
    arguments["pages"] = pages
    tables = {"block_tables": (B, M), "kv_lens": (B,), "cu_q_lens": (B + 1,)}
    arguments |= {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in tables.items()}
    if jnp.dtype(pages.dtype).itemsize == 1 and not has_token_scales:
        arguments |= {name: jax.ShapeDtypeStruct((K,), jnp.float32) for name in ("k_scale", "v_scale")}
    if tree_words:
        arguments["tree_mask"] = jax.ShapeDtypeStruct((T, tree_words), jnp.uint32)
    if has_sinks:
        arguments["sinks"] = jax.ShapeDtypeStruct((N,), jnp.float32)
    attend = functools.partial(by_name(paged_attention_tpu), scale=H**-0.5, **options)
    return Case(jax.jit(attend, donate_argnames="pages"), on_mesh(arguments, mesh), pages, (kernel,))


def move_case(mesh: Any, *, num_tokens: int = 256, **sizes: Any) -> Case:
    """Moves the slots of accepted drafts, over 2,048 pages of 128 with 8 heads of 128."""
    import jax
    import jax.numpy as jnp

    from kernels_pallas.paged_attention import abstract_pages, move_slots

    pages = abstract_pages(2048, 128, 8, 128, layout="tpu", **sizes)
    slots = jax.ShapeDtypeStruct((num_tokens,), jnp.int32)
    arguments = on_mesh({"pages": pages, "sources": slots, "targets": slots}, mesh)
    return Case(jax.jit(move_slots, donate_argnames="pages"), arguments, pages)


def latents_case(
    mesh: Any,
    *,
    num_tokens: int = 32,
    num_rows: int = 32,
    kernel: str = "paged_decode",
    num_heads: int = 16,
    q_len: int | None = 1,
    **options: Any,
) -> Case:
    """Latent attention with the sizes of DeepSeek-V3 over 2,048 pages of 128; a decode step unless said otherwise."""
    import jax
    import jax.numpy as jnp

    from kernels_pallas.latent_attention import abstract_latents
    from kernels_pallas.latent_attention.tpu import latent_attention_tpu

    pages = abstract_latents(2048, 128, 512, 64, jnp.bfloat16, "tpu")
    shapes = {"q": (num_tokens, num_heads, 576), "latents": (num_tokens, 576)}
    arguments: dict[str, Any] = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
    tables = {"block_tables": (num_rows, 16), "kv_lens": (num_rows,), "cu_q_lens": (num_rows + 1,)}
    arguments |= {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in tables.items()} | {"pages": pages}
    attend = functools.partial(by_name(latent_attention_tpu), scale=0.1, q_len=q_len, **options)
    return Case(jax.jit(attend, donate_argnames="pages"), on_mesh(arguments, mesh), pages, (kernel,))


def experts_case(
    mesh: Any,
    *,
    num_tokens: int = 32,
    num_channels: int = 768,
    num_inputs: int = 2048,
    weights: str = "bfloat16",
    group_size: int | None = None,
) -> Case:
    """A product by one of two layers of experts with the sizes of Qwen3-30B-A3B, 8 of 128 for each token.

    Weights have scales if there is a `group_size`.
    """
    import jax
    import jax.numpy as jnp

    from kernels_pallas.grouped_matmul import grouped_matmul

    E, F, D = 128, num_channels, num_inputs
    shapes: dict[str, Any] = {"rows": ((num_tokens * 8, D), "bfloat16"), "weights": ((2 * E, F, D), weights)}
    shapes |= {"counts": ((E,), jnp.int32), "first_expert": ((), jnp.int32)}
    if group_size is not None:
        shapes["scales"] = ((2 * E, F, D // group_size), jnp.float32)
    arguments = {name: jax.ShapeDtypeStruct(*shape) for name, shape in shapes.items()}
    return Case(jax.jit(grouped_matmul), on_mesh(arguments, mesh), kernels=("grouped_matmul",))


def product_case(
    mesh: Any,
    *,
    num_tokens: int = 32,
    num_channels: int = 14336,
    num_inputs: int = 4096,
    weights: str = "int8",
    group_size: int = 4096,
    has_zeros: bool = False,
) -> Case:
    """A product by packed weights of one of two layers, with the sizes of gate and up in Llama 3 8B."""
    import jax
    import jax.numpy as jnp

    from kernels_pallas.quantized_matmul import quantized_matmul

    shapes: dict[str, Any] = {
        "x": ((num_tokens, num_inputs), "bfloat16"),
        "weights": ((2, num_channels, num_inputs), weights),
        "scales": ((2, num_channels, num_inputs // group_size), jnp.float32),
        "layer": ((), jnp.int32),
    }
    if has_zeros:
        shapes["zeros"] = (shapes["scales"][0], weights)
    arguments = {name: jax.ShapeDtypeStruct(*shape) for name, shape in shapes.items()}
    return Case(jax.jit(quantized_matmul), on_mesh(arguments, mesh), kernels=("quantized_matmul",))


def full_draw_case(mesh: Any, *, num_rows: int = 64, vocab_size: int = 151936, context: int = 40960) -> Case:
    """A draw in the full form, with the vocabulary and the longest context of Qwen3-0.6B."""
    import jax
    import jax.numpy as jnp

    from jaxinfer.checkpoint.published import published_config
    from jaxinfer.config import CacheConfig
    from jaxinfer.model.batch import lay_out_batch
    from jaxinfer.model.cache import abstract_cache
    from jaxinfer.sampling.batch import make_sampling
    from jaxinfer.steps.steps import StepOptions, draw_step

    config, page_size = published_config("Qwen3-0.6B"), 128
    cache = CacheConfig(num_pages=512, page_size=page_size, dtype="bfloat16")
    sizes = {"num_tokens": num_rows, "num_rows": num_rows, "table_width": context // page_size}
    arguments = {
        "cache": abstract_cache(config, cache, "tpu"),
        "batch": lay_out_batch([], page_size=page_size, **sizes),
        "sampling": make_sampling([], num_rows=num_rows, vocab_size=vocab_size),
        "logits": jax.ShapeDtypeStruct((num_rows, vocab_size), jnp.float32),
    }
    draw = functools.partial(draw_step, options=StepOptions(config=config, max_log_probs=20))
    return Case(jax.jit(draw), on_mesh(arguments, mesh))


# 32 rows with contexts up to 8,192; prefill computes 512 tokens. The pages fill the memory beside the weights: 512
# of 128 tokens on a chip of 32 GB, 256 beside 8-bit weights on one of 16 GB.
tpu_step = functools.partial(step_case, layout="tpu", num_rows=32, page_size=128)
decode_step = functools.partial(tpu_step, step="decode_step", num_tokens=32, num_pages=512)
prefill_step = functools.partial(tpu_step, step="prefill_step", num_tokens=512, num_pages=512)
verify_trees = functools.partial(tpu_step, step="verify_step", num_tokens=256, num_pages=512, tree_q_len=8)

# Four buffers of 512 tokens, whatever is tuned, so that one device compares with another.
decode_512 = functools.partial(decode_case, blocks=Blocks(pages=4, buffers=4))

# Integers with a scale for each token and head, as an engine keeps them.
BY_TOKEN: dict[str, Any] = {"page_dtype": "int8", "has_token_scales": True}

CASES: dict[str, Callable[[Any], Case]] = {
    "decode": decode_512,
    "decode int8": functools.partial(decode_512, page_dtype="int8"),
    "decode int8 by token": functools.partial(decode_512, **BY_TOKEN),
    "decode fp8": functools.partial(decode_512, page_dtype="float8_e4m3fn"),
    "decode as tuned": decode_case,
    "decode float32": functools.partial(decode_case, dtype="float32"),
    "decode 1 KV head": functools.partial(decode_case, num_heads=4, num_kv_heads=1),
    "decode head_dim 64": functools.partial(decode_case, head_dim=64, window=1024),
    "decode head_dim 80": functools.partial(decode_case, head_dim=80, num_heads=32, num_kv_heads=32),
    "decode head_dim 96": functools.partial(decode_case, head_dim=96, softcap=50.0),
    "decode head_dim 256": functools.partial(decode_case, head_dim=256, num_heads=16, num_kv_heads=4, has_sinks=True),
    "decode head_dim 512": functools.partial(decode_case, head_dim=512, num_heads=32, num_kv_heads=4),
    "decode pages of 16": functools.partial(decode_case, page_size=16),
    "decode pages of 256": functools.partial(decode_case, page_size=256),
    "prefill": prefill_case,
    "prefill int8": functools.partial(prefill_case, page_dtype="int8"),
    "prefill int8 by token": functools.partial(prefill_case, **BY_TOKEN),
    "prefill fp8": functools.partial(prefill_case, page_dtype="float8_e4m3fn"),
    "prefill head_dim 64": functools.partial(prefill_case, head_dim=64, window=1024, has_sinks=True),
    "prefill head_dim 256": functools.partial(prefill_case, head_dim=256, num_heads=16, num_kv_heads=4, softcap=50.0),
    "prefill head_dim 512": functools.partial(prefill_case, head_dim=512, num_heads=32, num_kv_heads=4),
    "verify": verify_case,
    "verify a tree": functools.partial(verify_case, tree_words=1),
    "latents decode": latents_case,
    "latents decode 128 heads": functools.partial(latents_case, num_heads=128),
    "latents prefill": functools.partial(latents_case, num_tokens=512, num_rows=8, kernel="paged_ragged", q_len=None),
    "latents prefill 128 heads": functools.partial(
        latents_case, num_tokens=512, num_rows=8, kernel="paged_ragged", q_len=None, num_heads=128
    ),
    "experts decode": experts_case,
    "experts decode int8": functools.partial(experts_case, weights="int8", group_size=2048),
    "experts decode int4": functools.partial(experts_case, weights="int4", group_size=128),
    "experts decode 192 inputs": functools.partial(experts_case, num_channels=2048, num_inputs=192),
    "experts prefill": functools.partial(experts_case, num_tokens=2048),
    "product decode int8": product_case,
    "product decode int4": functools.partial(product_case, weights="int4", group_size=128),
    "product decode int4 less zero points": functools.partial(
        product_case, weights="int4", group_size=128, has_zeros=True
    ),
    "product decode fp8": functools.partial(product_case, weights="float8_e4m3fn", group_size=128),
    "product prefill fp8": functools.partial(product_case, num_tokens=512, weights="float8_e4m3fn", group_size=128),
    "experts decode fp8": functools.partial(experts_case, weights="float8_e4m3fn", group_size=128),
    "product prefill int8": functools.partial(product_case, num_tokens=512),
    "product prefill int4": functools.partial(product_case, num_tokens=512, weights="int4", group_size=128),
    "product down prefill int4": functools.partial(
        product_case, num_tokens=512, num_channels=4096, num_inputs=14336, weights="int4", group_size=128
    ),
    "decode int8 pages of 32": functools.partial(decode_case, page_size=32, page_dtype="int8"),
    "decode int8 by token pages of 32": functools.partial(decode_case, page_size=32, **BY_TOKEN),
    "decode int8 by token 1 KV head": functools.partial(decode_case, num_heads=4, num_kv_heads=1, **BY_TOKEN),
    "decode int8 by token head_dim 64": functools.partial(
        decode_case, num_heads=9, num_kv_heads=3, head_dim=64, window=1024, has_sinks=True, **BY_TOKEN
    ),
    "verify a tree int8 by token": functools.partial(verify_case, tree_words=1, **BY_TOKEN),
    "move": functools.partial(move_case, dtype="bfloat16"),
    "move int8 by token": functools.partial(move_case, dtype="int8", has_scales=True),
    "step decode": decode_step,
    "step prefill": prefill_step,
    "step prefill of 2,048 tokens": functools.partial(prefill_step, num_tokens=2048),
    "step verify trees": verify_trees,
    "step verify beside prefill": functools.partial(
        tpu_step, step="verify_step", num_tokens=512, num_pages=512, mixed_q_len=2
    ),
    "step decode int8 weights": functools.partial(decode_step, quantization="int8", num_pages=256),
    "step decode int4 weights": functools.partial(decode_step, quantization="int4", num_pages=256),
    "step prefill int4 weights": functools.partial(prefill_step, quantization="int4", num_pages=256),
    "step prefill int8 weights": functools.partial(prefill_step, quantization="int8", num_pages=256),
    "step decode int8 weights and pages": functools.partial(
        decode_step, quantization="int8", cache_dtype="int8", num_pages=512
    ),
    "step prefill int8 weights and pages": functools.partial(
        prefill_step, quantization="int8", cache_dtype="int8", num_pages=512
    ),
    "step verify trees int8 pages": functools.partial(verify_trees, cache_dtype="int8"),
    "draw step full": full_draw_case,
}
KERNEL_CASES = tuple(name for name in CASES if "step" not in name.split())
DRAW_CASES = ("draw step full",)


def can_compile() -> bool:
    """Returns whether the TPU compiler is installed."""
    return find_spec("libtpu") is not None


def compile_for(device: str, cases: Iterable[str], script: str = __file__) -> dict[str, dict[str, Any]]:
    """Compiles cases for a device in a process of their own; returns each one's figures, or {"error": …}.

    `script` is the one that knows the cases.
    """
    return _in_process(script, device, cases)


def lower_for(device: str, cases: Iterable[str], script: str = __file__) -> dict[str, dict[str, Any]]:
    """Lowers cases for a device, as `compile_for` compiles them; returns each one's `lower_case`, or {"error": …}."""
    return _in_process(script, device, cases, "--lower")


def compile_draw(mesh: Any, make_case: Callable[[Any], Case]) -> dict[str, Any]:
    """Returns the bytes of the code and of the temporaries of a draw, and the seconds to lower and compile it."""
    import jax

    start, used = time.perf_counter(), sum(os.times()[:4])
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        case = make_case(mesh)
        lowered = case.function.lower(**case.arguments)
    memory = lowered.compile().memory_analysis()
    return {
        "code_bytes": memory.generated_code_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "seconds": round(time.perf_counter() - start, 1),
        "processor_seconds": round(sum(os.times()[:4]) - used, 1),
    }


def lower_on_tpu(mesh: Any, dump: str, make_case: Callable[[Any], Case]) -> dict[str, Any]:
    """Returns `lower_case` of a case, with the compiler's flags."""
    return lower_case(mesh, make_case, os.environ.get("LIBTPU_INIT_ARGS", "").replace(dump, ""))


def _in_process(script: str, device: str, cases: Iterable[str], *options: str) -> dict[str, dict[str, Any]]:
    with tempfile.TemporaryDirectory() as dump:
        environment = dict(TPU_ENVIRONMENT)
        if not all("step" in name.split() for name in cases):  # a whole step would spend its time writing
            environment["LIBTPU_INIT_ARGS"] = (
                f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final"
            )
        return compile_in_process(script, [device, dump, *options], cases, environment)


def mesh_of(device: str) -> Any:
    """Returns a mesh of the chips of a device, which need not be here; `axes_of` has its axes."""
    return tpu_mesh(*axes_of(device))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs="+", choices=DEVICES, default=KERNEL_DEVICES)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(KERNEL_CASES))
    parser.add_argument("--json", action="store_true", help="one JSON object per line instead of a table")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--lower", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        device, dump = arguments.worker
        mesh = mesh_of(device)

        def look(name: str) -> dict[str, Any]:
            if arguments.lower:
                return lower_on_tpu(mesh, dump, CASES[name])
            if name in DRAW_CASES:
                return compile_draw(mesh, CASES[name])
            return compile_on_tpu(mesh, Path(dump), CASES[name])

        return print_figures(arguments.cases, look)
    if not can_compile():
        sys.exit('libtpu is not installed: pip install "jaxinfer[aot]"')
    memory = ("code_bytes", "temporary_bytes", "in_place", "copied_weights", "seconds", "processor_seconds")
    columns = (*memory, "bundles", "inner_bundles", "kernel_bundles", "spills", "inner_spills")
    if not arguments.json:
        print(f"{'device':8}{'case':28}" + "".join(f"{column:>18}" for column in columns))
    for device in arguments.devices:
        for name, figures in compile_for(device, arguments.cases).items():
            if arguments.json:
                print(json.dumps({"device": device, "case": name, **figures}), flush=True)
            else:
                cells = "".join(f"{figures.get(column, '')!s:>18}" for column in columns)
                print(f"{device:8}{name:28}{figures.get('error', cells)}", flush=True)


if __name__ == "__main__":
    main()
