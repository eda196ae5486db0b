"""Weights as a checkpoint packs them, in a form that no longer knows the file's layout."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxinfer.checkpoint.safetensors_file import StoredTensor
from jaxinfer.quantization.activations import Activations
from jaxinfer.quantization.planes import fit_planes

FP4 = "float4_e2m1fn"
# Of the codes of FP4.
FP4_NUMBERS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)

# Of a weight, that are unpacked at once: they and what is made of them on the way take some megabytes.
NUMBERS_AT_ONCE = 2**18
# Of keys and values. float16, the narrowest type of parameters, holds them without loss of range.
LEAST_SCALE, LARGEST_SCALE = 2.0**-14, 2.0**15


class Grid(NamedTuple):
    """How a packed weight stands for its numbers. Layers of one stack have the same."""

    code: str  # of a number as the device holds it: "int2" to "int8", "float8_e4m3fn" or FP4
    num_groups: int  # of inputs, each with a scale per output
    scale_dtype: str
    has_zeros: bool
    has_order: bool
    has_multiplier: bool = False
    activations: Activations | None = None  # None: they are not rounded
    block_outputs: int = 1  # neighbours that have the same scales

    @property
    def bits_in_planes(self) -> int | None:
        """The bits of integers that lie in planes, None if they lie in none."""
        bits = int(self.code.removeprefix("int")) if self.code.startswith("int") else 8
        return None if bits in (4, 8) else bits


def code_of_integers(bits: int, group_size: int) -> str:
    """Returns the code of a `Grid` for integers of 2 to 8 bits: of 4 or 8 if planes of a group are no whole bytes."""
    return f"int{bits if fit_planes(bits, group_size) else 4 if bits <= 4 else 8}"


@dataclass(frozen=True)
class StoredQuantized:
    """A weight [out..., in] in 8 bits or less: (value - zero) * scale, both of which a group of inputs shares.

    A `multiplier` of all scales is the sum of two numbers; see `split_multiplier`.

    Arrays are read, and brought into this form, when they are asked for: of values, which are the most, only some rows
    at once. A row has the inputs of one output, and rows count all axes of outputs as one. With an `order`, value j of
    a row is that of input order[j]. Reading raises ValueError for what the format does not allow.
    """

    shape: tuple[int, ...]
    grid: Grid
    values: Callable[[slice], np.ndarray]  # i8 or f8[rows, in]; codes u8 of FP4
    scales: Callable[[], np.ndarray]  # f[out..., groups]; u8 are exponents of 2, less 127
    zeros: Callable[[], np.ndarray] | None = None  # i8[out..., groups]
    order: Callable[[], np.ndarray] | None = None  # i32[in]
    multiplier: Callable[[], np.ndarray] | None = None  # f32[2]
    input_range: Callable[[], np.ndarray] | None = None  # f32[3] of `round_rows`

    def floats(self, dtype: Any = np.float32) -> np.ndarray:
        """Returns the weight [out..., in], computed in float32."""
        scales = self.scales().reshape(-1, self.grid.num_groups)
        places = None if self.order is None else np.argsort(self.order())
        multiplier = None if self.multiplier is None else self.multiplier()
        zeros = None if self.zeros is None else self.zeros().reshape(scales.shape)

        def read(rows: slice) -> np.ndarray:
            own, values = scales[rows], self.values(rows)
            values = FP4_NUMBERS[values] if self.grid.code == FP4 else values.astype(np.float32)
            wide = np.exp2(own.astype(np.float32) - 127) if own.dtype == np.uint8 else own.astype(np.float32)
            if multiplier is not None:
                wide = wide * multiplier[0] + wide * multiplier[1]
            values = values.reshape(*own.shape, -1)
            if zeros is not None:  # float32 holds the differences of integers
                values -= zeros[rows][..., None].astype(np.float32)
            floats = (values * wide[..., None]).reshape(len(own), -1).astype(dtype)
            return floats if places is None else floats[:, places]

        return in_pieces(read, self.shape)


class Blocks(NamedTuple):
    """How rows of blocks stand for their numbers. Layers of one stack have the same."""

    type: str  # a name of `jaxinfer.gguf.blocks.BLOCK_TYPES`
    row_bytes: int


@dataclass(frozen=True)
class StoredBlocks:
    """A tensor in blocks, which are read as they are, or as floating point.

    Some rows are read at once, as of `StoredQuantized`. Reading raises ValueError for a number or a scale that is
    infinite or none.
    """

    shape: tuple[int, ...]
    grid: Blocks | None  # None: the device holds floating point
    blocks: Callable[[slice], np.ndarray]  # u8[rows, row bytes]
    numbers: Callable[[slice], np.ndarray]  # f32[rows, in]
    dtype: str = "F32"  # of `map`

    def floats(self, dtype: Any = np.float32) -> np.ndarray:
        """Returns the tensor [shape]."""
        return in_pieces(lambda rows: self.numbers(rows).astype(dtype), self.shape)

    def map(self) -> np.ndarray:
        """Returns the tensor f32[shape], made anew at each call."""
        return self.floats()


@dataclass(frozen=True)
class StoredScale:
    """The scale of a layer's keys or values in FP8. Reading raises ValueError if it is no such number."""

    name: str
    tensor: StoredTensor
    shape: tuple[int, ...] = (1,)  # of what `map` returns

    @property
    def dtype(self) -> str:
        return self.tensor.dtype

    def map(self) -> np.ndarray:
        """Returns the scale f[1]."""
        scale = self.tensor.map().reshape(1)
        if not LEAST_SCALE <= scale[0] <= LARGEST_SCALE:
            raise ValueError(
                f"{self.name} is {scale[0]}, not between {LEAST_SCALE} and {LARGEST_SCALE}; download the checkpoint"
                " again, or use one without it"
            )
        return scale


Stored = StoredTensor | StoredQuantized | StoredBlocks | StoredScale


def in_pieces(read: Callable[[slice], np.ndarray], shape: tuple[int, ...], row_size: int | None = None) -> np.ndarray:
    """Returns a tensor [shape] whose rows `read` returns, some at once, and for each unpacks `row_size` numbers."""
    *outputs, inputs = shape
    step, whole = max(NUMBERS_AT_ONCE // (row_size or inputs), 1), None
    for start in range(0, math.prod(outputs), step):
        piece = read(slice(start, min(start + step, math.prod(outputs))))
        if whole is None:
            whole = np.empty((math.prod(outputs), inputs), piece.dtype)
        whole[start : start + step] = piece
    assert whole is not None
    return whole.reshape(shape)


def unpacked(words: np.ndarray, bits: int, *, axis: int = 0) -> np.ndarray:
    """Returns the unsigned integers u8 of a stream of `bits` along an axis of words i32, the first in the lowest bits.

    They may cross from a word to the next: 32 integers of 3 bits lie in 3 words.
    """
    octets = np.ascontiguousarray(np.moveaxis(words, axis, -1)).view(np.uint8)
    count = octets.shape[-1] * 8 // bits
    if 8 % bits == 0:
        numbers = np.empty((*octets.shape, 8 // bits), np.uint8)
        for i in range(8 // bits):
            numbers[..., i] = (octets >> (bits * i)) & (2**bits - 1)
    else:
        stream = np.unpackbits(octets, axis=-1, bitorder="little")[..., : count * bits]
        stream = stream.reshape(*octets.shape[:-1], count, bits)
        numbers = np.zeros(stream.shape[:-1], np.uint8)
        for i in range(bits):
            numbers |= stream[..., i] << i
    return np.moveaxis(numbers.reshape(*octets.shape[:-1], count), -1, axis)


def centred(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Returns i8 of unsigned integers u8 of `bits`, less half their range."""
    if bits == 8:
        return (numbers ^ 128).view(np.int8)
    return numbers.view(np.int8) - np.int8(2 ** (bits - 1))


def split_multiplier(number: np.float64) -> np.ndarray:
    """Returns f32[2] whose sum is a number, so that scales f8_e4m3 times each and added are rounded once.

    The first has 20 bits and such a scale four, which makes an exact product of 24.
    """
    mantissa, exponent = np.frexp(number)
    high = np.ldexp(np.rint(np.ldexp(mantissa, 20)), exponent - 20)
    return np.array([high, number - high], np.float32)


def require_finite(name: str, scales: np.ndarray) -> np.ndarray:
    """Returns scales; raises ValueError if one is no finite number, as 255 is of exponents u8 (E8M0)."""
    is_finite = scales != 255 if scales.dtype == np.uint8 else np.isfinite(scales.astype(np.float32))
    if not is_finite.all():
        raise ValueError(f"{name} has scales that are no finite numbers; download the checkpoint again")
    return scales


def require_even(name: str, group_size: int, bits: int) -> None:
    """Raises ValueError for groups that bytes of two numbers would split."""
    if bits <= 4 and group_size % 2:
        raise ValueError(
            f"{name} has {bits} bits in groups of {group_size} inputs, an odd number; use another checkpoint"
        )


def settings_error(method: str, key: str, value: Any, way_out: str) -> ValueError:
    return ValueError(f"quantization_config of {method}: {key}={value!r} is not supported; {way_out}")
