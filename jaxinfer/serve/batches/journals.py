"""The journals of a batch: records of its results and of its failed lines, as its job writes them, and their repair."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from jaxinfer.batch_job.files import replace_file
from jaxinfer.batch_job.input import open_lines
from jaxinfer.batch_job.output import raw_records, sorted_records
from jaxinfer.batch_job.records import RECORD_START, digest_of, line_of_record, parse_record, unanswered_line
from jaxinfer.serve.batches.own_folder import PRIVATE, keep_lost

EXPIRED = "the completion window was over before this request could be executed"


class Journals:
    """The two journals of one batch, in a folder of the server."""

    def __init__(self, folder: Path, batch_id: str) -> None:
        self._folder = folder
        self.paths = tuple(folder / "batches" / f"{batch_id}{end}" for end in (".jsonl", ".errors.jsonl"))

    def create(self) -> None:
        """Creates those that are missing, for their owner alone."""
        for path in self.paths:
            path.touch(PRIVATE)

    def remove(self) -> None:
        for path in self.paths:
            path.unlink(missing_ok=True)

    def put_damage_aside(self, source: Path | None) -> None:
        """Keeps the sound records of lines of the input; the rest goes to `lost`, and its lines have no record."""
        taken, digests = set[int](), None
        for path, has_error in zip(self.paths, (False, True), strict=True):
            if not path.exists() or not path.stat().st_size:
                continue
            if source is not None and digests is None:
                with open_lines(source) as lines:
                    digests = {number: digest_of(raw) for number, raw in lines}
            pieces = partial(_pieces, path, digests, frozenset(taken), has_error=has_error)
            if next(pieces(are_sound=False), None) is not None:
                damaged = path.with_name(f"{path.name}.damaged")
                damaged.touch(PRIVATE)
                with damaged.open("wb") as file:
                    file.writelines(pieces(are_sound=False))
                # The copy is there before the journal changes, so that a kill loses nothing.
                keep_lost(self._folder, damaged, "could not be read, and its lines are computed again")
                sound = pieces(are_sound=True)
                replace_file(path, partial(_write, sound), PRIVATE)
            taken |= {line_of_record(raw) for raw in _sorted(path)}

    def results(self) -> Iterator[bytes]:
        """Yields the records of results in the order of their lines."""
        return _sorted(self.paths[0])

    def failures(self) -> Iterator[bytes]:
        """Yields the records of failed lines in their order."""
        return _sorted(self.paths[1])

    def expired_failures(self, source: Path) -> Iterator[bytes]:
        """Yields the records of failed lines in their order, and one for each line that has none."""
        return heapq.merge(self.failures(), self._unanswered(source), key=line_of_record)

    def _unanswered(self, source: Path) -> Iterator[bytes]:
        done = {line_of_record(raw) for path in self.paths for raw in _sorted(path)}
        with open_lines(source) as lines:
            for number, raw in lines:
                if number not in done:
                    yield unanswered_line(raw, number, {}, "batch_expired", EXPIRED)


def _write(pieces: Iterator[bytes], file: object) -> None:
    file.writelines(pieces)  # pyright: ignore[reportAttributeAccessIssue]


def _sorted(path: Path) -> Iterator[bytes]:
    if path.exists():
        with path.open("rb") as file:
            yield from sorted_records(file)


def _pieces(
    path: Path, digests: Mapping[int, str] | None, taken: frozenset[int], *, has_error: bool, are_sound: bool
) -> Iterator[bytes]:
    """Yields the sound records of a journal, or all else that is in it.

    A sound record is the first of its line, with the line's digest in `digests`, and its line is not `taken`.
    `has_error`: it has an error. The half-written record that a killed process left at the end is neither.
    """
    seen = set(taken)
    with path.open("rb") as file:
        for raw in raw_records(file):
            is_whole, is_sound = raw.endswith(b"\n"), False
            if not is_whole and (raw.startswith(RECORD_START) or RECORD_START.startswith(raw)):
                return
            with suppress(ValueError):
                record = parse_record(raw)
                is_sound = is_whole and record.has_error is has_error and record.line not in seen
                is_sound &= digests is None or digests.get(record.line) == record.digest
                if is_sound:
                    seen.add(record.line)
            if is_sound is are_sound:
                yield raw
