"""Matrix products and sums on CPU in which the bits of a row do not depend on the rows beside it.

On CPU in float32 a token has the same logits, to the bit, in any batch, chunk, step and bucket. Each part of a step
keeps that by a rule of its own, and this is the list of them:

products          The library that multiplies matrices chooses its routine, and with it the order of each sum, by the
                  shape of the product. So every product that a token passes has ROW_BLOCK rows, whatever the step: more
                  rows are split into several products, fewer are padded with zeros. Another number of rows replaces
                  ROW_BLOCK only if `equal_row_counts` found the same bits with it on this machine.
                  All products of tokens go through the functions here: `rows_by_weights`, `rows_by_integers`,
                  `rows_by_packed` and `rows_by_matrices`; and `integers_by_integers`, whose sums are exact.
sums along a row  `row_sum` adds in a fixed tree.
exp               The compiler may give a maximum and the `exp` after it to a library, whose `exp` has other bits, if
                  the rows are many. `row_max` prevents it. Where the maximum has other uses the compiler does not.
softmax           Pages are added one by one from the first, and rescaled by powers of two, which is exact.
                  (`paged_attention.reference`)
product + number  A product of two numbers is rounded before something is added to it. The compiler may fuse them in
                  some loops, and keeps more bits then, also within its `exp` or `log`. `jaxinfer.xla_options`
                  forbids it on x86, and `fuses_products` says if it happens all the same. `rounded` prevents it in
                  places where it was seen, in any process.
all else          is computed element by element.

The first rule rests on two properties of products of one shape: a row has the same bits in each place among the
ROW_BLOCK rows, and however many products run side by side. `jaxinfer doctor` checks both on the machine at hand, and
repeats the trials. Trials are needed because the equal numbers differ from version to version: on a CPU with AVX-512,
products by weights [768, 768] have the bits of 8 rows at 2, 4, 16, 24 and 48 rows with jax 0.10.2, but not at 32 or 64;
with jax 0.12.0 at 24 and 32 rows, but not at 2, 4, 16, 48 or 64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.device import device_at_hand
from kernels_pallas.exact_sums import sum_rows, sums_are_exact
from kernels_pallas.packed_numbers import MAX_WIDENED, dequantize, in_turns, whole_zeros, wide_scales

# rows [batch..., n, A], operand -> [batch..., n, B]
Product = Callable[[jax.Array, jax.Array], jax.Array]
# rows [T, D], parts of weights of F channels, product by them when they are widened -> [T, F]
ProductByParts = Callable[[jax.Array, Any, Product], jax.Array]
# Names of the two forms of product, in traces of steps as well.
BY_WEIGHTS, BY_MATRICES = "rows_by_weights", "rows_by_matrices"
# Rows of a product. With fewer, prefill is slower; with more, decoding of a few requests is.
ROW_BLOCK = 8
# Numbers of rows that are tried for weights. With jax 0.10.2 an Intel Xeon with AMX has the bits of 8 rows at up to 24
# rows, and where the remainder by 32 is from 8 to 16; CPUs of AMD have them at 32 as well.
WEIGHT_ROWS = (4, 16, 24, 32, 48, 136, 176)
# Rows that take as long as reading the weights of a product: 10 to 20 on that Xeon, 5 on an AMD EPYC with AVX-512.
ROWS_PER_READ = 15
# Rows of the blocks that multiply what is left of a step after its larger ones, at most.
MAX_SMALL_BLOCK = 24
# Elements of the smallest weights for which they are tried: below, the trial takes longer than it can save.
MIN_TRIED_WEIGHTS = 2**17
# Elements of the largest operand that is tried (256 MB in float32).
MAX_TRIED = 2**26
# Products by matrices that a trial runs side by side; steps do so with the pages of several rows and KV heads.
NUM_TRIED_TOGETHER = 8
# Output channels whose integers are widened at once, in pairs of blocks that run side by side. A block in float32 stays
# in the cache of its core. Products of 8 rows took as long with blocks of 256, and a quarter longer with blocks of 64.
CHANNEL_BLOCK = 128
# Output channels whose packed numbers a CPU unpacks to bytes, and their scales to float32, before it widens them. As
# the channels of one turn they would be unpacked one number at a time, because the compiler would join both loops.
CHANNELS_PREPARED = 4 * CHANNEL_BLOCK
# How many numbers the operands of a trial repeat: a prime, so that rows of an operand begin at different ones.
NUM_TRIAL_NUMBERS = 65_521


def rounded(x: jax.Array) -> jax.Array:
    """Returns x, a product of numbers that something is added to, as rounded to its dtype; -inf becomes the least.

    An operation between the two keeps the compiler of a CPU from fusing them. It removes barriers before it fuses, and
    operations that change no number.
    """
    return jnp.maximum(x, jnp.finfo(x.dtype).min)


@functools.cache
def fuses_products() -> bool:
    """Returns whether the compiler for this CPU adds to a product before it is rounded."""
    x, y, z = np.random.default_rng(0).standard_normal((3, 1024), np.float32)
    with jax.ensure_compile_time_eval():
        return not np.array_equal(jax.jit(lambda x, y, z: x * y + z)(x, y, z), x * y + z)


def zero_after(x: jax.Array) -> jax.Array:
    """Returns a zero [] of the dtype of x that the compiler can compute only after x [T, D].

    Without it a step on CPU computes what needs no tokens, such as zeros to begin a loop with, for all layers at once
    and keeps it until its layer comes.
    """
    return jnp.where(x[0, 0] < -jnp.inf, x[0, 0], 0)


def rows_by_weights(
    x: jax.Array, w: jax.Array, num_rows: jax.Array | None = None, *, is_split: bool = False, dtype: Any = jnp.float32
) -> jax.Array:
    """Returns x wᵀ [T, F] for x [T, D] and weights [F, D]: on CPU in blocks of rows, elsewhere in one product.

    It is added up in float32, and written in `dtype`. If num_rows i32[] is given, only that many rows of x matter, and
    on CPU blocks of nothing but padding are skipped. `is_split`: the compiler may split the weights over devices. Then
    blocks have ROW_BLOCK rows, for a trial of the whole weights says nothing about their parts.
    """
    T, (F, D) = x.shape[0], w.shape
    counts = {ROW_BLOCK}
    if F * D >= MIN_TRIED_WEIGHTS and not is_split:
        counts |= equal_row_counts(BY_WEIGHTS, WEIGHT_ROWS, D, F, x.dtype)
    block = min(sorted(counts), key=lambda count: -(-T // count) * (count + ROWS_PER_READ))
    small = max(count for count in counts if count <= MAX_SMALL_BLOCK)
    blocks = (block, small) if block > 2 * small else (block, block)
    return _rows_by_weights(x, w, jnp.asarray(T) if num_rows is None else num_rows, blocks, jnp.dtype(dtype))


# Loops whose length is known late have no derivative, so those of all products are stated.
@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _rows_by_weights(x: jax.Array, w: jax.Array, num_rows: jax.Array, blocks: tuple[int, int], dtype: Any) -> jax.Array:
    return jax.lax.platform_dependent(
        *(x, w, num_rows),
        cpu=lambda x, w, num_rows: _by_weights_in_blocks(x, w, num_rows, blocks=blocks).astype(dtype),
        default=lambda x, w, _: _product_at_once(x, w, dtype),
    )


def _by_weights_derivative(_: Any, dtype: Any, operands: tuple[jax.Array, ...], change: jax.Array) -> tuple[Any, ...]:
    derivative = jax.vjp(functools.partial(_transposed_product, dtype=dtype), *operands)[1]
    return *derivative(change), None


_rows_by_weights.defvjp(
    lambda x, w, num_rows, *options: (_rows_by_weights(x, w, num_rows, *options), (x, w)), _by_weights_derivative
)


def rows_by_integers(
    x: jax.Array,
    values: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None = None,
    num_rows: jax.Array | None = None,
) -> jax.Array:
    """Returns x wᵀ f32[T, F] for x [T, D] and the integers and scales of w, on CPU in blocks of channels and of rows.

    `values` i8[F, D], i4[F, D] or i8[F, D / 2], `scales` and `zeros` are those of `quantized_matmul`; `num_rows` is
    that of `rows_by_weights`. A CPU widens a block of channels, multiplies all rows by it, and takes the next: the
    weights are never written out whole, which took ten times as long as the product. The compiler may fuse the widening
    with the product, which no trial would see, so that integers meet ROW_BLOCK rows alone.
    """
    parts = values, scales, zeros
    if zeros is not None and zeros.shape != scales.shape:
        return rows_by_packed(x, parts, _with_whole_zeros, _dequantized_pairs, num_rows)
    return _rows_by_parts(x, parts, jnp.asarray(x.shape[0]) if num_rows is None else num_rows, None)


def _with_whole_zeros(parts: Any) -> Any:
    values, scales, zeros = parts
    return values, scales, whole_zeros(zeros, scales.shape[1])


def _dequantized_pairs(parts: Any) -> jax.Array:
    """Returns the weights f32[F, D] of integers two to a byte."""
    values, scales, zeros = parts
    return dequantize(values, scales, zeros, 2 * values.shape[1])


def rows_by_packed(
    x: jax.Array,
    parts: Any,
    prepare: Callable[[Any], Any],
    widen: Callable[[Any], jax.Array],
    num_rows: jax.Array | None = None,
) -> jax.Array:
    """Returns x wᵀ f32[T, F] for x [T, D] and packed weights: on CPU in blocks as by `rows_by_integers`.

    `parts` is a tree of arrays of the channels [F, ...]. `prepare` makes another of it, of which `widen` makes
    f32[F, D]: what it computes once for several weights, a CPU writes for some channels before it widens them. On an
    accelerator at most MAX_WIDENED weights are there in floating point at once.
    """
    options = (prepare, widen)
    return _rows_by_parts(x, parts, jnp.asarray(x.shape[0]) if num_rows is None else num_rows, options)


# The functions of `rows_by_packed`, None for integers, which need none.
Options = tuple[Callable[[Any], Any], Callable[[Any], jax.Array]] | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _rows_by_parts(x: jax.Array, parts: Any, num_rows: jax.Array, options: Options) -> jax.Array:
    def in_tiles(x: jax.Array, parts: Any, _: jax.Array) -> jax.Array:
        if options is None:
            return _by_parts(x, parts, _product_at_once, options)
        tile = max(MAX_WIDENED // x.shape[1], 1)
        return _in_turns(x, parts, tile, lambda own: _by_parts(x, own, _product_at_once, options))

    def in_blocks(x: jax.Array, parts: Any, num_rows: jax.Array) -> jax.Array:
        if options is None:
            return _by_parts_in_blocks(x, parts, num_rows, functools.partial(_by_parts, options=None))
        prepare, widen = options

        def by_prepared(x: jax.Array, own: Any, multiply: Product) -> jax.Array:
            return multiply(x, widen(own).astype(x.dtype))

        return _in_turns(
            x, parts, CHANNELS_PREPARED, lambda own: _by_parts_in_blocks(x, prepare(own), num_rows, by_prepared)
        )

    return jax.lax.platform_dependent(x, parts, num_rows, cpu=in_blocks, default=in_tiles)


def _by_parts_derivative(options: Options, operands: tuple[jax.Array, Any], change: jax.Array) -> tuple[Any, ...]:
    derivative = jax.vjp(lambda x, parts: _by_parts(x, parts, _transposed_product, options), *operands)[1]
    return *derivative(change), None


_rows_by_parts.defvjp(
    lambda x, parts, num_rows, options: (_rows_by_parts(x, parts, num_rows, options), (x, parts)), _by_parts_derivative
)


def integers_by_integers(x: jax.Array, w: jax.Array) -> jax.Array:
    """Returns x wᵀ i32[T, F] for x i8[T, D] and w i8[F, D], exact if D is at most 131,071.

    Sums of integers have the same bits in any order. On CPU the product has ROW_BLOCK rows at least: of one row,
    [4096, 4096] weights take 28 times as long (jax 0.10.2, an AMD EPYC).
    """

    def in_rows(x: jax.Array, w: jax.Array) -> jax.Array:
        return _product_of_integers(w, jnp.pad(x, ((0, max(0, ROW_BLOCK - x.shape[0])), (0, 0)))).T[: x.shape[0]]

    return jax.lax.platform_dependent(x, w, cpu=in_rows, default=_product_of_integers)


def _product_of_integers(x: jax.Array, y: jax.Array) -> jax.Array:
    return jax.lax.dot_general(x, y, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)


def rows_by_matrices(rows: jax.Array, matrices: jax.Array, *, is_computed: bool = False) -> jax.Array:
    """Returns rows [R, K, n, A] times matrices [R, K, A, B], f32[R, K, n, B]: on CPU in blocks, elsewhere at once.

    `is_computed`: the step makes the matrices, as of integers. The compiler may fuse that with the product, which no
    trial would see, so that they meet ROW_BLOCK rows alone.
    """
    n, (A, B) = max(rows.shape[2], 2), matrices.shape[2:]  # a single row is no product of matrices
    is_equal = not is_computed and equal_row_counts(BY_MATRICES, (n,), A, B, rows.dtype)
    return _rows_by_matrices(rows, matrices, n if is_equal else ROW_BLOCK)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _rows_by_matrices(rows: jax.Array, matrices: jax.Array, block: int) -> jax.Array:
    in_blocks = functools.partial(_by_matrices_in_blocks, block=block)
    return jax.lax.platform_dependent(rows, matrices, cpu=in_blocks, default=_by_matrices)


_rows_by_matrices.defvjp(
    lambda rows, matrices, block: (_rows_by_matrices(rows, matrices, block), (rows, matrices)),
    lambda block, operands, change: jax.vjp(_by_matrices, *operands)[1](change),
)


def _by_weights_in_blocks(x: jax.Array, w: jax.Array, num_rows: jax.Array, *, blocks: tuple[int, int]) -> jax.Array:
    """Multiplies the first num_rows of x in blocks of the first size, and what they leave in blocks of the second.

    blocks of 136 and 24:  10 rows -> 24;  150 rows -> 136 24;  250 rows -> 136 136, as four times 24 take longer
    """
    T, F = x.shape[0], w.shape[0]
    block, small = blocks

    def in_one(x: jax.Array) -> jax.Array:
        # Without a barrier, rows that fill a block may reach the product transposed, whose sums have another order:
        # seen in the queries of latent attention, on a CPU with AVX2. Rows of a padded block stay as they are.
        rows = jnp.pad(x, ((0, block - T), (0, 0))) if block > T else jax.lax.optimization_barrier(x)
        return _by_weights(rows, w)[:T]

    def add(y: jax.Array, block: int, first: jax.Array | int, num_blocks: jax.Array) -> jax.Array:
        # Products of few rows go two at a time: while one starts, the other runs.
        num_parts = 2 if block == ROW_BLOCK and T >= 2 * ROW_BLOCK else 1
        per_turn = num_parts * block

        def multiply(i: jax.Array, y: jax.Array) -> jax.Array:
            # A turn that would pass row T begins earlier, and computes some rows again.
            start = jnp.minimum(first + i * per_turn, T - per_turn)
            rows = jax.lax.optimization_barrier(jax.lax.dynamic_slice_in_dim(x, start, per_turn))
            parts = [_by_weights(rows[j : j + block], w) for j in range(0, per_turn, block)]
            return jax.lax.dynamic_update_slice_in_dim(y, jnp.concatenate(parts), start, axis=0)

        return jax.lax.fori_loop(0, -(-num_blocks // num_parts), multiply, y)

    if block >= T and block == small:
        return in_one(x)
    zeros = jnp.full((T, F), zero_after(x), jnp.float32)
    if block == small:
        return add(zeros, block, 0, -(-num_rows // block))
    left = num_rows % block
    takes_longer = -(-left // small) * (small + ROWS_PER_READ) > block + ROWS_PER_READ
    if block >= T:
        few = functools.partial(add, zeros, small, 0, -(-num_rows // small))
        return jax.lax.cond((num_rows == block) | takes_longer, in_one, lambda _: few(), x)
    num_blocks = num_rows // block + takes_longer.astype(jnp.int32)
    first = num_blocks * block
    y = add(zeros, block, 0, num_blocks)
    return add(y, small, first, -(-jnp.maximum(num_rows - first, 0) // small))


def _by_parts_in_blocks(x: jax.Array, parts: Any, num_rows: jax.Array, by_parts: ProductByParts) -> jax.Array:
    """Widens two blocks of channels a turn, and multiplies the first num_rows of x by them in blocks of rows."""

    def multiply(x: jax.Array, w: jax.Array) -> jax.Array:
        # Without the barrier each block of rows would widen the weights again.
        w = jax.lax.optimization_barrier(w)
        return _by_weights_in_blocks(x, w, num_rows, blocks=(ROW_BLOCK, ROW_BLOCK))

    def by_two_blocks(own: Any) -> jax.Array:
        num_channels = jax.tree.leaves(own)[0].shape[0]
        blocks = [slice(j, j + CHANNEL_BLOCK) for j in range(0, num_channels, CHANNEL_BLOCK)]
        results = [by_parts(x, jax.tree.map(lambda a, b=b: a[b], own), multiply) for b in blocks]
        return jnp.concatenate(results, axis=1)

    return _in_turns(x, parts, 2 * CHANNEL_BLOCK, by_two_blocks)


def _in_turns(x: jax.Array, parts: Any, per_turn: int, compute: Callable[[Any], jax.Array]) -> jax.Array:
    """Returns f32[T, F] as `in_turns` does, from zeros that the compiler makes after x [T, D]."""
    start = jnp.full((x.shape[0], jax.tree.leaves(parts)[0].shape[0]), zero_after(x), jnp.float32)
    return in_turns(start, parts, per_turn, compute)


def _by_parts(x: jax.Array, parts: Any, multiply: Product, options: Options) -> jax.Array:
    """Returns x wᵀ f32[T, F] by one call of `multiply` with weights in the dtype of x."""
    if options is None:
        values, scales, zeros = parts
        return _by_integers(x, values, scales, zeros, multiply)
    prepare, widen = options
    return multiply(x, widen(prepare(parts)).astype(x.dtype))


def _by_integers(
    x: jax.Array, values: jax.Array, scales: jax.Array, zeros: jax.Array | None, multiply: Product
) -> jax.Array:
    """Returns x wᵀ f32[T, F] by one call of `multiply` with weights in the dtype of x."""
    if scales.shape[1] == 1 and values.shape[1] == x.shape[1] and zeros is None:
        # bfloat16 holds the integers, and compilers fuse this.
        return multiply(x, values.astype(x.dtype)) * wide_scales(values, scales).T
    return multiply(x, dequantize(values, scales, zeros, x.shape[1]).astype(x.dtype))


def _by_matrices_in_blocks(rows: jax.Array, matrices: jax.Array, *, block: int) -> jax.Array:
    (R, K, n, A), B = rows.shape, matrices.shape[3]
    blocks = jnp.pad(rows, ((0, 0), (0, 0), (0, -n % block), (0, 0))).reshape(R, K, -1, block, A)
    if blocks.shape[2] == 1:
        return _by_matrices(blocks[:, :, 0], matrices)[:, :, :n]
    products = jax.lax.map(lambda block: _by_matrices(block, matrices), jnp.moveaxis(blocks, 2, 0))
    return jnp.moveaxis(products, 0, 2).reshape(R, K, -1, B)[:, :, :n]


@jax.named_scope(BY_WEIGHTS)
def _weights_by_rows(w: jax.Array, x: jax.Array) -> jax.Array:
    """Returns w xᵀ f32[F, rows] for a few rows of x.

    The weights are the left operand: they stream past the rows without being packed first. Against one product of all
    rows with x on the left, blocks of eight are 1.4 times as fast at 2 rows, 1.7 at 8 and 1.2 at 16; they take as long
    at 32 rows, and a quarter longer at 512 (jax 0.10.2, an AMD EPYC with AVX2).
    """
    # Without the barrier the compiler turns the operands round again.
    return jax.lax.optimization_barrier(_transposed_product(w, x))


def _transposed_product(x: jax.Array, y: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
    """Returns x yᵀ [m, n] for x [m, D] and y [n, D]."""
    return jax.lax.dot_general(x, y, (((1,), (1,)), ((), ())), preferred_element_type=dtype)


def _product_at_once(x: jax.Array, w: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
    """Returns x wᵀ [T, F] in one product. Before Ampere it has two rows or more: for one XLA widens all weights."""
    T = x.shape[0]
    if T == 1 and x.dtype == jnp.float16 and device_at_hand().is_before_ampere:
        x = jnp.pad(x, ((0, 1), (0, 0)))
    return _transposed_product(x, w, dtype)[:T]


def _by_weights(x: jax.Array, w: jax.Array) -> jax.Array:
    return _weights_by_rows(w, x).T


@jax.named_scope(BY_MATRICES)
def _by_matrices(rows: jax.Array, matrices: jax.Array) -> jax.Array:
    return jnp.einsum("rkna,rkab->rknb", rows, matrices, preferred_element_type=jnp.float32)


PRODUCTS: dict[str, Product] = {BY_WEIGHTS: _by_weights, BY_MATRICES: _by_matrices}


@functools.cache
def equal_row_counts(form: str, counts: tuple[int, ...], A: int, B: int, dtype: Any) -> frozenset[int]:
    """Returns those of `counts` for which products have the bits of products of ROW_BLOCK rows, on this machine.

    The products are computed and compared: `counts` rows of A numbers, by an operand that makes B of each. Returns none
    if the default device is no CPU or the operand has more than MAX_TRIED elements.
    """
    if jax.default_backend() != "cpu" or A * B > MAX_TRIED:
        return frozenset()
    rows, operand = trial_operands(form, -(-max(counts) // ROW_BLOCK) * ROW_BLOCK, A, B, dtype)
    # The caller may be under a trace of its own.
    with jax.ensure_compile_time_eval():
        starts, operand = range(0, rows.shape[-2], ROW_BLOCK), jnp.asarray(operand)
        blocks = [np.asarray(multiply(rows[..., i : i + ROW_BLOCK, :], operand, form=form)) for i in starts]
        expected = np.concatenate(blocks, axis=-2)
        tried = [rows[..., :n, :] for n in counts]
        products = multiply_each(tried, operand, form=form)

        def is_equal(rows: np.ndarray, product: Any) -> bool:
            wanted = expected[..., : rows.shape[-2], :]
            # Weights meet other numbers of rows in one product at a time.
            return np.array_equal(product, wanted) and (
                form == BY_WEIGHTS or is_equal_together(rows, operand, wanted, NUM_TRIED_TOGETHER, form=form)
            )

        return frozenset(n for n, part, y in zip(counts, tried, products, strict=True) if is_equal(part, y))


def is_equal_together(rows: np.ndarray, operand: jax.Array, expected: np.ndarray, count: int, *, form: str) -> bool:
    """Returns whether `count` products at once, the first of them of other rows, all have the expected bits."""
    many = np.stack([rows[..., ::-1, :], *[rows] * (count - 1)])
    return all(np.array_equal(y, expected) for y in np.asarray(_multiply_together(many, operand, form=form))[1:])


@functools.partial(jax.jit, static_argnames="form")
def multiply(rows: jax.Array, operand: jax.Array, *, form: str) -> jax.Array:
    """Returns rows times an operand in one product, compiled by itself."""
    return PRODUCTS[form](rows, operand)


@functools.partial(jax.jit, static_argnames="form")
def multiply_each(parts: Sequence[Any], operand: jax.Array, *, form: str) -> list[jax.Array]:
    """Returns each of several numbers of rows times one operand, all compiled together to save time."""
    return [PRODUCTS[form](rows, operand) for rows in parts]


@functools.partial(jax.jit, static_argnames="form")
def _multiply_together(rows: jax.Array, operand: jax.Array, *, form: str) -> jax.Array:
    """Returns the products of each of rows [count, ...] by one operand, side by side as steps compute them."""
    if form == BY_WEIGHTS:
        return jnp.stack([PRODUCTS[form](x, operand) for x in rows])
    return PRODUCTS[form](rows[:, 0], jnp.broadcast_to(operand, (rows.shape[0], *operand.shape[1:])))[:, None]


def trial_operands(form: str, num_rows: int, A: int, B: int, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns rows of A numbers, and an operand that makes B of each, as the product of this form takes them."""
    numbers = np.random.default_rng(0).standard_normal(NUM_TRIAL_NUMBERS).astype(dtype)
    row_shape, operand_shape = ((num_rows, A), (B, A)) if form == BY_WEIGHTS else ((1, 1, num_rows, A), (1, 1, A, B))
    return np.resize(numbers[::-1], row_shape), np.resize(numbers, operand_shape)


def row_sum(x: jax.Array) -> jax.Array:
    """Returns `x.sum(-1)`, on CPU added up in a fixed tree, so that a row has the same sum in any batch.

    There `x.sum(-1)` is vectorised differently with the number of rows, and then rounds differently. Elsewhere the tree
    would be written to memory level by level; a GPU has a kernel for it, which is used if sums must be exact.
    """
    return jax.lax.platform_dependent(x, cpu=_tree_sum, default=sum_rows if sums_are_exact() else lambda x: x.sum(-1))


def row_max(x: jax.Array) -> jax.Array:
    """Returns `x.max(-1)`, on CPU by `top_k`, which XLA does not fuse with later operations.

    The maximum is exact in any order; an `exp` after it is not. XLA gives a maximum over 4,096 numbers or more, and an
    `exp` after it, to a library with another `exp`, unless the maximum has other uses as well. jax 0.12.0 also
    vectorises an `exp` by the number of rows, if it fuses comparisons with it.
    """
    return jax.lax.platform_dependent(x, cpu=lambda x: jax.lax.top_k(x, 1)[0][..., 0], default=lambda x: x.max(-1))


def _tree_sum(x: jax.Array) -> jax.Array:
    """The row is halved and added elementwise, which leaves the compiler no order to choose."""
    while x.shape[-1] > 1:
        half, is_odd = divmod(x.shape[-1], 2)
        if is_odd:
            x = jnp.concatenate([x, jnp.zeros_like(x[..., :1])], axis=-1)
            half += 1
        x = x[..., :half] + x[..., half:]
    return x[..., 0]
