"""Files that processes share: replaced at once, locked, and with a checksum that a reader verifies."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
from collections.abc import Iterable, Iterator
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

SEAL_BYTES = 32  # the digest of the rest of the file, at its beginning

ORPHAN_SECONDS = 3600  # longer than any write takes


class DamagedFileError(ValueError):
    """A file is truncated or changed."""


@contextlib.contextmanager
def replacing(path: Path, aside: Path | None = None, *, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Opens a temporary file that replaces `path` when the block ends; an error leaves the old file as it was.

    `aside` is the temporary file, in the same folder and not there yet. By default each write has a name of its own.
    """
    # A rename is atomic only within a file system.
    aside = aside or path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        with open(aside, "xb", opener=partial(os.open, mode=mode)) as file:
            yield file
        aside.replace(path)
    except BaseException:  # also on an interrupt: otherwise the temporary file would stay
        aside.unlink(missing_ok=True)
        raise


def try_lock(file: Any) -> bool:
    """Locks an open file, up to its close; False if another has locked it, OSError if there are no locks."""
    if fcntl is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def write_checked(path: Path, parts: Iterable[Any]) -> None:
    """Writes a digest and then the buffers in order; an error leaves the old file at `path` as it was."""
    digest = blake2b(digest_size=SEAL_BYTES)
    with replacing(path) as file:
        file.write(bytes(SEAL_BYTES))
        for part in parts:
            digest.update(part)
            file.write(part)
        file.seek(0)
        file.write(digest.digest())


def remove_orphans(folder: Path, name: str) -> None:
    """Removes temporary files left by processes killed in `replacing`; `name` is a regular expression."""
    aside, now = re.compile(rf"\.{name}\.[0-9a-f]+"), time.time()
    for entry in os.scandir(folder):
        with contextlib.suppress(OSError):  # another process has just removed or finished it
            if aside.fullmatch(entry.name) and now - entry.stat().st_mtime > ORPHAN_SECONDS:
                os.unlink(entry)


def files_by_use(folder: Path, name: str) -> list[tuple[int, str, int]]:
    """Returns (time of last use in ns, name, bytes) of each file with such a name, the one used longest ago first.

    `name` is a regular expression. A file's time of modification counts as that of its last use.
    """
    files = []
    for entry in os.scandir(folder):
        with contextlib.suppress(FileNotFoundError):  # another process has just removed it
            if re.fullmatch(name, entry.name):
                status = entry.stat()
                files.append((status.st_mtime_ns, entry.name, status.st_size))
    return sorted(files)


def read_checked(path: Path) -> memoryview:
    """Returns the joined buffers of `write_checked`. DamagedFileError if they changed, OSError if it is absent."""
    return unsealed(path.read_bytes(), path)


def sealed(content: bytes) -> bytes:
    """Returns a digest and the content, as `write_checked` writes them."""
    return blake2b(content, digest_size=SEAL_BYTES).digest() + content


def unsealed(whole: bytes, name: Any) -> memoryview:
    """Returns the content behind its digest. DamagedFileError, with the name of the file, if it changed."""
    content = memoryview(whole)
    if blake2b(content[SEAL_BYTES:], digest_size=SEAL_BYTES).digest() != content[:SEAL_BYTES]:
        raise DamagedFileError(f"{name} is cut off or changed: its {len(content)} bytes do not have their own digest")
    return content[SEAL_BYTES:]
