"""What the pool has no room for is copied out, and in again instead of being computed once more."""

from __future__ import annotations

import pytest

from jaxinfer.engine.kv_cache.page_pool import BoundedKind
from jaxinfer.engine.kv_cache.page_transfers import CopyPage, SwapIn, SwapOut
from jaxinfer.engine.kv_cache.tiers import HostTier, PageTiers
from jaxinfer.engine.scheduling.scheduler import Scheduler
from tests.engine.fake_device import FakeDevice, expected_tokens, make_request

S = 16


class Machine:
    """A scheduler over a pool of `num_pages` and a host tier of `num_host_pages`, and what was computed and copied."""

    def __init__(
        self, num_pages: int = 5, num_host_pages: int = 20, max_num_batched_tokens: int = 64, window: int | None = None
    ) -> None:
        """`window`: of a bounded kind of pages, in tokens."""
        windows = () if window is None else (window,)
        self.tiers = PageTiers([HostTier(num_host_pages, size_of=lambda _: 1)])
        self.scheduler = Scheduler(
            max_num_seqs=4,
            max_num_batched_tokens=max_num_batched_tokens,
            num_pages=num_pages,
            page_size=S,
            tiers=self.tiers,
            bounded=[BoundedKind(-(-(window - 1) // S), num_pages) for window in windows],
            clock=lambda: 0.0,
        )
        self.device = FakeDevice(S, self.tiers, further=windows)
        self.chunks: list[tuple[int, int, int]] = []  # request, start, length
        self.copies = []
        self.completions = {}

    def add(self, request_id, prompt, max_tokens=4, cache_salt: str | None = ""):
        request = make_request(request_id, prompt, max_tokens, cache_salt=cache_salt)
        self.scheduler.add(request)
        return request

    def step(self):
        step = self.scheduler.schedule()
        assert step is not None
        self.chunks += [(chunk.request.request_id, chunk.start, chunk.num_tokens) for chunk in step.chunks]
        self.copies += step.copies.queue
        for delta in self.scheduler.commit(step, self.device.run(step)):
            if delta.completion is not None:
                self.completions[delta.request_id] = delta.completion

    def make_copies(self):
        """Makes those that are due, as the next step would."""
        copies = self.scheduler.replicas[0].tables.copies
        self.copies += copies.queue
        for batch in copies.batches(2):
            self.device.copy(batch)

    def run(self):
        while self.scheduler.num_unfinished:
            self.step()
        return self

    def starts(self, request_id):
        return [start for chunk_id, start, _ in self.chunks if chunk_id == request_id]

    def num_copies(self, kind):
        return sum(isinstance(copy, kind) for copy in self.copies)


def test_a_request_that_gave_way_goes_on_where_it_was():
    machine = Machine()
    first, second = machine.add(0, 30, 30), machine.add(1, 30, 12)  # 4 pages and 3 of 5

    machine.run()

    assert machine.scheduler.metrics().num_preemptions == 1
    assert machine.starts(1) == [0, *range(30, 41)], "no token is computed twice"
    assert machine.num_copies(SwapIn) >= 1
    for request in (first, second):
        tokens = list(machine.completions[request.request_id].token_ids)
        assert tokens == expected_tokens(request, len(tokens))


def test_without_pages_of_others_in_the_way_only_the_last_page_is_copied():
    machine = Machine()
    machine.add(0, 20, 12)
    for _ in range(5):
        machine.step()
    running = machine.scheduler.replicas[0].running
    running.preempt(running[0])  # 24 of 25 tokens are computed
    machine.make_copies()

    machine.run()

    assert machine.starts(0) == [0, *range(20, 31)]
    assert [type(copy) for copy in machine.copies] == [SwapOut, SwapIn]


def test_what_was_evicted_is_found_by_another_request():
    machine = Machine(num_pages=3)
    prompt = list(range(40))
    machine.add(0, prompt, 1)
    machine.run().add(1, 40, 1)  # wants all pages
    machine.run().add(2, [*prompt, 77], 1)

    machine.run()

    assert machine.starts(2) == [32]
    assert machine.completions[2].num_cached_tokens == 32


def test_pages_of_the_pool_and_of_the_host_are_found_in_one_prompt():
    machine = Machine(num_pages=8)
    prompt = list(range(64))
    machine.add(0, prompt, 1)
    machine.run()
    pages = machine.scheduler.replicas[0].tables.pages
    pages._cached.move_to_end(list(pages._cached)[2], last=False)  # the second page of the prompt
    pages.evict(1)
    machine.make_copies()
    machine.add(1, [*prompt, 5], 1)

    machine.run()

    assert machine.starts(1) == [64]
    assert (machine.num_copies(SwapOut), machine.num_copies(SwapIn)) == (1, 1)


@pytest.mark.parametrize(("num_host_pages", "starts"), [(1, [0]), (2, [32])])
def test_what_the_tiers_have_no_room_for_is_computed(num_host_pages, starts):
    machine = Machine(num_pages=3, num_host_pages=num_host_pages)
    prompt = list(range(40))
    for request_id, request_prompt in enumerate([prompt, 40, [*prompt, 77]]):
        machine.add(request_id, request_prompt, 1, cache_salt=None if request_id == 1 else "")
        machine.run()

    assert machine.starts(2) == starts


def test_what_costs_more_to_copy_than_to_compute_is_computed():
    machine = Machine()
    machine.tiers.seconds_per_copy = 1.0  # and a step takes no time on this clock
    machine.add(0, 30, 30)
    machine.add(1, 30, 12)

    machine.run()

    assert machine.scheduler.metrics().num_preemptions == 1
    assert machine.copies == []


def test_another_salt_finds_nothing_in_the_tiers():
    machine = Machine(num_pages=3)
    prompt = list(range(40))
    for request_id, salt in enumerate(["mine", "mine too", "mine"]):
        machine.add(request_id, [*prompt, request_id], 1, cache_salt=salt)
        machine.run()

    assert [machine.starts(request_id) for request_id in range(3)] == [[0], [0], [32]]


def test_a_request_aborted_while_its_pages_are_copied_leaves_none_behind():
    machine = Machine(num_pages=3)
    prompt = list(range(40))
    for request_id, request_prompt in enumerate([prompt, 40]):
        machine.add(request_id, request_prompt, 1)
        machine.run()
    machine.add(2, [*prompt, 77], 9)
    step = machine.scheduler.schedule()
    assert step is not None
    assert {type(copy) for copy in step.copies.queue} == {SwapOut, SwapIn}

    machine.scheduler.abort(2)

    assert machine.scheduler.num_available_pages == 3
    machine.add(3, [*prompt, 78], 1)
    assert machine.run().starts(3) == [32]


def test_pages_that_are_not_copied_yet_are_shared_by_a_request_of_the_same_step():
    machine = Machine(num_pages=8)
    prompt = list(range(40))
    machine.add(0, prompt, 1)
    machine.run().scheduler.replicas[0].tables.pages.evict(8)
    machine.make_copies()
    requests = [machine.add(1 + i, [*prompt, i], 4) for i in range(2)]

    machine.run()

    assert (machine.starts(1)[0], machine.starts(2)[0]) == (32, 32)
    assert machine.num_copies(SwapIn) == 2
    for request in requests:
        assert list(machine.completions[request.request_id].token_ids) == expected_tokens(request, 4)


def test_a_page_of_a_window_that_is_copied_makes_no_room_for_another():
    prompt = list(range(48))
    machine = Machine(num_pages=16, window=17)
    tables = machine.scheduler.replicas[0].tables
    request = make_request(2, [*prompt[:45], 100, 101, 102], 4, cache_salt="")
    tables.begin(request)  # before the others have computed what it can share
    machine.add(0, prompt)
    machine.run()
    pages = tables.pools[1].pages
    pages.evict(2)  # the first two, so that the third, which is to be copied, is the oldest
    machine.make_copies()
    machine.add(1, list(range(200, 248)))
    machine.run()
    pages.allocate(pages.num_free)

    tables.share(request)

    written = [copy.page for copy in tables.copies.queue if isinstance(copy, SwapIn) and copy.kind == 1]
    copied = [copy.source for copy in tables.copies.queue if isinstance(copy, CopyPage) and copy.kind == 1]
    assert request.num_computed == 45
    assert written
    assert copied
    assert not {*written} & {*copied}
