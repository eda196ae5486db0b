"""Formats of an output, by the end of its name: JSON lines, compressed by gzip (`.gz`), or Parquet (`.parquet`)."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Iterator
from typing import BinaryIO, cast

from jaxinfer.batch_job import parquet
from jaxinfer.batch_job.files import File

GZIP_LEVEL = 6  # as gzip's own; 9 takes several times as long for a few percent


def is_plain(file: File) -> bool:
    """True if an output has its records as JSON lines without compression."""
    return not file.name.endswith((".gz", ".parquet"))


def require_format(file: File) -> None:
    """ValueError if an output's format needs a package that is missing."""
    if file.name.endswith(".parquet"):
        parquet.require_pyarrow()


def read_records(content: BinaryIO, file: File) -> Iterator[bytes]:
    """Yields the records in the content of an output; ValueError if it is damaged or has another format."""
    try:
        if file.name.endswith(".parquet"):
            yield from parquet.read_records(content)
        elif file.name.endswith(".gz"):
            yield from cast(BinaryIO, gzip.GzipFile(fileobj=content))
        else:
            yield from content
    except (EOFError, zlib.error, gzip.BadGzipFile, ValueError) as error:
        raise ValueError(
            f"{file} cannot be read ({error}); nothing was changed, remove it or give another output"
        ) from None


def write_records(content: BinaryIO, file: File, records: Iterable[bytes]) -> None:
    """Writes the records of an output in its format; the bytes depend on the records and the libraries alone."""
    if file.name.endswith(".parquet"):
        parquet.write_records(content, records)
    elif file.name.endswith(".gz"):
        # Without the name and the time, which are in the header otherwise.
        with gzip.GzipFile("", "wb", GZIP_LEVEL, content, mtime=0) as compressed:
            compressed.writelines(records)
    else:
        content.writelines(records)
