"""Whatever is asked of the scheduler, pages are never lost, limits are kept, and every request finishes."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxinfer.config import SamplingParams
from jaxinfer.engine.request import Request
from jaxinfer.engine.scheduler import Scheduler, Step


def make_request(request_id: int, num_prompt_tokens: int, max_tokens: int) -> Request:
    prompt = [next_token([request_id, i]) for i in range(num_prompt_tokens)]
    return Request(
        request_id,
        prompt,
        SamplingParams(max_tokens=max_tokens),
        seed=0,
        max_tokens=max_tokens,
        stop_token_ids=(),
        text_stream=None,
    )


def next_token(token_ids: list[int]) -> int:
    """A model of sorts: the next token is a function of all tokens so far and their order."""
    return hash(tuple(token_ids)) % 1_000_003


def expected_tokens(request: Request, count: int) -> list[int]:
    tokens = request.token_ids[: request.num_prompt_tokens]
    for _ in range(count):
        tokens = [*tokens, next_token(tokens)]
    return tokens[request.num_prompt_tokens :]


class FakeDevice:
    """Keeps tokens in slots as a cache would and reads each context back through the request's pages."""

    def __init__(self, page_size: int):
        self.page_size = page_size
        self.slots: dict[int, int] = {}

    def run(self, step: Step) -> SimpleNamespace:
        for chunk in step.chunks:
            for position in range(chunk.start, chunk.start + chunk.num_tokens):
                self.slots[self.slot(chunk.request, position)] = chunk.request.token_ids[position]
        contexts = [self.context(chunk.request, chunk.start + chunk.num_tokens) for chunk in step.chunks]
        tokens = np.array([next_token(context) for context in contexts])
        return SimpleNamespace(tokens=tokens, log_probs=np.zeros(len(tokens), np.float32))

    def context(self, request: Request, kv_len: int) -> list[int]:
        return [self.slots[self.slot(request, position)] for position in range(kv_len)]

    def slot(self, request: Request, position: int) -> int:
        return request.pages[position // self.page_size] * self.page_size + position % self.page_size


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
TestSchedulerMachine = pytest.mark.filterwarnings("default")(SchedulerMachine.TestCase)


def make_scheduler(*, max_num_seqs=4, max_num_batched_tokens=32, num_pages=16, page_size=16) -> Scheduler:
    return Scheduler(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        num_pages=num_pages,
        page_size=page_size,
    )


def run_one_step(scheduler: Scheduler, device: FakeDevice):
    step = scheduler.schedule()
    assert step is not None
    return step, scheduler.commit(step, device.run(step))


def chunks_of(step: Step | None) -> list[tuple[int, int, int]]:
    assert step is not None
    return [(chunk.request.request_id, chunk.start, chunk.num_tokens) for chunk in step.chunks]


def test_there_is_no_step_without_requests():
    assert make_scheduler().schedule() is None


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks():
    scheduler, device = make_scheduler(max_num_batched_tokens=32), FakeDevice(16)
    scheduler.add(make_request(0, 70, 5))

    steps = [run_one_step(scheduler, device)[0] for _ in range(4)]

    assert [chunks_of(step) for step in steps] == [[(0, 0, 32)], [(0, 32, 32)], [(0, 64, 6)], [(0, 70, 1)]]


def test_a_chunk_before_the_last_yields_no_token():
    scheduler, device = make_scheduler(max_num_batched_tokens=32), FakeDevice(16)
    scheduler.add(make_request(0, 33, 5))

    deltas = [run_one_step(scheduler, device)[1] for _ in range(2)]

    assert [len(d) for d in deltas] == [0, 1]


def test_requests_are_admitted_in_the_order_they_came():
    scheduler = make_scheduler(max_num_seqs=2)
    for request_id in (7, 3, 5):
        scheduler.add(make_request(request_id, 4, 5))

    assert chunks_of(scheduler.schedule()) == [(7, 0, 4), (3, 0, 4)]


def test_a_long_prompt_does_not_hold_up_who_decodes():
    scheduler, device = make_scheduler(max_num_batched_tokens=8), FakeDevice(16)
    scheduler.add(make_request(0, 4, 9))
    run_one_step(scheduler, device)
    scheduler.add(make_request(1, 60, 1))

    steps = [run_one_step(scheduler, device)[0] for _ in range(3)]

    assert [chunks_of(step) for step in steps] == [
        [(0, 4, 1), (1, 0, 7)],
        [(0, 5, 1), (1, 7, 7)],
        [(0, 6, 1), (1, 14, 7)],
    ]


def test_a_step_is_a_decode_step_when_every_chunk_is_one_token():
    scheduler, device = make_scheduler(), FakeDevice(16)
    scheduler.add(make_request(0, 4, 9))
    scheduler.add(make_request(1, 6, 9))

    kinds = [run_one_step(scheduler, device)[0].is_decode for _ in range(2)]

    assert kinds == [False, True]


def test_a_request_waits_until_there_are_pages_for_its_whole_prompt():
    scheduler, device = make_scheduler(num_pages=4), FakeDevice(16)
    scheduler.add(make_request(0, 30, 2))
    scheduler.add(make_request(1, 33, 2))  # 3 pages, of which 2 are free

    steps = [run_one_step(scheduler, device)[0] for _ in range(3)]

    assert [chunks_of(step) for step in steps] == [[(0, 0, 30)], [(0, 30, 1)], [(1, 0, 32)]]


def test_the_request_admitted_last_is_preempted_when_pages_run_out():
    scheduler, device = make_scheduler(num_pages=2), FakeDevice(16)
    scheduler.add(make_request(0, 16, 3))
    scheduler.add(make_request(1, 14, 3))
    run_one_step(scheduler, device)

    step, _ = run_one_step(scheduler, device)

    assert (chunks_of(step), scheduler.num_preemptions) == ([(0, 16, 1)], 1)


def test_a_preempted_request_is_computed_again_from_its_first_token():
    scheduler, device = make_scheduler(num_pages=2), FakeDevice(16)
    scheduler.add(make_request(0, 16, 3))
    scheduler.add(make_request(1, 14, 3))

    steps = [run_one_step(scheduler, device)[0] for _ in range(4)]

    assert chunks_of(steps[-1]) == [(1, 0, 15)]  # the prompt and the token drawn before


def test_a_preempted_request_comes_before_those_that_came_later():
    scheduler, device = make_scheduler(num_pages=2, max_num_seqs=2), FakeDevice(16)
    for request_id, num_prompt_tokens in enumerate((16, 14, 4)):
        scheduler.add(make_request(request_id, num_prompt_tokens, 3))

    steps = [run_one_step(scheduler, device)[0] for _ in range(4)]

    assert [chunk[0] for chunk in chunks_of(steps[-1])] == [1, 2]


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_aborting_frees_the_pages_of_a_waiting_or_running_request(num_steps):
    scheduler, device = make_scheduler(), FakeDevice(16)
    scheduler.add(make_request(0, 33, 9))
    for _ in range(num_steps):
        run_one_step(scheduler, device)

    scheduler.abort(0)

    assert (scheduler.num_free_pages, scheduler.num_unfinished) == (16, 0)


def test_aborting_an_unknown_request_changes_nothing():
    scheduler = make_scheduler()
    scheduler.add(make_request(0, 4, 9))

    assert scheduler.abort(1) is None
    assert scheduler.num_unfinished == 1


def test_alternatives_are_handed_out_only_to_who_asked():
    scheduler = make_scheduler()
    asking = make_request(0, 4, 1)
    asking.sampling = SamplingParams(log_probs=2)
    scheduler.add(asking)
    scheduler.add(make_request(1, 4, 1))
    output = SimpleNamespace(
        tokens=np.array([9, 9]),
        log_probs=np.array([-1.0, -1.0]),
        top_tokens=np.array([[9, 4, 2], [9, 4, 2]]),
        top_log_probs=np.array([[-1.0, -2.0, -3.0], [-1.0, -2.0, -3.0]]),
    )
    step = scheduler.schedule()
    assert step is not None

    deltas = scheduler.commit(step, output)

    assert [d.completion and d.completion.top_log_probs for d in deltas] == [({9: -1.0, 4: -2.0},), ()]
