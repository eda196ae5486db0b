"""The files of compiled functions: in a folder that processes share, or below a URL of a bucket.

Each file has a digest of its content in front, which its reader checks. A folder has a limit, and locks by which one of
several processes compiles. A bucket has neither: of two writers the last one counts, and its owner's rules bound it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxinfer.atomic_file import (
    SEAL_BYTES,
    files_by_use,
    read_checked,
    remove_orphans,
    sealed,
    try_lock,
    unsealed,
    write_checked,
)
from jaxinfer.device import COMPILATION_CACHE, compilation_cache

logger = logging.getLogger(__name__)

# Longest wait for another process that compiles the same, which may have been stopped; then both compile.
MAX_WAIT_SECONDS = 600
POLL_SECONDS = 0.05
# Limit of the files if the user sets none for JAX's cache. The ten steps of the bundled model take 15 MB on a CPU.
MAX_BYTES = 2**32
NAME = "jaxinfer-[0-9a-f]+"
JAXS_NAME = ".+-cache"


@dataclass(frozen=True)
class Folder:
    """A folder of this machine, within its limit, that no other user can write to."""

    path: Path

    def read(self, name: str) -> memoryview:
        """Returns the content of a file; raises FileNotFoundError if there is none, other errors if it is unusable."""
        path = self.path / name
        if not _is_private(path):  # unpickling could run code of another user
            raise PermissionError("another user can write to it")
        with contextlib.suppress(OSError):  # root's file may be read here, but not touched
            os.utime(path)  # tells all processes when it was last used
        return read_checked(path)

    def write(self, name: str, content: bytes) -> None:
        """Writes a file, unless it is larger than all files together may be."""
        if SEAL_BYTES + len(content) > _max_bytes():
            return
        path = self.path / name
        write_checked(path, [content])
        with contextlib.suppress(FileNotFoundError):  # another process has just removed it
            path.chmod(0o600)  # else `_is_private` refuses it if the umask lets a group write
        _make_room(self.path)

    def identity(self, name: str) -> int | None:
        """Returns the number that another file of this name does not have; None if there is no file."""
        with contextlib.suppress(OSError):
            return (self.path / name).stat().st_ino
        return None

    @contextlib.contextmanager
    def compiling_alone(self, name: str) -> Iterator[None]:
        """Waits while another thread or process compiles for the same file.

        The system releases the lock of a process that ends. A compilation goes on without the lock after
        MAX_WAIT_SECONDS, or if the folder has no locks.
        """
        # A name that `remove_orphans` knows, should a process be killed here.
        lock = self.path / f".{name}.0"
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                file = stack.enter_context(open(os.open(lock, os.O_RDWR | os.O_CREAT, 0o600), "rb"))
                deadline = time.monotonic() + MAX_WAIT_SECONDS
                while not (is_locked := try_lock(file)) and time.monotonic() < deadline:
                    time.sleep(POLL_SECONDS)
                if is_locked:  # a thread that has opened the file by now waits for this lock, and finds the result
                    stack.callback(lock.unlink, missing_ok=True)
            yield

    def sizes(self) -> tuple[int, int]:
        """Returns the bytes of all files, and their limit."""
        return sum(size for *_, size in _counted_files(self.path)), _max_bytes()

    def __str__(self) -> str:
        return str(self.path)


class Bucket:
    """The objects below a URL of fsspec. After an error it is not read or not written any more, by this process.

    Without this, each step would wait for a network that is down, or be refused by a bucket that may only be read.
    """

    def __init__(self, url: str, file_system: Any, root: str) -> None:
        self._url, self._fs, self._root = url.rstrip("/"), file_system, root.rstrip("/")
        self._failures: dict[str, Exception] = {}

    def read(self, name: str) -> memoryview:
        """Returns the content of an object; raises FileNotFoundError if there is none, or after an error."""
        content = self._ask("read", lambda path: self._fs.cat_file(path), name)
        if content is None:
            raise FileNotFoundError(name)
        return unsealed(content, f"{self}/{name}")

    def write(self, name: str, content: bytes) -> None:
        """Replaces an object; object stores show it when it is whole."""
        self._ask("written", lambda path: self._write(path, sealed(content)), name)

    def _write(self, path: str, content: bytes) -> None:
        try:
            self._fs.pipe_file(path, content)
        except FileNotFoundError:  # a file system with folders
            self._fs.makedirs(self._root, exist_ok=True)
            self._fs.pipe_file(path, content)

    def _ask(self, verb: str, request: Any, name: str) -> Any:
        if verb in self._failures:
            return None
        try:
            return request(f"{self._root}/{name}")
        except FileNotFoundError:
            return None
        except Exception as error:  # each file system has its own types
            self._failures[verb] = error
            logger.warning("no compiled steps are %s at %s from now on: %s", verb, self, error)
            return None

    @property
    def failure(self) -> Exception | None:
        """The error after which nothing is written any more."""
        return self._failures.get("written")

    def identity(self, name: str) -> None:
        """Returns None: it is not worth asking if another process has written the object meanwhile."""
        return

    def compiling_alone(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Waits for no other process: a bucket has no locks."""
        return contextlib.nullcontext()

    def __str__(self) -> str:
        return self._url


def cache_place() -> Folder | Bucket | None:
    """Returns the place of the files, or None if the cache is off or its place cannot be used."""
    place = compilation_cache()
    if place is None or not _jaxs_limit():
        return None
    if "://" in place:
        return _bucket(place)
    return Folder(Path(place)) if _is_usable(Path(place)) else None


@functools.cache  # asks once, and so warns once
def _bucket(url: str) -> Bucket | None:
    """Returns the bucket of a URL; None, with a warning, if a package for it is missing or its file system fails."""
    problem = "%s cannot be used, so compiled steps are neither loaded nor kept: %s"
    try:
        from fsspec.core import url_to_fs

        return Bucket(url, *url_to_fs(url))
    except ImportError as error:
        way_out = "pip install 'jaxinfer[remote]' and the package of this file system, such as gcsfs or s3fs"
        logger.warning(f"{problem}; %s", url, error, way_out)
    except Exception as error:  # each file system has its own types
        logger.warning(problem, url, error)
    return None


def _make_room(folder: Path) -> None:
    """Removes the files that were used longest ago, if all together exceed the limit."""
    files = _counted_files(folder)
    excess = sum(size for *_, size in files) - _max_bytes()
    for _, name, size in files:
        if excess <= 0:
            break
        excess -= size
        with contextlib.suppress(OSError):
            (folder / name).unlink()


def _counted_files(folder: Path) -> list[Any]:
    """Returns the files that the limit is for, as `files_by_use` does."""
    # In the package's own folder JAX's entries count too, among them those that no process can read any more: earlier
    # versions let JAX write one beside each of ours. JAX bounds its entries only if the user sets a limit.
    is_own = folder == COMPILATION_CACHE and _jaxs_limit() < 0
    return files_by_use(folder, f"{NAME}|{JAXS_NAME}" if is_own else NAME)


def _max_bytes() -> int:
    limit = _jaxs_limit()
    return MAX_BYTES if limit < 0 else limit


def _jaxs_limit() -> int:
    """Returns the limit of JAX's cache in bytes, below 0 if the user has set none; 0 disables the cache."""
    return jax.config.values["jax_compilation_cache_max_size"]


@functools.cache  # checks once, and so warns once
def _is_usable(folder: Path) -> bool:
    """True if the folder can be used; creates it if necessary, and removes orphaned files and those above the limit.

    False, with a warning, if another user can write to it.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_private(folder):
            logger.warning(
                "%s belongs to another user, or others can write to it: compiled steps in it could run their code, so"
                " they are neither loaded nor kept; run `chmod go-w %s`, or set JAX_COMPILATION_CACHE_DIR to a folder"
                " of your own",
                folder,
                folder,
            )
            return False
        remove_orphans(folder, NAME)
        _make_room(folder)
    except OSError as error:
        logger.warning("%s cannot be used, so compiled steps cannot be kept for the next start: %s", folder, error)
        return False
    return True


def _is_private(path: Path) -> bool:
    """True if only this user and root can write to the path; always True on Windows, which has no such check."""
    status = path.stat()
    return os.name == "nt" or (status.st_uid in (0, os.getuid()) and not status.st_mode & 0o022)
