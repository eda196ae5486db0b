"""The physical layouts of a page pool. Only this file and the kernels index one.

`Pages` is opaque to everyone but the kernel it was laid out for: others use the verbs here, which know every layout.

    "cpu"  keys [P, K, H, S], values [P, K, S, H]. In both, the axis that a matrix product sums over lies before the one
           it keeps, which is how CPU kernels stream a matrix; keys stored as [S, H] take 1.8 times as long to multiply.
           H is rounded up to LANES with zeros, so that a head fills whole vectors of the CPU.
    "gpu"  keys and values [P, S, K, H]: one token's heads together, so that appending is one short copy; unpadded.
    "tpu"  one array [P, C, S / t, t, W]: t x W is a whole tile of the TPU's memory, so that any run of tiles moves in
           one copy and lands in registers as the matrix unit wants it. Heads up to 64 wide share a row of 128 lanes,
           keys left and values right (C = K); wider ones take a plane for keys and one for values (C = 2 K), W being H
           rounded up to 128 with zeros.

A pool of 8-bit integers may have a scale for each token and head beside them: f32[P, K, S] of keys and f32[P, K, S] of
values. A TPU's pool has both in one array f32[P, 2, K, L], so that one copy moves those of a page; L is S rounded up to
128 lanes. A scale depends on its token alone, never on the page: else bits would depend on the chunks of a prompt.

A pool of 4-bit integers always has such scales. It holds two integers to a byte, so its H above is half the head
dimension: the low half of byte i is integer i of a head, and the high half is integer i + H.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from kernels_pallas.mesh_axes import Axes

LANES = 16
TPU_LANES = 128
# Bytes of one lane of a TPU tile: 8 rows of 32 bits, 16 of 16, 32 of 8.
TPU_TILE_BYTES = 32
LAYOUTS = ("cpu", "gpu", "tpu")
# Exponents are biased by 7 in float8_e4m3fn and by 11 in float8_e4m3b11fnuz.
FNUZ_FACTOR = 16.0
# The only NaN of float8_e4m3b11fnuz, which has the bits of the other's -0, and one of the other's.
FNUZ_NAN, FN_NAN = 0x80, 0x7F
PACKED = jnp.dtype(jnp.int4)  # of a pool with two integers to a byte

AnyPages = TypeVar("AnyPages")  # a tree of arrays whose first axis is that of pages


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pages:
    """A pool of pages of keys and values. A step takes it donated and returns its successor."""

    arrays: tuple[Any, ...]
    layout: str = field(metadata={"static": True})
    head_dim: int = field(metadata={"static": True})
    scales: tuple[Any, ...] | None = None  # of keys and of values, see above; None without
    is_packed: bool = field(default=False, metadata={"static": True})  # a byte holds two integers of 4 bits

    @property
    def num_pages(self) -> int:
        return self.arrays[0].shape[0]

    @property
    def page_size(self) -> int:
        """The number of token slots of each page."""
        shape = self.arrays[-1].shape
        return {"cpu": shape[2], "gpu": shape[1], "tpu": shape[2] * shape[3]}[self.layout]

    @property
    def num_kv_heads(self) -> int:
        shape = self.arrays[-1].shape
        return {"cpu": shape[1], "gpu": shape[2], "tpu": shape[1] // _planes(self.held_size)}[self.layout]

    @property
    def held_size(self) -> int:
        """The numbers of a head as an array holds them: bytes of two integers if the pool is packed."""
        return num_bytes_packed(self.head_dim) if self.is_packed else self.head_dim

    @property
    def dtype(self) -> Any:
        """The type of the numbers, as `to_stored` makes them; of integers in a packed pool int4."""
        if self.is_packed:
            return PACKED
        is_fp8 = self.is_fnuz or self.arrays[0].dtype == jnp.uint8
        return jnp.dtype(jnp.float8_e4m3fn) if is_fp8 else self.arrays[0].dtype

    @property
    def is_fnuz(self) -> bool:
        """Whether the array holds float8_e4m3fn as float8_e4m3b11fnuz."""
        return self.arrays[0].dtype == jnp.float8_e4m3b11fnuz


def head_specs(pages: Pages, axis: Axes) -> Pages:
    """Returns the partition of a pool whose KV heads are split over mesh axes; None leaves them whole."""
    position = 2 if pages.layout == "gpu" else 1
    arrays = (PartitionSpec(*[None] * position, axis),) * len(pages.arrays)
    before_heads = [None] * (2 if pages.layout == "tpu" else 1)
    scales = None if pages.scales is None else (PartitionSpec(*before_heads, axis),) * len(pages.scales)
    return replace(pages, arrays=arrays, scales=scales)


def default_layout() -> str:
    """Returns the layout for the platform at hand; one without a layout of its own gets the CPU's."""
    platform = jax.default_backend()
    return platform if platform in LAYOUTS else "cpu"


def abstract_pages(
    num_pages: int,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: Any,
    layout: str | None = None,
    *,
    has_scales: bool = False,
) -> Pages:
    """Returns a pool as `jax.ShapeDtypeStruct`s; `layout` None is `default_layout()`.

    With `has_scales` a pool of int8 has a scale for each token and head. A pool of int4 always has.
    """
    layout = default_layout() if layout is None else layout
    P, S, K, H, dtype = num_pages, page_size, num_kv_heads, head_dim, jnp.dtype(dtype)
    is_packed = dtype == PACKED
    if is_packed:
        H, dtype, has_scales = num_bytes_packed(head_dim), jnp.dtype(jnp.int8), True
    if layout == "cpu":
        H = _round_up(H, LANES)
        shapes = [(P, K, H, S), (P, K, S, H)]
    elif layout == "gpu":
        shapes = [(P, S, K, H)] * 2
    elif layout == "tpu":
        tile = tpu_tile(S, dtype)
        width = _round_up(H * (3 - _planes(H)), TPU_LANES)
        if dtype == jnp.float8_e4m3fn:
            dtype = jnp.dtype(jnp.float8_e4m3b11fnuz)
        shapes = [(P, K * _planes(H), S // tile, tile, width)]
    else:
        raise ValueError(f"layout={layout!r:.80} is unknown; choose from {LAYOUTS} or None for the platform's own")
    arrays = tuple(jax.ShapeDtypeStruct(shape, held_dtype(dtype, layout)) for shape in shapes)
    scale_shapes = [(P, 2, K, _round_up(S, TPU_LANES))] if layout == "tpu" else [(P, K, S)] * 2
    scales = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in scale_shapes) if has_scales else None
    return Pages(arrays, layout, head_dim, scales, is_packed)


def tpu_tile(page_size: int, dtype: Any) -> int:
    """Returns how many slots of a page a TPU tile holds.

    Raises:
      ValueError: if a page is not made of whole tiles.
    """
    tile = min(TPU_TILE_BYTES // dtype.itemsize, page_size)
    if page_size % tile:
        raise ValueError(f"page_size={page_size} is not a multiple of {tile}, the rows of a TPU tile of {dtype.name}")
    return tile


def init_pages(*args: Any, **kwargs: Any) -> Pages:
    """Returns a pool of zeros; the arguments are those of `abstract_pages`."""
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), abstract_pages(*args, **kwargs))


def _planes(held_size: int) -> int:
    """How many planes of a TPU pool one KV head takes."""
    return 1 if 2 * held_size <= TPU_LANES else 2


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def pad_heads(x: jax.Array, width: int) -> jax.Array:
    """Returns x [..., head_dim] with zeros up to `width`."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])


def to_stored(x: jax.Array, scale: jax.Array | None, dtype: Any) -> jax.Array:
    """Returns keys or values [..., K, H] as a pool of `dtype` holds them: divided by scale f32[K], rounded, saturated.

    A scale of None is 1; then wider types than 8 bits take a cast.
    """
    if scale is None and jnp.dtype(dtype).itemsize > 1:
        return x.astype(dtype)
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    largest = float((jnp.iinfo if is_integer else jnp.finfo)(dtype).max)
    x = x.astype(jnp.float32)
    if scale is not None:
        x = x / jnp.broadcast_to(scale.astype(jnp.float32)[:, None], x.shape)
    # A cast alone makes NaN of what float8_e4m3fn cannot hold.
    x = jnp.clip(x, -largest, largest)
    return (jnp.round(x) if is_integer else x).astype(dtype)


def to_integers(x: jax.Array, bits: int = 8) -> tuple[jax.Array, jax.Array]:
    """Returns keys or values [..., H] as integers i8[..., H] of some bits, and the scale f32[...] of each vector.

    The integers of a vector reach as far to both sides of 0. The scale of a vector that is not finite is not either, so
    that no rounding hides it.
    """
    x = x.astype(jnp.float32)
    largest, most = jnp.abs(x).max(-1), 2 ** (bits - 1) - 1
    # Compilers divide by a constant so, or not, as they like.
    scales = jnp.where(largest == 0, 1.0, largest * np.float32(1 / most))
    integers = jnp.round(x / jnp.broadcast_to(scales[..., None], x.shape))
    return jnp.clip(integers, -most, most).astype(jnp.int8), scales


def num_bytes_packed(num_integers: int) -> int:
    """Returns the bytes of integers of 4 bits."""
    return -(-num_integers // 2)


def pack_integers(x: jax.Array) -> jax.Array:
    """Returns integers i8[..., n] of 4 bits in bytes i8[..., m], m = ceil(n / 2): integers i and i + m in byte i."""
    low, high = jnp.split(pad_heads(x, 2 * num_bytes_packed(x.shape[-1])), 2, axis=-1)
    return (low & 0xF) | (high << 4)


def unpack_integers(x: jax.Array, axis: int = -1) -> jax.Array:
    """Returns the integers i8 of bytes that `pack_integers` made, 2 m for m along an axis: for an odd n a 0 is last."""
    return jnp.concatenate([(x << 4) >> 4, x >> 4], axis=axis)


def from_integers(integers: jax.Array, scales: jax.Array) -> jax.Array:
    """Returns f32 of integers whose scales can be broadcast to their shape."""
    return integers.astype(jnp.float32) * jnp.broadcast_to(scales, integers.shape)


def as_operand(x: jax.Array, dtype: Any) -> jax.Array:
    """Returns numbers as a pool stores them in the dtype of a product."""
    if x.dtype != jnp.float8_e4m3fn:
        return x.astype(dtype)
    return lax.platform_dependent(x, cpu=_widen_by_bits, default=lambda x: x.astype(jnp.float32)).astype(dtype)


def _widen_by_bits(x: jax.Array) -> jax.Array:
    """Returns float8_e4m3fn as f32. A CPU's own conversion takes five times as long, one number at a time."""
    bits = lax.bitcast_convert_type(x, jnp.uint8).astype(jnp.int32)
    magnitude = bits & 0x7F
    # Three bits of mantissa of 23, and an exponent that is biased by 127 and no longer by 7.
    normal = lax.bitcast_convert_type((magnitude << 20) + ((127 - 7) << 23), jnp.float32)
    value = jnp.where(magnitude < 8, magnitude.astype(jnp.float32) * 2.0**-9, normal)
    value = jnp.where(magnitude == FN_NAN, jnp.nan, value)
    return jnp.where(bits > 0x7F, -value, value)


def write_kv(
    pages: Pages,
    k: jax.Array,
    v: jax.Array,
    slots: jax.Array,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
) -> Pages:
    """Returns the pool with keys and values [n, K, H] at slots i32[n] (page * S + offset), as it stores them.

    A slot past the pool is dropped, which is how padding is written nowhere. A negative slot would wrap.
    """
    if pages.scales is None:
        k, v, scales = to_stored(k, k_scale, pages.dtype), to_stored(v, v_scale, pages.dtype), ()
    else:
        k, v, scales = as_integers(pages, k, v)
    if pages.layout == "cpu":
        width = pages.arrays[1].shape[-1]
        return _put_slots(pages, (pad_heads(k, width), pad_heads(v, width), *scales), slots)
    return _put_slots(pages, (k, v, *scales) if pages.layout == "gpu" else (pack_planes(pages, k, v), *scales), slots)


def as_integers(pages: Pages, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]:
    """Returns keys and values [n, K, H] as integers, those of a packed pool in bytes, and their scales."""
    bits = 4 if pages.is_packed else 8
    (k, k_scales), (v, v_scales) = to_integers(k, bits), to_integers(v, bits)
    if pages.is_packed:
        k, v = pack_integers(k), pack_integers(v)
    return k, v, (jnp.stack([k_scales, v_scales], axis=1),) if pages.layout == "tpu" else (k_scales, v_scales)


def move_slots(pages: Pages, sources: jax.Array, targets: jax.Array) -> Pages:
    """Returns the pool with what slots i32[n] hold at other slots i32[n] as well; a target past the pool is dropped.

    All are read before any is written.
    """
    if pages.layout != "tpu":
        return _put_slots(pages, _take_slots(pages, sources), targets)
    if pages.scales is not None:
        moved = _move_in_pages(pages.scales[0], sources, targets, pages.page_size)
        pages = replace(pages, scales=(moved,))
    return replace(pages, arrays=(_move_in_tiles(pages.arrays[0], sources, targets),))


def _move_in_tiles(pool: jax.Array, sources: jax.Array, targets: jax.Array) -> jax.Array:
    """`move_slots` in a TPU pool, by whole tiles: to take or put parts of them XLA copies the pool."""
    P, C, tiles_per_page, t, W = pool.shape
    tiles = pool.reshape(P * C * tiles_per_page, t, W)
    is_moved = targets < P * tiles_per_page * t

    def planes_of(slots: jax.Array) -> jax.Array:
        """The tiles i32[n, C] that hold slots i32[n]."""
        page_ids, numbers = slots // t // tiles_per_page, slots // t % tiles_per_page
        return (page_ids[:, None] * C + jnp.arange(C)[None]) * tiles_per_page + numbers[:, None]

    new = jnp.take_along_axis(tiles[planes_of(sources)], (sources % t)[:, None, None, None], axis=2)
    targets = jnp.where(is_moved, targets, 0)
    at = planes_of(targets)
    comes = _comers(targets, is_moved, t)
    moved = new[comes.argmax(-1), :, 0].swapaxes(1, 2)  # [n, C, t, W]
    whole = jnp.where(comes.any(-1)[:, None, :, None], moved, tiles[at])
    tiles = tiles.at[jnp.where(is_moved[:, None], at, len(tiles))].set(whole, mode="drop")
    return tiles.reshape(pool.shape)


def _move_in_pages(pool: jax.Array, sources: jax.Array, targets: jax.Array, page_size: int) -> jax.Array:
    """`move_slots` in the scales [P, 2, K, L] of a TPU pool, by whole pages for the same reason."""
    P, _, _, L = pool.shape
    is_moved = targets < P * page_size
    new = jnp.take_along_axis(pool[sources // page_size], (sources % page_size)[:, None, None, None], axis=3)
    targets = jnp.where(is_moved, targets, 0)
    at = targets // page_size
    comes = _comers(targets, is_moved, page_size)
    moved = jnp.moveaxis(new[comes.argmax(-1), :, :, 0], 1, 3)  # [n, 2, K, S]
    whole = jnp.where(pad_heads(comes.any(-1), L)[:, None, None], pad_heads(moved, L), pool[at])
    return pool.at[jnp.where(is_moved, at, P)].set(whole, mode="drop")


def _comers(targets: jax.Array, is_moved: jax.Array, t: int) -> jax.Array:
    """Returns whether move i goes to slot s of the tile of t slots of target j, bool[n, t, n] by j, s and i.

    Several may come to one tile: each writes it with all of them in.
    """
    is_here = (targets[:, None] // t == targets[None] // t) & is_moved[None]
    return is_here[:, None] & (jnp.arange(t)[None, :, None] == (targets % t)[None, None])


def _slot_index(pages: Pages, slots: jax.Array) -> list[tuple[Any, ...]]:
    """Returns where each array of the pool holds the tokens of slots i32[n], its scales last."""
    (page_ids, offsets), every = (slots // pages.page_size, slots % pages.page_size), slice(None)
    place = (page_ids, *[every] * (2 if pages.layout == "tpu" else 1), offsets)
    scales = [place] * len(pages.scales or ())
    if pages.layout == "cpu":
        return [(page_ids, every, every, offsets), (page_ids, every, offsets), *scales]
    if pages.layout == "gpu":
        return [(page_ids, offsets)] * 2 + scales
    tile = pages.arrays[0].shape[3]
    return [(page_ids, every, offsets // tile, offsets % tile), *scales]


def held_dtype(dtype: Any, layout: str) -> Any:
    """Returns the type of the arrays of a pool of `dtype`, of the same width.

    A pool for a CPU holds float8_e4m3fn as u8. To read or write a part of it, the compiler would widen the whole pool
    and round it again.
    """
    return jnp.dtype(jnp.uint8) if layout == "cpu" and dtype == jnp.float8_e4m3fn else jnp.dtype(dtype)


def as_held(x: jax.Array, pool: jax.Array) -> jax.Array:
    """Returns numbers as stored in the type of the pool's array, which holds the same bits."""
    return lax.bitcast_convert_type(x, jnp.uint8) if pool.dtype == jnp.uint8 else x


def as_stored(x: jax.Array) -> jax.Array:
    """Returns what `as_held` was given."""
    return lax.bitcast_convert_type(x, jnp.float8_e4m3fn) if x.dtype == jnp.uint8 else x


def _take_slots(pages: Pages, slots: jax.Array) -> list[jax.Array]:
    pairs = zip((*pages.arrays, *(pages.scales or ())), _slot_index(pages, slots), strict=True)
    return [as_stored(pool.at[index].get(mode="clip")) for pool, index in pairs]


def _put_slots(pages: Pages, new: Sequence[jax.Array], slots: jax.Array) -> Pages:
    triples = zip((*pages.arrays, *(pages.scales or ())), _slot_index(pages, slots), new, strict=True)
    pools = tuple(pool.at[index].set(as_held(x, pool), mode="drop") for pool, index, x in triples)
    num_arrays = len(pages.arrays)
    return replace(pages, arrays=pools[:num_arrays], scales=pools[num_arrays:] if pages.scales else None)


def pack_planes(pages: Pages, k: jax.Array, v: jax.Array) -> jax.Array:
    """Returns keys and values [..., K, H], as `write_kv` takes them, as the planes [..., C, W] of a TPU pool."""
    width = pages.arrays[0].shape[-1]
    if pages.is_fnuz:
        k, v = _to_fnuz(k), _to_fnuz(v)
    if _planes(pages.held_size) == 1:
        return jnp.concatenate([pad_heads(k, width // 2), pad_heads(v, width // 2)], axis=-1)
    planes = jnp.stack([pad_heads(k, width), pad_heads(v, width)], axis=-2)
    return planes.reshape(*k.shape[:-2], -1, width)


def _to_fnuz(x: jax.Array) -> jax.Array:
    """Returns float8_e4m3fn as float8_e4m3b11fnuz worth 1 / FNUZ_FACTOR: the same bits, -0 as 0."""
    bits = lax.bitcast_convert_type(x, jnp.uint8)
    bits = jnp.where(bits == FNUZ_NAN, jnp.uint8(0), bits)
    bits = jnp.where(jnp.isnan(x), jnp.uint8(FNUZ_NAN), bits)
    return lax.bitcast_convert_type(bits, jnp.float8_e4m3b11fnuz)


def _from_fnuz(x: jax.Array) -> jax.Array:
    bits = lax.bitcast_convert_type(x, jnp.uint8)
    return lax.bitcast_convert_type(jnp.where(bits == FNUZ_NAN, jnp.uint8(FN_NAN), bits), jnp.float8_e4m3fn)


def read_pages(pages: Pages, page_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns keys [n, K, H', S] and values [n, K, S, H'] of pages i32[n]; H' is the head dimension, zeros after it.

    They are numbers as stored, or f32 if the pool has scales.
    """
    k, v = _stored_pages(pages, page_ids)
    if pages.scales is None:
        return k, v
    k, v = _integers(pages, k, axis=2), _integers(pages, v, axis=3)
    k_scales, v_scales = _scales_of_pages(pages, page_ids)
    return from_integers(k, k_scales[:, :, None]), from_integers(v, v_scales[..., None])


def _integers(pages: Pages, x: jax.Array, axis: int) -> jax.Array:
    """Returns the integers of heads along an axis, those of a packed pool unpacked, with zeros up to whole vectors."""
    if not pages.is_packed:
        return x
    x = unpack_integers(lax.slice_in_dim(x, 0, pages.held_size, axis=axis), axis)
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, _round_up(pages.head_dim, LANES) - x.shape[axis])
    return jnp.pad(x, padding)


def _stored_pages(pages: Pages, page_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    if pages.layout == "cpu":
        k, v = (as_stored(pool[page_ids]) for pool in pages.arrays)
        return k, v
    if pages.layout == "gpu":
        k, v = (pool[page_ids] for pool in pages.arrays)
        return k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)
    planes = pages.arrays[0][page_ids].reshape(page_ids.shape[0], -1, pages.page_size, pages.arrays[0].shape[-1])
    k, v = _unpack_planes(pages, planes.swapaxes(1, 2))  # [n, S, K, H]
    return k.transpose(0, 2, 3, 1), v.swapaxes(1, 2)


def _scales_of_pages(pages: Pages, page_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the scales f32[n, K, S] of keys and of values."""
    found = [pool[page_ids] for pool in pages.scales or ()]
    if pages.layout != "tpu":
        return found[0], found[1]
    joined = found[0][..., : pages.page_size]
    return joined[:, 0], joined[:, 1]


def require_wide(pages: Any) -> None:
    """Raises NotImplementedError for a pool whose numbers have 8 bits or fewer."""
    if pages.dtype.itemsize == 1:
        raise NotImplementedError(f"keys of {pages.dtype} would be rounded at each change; use a wider type")


def map_keys(pages: Pages, change: Callable[[jax.Array], jax.Array]) -> Pages:
    """Returns the pool with change(keys [P * S, K, H]) in the place of its keys, those of a page in a row.

    Raises:
      NotImplementedError: for a pool of 8 bits or fewer, in which each change would round the keys once more.
    """
    require_wide(pages)
    P, S, K, H = pages.num_pages, pages.page_size, pages.num_kv_heads, pages.head_dim
    k, v = read_pages(pages, jnp.arange(P))
    k, v = k.transpose(0, 3, 1, 2).reshape(P * S, K, -1), v.transpose(0, 2, 1, 3).reshape(P * S, K, -1)
    return write_kv(pages, change(k[..., :H]), v[..., :H], jnp.arange(P * S))


def gather_tokens(pages: Pages, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns keys and values [n, K, H] at slots i32[n]: numbers as stored, or f32 if the pool has scales."""
    found = _take_slots(pages, slots)
    num_arrays = len(pages.arrays)
    k, v = _unpack_planes(pages, found[0]) if pages.layout == "tpu" else found[:num_arrays]
    k, v = _integers(pages, k, axis=k.ndim - 1), _integers(pages, v, axis=v.ndim - 1)
    k, v = k[..., : pages.head_dim], v[..., : pages.head_dim]
    if pages.scales is None:
        return k, v
    scales = found[num_arrays:]
    k_scales, v_scales = (scales[0][:, 0], scales[0][:, 1]) if pages.layout == "tpu" else scales
    return from_integers(k, k_scales[..., None]), from_integers(v, v_scales[..., None])


def _unpack_planes(pages: Pages, planes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns keys and values [..., K, H'] of the planes [..., C, W] of a TPU pool."""
    if _planes(pages.held_size) == 1:
        k, v = jnp.split(planes, 2, axis=-1)
    else:
        k, v = planes[..., 0::2, :], planes[..., 1::2, :]
    return (_from_fnuz(k), _from_fnuz(v)) if pages.is_fnuz else (k, v)


def take_pages(pages: AnyPages, page_ids: jax.Array) -> AnyPages:
    """Returns a pool of pages i32[n] alone, in that order; one past the pool gives zeros."""
    return jax.tree.map(lambda pool: pool.at[page_ids].get(mode="fill", fill_value=0), pages)


def put_pages(pages: AnyPages, page_ids: jax.Array, new: AnyPages) -> AnyPages:
    """Returns the pool with the pages of another of n pages on pages i32[n]; past the pool is dropped."""
    return jax.tree.map(lambda pool, x: pool.at[page_ids].set(x, mode="drop"), pages, new)
