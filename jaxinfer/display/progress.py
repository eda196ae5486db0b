"""Progress on standard error: one bar at a time in a terminal or notebook, a line a minute in a file."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Self, TypeVar

from jaxinfer.validation import as_bool

T = TypeVar("T")
COLUMNS, ROWS = 80, 24  # of a terminal that tells none, as in some containers
SECONDS_BETWEEN_LINES = 60.0  # and before the first, so that short work writes nothing into a file
LINE = "{desc}{percentage:.0f}%, {n_fmt} of {total_fmt}, {elapsed} gone, {remaining} left{postfix}"


def is_shown(show_progress: bool | None) -> bool:
    """Returns whether to show progress: as given, or if None, in a terminal or a notebook alone."""
    if show_progress is not None:
        return as_bool("show_progress", show_progress)
    return _is_terminal() or _is_notebook()


def write_line(text: str) -> None:
    """Writes a line of text to standard error, above the bar, if there is one."""
    from tqdm import tqdm

    tqdm.write(text, file=sys.stderr)


class Bar:
    """A context manager with the progress of some work. Of two at a time, the second is shown after the first's end.

    `total` is the number of units of work, if it is known. Any thread may have a bar; the first `update` shows it.
    """

    _lock = threading.Lock()
    _shown: ClassVar[Bar | None] = None

    def __init__(self, total: int | None = None, *, unit: str, description: str = "", show: bool) -> None:
        self.total = total
        self.count, self._note = 0, ""
        self._unit, self._description, self._is_wanted = unit, description, show
        self._bar: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
        if Bar._shown is self:
            Bar._shown = None

    def update(self, count: int = 1, note: str = "") -> None:
        """Tells that `count` more units are done; 0 shows that time goes on. `note` is shown behind the bar."""
        self.count, self._note = self.count + count, note or self._note
        if self._bar is None and self._is_wanted and self._is_alone():
            self._bar = self._opened()
        elif self._bar is not None:
            self._bar.set_postfix_str(self._note, refresh=False)
            self._bar.update(count)

    def along(self, items: Iterable[T]) -> Iterator[T]:
        """Yields items; each is done when the next is asked for."""
        with self:
            for item in items:
                yield item
                self.update()

    def _is_alone(self) -> bool:
        with Bar._lock:
            if Bar._shown is None:
                Bar._shown = self
            return Bar._shown is self

    def _opened(self) -> Any:
        from tqdm import TqdmWarning

        # A notebook without ipywidgets has a bar of characters; the warning would say nothing else.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TqdmWarning)
            from tqdm.auto import tqdm
        options: dict[str, Any] = {}
        if not _is_terminal() and not _is_notebook():
            options |= {"file": _Lines(), "bar_format": LINE}
            options |= {"mininterval": SECONDS_BETWEEN_LINES, "delay": SECONDS_BETWEEN_LINES}
        elif not _has_size():
            options |= {"ncols": COLUMNS, "nrows": ROWS}
        description = f"{self._description}: " if self._description else None
        # No count of units, however large, goes by without a look at the clock.
        options |= {"miniters": 0, "smoothing": 0, "postfix": self._note}
        return tqdm(total=self.total, initial=self.count, desc=description, unit=self._unit, **options)


class _Lines:
    """Standard error as a file that gets whole lines, without the characters that move a cursor."""

    def write(self, text: str) -> None:
        if line := text.strip("\r\n "):
            print(line, file=sys.stderr)

    def flush(self) -> None:
        sys.stderr.flush()


def _has_size() -> bool:
    """True unless standard error is a terminal that tells no number of columns."""
    try:
        return not _is_terminal() or os.get_terminal_size(sys.stderr.fileno()).columns > 0
    except OSError:
        return False


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def _is_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and "IPKernelApp" in shell.config
