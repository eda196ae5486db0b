"""Standard output of the commands, which may be closed, full, or read by somebody who leaves."""

from __future__ import annotations

import os
import sys


def show(text: object, end: str = "\n") -> None:
    """Prints at once. Raises BrokenPipeError where nobody reads any more, ValueError where nothing can be written."""
    try:
        print(text, end=end, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        drop_output()
        raise ValueError(f"standard output cannot be written ({error.strerror}); send it elsewhere") from None


def require_output() -> None:
    """Raises ValueError where standard output is closed."""
    if sys.stdout is None:
        raise ValueError("standard output is closed; leave it open, or send it to a file or to /dev/null")


def drop_output() -> None:
    """Lets what is still buffered go nowhere, or its flush at exit would complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
