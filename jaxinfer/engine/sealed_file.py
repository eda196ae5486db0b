"""Files that are whole or nothing: written aside and moved into place, read only if every bit is as it was."""

from __future__ import annotations

import os
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Any

SEAL_BYTES = 32  # a digest of all that comes after it


class DamagedFileError(ValueError):
    """A file that is cut off or changed."""


def write_sealed(path: Path, parts: Iterable[Any]) -> None:
    """Writes buffers one after another, and their digest before them; OSError leaves what was there before."""
    # In the same folder, for only within one file system a file is moved at once. Processes do not share a name.
    aside = path.with_name(f".{path.name}.{os.getpid()}")
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
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def read_sealed(path: Path) -> memoryview:
    """Returns what `write_sealed` was given; DamagedFileError where it is not that any more, OSError without a file."""
    content = memoryview(path.read_bytes())
    sealed = content[SEAL_BYTES:]
    if blake2b(sealed, digest_size=SEAL_BYTES).digest() != content[:SEAL_BYTES]:
        raise DamagedFileError(f"{path} is cut off or changed: its {len(content)} bytes do not have their own digest")
    return sealed
