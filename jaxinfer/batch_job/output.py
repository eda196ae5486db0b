"""The output file of a job: it has one writer, which appends whole records and in the end sorts them; free of jax."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple, Self

from jaxinfer.batch_job.records import RECORD_START, Record, digest_of, line_of_record, parse_record

FSYNC_SECONDS = 5.0  # A power cut may lose them. A killed process loses nothing: each record is written at once.


class Done(NamedTuple):
    """A record in memory: `digest` of its input line, and `has_error` if the record has an error."""

    digest: str
    has_error: bool


class OutputFile:
    """A file of records, locked while open. The lock ends with the process, even if it is killed."""

    def __init__(self, path: Path) -> None:
        """Opens or creates the file; ValueError if it is in use, no regular file, not writable, or cannot be locked."""
        self._path = path
        self._fd = self._open()
        self._complete_bytes = 0
        self._synced_at = time.monotonic()
        self.identity: Mapping[str, str] | None = None
        self._last_line, self._is_sorted = 0, True  # of the records in the file

    def _open(self) -> int:
        while True:
            try:
                fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            except OSError as error:
                raise ValueError(f"{self._path} cannot be written ({error.strerror}); give another output") from None
            try:
                self._lock(fd)
                if self._path.exists() and os.path.samestat(os.fstat(fd), self._path.stat()):
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)  # meanwhile another job has ended and replaced the file

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            with self._explained():
                os.fsync(self._fd)
        finally:
            os.close(self._fd)

    def read_done(self, identity: Mapping[str, str] | None = None) -> dict[int, Done]:
        """Returns the records by input line; ValueError for an invalid record or one of another engine identity.

        Without an `identity`, it is that of the first record.
        """
        done: dict[int, Done] = {}
        self.identity = identity
        self._complete_bytes = 0
        with self._reader() as file:
            for number, raw in enumerate(self._lines(file), 1):
                if not raw.endswith(b"\n"):
                    self._check_beginning(raw, number)
                    break
                record = self._parse(raw, number)
                if record.line in done:
                    raise self._refusal(number, f"is a second record of input line {record.line}")
                self.identity = self.identity or record.identity
                self._check_identity(record, self.identity, number)
                done[record.line] = Done(record.digest, record.has_error)
                self._note_order(record.line)
                self._complete_bytes += len(raw)
        return done

    def records(self) -> Iterator[bytes]:
        """Yields the records that `read_done` has read, in the file's order."""
        with self._reader() as file:
            while file.tell() < self._complete_bytes:
                yield file.readline()

    def _reader(self) -> BinaryIO:
        file = os.fdopen(os.dup(self._fd), "rb")
        file.seek(0)
        return file

    def _note_order(self, line: int) -> None:
        self._is_sorted &= line > self._last_line
        self._last_line = line

    def _lines(self, file: BinaryIO) -> Iterator[bytes]:
        """Yields the lines; of a line that is no record, which may have any length, only the first bytes."""
        while start := file.readline(len(RECORD_START)):
            yield start if start != RECORD_START else start + file.readline()

    def drop_incomplete(self) -> None:
        """Cuts off the half-written record that a killed process left at the end. Call `read_done` first."""
        os.ftruncate(self._fd, self._complete_bytes)

    def append(self, record: bytes) -> None:
        """Writes one record, which then survives a kill of the process; OSError if the disk is full."""
        rest = memoryview(record)
        with self._explained():
            while rest:
                rest = rest[os.write(self._fd, rest) :]
            self._note_order(line_of_record(record))
            if time.monotonic() - self._synced_at >= FSYNC_SECONDS:
                os.fsync(self._fd)
                self._synced_at = time.monotonic()

    def sort(self) -> None:
        """Puts the records in the order of their input lines. Call it when the job is done, and append no more."""
        if not self._is_sorted:
            with self._reader() as file:
                self.replace(sorted_records(file))

    def replace(self, records: Iterable[bytes]) -> None:
        """Replaces all records at once: a process killed meanwhile leaves the old ones."""
        path = Path(os.path.realpath(self._path))  # a link stays one
        aside = path.with_name(f".{path.name}.sorted")
        with self._explained():
            aside.unlink(missing_ok=True)  # left by a killed process
            try:
                with aside.open("xb") as file:
                    file.writelines(records)
                    file.flush()
                    os.fsync(file.fileno())
                shutil.copymode(path, aside)
                aside.replace(path)
            except BaseException:
                aside.unlink(missing_ok=True)
                raise

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Adds the file's path and the way out to an OSError."""
        try:
            yield
        except OSError as error:
            raise OSError(
                f"{self._path} cannot be written ({error.strerror}); what it has is kept, so make room and run the job"
                " again to finish the rest"
            ) from error

    def _lock(self, fd: int) -> None:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ValueError(f"{self._path} is not a regular file; a job is resumed from its output, so give a file")
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another job is writing to {self._path}; wait for it or give another output") from None
        except OSError as error:  # network file systems may have no locks
            raise ValueError(
                f"{self._path} cannot be locked ({error.strerror}), and without a lock two jobs could write to it; give"
                " an output on a file system with locks, such as a local disk, and copy it afterwards"
            ) from None

    def _parse(self, raw: bytes, number: int) -> Record:
        try:
            return parse_record(raw)
        except ValueError as error:
            raise self._refusal(number, f"is {error}") from None

    def _check_identity(self, record: Record, identity: Mapping[str, str], number: int) -> None:
        for aspect in sorted(identity.keys() | record.identity.keys()):
            there, here = record.identity.get(aspect), identity.get(aspect)
            if there != here:
                reason = f"was made with {aspect}={there}, and this run has {aspect}={here}"
                raise self._refusal(number, reason, f"go on with {aspect}={there} or give another output")

    def _check_beginning(self, raw: bytes, number: int) -> None:
        if not (raw.startswith(RECORD_START) or RECORD_START.startswith(raw)):
            raise self._refusal(number, "is not the beginning of a record of a batch job")

    def _refusal(self, number: int, reason: str, way_out: str = "give another output") -> ValueError:
        return ValueError(f"line {number} of {self._path} {reason}; nothing was changed, {way_out}")


def match_lines(
    lines: Iterable[tuple[int, bytes]], done: Mapping[int, Done], input_path: Path, output_path: Path
) -> int:
    """Returns the number of lines; ValueError if one with a record in `done` has changed or is missing."""
    num_requests, unmatched = 0, set(done)
    for line, raw in lines:
        num_requests += 1
        if line not in done:
            continue
        unmatched.remove(line)
        if digest_of(raw) != done[line].digest:
            raise ValueError(
                f"{output_path} has a record of another line {line} than {input_path} has now; nothing was changed, "
                "restore the line, delete its record to do it again, or give another output"
            )
    if unmatched:
        raise ValueError(
            f"{output_path} belongs to another input or shard: it has a record of line {min(unmatched)}, which has no"
            f" request of this job in {input_path}; nothing was changed, give another output"
        )
    return num_requests


def sorted_records(file: BinaryIO) -> Iterator[bytes]:
    """Yields the records of a file in the order of their input lines; memory holds the place of each."""
    places, start = [], 0
    file.seek(0)
    for raw in file:
        places.append((line_of_record(raw), start))
        start += len(raw)
    for _, start in sorted(places):
        file.seek(start)
        yield file.readline()
