"""A GGUF file as its metadata and a table of tensors that stay on disk until they are read.

    magic and counts │ keys and values │ name, shape, type and offset per tensor │ padding │ tensors, aligned
    └───────────────────────────── header ─────────────────────────────────────┘

The layout is that of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3. Every count is
compared with the rest of the file before anything is made of it.
"""

from __future__ import annotations

import functools
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer.gguf.blocks import BLOCK_TYPES, UNREAD_TYPES, BlockType

SUFFIX = ".gguf"
MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 100_000_000  # twice the largest published vocabulary with its merges takes a fifth of it
MAX_AXES = 4
MAX_ALIGNMENT = 2**16
DEFAULT_ALIGNMENT = 32
BOOL, STRING, ARRAY = 7, 8, 9
NUMBERS = {
    number: np.dtype(name).newbyteorder("<")
    for number, name in {
        **{0: "u1", 1: "i1", 2: "u2", 3: "i2", 4: "u4", 5: "i4"},
        **{6: "f4", 10: "u8", 11: "i8", 12: "f8"},
    }.items()
}
# The least bytes of a key with its value, and of a tensor's entry; the bytes of a string's length.
KEY_BYTES, ENTRY_BYTES, LENGTH_BYTES = 13, 32, 8
MAX_KEYS, MAX_TENSORS = 2**16, 2**17
Value = bool | int | float | str | np.ndarray | tuple[str, ...]


@dataclass(frozen=True)
class BlockTensor:
    """Where a tensor lies: its last axis in blocks of `type`, `offset` in bytes from the file's start."""

    path: Path
    type: BlockType
    shape: tuple[int, ...]  # outermost axis first, the opposite of the file's order
    offset: int

    @property
    def row_bytes(self) -> int:
        """Bytes of the last axis."""
        return self.shape[-1] // self.type.length * self.type.num_bytes

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape[:-1], dtype=object)) * self.row_bytes

    def map(self) -> np.ndarray:
        """Returns the blocks as a read-only view of the file, u8[..., row_bytes]."""
        shape = (*self.shape[:-1], self.row_bytes)
        return np.asarray(np.memmap(self.path, np.uint8, "r", self.offset, shape))

    def part(self, index: int) -> BlockTensor:
        """Returns one entry of the outermost axis."""
        size = self.num_bytes // self.shape[0]
        return BlockTensor(self.path, self.type, self.shape[1:], self.offset + index * size)


@dataclass(frozen=True)
class GGUFFile:
    """A file's metadata by key, and its tensors by name."""

    path: Path
    metadata: Mapping[str, Value]  # arrays of numbers are arrays, arrays of strings are tuples
    tensors: Mapping[str, BlockTensor]


class _DamagedError(Exception):
    """A place of the file contradicts the format."""


def is_gguf(path: Path) -> bool:
    """True for the path of a GGUF file, there or not; its ending decides."""
    return path.suffix == SUFFIX and not path.is_dir()


def read_gguf(path: Path) -> GGUFFile:
    """Returns the file's metadata and tensors, each of which lies inside the file and beside the others.

    A file that is damaged, cut short, or of another format or version is a ValueError, as is a tensor of an
    unsupported type. The last file is kept, as long as its size and time of change stay the same.
    """
    state = path.stat()
    return _read(path, state.st_size, state.st_mtime_ns)


@functools.lru_cache(maxsize=2)  # a vocabulary takes a second to read, and loading asks for it several times
def _read(path: Path, size: int, _: int) -> GGUFFile:
    if size < len(MAGIC):
        raise ValueError(f"{path} has {size} bytes, which are no GGUF file; download it again")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if content[: len(MAGIC)] != MAGIC:
            raise ValueError(f"{path} begins with {content[: len(MAGIC)]!r}, not {MAGIC!r}; give a GGUF file")
        try:
            return _parse(path, content)
        except _DamagedError as error:
            raise ValueError(f"{path} ({size} bytes) is damaged: {error}; download it again") from None


def _parse(path: Path, content: mmap.mmap) -> GGUFFile:
    reader = _Reader(content)
    version = reader.number("<I")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "big"), "little")
        found = f"{swapped} in big-endian" if swapped in VERSIONS else version
        raise ValueError(f"{path} has version {found}, not 2 or 3 in little-endian; convert the model again")
    num_tensors, num_keys = (reader.number("<Q") for _ in range(2))
    for count, least, most, what in (
        (num_keys, KEY_BYTES, MAX_KEYS, "keys"),
        (num_tensors, ENTRY_BYTES, MAX_TENSORS, "tensors"),
    ):
        reader.require_room(count, least, what)
        if count > most:
            raise ValueError(f"{path} has {count:,} {what}, more than {most:,}; use another file of the model")
    metadata: dict[str, Value] = {}
    for _ in range(num_keys):
        key = reader.string("a key")
        if key in metadata:
            raise _DamagedError(f"key {key!r} is there twice")
        metadata[key] = reader.value(key)
    entries = [_entry(reader) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    is_power = isinstance(alignment, int) and alignment in {2**i for i in range(MAX_ALIGNMENT.bit_length())}
    if not isinstance(alignment, int) or not is_power:
        raise _DamagedError(f"general.alignment={alignment!r} is no power of 2 up to {MAX_ALIGNMENT}")
    start = -(-reader.position // alignment) * alignment
    tensors = {}
    for name, shape, type_number, offset in entries:
        if name in tensors:
            raise _DamagedError(f"tensor {name!r} is there twice")
        if offset % alignment:
            raise _DamagedError(f"tensor {name!r} begins at {offset}, no multiple of the alignment {alignment}")
        block = _block_type(path, name, type_number)
        if shape[-1] % block.length:
            raise _DamagedError(f"tensor {name!r} has rows of {shape[-1]} numbers, no whole blocks of {block.name}")
        tensors[name] = BlockTensor(path, block, shape, start + offset)
    _require_places(tensors, len(content))
    return GGUFFile(path, metadata, tensors)


def _entry(reader: _Reader) -> tuple[str, tuple[int, ...], int, int]:
    """Returns the name, shape, type and offset of the next tensor."""
    name, num_axes = reader.string("a tensor's name"), reader.number("<I")
    if not 1 <= num_axes <= MAX_AXES:
        raise _DamagedError(f"tensor {name!r} has {num_axes} axes, not 1 to {MAX_AXES}")
    shape = tuple(reader.number("<Q") for _ in range(num_axes))[::-1]
    if not all(shape):
        raise _DamagedError(f"tensor {name!r} of shape {shape} is empty")
    return name, shape, reader.number("<I"), reader.number("<Q")


def _block_type(path: Path, name: str, number: int) -> BlockType:
    if number not in BLOCK_TYPES:
        known = ", ".join(block.name for block in BLOCK_TYPES.values())
        raise ValueError(
            f"{path}: tensor {name!r} is of type {UNREAD_TYPES.get(number, number)}, not one of {known}; use a file of"
            " these types"
        )
    return BLOCK_TYPES[number]


def _require_places(tensors: Mapping[str, BlockTensor], size: int) -> None:
    """Raises for a tensor that reaches beyond the file or into another one."""
    end, before = 0, ""
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
        if tensor.offset < end:
            raise _DamagedError(f"tensor {name!r} begins inside {before!r}")
        end, before = tensor.offset + tensor.num_bytes, name
        if end > size:
            raise _DamagedError(f"tensor {name!r} ends at {end}, beyond the file")


class _Reader:
    """Takes values one after another from the header."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self._end = min(len(content), MAX_HEADER_BYTES)
        self.position = len(MAGIC)

    def require_room(self, count: int, least: int, what: str) -> None:
        """Raises if `count` items of `least` bytes or more cannot follow."""
        if count * least > self._end - self.position:
            raise _DamagedError(
                f"{count:,} {what} at byte {self.position} are more than the rest of the header may have"
                f" ({self._end - self.position} bytes)"
            )

    def number(self, form: str) -> Any:
        self.require_room(1, struct.calcsize(form), "numbers")
        (number,) = struct.unpack_from(form, self._content, self.position)
        self.position += struct.calcsize(form)
        return number

    def string(self, what: str) -> str:
        (string,) = self._strings(what, 1)
        return string

    def _strings(self, what: str, count: int) -> tuple[str, ...]:
        self.require_room(count, LENGTH_BYTES, "strings")
        content, strings = self._content, []
        for _ in range(count):  # half a microsecond each: the largest headers have 12 million
            begin = self.position + LENGTH_BYTES
            length = int.from_bytes(content[self.position : begin], "little")
            if begin + length > self._end:
                self.require_room(LENGTH_BYTES + length, 1, "bytes")
            try:
                strings.append(content[begin : begin + length].decode())
            except UnicodeDecodeError as error:
                raise _DamagedError(f"{what} at byte {begin} is not UTF-8 ({error.reason})") from None
            self.position = begin + length
        return tuple(strings)

    def value(self, key: str) -> Value:
        kind = self.number("<I")
        if kind == ARRAY:
            return self._array(key)
        if kind == STRING:
            return self.string(key)
        (value,) = self._numbers(key, kind, 1).tolist()
        # Shortest decimals give the number back that was written as float32, such as 1e-05.
        return float(str(np.float32(value))) if kind == 6 else value

    def _array(self, key: str) -> np.ndarray | tuple[str, ...]:
        kind, count = self.number("<I"), self.number("<Q")
        return self._strings(key, count) if kind == STRING else self._numbers(key, kind, count)

    def _numbers(self, key: str, kind: int, count: int) -> np.ndarray:
        dtype = np.dtype(np.uint8) if kind == BOOL else NUMBERS.get(kind)
        if dtype is None:
            raise _DamagedError(f"{key} has a value of type {kind}, which is none or an array of arrays")
        self.require_room(count, dtype.itemsize, "numbers")
        begin, self.position = self.position, self.position + count * dtype.itemsize
        numbers = np.frombuffer(self._content[begin : self.position], dtype)
        if kind != BOOL:
            return numbers
        if count and numbers.max() > 1:
            raise _DamagedError(f"{key} has a truth value of {numbers.max()}")
        return numbers.astype(bool)
