"""Compiles the GPU kernels and whole steps with the real CUDA compiler, without a GPU, and prints what they need.

    python scripts/kernels/compile_gpu.py [--devices A100 L4 H100 H200] [--cases decode step] [--json FILE]

Needs the extra `aot`. Every device has a process of its own, for a fatal compiler error ends one. It
prints for each case:

* what ptxas gives each Pallas kernel: registers and bytes spilled per thread,
* shared memory, and programs that fit on a multiprocessor at once,
* bytes beside arguments and results, and whether the cache is updated in place,
* launches, and seconds to lower and compile.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scripts.kernels.compilers import Case, compile_in_process, lower_case, on_mesh, print_figures, step_case
from scripts.kernels.figures import compile_on_gpu, gpu_mesh
from scripts.kernels.named_calls import by_name

DEVICES = ("A100", "L4", "H100", "H200")
# Several devices are written with their number; they compile steps alone. A T4 has no kernels, and cases of its own.
MESHES = (*DEVICES, "H200-8", "T4")
KERNELS = ("paged_attention", "append_products", "append_kv", "combine_parts", "hopper_prefill")
DECODE_ROWS = 64


def attention(
    mesh: Any,
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

    from kernels_pallas.paged_attention import abstract_pages
    from kernels_pallas.paged_attention.gpu.entry import paged_attention_gpu

    shape = jax.ShapeDtypeStruct
    page_dtype = page_dtype or dtype
    arrays = {
        "block_tables": shape((num_rows, max_context // page_size), jnp.int32),
        "kv_lens": shape((num_rows,), jnp.int32),
        "cu_q_lens": shape((num_rows + 1,), jnp.int32),
        "page_offset": shape((), jnp.int32),
    }
    has_scales = page_dtype == "int8"  # of each token, as an engine's caches have them
    if page_dtype != dtype and not has_scales:
        arrays |= {name: shape((num_kv_heads,), jnp.float32) for name in ("k_scale", "v_scale")}
    if has_tree:
        arrays["tree_mask"] = shape((num_tokens, 1), jnp.uint32)
    if has_sinks:
        arrays["sinks"] = shape((num_heads,), jnp.float32)
    sizes = 65536 // page_size, page_size, num_kv_heads, head_dim
    pages = abstract_pages(*sizes, page_dtype, "gpu", has_scales=has_scales)
    q, k = (shape((num_tokens, heads, head_dim), dtype) for heads in (num_heads, num_kv_heads))
    attend = functools.partial(by_name(paged_attention_gpu), scale=head_dim**-0.5, q_len=q_len, **options)
    arguments = on_mesh({"q": q, "k": k, "v": k, "pages": pages, **arrays}, mesh)
    return Case(jax.jit(attend, donate_argnames="pages"), arguments, arguments["pages"], KERNELS)


def products_of_heads(mesh: Any, *, q_len: int | None, num_tokens: int, num_rows: int, dtype: str = "bfloat16") -> Case:
    """The norms, rotation and append of a layer's products, of 32 heads over 8, before the attention of a step."""
    import jax
    import jax.numpy as jnp

    from kernels_pallas.paged_attention import AttentionCall, HeadOptions, abstract_pages, append_products

    shape = jax.ShapeDtypeStruct
    angles = dict.fromkeys(("cos", "sin"), shape((num_tokens, 1, 64), jnp.float32))
    norms = dict.fromkeys(("q_norm", "k_norm"), shape((128,), dtype))
    rows = {"block_tables": (num_rows, 512), "kv_lens": (num_rows,), "cu_q_lens": (num_rows + 1,), "page_offset": ()}
    arguments = {
        "products": shape((num_tokens, 1, 32 + 2 * 8, 128), dtype),
        "pages": abstract_pages(4096, 16, 8, 128, dtype, "gpu"),
        "call": {name: shape(sizes, jnp.int32) for name, sizes in rows.items()},
        "heads": {**angles, **norms},
    }

    def append(products: Any, pages: Any, call: Any, heads: Any) -> Any:
        record = AttentionCall(**call, q_len=q_len, scale=1.0)
        return append_products(products, pages, record, HeadOptions(**heads, epsilon=1e-6))

    arguments = on_mesh(arguments, mesh)
    return Case(jax.jit(append, donate_argnames="pages"), arguments, arguments["pages"], KERNELS)


def latents(
    mesh: Any,
    *,
    q_len: int | None,
    num_tokens: int,
    num_rows: int,
    num_heads: int = 128,
    dtype: str = "bfloat16",
    page_dtype: str | None = None,
) -> Case:
    """One call of latent attention with the sizes of DeepSeek-V3, over a pool with room for 64 Ki tokens."""
    import jax
    import jax.numpy as jnp

    from kernels_pallas.latent_attention import abstract_latents, latent_attention

    shape = jax.ShapeDtypeStruct
    arguments = {
        "q": shape((num_tokens, num_heads, 576), dtype),
        "latents": shape((num_tokens, 576), dtype),
        "pages": abstract_latents(1024, 64, 512, 64, page_dtype or dtype, "gpu", has_scales=page_dtype == "int8"),
        "block_tables": shape((num_rows, 128), jnp.int32),
        "kv_lens": shape((num_rows,), jnp.int32),
        "cu_q_lens": shape((num_rows + 1,), jnp.int32),
        "page_offset": shape((), jnp.int32),
    }
    attend = functools.partial(by_name(latent_attention), scale=0.1, q_len=q_len)
    arguments = on_mesh(arguments, mesh)
    return Case(jax.jit(attend, donate_argnames="pages"), arguments, arguments["pages"], KERNELS)


def product(
    mesh: Any,
    *,
    rows: int,
    bits: int = 4,
    group_size: int = 128,
    has_zeros: bool = False,
    is_fp8: bool = False,
    dtype: str = "bfloat16",
    is_plain: bool = False,
) -> Case:
    """A product with 14,336 x 4,096 quantized weights; `is_plain` makes them floating point before, as XLA would."""
    import jax
    import jax.numpy as jnp

    from kernels_pallas.gpu_products.product import MAX_GROUPED_ROWS
    from kernels_pallas.packed_numbers import dequantize
    from kernels_pallas.quantized_matmul import quantized_matmul

    T, D, F = rows, 4096, 14336
    shape = jax.ShapeDtypeStruct
    x, weights = shape((T, D), dtype), shape((F, D * bits // 8), jnp.int8)
    weights = shape((F, D), jnp.float8_e4m3fn) if is_fp8 else weights
    scales = shape((F, D // group_size), dtype)
    zeros = shape((F, scales.shape[1] * bits // 8), jnp.int8) if has_zeros else None

    def plain(x, weights, scales, zeros):
        w = dequantize(weights, scales, zeros, D).astype(x.dtype)
        return jnp.einsum("td,fd->tf", x, w, preferred_element_type=jnp.float32).astype(x.dtype)

    is_fused = group_size == D or rows > MAX_GROUPED_ROWS
    kernels = () if is_plain or is_fused else ("packed_product",)
    arguments = on_mesh({"x": x, "weights": weights, "scales": scales, "zeros": zeros}, mesh)
    function = jax.jit(plain if is_plain else quantized_matmul)
    return Case(function, arguments, kernels=kernels, num_rows=rows, itemsize=1)


def dense_product(
    mesh: Any, *, rows: int, sizes: tuple[int, int, int], dtype: str = "bfloat16", exact: bool = False
) -> Case:
    """A product of `sizes` (parts, channels, inputs), two parts being gate and up; weights of 8 bits have scales."""
    import jax
    import jax.numpy as jnp

    from kernels_pallas.exact_sums import exact_sums
    from kernels_pallas.gpu_products import multiply

    shape = jax.ShapeDtypeStruct
    scales = None if dtype == "bfloat16" else shape((*sizes[:2], 1), jnp.float32)
    arguments = {"x": shape((rows, sizes[2]), jnp.bfloat16), "weights": shape(sizes, dtype), "scales": scales}

    def gated(up: Any, gate: Any) -> Any:
        return jax.nn.silu(gate) * up

    def run(x: Any, weights: Any, scales: Any) -> Any:
        with exact_sums(exact):
            return multiply(x, weights, scales, dtype=x.dtype, combine=gated if sizes[0] == 2 else None)

    return Case(jax.jit(run), on_mesh(arguments, mesh), kernels=("dense_product", "packed_product"), num_rows=rows)


def experts(
    mesh: Any,
    *,
    rows: int,
    bits: int | None = None,
    group_size: int = 128,
    has_zeros: bool = False,
    is_fp4: bool = False,
    is_fp8: bool = False,
    dtype: str = "bfloat16",
    is_plain: bool = False,
) -> Case:
    """A grouped product with the sizes of Qwen3-30B-A3B, its 128 experts of 2,048 inputs and 768 channels.

    A token has 8 rows. Weights are in `dtype`, or integers of `bits` bits, FP4 or FP8; `is_plain` takes that of jax.
    """
    import jax
    import jax.numpy as jnp

    from kernels_pallas.grouped_matmul import grouped_matmul

    E, F, D = 128, 768, 2048
    shape = jax.ShapeDtypeStruct
    arguments = {
        "rows": shape((rows, D), dtype),
        "weights": shape((E, F, D), dtype) if bits is None else shape((E, F, D * bits // 8), jnp.int8),
        "counts": shape((E,), jnp.int32),
        "scales": None if bits is None else shape((E, F, D // group_size), jnp.float32),
    }
    if is_fp4:
        arguments |= {"weights": shape((E, F, D // 2), jnp.uint8), "scales": shape((E, F, D // group_size), jnp.uint8)}
    if is_fp8:
        arguments["weights"] = shape((E, F, D), jnp.float8_e4m3fn)
    if has_zeros:
        arguments["zeros"] = shape((E, F, D // group_size // 2), jnp.int8)
    multiply = functools.partial(grouped_matmul, implementation="reference") if is_plain else grouped_matmul
    kernels = () if is_plain else ("grouped_matmul",)
    itemsize = arguments["weights"].dtype.itemsize
    return Case(jax.jit(multiply), on_mesh(arguments, mesh), kernels=kernels, num_rows=rows, itemsize=itemsize)


# Over a pool of 256 Ki tokens, 34 GB.
step = functools.partial(step_case, layout="gpu", num_pages=16384, page_size=16, kernels=KERNELS)
decode = functools.partial(attention, q_len=1, num_tokens=DECODE_ROWS, num_rows=DECODE_ROWS)
verify = functools.partial(attention, q_len=8, num_tokens=128, num_rows=16)
prefill = functools.partial(attention, q_len=None, num_tokens=4096, num_rows=16)
decode_latents = functools.partial(latents, q_len=1, num_tokens=DECODE_ROWS, num_rows=DECODE_ROWS)
mosaic = functools.partial(prefill, prefill="mosaic")
LARGE_HEADS: dict[str, int] = {"head_dim": 512, "num_heads": 32, "num_kv_heads": 4}  # of Gemma 4
# Parts, channels and inputs of the weights of dense products: q with k and v, o, gate with up, and down, of Llama 3 8B
# and of Qwen3 0.6B; and the rows that they are compiled for, and tuned.
DENSE_WEIGHTS = (
    (1, 6144, 4096),
    (1, 4096, 4096),
    (2, 14336, 4096),
    (1, 4096, 14336),
    (1, 4096, 1024),
    (1, 1024, 2048),
    (2, 3072, 1024),
    (1, 1024, 3072),
)
DENSE_ROWS, EXACT_ROWS = (16, 64, 256), (8, 256, 2048)
WEIGHTS_OF_EXPERTS: dict[str, dict[str, Any]] = {
    "": {},
    "float32 ": {"dtype": "float32"},
    "int8 ": {"bits": 8, "group_size": 2048},
    "int4 ": {"bits": 4},
    "int4 less zero points ": {"bits": 4, "has_zeros": True},
    "MXFP4 ": {"bits": 4, "group_size": 32, "is_fp4": True},
    "FP8 ": {"bits": 8, "is_fp8": True},
}

CASES: dict[str, Callable[[Any], Case]] = {
    **{f"decode H={H}": functools.partial(decode, head_dim=H) for H in (64, 80, 96, 128, 256)},
    "decode append products": functools.partial(
        products_of_heads, q_len=1, num_tokens=DECODE_ROWS, num_rows=DECODE_ROWS
    ),
    "prefill append products": functools.partial(products_of_heads, q_len=None, num_tokens=4096, num_rows=16),
    "decode 2,048": functools.partial(decode, max_context=2048, page_size=128),
    "decode float16": functools.partial(decode, dtype="float16"),
    "decode int8 KV": functools.partial(decode, page_dtype="int8", page_size=64),
    "decode fp8 KV": functools.partial(decode, page_dtype="float8_e4m3fn", page_size=256),
    "decode split": functools.partial(decode, num_tokens=2, num_rows=2),
    "decode split G=1 window cap sinks": functools.partial(
        decode, num_tokens=2, num_rows=2, num_heads=8, window=4096, softcap=30.0, has_sinks=True
    ),
    "decode H=512": functools.partial(decode, **LARGE_HEADS),
    "decode split H=512": functools.partial(decode, num_tokens=2, num_rows=2, **LARGE_HEADS),
    "prefill H=512": functools.partial(prefill, **LARGE_HEADS),
    "verify": verify,
    "verify tree": functools.partial(verify, has_tree=True),
    **{f"prefill H={H}": functools.partial(prefill, head_dim=H) for H in (64, 80, 96, 128, 256)},
    "prefill int8 KV": functools.partial(prefill, page_dtype="int8", page_size=64),
    "prefill fp8 KV": functools.partial(prefill, page_dtype="float8_e4m3fn", page_size=64),
    "prefill window cap sinks": functools.partial(prefill, window=1024, softcap=30.0, has_sinks=True),
    "prefill tree": functools.partial(prefill, has_tree=True),
    **{f"mosaic prefill S={S}": functools.partial(mosaic, page_size=S) for S in (16, 32, 64, 128, 256)},
    "mosaic prefill H=64": functools.partial(mosaic, head_dim=64),
    "mosaic prefill float16": functools.partial(mosaic, dtype="float16"),
    "mosaic prefill cap sinks": functools.partial(mosaic, softcap=30.0, has_sinks=True),
    "mosaic prefill window cap sinks": functools.partial(mosaic, window=1024, softcap=30.0, has_sinks=True),
    "mosaic prefill H=64 S=256 window": functools.partial(mosaic, head_dim=64, page_size=256, window=1024),
    **{f"latents decode N={N}": functools.partial(decode_latents, num_heads=N) for N in (16, 128)},
    "latents prefill": functools.partial(latents, q_len=None, num_tokens=4096, num_rows=16),
    "latents decode int8": functools.partial(decode_latents, page_dtype="int8"),
    "latents prefill int8": functools.partial(latents, q_len=None, num_tokens=4096, num_rows=16, page_dtype="int8"),
    **{f"product int4 x {rows}": functools.partial(product, rows=rows) for rows in (1, 16, 64, 512)},
    "product int4 x 16 groups of 32 zeros": functools.partial(product, rows=16, group_size=32, has_zeros=True),
    "product int8 x 16": functools.partial(product, rows=16, bits=8),
    "product int8 x 64 zeros": functools.partial(product, rows=64, bits=8, has_zeros=True),
    **{f"product fp8 x {rows}": functools.partial(product, rows=rows, bits=8, is_fp8=True) for rows in (1, 64)},
    "plain product int4 x 16": functools.partial(product, rows=16, is_plain=True),
    "plain product int8 x 16": functools.partial(product, rows=16, bits=8, is_plain=True),
    "product int8 x 16 per channel": functools.partial(product, rows=16, bits=8, group_size=4096),
    **{
        f"dense {'x'.join(map(str, sizes))} x {rows}{name}": functools.partial(
            dense_product, rows=rows, sizes=sizes, dtype=dtype
        )
        for sizes in DENSE_WEIGHTS
        for name, dtype in (("", "bfloat16"), (" int8", "int8"), (" fp8", "float8_e4m3fn"))
        for rows in DENSE_ROWS
        if dtype == "bfloat16" or sizes == DENSE_WEIGHTS[2]
    },
    **{
        f"dense exact {'x'.join(map(str, sizes))} x {rows}": functools.partial(
            dense_product, rows=rows, sizes=sizes, exact=True
        )
        for sizes in DENSE_WEIGHTS
        for rows in EXACT_ROWS
    },
    **{
        f"experts {name}{step}": functools.partial(experts, rows=8 * num_tokens, **weights)
        for name, weights in WEIGHTS_OF_EXPERTS.items()
        for step, num_tokens in (("decode", DECODE_ROWS), ("prefill", 2048), ("long prefill", 8192))
    },
    "plain experts decode": functools.partial(experts, rows=8 * DECODE_ROWS, is_plain=True),
    "plain experts prefill": functools.partial(experts, rows=8 * 2048, is_plain=True),
    "step decode": functools.partial(step, step="decode_step", num_tokens=64, num_rows=64),
    "step decode int4 weights": functools.partial(
        step, step="decode_step", num_tokens=64, num_rows=64, quantization="int4"
    ),
    "step verify trees": functools.partial(step, step="verify_step", num_tokens=256, num_rows=32, tree_q_len=8),
    "step verify beside prefill": functools.partial(
        step, step="verify_step", num_tokens=2048, num_rows=16, mixed_q_len=4
    ),
    "step prefill": functools.partial(step, step="prefill_step", num_tokens=2048, num_rows=16),
    # `large_models` has the steps in bfloat16.
    "sparse step decode int4 weights": functools.partial(
        step,
        step="decode_step",
        model="Qwen3-30B-A3B",
        num_tokens=64,
        num_rows=64,
        quantization="int4",
        kernels=(*KERNELS, "grouped_matmul"),
    ),
}
# The decode steps and loops of an engine with the defaults of an H200.
BUCKET_ROWS, LOOP_STEPS = (1, 8, 64, 256), 4
_bucket = functools.partial(step, model="Qwen3-0.6B")
for _rows in BUCKET_ROWS:
    _sizes = {"num_tokens": _rows, "num_rows": _rows}
    CASES[f"bucket decode {_rows}"] = functools.partial(_bucket, step="decode_step", **_sizes)
    for _form in ("plain", "filtered") if _rows > 1 else ():
        CASES[f"bucket {_form} loop {_rows}"] = functools.partial(
            _bucket, step="decode_loop", loop_steps=LOOP_STEPS, form=_form, **_sizes
        )
CASES["bucket filtered loop 8 with sampling_log_probs"] = functools.partial(
    _bucket,
    step="decode_loop",
    loop_steps=LOOP_STEPS,
    form="filtered",
    sampling_log_probs=True,
    num_tokens=8,
    num_rows=8,
)
# Steps that add up in one order. Their rows are few and many, single tokens, chunks and drafts.
EXACT_STEPS: dict[str, dict[str, Any]] = {
    "decode 8": {"step": "decode_step", "num_tokens": 8, "num_rows": 8},
    "decode 256": {"step": "decode_step", "num_tokens": 256, "num_rows": 256, "form": "full", "max_log_probs": 20},
    "filtered loop 64": {
        "step": "decode_loop",
        "num_tokens": 64,
        "num_rows": 64,
        "loop_steps": LOOP_STEPS,
        "form": "filtered",
        "sampling_log_probs": True,
    },
    "verify": {"step": "verify_step", "num_tokens": 128, "num_rows": 16, "mixed_q_len": 4},
    "prefill 128": {"step": "prefill_step", "num_tokens": 128, "num_rows": 64},
    "prefill 512": {"step": "prefill_step", "num_tokens": 512, "num_rows": 16},
}
for _name, _sizes in EXACT_STEPS.items():
    CASES[f"exact {_name}"] = functools.partial(_bucket, exact=True, **_sizes)
# On a GPU before Ampere, over a pool of 64 Ki tokens, 7.5 GB.
_old = functools.partial(step, model="Qwen3-0.6B", num_pages=4096, dtype="float16")
_OF_8B: dict[str, Any] = {"model": "Llama-3-8B", "num_pages": 1024, "max_context": 2048}
CASES |= {
    f"old step decode {name}": functools.partial(_old, step="decode_step", num_tokens=rows, num_rows=rows, **options)
    for name, rows, options in (
        ("1 x 8,192", 1, {}),
        ("8 x 2,048", 8, {"max_context": 2048}),
        ("8 x 8,192", 8, {}),
        ("8 x 2,048 int8 weights", 8, {"max_context": 2048, "quantization": "int8"}),
        ("8 x 2,048 int4 weights", 8, {"max_context": 2048, "quantization": "int4"}),
        ("8 x 2,048 8B int8 weights", 8, {**_OF_8B, "quantization": "int8"}),
        ("8 x 2,048 8B int4 weights", 8, {**_OF_8B, "quantization": "int4"}),
    )
}
_old_product = functools.partial(product, dtype="float16")
CASES |= {
    f"old product {name} x {rows}": functools.partial(_old_product, rows=rows, **weights)
    for rows in (1, 8, 16, 512)
    for name, weights in (("int8", {"bits": 8, "group_size": 4096}), ("int4", {}), ("int4 zeros", {"has_zeros": True}))
}
CASES |= {
    "old step prefill": functools.partial(_old, step="prefill_step", num_tokens=2048, num_rows=1),
    "old latents decode": functools.partial(latents, q_len=1, num_tokens=2, num_rows=2, dtype="float16"),
    "old experts decode": functools.partial(experts, rows=64, dtype="float16"),
    "old experts int4 decode": functools.partial(experts, rows=64, bits=4, dtype="float16"),
}
# Refused there, with a reason; see kernels_pallas/triton.py.
NO_FP8 = ("A100",)


def can_compile() -> bool:
    """Returns whether the CUDA compiler is installed."""
    from kernels_pallas import gpu_compiler

    return gpu_compiler.is_available()


def compile_for(device: str, cases: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Compiles cases for a device in a process of their own; returns each one's figures, or {"error": …}."""
    return compile_in_process(__file__, [device], cases, {})


def lower_for(device: str, cases: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Lowers cases for a device; returns each one's `lower_case`, or {"error": …}."""
    return compile_in_process(__file__, [device, "--lower"], cases, {})


def cases_for(device: str, beginnings: Iterable[str] = ("",)) -> list[str]:
    """Returns the cases with names that begin so, less those that the device cannot do."""
    names = [name for name in CASES if name.startswith(tuple(beginnings))]
    names = [name for name in names if device == "H200" or "mosaic" not in name.split()]
    names = [name for name in names if (device == "T4") == name.startswith("old ")]
    return [name for name in names if not (device in NO_FP8 and "fp8" in name)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs="+", default=DEVICES, choices=MESHES)
    parser.add_argument("--cases", nargs="+", default=[""], help="names of cases, or how they begin")
    parser.add_argument("--json", action="store_true", help="one JSON object per line instead of a table")
    parser.add_argument("--worker", choices=MESHES, help=argparse.SUPPRESS)
    parser.add_argument("--lower", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        device = arguments.worker
        look = (
            functools.partial(lower_case, gpu_mesh(device))
            if arguments.lower
            else functools.partial(compile_on_gpu, device)
        )
        return print_figures(arguments.cases, lambda name: look(CASES[name]))
    if not can_compile():
        sys.exit('the CUDA compiler is not installed: pip install "jaxinfer[aot]"')
    program = ("temporary_bytes", "in_place", "num_launches", "seconds", "processor_seconds")
    kernel = ("name", "grid", "threads", "registers", "spill_bytes", "shared_bytes", "programs_per_core")
    if not arguments.json:
        print(f"{'device':8}{'case':38}" + "".join(f" {column:>17}" for column in (*program, *kernel)))
    for device in arguments.devices:
        for name, figures in compile_for(device, cases_for(device, arguments.cases)).items():
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
