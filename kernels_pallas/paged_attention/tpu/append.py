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
    """Returns the functions append(item, slot) and tile_copy(item) of the kernel that has the references `s`.

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

    def append(i, slot):
        """Puts item i's new token in its place in the block at `slot`, if it has one, and zeros after it."""
        position = s.end[i] - 1
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
                tile_copy(i - 2).wait()

            s.written[lax.rem(i, 2)] = merged
            tile_copy(i).start()

    return append, tile_copy


def append_tiles(s: SimpleNamespace) -> None:
    """Puts all new tiles into the pool, before any block is fetched."""

    def copy(n):
        target = s.pool.at[s.tile_pages[n], :, s.tile_places[n]]
        return pltpu.make_async_copy(s.tiles_hbm.at[n], target, s.tiles_left)

    pl.loop(0, s.num_tiles[0])(lambda n: copy(n).start())
    pl.loop(0, s.num_tiles[0])(lambda n: copy(n).wait())


def _as_dtype(x: jax.Array, dtype) -> jax.Array:
    """Returns the same bits as another dtype of the same width."""
    return x if x.dtype == dtype else pltpu.bitcast(x, dtype)
