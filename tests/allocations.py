"""Checks that repeated work leaves no objects behind."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator

from jaxinfer.engine.request.request import Request


@contextlib.contextmanager
def memory_stays(max_blocks: int = 500) -> Iterator[None]:
    """Asserts that at most `max_blocks` more blocks of Python's memory are in use afterwards; an object is one or more.

    500 are a tenth of a block in each of 5,000 rounds. Caches of fixed size, which a first round fills, must be filled.
    """
    gc.collect()
    before = sys.getallocatedblocks()
    yield
    gc.collect()
    assert sys.getallocatedblocks() - before <= max_blocks


def num_requests() -> int:
    """Returns the number of requests that are alive in this process."""
    gc.collect()
    return sum(isinstance(one, Request) for one in gc.get_objects())
