"""What the TPU kernels compute with a block of keys and values once it is in the vector memory.

A piece is some rows of queries of one KV head and all keys of a block. It passes three stages: its scores, by the
matrix unit; their weights, by the vector units; the sum of values by these weights, by the matrix unit again. Pieces
follow each other one stage behind, so that both units always have work.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import SimpleNamespace

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.paged_attention.online_softmax import LOG2_E, MASKED
from kernels_pallas.paged_attention.tpu.items import LANES

# Keys of a piece. More of them spread the cost of what is done once per row and piece: reductions over lanes above all.
KEYS_TOGETHER = 512
# The most rows for which the scores of two pieces and what their softmax needs fit into the 64 registers.
MAX_ROWS_IN_REGISTERS = 32
# Of such small pieces, how many have their code side by side.
PIECES_TOGETHER = 8


def piece_width(block: int) -> int:
    """Returns how many keys of a block a piece has."""
    return block if block <= KEYS_TOGETHER else math.gcd(block, KEYS_TOGETHER)


def heads_together(num_kv_heads: int, block: int) -> int:
    """Returns how many KV heads with few rows have their code side by side; a loop goes over such groups."""
    most = max(1, PIECES_TOGETHER * piece_width(block) // block)
    return max(n for n in range(1, most + 1) if num_kv_heads % n == 0)


def attention_of_block(
    s: SimpleNamespace, *, window: int | None, softcap: float | None
) -> Callable[[jax.Array, jax.Array, jax.Array], None]:
    """Returns the function (item, block of its row, slot of the buffer) that adds the block to the item's sums.

    `s` holds the kernel's references. Per row of queries `maximum` is the greatest score so far, in every lane; `total`
    the sum of weights, spread over lanes; `acc` the weighted sum of values.
    """
    NB, _, block_tiles, tile, W = s.kv.shape
    K, R, V = s.acc.shape
    planes, block = s.kv.shape[1] // K, block_tiles * tile
    has_tree, has_offsets, has_scales = hasattr(s, "tree_hbm"), hasattr(s, "offsets"), hasattr(s, "scales")

    def visible(i, b, piece):
        """Which keys the rows of a piece see, bool[size, width]."""
        _, r, size, first, width = piece
        position = b * block + first + lax.broadcasted_iota(jnp.int32, (size, width), 1)
        if has_tree:
            draft = position - s.start[i]
            seen = draft < 0
            for w in range(s.tree.shape[1]):
                bits = _across(s.tree[lax.rem(i, NB), w, pl.ds(r, size)], width)
                is_here = (draft >= 32 * w) & (draft < 32 * (w + 1))
                bit = lax.shift_right_logical(bits, jnp.clip(draft - 32 * w, 0, 31)) & 1
                seen = seen | (is_here & (bit == 1))
            return seen & (position < s.end[i])
        # Rows past the item's last query see whatever finite numbers follow; their results are dropped.
        own = s.start[i] + (_across(s.offsets[pl.ds(r, size)], width) if has_offsets else 0)
        seen = position <= own
        return seen if window is None else seen & (position > own - window)

    def stored(slot, head, plane, first, width, lanes):
        """Keys (plane 0) or values (the last plane) first to first + width of a KV head in the block at `slot`."""
        tiles = s.kv[slot, head * planes + plane, pl.ds(first // tile, width // tile), :, :lanes]
        return _as_operand(tiles.reshape(width, lanes), s.q.dtype)

    def scales(piece, which):
        """Returns the scales f32[1, width] of the piece's keys (0) or values (1)."""
        head, _, _, first, width = piece
        return s.scale_rows[which, first // width, pl.ds(head, 1)]

    def score(i, slot, piece):
        """Returns the scores f32[size, width], in base 2, of all keys."""
        head, r, size, first, width = piece
        queries = s.q[lax.rem(i, s.q.shape[0]), head, pl.ds(r, size)]
        scores = _product(queries, stored(slot, head, 0, first, width, W), 1)
        scores = scores * (scales(piece, 0) if has_scales else s.factors[0, head])
        return scores if softcap is None else jnp.tanh(scores) * (softcap * LOG2_E)

    def score_visible(i, b, slot, piece):
        return jnp.where(visible(i, b, piece), score(i, slot, piece), MASKED)

    def raise_maximum(piece, greatest):
        """Returns the rows' maximum with scores of which `greatest` [size, LANES] is left, and the factor for sums."""
        head, r, size, _, _ = piece
        old = s.maximum[head, pl.ds(r, size)]
        maximum = jnp.maximum(old, greatest.max(1, keepdims=True))
        s.maximum[head, pl.ds(r, size)] = maximum
        return maximum, jnp.exp2(old - maximum)

    def weigh(piece, scores, greatest):
        """Returns the weights of a piece's keys, and what its rows' sums are multiplied by before they are added."""
        head, r, size, _, width = piece
        maximum, rescale = raise_maximum(piece, greatest)
        weights = jnp.exp2(scores - _across(maximum, width))
        s.total[head, pl.ds(r, size)] = rescale * s.total[head, pl.ds(r, size)] + _lane_sums(weights)
        if has_scales:
            weights = weights * scales(piece, 1)
        return weights.astype(s.q.dtype), rescale

    def add_values(slot, piece, weights, rescale):
        head, r, size, first, width = piece
        update = _product(weights, stored(slot, head, planes - 1, first, width, V), 0)
        s.acc[head, pl.ds(r, size)] = _across(rescale, V) * s.acc[head, pl.ds(r, size)] + update

    def attend_few_rows(i, b, slot):
        """Pieces of all rows, many heads' code side by side, for one alone would wait for every single result."""
        width = piece_width(block)
        num_chunks = block // width
        together = heads_together(K, block)

        def attend_heads(first_head):
            pieces = [(first_head + h, 0, R, c * width, width) for h in range(together) for c in range(num_chunks)]
            scores, weights = {}, {}
            for n in range(len(pieces) + 2):
                if n < len(pieces):
                    scores[n] = score_visible(i, b, slot, pieces[n])
                if 0 <= n - 1 < len(pieces):
                    x = scores.pop(n - 1)
                    weights[n - 1] = weigh(pieces[n - 1], x, _lane_maxima(x))
                if n >= 2:
                    add_values(slot, pieces[n - 2], *weights.pop(n - 2))

        if together == K:
            attend_heads(0)
        else:
            pl.loop(0, K // together)(lambda group: attend_heads(group * together))

    def attend_many_rows(slot, score):
        """One piece after another, each stage's result in memory: registers hold no more than a stage needs at once.

        A turn of the loop reads each of these memories before it writes it, for the next turn; so nothing in a turn
        waits for anything else in it.
        """
        size, width = s.scores.shape
        num_chunks = block // width
        num_pieces = R // size * num_chunks
        count = K * num_pieces

        def piece(n):
            n = jnp.clip(n, 0, count - 1)  # past the last one, scores are computed in vain
            rest = lax.rem(n, num_pieces)
            r = pl.multiple_of(rest // num_chunks * size, size)
            return n // num_pieces, r, size, pl.multiple_of(lax.rem(rest, num_chunks) * width, width), width

        def begin(n):
            scores = score(piece(n))
            s.scores[...], s.greatest[...] = scores, _lane_maxima(scores)

        def go_on(n):
            s.weights[...], s.rescale[...] = weigh(piece(n), s.scores[...], s.greatest[...])

        def finish(n):
            add_values(slot, piece(n), s.weights[...], s.rescale[...])

        def run(n):
            finish(n - 1)
            go_on(n)
            begin(n + 1)

        # The first turn has nothing to finish: it adds nothing. Stages beside the loop would be longer, and spill.
        s.weights[...], s.rescale[...] = jnp.zeros_like(s.weights), jnp.ones_like(s.rescale)
        begin(0)
        pl.loop(0, count)(run)
        finish(count - 1)

    def attend_block(i, b, slot):
        if not hasattr(s, "scores"):
            return attend_few_rows(i, b, slot)
        sees_all = (b + 1) * block <= s.start[i]
        if window is not None:
            sees_all &= b * block > s.end[i] - 1 - window
        pl.when(sees_all)(lambda: attend_many_rows(slot, functools.partial(score, i, slot)))
        pl.when(~sees_all)(lambda: attend_many_rows(slot, functools.partial(score_visible, i, b, slot)))

    return attend_block


def take_scales(s: SimpleNamespace, slot: jax.Array) -> None:
    """Puts the scales of the pages of the block at `slot` beside each other, a row of lanes for the keys of a piece.

    Those of keys are multiplied by the factor of scores, the same for all heads where tokens have scales.
    """
    (_, num_pieces, _, width), num_pages = s.scale_rows.shape, s.scales.shape[1]
    page = num_pieces * width // num_pages
    rows = jnp.concatenate([s.scales[slot, p][:, :, :page] for p in range(num_pages)], axis=-1)  # [2, K, block]
    for which, factor in enumerate((s.factors[0, 0], 1.0)):
        for n in range(num_pieces):
            s.scale_rows[which, n] = rows[which, :, n * width : (n + 1) * width] * factor


def reads_as_fn(dtype) -> bool:
    """Returns whether the chip multiplies float8_e4m3fn and not the float8_e4m3b11fnuz that is held, as TPU7x does."""
    return dtype == jnp.float8_e4m3b11fnuz and not _multiplies(dtype)


def _multiplies(dtype) -> bool:
    try:
        return pltpu.get_tpu_info().is_matmul_supported(jnp.bfloat16, dtype)
    except ValueError:  # interpreted, where there is no TPU
        return True


def _as_operand(x: jax.Array, dtype) -> jax.Array:
    """Returns what a product with `dtype` takes: the matrix unit's input stage converts float8, twice as fast."""
    if reads_as_fn(x.dtype):
        x = pltpu.bitcast(x, jnp.float8_e4m3fn)  # of the bits that mean something else, -0 and NaN, none was written
    return x if x.dtype.itemsize == 1 and jnp.issubdtype(x.dtype, jnp.floating) else x.astype(dtype)


def _product(x: jax.Array, y: jax.Array, axis: int) -> jax.Array:
    """Returns the sum over the last axis of x and `axis` of y, in float32; float32 operands are not rounded."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return lax.dot_general(x, y, (((1,), (axis,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)


def _across(x: jax.Array, width: int) -> jax.Array:
    """Returns x [n, LANES], the same in all lanes, as wide as `width`."""
    return x[:, :width] if width <= LANES else jnp.concatenate([x] * -(-width // LANES), axis=1)[:, :width]


def _lane_sums(x: jax.Array) -> jax.Array:
    """Returns [n, LANES], the lanes of which add up to the sums of x [n, width]: whole registers are added first."""
    if x.shape[1] % LANES:
        return jnp.broadcast_to(x.sum(1, keepdims=True) / LANES, (x.shape[0], LANES))
    return functools.reduce(jnp.add, _registers(x))


def _lane_maxima(x: jax.Array) -> jax.Array:
    """Returns [n, LANES], the greatest of whose lanes are the greatest of x [n, width]."""
    if x.shape[1] % LANES:
        return jnp.broadcast_to(x.max(1, keepdims=True), (x.shape[0], LANES))
    return functools.reduce(jnp.maximum, _registers(x))


def _registers(x: jax.Array) -> list[jax.Array]:
    return [x[:, i : i + LANES] for i in range(0, x.shape[1], LANES)]
