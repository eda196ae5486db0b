"""The blocks of ggml: some integers with their scales, as float32, bit for bit the numbers of ggml's C.

A block type has `length` numbers in `num_bytes` bytes: an integer times the scale of its group, to which some types add
an offset. Each function below takes blocks u8[N, num_bytes], of NumPy or of JAX. The layouts are those of
ggml-common.h, and the order of operations that of ggml-quants.c. Operations are elementwise, so that a compiler writes
nothing but their result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

BYTES_AT_ONCE = 2**20  # of float32: its intermediates stay near the processor
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# Twice the numbers of 4 bits with 2 of exponent and 1 of mantissa (OCP Microscaling Formats 1.0).
E2M1_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
LEAST = np.finfo(np.float32).min
NOT_FINITE = "a weight or a scale is infinite or no number"
Array = Any  # of NumPy, or of JAX under a trace


# The scales f32[N, groups] of blocks, and offsets f32[N, groups] or None.
Levels = tuple[Array, Array | None]
Planes = tuple[Array, ...]


@dataclass(frozen=True)
class BlockType:
    """A type of ggml by its name there, with the way from its blocks to float32."""

    name: str
    length: int  # numbers in a block
    num_bytes: int  # of a block
    # One or two arrays of 8 bits [N, ...], whose bits together are the block's integers. They keep the axes of its
    # bytes: with others, or joined to one array, a CPU's compiler unpacks numbers one at a time.
    planes: Callable[[Array], Planes]
    levels: Callable[[Array], Levels] | None = None  # None: the plane has floating-point numbers themselves
    halves: tuple[int, ...] = ()  # the bytes of a block at which half-precision numbers begin
    zero: int = 0  # that is taken off each integer

    def numbers(self, blocks: Array) -> Array:
        """Returns the numbers f32[N, length] of blocks u8[N, num_bytes]."""
        planes = self.planes(blocks)
        return planes[0] if self.levels is None else self.scaled(planes, *self.levels(blocks))

    def scaled(self, planes: Planes, scales: Array, offsets: Array | None) -> Array:
        """Returns the numbers f32[N, length] of planes with the levels f32[N, groups]."""
        first, *others = (plane.reshape(*scales.shape, -1) for plane in planes)
        for other in others:
            first = first | other
        products = _rounded(scales[:, :, None] * (first.astype(np.float32) - np.float32(self.zero)))
        numbers = products if offsets is None else products + offsets[:, :, None]
        return numbers.reshape(-1, self.length)

    @property
    def is_float(self) -> bool:
        """True for types whose blocks are single floating-point numbers."""
        return self.length == 1


def dequantize(blocks: np.ndarray, block_type: BlockType) -> np.ndarray:
    """Returns the numbers f32[..., inputs] of rows of blocks u8[..., row bytes], some blocks at a time.

    ValueError if one of them is infinite or none.
    """
    require_finite_scales(blocks, block_type)
    flat = blocks.reshape(-1, block_type.num_bytes)
    out = np.empty((len(flat), block_type.length), np.float32)
    step = max(BYTES_AT_ONCE // (4 * block_type.length), 1)
    for start in range(0, len(flat), step):
        with np.errstate(over="ignore", invalid="ignore"):
            piece = block_type.numbers(np.ascontiguousarray(flat[start : start + step]))
        if not np.isfinite(piece).all():  # of types without half-precision scales
            raise ValueError(NOT_FINITE)
        out[start : start + step] = piece
    return out.reshape(*blocks.shape[:-1], -1)


def require_finite_scales(blocks: np.ndarray, block_type: BlockType) -> None:
    """Raises ValueError if a half-precision number of rows of blocks u8[..., row bytes] is infinite or none."""
    flat = blocks.reshape(-1, block_type.num_bytes)
    # Its upper byte has a sign, five bits of exponent, all of which are set then, and two bits more.
    if any(((flat[:, at + 1] & 0x7C) == 0x7C).any() for at in block_type.halves):
        raise ValueError(NOT_FINITE)


def q8_0_integers(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the integers i8[..., inputs] and scales f16[..., inputs / 32] of rows of Q8_0."""
    rows = blocks.reshape(*blocks.shape[:-1], -1, 34)
    return _joined(rows[..., 2:].view(np.int8)), _joined(np.ascontiguousarray(rows[..., :2]).view("<f2"))


def q4_0_integers(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the integers i8[..., inputs], from -8 to 7, and scales f16[..., inputs / 32] of rows of Q4_0."""
    rows = blocks.reshape(*blocks.shape[:-1], -1, 18)
    values = fields(rows[..., 2:], 4).view(np.int8) - np.int8(8)
    values = values.reshape(*rows.shape[:-1], 32)
    return _joined(values), _joined(np.ascontiguousarray(rows[..., :2]).view("<f2"))


def mxfp4_codes(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the codes of E2M1 u8[..., inputs], and exponents of 2 plus 127 u8[..., inputs / 32] of rows of MXFP4."""
    rows = blocks.reshape(*blocks.shape[:-1], -1, 17)
    return _joined(fields(rows[..., 1:], 4).reshape(*rows.shape[:-1], 32)), rows[..., 0]


def _joined(rows: np.ndarray) -> np.ndarray:
    """Joins the last two axes."""
    return rows.reshape(*rows.shape[:-2], -1)


def fields(packed: Array, bits: int) -> Array:
    """Returns the fields of some bits of bytes u8[..., n], the lowest first: u8[..., 8 / bits, n]."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(*(1,) * (packed.ndim - 1), -1, 1)
    return (packed[..., None, :] >> shifts) & np.uint8(2**bits - 1)


def _f16(blocks: Array, at: int) -> Array:
    """Returns the half-precision number at a byte of each block: f32[N, 1]."""
    return _u16(blocks[:, at : at + 1], blocks[:, at + 1 : at + 2]).view(np.float16).astype(np.float32)


def _u16(low: Array, high: Array) -> Array:
    return low.astype(np.uint16) | (high.astype(np.uint16) << np.uint16(8))


def _number_of(values: Sequence[int], codes: Array) -> Array:
    """Returns the values i8 of 4-bit codes, chosen bit by bit, for a compiler looks numbers up one at a time."""
    xp = codes.__array_namespace__()
    chosen: list[Any] = [np.int8(value) for value in values]
    for bit in range(4):
        is_set = (codes >> np.uint8(bit)) & np.uint8(1) == 1
        chosen = [xp.where(is_set, odd, even) for even, odd in zip(chosen[::2], chosen[1::2], strict=True)]
    return chosen[0]


def _rounded(products: Array) -> Array:
    """Returns products as rounded to float32; a compiler could otherwise keep more of their bits in a later sum."""
    return products.__array_namespace__().maximum(products, LEAST)


def _f32(blocks: np.ndarray) -> Planes:
    return (blocks.view("<f4"),)


def _half(blocks: np.ndarray) -> Planes:
    return (blocks.view("<f2").astype(np.float32),)


def _bf16(blocks: np.ndarray) -> Planes:
    return ((blocks.view("<u2").astype(np.uint32) << 16).view(np.float32),)


def _scale(blocks: Array) -> Levels:
    return _f16(blocks, 0), None


def _scale_and_offset(blocks: Array) -> Levels:
    return _f16(blocks, 0), _f16(blocks, 2)


def _q8_0(blocks: Array) -> Planes:
    return (blocks[:, 2:].view(np.int8),)


def _q4_0(blocks: Array) -> Planes:
    return (fields(blocks[:, 2:], 4),)


def _q4_1(blocks: Array) -> Planes:
    return (fields(blocks[:, 4:], 4),)


def _five_bits(high: Array, low: Array) -> Planes:
    """Returns the planes of integers that have one bit in 4 bytes, and four bits in 16."""
    shifts = np.arange(8, dtype=np.uint8).reshape(1, 1, 8)
    return fields(low, 4), ((high[:, :, None] >> shifts) & np.uint8(1)) << np.uint8(4)


def _q5_0(blocks: Array) -> Planes:
    return _five_bits(blocks[:, 2:6], blocks[:, 6:])


def _q5_1(blocks: Array) -> Planes:
    return _five_bits(blocks[:, 4:8], blocks[:, 8:])


def _q2_k(blocks: Array) -> Planes:
    return (fields(blocks[:, 16:80].reshape(-1, 2, 32), 2),)


def _q2_k_levels(blocks: Array) -> Levels:
    factors, minima = (
        bits.astype(np.float32) for bits in (blocks[:, :16] & np.uint8(15), blocks[:, :16] >> np.uint8(4))
    )
    return _f16(blocks, 80) * factors, -_rounded(_f16(blocks, 82) * minima)


def _q3_k(blocks: Array) -> Planes:
    return fields(blocks[:, 32:96].reshape(-1, 2, 32), 2), fields(blocks[:, :32], 1) << np.uint8(2)


def _q3_k_levels(blocks: Array) -> Levels:
    # Six bits of each of the 16 factors: four in the halves of 8 bytes, two in the quarters of 4.
    four = fields(blocks[:, 96:104], 4).reshape(-1, 16)
    two = fields(blocks[:, 104:108], 2).reshape(-1, 16)
    factors = (four | (two << np.uint8(4))).astype(np.float32) - 32
    return _f16(blocks, 108) * factors, None


def _factors_and_minima(blocks: Array) -> Levels:
    """Returns the levels of Q4_K and Q5_K, whose blocks begin alike: two times 8 integers of six bits in 12 bytes.

    bytes 0 to 3   two high bits of factors 4 to 7, factors 0 to 3
    bytes 4 to 7   the same of the minima
    bytes 8 to 11  four low bits of minima 4 to 7, and of factors 4 to 7
    """
    first, rest = blocks[:, 4:12].reshape(-1, 2, 4), fields(blocks[:, 12:16], 4)
    later = rest | ((first >> np.uint8(6)) << np.uint8(4))
    six_bits = [first & np.uint8(63), later]
    joined = blocks.__array_namespace__().concat(six_bits, axis=2).astype(np.float32)
    return _f16(blocks, 0) * joined[:, 0], -_rounded(_f16(blocks, 2) * joined[:, 1])


def _q4_k(blocks: Array) -> Planes:
    return (fields(blocks[:, 16:].reshape(-1, 4, 32), 4),)


def _q5_k(blocks: Array) -> Planes:
    return fields(blocks[:, 48:].reshape(-1, 4, 32), 4), fields(blocks[:, 16:48], 1) << np.uint8(4)


def _q6_k(blocks: Array) -> Planes:
    low = fields(blocks[:, :128].reshape(-1, 2, 64), 4)
    return low, fields(blocks[:, 128:192].reshape(-1, 2, 32), 2) << np.uint8(4)


def _q6_k_levels(blocks: Array) -> Levels:
    return _f16(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32), None


def _iq4_nl(blocks: Array) -> Planes:
    return (_number_of(IQ4_VALUES, fields(blocks[:, 2:], 4)),)


def _iq4_xs(blocks: Array) -> Planes:
    return (_number_of(IQ4_VALUES, fields(blocks[:, 8:].reshape(-1, 8, 16), 4)),)


def _iq4_xs_levels(blocks: Array) -> Levels:
    shifts = np.arange(0, 16, 2, dtype=np.uint16).reshape(1, -1)
    high = (_u16(blocks[:, 2:3], blocks[:, 3:4]) >> shifts).astype(np.uint8) & np.uint8(3)
    low = fields(blocks[:, 4:8], 4).swapaxes(-1, -2).reshape(-1, 8)
    factors = (low | (high << np.uint8(4))).astype(np.float32) - 32
    return _f16(blocks, 0) * factors, None


def _mxfp4(blocks: np.ndarray) -> Planes:
    return (_number_of(E2M1_VALUES, fields(blocks[:, 1:], 4)),)


def _mxfp4_scale(blocks: np.ndarray) -> Levels:
    exponents = blocks[:, :1].astype(np.int32)
    # Half of 2 ** (exponent - 127), because the table has twice the numbers. 255 stands for no number.
    return np.where(exponents == 255, np.float32(np.nan), np.ldexp(np.float32(1), exponents - 128)), None


BLOCK_TYPES = {
    0: BlockType("F32", 1, 4, _f32),
    1: BlockType("F16", 1, 2, _half),
    2: BlockType("Q4_0", 32, 18, _q4_0, _scale, (0,), zero=8),
    3: BlockType("Q4_1", 32, 20, _q4_1, _scale_and_offset, (0, 2)),
    6: BlockType("Q5_0", 32, 22, _q5_0, _scale, (0,), zero=16),
    7: BlockType("Q5_1", 32, 24, _q5_1, _scale_and_offset, (0, 2)),
    8: BlockType("Q8_0", 32, 34, _q8_0, _scale, (0,)),
    10: BlockType("Q2_K", 256, 84, _q2_k, _q2_k_levels, (80, 82)),
    11: BlockType("Q3_K", 256, 110, _q3_k, _q3_k_levels, (108,), zero=4),
    12: BlockType("Q4_K", 256, 144, _q4_k, _factors_and_minima, (0, 2)),
    13: BlockType("Q5_K", 256, 176, _q5_k, _factors_and_minima, (0, 2)),
    14: BlockType("Q6_K", 256, 210, _q6_k, _q6_k_levels, (208,), zero=32),
    20: BlockType("IQ4_NL", 32, 18, _iq4_nl, _scale, (0,)),
    23: BlockType("IQ4_XS", 256, 136, _iq4_xs, _iq4_xs_levels, (0,)),
    30: BlockType("BF16", 1, 2, _bf16),
    39: BlockType("MXFP4", 32, 17, _mxfp4, _mxfp4_scale),
}
# Types of ggml that are named in errors alone.
UNREAD_TYPES = {
    **{9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S"},
    **{24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4"},
}
