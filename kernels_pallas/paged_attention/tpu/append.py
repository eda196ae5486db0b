"""How a TPU kernel puts new keys and values into the pool: a token into the block at hand, or whole tiles before."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


def appending(s: SimpleNamespace, *, num_rows: int) -> tuple[Callable, Callable]:
    """Returns the functions append(item, slot) and copies(item) to the pool of the kernel that has the references `s`.

    `num_rows` is that of its page tables.
    """
    NB, _, block_tiles, tile, _ = s.kv.shape
    block, page = block_tiles * tile, s.pool.shape[2] * tile
    M, has_new = s.tables.shape[0] // num_rows, hasattr(s, "new_hbm")

    def tile_copy(i):
        """The tile with item i's new token, on its way to the pool."""
        slot, position = lax.rem(i, 2), s.start[i]
        page_id = s.tables[s.row[i] * M + position // page]
        target = s.pool.at[page_id, :, lax.rem(position, page) // tile]
        return pltpu.make_async_copy(s.written.at[slot], target, s.tile_left.at[slot])

    def scales_copy(i):
        """The scales of the page with item i's new token, on their way to the pool."""
        slot, page_id = lax.rem(i, 2), s.tables[s.row[i] * M + s.start[i] // page]
        return pltpu.make_async_copy(s.written_scales.at[slot], s.scale_pool.at[page_id], s.tile_left.at[slot])

    def copies(i):
        return [tile_copy(i), *([scales_copy(i)] if hasattr(s, "scales") else [])]

    def append_scales(i, slot, position):
        """Does what `append` does with the scales, and returns those of the page."""
        place = (slot, lax.rem(position, block) // page)
        old = s.scales[place]
        after = lax.broadcasted_iota(jnp.int32, old.shape, 2) - lax.rem(position, page)
        kept = jnp.where(after == 0, s.new_scales[lax.rem(i, NB)], old) if has_new else old
        s.scales[place] = merged = jnp.where(after <= 0, kept, 0.0)
        return merged

    def append(i, slot):
        """Puts item i's new token in its place in the block at `slot`, if it has one, and zeros after it."""
        position = s.end[i] - 1
        merged_scales = append_scales(i, slot, position) if hasattr(s, "scales") else None
        place = (slot, slice(None), lax.rem(position, block) // tile)
        # Merged as numbers of 32 bits, which all chips select from; of 8 bits as integers, to which all convert.
        narrow, wide = (jnp.int8, jnp.int32) if s.pool.dtype.itemsize == 1 else (s.pool.dtype, jnp.float32)
        old = _as_dtype(s.kv[place], narrow).astype(wide)
        row_in_tile = lax.broadcasted_iota(jnp.int32, old.shape, 1) - lax.rem(position, tile)
        if has_new:
            new = _as_dtype(s.new[lax.rem(i, NB)], narrow).astype(wide)[:, None, :]
            merged = jnp.where(row_in_tile < 0, old, jnp.where(row_in_tile == 0, new, jnp.zeros_like(old)))
        else:
            merged = jnp.where(row_in_tile <= 0, old, jnp.zeros_like(old))
        merged = _as_dtype(merged.astype(narrow), s.pool.dtype)
        s.kv[place] = merged
        if has_new:

            @pl.when(i >= 2)
            def _():
                for copy in copies(i - 2):
                    copy.wait()

            s.written[lax.rem(i, 2)] = merged
            if merged_scales is not None:
                s.written_scales[lax.rem(i, 2)] = merged_scales
            for copy in copies(i):
                copy.start()

    return append, copies


def append_tiles(s: SimpleNamespace) -> None:
    """Puts all new tiles into the pool, and pages of scales, before any block is fetched."""

    def copy(n):
        target = s.pool.at[s.tile_pages[n], :, s.tile_places[n]]
        return pltpu.make_async_copy(s.tiles_hbm.at[n], target, s.tiles_left)

    def scales_copy(n):
        return pltpu.make_async_copy(s.new_scales_hbm.at[n], s.scale_pool.at[s.scale_pages[n]], s.tiles_left)

    has_scales = hasattr(s, "scales")
    pl.loop(0, s.num_tiles[0])(lambda n: copy(n).start())
    if has_scales:
        pl.loop(0, s.num_scale_pages[0])(lambda n: scales_copy(n).start())
    pl.loop(0, s.num_tiles[0])(lambda n: copy(n).wait())
    if has_scales:
        pl.loop(0, s.num_scale_pages[0])(lambda n: scales_copy(n).wait())


def _as_dtype(x: jax.Array, dtype) -> jax.Array:
    """Returns the same bits as another dtype of the same width."""
    return x if x.dtype == dtype else pltpu.bitcast(x, dtype)
