"""Shards of a job: each host takes the lines of one, and no host needs to know of another."""

from __future__ import annotations

import re
from hashlib import blake2b
from typing import Any, NamedTuple

from jaxinfer.batch_job.files import File, names_beside
from jaxinfer.validation import is_int, require

MAX_SHARDS = 2**16
HASH_BYTES = 8


class Shard(NamedTuple):
    """The lines of an input with one of `count` remainders of their hash."""

    index: int  # from 1
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def has(self, line: int, custom_id: str | None) -> bool:
        return shard_index(line, custom_id, self.count) == self.index

    def path(self, output: File) -> File:
        """Returns the file for the records of the shard, beside the job's output; the whole job has the output."""
        return output if self == WHOLE else output.with_name(f"{output.name}.shard-{self.index}-of-{self.count}.jsonl")


WHOLE = Shard(1, 1)


def shard_index(line: int, custom_id: str | None, count: int) -> int:
    """Returns the shard of a line, from 1 to `count`.

    All lines with the same custom_id are in one shard, so that a host sees which of them repeat it. A line without a
    custom_id is in the shard of its number.
    """
    name = f"line {line}" if custom_id is None else custom_id
    digest = blake2b(name.encode(errors="surrogatepass"), digest_size=HASH_BYTES).digest()
    return int.from_bytes(digest, "big") % count + 1


def as_shard(value: Any) -> Shard:
    """Returns the shard of (index, count); None is the whole job."""
    if value is None:
        return WHOLE
    pair = tuple(value) if isinstance(value, tuple | list) else ()
    is_pair = len(pair) == 2 and all(map(is_int, pair)) and 1 <= pair[0] <= pair[1] <= MAX_SHARDS
    require(is_pair, "shard", value, f"a pair (index, count) with index from 1 to count, at most {MAX_SHARDS}")
    return Shard(*pair)


def find_shards(output: File) -> list[tuple[Shard, File]]:
    """Returns all shards of the job with this output; ValueError if there are none, or those of two divisions."""
    name = re.compile(re.escape(output.name) + r"\.shard-([1-9][0-9]{0,9})-of-([1-9][0-9]{0,9})\.jsonl")
    matches = map(name.fullmatch, names_beside(output))
    counts = {int(match[2]) for match in matches if match}
    if not counts:
        raise ValueError(f"{output.name} has no shards beside it, such as {Shard(1, 8).path(output)}; run them first")
    if len(counts) > 1:
        shown = " and ".join(f"of-{count}" for count in sorted(counts))
        raise ValueError(f"{output.name} has shards {shown} beside it; move those of one division away")
    (count,) = counts
    if count > MAX_SHARDS:
        raise ValueError(f"{output.name} has shards of-{count} beside it; a job has at most {MAX_SHARDS} shards")
    return [(shard, shard.path(output)) for shard in (Shard(index, count) for index in range(1, count + 1))]
