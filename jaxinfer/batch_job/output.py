"""The output of a job: it has one writer, which appends whole records and in the end sorts them; free of jax."""

from __future__ import annotations

import os
import stat
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import BinaryIO, NamedTuple, Self

from jaxinfer.atomic_file import try_lock
from jaxinfer.batch_job.files import File, RemoteFile, replace_file, spool
from jaxinfer.batch_job.formats import is_plain, read_records, require_format, write_records
from jaxinfer.batch_job.records import RECORD_START, DamagedError, Record, digest_of, line_of_record, parse_record

FSYNC_SECONDS = 5.0  # A power cut may lose them. A killed process loses nothing: each record is written at once.
# A part is uploaded when one of these is reached, because remote files cannot grow. A killed process loses the rest.
PART_SECONDS = 30.0
PART_BYTES = 2**24
UNFINISHED = ".unfinished"


class Done(NamedTuple):
    """A record in memory: `digest` of its input line, and `has_error` if the record has an error."""

    digest: str
    has_error: bool


def open_output(file: File) -> OutputFile | ConvertedOutput:
    """Opens or creates the output of a job; ValueError if it is in use or cannot be written.

    A plain file of this machine grows by the records. For a remote file and other formats, the records are beside it
    until the job is done: in a plain file, or in parts on the remote file system.
    """
    if isinstance(file, RemoteFile):
        return ConvertedOutput(file, RemoteParts(file.with_name(file.name + UNFINISHED)))
    if is_plain(file):
        return OutputFile(file)
    require_format(file)
    return ConvertedOutput(file, OutputFile(file.with_name(f"{file.name}{UNFINISHED}.jsonl")))


class OutputFile:
    """A plain file of records, locked while open. The lock ends with the process, even if it is killed."""

    def __init__(self, path: Path) -> None:
        """Opens or creates the file; ValueError if it is in use, no regular file, not writable, or cannot be locked."""
        self._path = path
        self._fd = self._open()
        self._complete_bytes = 0
        self._synced_at = time.monotonic()
        self.identity: Mapping[str, str] | None = None
        self.adapters: dict[str, str] = {}
        self._last_line, self._is_sorted = 0, True  # of the records in the file

    def _open(self) -> int:
        while True:
            try:
                fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            except OSError as error:
                raise ValueError(f"{self._path} cannot be written ({error.strerror}); give another output") from None
            try:
                self._lock(fd)
                if self._is_at_path(fd):
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)  # meanwhile another job has ended and replaced the file

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            with _explained(self._path):
                os.fsync(self._fd)
        finally:
            os.close(self._fd)

    @property
    def has_records(self) -> bool:
        return os.fstat(self._fd).st_size > 0

    def read_done(
        self, identity: Mapping[str, str] | None = None, adapters: Mapping[str, str] | None = None
    ) -> dict[int, Done]:
        """Returns the records by input line; ValueError for an invalid record or one of another engine identity.

        Without an `identity`, it is that of the first record. `adapters` has the digest of each adapter by name, as far
        as it is known, and `self.adapters` then has those of the records too.
        """
        done: dict[int, Done] = {}
        self.identity, self.adapters = identity, dict(adapters or {})
        self._complete_bytes = 0
        with self._reader() as file:
            for number, (record, raw) in enumerate(_checked(raw_records(file), self._path, identity, self.adapters), 1):
                if record.line in done:
                    raise _refusal(self._path, number, f"is a second record of input line {record.line}")
                self.identity = record.identity
                done[record.line] = Done(record.digest, record.has_error)
                self._note_order(record.line)
                self._complete_bytes += len(raw)
        return done

    def records(self) -> Iterator[bytes]:
        """Yields the whole records, in the file's order."""
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

    def drop_incomplete(self) -> None:
        """Cuts off the half-written record that a killed process left at the end. Call `read_done` first."""
        os.ftruncate(self._fd, self._complete_bytes)

    def append(self, record: bytes) -> None:
        """Writes one record, which then survives a kill of the process; OSError if the disk is full."""
        rest = memoryview(record)
        with _explained(self._path):
            while rest:
                rest = rest[os.write(self._fd, rest) :]
            self._note_order(line_of_record(record))
            self._complete_bytes += len(record)
            if time.monotonic() - self._synced_at >= FSYNC_SECONDS:
                os.fsync(self._fd)
                self._synced_at = time.monotonic()

    def finish(self) -> None:
        """Puts the records in the order of their input lines. Call it when the job is done, and append no more."""
        if not self._is_sorted:
            with self._reader() as file:
                self.replace(sorted_records(file))

    def replace(self, records: Iterable[bytes]) -> None:
        """Replaces all records at once: a process killed meanwhile leaves the old ones."""
        with _explained(self._path):
            replace_file(self._path, lambda file: file.writelines(records))

    def remove(self) -> None:
        """Removes the file, unless another job has made a new one."""
        if self._is_at_path(self._fd):
            self._path.unlink()

    def _is_at_path(self, fd: int) -> bool:
        return self._path.exists() and os.path.samestat(os.fstat(fd), self._path.stat())

    def _lock(self, fd: int) -> None:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ValueError(f"{self._path} is not a regular file; a job is resumed from its output, so give a file")
        try:
            is_locked = try_lock(fd)
        except OSError as error:  # network file systems may have no locks
            raise ValueError(
                f"{self._path} cannot be locked ({error.strerror}), and without a lock two jobs could write to it; give"
                " an output on a file system with locks, such as a local disk, and copy it afterwards"
            ) from None
        if not is_locked:
            raise ValueError(f"another job is writing to {self._path}; wait for it or give another output")


class RemoteParts:
    """Records in a folder of a remote file system, in files that are uploaded one after another.

    Such a file system has no locks. Two hosts may run the same job and have the same record twice; the first counts.
    """

    def __init__(self, folder: RemoteFile) -> None:
        self._folder = folder
        self._parts = folder.files_below()
        self._waiting = bytearray()  # records that are not uploaded
        self._uploaded_at = time.monotonic()
        self.identity: Mapping[str, str] | None = None
        self.adapters: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._upload()

    @property
    def has_records(self) -> bool:
        return bool(self._parts or self._waiting)

    def read_done(
        self, identity: Mapping[str, str] | None = None, adapters: Mapping[str, str] | None = None
    ) -> dict[int, Done]:
        """Returns the records by input line; ValueError for an invalid record or one of another engine identity."""
        done: dict[int, Done] = {}
        self.identity, self.adapters = identity, dict(adapters or {})
        for part in self._parts:
            with part.open() as file:
                for record, _ in _checked(raw_records(file), part, self.identity, self.adapters):
                    self.identity = record.identity
                    done.setdefault(record.line, Done(record.digest, record.has_error))
        return done

    def records(self) -> Iterator[bytes]:
        """Yields all whole records, part by part."""
        self._upload()
        for part in self._parts:
            with part.open() as file:
                # A file system that shows half-written files may have left one.
                yield from (raw for raw in file if raw.endswith(b"\n"))

    def drop_incomplete(self) -> None:
        """Leaves the parts as they are; a half-written record does not count."""

    def append(self, record: bytes) -> None:
        """Keeps a record until the next part is uploaded; OSError if that fails."""
        self._waiting += record
        if len(self._waiting) >= PART_BYTES or time.monotonic() - self._uploaded_at >= PART_SECONDS:
            self._upload()

    def _upload(self) -> None:
        if self._waiting:
            # By name in the order of time, and never the name that another host gives.
            name = f"{len(self._parts):08}-{uuid.uuid4().hex}.jsonl"
            part = RemoteFile(f"{self._folder}/{name}")
            with _explained(part):
                part.write_bytes(bytes(self._waiting))
            self._parts.append(part)
            self._waiting = bytearray()
        self._uploaded_at = time.monotonic()

    def remove(self) -> None:
        self._waiting = bytearray()
        self._folder.remove_folder()


class ConvertedOutput:
    """An output that is written when all its records are there; until then `journal` has the new ones."""

    def __init__(self, file: File, journal: OutputFile | RemoteParts) -> None:
        self._file = file
        self._journal = journal
        self.identity: Mapping[str, str] | None = None
        self.adapters: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._journal:
            if not self._journal.has_records:
                self._journal.remove()

    def read_done(
        self, identity: Mapping[str, str] | None = None, adapters: Mapping[str, str] | None = None
    ) -> dict[int, Done]:
        """Returns the records by input line; ValueError for an invalid record or one of another engine identity."""
        done: dict[int, Done] = {}
        adapters = dict(adapters or {})
        for record, _ in _checked(self._finished(), self._file, identity, adapters):
            identity = record.identity
            done.setdefault(record.line, Done(record.digest, record.has_error))
        done = self._journal.read_done(identity, adapters) | done
        self.identity, self.adapters = self._journal.identity, self._journal.adapters
        return done

    def _finished(self) -> Iterator[bytes]:
        if self._file.exists():
            with self._file.open("rb") as file:
                yield from read_records(file, self._file)

    def records(self) -> Iterator[bytes]:
        """Yields all whole records. A line may have two, of which the first counts."""
        yield from self._finished()
        yield from self._journal.records()

    def drop_incomplete(self) -> None:
        """Cuts off the half-written record that a killed process left at the end. Call `read_done` first."""
        self._journal.drop_incomplete()

    def append(self, record: bytes) -> None:
        self._journal.append(record)

    def finish(self) -> None:
        """Writes all records in the order of their input lines. Call it when the job is done, and append no more."""
        if self._journal.has_records or not self._file.exists():
            with spool(self._file) as unsorted:
                with _explained(self._file):
                    unsorted.writelines(self.records())
                self.replace(sorted_records(unsorted))

    def replace(self, records: Iterable[bytes]) -> None:
        """Replaces all records at once: a process killed meanwhile leaves the old ones."""
        with _explained(self._file):
            replace_file(self._file, lambda file: write_records(file, self._file, records))
        self._journal.remove()


def sorted_records(file: BinaryIO) -> Iterator[bytes]:
    """Yields the whole records of a file in the order of their input lines, of each line the first.

    Memory holds the place of each.
    """
    places: dict[int, int] = {}
    start = 0
    file.seek(0)
    for raw in file:
        if raw.endswith(b"\n"):
            places.setdefault(line_of_record(raw), start)
        start += len(raw)
    for line in sorted(places):
        file.seek(places[line])
        yield file.readline()


def match_lines(
    lines: Iterable[tuple[int, bytes]], done: Mapping[int, Done], input_path: File, output_path: File
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


def raw_records(file: BinaryIO) -> Iterator[bytes]:
    """Yields the lines; of a line that is no record, which may have any length, only the first bytes."""
    while start := file.readline(len(RECORD_START)):
        yield start if start != RECORD_START else start + file.readline()


def _checked(
    raws: Iterable[bytes], file: File, identity: Mapping[str, str] | None, adapters: dict[str, str]
) -> Iterator[tuple[Record, bytes]]:
    """Yields the records up to one that is half-written, which must be the last.

    ValueError for an invalid record or one of another engine identity. Without an `identity` it is that of the first.
    A record's adapter must be that of its name in `adapters`, which gets those that it does not have.
    """
    raws = iter(raws)
    for number, raw in enumerate(raws, 1):
        if not raw.endswith(b"\n"):
            if not (raw.startswith(RECORD_START) or RECORD_START.startswith(raw)):
                raise _refusal(file, number, "is not the beginning of a record of a batch job")
            return
        try:
            record = parse_record(raw)
        except DamagedError as error:
            way_out = "delete the line to compute it again, or give another output"
            raise _refusal(file, number, f"is {error}", way_out) from None
        except ValueError as error:
            raise _refusal(file, number, f"is {error}") from None
        identity = identity or record.identity
        pairs = [(name, record.identity.get(name), identity.get(name)) for name in {*identity, *record.identity}]
        pairs += [
            ("adapter", f"{name}={digest}", f"{name}={adapters.setdefault(name, digest)}")
            for name, digest in record.adapters.items()
        ]
        for aspect, there, here in sorted(pairs, key=itemgetter(0)):
            if there != here:
                reason = f"was made with {aspect}={there}, and this run has {aspect}={here}"
                raise _refusal(file, number, reason, f"go on with {aspect}={there} or give another output")
        yield record, raw


def _refusal(file: File, number: int, reason: str, way_out: str = "give another output") -> ValueError:
    return ValueError(f"line {number} of {file} {reason}; nothing was changed, {way_out}")


@contextmanager
def _explained(file: File) -> Iterator[None]:
    """Adds the file's path and the way out to an OSError."""
    try:
        yield
    except OSError as error:
        raise OSError(
            f"{file} cannot be written ({error.strerror or error}); what it has is kept, so make room and run the job"
            " again to finish the rest"
        ) from error
