"""Reads files of a checkpoint's folder within bounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MAX_FILE_BYTES = 2**26


def check_size(file: Path, max_bytes: int = MAX_FILE_BYTES) -> None:
    if file.stat().st_size > max_bytes:
        raise ValueError(f"{file} has more than {max_bytes:,} bytes; give the checkpoint's own")


def read_text(file: Path) -> str:
    """Returns the text in a file; ValueError if it is too large or not UTF-8."""
    check_size(file)
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not text in UTF-8 ({error}); download it again") from None


def read_object(file: Path) -> dict[str, Any]:
    """Returns the JSON object in a file, an empty one without the file; ValueError for another content."""
    if not file.is_file():
        return {}
    text = read_text(file)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError also for integers of thousands of digits
        raise ValueError(f"{file} is not JSON ({error}); download it again") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds a {type(content).__name__}, not an object; download it again")
    return content
