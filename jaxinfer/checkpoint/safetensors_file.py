"""A safetensors file as a table of arrays that stay on disk until they are read.

The layout is 8 bytes with the header's length, the header in JSON, and the tensors one after another; see
https://github.com/huggingface/safetensors. Mapping the file, rather than reading tensors through the library,
lets a device's slice of a tensor be taken through any view of it while the rest of the tensor is never read.
"""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # as the format says
DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
INTEGERS = {
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
}
NO_FILE = Path()
FLOAT8 = {"F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn)}


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: `dtype` is the format's own name, `offset` is in bytes from the file's start."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def map(self) -> np.ndarray:
        """Returns the tensor as a read-only view of the file; only what is then indexed is read."""
        return np.asarray(np.memmap(self.path, (DTYPES | INTEGERS | FLOAT8)[self.dtype], "r", self.offset, self.shape))


@dataclass(frozen=True)
class StatedTensor(StoredTensor):
    """A tensor without a file, and its numbers if they follow from its shape."""

    numbers: tuple[int, ...] | None = None

    def map(self) -> np.ndarray:
        """Returns its numbers; RuntimeError if they are not known."""
        if self.numbers is None:
            raise RuntimeError("the numbers of a tensor were asked for, of which only the shape is known")
        return np.array(self.numbers, INTEGERS[self.dtype]).reshape(self.shape)


def stated(dtype: str, *shape: int, numbers: tuple[int, ...] | None = None) -> StatedTensor:
    """Returns a tensor of this type and shape, without a file."""
    return StatedTensor(NO_FILE, dtype, shape, 0, numbers)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Returns the file's tensors by name, having checked that each lies inside the file.

    A file that is cut short or not of this format is a ValueError.
    """
    header, start = _parse_header(path)
    header.pop("__metadata__", None)
    size = path.stat().st_size
    tensors = {name: _locate(path, name, entry, start) for name, entry in header.items()}
    end = start + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if end != size:
        raise ValueError(
            f"{path} has {size} bytes but its header describes {end}; the file is damaged or incomplete:"
            " download it again"
        )
    return tensors


def read_metadata(path: Path) -> Any:
    """Returns the file's own metadata, {} if it has none; ValueError if it is not of this format."""
    return _parse_header(path)[0].get("__metadata__", {})


def _parse_header(path: Path) -> tuple[dict[str, Any], int]:
    """Returns the header as it is stored, and the place of the first tensor."""
    size = path.stat().st_size
    header = None
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if length <= min(size - LENGTH_BYTES, MAX_HEADER_BYTES):
            with contextlib.suppress(ValueError, RecursionError):
                header = json.loads(file.read(length))
    if not isinstance(header, dict):
        raise ValueError(
            f"{path} ({size} bytes) is not a complete safetensors file: its header cannot be read; download it again"
        )
    return header, LENGTH_BYTES + length


def _locate(path: Path, name: str, entry: Any, start: int) -> StoredTensor:
    try:
        begin, end = entry["data_offsets"]
        shape = tuple(entry["shape"])
        dtype = (DTYPES | INTEGERS | FLOAT8).get(entry["dtype"])
        if not all(isinstance(number, int) and not isinstance(number, bool) for number in (begin, end, *shape)):
            raise ValueError("integers are needed")
        if not 0 <= begin <= end or (dtype is not None and end - begin != dtype.itemsize * math.prod(shape)):
            raise ValueError(f"{end - begin} bytes for shape {shape}")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} has a damaged header: entry {name!r} is {entry!r}; download the file again"
        ) from error
    return StoredTensor(path, entry["dtype"], shape, start + begin)
