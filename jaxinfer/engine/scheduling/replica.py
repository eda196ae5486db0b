"""The scheduler's view of a replica: its running requests, its pages and its steps; and the choice of one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from jaxinfer.engine.kv_cache.block_tables import BlockTables
from jaxinfer.engine.request.request import Request
from jaxinfer.engine.scheduling.metrics import ReplicaMetrics
from jaxinfer.engine.scheduling.running import RunningQueue
from jaxinfer.engine.scheduling.step import Step
from jaxinfer.sampling_params import Form

# A token that is computed though another replica has it, or will, counts like two that wait: it delays the requests
# behind as well. In simulated loads of 200 requests with 1 to 40 beginnings, 2 found up to 15 points more than 1.
RECOMPUTED = 2
# The part of the rows by which a replica may run more requests than another.
MAX_IMBALANCE = 1 / 4


class ReadySteps(Protocol):
    """The scheduler's view of `CompiledSteps`: which steps are compiled so far."""

    @property
    def max_tokens(self) -> float:
        """The most tokens of a step so far."""
        ...

    def want_tokens(self) -> None:
        """Learns that steps with more than `max_tokens` tokens are wanted."""
        ...

    def can_draw(self, form: Form) -> bool:
        """True if a step of any rows can draw in this form; if not, a later call may return True."""
        ...

    def draw_error(self, form: Form) -> str | None:
        """Returns the reason if `can_draw` will never return True for this form."""
        ...

    def can_loop(self, form: Form) -> bool:
        """True if a loop of any rows can draw in this form; if not, a later call may return True."""
        ...


class EveryStep:
    """Steps that need no compiler, as those of a simulation: all are there."""

    max_tokens = math.inf

    def want_tokens(self) -> None:
        pass

    def can_draw(self, form: Form) -> bool:
        return True

    def draw_error(self, form: Form) -> str | None:
        return None

    def can_loop(self, form: Form) -> bool:
        return True


class Replica:
    """A copy of the model with requests and pages of its own. Steps of a replica run in order.

    It counts its steps: a request that was preempted moves to another replica only after the last step that may
    contain it, whose tokens for it are then dropped.
    """

    def __init__(self, index: int, tables: BlockTables, running: RunningQueue, steps: ReadySteps) -> None:
        self.index = index
        self.steps = steps
        self.tables = tables
        self.running = running
        self.entered: Step | None = None  # the launched step that is recorded and not committed
        self.leaving: list[Request] = []  # requests without pages, whose last token `entered` samples
        self.committed = 0.0  # time of the last commit
        self.num_single = 0  # steps to come before the next loop
        self.num_over = 0  # scheduled steps that are known to be over, with those that were dropped
        self.num_steps = 0  # committed ones

    def metrics(self) -> ReplicaMetrics:
        return ReplicaMetrics(num_running=len(self.running), num_steps=self.num_steps, **self.tables.pages.counts())

    def may_run(self, request: Request, home: Replica | None) -> bool:
        """True unless steps under way at `home`, the replica where the request ran last, may contain it."""
        return home is None or home is self or home.num_over >= request.left_after

    def work(self, request: Request) -> int:
        """Returns the tokens to compute here before the request's next token; its own count RECOMPUTED times."""
        num_missing = len(request.token_ids) - self.running.num_found(request)
        return self.running.num_ahead(request) + RECOMPUTED * num_missing


def choose_replica(request: Request, replicas: Sequence[Replica], home: Replica | None) -> Replica | None:
    """Returns the replica for a waiting request, or None if none has a row and pages for it.

    It is the one with the fewest tokens to compute until the request's next token: those that wait there, and those of
    the request that its prefix cache has not, which count RECOMPUTED times. Replicas are left out that run more
    requests than the emptiest, by more than MAX_IMBALANCE of their rows. A fork runs beside its origin, whose pages it
    copies, if there is room. `home` is the replica where it ran last, of any role.
    """
    allowed = [replica for replica in replicas if replica.may_run(request, home)]
    if (origin := request.table.origin) is not None:
        beside = [replica for replica in allowed if origin.replica == replica.index]
        if beside and beside[0].running.has_room(request):
            return beside[0]
    least = min(len(replica.running) for replica in replicas)
    most = least + max(int(MAX_IMBALANCE * replicas[0].running.max_num_seqs), 1)

    def cost(replica: Replica) -> tuple[bool, int, int, int]:
        return len(replica.running) > most, replica.work(request), len(replica.running), replica.index

    # Finding room counts the pages of all running requests, so only the best replicas are asked.
    return next((replica for replica in sorted(allowed, key=cost) if replica.running.has_room(request)), None)
