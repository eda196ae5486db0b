"""Whatever is asked of the scheduler, pages are never lost, limits are kept, and every request finishes.

The default run takes 10,000 random steps. For a million:
python -c "from tests.engine.scheduling.test_scheduler_invariants import run; run(25_000)"
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jaxinfer.engine.execution.pipeline import Device, Pipeline
from jaxinfer.engine.frontend.branches import fork, rewind
from jaxinfer.engine.kv_cache.page_pool import BoundedKind
from jaxinfer.engine.kv_cache.tiers import HostTier, PageTiers
from jaxinfer.engine.request.completion import Delta
from jaxinfer.engine.request.request import Request
from jaxinfer.engine.scheduling.scheduler import Scheduler
from jaxinfer.engine.scheduling.step import Step
from jaxinfer.engine.speculation.speculation import Speculation
from tests.engine.fake_device import OPEN, FakeDevice, GuessingDrafter, expected_tokens, make_request
from tests.engine.sights import Endless, window_of

STEPS_PER_EXAMPLE = 40
MOST_AHEAD = 6  # tokens of a request in the steps under way: two loops of three, or a token and four drafts
ADMISSION: Any = SimpleNamespace(detokenizer=lambda _: None, grammars=SimpleNamespace(compile=lambda _: None))


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, advance and are aborted in any order, in a pool that is often too small for all."""

    @initialize(
        num_pages=st.sampled_from([8, 12, 1, 2, 3, 5]),
        page_size=st.integers(1, 4),
        max_num_seqs=st.integers(1, 4),
        more=st.sampled_from([6, 20, 0, 2]),
        mixed=st.integers(0, 6),
        tier_pages=st.sampled_from([(20,), (3, 20), (1, 2), ()]),
        copy_pays=st.sampled_from([True, True, False]),
        max_drafts=st.sampled_from([None, 4, 1, None, 2, 0, 3]),  # None: steps overlap instead
        window=st.sampled_from(
            [None, 3, 6, 1, 2, 10, (1, 3), (1, 4), (2, 4)]
        ),  # of tokens; sinks and all seen, in pages
        # Tokens in the windows of further kinds of pages, 0 for states, OPEN for open pages; only beside a first kind
        # that keeps all.
        further=st.sampled_from([(), (), (3,), (0,), (2, 6), (6, 0), (1, 0), (OPEN,), (OPEN,), (5, OPEN), (0, OPEN)]),
        loop_steps=st.sampled_from([1, 3, 1, 2]),  # if there are no drafts
    )
    def start(
        self,
        num_pages,
        page_size,
        max_num_seqs,
        more,
        mixed,
        tier_pages,
        copy_pays,
        max_drafts,
        window,
        further,
        loop_steps,
    ):
        self.now = 0.0
        window = None if further else window
        self.further = further
        if isinstance(window, tuple):
            window = Endless(window[0] * page_size, window[1] * page_size, page_size)
        self.window = window
        self.num_pages, self.page_size = num_pages, page_size
        self.max_num_seqs, self.budget = max_num_seqs, max_num_seqs + more
        self.attention_window = window_of(window, page_size, self.budget)
        self.drafter = GuessingDrafter(num_pages, window)
        self.tiers = PageTiers([HostTier(n, size_of=lambda _: 1) for n in tier_pages]) if tier_pages else None
        if self.tiers is not None and not copy_pays:
            self.tiers.seconds_per_copy = 1.0  # and a step takes none
        self.scheduler = Scheduler(
            speculation=None
            if max_drafts is None
            else Speculation(self.drafter, max_drafts=max_drafts, max_tokens=self.budget),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=self.budget,
            num_pages=num_pages,
            page_size=page_size,
            max_mixed_tokens=max_num_seqs + mixed if mixed <= more else None,
            decode_loop_steps=loop_steps if max_drafts is None else 1,
            tiers=self.tiers,
            window=self.attention_window,
            bounded=[self.plan_kind(window) for window in further],
            clock=lambda: self.now,
        )
        self.replica = self.scheduler.replicas[0]
        self.device = FakeDevice(page_size, self.tiers, window, further)
        self.pipeline = Pipeline(self, self)  # what it asks for passes through here
        self.meanwhile: Callable[[], None] | None = None  # to do while a step runs
        self.interruption: Callable[[Step], None] | None = None  # to do instead of launching one
        self.ids = itertools.count()
        self.requests: dict[int, Request] = {}
        self.begun: dict[int, list[int]] = {}  # with which tokens, of those that did not begin with their prompt
        self.completions = {}

    def plan_kind(self, window: int) -> BoundedKind:
        """As many pages as the rows can use, by the rule of `bounded_pages`."""
        num_kept = -(-max(window - 1, 0) // self.page_size)
        per_row = num_kept + 2 + -(-MOST_AHEAD // self.page_size)
        num_pages = self.max_num_seqs * per_row + -(-self.budget // self.page_size)
        return BoundedKind(num_kept, num_pages, is_state=window == 0, is_open=window == OPEN)

    # Few prompts, so that most share a beginning; each goes on where the one before it in the alphabet ends.
    @rule(
        letter=st.integers(0, 2),
        num_prompt_tokens=st.sampled_from([5, 9, 18, 1, 32]) | st.integers(1, 32),
        max_tokens=st.sampled_from([12, 20, 6, 1]),
        cache_salt=st.sampled_from(["", "", "mine", None]),
        priority=st.sampled_from(["interactive", "batch"]),
        tenant=st.sampled_from(["a", "b"]),
        time_limit=st.sampled_from([math.inf, math.inf, 20.0]),
        reads_context=st.sampled_from([False, False, True]),
    )
    def add(self, letter, num_prompt_tokens, max_tokens, cache_salt, **terms):
        prompt = [7] * 5 + [letter] * 32
        self.enqueue(prompt[:num_prompt_tokens], max_tokens, cache_salt, **terms)

    @precondition(lambda self: self.completions)
    @rule(number=st.integers(0, 100), max_tokens=st.integers(1, 12), cache_salt=st.sampled_from(["", "mine"]))
    def add_another_turn(self, number, max_tokens, cache_salt):
        turn = list(self.completions.values())[number % len(self.completions)]
        self.enqueue([*turn.prompt_token_ids, *turn.token_ids, 8], max_tokens, cache_salt)

    @rule(seconds=st.sampled_from([0.1, 1.0, 10.0]))
    def wait(self, seconds):
        self.now += seconds

    def enqueue(self, prompt, max_tokens, cache_salt, **terms):
        # The last token is drawn but not computed. What does not fit the pool alone is refused earlier.
        if self.attention_window is None or self.num_pages < self.attention_window.most or terms.get("reads_context"):
            num_slots = self.num_pages * self.page_size
            if isinstance(self.window, Endless):
                num_slots = min(num_slots, self.window.num_seen)
            prompt = prompt[:num_slots]
            max_tokens = min(max_tokens, num_slots + 1 - len(prompt))
        request = make_request(
            next(self.ids), prompt, max_tokens, page_size=self.page_size, cache_salt=cache_salt, **terms
        )
        self.requests[request.request_id] = request
        self.scheduler.add(request)

    @precondition(lambda self: self.scheduler.num_unfinished)
    @rule(number=st.integers(0, 100), seed=st.sampled_from([None, 1]))
    def fork(self, number, seed):
        origin = self.unfinished(number)
        branch = fork(origin, next(self.ids), ADMISSION, time_limit=self.scheduler.time_left(origin))
        branch.seed = origin.seed if seed is None else seed
        self.begin(branch)

    @precondition(lambda self: self.scheduler.num_unfinished)
    @rule(number=st.integers(0, 100), count=st.integers(1, 6), seed=st.sampled_from([None, 2]))
    def rewind(self, number, count, seed):
        request = self.unfinished(number)
        if request.num_output_tokens:
            request.seed = request.seed if seed is None else seed
            rewind(request, min(count, request.num_output_tokens), ADMISSION)
            self.scheduler.rewind(request)
            self.begun[request.request_id] = list(request.token_ids)

    @precondition(lambda self: self.scheduler.num_unfinished)
    @rule(number=st.integers(0, 100))
    def save_and_restore(self, number):
        if 0 in self.further:  # as `LLM.save` does
            list(self.pipeline.settle())
            if not self.scheduler.num_unfinished:
                return
        request = self.unfinished(number)
        device = self.device_after_copies()
        restored = fork(request, next(self.ids), ADMISSION, time_limit=self.scheduler.time_left(request))
        restored.sample_index, restored.table.origin = request.sample_index, None
        if request.table.pages:
            first, *bounded = [table.by_index for table in request.table.kinds]
            restored.table.saved = [
                {index: device.content(page) for index, page in first.items()},
                *({i: device.bounded[kind].get(page) for i, page in own.items()} for kind, own in enumerate(bounded)),
            ]
            restored.table.num_saved = request.num_known
        self.begin(restored)

    def begin(self, request):
        """Adds a request that has tokens already."""
        self.begun[request.request_id] = list(request.token_ids)
        self.requests[request.request_id] = request
        self.scheduler.add(request)

    def unfinished(self, number) -> Request:
        """Returns a request, mostly one that runs, which has drawn what it should have so far."""
        running = [r for r in self.replica.running if r.num_output_tokens]
        requests = (number % 8 and running) or list(self.scheduler._requests.values())
        request = requests[number % len(requests)]
        assert request.token_ids[request.num_prompt_tokens :] == self.expected_tokens(request)
        return request

    def expected_tokens(self, request) -> list[int]:
        return expected_tokens(request, request.num_output_tokens, self.begun.get(request.request_id), self.window)

    @precondition(lambda self: self.scheduler.num_unfinished)
    @rule(count=st.sampled_from([6, 3, 1, 1]))
    def step(self, count=1):
        for _ in range(count):
            self.expire()
            if self.scheduler.num_unfinished:
                assert self.pipeline.advance() is not None

    @precondition(lambda self: self.scheduler.num_unfinished)
    @rule(number=st.integers(0, 100))
    def step_with_an_abort_while_it_runs(self, number):
        def abort():
            self.expire()
            self.abort(number)

        self.meanwhile = abort
        self.pipeline.advance()
        self.meanwhile = None

    @precondition(lambda self: self.scheduler.num_unfinished)
    @rule(has_run=st.booleans(), num_batches=st.integers(0, 3))
    def step_that_is_interrupted(self, has_run, num_batches):
        def interrupt(step):
            drawn = self.device.drawn
            if has_run:
                self.device.run(step)
            for batch in itertools.islice(step.copies.batches(2), num_batches):
                self.device.copy(batch)  # the last of them is not taken as made
            self.device.drawn = drawn
            raise KeyboardInterrupt

        self.interruption = interrupt
        try:
            with contextlib.suppress(KeyboardInterrupt):
                self.pipeline.advance()
        finally:  # or what is checked at the end would be interrupted as well
            self.interruption = None

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

    def expire(self):
        for delta in self.scheduler.expire():
            assert delta.completion is not None
            assert delta.completion.finish_reason == "deadline"
            assert self.requests[delta.request_id].deadline <= self.now
            self.completions[delta.request_id] = delta.completion
        assert all(r.deadline > self.now for r in self.scheduler._requests.values())

    @rule(count=st.sampled_from([8, 1, 2, 3]))
    def evict(self, count):
        for pages in [pool.pages for pool in self.replica.tables.pools]:
            pages.evict(count)

    # In earnest it happens in schedule() alone: launched steps are entered by then, and an interrupted one is given up.
    @precondition(lambda self: self.replica.running and not self.pipeline._launched and not self.pipeline._interrupted)
    @rule(number=st.integers(0, 100))
    def preempt(self, number):
        self.replica.running.preempt(self.replica.running[number % len(self.replica.running)])

    def schedule(self, after: Step | None = None, replica: int = 0) -> Step | None:
        decoding = [r for r in self.replica.running if r.num_uncomputed == 1]
        step = self.scheduler.schedule(after)
        if step is None:
            assert after is not None, "requests wait but nothing is computed"
            return None
        decoding = [r for r in decoding if r.num_uncomputed == 1]  # or it gave way and was admitted again
        chunks = step.chunks
        assert 1 <= step.num_tokens <= self.budget
        assert len({chunk.request.request_id for chunk in chunks}) == len(chunks) <= self.max_num_seqs
        for chunk in chunks:
            assert chunk.start == chunk.request.num_computed
            assert 1 <= chunk.num_tokens <= chunk.request.num_uncomputed
            num_slots = chunk.num_tokens + len(chunk.drafts) + chunk.max_new_tokens - 1
            assert len(chunk.request.table.pages) * self.page_size >= chunk.start + num_slots
            assert not chunk.drafts or (chunk.num_tokens == 1 and chunk.is_last)
        decoded = [chunk.request for chunk in chunks if chunk.request in decoding]
        assert {*decoded} == {r for r in decoding if r in self.replica.running}, "a decoding request was held up"
        places = [i for i, chunk in enumerate(chunks) if chunk.request in decoding]
        before = chunks[: max(places, default=0)]
        assert all(chunk.num_tokens == 1 for chunk in before), "a prompt is computed before who decodes"
        self.what_is_written_is_nobody_elses(step)
        return step

    def what_is_written_is_nobody_elses(self, step: Step):
        pages = self.replica.tables.pages
        for chunk in step.chunks:
            end = chunk.start + chunk.num_tokens + len(chunk.drafts) + chunk.max_new_tokens - 1
            first, last = chunk.start // self.page_size, (end - 1) // self.page_size
            table = chunk.request.table.first
            assert first >= table.freed.stop, "a page is written that was given back"
            for page in [*table.pages[first : last + 1], *table.rotated_sinks]:
                assert pages.num_users(page) == 1, "a page is written by one and read by another"
                assert page not in pages._key_of, "a page is written whose content is known"

    def launch(self, step: Step) -> Any:
        if self.interruption is not None:
            self.interruption(step)
        return self.device.run(step)

    draw, is_done = Device.draw, Device.is_done

    def read(self, output: Any) -> Any:
        if self.meanwhile is not None:
            self.meanwhile()
        return output

    def abandon(self, step: Step) -> None:
        self.scheduler.abandon(step)

    def commit(self, step: Step, output: Any) -> list[Delta]:
        deltas = self.scheduler.commit(step, output)
        self.completions |= {delta.request_id: delta.completion for delta in deltas if delta.completion is not None}
        return deltas

    @invariant()
    def every_page_is_free_or_cached_or_owned_and_its_users_are_counted(self):
        if not hasattr(self, "scheduler"):
            return
        for pool in self.replica.tables.pools:
            pages = pool.pages
            users = Counter(page for r in self.replica.running for page in pool.table_of(r).owned_pages)
            all_pages = range(pages.num_pages)
            assert [pages.num_users(page) for page in all_pages] == [users[page] for page in all_pages]
            assert sorted([*pages._free, *pages._cached, *users]) == [*all_pages], "a page is lost"
            assert pages._page_of == {key: page for page, key in pages._key_of.items()}
            assert set(pages._cached) <= set(pages._key_of)
            assert not set(pages._free) & set(pages._key_of)
        assert self.replica.tables.pages.num_pages == self.num_pages

    @invariant()
    def limits_are_kept_and_each_request_finds_its_own_tokens(self):
        if not hasattr(self, "scheduler"):
            return
        running = self.replica.running
        waiting = [r for r in self.scheduler._requests.values() if r not in running]
        assert len(running) <= self.max_num_seqs
        tables = [table for request in waiting for table in request.table.kinds]
        assert not any(t.pages or t.rotated_sinks or t.freed or t.num_evicted_tokens for t in tables)
        assert not any(request.num_computed for request in waiting)
        ended = [request for request in self.requests.values() if request.finish_reason is not None]
        assert not any(table.pages for request in ended for table in request.table.kinds)
        unfinished = [r.request_id for r in self.requests.values() if r.finish_reason is None]
        assert sorted(r.request_id for r in [*running, *waiting]) == unfinished
        device = self.device_after_copies()
        for request in running:
            assert len(request.table.pages) >= -(-request.num_computed // self.page_size)
            assert request.num_uncomputed > 0, "nothing is left to compute"
            device.check_context(request, request.num_computed)
            if self.pipeline._interrupted is None:  # else a state may have seen a step's tokens or not
                device.check_further(request, request.num_computed, self.num_ahead(request))
            self.has_no_more_pages_than_its_window_needs(request)

    def num_ahead(self, request: Request) -> int:
        """Tokens of the request that a launched step computes and the scheduler has not entered yet."""
        steps = [launched.step for launched in self.pipeline._launched]
        chunks = [chunk for step in steps if step is not self.replica.entered for chunk in step.chunks]
        chunks = [chunk for chunk in chunks if chunk.request is request and not chunk.is_stale]
        return sum(chunk.num_tokens + chunk.max_new_tokens - 1 for chunk in chunks)

    def has_no_more_pages_than_its_window_needs(self, request: Request):
        table = request.table.first
        owned = table.owned_pages
        assert len(owned) == len(set(owned))
        if self.window is None or request.sampling.reads_context:
            assert not table.freed
            assert not table.rotated_sinks
        elif isinstance(self.window, Endless):
            num_sinks, num_seen, _ = (count // self.page_size for count in self.window)
            assert len(owned) <= num_seen + num_sinks
        else:
            most_written = max(self.budget, MOST_AHEAD)
            assert len(owned) <= 1 + -(-self.window // self.page_size) + -(-most_written // self.page_size)

    def device_after_copies(self) -> FakeDevice:
        """What the device will hold when all copies are made that the scheduler has thought of."""
        copies = self.replica.tables.copies
        if not copies:
            return self.device
        device = FakeDevice(self.page_size, PageTiers([]), self.window, self.further)
        device.slots, device.turns = dict(self.device.slots), dict(self.device.turns)
        device.bounded = [dict(pages) for pages in self.device.bounded]
        device.drawn = self.device.drawn
        for copy in copies.queue:
            device.copy([copy])
        return device

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        # Far more than recomputing everything before each draw would take.
        for _ in range(100_000):
            if not self.scheduler.num_unfinished:
                break
            self.step()
            self.every_page_is_free_or_cached_or_owned_and_its_users_are_counted()
            self.limits_are_kept_and_each_request_finds_its_own_tokens()
        assert self.scheduler.num_unfinished == 0, "livelock"
        assert self.scheduler.num_available_pages == self.num_pages
        assert self.completions.keys() == self.requests.keys()
        assert sorted(self.drafter.forgotten) == sorted(self.requests if self.scheduler._speculation else [])
        for request_id, completion in self.completions.items():
            request = self.requests[request_id]
            assert list(completion.token_ids) == self.expected_tokens(request)


def run(num_examples: int) -> None:
    """Runs the machine for `num_examples` times STEPS_PER_EXAMPLE steps, each example until all requests finish."""
    steps = settings(
        max_examples=num_examples,
        stateful_step_count=STEPS_PER_EXAMPLE,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    run_state_machine_as_test(SchedulerMachine, settings=steps)


def test_ten_thousand_random_steps_keep_every_promise():
    run(10_000 // STEPS_PER_EXAMPLE)
