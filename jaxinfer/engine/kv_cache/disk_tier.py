"""The disk tier: one file per page, which later processes find again; several processes may share a folder."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from jaxinfer.atomic_file import SEAL_BYTES, DamagedFileError, files_by_use, read_checked, remove_orphans, write_checked
from jaxinfer.engine.kv_cache.page_transfers import Content
from jaxinfer.engine.kv_cache.tiers import TierMetrics
from jaxinfer.engine.request.page_keys import DIGEST_BYTES

# Limit of contents that wait to be written; if the disk is too slow, further pages are dropped.
MAX_PENDING_BYTES = 2**28
PAGE_NAME = f"[0-9a-f]{{{2 * DIGEST_BYTES}}}"
logger = logging.getLogger(__name__)


class DiskTier:
    """Files in a folder, within `max_bytes`; the least recently used one is removed first.

    A file is named by its page's key, a digest of everything that the content depends on. A file that cannot be
    written or read, or has changed, is logged, counted and removed: its page is computed again. A single worker thread
    writes and removes files in order, so that no step waits for the disk.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Indexes the pages already in the folder; ValueError if it cannot be created or read."""
        self._folder = folder
        self._max_bytes = max_bytes
        self._num_bytes = self._num_stored = self._num_hits = self._num_dropped = self._num_lost = 0
        self._best_seconds = math.inf
        self._worker = ThreadPoolExecutor(1, "disk tier")  # Python waits for its work when the process exits
        # Pages not yet written, in the worker's order. Removing a page empties its list, so the worker skips it.
        self._pending: dict[bytes, tuple[list[Content], Future[None]]] = {}
        self._pending_bytes = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            remove_orphans(folder, PAGE_NAME)
            files = files_by_use(folder, PAGE_NAME)
        except OSError as error:
            raise ValueError(f"disk_cache_path={str(folder)!r} cannot be used: {error}; give another folder") from error
        self._sizes = OrderedDict((bytes.fromhex(name), size) for _, name, size in files)
        self._num_bytes = sum(self._sizes.values())
        self._make_room(0)

    @property
    def seconds_per_page(self) -> float:
        return 0.0 if self._best_seconds == math.inf else self._best_seconds

    def touch(self, key: bytes) -> bool:
        if key not in self._sizes:
            return False
        self._sizes.move_to_end(key)
        return True

    def get(self, key: bytes) -> Content | None:
        self._settle()
        if key in self._pending:
            self._num_hits += 1
            return self._pending[key][0][0]
        began = time.perf_counter()
        try:
            os.utime(self._path(key))  # tells later processes when the page was last used
            sealed = read_checked(self._path(key))
            if sealed[:DIGEST_BYTES] != key:
                raise DamagedFileError(f"{self._path(key)} holds another page")
        except (OSError, DamagedFileError) as error:
            self._lose(key, error)
            return None
        self._best_seconds = min(self._best_seconds, time.perf_counter() - began)
        self._num_hits += 1
        return np.frombuffer(sealed[DIGEST_BYTES:], np.uint8)

    def put(self, key: bytes, content: Content) -> list[tuple[bytes, Content]]:
        self._settle()
        size = SEAL_BYTES + len(key) + content.nbytes
        if size > self._max_bytes:
            return []
        if self._pending_bytes + content.nbytes > MAX_PENDING_BYTES:
            self._num_dropped += 1
            return []
        self._make_room(size)
        contents = [content]
        self._pending[key] = contents, self._worker.submit(_write, self._path(key), key, contents)
        self._pending_bytes += content.nbytes
        self._sizes[key] = size
        self._num_bytes += size
        self._num_stored += 1
        return []

    def flush(self) -> None:
        """Waits until all queued writes and removals are done."""
        self._worker.submit(lambda: None).result()
        self._settle()

    def metrics(self) -> TierMetrics:
        return TierMetrics(
            name="disk",
            num_pages=len(self._sizes),
            num_bytes=self._num_bytes,
            num_stored=self._num_stored,
            num_hits=self._num_hits,
            num_dropped=self._num_dropped,
            num_lost=self._num_lost,
        )

    def _settle(self) -> None:
        """Removes finished writes from the pending ones; drops pages that could not be written."""
        while self._pending:
            key, (_, written) = next(iter(self._pending.items()))
            if not written.done():
                return
            self._end_pending(key)
            try:
                written.result()
            except OSError as error:
                self._lose(key, error)

    def _end_pending(self, key: bytes) -> None:
        if key in self._pending:
            contents, _ = self._pending.pop(key)
            self._pending_bytes -= contents.pop().nbytes

    def _make_room(self, num_bytes: int) -> None:
        while self._sizes and self._num_bytes + num_bytes > self._max_bytes:
            self._forget(next(iter(self._sizes)))
            self._num_dropped += 1

    def _lose(self, key: bytes, error: Exception) -> None:
        # Only the first is a warning: a disk that is gone would log one for every page.
        level = logging.DEBUG if self._num_lost else logging.WARNING
        logger.log(level, "a page of the disk cache is lost and will be computed; more are only counted: %s", error)
        self._num_lost += 1
        self._forget(key)

    def _forget(self, key: bytes) -> None:
        self._num_bytes -= self._sizes.pop(key, 0)
        self._end_pending(key)
        self._worker.submit(_remove, self._path(key))

    def _path(self, key: bytes) -> Path:
        return self._folder / key.hex()


def _write(path: Path, key: bytes, contents: list[Content]) -> None:
    for content in tuple(contents):
        write_checked(path, [key, content])


def _remove(path: Path) -> None:
    # A file that cannot be removed is never read again: the tier has dropped its key and size.
    with contextlib.suppress(OSError):
        path.unlink()
