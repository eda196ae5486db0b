"""Files of a job, on this machine by path and on a remote file system of fsspec by URL."""

from __future__ import annotations

import io
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from jaxinfer.atomic_file import replacing
from jaxinfer.validation import as_path, shown

URL = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
LOCAL = ("file", "local")
READ_BYTES = 2**16  # of a remote file at a time


class RemoteFile:
    """A file that may or may not exist on a remote file system, with the methods of `Path` that a job needs."""

    def __init__(self, url: str) -> None:
        """ValueError if fsspec or the package of this file system is missing, or the URL names no file."""
        try:
            from fsspec.core import url_to_fs

            file_system, self._path = url_to_fs(url)
        except ImportError as error:
            raise ValueError(
                f"{shown(url)} needs a package that is missing ({error}); pip install 'jaxinfer[remote]' and the"
                " package of this file system, such as s3fs or gcsfs"
            ) from None
        except ValueError as error:
            raise ValueError(f"{shown(url)} names no file ({error}); give a path, or a URL that fsspec knows") from None
        self._fs: Any = file_system
        self.url = url
        self.name = url.rsplit("/", 1)[-1]
        if not self.name or not self._path.endswith(self.name):
            raise ValueError(f"{shown(url)} names no file; end it with the name of one")

    def __str__(self) -> str:
        return self.url

    def with_name(self, name: str) -> RemoteFile:
        return RemoteFile(self.url[: -len(self.name)] + name)

    def exists(self) -> bool:
        return self._ask(self._fs.exists)

    def is_file(self) -> bool:
        return self._ask(self._fs.isfile)

    def samefile(self, other: Any) -> bool:
        return isinstance(other, RemoteFile) and (self._fs, self._path) == (other._fs, other._path)

    def open(self, mode: str = "rb") -> BinaryIO:
        """Opens the file for reading."""
        with _explained(self):
            # fsspec's own files read a line of any length only.
            return io.BufferedReader(self._fs.open(self._path, mode), READ_BYTES)

    def upload(self, path: str) -> None:
        """Replaces the file by one of this machine; object stores show it when it is whole."""
        with _explained(self):
            self._fs.put_file(path, self._path)

    def write_bytes(self, content: bytes) -> None:
        """Replaces the file; object stores show it when it is whole."""
        with _explained(self):
            try:
                self._fs.pipe_file(self._path, content)
            except FileNotFoundError:  # a file system with folders
                self._fs.makedirs(self._fs._parent(self._path), exist_ok=True)
                self._fs.pipe_file(self._path, content)

    def files_below(self) -> list[RemoteFile]:
        """Returns the files of the folder with this name, by name; none if there is no folder."""
        paths = self._ask(lambda path: self._fs.find(path, maxdepth=1))
        return [RemoteFile(f"{self.url}/{path.rsplit('/', 1)[-1]}") for path in sorted(paths)]

    def names_beside(self) -> list[str]:
        """Returns the names of the files in the folder of this one."""
        paths = self._ask(lambda path: self._fs.find(self._fs._parent(path), maxdepth=1))
        return [path.rsplit("/", 1)[-1] for path in paths]

    def remove_folder(self) -> None:
        """Removes the folder with this name; nothing if there is none."""
        if self._ask(self._fs.exists):
            with _explained(self):
                self._fs.rm(self._path, recursive=True)

    def _ask(self, question: Callable[[str], Any]) -> Any:
        with _explained(self):
            self._fs.invalidate_cache()  # another host may have written meanwhile
            try:
                return question(self._path)
            except FileNotFoundError:
                return []


File = Path | RemoteFile


@contextmanager
def _explained(file: RemoteFile) -> Iterator[None]:
    """Raises an OSError with the URL for any error: each file system has its own types."""
    try:
        yield
    except Exception as error:
        raise OSError(f"{file} cannot be reached ({error}); correct the URL or the credentials, then go on") from error


def as_file(name: str, value: Any) -> File:
    """Returns the file of a path or URL, which may or may not exist; `file://` URLs are paths."""
    scheme = URL.match(value) if isinstance(value, str) else None
    if scheme and scheme[1].lower() not in LOCAL:
        return RemoteFile(value)
    return as_path(name, value[scheme.end() :] if scheme else value)


def names_beside(file: File) -> list[str]:
    """Returns the names of the files in the folder of a file."""
    return file.names_beside() if isinstance(file, RemoteFile) else [path.name for path in file.parent.iterdir()]


def spool(file: File) -> Any:
    """Opens a temporary file without a name, beside `file` if that is on this machine."""
    return tempfile.TemporaryFile(dir=None if isinstance(file, RemoteFile) else file.parent)


def replace_file(file: File, write: Callable[[BinaryIO], object], mode: int = 0o666) -> None:
    """Replaces a file at once: a process killed meanwhile leaves the old one, or none. A new one has a local `mode`."""
    if isinstance(file, RemoteFile):
        with tempfile.NamedTemporaryFile() as aside:
            write(cast(BinaryIO, aside))
            aside.flush()
            file.upload(aside.name)
        return
    path = Path(os.path.realpath(file))  # a link stays one
    aside = path.with_name(f".{path.name}.new")
    aside.unlink(missing_ok=True)  # left by a killed process
    with replacing(path, aside, mode=mode) as content:
        write(content)
        content.flush()
        os.fsync(content.fileno())
        if path.exists():
            shutil.copymode(path, aside)
