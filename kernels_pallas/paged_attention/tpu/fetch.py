"""How blocks of pages, queries and new tokens come into a TPU's vector memory, several blocks ahead across rows."""

from __future__ import annotations

from types import SimpleNamespace

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


def fetching(s: SimpleNamespace, *, num_rows: int, window: int | None) -> SimpleNamespace:
    """Returns what fetches for the kernel that has the references `s`, with page tables of `num_rows` rows.

    `first_block(i)` is where item i begins; `prefetch(i, b, step)` starts fetching a block; `wait_block(i, b, slot)`
    waits for it; `item_copies(i)` are to be waited for before item i is computed. `zero_before(i, b, slot)` and
    `zero_after(i, b, slot)` clear the values of what was not fetched at the ends of an item's first and last block.
    """
    NB, C, block_tiles, tile, W = s.kv.shape
    K = s.acc.shape[0]
    page_tiles, block, M = s.pool.shape[2], block_tiles * tile, s.tables.shape[0] // num_rows
    num_items, has_new, has_tree = s.count[0], hasattr(s, "new_hbm"), hasattr(s, "tree_hbm")
    has_scales = hasattr(s, "scales")

    def first_seen(i):
        """The first position that item i sees."""
        return jnp.maximum(s.start[i] + 1 - window, 0) if window is not None else 0

    def first_block(i):
        return first_seen(i) // block

    def fetched_tiles(i, b):
        """The tiles of block b that hold what item i sees in the pool: from whole pages on, up to its end."""
        num_old = s.end[i] - (1 if has_new else 0)
        end = jnp.clip((num_old + tile - 1) // tile - b * block_tiles, 0, block_tiles)
        start = jnp.clip(first_seen(i) // (page_tiles * tile) * page_tiles - b * block_tiles, 0, end)
        return start, end

    def start_block(i, b, step):
        slot = lax.rem(step, NB)
        start, end = fetched_tiles(i, b)

        def start_page(p, _):
            size = jnp.minimum(end - p * page_tiles, page_tiles)
            page_id = s.tables[s.row[i] * M + b * (block_tiles // page_tiles) + p]
            source = s.pool.at[page_id, :, pl.ds(0, size)]
            pltpu.make_async_copy(source, s.kv.at[slot, :, pl.ds(p * page_tiles, size)], s.kv_arrived.at[slot]).start()
            if has_scales:
                pltpu.make_async_copy(s.scale_pool.at[page_id], s.scales.at[slot, p], s.kv_arrived.at[slot]).start()
            return 0

        lax.fori_loop(start // page_tiles, pl.cdiv(end, page_tiles), start_page, 0)

    def wait_block(i, b, slot):
        start, end = fetched_tiles(i, b)

        @pl.when(end > start)
        def _():  # waits for the bytes of all pages of the block at once
            part = s.kv.at[slot, :, pl.ds(0, end - start)]
            pltpu.make_async_copy(part, part, s.kv_arrived.at[slot]).wait()
            if has_scales:
                scales = s.scales.at[slot, pl.ds(0, pl.cdiv(end, page_tiles) - start // page_tiles)]
                pltpu.make_async_copy(scales, scales, s.kv_arrived.at[slot]).wait()

    def zero_scales(slot, start, end):
        """Zeros scales as `zero_values` zeros values, of the pages that begin at tiles from start to before end."""

        def zero_page(p, _):
            s.scales[slot, p] = jnp.zeros(s.scales.shape[2:], jnp.float32)
            return 0

        lax.fori_loop(pl.cdiv(start, page_tiles), pl.cdiv(end, page_tiles), zero_page, 0)

    def zero_values(slot, start, end):
        """Zeros tiles of values: an earlier row's may be NaN, and 0 * NaN is NaN. Scores are masked whatever keys are.

        Keys share the tiles of narrow heads, and have planes of their own, before the values', if heads are wide.
        """
        zero = jnp.zeros((tile, W), s.kv.dtype)

        def zero_tile(n, _):
            for plane in range(C // K - 1, C, C // K):
                s.kv[slot, plane, n] = zero
            return 0

        lax.fori_loop(start, end, zero_tile, 0)

    def zero_before(i, b, slot):
        start, _ = fetched_tiles(i, b)
        zero_values(slot, 0, start)
        if has_scales:
            zero_scales(slot, 0, start)

    def zero_after(i, b, slot):
        _, end = fetched_tiles(i, b)
        zero_values(slot, end, block_tiles)
        if has_scales:
            zero_scales(slot, end, block_tiles)

    def item_copies(i):
        slot, source = lax.rem(i, NB), s.source[i]
        if hasattr(s, "q_tokens"):
            size = s.size[i]
            pairs = [(s.q_hbm.at[pl.ds(source, size)], s.q_tokens.at[slot, pl.ds(0, size)])]
        else:
            pairs = [(s.q_hbm.at[source], s.q.at[slot])]
        if has_new:
            pairs.append((s.new_hbm.at[source], s.new.at[slot]))
            if has_scales:
                pairs.append((s.new_scales_hbm.at[source], s.new_scales.at[slot]))
        if has_tree:
            pairs.append((s.tree_hbm.at[i], s.tree.at[slot]))
        return [pltpu.make_async_copy(hbm, vmem, s.q_arrived.at[slot]) for hbm, vmem in pairs]

    def prefetch(i, b, step):
        """Starts fetching block b of item i, where there is one, and returns the block after it."""

        @pl.when(i < num_items)
        def _():
            @pl.when(b == first_block(i))
            def _():
                for copy in item_copies(i):
                    copy.start()

            start_block(i, b, step)

        last = jnp.maximum(num_items - 1, 0)  # an index also where there are no items
        is_last = (b + 1) * block >= s.end[jnp.minimum(i, last)]
        following = jnp.minimum(i + 1, last)
        return jnp.where(is_last, i + 1, i), jnp.where(is_last, first_block(following), b + 1)

    return SimpleNamespace(
        first_block=first_block,
        prefetch=prefetch,
        wait_block=wait_block,
        item_copies=item_copies,
        zero_before=zero_before,
        zero_after=zero_after,
    )
