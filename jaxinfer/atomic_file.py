"""Files that are whole or nothing: written aside and moved into place, read only if every bit is as it was."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Any
from uuid import uuid4

SEAL_BYTES = 32  # a digest of all that comes after it

ORPHAN_SECONDS = 3600  # longer than any write takes


class DamagedFileError(ValueError):
    """A file that is cut off or changed."""


def write_checked(path: Path, parts: Iterable[Any]) -> None:
    """Writes buffers one after another, and their digest before them; an error leaves what was there before."""
    # In the same folder, for only within one file system a file is moved at once. No two writes share a name.
    aside = path.with_name(f".{path.name}.{uuid4().hex}")
    digest = blake2b(digest_size=SEAL_BYTES)
    try:
        with aside.open("wb") as file:
            file.write(bytes(SEAL_BYTES))
            for part in parts:
                digest.update(part)
                file.write(part)
            file.seek(0)
            file.write(digest.digest())
        aside.replace(path)
    except BaseException:  # an interrupt as well: nobody would remove the file
        aside.unlink(missing_ok=True)
        raise


def remove_orphans(folder: Path, name: str) -> None:
    """Removes files that a process was killed over while it wrote one of this name, a regular expression."""
    aside, now = re.compile(rf"\.{name}\.[0-9a-f]+"), time.time()
    for entry in os.scandir(folder):
        with contextlib.suppress(OSError):  # another process has just removed or finished it
            if aside.fullmatch(entry.name) and now - entry.stat().st_mtime > ORPHAN_SECONDS:
                os.unlink(entry)


def read_checked(path: Path) -> memoryview:
    """Returns the parts that `write_checked` wrote, joined. DamagedFileError if they changed, OSError if absent."""
    content = memoryview(path.read_bytes())
    sealed = content[SEAL_BYTES:]
    if blake2b(sealed, digest_size=SEAL_BYTES).digest() != content[:SEAL_BYTES]:
        raise DamagedFileError(f"{path} is cut off or changed: its {len(content)} bytes do not have their own digest")
    return sealed
