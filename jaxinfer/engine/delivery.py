"""Requests to the scheduler, and what comes of them to whoever waits for it."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from tqdm import tqdm

from jaxinfer.engine.interrupts import deferred_interrupts
from jaxinfer.engine.mailroom import Mailroom
from jaxinfer.engine.request import Completion, Delta
from jaxinfer.engine.samples import Samples, in_order
from jaxinfer.engine.scheduler import Scheduler


class Delivery:
    """Queues the samples of prompts and collects what they yield; `advance` computes a step and posts that.

    Who reads a stream may be another thread than who asked for it: it enters `guard` as any caller does.
    """

    def __init__(self, scheduler: Scheduler, advance: Callable[[], None], guard: AbstractContextManager[Any]) -> None:
        self._scheduler = scheduler
        self._advance = advance
        self._guard = guard
        self.mailroom = Mailroom()

    def queue(self, samples: Samples) -> None:
        """Raises QueueFullError, and queues none, where they are too many."""
        with deferred_interrupts(), self._guard:
            self._scheduler.check_room(len(samples.requests))
            self.mailroom.expect(samples)
            for request in samples.requests:
                self._scheduler.add(request)

    def abort(self, request_id: int) -> None:
        """Ends a request; its completions are posted."""
        for sample_id in self.mailroom.sample_ids(request_id):
            delta = self._scheduler.abort(sample_id)
            if delta is not None:
                self.mailroom.post([delta])

    def stream(self, samples: Samples) -> Iterator[Delta]:
        """Queues one prompt and yields what comes of it; ends it when it is closed."""
        num_to_come = samples.num_completions
        try:
            mailbox = self.mailroom.open_mailbox([samples.request_id])
            self.queue(samples)
            while num_to_come:
                while not mailbox:
                    self._advance()
                delta = mailbox.popleft()
                num_to_come -= delta.completion is not None
                yield delta
        finally:
            self.forget([samples.request_id])

    def collect(
        self, groups: Sequence[Samples], show_progress: bool, between_steps: Callable[[], None]
    ) -> list[Completion]:
        """Queues several prompts, all or none, and returns the completions of one after the other."""
        self._scheduler.check_room(sum(len(samples.requests) for samples in groups))
        ids = [samples.request_id for samples in groups]
        try:
            mailbox = self.mailroom.open_mailbox(ids)
            for samples in groups:
                self.queue(samples)
            count = sum(samples.num_completions for samples in groups)
            completions = self._wait(mailbox, count, show_progress, between_steps)
        finally:
            self.forget(ids)
        return [c for samples in groups for c in in_order(completions[samples.request_id], samples.sampling)]

    def _wait(
        self, mailbox: deque[Delta], count: int, show_progress: bool, between_steps: Callable[[], None]
    ) -> dict[int, list[Completion]]:
        completions: defaultdict[int, list[Completion]] = defaultdict(list)
        num_completions = num_tokens = 0
        with tqdm(total=count, unit="request", disable=not show_progress, smoothing=0) as progress:
            while num_completions < count:
                self._advance()
                between_steps()
                while mailbox:
                    delta = mailbox.popleft()
                    num_tokens += len(delta.token_ids)
                    if delta.completion is not None:
                        completions[delta.request_id].append(delta.completion)
                        num_completions += 1
                        progress.update()
                elapsed = max(progress.format_dict["elapsed"], 1e-9)
                progress.set_postfix_str(f"{num_tokens / elapsed:.1f} tokens/s", refresh=False)
        return completions

    def forget(self, ids: Iterable[int]) -> None:
        """Ends requests of which nobody wants to hear any more, all of them before Ctrl-C has an effect."""
        with deferred_interrupts():
            for request_id in ids:
                for sample_id in self.mailroom.sample_ids(request_id):
                    self._scheduler.abort(sample_id)
                self.mailroom.forget(request_id)
