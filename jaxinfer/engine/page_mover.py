"""Copies the pages of handed-over requests from the devices of one replica to those of another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jaxinfer.engine.execution.page_copier import PageCopier, SealedBundle
from jaxinfer.engine.execution.runner import Runner
from jaxinfer.engine.scheduling.replica import Replica
from jaxinfer.model.cache import KVCache

# Bundles of a request on the devices at a time: while one is written, the next is brought.
MAX_BUNDLES = 2


class DeviceArrival:
    """The bundles of a request on their way; `flags` are True on the target's devices for those that are intact."""

    def __init__(self, flags: Sequence[Any], num_bytes: int) -> None:
        self._flags = flags
        self.num_bytes = num_bytes

    @property
    def is_done(self) -> bool:
        return all(flag.is_ready() for flag in self._flags)

    def is_intact(self) -> bool:
        return all(map(bool, self._flags))


class DevicePageMover:
    """Gathers pages into bundles, brings these to the other devices, and writes them there; no content is on the host.

    Both sides compute the checksum of a bundle: the source beside its gathering, the target before its writing.
    """

    def __init__(self, runners: Sequence[Runner], copiers: Sequence[Sequence[PageCopier]]) -> None:
        self._runners = runners  # of each replica
        self._copiers = copiers  # of each replica, for each kind of pages

    def move(self, source: Replica, target: Replica, pages: Sequence[Sequence[tuple[int, int]]]) -> DeviceArrival:
        flags, num_bytes = [], 0
        for kind, pairs in enumerate(pages):
            for run in self._copiers[source.index][kind].hand_over_runs(len(pairs)):
                if len(flags) >= MAX_BUNDLES:
                    flags[-MAX_BUNDLES].block_until_ready()
                old, new = zip(*pairs[run], strict=True)
                sealed = self._bring(target, kind, self._take(source, kind, old))
                flags.append(self._write(target, kind, new, sealed))
                num_bytes += sealed.num_bytes
        return DeviceArrival(flags, num_bytes)

    def _take(self, replica: Replica, kind: int, pages: Sequence[int]) -> SealedBundle:
        def take(cache: KVCache) -> tuple[SealedBundle, KVCache]:
            return self._copiers[replica.index][kind].seal(cache, pages), cache

        return self._runners[replica.index].lend_cache(replica.tables.copies, take)

    def _bring(self, replica: Replica, kind: int, sealed: SealedBundle) -> SealedBundle:
        return self._copiers[replica.index][kind].brought(sealed)

    def _write(self, replica: Replica, kind: int, pages: Sequence[int], sealed: SealedBundle) -> jax.Array:
        def write(cache: KVCache) -> tuple[jax.Array, KVCache]:
            return self._copiers[replica.index][kind].unseal(cache, pages, sealed)

        return self._runners[replica.index].lend_cache(replica.tables.copies, write)
