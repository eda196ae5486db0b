"""The corpus of the bundled models: the source of the standard library of the interpreter at hand, in two parts."""

from __future__ import annotations

import hashlib
import re
import sysconfig
from pathlib import Path

LIBRARY = Path(sysconfig.get_path("stdlib"))
EXCLUDED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data"}
TABLE_ROW = re.compile(r"""\s*[(\[]*(?:[bru]{0,2}['"][^'"]|-?\d)""")
HELD_OUT_SHARE = 20  # one file in twenty


def library_files() -> list[Path]:
    """Lists the hand-written modules of the standard library: no tests, no tables, UTF-8 only."""
    paths = sorted(LIBRARY.rglob("*.py"))
    return [p for p in paths if not EXCLUDED_FOLDERS & {*p.relative_to(LIBRARY).parts} and is_prose(p)]


def is_prose(path: Path) -> bool:
    """Tells code that someone wrote from an undecodable file or a generated table."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except UnicodeDecodeError:
        return False
    return bool(lines) and 2 * sum(TABLE_ROW.match(line) is not None for line in lines) <= len(lines)


def is_held_out(path: Path) -> bool:
    """Decides by the relative path alone, so the split survives changes to other files."""
    digest = hashlib.sha256(path.relative_to(LIBRARY).as_posix().encode()).hexdigest()
    return int(digest, 16) % HELD_OUT_SHARE == 0


def training_files() -> list[Path]:
    """Lists, sorted, the files that the tokenizer and both models learn from."""
    return [path for path in library_files() if not is_held_out(path)]


def held_out_files() -> list[Path]:
    """Lists, sorted, the files that neither the tokenizer nor the models have seen, about 5 %."""
    return [path for path in library_files() if is_held_out(path)]
