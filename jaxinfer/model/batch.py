"""The arrays of one step, made anew for each step and never changed in place."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh

from jaxinfer.validation import MAX_INT, as_ints, as_tuple, require, require_int
from kernels_pallas.device_sums import has_ordered_sums
from kernels_pallas.paged_attention.call import token_rows

# The slot of padding tokens: past every pool, and far enough from the int32 limit to take any layer's offset.
# It must not be negative: JAX wraps negative indices even where it drops those past the end.
PADDING_SLOT = 2**30
# Pads lists of token ids: past every vocabulary, so that scatters drop it.
PADDING_TOKEN = 2**30
MAX_BATCH = 2**24  # tokens, rows, or entries of a table; more would take gigabytes


@struct.dataclass
class Batch:
    """The tokens of one step, rows one after another, padding last."""

    tokens: Any  # i32[T]
    positions: Any  # i32[T]  position of each token in its request, evicted tokens included
    slot_mapping: Any  # i32[T]  page * S + offset; PADDING_SLOT on padding
    cu_q_lens: Any  # i32[B+1]  q_lens 3, 1, 2 -> cu_q_lens 0 3 4 6
    kv_lens: Any  # i32[B]  tokens that the row attends to, those of this step included; 0 on padding
    block_tables: Any  # i32[B, M]  page ids; 0 past a row's pages
    # i32[B, M] for each of `ModelConfig.page_kinds` but the first; 0 for freed pages too. () if all have the first's.
    bounded_tables: Any = ()

    adapters: Any = None  # i32[B]  slot of the row's adapter, see `AdaptedArray`; None: the model has no slots

    def tables_of(self, kind: int) -> Any:
        """Returns the block tables of a kind of pages."""
        return self.bounded_tables[kind - 1] if kind and self.bounded_tables else self.block_tables


@struct.dataclass
class StepTokens:
    """The facts about the rows of an operand [T, D] that its products need."""

    count: Any  # i32[]  rows that are not padding; they come first
    adapters: Any = None  # i32[T]  as `Batch.adapters`, of each row of the operand
    # True if the other operand may be split over the devices of a mesh.
    is_split: bool = struct.field(pytree_node=False, default=False)
    # The mesh whose devices add parts of sums by themselves, in their order; None: the compiler adds them, if any.
    summing: Mesh | None = struct.field(pytree_node=False, default=None)


def step_tokens(batch: Batch, *, mesh: Mesh | None = None) -> StepTokens:
    """Returns the `StepTokens` of operands that have a row for each token of the batch.

    `mesh`: the mesh that the other operands are split over, if any.
    """
    adapters = None
    if batch.adapters is not None:
        adapters = jnp.asarray(batch.adapters)[token_rows(batch.cu_q_lens, batch.tokens.shape[0])]
    if mesh is None or mesh.size == 1:
        return StepTokens(num_real_tokens(batch), adapters)
    summing = mesh if has_ordered_sums(mesh) else None
    return StepTokens(num_real_tokens(batch), adapters, is_split=True, summing=summing)


def step_rows(batch: Batch) -> StepTokens:
    """Returns the `StepTokens` of operands that have a row for each row of the batch."""
    return StepTokens((batch.kv_lens > 0).sum(), batch.adapters)


def num_real_tokens(batch: Batch) -> Any:
    """Returns the number of the batch's tokens that are not padding, i32[]."""
    q_lens = batch.cu_q_lens[1:] - batch.cu_q_lens[:-1]
    return jnp.where(batch.kv_lens > 0, q_lens, 0).sum()


def num_evicted_tokens(batch: Batch) -> Any:
    """Returns the number of evicted tokens of each row, i32[B]: its block table has no pages for them."""
    firsts, q_lens = batch.cu_q_lens[:-1], batch.cu_q_lens[1:] - batch.cu_q_lens[:-1]
    first_positions = batch.positions[jnp.minimum(firsts, batch.positions.shape[0] - 1)]
    return jnp.where(batch.kv_lens > 0, first_positions - (batch.kv_lens - q_lens), 0)


def last_tokens(batch: Batch) -> Batch:
    """Returns the batch of each row's last token, in the layout of a decode step."""
    last = last_places(batch)
    return Batch(
        tokens=batch.tokens[last],
        positions=batch.positions[last],
        slot_mapping=batch.slot_mapping[last],
        cu_q_lens=np.arange(len(last) + 1, dtype=np.int32),
        kv_lens=batch.kv_lens,
        block_tables=batch.block_tables,
        bounded_tables=batch.bounded_tables,
        adapters=batch.adapters,
    )


def last_places(batch: Batch) -> Any:
    """Returns the index of each row's last token in the batch, i32[B]; padding rows repeat that of the last row."""
    return (batch.cu_q_lens[1:] - 1).clip(0)


def next_batch(batch: Batch, tokens: jax.Array, kv_lens: jax.Array, page_size: int) -> Batch:
    """Returns a batch of one token i32[B] per row, the last of kv_lens i32[B]; rows of 0 are padding."""
    B = kv_lens.shape[0]
    places = jnp.maximum(kv_lens - 1, 0)
    slots = batch.block_tables[jnp.arange(B), places // page_size] * page_size + places % page_size
    return Batch(
        tokens=jnp.where(kv_lens > 0, tokens, 0),
        positions=places + num_evicted_tokens(batch),
        slot_mapping=jnp.where(kv_lens > 0, slots, PADDING_SLOT),
        cu_q_lens=jnp.arange(B + 1, dtype=jnp.int32),
        kv_lens=kv_lens,
        block_tables=batch.block_tables,
        bounded_tables=batch.bounded_tables,
        adapters=batch.adapters,
    )


@struct.dataclass
class StepOutput:
    """The result of a step. `A` is the number of alternatives that the step is compiled for."""

    tokens: Any  # i32[B]  NO_TOKEN or BAD_LOGITS if none could be sampled
    log_probs: Any  # f32[B]  of the chosen token, before temperature and filters
    top_tokens: Any  # i32[B, A]  most probable first; zeros unless some row wants them
    top_log_probs: Any  # f32[B, A]
    sampling_log_probs: Any = None  # f32[B]  of the chosen token after temperature and filters, if the step gives them
    hidden: Any = None  # [T, S]  of all tokens of the step, for drafters, see `forward_with_states`
    logits: Any = None  # f32[B, V]  unless the step draws in the full form; from them `draw_step` draws in others
    prompt: Any = None  # PromptOutput  of a prefill step that was given a `PromptBatch`


@struct.dataclass
class VerifyOutput:
    """The result of a verify step or a decode loop: the fields of `StepOutput` for Q tokens of each row."""

    tokens: Any  # i32[B, Q]  the first num_emitted have a meaning
    log_probs: Any  # f32[B, Q]
    top_tokens: Any  # i32[B, Q, A]
    top_log_probs: Any  # f32[B, Q, A]
    num_emitted: Any  # i32[B]  1 + accepted drafts, or the tokens of the row in a loop; 0 on padding
    sampling_log_probs: Any = None  # f32[B, Q]
    hidden: Any = None  # [T, S]  as in `StepOutput`; a decode loop has none


def pending_token(row: Any) -> Any:
    """Returns the placeholder in a batch for the token that a row of the step before samples; it is no token id.

    Takes an integer or an array of rows, and returns the same kind.
    """
    return -1 - row


class Row(NamedTuple):
    """The part of one request computed in one step."""

    token_ids: Sequence[int]  # the chunk
    start: int  # position of its first token
    page_ids: Sequence[int]  # all pages of the request so far, the chunk's included
    num_evicted_tokens: int = 0  # tokens before the chunk that are evicted, so page_ids has no pages for them
    bounded_ids: Sequence[Sequence[int]] = ()  # its pages of bounded kinds; any id for one that is freed


def make_batch(rows: Sequence[Row], *, page_size: int, num_tokens: int, num_rows: int, table_width: int) -> Batch:
    """Lays out rows in a batch of `num_tokens` tokens, `num_rows` rows and tables of `table_width` pages, on the host.

    For `decode_step` give one token per row and num_tokens = num_rows.
    """
    for name, size in (("num_tokens", num_tokens), ("num_rows", num_rows), ("table_width", table_width)):
        require_int(name, size, 1, MAX_BATCH)
    require_int("page_size", page_size, 1, MAX_BATCH)
    require_entries(num_rows * table_width, num_rows=num_rows, table_width=table_width)
    rows = [_checked_row(row) for row in as_tuple("rows", rows, "several Rows")]
    counts = {len(row.bounded_ids) for row in rows} or {0}
    require(len(counts) == 1, "bounded_ids", sorted(counts), "the pages of as many kinds in every row")
    sizes = {"page_size": page_size, "num_tokens": num_tokens, "num_rows": num_rows, "table_width": table_width}
    return lay_out_batch(rows, **sizes, num_bounded_kinds=counts.pop())


def lay_out_batch(
    rows: Sequence[Row],
    *,
    page_size: int,
    num_tokens: int,
    num_rows: int,
    table_width: int,
    num_bounded_kinds: int = 0,
) -> Batch:
    """Returns the batch of `make_batch` for rows of lists of integers, without checking each integer.

    `num_bounded_kinds`: the number of kinds of pages in `bounded_ids` of each row.
    """
    q_lens = np.array([len(row.token_ids) for row in rows], np.int32)
    starts = np.array([row.start for row in rows], np.int32)
    hidden = np.array([row.num_evicted_tokens for row in rows], np.int32)
    total = int(q_lens.sum())
    if total > num_tokens or len(rows) > num_rows:
        raise ValueError(f"{total} tokens in {len(rows)} rows do not fit num_tokens={num_tokens}, num_rows={num_rows}")
    for row in rows:
        _check_row(row, page_size, table_width)
    block_tables = make_block_tables([row.page_ids for row in rows], num_rows, table_width)
    bounded_tables = tuple(
        make_block_tables([row.bounded_ids[kind] for row in rows], num_rows, table_width)
        for kind in range(num_bounded_kinds)
    )
    if num_tokens == num_rows and (q_lens == 1).all():
        token_ids = np.array([row.token_ids[0] for row in rows], np.int32)
        return make_decode_batch(token_ids, starts, block_tables, page_size, hidden, bounded_tables)
    ends = np.cumsum(q_lens)
    row_ids = np.repeat(np.arange(len(rows), dtype=np.int32), q_lens)  # q_lens 3, 1, 2 -> row_ids 0 0 0 1 2 2
    offsets = np.arange(total, dtype=np.int32) - np.repeat(ends - q_lens, q_lens)
    positions = np.repeat(starts, q_lens) + offsets
    indices, offsets = np.divmod(positions - np.repeat(hidden, q_lens), page_size)
    slots = block_tables[row_ids, indices] * page_size + offsets
    cu_q_lens = np.full(num_rows + 1, total, np.int32)
    cu_q_lens[: len(rows) + 1] = np.concatenate([[0], ends])
    return Batch(
        tokens=padded(np.fromiter(chain.from_iterable(row.token_ids for row in rows), np.int32), num_tokens, 0),
        positions=padded(positions, num_tokens, 0),
        slot_mapping=padded(slots, num_tokens, PADDING_SLOT),
        cu_q_lens=cu_q_lens,
        kv_lens=padded(starts + q_lens - hidden, num_rows, 0),
        block_tables=block_tables,
        bounded_tables=bounded_tables,
    )


def make_block_tables(page_ids: Sequence[Sequence[int]], num_rows: int, table_width: int) -> np.ndarray:
    """Returns the pages of rows as i32[num_rows, table_width]."""
    block_tables = np.zeros((num_rows, table_width), np.int32)
    for i, pages in enumerate(page_ids):
        block_tables[i, : len(pages)] = pages
    return block_tables


def whole_rows(tokens: jax.Array, page_size: int) -> tuple[Batch, int]:
    """Returns tokens i32[B, T] as the batch of a step with an empty cache, and the number of its pages."""
    B, T = tokens.shape
    M = -(-T // page_size)
    places = np.arange(T, dtype=np.int32)
    batch = Batch(
        tokens=tokens.reshape(-1),
        positions=np.tile(places, B),
        slot_mapping=(np.arange(B, dtype=np.int32)[:, None] * (M * page_size) + places[None]).reshape(-1),
        cu_q_lens=np.arange(B + 1, dtype=np.int32) * np.int32(T),
        kv_lens=np.full(B, T, np.int32),
        block_tables=np.arange(B * M, dtype=np.int32).reshape(B, M),
    )
    return jax.tree.map(jnp.asarray, batch), B * M


def make_decode_batch(
    token_ids: np.ndarray,
    positions: np.ndarray,
    block_tables: np.ndarray,
    page_size: int,
    hidden: np.ndarray | int = 0,
    bounded_tables: tuple[np.ndarray, ...] = (),
) -> Batch:
    """Lays out one token i32[N] per row, at positions i32[N]; the first `hidden` i32[N] tokens of a row are evicted.

    Padding rows own their padding token.
    """
    num_rows, places = len(block_tables), positions - hidden
    indices, offsets = np.divmod(places, page_size)
    slots = block_tables[np.arange(len(positions)), indices] * page_size + offsets
    return Batch(
        tokens=padded(token_ids, num_rows, 0),
        positions=padded(positions, num_rows, 0),
        slot_mapping=padded(slots, num_rows, PADDING_SLOT),
        cu_q_lens=np.arange(num_rows + 1, dtype=np.int32),
        kv_lens=padded(places + 1, num_rows, 0),
        block_tables=block_tables,
        bounded_tables=bounded_tables,
    )


def require_entries(num_entries: int, **sizes: int) -> None:
    """Raises ValueError, which names the sizes, for tables of more entries than a step could hold."""
    if num_entries > MAX_BATCH:
        given = " and ".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(f"{given} make tables of {num_entries:,} entries, more than {MAX_BATCH:,}; give smaller ones")


def _checked_row(row: Row) -> Row:
    """Returns the row with tuples of integers that fit the device's integers."""
    require(isinstance(row, Row), "rows", row, "several Rows")
    require_int("start", row.start, 0, PADDING_SLOT)
    require_int("num_evicted_tokens", row.num_evicted_tokens, 0, PADDING_SLOT)
    token_ids = as_ints("token_ids", row.token_ids, -MAX_INT)  # below 0: `pending_token`
    bounded_ids = as_tuple("bounded_ids", row.bounded_ids, "the page ids of several kinds")
    return row._replace(
        token_ids=token_ids,
        page_ids=as_ints("page_ids", row.page_ids, 0, PADDING_SLOT),
        bounded_ids=[as_ints("bounded_ids", page_ids, 0, PADDING_SLOT) for page_ids in bounded_ids],
    )


def _check_row(row: Row, page_size: int, table_width: int) -> None:
    first, num_pages = row.start - row.num_evicted_tokens, len(row.page_ids)
    num_tokens = first + len(row.token_ids)
    if len(row.token_ids) == 0 or first < 0:
        raise ValueError(f"a row has no tokens ({len(row.token_ids)}) or a negative start ({first}); leave it out")
    if num_pages > table_width:
        raise ValueError(f"a row of {num_pages} pages does not fit table_width={table_width}")
    if num_tokens > num_pages * page_size:
        raise ValueError(f"a row of {num_tokens} tokens does not fit its {num_pages} pages of {page_size} slots")


def padded(values: np.ndarray, size: int, padding: float) -> np.ndarray:
    """Returns values followed by padding up to `size`, as bool, f32 or i32; the values themselves if they fill it."""
    # Of no values numpy makes 64-bit floats, of lists of integers 64-bit integers.
    dtype = np.int32 if values.dtype.itemsize == 8 else values.dtype
    if len(values) == size:
        return values.astype(dtype, copy=False)
    out = np.full(size, padding, dtype)
    out[: len(values)] = values
    return out
