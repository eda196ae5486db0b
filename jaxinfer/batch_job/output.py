"""The output of a job: a file that grows by whole records and has one writer; free of jax."""

from __future__ import annotations

import fcntl
import os
import stat
import time
from pathlib import Path
from typing import Self

from jaxinfer.batch_job.records import RECORD_START, parse_record

FSYNC_SECONDS = 5.0  # What a power cut may cost; a killed process loses nothing, since each record is written at once.


class OutputFile:
    """Locked from opening to closing, also by the end of the process, however it ends."""

    def __init__(self, path: Path) -> None:
        """Opens or creates the file; ValueError when it is in use or no regular file."""
        self._path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        self._complete_bytes = 0
        self._synced_at = time.monotonic()
        try:
            self._lock()
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            os.fsync(self._fd)
        finally:
            os.close(self._fd)

    def read_done(self) -> dict[int, str | None]:
        """Reads line -> custom_id of all records; ValueError when there is anything else."""
        done: dict[int, str | None] = {}
        self._complete_bytes = 0
        with os.fdopen(os.dup(self._fd), "rb") as file:
            file.seek(0)
            for number, raw in enumerate(file, 1):
                if not raw.endswith(b"\n"):
                    self._check_beginning(raw, number)
                    break
                line, custom_id = self._parse(raw, number)
                if line in done:
                    raise self._refusal(number, f"a second record of input line {line}")
                done[line] = custom_id
                self._complete_bytes += len(raw)
        return done

    def drop_incomplete(self) -> None:
        """Cuts off the record after those of `read_done` that a killed process has left half written."""
        os.ftruncate(self._fd, self._complete_bytes)

    def append(self, record: bytes) -> None:
        """Writes one record, from which moment it survives the process."""
        rest = memoryview(record)
        while rest:
            rest = rest[os.write(self._fd, rest) :]
        if time.monotonic() - self._synced_at >= FSYNC_SECONDS:
            os.fsync(self._fd)
            self._synced_at = time.monotonic()

    def _lock(self) -> None:
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            raise ValueError(f"{self._path} is not a regular file; a job is resumed from its output, so give a file")
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another job is writing to {self._path}; wait for it or give another output") from None

    def _parse(self, raw: bytes, number: int) -> tuple[int, str | None]:
        try:
            return parse_record(raw)
        except ValueError as error:
            raise self._refusal(number, str(error)) from None

    def _check_beginning(self, raw: bytes, number: int) -> None:
        if not (raw.startswith(RECORD_START) or RECORD_START.startswith(raw)):
            raise self._refusal(number, "not the beginning of a record of a batch job")

    def _refusal(self, number: int, reason: str) -> ValueError:
        return ValueError(f"line {number} of {self._path} is {reason}; nothing was changed, give another output")
