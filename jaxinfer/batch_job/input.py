"""The input file of a job: JSON lines in UTF-8, plain or compressed by gzip, or rows of Parquet; free of jax.

A line that is no request gets a record with its error. A whole file of another kind is refused instead.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, cast

from jaxinfer.batch_job.files import File, as_file
from jaxinfer.batch_job.line_form import LineForm
from jaxinfer.batch_job.parquet import MAGIC, read_lines
from jaxinfer.batch_job.records import InvalidLine, custom_id_of, parse_request
from jaxinfer.batch_job.shards import WHOLE, Shard
from jaxinfer.json_lines import is_too_long, lines_of, parse_json

GZIP = b"\x1f\x8b\x08"
# Other formats by their first bytes, with the way out.
COMPRESSED = "decompress it, or compress it with gzip"
ROWS = "write its rows to a Parquet file, or as JSON lines by DataFrame.to_json(orient='records', lines=True)"
FORMATS = {
    b"\x28\xb5\x2f\xfd": ("compressed by zstd", COMPRESSED),
    b"BZh": ("compressed by bzip2", COMPRESSED),
    b"\xfd7zXZ\0": ("compressed by xz", COMPRESSED),
    b"\x04\x22\x4d\x18": ("compressed by lz4", COMPRESSED),
    b"PK\x03\x04": ("a zip archive", COMPRESSED),
    GZIP: ("compressed by gzip twice", "decompress it once"),
    MAGIC: ("a Parquet file in gzip", "decompress it"),
    b"ARROW1": ("an Arrow file", ROWS),
}
WIDE = ("utf-32-le", "utf-32-be", "utf-16-le", "utf-16-be")
HEAD_BYTES = 64
NUM_CHECKED = 100  # first lines, before a model is loaded
ARRAY = re.compile(r'\[\s*[{"]')
MARK = "\N{ZERO WIDTH NO-BREAK SPACE}"  # of byte order, at the beginning of a file


def check_paths(input_path: Any, output_path: Any) -> tuple[File, File]:
    """Returns the files of a job; ValueError if there is no such input or no folder for the output."""
    source, output = as_file("input_path", input_path), as_file("output_path", output_path)
    if not source.exists():
        raise ValueError(f"{source} does not exist; give a file of JSON lines")
    if not source.is_file():
        raise ValueError(f"{source} is not a regular file; a job reads it several times, so save it to a file first")
    if type(output) is type(source) and output.exists() and output.samefile(source):  # pyright: ignore
        raise ValueError(f"{output} is the input itself; give another output")
    if isinstance(output, Path) and not output.parent.is_dir():
        raise ValueError(f"{output.parent} is no folder; create it or give another output")
    return source, output


def check_errors_path(source: File, output: File, errors_path: Any) -> File:
    """Returns the file for the records of failed lines; ValueError if it is the input, the output, or in no folder."""
    as_file("errors_path", errors_path)  # an error names it so
    errors = check_paths(source, errors_path)[1]
    if str(errors) == str(output) or (type(errors) is type(output) and errors.exists() and errors.samefile(output)):  # pyright: ignore
        raise ValueError(f"{errors} is the output itself; give another file for the errors")
    return errors


@contextmanager
def open_lines(path: File, shard: Shard = WHOLE) -> Iterator[Iterator[tuple[int, bytes]]]:
    """Opens an input for one reading of its lines: (number, line) of those in the shard that are not blank."""
    with path.open("rb") as file:
        yield numbered_lines(_lines(file), shard)


def numbered_lines(lines: Iterable[bytes], shard: Shard = WHOLE) -> Iterator[tuple[int, bytes]]:
    """Yields (number, line) of the lines in the shard that are not blank; numbers count all lines from 1."""
    for number, raw in enumerate(lines, 1):
        if raw.strip() and (shard == WHOLE or shard.has(number, custom_id_of(raw, number))):
            yield number, raw


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Yields all lines of a file in the format that its first bytes tell, whatever its name."""
    is_parquet = _begins_with(file, MAGIC)
    return read_lines(file) if is_parquet else lines_of(_decompressed(file))


def _decompressed(file: BinaryIO) -> BinaryIO:
    return cast(BinaryIO, gzip.GzipFile(fileobj=file)) if _begins_with(file, GZIP) else file


def _begins_with(file: BinaryIO, start: bytes) -> bool:
    file.seek(0)
    head = file.read(len(start))
    file.seek(0)
    return head == start


def check_input(path: File) -> None:
    """Reads all lines; ValueError with the way out if the file has another format or encoding, or is damaged."""
    with path.open("rb") as file:
        if _begins_with(file, MAGIC):
            try:
                deque(read_lines(file), maxlen=0)
            except ValueError as error:
                raise ValueError(f"{path} cannot be read as Parquet: {error}") from None
            return
        try:
            content = _decompressed(file)
            _check_format(path, content.read(HEAD_BYTES))
            content.seek(0)
            _check_lines(path, content)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{path} cannot be decompressed ({error}); compress it again") from None


def wrong_lines(input_path: str | Path, form: LineForm) -> str | None:
    """Returns what is wrong with the first lines of an input, if any of them is no request."""
    with open_lines(as_file("input_path", input_path)) as lines:
        entries = [parse_request(raw, number, form=form) for number, raw in islice(lines, NUM_CHECKED)]
    wrong = [entry for entry in entries if isinstance(entry, InvalidLine)]
    if not wrong:
        return None
    return f"{len(wrong)} of the first {len(entries)} lines are no requests; line {wrong[0].line}: {wrong[0].message}"


def _check_format(path: File, head: bytes) -> None:
    for start, (kind, way_out) in FORMATS.items():
        if head.startswith(start):
            raise ValueError(f"{path} is {kind}; {way_out}")
    for encoding in WIDE:
        text = head.decode(encoding, "replace").lstrip(MARK).lstrip()
        if text[:1] in ("{", "[") and text[1:2].isascii():
            raise ValueError(f"{path} is in {encoding[:6].upper()}; convert it to UTF-8")


def _check_lines(path: File, file: BinaryIO) -> None:
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
