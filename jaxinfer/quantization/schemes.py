"""The schemes of quantized copies: how weights become integers or FP8 with a scale per group of inputs or per channel.

Integers of b bits go from -2^(b - 1) to 2^(b - 1) - 1, and one end is further from 0. Calibrated scales may be
negative, so that each group has the longer end on the side that needs it: of four numbers, none is lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import ml_dtypes
import numpy as np

from jaxinfer.quantization.gptq import Feedback, refined, round_with_feedback
from jaxinfer.quantization.quantized_array import INT4_GROUP_SIZE, LARGEST

FLOAT8_MAX = 448.0
# Scales that calibration tries, in parts of those that reach the largest weight of their group.
SHRINKS = np.linspace(1.1, 0.3, 17, dtype=np.float32)
# Numbers i8 or f8[out, in] and scales [out, groups].
Rounded = tuple[np.ndarray, np.ndarray]


class Scheme(NamedTuple):
    """How weights are rounded: integers of `bits`, or FP8, with a scale per group of inputs or per channel."""

    bits: int
    is_float: bool = False
    group_size: int | None = None  # None: a scale per channel

    @property
    def needs_texts(self) -> bool:
        """True if weights rounded to the nearest number are of no use."""
        return self.bits not in LARGEST

    def to_grid(self, numbers: np.ndarray) -> np.ndarray:
        """Returns the integers or FP8 numbers, in float32, that are nearest to f32 numbers."""
        if self.is_float:
            clipped = np.clip(numbers, -FLOAT8_MAX, FLOAT8_MAX)
            return clipped.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        return np.rint(np.clip(numbers, -(2 ** (self.bits - 1)), 2 ** (self.bits - 1) - 1))

    def narrowed(self, numbers: np.ndarray) -> np.ndarray:
        """Returns numbers f32 of the grid in i8 or f8."""
        return numbers.astype(ml_dtypes.float8_e4m3fn if self.is_float else np.int8)


SCHEMES: Mapping[str, Scheme] = {
    "int4": Scheme(4, group_size=INT4_GROUP_SIZE),
    "int3": Scheme(3, group_size=INT4_GROUP_SIZE),
    "int2": Scheme(2, group_size=INT4_GROUP_SIZE),
    "int8": Scheme(8),
    "fp8": Scheme(8, is_float=True),
}


def round_to_nearest(w: np.ndarray, size: int, scheme: Scheme) -> Rounded:
    """Returns the numbers nearest to weights [out, in], and scales in their type for groups of `size` inputs.

    Scales reach the largest weight of each group.
    """
    groups = w.astype(np.float32).reshape(len(w), -1, size)
    largest = FLOAT8_MAX if scheme.is_float else LARGEST[scheme.bits]
    scales = _in_type(np.abs(groups).max(-1) / np.float32(largest), w.dtype)
    return scheme.narrowed(scheme.to_grid(groups / scales.astype(np.float32)[..., None]).reshape(w.shape)), scales


def round_by_moments(w: np.ndarray, size: int, scheme: Scheme, feedback: Feedback) -> Rounded:
    """Returns numbers and scales as `round_to_nearest` does, by GPTQ for weights whose inputs have this feedback.

    A group begins with the scale whose errors, squared and times the moments of their inputs, add up to least.
    """
    wide = w.astype(np.float32)
    scales = _best_scales(wide.reshape(len(w), -1, size), w.dtype, scheme, np.diagonal(feedback.moments))
    steps = scales.astype(np.float32)

    def nearest(column: np.ndarray, i: int) -> np.ndarray:
        return scheme.to_grid(column / steps[:, i // size]) * steps[:, i // size]

    on_grid = round_with_feedback(wide, feedback, nearest)
    numbers = scheme.to_grid(on_grid / np.repeat(steps, size, axis=1))
    numbers, scales = refined(wide, numbers, scales, feedback, scheme.to_grid)
    return scheme.narrowed(numbers), scales


def words(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Returns i32[out, in bits / 32], rounded up, of integers i8[out, in], shifted to begin at 0.

    They are a stream of bits, the first in the lowest of a word, and may cross from a word to the next.
    """
    codes = numbers.view(np.uint8) + np.uint8(2 ** (bits - 1))
    stream = np.unpackbits(codes[..., None], axis=-1, count=bits, bitorder="little").reshape(len(codes), -1)
    return np.packbits(np.pad(stream, ((0, 0), (0, -stream.shape[1] % 32))), axis=1, bitorder="little").view(np.int32)


def _best_scales(groups: np.ndarray, dtype: np.dtype, scheme: Scheme, importance: np.ndarray) -> np.ndarray:
    _, num_groups, size = groups.shape
    reach = np.abs(groups).max(-1) / np.float32(FLOAT8_MAX if scheme.is_float else 2 ** (scheme.bits - 1))
    least, scales = np.float32(np.inf), _in_type(reach, dtype)
    for shrink in SHRINKS if scheme.is_float else (*SHRINKS, *-SHRINKS):
        tried = _in_type(reach * shrink, dtype)
        steps = tried.astype(np.float32)[..., None]
        errors = scheme.to_grid(groups / steps) * steps - groups
        cost = np.einsum("ogi,gi->og", errors * errors, importance.reshape(num_groups, size))
        scales, least = np.where(cost < least, tried, scales), np.minimum(cost, least)
    return scales


def _in_type(scales: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Returns scales in their type: 1 where one is too small for it, as that of a group of zeros, which has any."""
    narrow = scales.astype(dtype)
    return np.where(narrow.astype(np.float32) != 0, narrow, np.ones((), dtype))
