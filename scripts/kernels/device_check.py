"""Checks the kernels on the device at hand, then measures them against what the device can do and against others'.

    python scripts/kernels/device_check.py [--json FILE] [--only check ...] [--small]

Run it in a clone on a machine with a GPU or TPU. It ends with 1 if a kernel is wrong or cannot run. Rates are fractions
of what a plain copy and a plain product reach in the same run, and of the data sheet where the device is known. "jax"
and "cudnn" are the paged attention of jax's Pallas folder and of NVIDIA; what is not there says why. On a CPU the
reference is all there is, and sizes are small.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from kernels_pallas.grouped_matmul import grouped_matmul  # noqa: E402
from kernels_pallas.latent_attention import latent_attention  # noqa: E402
from kernels_pallas.paged_attention import abstract_pages, paged_attention  # noqa: E402
from kernels_pallas.quantized_matmul import dequantize, pack_int4, quantized_matmul  # noqa: E402
from tests.kernels.grouped_matmul import oracle as grouped_oracle  # noqa: E402
from tests.kernels.latent_attention.oracle import as_keys, make_latent_call  # noqa: E402
from tests.kernels.paged_attention.oracle import (  # noqa: E402
    check_pages,
    expected_output,
    make_call,
    tree_of,
    tree_words,
)

# Bytes and floating-point operations per second of data sheets, by the device kind or its first words.
DATA_SHEETS = {
    "NVIDIA H200": (4.8e12, 989e12),
    "NVIDIA H100 80GB HBM3": (3.35e12, 989e12),
    "NVIDIA A100-SXM4-80GB": (2.04e12, 312e12),
    "NVIDIA L4": (3.0e11, 121e12),
    "TPU v5 lite": (8.19e11, 197e12),
    "TPU v6 lite": (1.64e12, 918e12),
    "TPU v5": (2.77e12, 459e12),
    "TPU v5p": (2.77e12, 459e12),
}
SECTIONS = ("check", "attention", "products", "experts")
TOLERANCE = 0.03  # weights and results are rounded to 8 bits of mantissa
HEADS = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
SMALL_HEADS = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64}
Record = dict[str, Any]


def kernel_of_platform() -> str:
    """Returns the name of the implementation of attention that is made for the device."""
    platform = jax.default_backend()
    return platform if platform in ("gpu", "tpu") else "reference"


def product_kernel(kernel: str) -> str:
    """Returns the implementation of quantized and grouped products beside that of attention: TPUs have no kernel."""
    return "reference" if kernel.startswith("tpu") else kernel


def layout_of(kernel: str) -> str:
    """Returns the layout of the pages that an implementation reads fastest."""
    return "cpu" if kernel == "reference" else kernel.partition("_")[0]


def native_dtype() -> Any:
    """Returns what the device multiplies fast."""
    return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16


class Check(NamedTuple):
    """A call of attention whose result is known."""

    lens: list[tuple[int, int]]  # queries and context of each row
    q_len: int | None = None
    sizes: Mapping[str, Any] = MappingProxyType({})
    options: Mapping[str, Any] = MappingProxyType({})
    parents: list[int] | None = None  # of each row's tokens, where they are a tree
    is_shared: bool = False  # keys and values are in the pages already
    is_second_layer: bool = False  # of a pool for two


SHORT = [(1, n) for n in (1, 31, 32, 33, 128, 0)]
# Several blocks for a row, and contexts that are split over the programs of a GPU.
LONG = [(1, n) for n in (2999, 1, 700, 0, 256, 2048, 513)]
CHUNKS = [(1, 1), (40, 100), (1, 65), (0, 0), (33, 33)]
LONG_CHUNKS = [(1, 2000), (40, 1500), (300, 300), (1, 65), (0, 0), (129, 2500), (1, 513)]
DRAFTS = [(5, 2000), (5, 5), (5, 700), (5, 33)]
SCALES = (np.array([0.02, 0.03], np.float32), np.array([0.03, 0.02], np.float32))
INT8 = {"page_dtype": jnp.int8, "scales": SCALES}
FP8 = {"page_dtype": jnp.float8_e4m3fn, "scales": SCALES}
WIDE = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 256}
FEW_KV = {"num_heads": 16, "num_kv_heads": 1, "head_dim": 128}
SINKS = {"sinks": np.linspace(-20, 20, SMALL_HEADS["num_heads"], dtype=np.float32)}
PADDED = {"num_padding": 5}
CHECKS = {
    "decode": Check(SHORT, 1),
    "decode, window, soft cap": Check(SHORT, 1, options={"window": 40, "softcap": 2.0}),
    "decode, long": Check(LONG, 1),
    "decode, long, window": Check(LONG, 1, options={"window": 600}),
    "decode, long, soft cap, sinks": Check(LONG, 1, options={"softcap": 2.0, **SINKS}),
    "decode, long, head_dim 256": Check(LONG, 1, WIDE),
    "decode, long, 16 heads on 1": Check(LONG, 1, FEW_KV),
    "decode, long, int8 pages": Check(LONG, 1, INT8),
    "decode, long, fp8 pages": Check(LONG, 1, FP8),
    "decode, shared pages": Check(LONG, 1, is_shared=True),
    "decode, second layer": Check(LONG, 1, is_second_layer=True),
    "verify": Check(DRAFTS, 5),
    "verify, window, sinks": Check(DRAFTS, 5, options={"window": 600, **SINKS}),
    "verify, a tree": Check(DRAFTS, 5, parents=[-1, 0, 0, 1, 2]),
    "mixed": Check(CHUNKS, sizes=PADDED),
    "mixed, long": Check(LONG_CHUNKS, sizes=PADDED),
    "mixed, long, window": Check(LONG_CHUNKS, sizes=PADDED, options={"window": 333}),
    "mixed, long, head_dim 128": Check(LONG_CHUNKS, sizes=PADDED | {"head_dim": 128}),
    "mixed, long, head_dim 256": Check(LONG_CHUNKS, sizes=PADDED | WIDE),
    "mixed, long, int8 pages": Check(LONG_CHUNKS, sizes=PADDED | INT8),
    "mixed, long, fp8 pages": Check(LONG_CHUNKS, sizes=PADDED | FP8),
    "mixed, shared pages": Check(LONG_CHUNKS, sizes=PADDED, is_shared=True),
    "mixed, second layer": Check(LONG_CHUNKS, sizes=PADDED, is_second_layer=True),
}
PAGES_OF_32 = 96  # of each row: 3,072 tokens


# DeepSeek-V3 has 128 heads, and 16 on each of eight devices.
LATENT_CHECKS = {
    "latents, decode, 16 heads": Check([(1, n) for n in (2999, 1, 700, 0, 513)], 1, {"num_heads": 16}),
    "latents, decode, 128 heads": Check([(1, n) for n in (700, 1, 0, 513)], 1, {"num_heads": 128}),
    "latents, mixed, 16 heads": Check([(1, 1500), (9, 600), (0, 0), (40, 40)], sizes={"num_heads": 16}),
    "latents, mixed, 128 heads": Check([(1, 65), (0, 0), (33, 33), (5, 80)], sizes={"num_heads": 128}),
}
# Rows of each expert, for each of the kernel's block sizes; the last rows belong to no expert.
ROWS_OF_EXPERTS = {"few rows": (3, 0, 18, 1), "some rows": (0, 150, 70, 1), "many rows": (700, 0, 31, 400)}
WEIGHTS_OF_EXPERTS: dict[str, Record] = {
    "bfloat16": {},
    "int8": {"bits": 8},
    "int4": {"bits": 4, "group_size": 128},
}
# Rows of a product by quantized weights.
ROWS_OF_PRODUCTS = (1, 16, 200)


def check_kernels(kernel: str | None = None) -> Iterator[Record]:
    """Compares kernels in bfloat16 with NumPy in float64: attention over poisoned pages, and products."""
    kernel = kernel or kernel_of_platform()
    errors: dict[str, Callable[[], float]] = {
        **{name: functools.partial(error_of, check, kernel) for name, check in CHECKS.items()},
        **{name: functools.partial(error_of_latents, check, kernel) for name, check in LATENT_CHECKS.items()},
        **{
            f"experts, {weights}, {rows}": functools.partial(error_of_experts, counts, options, kernel)
            for weights, options in WEIGHTS_OF_EXPERTS.items()
            for rows, counts in ROWS_OF_EXPERTS.items()
        },
        **{
            f"int{bits} x {rows} rows": functools.partial(error_of_product, bits, rows, kernel)
            for bits in (8, 4)
            for rows in ROWS_OF_PRODUCTS
        },
    }
    for name, error_of_case in errors.items():
        record: Record = {"section": "check", "case": name, "implementation": kernel}
        try:
            error = error_of_case()
            record |= {"error": error, "passes": error < TOLERANCE}
        except NotImplementedError as error:  # such as 8-bit floats on an A100
            record |= {"note": f"refused: {error}"}
        except Exception as error:  # a table with one line of trouble is worth more than a traceback
            record |= {"passes": False, "note": f"{type(error).__name__}: {str(error)[:200]}"}
        yield record


def error_of_latents(check: Check, kernel: str) -> float:
    """Returns how far off latent attention is at most; raises AssertionError where its pages are wrong."""
    sizes = {"latent_size": 512, "rotary_size": 64, "dtype": jnp.bfloat16, "page_size": 64, "table_width": 48}
    call = make_latent_call(check.lens, layout_of(kernel), **sizes, **check.sizes)
    attend = functools.partial(latent_attention, scale=0.06, q_len=check.q_len, implementation=kernel)
    out, pages = jax.jit(attend)(**call.arguments)
    expected = expected_output(call, 0.06)[..., : pages.latent_size]
    check_pages(call, as_keys(call.arguments["pages"]), as_keys(pages))
    return largest_error(out[: call.num_tokens], expected)


def error_of_experts(counts: tuple[int, ...], options: Record, kernel: str) -> float:
    """Returns how far off the grouped product is at most."""
    call, expected = grouped_oracle.make_call(counts, sum(counts) + 9, 512, 200, dtype=jnp.bfloat16, **options)
    multiply = functools.partial(grouped_matmul, implementation=product_kernel(kernel))
    return largest_error(jax.jit(multiply)(**call), expected)


def error_of_product(bits: int, rows: int, kernel: str) -> float:
    """Returns how far off the product by quantized weights is at most."""
    D, F, group_size = 512, 384, 128
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((rows, D)), jnp.bfloat16)
    limit = 2 ** (bits - 1)
    integers = rng.integers(-limit, limit, (F, D), np.int8)
    scales = rng.uniform(0.5, 1.5, (F, D // group_size)).astype(np.float32) / (limit * D**0.5)
    weights = pack_int4(jnp.asarray(integers), group_size) if bits == 4 else jnp.asarray(integers)
    multiply = functools.partial(quantized_matmul, implementation=product_kernel(kernel))
    wide = integers.astype(np.float64) * np.repeat(scales.astype(np.float64), group_size, axis=1)
    expected = np.asarray(x.astype(jnp.float32)).astype(np.float64) @ wide.T
    return largest_error(jax.jit(multiply)(x, weights, jnp.asarray(scales)), expected)


def largest_error(out: jax.Array, expected: np.ndarray) -> float:
    """Returns the largest difference; where NaN is expected, anything goes."""
    is_real = ~np.isnan(expected)
    return float(np.abs(np.asarray(out.astype(jnp.float32)) - expected)[is_real].max())


def error_of(check: Check, kernel: str) -> float:
    """Returns how far off a kernel's result is at most; raises AssertionError where its pages are wrong."""
    sizes = {
        **SMALL_HEADS,
        "layout": layout_of(kernel),
        "dtype": jnp.bfloat16,
        "page_size": 32,
        "table_width": PAGES_OF_32,
    }
    call = make_call(check.lens, **{**sizes, **check.sizes})
    trees = None
    if check.parents is not None:
        trees = [tree_of(check.parents)] * len(check.lens)
        call = call.with_options(tree_mask=tree_words(trees, call.num_tokens))
    if check.is_second_layer:
        pages = call.arguments["pages"]
        call.slots = [slots + pages.num_pages * pages.page_size for slots in call.slots]
        both = jax.tree.map(lambda a: jnp.concatenate([jnp.full_like(a, jnp.nan), a]), pages)
        call = call.with_options(pages=both, page_offset=jnp.int32(pages.num_pages))
    if check.is_shared:
        _, written = jax.jit(functools.partial(paged_attention, scale=0.125, implementation="reference"))(
            **call.arguments
        )
        call = call.with_options(k=None, v=None, pages=written)
    attend = functools.partial(paged_attention, scale=0.125, q_len=check.q_len, implementation=kernel, **check.options)
    out, pages = jax.jit(attend)(**call.arguments)
    expected = expected_output(call, 0.125, trees=trees, **check.options)
    check_pages(call, call.arguments["pages"], pages)
    return largest_error(out[: call.num_tokens], expected)


def seconds_of(function: Callable, *arguments: Any, repeats: int) -> float:
    """Returns the median time of a call; several are under way at once, so that launching hides behind computing."""
    jax.block_until_ready(function(*arguments))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        results = [function(*arguments) for _ in range(repeats)]
        jax.block_until_ready(results[-1])
        times.append((time.perf_counter() - start) / repeats)
    return statistics.median(times)


def timed(
    record: Record, function: Callable, *arguments: Any, repeats: int, size: float, unit: str, is_ours: bool = False
) -> Record:
    """Adds seconds and the rate at which `size` is worked off, or the reason why not, which for ours is a fault."""
    try:
        seconds = seconds_of(function, *arguments, repeats=repeats)
    except Exception as error:
        fault = {"passes": False} if is_ours else {}
        return {**record, "note": f"not available: {type(error).__name__}: {str(error)[:160]}", **fault}
    return {**record, "microseconds": round(seconds * 1e6, 1), unit: size / seconds}


def measure_device(is_small: bool) -> list[Record]:
    """A plain copy and a plain product: what the rest is measured by."""
    n, m = (2**22, 512) if is_small else (2**29, 8192)
    x, a = jnp.ones(n, native_dtype()), jnp.ones((m, m), native_dtype())
    copy: Record = {"section": "copy", "case": f"{x.nbytes / 2**20:.0f} MiB", "implementation": "xla"}
    product: Record = {"section": "product", "case": f"{m} x {m} x {m} {a.dtype}", "implementation": "xla"}
    return [
        timed(copy, jax.jit(lambda x: x + 1), x, repeats=8, size=2.0 * x.nbytes, unit="bytes_per_s"),
        timed(product, jax.jit(jnp.matmul), a, a, repeats=8, size=2.0 * m**3, unit="flops_per_s"),
    ]


def attention_arguments(layout: str, lens: list[tuple[int, int]], *, page_size: int, dtype: Any, heads: dict) -> dict:
    """A call over shuffled pages that hold all keys and values; no token is padding."""
    B, width = len(lens), -(-max(kv_len for _, kv_len in lens) // page_size)
    tables = np.random.default_rng(0).permutation(B * width).reshape(B, width).astype(np.int32)
    K, H, T = heads["num_kv_heads"], heads["head_dim"], sum(n for n, _ in lens)
    shapes = abstract_pages(B * width, page_size, K, H, dtype, layout)
    draw = jax.jit(jax.random.normal, static_argnums=(1, 2))
    return {
        "q": draw(jax.random.key(0), (T, heads["num_heads"], H), dtype),
        # A donated pool could not be given twice, so these are in it.
        "k": None,
        "v": None,
        "pages": jax.tree.map(lambda a: draw(jax.random.key(1), a.shape, a.dtype), shapes),
        "block_tables": jnp.asarray(tables),
        "kv_lens": jnp.asarray([kv_len for _, kv_len in lens], jnp.int32),
        "cu_q_lens": jnp.asarray(np.cumsum([0] + [n for n, _ in lens]), jnp.int32),
    }


def measure_attention(is_small: bool) -> Iterator[Record]:
    """Decode by bytes of context read, prefill by operations under the causal mask; each against the others."""
    kernel = kernel_of_platform()
    heads, dtype = SMALL_HEADS if is_small else HEADS, native_dtype()
    N, K, H = heads.values()
    decodes = [(2, 128)] if is_small else [(b, c) for b in (1, 8, 32, 64) for c in (256, 2048, 8192)]
    prefills = [64] if is_small else [512, 4096, 16384]
    cases: list[tuple[str, str, list, int | None, float, str]] = []
    for B, context in decodes:
        size = 2.0 * B * context * K * H * jnp.dtype(dtype).itemsize
        cases.append(("decode", f"{B} x {context}", [(1, context)] * B, 1, size, "bytes_per_s"))
    for length in prefills:
        size = 2.0 * N * H * length * (length + 1)
        cases.append(("prefill", str(length), [(length, length)], None, size, "flops_per_s"))
    for section, case, lens, q_len, size, unit in cases:
        arguments = attention_arguments(layout_of(kernel), lens, page_size=64, dtype=dtype, heads=heads)
        right = None
        for name in dict.fromkeys(("reference", kernel)):
            record = {"section": section, "case": case, "implementation": name}
            call = functools.partial(paged_attention, scale=H**-0.5, q_len=q_len, implementation=name)
            attend = jax.jit(lambda arguments, call=call: call(**arguments)[0])
            record = timed(record, attend, arguments, repeats=8, size=size, unit=unit, is_ours=True)
            if "note" not in record and name == "reference":
                right = attend(arguments).astype(jnp.float32)
            elif "note" not in record and right is not None:
                error = float(jnp.abs(attend(arguments).astype(jnp.float32) - right).max())
                record |= {"error": error, "passes": error < TOLERANCE}
            yield record
        for name, vendor in VENDORS[section].items():
            if jax.default_backend() == name.split()[0]:
                record = {"section": section, "case": case, "implementation": name}
                make = functools.partial(vendor, lens, N, K, H, dtype)
                yield vendor_record(record, make, size, unit)


def vendor_record(record: Record, make: Callable, size: float, unit: str) -> Record:
    try:
        function, arguments = make()
    except Exception as error:
        return {**record, "note": f"not available: {type(error).__name__}: {str(error)[:160]}"}
    return timed(record, jax.jit(function), *arguments, repeats=8, size=size, unit=unit)


def _vendor_pages(lens, K, H, dtype, page_size: int = 64):
    B, width = len(lens), -(-lens[0][1] // page_size)
    tables = jnp.asarray(np.random.default_rng(0).permutation(B * width).reshape(B, width), jnp.int32)
    # Two arrays: a cache would answer half of the reads of one.
    k, v = (jnp.full((K, B * width, page_size, H), x, dtype) for x in (1, 2))
    return k, v, tables, jnp.asarray([n for _, n in lens], jnp.int32)


def jax_gpu_decode(lens, N, K, H, dtype):
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention as attend

    k, v, tables, kv_lens = _vendor_pages(lens, K, H, dtype)
    splits = next(n for n in (16, 8, 4, 2, 1) if tables.shape[1] % n == 0)
    # More than 256 keys do not fit the shared memory of an H200.
    blocks = min(256 // k.shape[2], tables.shape[1] // splits)
    attend = functools.partial(attend, k_splits=splits, pages_per_compute_block=blocks)
    return attend, (jnp.ones((len(lens), N, H), dtype), k, v, tables, kv_lens)


def jax_tpu_decode(lens, N, K, H, dtype):
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention as attend

    k, v, tables, kv_lens = _vendor_pages(lens, K, H, dtype)
    attend = functools.partial(attend, pages_per_compute_block=min(8, tables.shape[1]))
    return attend, (jnp.ones((len(lens), N, H), dtype), k, v, kv_lens, tables)


def cudnn_decode(lens, N, K, H, dtype):
    # There is no public name for it.
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    *pages, tables, kv_lens = _vendor_pages(lens, K, H, dtype)
    (k, v), table = (a.transpose(1, 2, 0, 3) for a in pages), tables[:, None, :, None]
    attend = functools.partial(cudnn.paged_attention, scale=H**-0.5, mask_type=cudnn.MaskType.PADDING)
    q_lens = jnp.ones(len(lens), jnp.int32)
    return attend, (jnp.ones((len(lens), 1, N, H), dtype), k, v, q_lens, kv_lens, table, table)


def cudnn_prefill(lens, N, K, H, dtype):
    q, k = (jnp.ones((1, lens[0][0], heads, H), dtype) for heads in (N, K))
    return functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn"), (q, k, k)


VENDORS: dict[str, dict[str, Callable]] = {
    "decode": {"gpu jax": jax_gpu_decode, "gpu cudnn": cudnn_decode, "tpu jax": jax_tpu_decode},
    "prefill": {"gpu cudnn, not paged": cudnn_prefill},
}


def measure_products(is_small: bool) -> Iterator[Record]:
    """Group-wise int4 weights against the same product in floating point, by the bytes of the weights read."""
    D, F, g = (256, 128, 64) if is_small else (4096, 14336, 128)
    dtype = native_dtype()
    integers = jax.random.randint(jax.random.key(0), (F, D), -8, 8, jnp.int8)
    packed, scales = pack_int4(integers, g), jnp.full((F, D // g), 0.01, dtype)
    wide = dequantize(packed, scales, None, D).astype(dtype)
    for rows in (1, 16, 256):
        x = jnp.ones((rows, D), dtype)
        record: Record = {"section": "int4", "case": f"{rows} x {D} x {F}"}
        ours = jax.jit(functools.partial(quantized_matmul, zeros=None))
        plain = jax.jit(lambda x, w: jnp.einsum("td,fd->tf", x, w, preferred_element_type=jnp.float32).astype(x.dtype))
        measure = functools.partial(timed, repeats=8, unit="bytes_per_s")
        quantized = {**record, "implementation": "quantized"}
        yield measure(quantized, ours, x, packed, scales, size=float(packed.nbytes), is_ours=True)
        yield measure({**record, "implementation": "floating point"}, plain, x, wide, size=float(wide.nbytes))


def measure_experts(is_small: bool) -> Iterator[Record]:
    """Grouped products with the sizes of Qwen3-30B-A3B, against `jax.lax.ragged_dot`.

    Decode by the bytes of the weights of experts that have rows, prefill by operations.
    """
    E, F, D = (8, 128, 256) if is_small else (128, 768, 2048)
    dtype = native_dtype()
    rng = np.random.default_rng(0)
    integers = jnp.asarray(rng.integers(-8, 8, (E * F, D), np.int8))
    packed, scales = pack_int4(integers, 128).reshape(E, F, -1), jnp.full((E, F, D // 128), 0.01, jnp.float32)
    wide = integers.astype(dtype).reshape(E, F, D)
    transposed = wide.swapaxes(1, 2)  # as ragged_dot takes them
    for section, num_tokens in (("decode", 64), ("prefill", 64 if is_small else 2048)):
        R = 8 * num_tokens
        counts = rng.multinomial(R, [1 / E] * E).astype(np.int32)
        rows, on_device = jnp.ones((R, D), dtype), jnp.asarray(counts)
        calls: dict[str, tuple[Callable, tuple[jax.Array, ...]]] = {
            "grouped": (grouped_matmul, (rows, wide, on_device)),
            "grouped int4": (grouped_matmul, (rows, packed, on_device, scales)),
            "jax ragged_dot": (jax.lax.ragged_dot, (rows, transposed, on_device)),
        }
        for name, (function, arguments) in calls.items():
            record: Record = {"section": "experts", "case": f"{section}, {R} x {D} x {F}", "implementation": name}
            size, unit = float(arguments[1].nbytes * (counts > 0).mean()), "bytes_per_s"
            if section == "prefill":
                size, unit = 2.0 * R * D * F, "flops_per_s"
            is_ours = name.startswith("grouped")
            yield timed(record, jax.jit(function), *arguments, repeats=8, size=size, unit=unit, is_ours=is_ours)


def rates_of(plain: list[Record]) -> dict[str, tuple[float | None, float | None]]:
    """Returns by unit the rate of the plain copy or product, and that of the data sheet."""
    kind = jax.devices()[0].device_kind
    sheet = next((rates for name, rates in DATA_SHEETS.items() if f"{kind} ".startswith(f"{name} ")), (None, None))
    return {
        unit: (next((r[unit] for r in plain if r["section"] == section and unit in r), None), nominal)
        for unit, section, nominal in (("bytes_per_s", "copy", sheet[0]), ("flops_per_s", "product", sheet[1]))
    }


def add_fractions(record: Record, rates: dict[str, tuple[float | None, float | None]]) -> None:
    """Adds to a rate its fraction of the plain one of the run, and of the data sheet."""
    for unit, (plain, nominal) in rates.items():
        if unit in record:
            record["of_plain"] = round(record[unit] / plain, 3) if plain else None
            record["of_data_sheet"] = round(record[unit] / nominal, 3) if nominal else None


def print_record(record: Record) -> None:
    rates = [record.get("bytes_per_s", 0) / 1e9, record.get("flops_per_s", 0) / 1e12]
    cells = [f"{record.get('microseconds', '')!s:>10}", *(f"{rate:>10.1f}" if rate else " " * 10 for rate in rates)]
    fractions = [record.get(name) for name in ("of_plain", "of_data_sheet")]
    cells += [f"{'' if fraction is None else fraction!s:>10}" for fraction in fractions]
    verdict = {True: "  ok", False: "  WRONG", None: ""}[record.get("passes")]
    error = f"  off by {record['error']:.4f}" if "error" in record else ""
    note = f"  {record['note']}" if "note" in record else ""
    title = f"{record['section']:9}{record['case']:30}{record['implementation']:22}"
    print(f"{title}{''.join(cells)}{verdict}{error}{note}", flush=True)


def describe_device() -> Record:
    """Returns what figures of the device must be quoted with."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "platform_version": getattr(device.client, "platform_version", ""),
        "jax": jax.__version__,
        "jaxlib": version("jaxlib"),
        "date": datetime.now(UTC).date().isoformat(),
    }


def print_device(about: Record) -> None:
    print(" · ".join(str(value).splitlines()[0] for value in about.values() if value), flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, help="sections; all unless given")
    parser.add_argument("--small", action="store_true", help="sizes for a test; the rule on CPU")
    options = parser.parse_args(arguments)
    is_small = options.small or jax.default_backend() == "cpu"
    about = describe_device()
    print_device(about)
    columns = "".join(f"{name:>10}" for name in ("µs", "GB/s", "TFLOP/s", "of plain", "of sheet"))
    print(f"{'section':9}{'case':30}{'implementation':22}{columns}")
    plain = measure_device(is_small)
    measures = (lambda _: check_kernels(), measure_attention, measure_products, measure_experts)
    sections = dict(zip(SECTIONS, measures, strict=True))
    chosen = (record for name in options.only or SECTIONS for record in sections[name](is_small))
    rates, records = rates_of(plain), []
    for record in itertools.chain(plain, chosen):
        add_fractions(record, rates)
        print_record(record)
        records.append(record)
    if options.json:
        options.json.write_text(json.dumps({**about, "records": records}, indent=1) + "\n")
    return 0 if all(record.get("passes", True) for record in records) else 1


if __name__ == "__main__":
    sys.exit(main())
