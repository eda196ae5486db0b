"""Checks of every kernel against NumPy in float64: attention over poisoned pages, and products."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.exact_sums import exact_sums
from kernels_pallas.gpu_products import multiply
from kernels_pallas.grouped_matmul import grouped_matmul
from kernels_pallas.latent_attention import latent_attention
from kernels_pallas.packed_numbers import pack_int4
from kernels_pallas.paged_attention import AttentionCall, HeadOptions, append_products, paged_attention
from kernels_pallas.quantized_matmul import quantized_matmul
from scripts.kernels.named_calls import by_name
from scripts.kernels.on_device.device import Record, kernel_of_platform, layout_of, product_kernel
from tests.kernels.grouped_matmul import oracle as grouped_oracle
from tests.kernels.latent_attention.oracle import as_keys, make_latent_call
from tests.kernels.paged_attention.oracle import check_pages, expected_output, make_call, tree_of, tree_words

TOLERANCE = 0.03  # weights and results are rounded to 8 bits of mantissa
NOTHING: Mapping[str, Any] = MappingProxyType({})


class Check(NamedTuple):
    """A call of attention whose result is known."""

    lens: list[tuple[int, int]]  # queries and context of each row
    q_len: int | None = None
    sizes: Mapping[str, Any] = NOTHING
    options: Mapping[str, Any] = NOTHING
    parents: list[int] | None = None  # of each row's tokens, where they are a tree
    is_shared: bool = False  # keys and values are in the pages already
    is_second_layer: bool = False  # of a pool for two


SHORT = [(1, n) for n in (1, 31, 32, 33, 128, 0)]
# Several blocks for a row, and contexts that are split over the programs of a GPU.
LONG = [(1, n) for n in (2999, 1, 700, 0, 256, 2048, 513)]
# A row that takes longer than all others together.
ONE_LONG = [(1, 100), (1, 20_000), *[(1, n) for n in (0, 7, 513, 1, 64, 255)]]
CHUNKS = [(1, 1), (40, 100), (1, 65), (0, 0), (33, 33)]
LONG_CHUNKS = [(1, 2000), (40, 1500), (300, 300), (1, 65), (0, 0), (129, 2500), (1, 513)]
DRAFTS = [(5, 2000), (5, 5), (5, 700), (5, 33)]
HEADS = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64}
SCALES = (np.array([0.02, 0.03], np.float32), np.array([0.03, 0.02], np.float32))
INT8 = {"page_dtype": jnp.int8, "scales": SCALES}
FP8 = {"page_dtype": jnp.float8_e4m3fn, "scales": SCALES}
WIDE = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 256}
FEW_KV = {"num_heads": 16, "num_kv_heads": 1, "head_dim": 128}
SINKS = {"sinks": np.linspace(-20, 20, HEADS["num_heads"], dtype=np.float32)}
PADDED = {"num_padding": 5}
PAGE_SIZES = (16, 32, 64, 128, 256)
# Query heads of a KV head: of 71, as Falcon 7B has them, no tile is full.
GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 71)


def grouped_heads(group: int) -> dict[str, int]:
    return {"num_heads": group, "num_kv_heads": 1} if group > 8 else {"num_heads": 2 * group, "num_kv_heads": 2}


def group_checks() -> dict[str, Check]:
    """Returns decode and prefill for every number of query heads of a KV head; all page sizes take their turn."""
    checks = {}
    for i, group in enumerate(GROUPS):
        for name, lens, q_len, padding, page_size in (
            ("decode", LONG, 1, {}, PAGE_SIZES[i % len(PAGE_SIZES)]),
            ("mixed", CHUNKS, None, PADDED, PAGE_SIZES[(i + 2) % len(PAGE_SIZES)]),
        ):
            sizes = {**grouped_heads(group), **padding, "page_size": page_size}
            checks[f"{name}, groups of {group}, pages of {page_size}"] = Check(lens, q_len, sizes)
    return checks


CHECKS = {
    "decode": Check(SHORT, 1),
    "decode, window, soft cap": Check(SHORT, 1, {"page_size": 16}, {"window": 40, "softcap": 2.0}),
    "decode, long": Check(LONG, 1),
    "decode, long, window": Check(LONG, 1, {"page_size": 128}, {"window": 600}),
    "decode, long, soft cap, sinks": Check(LONG, 1, options={"softcap": 2.0, **SINKS}),
    "decode, long, head_dim 256": Check(LONG, 1, WIDE),
    "decode, long, 16 heads on 1": Check(LONG, 1, FEW_KV),
    "decode, long, int8 pages": Check(LONG, 1, INT8 | {"page_size": 64}),
    "decode, long, fp8 pages": Check(LONG, 1, FP8 | {"page_size": 128}),
    "decode, one long row": Check(ONE_LONG, 1, {"page_size": 128}),
    "decode, shared pages": Check(LONG, 1, is_shared=True),
    "decode, second layer": Check(LONG, 1, is_second_layer=True),
    "verify": Check(DRAFTS, 5),
    "verify, window, sinks": Check(DRAFTS, 5, {"page_size": 128}, {"window": 600, **SINKS}),
    "verify, a tree": Check(DRAFTS, 5, parents=[-1, 0, 0, 1, 2]),
    "mixed": Check(CHUNKS, sizes=PADDED),
    "mixed, long": Check(LONG_CHUNKS, sizes=PADDED),
    "mixed, long, window": Check(LONG_CHUNKS, sizes=PADDED | {"page_size": 128}, options={"window": 333}),
    "mixed, long, head_dim 128": Check(LONG_CHUNKS, sizes=PADDED | {"head_dim": 128, "page_size": 256}),
    "mixed, long, head_dim 256": Check(LONG_CHUNKS, sizes=PADDED | WIDE | {"page_size": 16}),
    "mixed, long, int8 pages": Check(LONG_CHUNKS, sizes=PADDED | INT8 | {"page_size": 128}),
    "mixed, long, fp8 pages": Check(LONG_CHUNKS, sizes=PADDED | FP8),
    "mixed, shared pages": Check(LONG_CHUNKS, sizes=PADDED, is_shared=True),
    "mixed, second layer": Check(LONG_CHUNKS, sizes=PADDED, is_second_layer=True),
    **group_checks(),
}
# DeepSeek-V3 has 128 heads, and 16 on each of eight devices.
LATENT_CHECKS = {
    "latents, decode, 16 heads": Check([(1, n) for n in (2999, 1, 700, 0, 513)], 1, {"num_heads": 16}),
    "latents, decode, 128 heads": Check([(1, n) for n in (700, 1, 0, 513)], 1, {"num_heads": 128, "page_size": 128}),
    "latents, mixed, 16 heads": Check(
        [(1, 1500), (9, 600), (0, 0), (40, 40)], sizes={"num_heads": 16, "page_size": 128}
    ),
    "latents, mixed, 128 heads": Check([(1, 65), (0, 0), (33, 33), (5, 80)], sizes={"num_heads": 128}),
}
# Of the launch that norms, rotates and appends on a GPU: the first numbers of each head that are rotated.
APPEND_CHECKS = {
    "append products, decode": (Check(LONG, 1), 64),
    "append products, mixed, a part of each head": (Check(LONG_CHUNKS, sizes=PADDED | {"head_dim": 128}), 32),
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
# Parts, channels and inputs of weights in bfloat16, of which a GPU multiplies two parts to gate one by the other.
DENSE_WEIGHTS = {"by 4,096 x 4,096": (1, 4096, 4096), "by 1,024 x 2,048": (1, 1024, 2048), "gated": (2, 6144, 1024)}
# Rows that a row is computed among, if sums must be exact, beside itself alone.
EXACT_ROWS = (8, 64, 256, 2048)
# Rows that are compared: in each group of 8 rows, half of a tile, and in further tiles.
COMPARED_ROWS = (0, 5, 13, 40, 77, 130, 255, 2047)
# Contexts of tiny checks are a hundredth; one of each kind then stands for its kind.
TINY_KINDS = ("decode, long, int8 pages", "verify, a tree", "mixed, shared pages", "mixed, second layer")
TINY_GROUPS = ("decode, groups of 71, pages of 128", "mixed, groups of 3, pages of 256")


def all_checks(kernel: str | None = None, *, is_tiny: bool = False) -> dict[str, Callable[[], float]]:
    """Returns by name the functions that compare a kernel in bfloat16 with NumPy, and return the largest error."""
    kernel = kernel or kernel_of_platform()
    checks, latents, experts, rows_of_products = CHECKS, LATENT_CHECKS, ROWS_OF_EXPERTS, ROWS_OF_PRODUCTS
    if is_tiny:
        checks = {name: tiny(CHECKS[name]) for name in (*TINY_KINDS, *TINY_GROUPS)}
        latents = {name: tiny(check) for name, check in [*LATENT_CHECKS.items()][:1]}
        experts, rows_of_products = {"few rows": ROWS_OF_EXPERTS["few rows"]}, ROWS_OF_PRODUCTS[:1]
    is_gpu = kernel in ("gpu", "gpu_interpret")
    appends, dense = (APPEND_CHECKS, DENSE_WEIGHTS) if is_gpu else ({}, {})
    return {
        **{name: functools.partial(error_of_append, *case, kernel) for name, case in appends.items()},
        **{
            f"dense product {name} x {rows}": functools.partial(error_of_dense, sizes, rows, kernel)
            for name, sizes in dense.items()
            for rows in (1, 40, 256)
        },
        **{
            f"exact product {name}": functools.partial(rows_that_differ, sizes, EXACT_ROWS, kernel)
            for name, sizes in dense.items()
        },
        **{name: functools.partial(error_of, check, kernel) for name, check in checks.items()},
        **{name: functools.partial(error_of_latents, check, kernel) for name, check in latents.items()},
        **{
            f"experts, {weights}, {rows}": functools.partial(error_of_experts, counts, options, kernel)
            for weights, options in WEIGHTS_OF_EXPERTS.items()
            for rows, counts in experts.items()
        },
        **{
            f"int{bits} x {rows} rows": functools.partial(error_of_product, bits, rows, kernel)
            for bits in (8, 4)
            for rows in rows_of_products
        },
    }


def tiny(check: Check) -> Check:
    """Returns the same check of rows a hundredth as long, but of no fewer queries than a tree has."""
    least = len(check.parents or [1])
    lens = [(min(q, max(q // 100, least)), max(kv // 100, min(q, max(q // 100, least)))) for q, kv in check.lens]
    return check._replace(lens=[(q, kv if q and kv else 0) for q, kv in lens])


def run_check(name: str, error_of_case: Callable[[], float], kernel: str) -> Record:
    """Returns the record of one check: its error, the reason of a refusal, or the failure."""
    record: Record = {"section": "check", "case": name, "implementation": kernel}
    try:
        error = error_of_case()
        return record | {"error": error, "passes": error < TOLERANCE}
    except NotImplementedError as error:  # such as 8-bit floats on an A100
        return record | {"note": f"refused: {error}"}
    except Exception as error:  # a table with one line of trouble is worth more than a traceback
        return record | {"passes": False, "note": f"{type(error).__name__}: {str(error)[:200]}"}


def table_width(check: Check, page_size: int) -> int:
    """Returns a width that calls of equal pages share: room for the longest context, in steps of 1,024 tokens."""
    return -(-max(kv for _, kv in check.lens) // 1024) * 1024 // page_size


def error_of(check: Check, kernel: str) -> float:
    """Returns how far off a kernel's result is at most; raises AssertionError where its pages are wrong."""
    sizes = {**HEADS, "layout": layout_of(kernel), "dtype": jnp.bfloat16, "page_size": 32, **check.sizes}
    call = make_call(check.lens, table_width=table_width(check, sizes["page_size"]), **sizes)
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
        _, written = jax.jit(functools.partial(by_name(paged_attention), scale=0.125, implementation="reference"))(
            **call.arguments
        )
        call = call.with_options(k=None, v=None, pages=written)
    attend = functools.partial(
        by_name(paged_attention), scale=0.125, q_len=check.q_len, implementation=kernel, **check.options
    )
    out, pages = jax.jit(attend)(**call.arguments)
    expected = expected_output(call, 0.125, trees=trees, **check.options)
    check_pages(call, call.arguments["pages"], pages)
    return largest_error(out[: call.num_tokens], expected)


def error_of_append(check: Check, num_rotated: int, kernel: str) -> float:
    """Returns how far off queries, keys and values are at most that a GPU makes of products and appends.

    Raises AssertionError if it changes pages of others.
    """
    sizes = {**HEADS, "layout": layout_of(kernel), "dtype": jnp.bfloat16, "page_size": 32, **check.sizes}
    call, rng = (
        make_call(check.lens, table_width=table_width(check, sizes["page_size"]), **sizes),
        np.random.default_rng(0),
    )
    given, H = call.arguments, sizes["head_dim"]
    products = jnp.concatenate([given["q"], given["k"], given["v"]], axis=1)
    angles = rng.uniform(0, 2 * np.pi, (len(products), num_rotated // 2)).astype(np.float32)
    norms: dict[str, Any] = {name: jnp.asarray(rng.uniform(0.25, 1, H), jnp.bfloat16) for name in ("q_norm", "k_norm")}
    turns: dict[str, Any] = {"cos": jnp.asarray(np.cos(angles)[:, None]), "sin": jnp.asarray(np.sin(angles)[:, None])}
    rows = {name: given[name] for name in ("block_tables", "kv_lens", "cu_q_lens")}
    record = AttentionCall(**rows, q_len=check.q_len, implementation=kernel, scale=1.0)
    heads = HeadOptions(**norms, **turns, epsilon=1e-6)

    q, pages = jax.jit(functools.partial(append_products))(products[:, None], given["pages"], record, heads)

    def expected(raw: jax.Array, norm: jax.Array) -> np.ndarray:
        x, weight, R = np.asarray(raw, np.float64), np.asarray(norm, np.float64), num_rotated
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight
        numbers = x[..., : R // 2] + 1j * x[..., R // 2 : R]
        turned = numbers * np.exp(1j * angles.astype(np.float64))[:, None]
        return np.concatenate([turned.real, turned.imag, x[..., R:]], -1)

    counts = [min(q_len, kv_len) for q_len, kv_len in check.lens]
    starts = np.asarray(given["cu_q_lens"])[:-1]
    tokens = np.concatenate([start + np.arange(count) for start, count in zip(starts, counts, strict=True)])
    slots = np.concatenate([own[len(own) - count :] for own, count in zip(call.slots, counts, strict=True)])
    k, v = (np.asarray(pool, np.float64).reshape(-1, *pool.shape[2:])[slots] for pool in pages.arrays)
    np.testing.assert_array_equal(v, np.asarray(given["v"], np.float64)[tokens])
    others = np.setdiff1d(np.arange(np.prod(pages.arrays[0].shape[:2])), slots)
    for old, new in zip(given["pages"].arrays, pages.arrays, strict=True):
        old, new = (np.asarray(pool, np.float32).reshape(-1, *pool.shape[2:])[others] for pool in (old, new))
        np.testing.assert_array_equal(new, old)
    wrong_q = largest_error(q[tokens], expected(given["q"], norms["q_norm"])[tokens])
    return max(wrong_q, largest_error(k, expected(given["k"], norms["k_norm"])[tokens]))


def error_of_dense(sizes: tuple[int, int, int], rows: int, kernel: str) -> float:
    """Returns how far off a dense product of random rows is at most."""
    (x, weights), (parts, *_) = random_operands(sizes, rows), sizes
    products = np.einsum("td,pfd->ptf", *(np.asarray(a, np.float64) for a in (x, weights)))
    expected = products[0] if parts == 1 else products[0] * products[1] / (1 + np.exp(-products[1]))
    return largest_error(dense_product(x, weights, kernel), expected)


def rows_that_differ(sizes: tuple[int, int, int], counts: tuple[int, ...], kernel: str) -> float:
    """Returns how many rows of exact products have other bits alone than among `counts` rows."""
    x, weights = random_operands(sizes, max(counts))
    with exact_sums(True):
        alone = {i: np.asarray(dense_product(x[i : i + 1], weights, kernel))[0] for i in COMPARED_ROWS if i < len(x)}
        together = [np.asarray(dense_product(x[:count], weights, kernel)) for count in counts]
    return float(sum((own != among[i]).any() for among in together for i, own in alone.items() if i < len(among)))


def random_operands(sizes: tuple[int, int, int], rows: int) -> tuple[jax.Array, jax.Array]:
    """Returns rows and weights in bfloat16 whose products are near 1."""
    rng, (*_, inputs) = np.random.default_rng(0), sizes
    x, weights = rng.standard_normal((rows, inputs)), rng.standard_normal(sizes) / inputs**0.5
    return jnp.asarray(x, jnp.bfloat16), jnp.asarray(weights, jnp.bfloat16)


def dense_product(x: jax.Array, weights: jax.Array, kernel: str) -> jax.Array:
    """Returns the product in float32, gated by the second part of the weights if they have two."""
    combine = None if len(weights) == 1 else _gated
    is_interpreted = kernel == "gpu_interpret"
    return jax.jit(lambda x, w: multiply(x, w, combine=combine, interpret=is_interpreted))(x, weights)


def _gated(up: jax.Array, gate: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


def error_of_latents(check: Check, kernel: str) -> float:
    """Returns how far off latent attention is at most; raises AssertionError where its pages are wrong."""
    sizes = {"latent_size": 512, "rotary_size": 64, "dtype": jnp.bfloat16, "page_size": 64, **check.sizes}
    width = table_width(check, sizes["page_size"])
    call = make_latent_call(check.lens, layout_of(kernel), table_width=width, **sizes)
    attend = functools.partial(by_name(latent_attention), scale=0.06, q_len=check.q_len, implementation=kernel)
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


def largest_error(out: Any, expected: np.ndarray) -> float:
    """Returns the largest difference; where NaN is expected, anything goes."""
    is_real = ~np.isnan(expected)
    return float(np.abs(np.asarray(out, np.float32) - expected)[is_real].max())
