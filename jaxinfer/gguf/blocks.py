"""The blocks of ggml: some integers with their scales, as float32, bit for bit the numbers of ggml's C.

A block type has `length` numbers in `num_bytes` bytes. Each function below takes blocks u8[N, num_bytes] and returns
f32[N, length]. The layouts are those of ggml-common.h, and the order of operations that of ggml-quants.c.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

BYTES_AT_ONCE = 2**20  # of float32: its intermediates stay near the processor
IQ4_VALUES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113],
    np.float32,
)
# Twice the numbers of 4 bits with 2 of exponent and 1 of mantissa (OCP Microscaling Formats 1.0).
E2M1_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)


@dataclass(frozen=True)
class BlockType:
    """A type of ggml by its name there, with the way from its blocks to float32."""

    name: str
    length: int  # numbers in a block
    num_bytes: int  # of a block
    decode: Callable[[np.ndarray], np.ndarray]

    @property
    def is_float(self) -> bool:
        """True for types whose blocks are single floating-point numbers."""
        return self.length == 1


def dequantize(blocks: np.ndarray, block_type: BlockType) -> np.ndarray:
    """Returns the numbers f32[..., inputs] of rows of blocks u8[..., row bytes], some blocks at a time.

    ValueError if one of them is infinite or none.
    """
    flat = blocks.reshape(-1, block_type.num_bytes)
    out = np.empty((len(flat), block_type.length), np.float32)
    step = max(BYTES_AT_ONCE // (4 * block_type.length), 1)
    for start in range(0, len(flat), step):
        with np.errstate(over="ignore", invalid="ignore"):
            piece = block_type.decode(np.ascontiguousarray(flat[start : start + step]))
        if not np.isfinite(piece).all():
            raise ValueError("a weight or a scale is infinite or no number")
        out[start : start + step] = piece
    return out.reshape(*blocks.shape[:-1], -1)


def q8_0_integers(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the integers i8[..., inputs] and scales f16[..., inputs / 32] of rows of Q8_0."""
    rows = blocks.reshape(*blocks.shape[:-1], -1, 34)
    return _joined(rows[..., 2:].view(np.int8)), _joined(np.ascontiguousarray(rows[..., :2]).view("<f2"))


def q4_0_integers(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the integers i8[..., inputs], from -8 to 7, and scales f16[..., inputs / 32] of rows of Q4_0."""
    rows = blocks.reshape(*blocks.shape[:-1], -1, 18)
    values = _halves(rows[..., 2:]).view(np.int8) - np.int8(8)
    values = values.reshape(*rows.shape[:-1], 32)
    return _joined(values), _joined(np.ascontiguousarray(rows[..., :2]).view("<f2"))


def mxfp4_codes(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the codes of E2M1 u8[..., inputs], and exponents of 2 plus 127 u8[..., inputs / 32] of rows of MXFP4."""
    rows = blocks.reshape(*blocks.shape[:-1], -1, 17)
    return _joined(_halves(rows[..., 1:]).reshape(*rows.shape[:-1], 32)), rows[..., 0]


def _joined(rows: np.ndarray) -> np.ndarray:
    """Joins the last two axes."""
    return rows.reshape(*rows.shape[:-2], -1)


def _halves(packed: np.ndarray) -> np.ndarray:
    """Returns the low halves of bytes u8[..., n], then the high ones: u8[..., 2, n]."""
    return np.stack([packed & 15, packed >> 4], -2)


def _pairs_of_bits(packed: np.ndarray) -> np.ndarray:
    """Returns the four pairs of bits of bytes u8[..., n], the lowest first: u8[..., 4, n]."""
    return np.stack([(packed >> shift) & 3 for shift in (0, 2, 4, 6)], -2)


def _bits(packed: np.ndarray) -> np.ndarray:
    """Returns the eight bits of bytes u8[..., n], the lowest first: u8[..., 8, n]."""
    return np.stack([(packed >> shift) & 1 for shift in range(8)], -2)


def _f16(blocks: np.ndarray, at: int) -> np.ndarray:
    """Returns the half-precision number at a byte of each block: f32[N, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _scaled(scales: np.ndarray, integers: np.ndarray) -> np.ndarray:
    """Multiplies integers [N, groups, n] by the scales f32[N, groups] of their groups."""
    return scales[:, :, None] * integers.astype(np.float32)


def _f32(blocks: np.ndarray) -> np.ndarray:
    return blocks.view("<f4")


def _half(blocks: np.ndarray) -> np.ndarray:
    return blocks.view("<f2").astype(np.float32)


def _bf16(blocks: np.ndarray) -> np.ndarray:
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _q8_0(blocks: np.ndarray) -> np.ndarray:
    return _f16(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _q4_0(blocks: np.ndarray) -> np.ndarray:
    integers = _halves(blocks[:, 2:]).reshape(-1, 32).astype(np.float32) - 8
    return _f16(blocks, 0) * integers


def _q4_1(blocks: np.ndarray) -> np.ndarray:
    integers = _halves(blocks[:, 4:]).reshape(-1, 32).astype(np.float32)
    return _f16(blocks, 0) * integers + _f16(blocks, 2)


def _five_bits(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """Returns integers f32[N, 32] from a bit of each in 4 bytes, and four bits of each in 16."""
    top = np.unpackbits(high, axis=-1, bitorder="little")
    return (_halves(low).reshape(-1, 32) | (top << 4)).astype(np.float32)


def _q5_0(blocks: np.ndarray) -> np.ndarray:
    return _f16(blocks, 0) * (_five_bits(blocks[:, 2:6], blocks[:, 6:]) - 16)


def _q5_1(blocks: np.ndarray) -> np.ndarray:
    return _f16(blocks, 0) * _five_bits(blocks[:, 4:8], blocks[:, 8:]) + _f16(blocks, 2)


def _q2_k(blocks: np.ndarray) -> np.ndarray:
    factors = blocks[:, :16]
    integers = _pairs_of_bits(blocks[:, 16:80].reshape(-1, 2, 32)).reshape(-1, 16, 16)
    scales = _f16(blocks, 80) * (factors & 15).astype(np.float32)
    minima = _f16(blocks, 82) * (factors >> 4).astype(np.float32)
    return (_scaled(scales, integers) - minima[:, :, None]).reshape(-1, 256)


def _q3_k(blocks: np.ndarray) -> np.ndarray:
    low = _pairs_of_bits(blocks[:, 32:96].reshape(-1, 2, 32)).reshape(-1, 16, 16)
    high = _bits(blocks[:, :32]).reshape(-1, 16, 16)
    integers = (low | (high << 2)).astype(np.int8) - np.int8(4)
    # Six bits of each of the 16 factors: four in the halves of 8 bytes, two in the quarters of 4.
    four = _halves(blocks[:, 96:104]).reshape(-1, 16)
    two = _pairs_of_bits(blocks[:, 104:108]).reshape(-1, 16)
    factors = (four | (two << 4)).astype(np.float32) - 32
    return _scaled(_f16(blocks, 108) * factors, integers).reshape(-1, 256)


def _factors_and_minima(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns two times 8 integers of six bits, f32[N, 8] each, from the 12 bytes of Q4_K and Q5_K.

    bytes 0 to 3   two high bits of factors 4 to 7, factors 0 to 3
    bytes 4 to 7   the same of the minima
    bytes 8 to 11  four low bits of minima 4 to 7, and of factors 4 to 7
    """
    factors, minima, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    later_factors = (rest & 15) | (factors >> 6 << 4)
    later_minima = (rest >> 4) | (minima >> 6 << 4)
    pairs = ((factors & 63, later_factors), (minima & 63, later_minima))
    first, second = (np.concatenate(pair, -1).astype(np.float32) for pair in pairs)
    return first, second


def _with_minima(blocks: np.ndarray, integers: np.ndarray) -> np.ndarray:
    """Returns the numbers of Q4_K and Q5_K, whose blocks begin alike, from their integers [N, 8, 32]."""
    factors, minima = _factors_and_minima(blocks[:, 4:16])
    offsets = _f16(blocks, 2) * minima
    return (_scaled(_f16(blocks, 0) * factors, integers) - offsets[:, :, None]).reshape(-1, 256)


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    return _with_minima(blocks, _halves(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32))


def _q5_k(blocks: np.ndarray) -> np.ndarray:
    low = _halves(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return _with_minima(blocks, low | (_bits(blocks[:, 16:48]) << 4))


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    low = _halves(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 16, 16)
    high = _pairs_of_bits(blocks[:, 128:192].reshape(-1, 2, 32)).reshape(-1, 16, 16)
    integers = (low | (high << 4)).astype(np.int8) - np.int8(32)
    factors = blocks[:, 192:208].view(np.int8).astype(np.float32)
    return _scaled(_f16(blocks, 208) * factors, integers).reshape(-1, 256)


def _iq4_nl(blocks: np.ndarray) -> np.ndarray:
    return _f16(blocks, 0) * IQ4_VALUES[_halves(blocks[:, 2:]).reshape(-1, 32)]


def _iq4_xs(blocks: np.ndarray) -> np.ndarray:
    high = np.ascontiguousarray(blocks[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16)
    low = _halves(blocks[:, 4:8]).swapaxes(-1, -2).reshape(-1, 8)
    factors = (low | ((high & 3) << 4)).astype(np.float32) - 32
    values = IQ4_VALUES[_halves(blocks[:, 8:].reshape(-1, 8, 16)).reshape(-1, 8, 32)]
    return _scaled(_f16(blocks, 0) * factors, values).reshape(-1, 256)


def _mxfp4(blocks: np.ndarray) -> np.ndarray:
    exponents = blocks[:, :1].astype(np.int32)
    # Half of 2 ** (exponent - 127), because the table has twice the numbers. 255 stands for no number.
    scales = np.where(exponents == 255, np.float32(np.nan), np.ldexp(np.float32(1), exponents - 128))
    return scales * E2M1_VALUES[_halves(blocks[:, 1:]).reshape(-1, 32)]


BLOCK_TYPES = {
    0: BlockType("F32", 1, 4, _f32),
    1: BlockType("F16", 1, 2, _half),
    2: BlockType("Q4_0", 32, 18, _q4_0),
    3: BlockType("Q4_1", 32, 20, _q4_1),
    6: BlockType("Q5_0", 32, 22, _q5_0),
    7: BlockType("Q5_1", 32, 24, _q5_1),
    8: BlockType("Q8_0", 32, 34, _q8_0),
    10: BlockType("Q2_K", 256, 84, _q2_k),
    11: BlockType("Q3_K", 256, 110, _q3_k),
    12: BlockType("Q4_K", 256, 144, _q4_k),
    13: BlockType("Q5_K", 256, 176, _q5_k),
    14: BlockType("Q6_K", 256, 210, _q6_k),
    20: BlockType("IQ4_NL", 32, 18, _iq4_nl),
    23: BlockType("IQ4_XS", 256, 136, _iq4_xs),
    30: BlockType("BF16", 1, 2, _bf16),
    39: BlockType("MXFP4", 32, 17, _mxfp4),
}
# Types of ggml that are named in errors alone.
UNREAD_TYPES = {
    **{9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S"},
    **{24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4"},
}
