"""The lines of the table: calls of kernels in the shapes that the engine runs, each with its bytes and operations."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.grouped_matmul import grouped_matmul
from kernels_pallas.packed_numbers import dequantize, pack_int4
from kernels_pallas.paged_attention import abstract_pages, paged_attention
from kernels_pallas.quantized_matmul import quantized_matmul
from scripts.kernels.named_calls import by_name
from scripts.kernels.on_device import peers
from scripts.kernels.on_device.device import kernel_of_platform, layout_of, native_dtype
from scripts.kernels.on_device.timer import Arguments

# A pure function and the arguments of its calls in turn.
Calls = tuple[Callable, Sequence[Arguments]]
OURS = "ours"


class Work(NamedTuple):
    """What a call cannot do without: bytes that it reads or writes, and floating-point operations."""

    num_bytes: float
    flops: float


class Line(NamedTuple):
    """A row of the table. `implementations` make the calls to time, ours under OURS.

    To make a line asks nothing of jax: the command lists all lines in a process that must not hold the device.
    """

    section: str
    case: str
    family: str  # of PREDICTIONS
    work: Work
    implementations: Mapping[str, Callable[[], Calls]]
    expected: Callable[[], Calls] | None = None  # the reference for the first of our calls
    peers: Mapping[str, Mapping[str, Callable[[], Calls]]] = MappingProxyType({})  # by platform

    @property
    def name(self) -> str:
        return f"{self.section}, {self.case}"


class Sizes(NamedTuple):
    """The sizes of all lines; their names say what they scale."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    decodes: tuple[tuple[int, int], ...]  # rows and context
    uneven: tuple[int, int, int]  # rows, the context of one of them, and of the others
    prefills: tuple[tuple[int, int], ...]  # new tokens and tokens before
    checked_bytes: float  # the reference judges calls that read no more
    product: tuple[int, int, int]  # D, F and channels of a group with one scale
    product_rows: tuple[int, ...]
    experts: tuple[int, int, int]  # E, F and D
    expert_tokens: tuple[int, int]  # of a decode step and of a prefill step
    copied: int  # numbers of the yardsticks
    multiplied: int  # rows of the yardstick's matrices
    cached_bytes: float  # what a device may hold beside its memory


# The heads and products of Llama 3 8B, the experts of Qwen3-30B-A3B.
FULL = Sizes(
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    page_size=128,
    decodes=tuple((rows, context) for context in (2048, 8192) for rows in (1, 8, 32, 64)),
    uneven=(64, 131072, 2048),
    prefills=(*((new, before) for new in (512, 2048) for before in (0, 8192, 32768)), (4096, 0), (16384, 0)),
    checked_bytes=3e8,
    product=(4096, 14336, 128),
    product_rows=(1, 16, 256),
    experts=(128, 768, 2048),
    expert_tokens=(64, 2048),
    copied=2**29,
    multiplied=8192,
    cached_bytes=1.5e8,
)
TINY = Sizes(
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    page_size=16,
    decodes=((2, 40),),
    uneven=(3, 90, 20),
    prefills=((8, 0), (8, 32)),
    checked_bytes=3e8,
    product=(64, 32, 32),
    product_rows=(1, 8),
    experts=(4, 16, 64),
    expert_tokens=(4, 16),
    copied=2**12,
    multiplied=64,
    cached_bytes=0,
)


def kernel_lines(sizes: Sizes) -> list[Line]:
    """Returns all lines of kernels; nothing is allocated before one of their implementations is called."""
    return [
        *yardstick_lines(sizes),
        *(attention_line(sizes, case) for case in attention_cases(sizes)),
        *product_lines(sizes),
        *expert_lines(sizes),
    ]


def yardstick_lines(sizes: Sizes) -> list[Line]:
    """Returns reading, copying, x + 1 and a product by plain XLA: what the device reaches beside its data sheet."""
    n, m = sizes.copied, sizes.multiplied
    num_bytes = 2.0 * n

    def numbers(function: Callable) -> Callable[[], Calls]:
        return lambda: (function, [(jnp.ones(n, jnp.bfloat16),)])

    def matrices() -> Calls:
        return jnp.matmul, [tuple(jnp.ones((m, m), native_dtype()) for _ in range(2))]

    streams = {
        "read": (1, lambda x: x.sum(dtype=jnp.float32)),
        "copy": (2, jnp.copy),
        "x + 1": (2, lambda x: x + 1),
    }
    size = f"{num_bytes / 2**20:,.0f} MiB" if num_bytes >= 2**20 else f"{num_bytes:,.0f} bytes"
    lines = [
        Line("yardstick", f"{name}, {size}", name, Work(times * num_bytes, 0.0), {"xla": numbers(function)})
        for name, (times, function) in streams.items()
    ]
    product = Work(6.0 * m * m, 2.0 * m**3)
    return [*lines, Line("yardstick", f"product, {m:,} x {m:,} x {m:,}", "product", product, {"xla": matrices})]


class AttentionCase(NamedTuple):
    """Rows of one call of attention: their new tokens, and their contexts with these."""

    family: str
    case: str
    lens: list[tuple[int, int]]
    q_len: int | None


def attention_cases(sizes: Sizes) -> list[AttentionCase]:
    """Returns decode steps with even and uneven rows, and prefill after contexts."""
    cases = [
        AttentionCase("decode", f"{rows} x {context:,}", [(1, context)] * rows, 1) for rows, context in sizes.decodes
    ]
    rows, long, short = sizes.uneven
    uneven = [(1, long), *[(1, short)] * (rows - 1)]
    cases.append(AttentionCase("uneven decode", f"1 x {long:,} and {rows - 1} x {short:,}", uneven, 1))
    for new, before in sizes.prefills:
        cases.append(AttentionCase("prefill", f"{new:,} tokens after {before:,}", [(new, before + new)], None))
    return cases


def attention_line(sizes: Sizes, attention: AttentionCase) -> Line:
    """Returns one call of paged attention."""
    (family, case, lens, q_len) = attention
    N, K, H = sizes.num_heads, sizes.num_kv_heads, sizes.head_dim
    num_keys, num_queries = sum(kv_len for _, kv_len in lens), sum(new for new, _ in lens)
    pairs = sum(new * (kv_len - new) + new * (new + 1) / 2 for new, kv_len in lens)
    work = Work(2.0 * (2 * num_keys * K * H + 2 * num_queries * N * H), 4.0 * N * H * pairs)

    def calls(name: str, num_sets: int) -> Calls:
        arguments = attention_arguments(sizes, lens, num_sets)
        attend = functools.partial(by_name(paged_attention), scale=H**-0.5, q_len=q_len, implementation=name)
        return lambda arguments: attend(**arguments)[0], [(one,) for one in arguments]

    def ours() -> Calls:
        return calls(kernel_of_platform(), num_sets_of(sizes, work))

    others = {
        platform: {name: functools.partial(make, lens, N, K, H) for name, make in makes.items()}
        for platform, makes in peers.of_attention(family, lens).items()
    }
    is_checked = work.num_bytes <= sizes.checked_bytes
    expected = functools.partial(calls, "reference", 1) if is_checked else None
    return Line("attention", f"{family}, {case}", family, work, {OURS: ours}, expected, others)


def error_of(function: Callable, arguments: Arguments, expected: Callable[[], Calls]) -> float:
    """Returns the largest difference between a call and the reference for it."""
    reference, (same, *_) = expected()
    out, right = (jax.jit(f)(*given).astype(jnp.float32) for f, given in ((function, arguments), (reference, same)))
    return float(jnp.abs(out - right).max())


def num_sets_of(sizes: Sizes, work: Work) -> int:
    """Returns how many calls read more than the caches hold: one to four."""
    return min(max(math.ceil(sizes.cached_bytes / work.num_bytes), 1), 4)


def attention_arguments(sizes: Sizes, lens: list[tuple[int, int]], num_sets: int) -> list[dict[str, Any]]:
    """Returns calls over one pool of shuffled pages with all keys and values; no page is in two calls."""
    B, K, H = len(lens), sizes.num_kv_heads, sizes.head_dim
    page_size, widths = sizes.page_size, [-(-kv_len // sizes.page_size) for _, kv_len in lens]
    T, num_pages, dtype = sum(n for n, _ in lens), num_sets * sum(widths), native_dtype()
    ids = iter(np.random.default_rng(0).permutation(num_pages).astype(np.int32))
    draw = jax.jit(jax.random.normal, static_argnums=(1, 2))
    shapes = abstract_pages(num_pages, page_size, K, H, dtype, layout_of(kernel_of_platform()))
    pages = jax.tree.map(lambda a: draw(jax.random.key(1), a.shape, a.dtype), shapes)
    common = {
        "q": draw(jax.random.key(0), (T, sizes.num_heads, H), dtype),
        # A donated pool could not be given twice, so these are in it.
        "k": None,
        "v": None,
        "pages": pages,
        "kv_lens": jnp.asarray([kv_len for _, kv_len in lens], jnp.int32),
        "cu_q_lens": jnp.asarray(np.cumsum([0] + [n for n, _ in lens]), jnp.int32),
    }
    calls = []
    for _ in range(num_sets):
        tables = np.zeros((B, max(widths)), np.int32)
        for row, width in zip(tables, widths, strict=True):
            row[:width] = [next(ids) for _ in range(width)]
        calls.append({**common, "block_tables": jnp.asarray(tables)})
    return calls


def product_lines(sizes: Sizes) -> list[Line]:
    """Returns products by int8 and int4 weights, beside the same product in floating point."""
    D, F, group_size = sizes.product
    lines = []
    for bits in (8, 4):
        for rows in sizes.product_rows:
            weight_bytes = F * D * bits / 8 + 2.0 * F * (D // group_size)
            work = Work(weight_bytes + 2.0 * rows * (D + F), 2.0 * rows * D * F)
            family = f"int{bits}, {'few' if rows <= 64 else 'many'} rows"
            implementations = {
                OURS: functools.partial(quantized_calls, sizes, bits, rows, num_sets_of(sizes, work)),
                "xla, floating point": functools.partial(plain_calls, sizes, rows),
            }
            lines.append(Line("product", f"int{bits}, {rows} x {D:,} x {F:,}", family, work, implementations))
    return lines


def quantized_weights(sizes: Sizes, bits: int, seed: int) -> tuple[jax.Array, jax.Array]:
    D, F, group_size = sizes.product
    limit = 2 ** (bits - 1)
    integers = jax.random.randint(jax.random.key(seed), (F, D), -limit, limit, jnp.int8)
    scales = jnp.full((F, D // group_size), 0.01, native_dtype())
    return (pack_int4(integers, group_size) if bits == 4 else integers), scales


def quantized_calls(sizes: Sizes, bits: int, rows: int, num_sets: int) -> Calls:
    x = jnp.ones((rows, sizes.product[0]), native_dtype())
    return quantized_matmul, [(x, *quantized_weights(sizes, bits, seed)) for seed in range(num_sets)]


def plain_calls(sizes: Sizes, rows: int) -> Calls:
    """Returns the product in floating point. Its weights are large enough for two copies to exceed a cache."""
    D, F, _ = sizes.product

    def multiply(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.einsum("td,fd->tf", x, w, preferred_element_type=jnp.float32).astype(x.dtype)

    x, draw = jnp.ones((rows, D), native_dtype()), jax.jit(jax.random.normal, static_argnums=(1, 2))
    return multiply, [(x, draw(jax.random.key(seed), (F, D), native_dtype())) for seed in range(2)]


def expert_lines(sizes: Sizes) -> list[Line]:
    """Returns grouped products of a decode and a prefill step, in floating point and int4, against `ragged_dot`."""
    E, F, D = sizes.experts
    lines = []
    for phase, num_tokens in zip(("decode", "prefill"), sizes.expert_tokens, strict=True):
        rows = 8 * num_tokens
        counts = np.random.default_rng(0).multinomial(rows, [1 / E] * E).astype(np.int32)
        for name, bits in (("bfloat16", 16), ("int4", 4)):
            weight_bytes = float((counts > 0).sum()) * F * D * bits / 8
            work = Work(weight_bytes + 2.0 * rows * (D + F), 2.0 * rows * D * F)
            implementations = {OURS: functools.partial(expert_calls, sizes, counts, bits)}
            if bits == 16:
                implementations["jax ragged_dot"] = functools.partial(ragged_dot_calls, sizes, counts)
            case = f"{phase}, {name}, {rows:,} x {D:,} x {F:,}"
            lines.append(Line("experts", case, f"experts, {phase}, {name}", work, implementations))
    return lines


def expert_calls(sizes: Sizes, counts: np.ndarray, bits: int) -> Calls:
    (E, F, D), dtype, group_size = sizes.experts, native_dtype(), min(128, sizes.experts[2] // 2)
    rows = jnp.ones((int(counts.sum()), D), dtype)
    integers = jax.random.randint(jax.random.key(0), (E * F, D), -8, 8, jnp.int8)
    scales = jnp.full((E, F, D // group_size), 0.01, jnp.float32)
    packed = pack_int4(integers, group_size).reshape(E, F, -1)
    if bits == 4:
        return grouped_matmul, [(rows, packed, jnp.asarray(counts), scales)]
    weights = dequantize(packed.reshape(E * F, -1), scales.reshape(E * F, -1), None, D)
    return grouped_matmul, [(rows, weights.astype(dtype).reshape(E, F, D), jnp.asarray(counts))]


def ragged_dot_calls(sizes: Sizes, counts: np.ndarray) -> Calls:
    _, ((rows, weights, on_device),) = expert_calls(sizes, counts, 16)
    return jax.lax.ragged_dot, [(rows, weights.swapaxes(1, 2), on_device)]
