"""Writes to standard output, which may be closed, full, or a broken pipe."""

from __future__ import annotations

import os
import sys

EXIT_FAULTS = 1  # the doctor found faults, or requests ended in an error


def show(text: object, end: str = "\n") -> None:
    """Prints and flushes. Raises BrokenPipeError if the reader is gone, ValueError if the output is not writable."""
    try:
        print(text, end=end, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        drop_output()
        raise ValueError(f"standard output cannot be written ({error.strerror}); send it elsewhere") from None


def require_output() -> None:
    """Raises ValueError if standard output is closed."""
    if sys.stdout is None:
        raise ValueError("standard output is closed; leave it open, or send it to a file or to /dev/null")


def drop_output() -> None:
    """Sends buffered output to /dev/null, because the flush at exit would fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
