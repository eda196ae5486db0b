"""A folder of the server's own: marked as such, held by one process, and private. It removes nothing foreign there."""

from __future__ import annotations

import logging
import os
import re
import stat
from contextlib import suppress
from pathlib import Path

from jaxinfer.atomic_file import try_lock
from jaxinfer.batch_job.files import replace_file
from jaxinfer.validation import shown

logger = logging.getLogger(__name__)

MARK, LOCK, LOST = "jaxinfer.json", "lock", "lost"
CONTENT = b'{"folder": "files and batches of jaxinfer serve"}\n'  # of the mark
PRIVATE = 0o600  # prompts and results are there
FILE = re.compile(r"(file-[0-9a-f]{32})\.(?:json|content)")
BATCH = re.compile(r"(batch_[0-9a-f]{32})\.(?:json|jsonl|errors\.jsonl)")
NAMES = {"files": FILE, "batches": BATCH}
ROOT = "lost+found"  # in the root of a file system, such as a volume's


def hold_folder(folder: Path) -> int:
    """Opens or creates a folder, and returns the file descriptor whose lock keeps other servers away.

    Raises ValueError if another server holds it, and for a folder with files that no server has written.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _require_own(folder)
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, PRIVATE)
        try:
            if not try_lock(lock):
                raise ValueError(f"another server uses {folder}; give it another folder")
            for name in (*NAMES, LOST):
                _make_private(folder / name)
            if not (folder / MARK).exists():
                replace_file(folder / MARK, lambda file: file.write(CONTENT), PRIVATE)
        except BaseException:
            os.close(lock)
            raise
    except OSError as error:
        raise ValueError(f"{folder} cannot be used ({error.strerror}); give another folder") from None
    return lock


def is_aside(name: str) -> bool:
    """True for the name of a file that a killed server has not completed."""
    return name.startswith(".") and name.endswith(".new") and any(p.fullmatch(name[1:-4]) for p in NAMES.values())


def keep_lost(folder: Path, path: Path, reason: str) -> None:
    """Moves a file of the server into `lost`, under a name that is free, and logs the reason."""
    target, number = folder / LOST / path.name, 1
    while target.exists():
        number += 1
        target = target.with_name(f"{path.name}.{number}")
    path.rename(target)
    logger.error("%s %s; it is kept as %s", path, reason, target)


def _require_own(folder: Path) -> None:
    """ValueError unless a folder is marked, empty, or that of a version that made no marks."""
    mark = folder / MARK
    if not mark.is_symlink() and mark.is_file() and mark.read_bytes() == CONTENT:
        return
    for path in sorted(folder.iterdir()):
        if path.name in (ROOT, f".{MARK}.new"):
            continue
        if (foreign := _foreign_part(path)) is not None:
            raise ValueError(
                f"{folder} has {shown(foreign)}, which no server has written; give a new or empty folder, such as"
                f" {folder / 'jaxinfer'}"
            )


def _foreign_part(path: Path) -> str | None:
    """Returns the name of a file that no server writes there, or None."""
    mode = path.lstat().st_mode
    if path.name == LOCK and stat.S_ISREG(mode) and path.stat().st_size == 0:
        return None
    if path.name == LOST and stat.S_ISDIR(mode) and not any(path.iterdir()):
        return None
    if path.name not in NAMES or not stat.S_ISDIR(mode):
        return path.name
    names = (p.name for p in path.iterdir())
    own = NAMES[path.name]
    return next((f"{path.name}/{name}" for name in names if not (own.fullmatch(name) or is_aside(name))), None)


def _make_private(path: Path) -> None:
    """Creates a folder that its owner alone can read, or closes it to others."""
    path.mkdir(mode=0o700, exist_ok=True)
    if not stat.S_ISDIR(path.lstat().st_mode):
        raise NotADirectoryError(20, f"{path.name} is a link", str(path))
    with suppress(PermissionError):  # a volume may have another owner
        path.chmod(0o700)
