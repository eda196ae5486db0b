"""The input file of a job: JSON lines in UTF-8, plain or compressed by gzip; free of jax.

A line that is no request gets a record with its error. A whole file of another kind is refused instead.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from jaxinfer.batch_job.records import custom_id_of
from jaxinfer.batch_job.shards import WHOLE, Shard
from jaxinfer.json_lines import is_too_long, lines_of, parse_json
from jaxinfer.validation import as_path

GZIP = b"\x1f\x8b\x08"
# Other formats by their first bytes, with the way out.
COMPRESSED = "decompress it, or compress it with gzip"
ROWS = "write its rows as JSON lines, for example by DataFrame.to_json(orient='records', lines=True)"
FORMATS = {
    b"\x28\xb5\x2f\xfd": ("compressed by zstd", COMPRESSED),
    b"BZh": ("compressed by bzip2", COMPRESSED),
    b"\xfd7zXZ\0": ("compressed by xz", COMPRESSED),
    b"\x04\x22\x4d\x18": ("compressed by lz4", COMPRESSED),
    b"PK\x03\x04": ("a zip archive", COMPRESSED),
    GZIP: ("compressed by gzip twice", "decompress it once"),
    b"PAR1": ("a Parquet file", ROWS),
    b"ARROW1": ("an Arrow file", ROWS),
}
WIDE = ("utf-32-le", "utf-32-be", "utf-16-le", "utf-16-be")
HEAD_BYTES = 64
ARRAY = re.compile(r'\[\s*[{"]')
MARK = "\N{ZERO WIDTH NO-BREAK SPACE}"  # of byte order, at the beginning of a file


def check_paths(input_path: str | Path, output_path: str | Path) -> tuple[Path, Path]:
    """Returns the paths of a job; ValueError if there is no such input or no folder for the output."""
    input_path, output_path = as_path("input_path", input_path), as_path("output_path", output_path)
    if not input_path.exists():
        raise ValueError(f"{input_path} does not exist; give a file of JSON lines")
    if not input_path.is_file():
        raise ValueError(
            f"{input_path} is not a regular file; a job reads it several times, so save it to a file first"
        )
    if output_path.exists() and output_path.samefile(input_path):
        raise ValueError(f"{output_path} is the input itself; give another output")
    if not output_path.parent.is_dir():
        raise ValueError(f"{output_path.parent} is no folder; create it or give another output")
    return input_path, output_path


@contextmanager
def open_lines(path: Path, shard: Shard = WHOLE) -> Iterator[Iterator[tuple[int, bytes]]]:
    """Opens an input for one reading of its lines: (number, line) of those in the shard that are not blank."""
    with _open(path) as file:
        yield numbered_lines(lines_of(file), shard)


def numbered_lines(lines: Iterable[bytes], shard: Shard = WHOLE) -> Iterator[tuple[int, bytes]]:
    """Yields (number, line) of the lines in the shard that are not blank; numbers count all lines from 1."""
    for number, raw in enumerate(lines, 1):
        if raw.strip() and (shard == WHOLE or shard.has(number, custom_id_of(raw))):
            yield number, raw


def _open(path: Path) -> BinaryIO:
    """Opens an input; a file that begins as gzip's do is decompressed while it is read, whatever its name."""
    with path.open("rb") as file:
        is_compressed = file.read(len(GZIP)) == GZIP
    return cast(BinaryIO, gzip.open(path)) if is_compressed else path.open("rb")


def check_input(path: Path) -> None:
    """Reads all lines; ValueError with the way out if the file has another format or encoding, or is damaged."""
    try:
        with _open(path) as file:
            _check_format(path, file.read(HEAD_BYTES))
            file.seek(0)
            _check_lines(path, file)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} cannot be decompressed ({error}); compress it again") from None


def _check_format(path: Path, head: bytes) -> None:
    for start, (kind, way_out) in FORMATS.items():
        if head.startswith(start):
            raise ValueError(f"{path} is {kind}; {way_out}")
    for encoding in WIDE:
        text = head.decode(encoding, "replace").lstrip(MARK).lstrip()
        if text[:1] in ("{", "[") and text[1:2].isascii():
            raise ValueError(f"{path} is in {encoding[:6].upper()}; convert it to UTF-8")


def _check_lines(path: Path, file: BinaryIO) -> None:
    first = last = ""
    for number, raw in enumerate(lines_of(file), 1):
        if is_too_long(raw):  # and cut, perhaps inside a character
            continue
        try:
            text = raw.decode("utf-8-sig").strip()
        except UnicodeDecodeError as error:
            if not _is_object(raw.decode("latin-1").encode()):
                continue
            raise ValueError(
                f"line {number} of {path} is not in UTF-8: byte {error.start + 1} is {raw[error.start]:#04x}; convert"
                " the file from its encoding, for example by `iconv -f LATIN1 -t UTF-8`"
            ) from None
        first, last = first or text[:HEAD_BYTES], text[-1:] or last
    if ARRAY.match(first) or (first == "[" and last == "]"):
        raise ValueError(f"{path} is one JSON array; give one object per line, as by `jq -c '.[]' {path}`")


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(parse_json(line), dict)
    except ValueError:
        return False
