"""Whatever is asked of the scheduler, pages are never lost, limits are kept, and every request finishes."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import hypothesis.strategies as st
import numpy as np
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxinfer.engine.request import Request
from jaxinfer.engine.scheduler import Scheduler, Step
from tests.engine.fake_device import FakeDevice, expected_tokens, make_request


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, advance and are aborted in any order, in a pool that is often too small for all."""

    @initialize(
        num_pages=st.integers(1, 8),
        page_size=st.integers(1, 4),
        max_num_seqs=st.integers(1, 4),
        more=st.integers(0, 6),
    )
    def start(self, num_pages, page_size, max_num_seqs, more):
        self.num_pages, self.page_size = num_pages, page_size
        self.max_num_seqs, self.budget = max_num_seqs, max_num_seqs + more
        self.scheduler = Scheduler(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=self.budget,
            num_pages=num_pages,
            page_size=page_size,
        )
        self.device = FakeDevice(page_size)
        self.ids = itertools.count()
        self.requests: dict[int, Request] = {}
        self.completions = {}

    @rule(num_prompt_tokens=st.integers(1, 32), max_tokens=st.integers(1, 12))
    def add(self, num_prompt_tokens, max_tokens):
        # The last token is drawn but not computed. What does not fit the pool alone is refused earlier.
        num_slots = self.num_pages * self.page_size
        num_prompt_tokens = min(num_prompt_tokens, num_slots)
        request = make_request(next(self.ids), num_prompt_tokens, min(max_tokens, num_slots + 1 - num_prompt_tokens))
        self.requests[request.request_id] = request
        self.scheduler.add(request)

    @precondition(lambda self: self.scheduler.num_unfinished)
    @rule()
    def step(self):
        self.enter(self.schedule())

    @precondition(lambda self: self.scheduler.num_unfinished)
    @rule(number=st.integers(0, 100))
    def step_with_an_abort_while_it_runs(self, number):
        step = self.schedule()
        self.abort(number)
        self.enter(step)

    @precondition(lambda self: self.requests)
    @rule(number=st.integers(0, 100))
    def abort(self, number):
        request = self.requests[number % len(self.requests)]
        was_finished = request.finish_reason is not None
        delta = self.scheduler.abort(request.request_id)
        assert (delta is None) == was_finished
        if delta is not None:
            assert delta.completion is not None
            self.completions[request.request_id] = delta.completion

    def schedule(self) -> Step:
        decoding = [r for r in self.scheduler._running if r.num_uncomputed == 1]
        step = self.scheduler.schedule()
        assert step is not None, "requests wait but nothing is computed"
        chunks = step.chunks
        assert 1 <= step.num_tokens <= self.budget
        assert len({chunk.request.request_id for chunk in chunks}) == len(chunks) <= self.max_num_seqs
        for chunk in chunks:
            assert chunk.start == chunk.request.num_computed
            assert 1 <= chunk.num_tokens <= chunk.request.num_uncomputed
            num_pages = -(-(chunk.start + chunk.num_tokens) // self.page_size)
            assert len(chunk.request.pages) == num_pages or chunk.num_tokens < chunk.request.num_uncomputed
            assert len(chunk.request.pages) >= num_pages
        decoded = [chunk.request for chunk in chunks if chunk.request in decoding]
        assert decoded == [r for r in decoding if r in self.scheduler._running], "a decoding request was held up"
        assert [chunk.request for chunk in chunks][: len(decoded)] == decoded, "decoding requests do not come first"
        return step

    def enter(self, step: Step):
        aborted = [chunk.request for chunk in step.chunks if chunk.request.finish_reason is not None]
        running = Step(tuple(chunk for chunk in step.chunks if chunk.request not in aborted))
        results = dict(zip(running.chunks, self.device.run(running).tokens.tolist(), strict=True))
        tokens = np.array([results.get(chunk, -1) for chunk in step.chunks])
        output = SimpleNamespace(tokens=tokens, log_probs=np.zeros(len(tokens), np.float32))
        for delta in self.scheduler.commit(step, output):
            if delta.completion is not None:
                self.completions[delta.request_id] = delta.completion

    @invariant()
    def limits_are_kept_and_pages_have_one_owner(self):
        if not hasattr(self, "scheduler"):
            return
        owned = [page for request in self.requests.values() for page in request.pages]
        assert len(owned) == len(set(owned)), "a page has two owners"
        assert len(owned) + self.scheduler.num_free_pages == self.num_pages, "a page is lost"
        running, waiting = self.scheduler._running, list(self.scheduler._waiting)
        assert len(running) <= self.max_num_seqs
        assert all(len(r.pages) == -(-r.num_computed // self.page_size) for r in running)
        assert not any(r.pages or r.num_computed for r in waiting)
        unfinished = [r.request_id for r in self.requests.values() if r.finish_reason is None]
        assert sorted(r.request_id for r in running + waiting) == unfinished

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        # Far more than recomputing everything before each draw would take.
        for _ in range(100_000):
            if not self.scheduler.num_unfinished:
                break
            self.step()
            self.limits_are_kept_and_pages_have_one_owner()
        assert self.scheduler.num_unfinished == 0, "livelock"
        assert self.scheduler.num_free_pages == self.num_pages
        assert self.completions.keys() == self.requests.keys()
        for request_id, completion in self.completions.items():
            request = self.requests[request_id]
            assert list(completion.token_ids) == expected_tokens(request, len(completion.token_ids))


SchedulerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestSchedulerMachine = SchedulerMachine.TestCase
