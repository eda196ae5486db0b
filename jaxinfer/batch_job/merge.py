"""Joins the outputs of a job's shards to the output that one host would have written; free of jax."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, NamedTuple

from jaxinfer.batch_job.files import File, spool
from jaxinfer.batch_job.input import check_errors_path, check_input, check_paths, open_lines
from jaxinfer.batch_job.output import Done, match_lines, open_output, sorted_records
from jaxinfer.batch_job.records import custom_id_of, digest_of, line_of_record
from jaxinfer.batch_job.shards import Shard, find_shards, shard_index

MAX_NAMED = 8  # unfinished shards in an error


class Merged(NamedTuple):
    """Result of a merge: the number of records, and of those with an error."""

    num_requests: int
    num_errors: int


def merge_shards(input_path: str | Path, output_path: str | Path, *, errors_path: str | Path | None = None) -> Merged:
    """Writes the records of all shards beside the output to it, in the order of the input.

    The output equals that of one host of the same kind, byte for byte. The shards stay. A process killed meanwhile
    leaves the output as it was. With `errors_path`, as the shards were run with, the records of failed lines go there.

    Raises ValueError, with the output unchanged, if a line has no record yet; the message names its shard. The same
    holds if a shard has another line's record, if shards were made by different engines, or if the output has records
    of another job.
    """
    source, file = check_paths(input_path, output_path)
    check_input(source)
    errors = None if errors_path is None else check_errors_path(source, file, errors_path)
    shards = find_shards(file)
    with spool(file) as joined, ExitStack() as files:
        # By the index of a shard, whose errors come second.
        parts = [*shards, *((shard, shard.path(errors)) for shard, _ in shards if errors is not None)]
        records, identity, adapters = _join(parts, joined)
        num_requests = _check_complete(source, shards, records)
        kinds = [(file, None)] if errors is None else [(file, False), (errors, True)]
        outputs = [(files.enter_context(open_output(path)), path, kind) for path, kind in kinds]
        for output, path, _ in outputs:
            done = output.read_done(identity, adapters)
            with open_lines(source) as lines:
                match_lines(lines, done, source, path)
        for output, _, kind in outputs:
            output.replace(
                raw
                for raw in sorted_records(joined)
                if kind is None or records[line_of_record(raw)][0].has_error is kind
            )
    return Merged(num_requests, sum(done.has_error for done, _ in records.values()))


def _join(
    shards: list[tuple[Shard, File]], joined: BinaryIO
) -> tuple[dict[int, tuple[Done, int]], Mapping[str, str], Mapping[str, str]]:
    """Appends all records to one file; returns them by input line with their shards' indices.

    With them come the engine's identity and the adapters that all of them name.
    """
    records: dict[int, tuple[Done, int]] = {}
    identity, adapters = None, {}
    for shard, path in shards:
        if not path.exists():
            continue
        with open_output(path) as file:
            done = file.read_done(identity, adapters)
            identity, adapters = file.identity, file.adapters
            joined.writelines(file.records())
        if twice := done.keys() & records.keys():
            line = min(twice)
            other = next(other for shard, other in shards if shard.index == records[line][1])
            raise ValueError(f"{path} and {other} both have a record of line {line}; delete the file of another job")
        records |= {line: (record, shard.index) for line, record in done.items()}
    return records, identity or {}, adapters


def _check_complete(input_path: File, shards: list[tuple[Shard, File]], records: dict[int, tuple[Done, int]]) -> int:
    """Returns the number of requests; ValueError unless each has one record, in its shard."""
    num_requests, missing = Counter[int](), Counter[int]()
    unmatched = set(records)
    with open_lines(input_path) as lines:
        for line, raw in lines:
            index = shard_index(line, custom_id_of(raw, line), len(shards))
            num_requests[index] += 1
            if line not in records:
                missing[index] += 1
            elif records[line] == (records[line][0], index) and records[line][0].digest == digest_of(raw):
                unmatched.remove(line)
    if unmatched:
        line = min(unmatched)
        path = shards[records[line][1] - 1][1]
        raise ValueError(
            f"{path} has a record of line {line}, which {input_path} does not have, has changed, or has for another"
            " shard; nothing was changed, delete the file and run its shard again"
        )
    if missing:
        counts = [f"{index}/{len(shards)} lacks {missing[index]} of {num_requests[index]}" for index in sorted(missing)]
        more = f" and {len(counts) - MAX_NAMED} more" if len(counts) > MAX_NAMED else ""
        raise ValueError(
            f"records of {missing.total()} lines are missing: shard {', '.join(counts[:MAX_NAMED])}{more}; run these"
            " shards again, then merge"
        )
    return num_requests.total()
