"""Requests that have ended, and page contents that are used up, leave no object behind."""

from __future__ import annotations

import gc
import itertools
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest

from jaxinfer.engine.frontend.branches import fork, rewind
from jaxinfer.engine.kv_cache.page_pool import BoundedKind
from jaxinfer.engine.request.request import Request
from jaxinfer.engine.scheduling.scheduler import Scheduler
from tests.allocations import memory_stays, num_requests
from tests.engine.fake_device import FakeDevice, expected_tokens, make_request
from tests.engine.sights import Endless, Sight, window_of

S = 4
NUM_ROUNDS = 1_000
ADMISSION: Any = SimpleNamespace(detokenizer=lambda _: None, grammars=SimpleNamespace(compile=lambda _: None))
# The window of the first kind of pages, and the windows of the further kinds in tokens; 0 for states.
MODELS: dict[str, tuple[Sight, tuple[int, ...]]] = {
    "all tokens": (None, ()),
    "window": (6, ()),
    "endless": (Endless(S, 3 * S, S), ()),
    "further window": (None, (6,)),
    "states": (None, (0,)),
    "further windows and states": (None, (6, 0, 3)),
}
BY_MODEL = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)


@pytest.fixture(scope="module", autouse=True)
def _only_new_objects():
    """Leaves out of each look for garbage what earlier tests of this process keep, often millions of objects."""
    gc.collect()
    gc.freeze()


class Machine:
    """A scheduler with few rows over a fake device, and the requests that are alive in this process."""

    def __init__(self, model: tuple[Sight, tuple[int, ...]] = (None, ()), max_num_seqs: int = 2, **limits: Any) -> None:
        window, further = model
        limits = {"max_num_batched_tokens": 8, "num_pages": 40, "page_size": S, **limits}
        kinds = [BoundedKind(-(-max(w - 1, 0) // S), 40, is_state=w == 0) for w in further]
        self.scheduler = Scheduler(
            max_num_seqs=max_num_seqs, window=window_of(window, S, 8), bounded=kinds, clock=lambda: 0.0, **limits
        )
        self.replica = self.scheduler.replicas[0]
        self.device = FakeDevice(S, None, window, further)
        self.ids = itertools.count()

    def add(self, prompt: int | list[int] = 10, max_tokens: int = 40, **terms: Any) -> Request:
        request = make_request(next(self.ids), prompt, max_tokens, page_size=S, cache_salt="", **terms)
        self.scheduler.add(request)
        return request

    def fork(self, request: Request) -> Request:
        branch = fork(request, next(self.ids), ADMISSION, time_limit=self.scheduler.time_left(request))
        self.scheduler.add(branch)
        return branch

    def restored(self, request: Request) -> Request:
        """Returns the request as from a file, in place of the one given; nothing of it is left in any page."""
        restored = fork(request, next(self.ids), ADMISSION, time_limit=self.scheduler.time_left(request))
        first, *bounded = [table.by_index for table in request.table.kinds]
        restored.table.saved = [
            {index: Content(self.device.content(page)) for index, page in first.items()},
            *({i: self.device.bounded[kind][page] for i, page in pages.items()} for kind, pages in enumerate(bounded)),
        ]
        restored.table.num_saved = request.num_computed
        self.scheduler.abort(request.request_id)
        for pages in [pool.pages for pool in self.replica.tables.pools]:
            pages.evict(pages.num_cached)
        self.scheduler.add(restored)
        return restored

    def step(self) -> None:
        step = self.scheduler.schedule()
        assert step is not None
        self.scheduler.commit(step, self.device.run(step))

    def run_for(self, request: Request, num_tokens: int) -> None:
        """Steps until the request has `num_tokens` tokens of output."""
        while request.num_output_tokens < num_tokens:
            self.step()


@BY_MODEL
def test_a_branch_keeps_no_ancestor_that_has_ended(model):
    machine, before = Machine(model), num_requests()
    request = machine.add()
    machine.run_for(request, 7)

    with memory_stays():
        for _ in range(NUM_ROUNDS):
            branch = machine.fork(request)
            machine.run_for(branch, 8)
            machine.scheduler.abort(request.request_id)
            rewind(branch, 1, ADMISSION)
            machine.scheduler.rewind(branch)
            request = branch
        del branch

    assert num_requests() - before == 1


@BY_MODEL
def test_a_branch_that_waits_keeps_no_ancestor_that_has_ended(model):
    machine, before = Machine(model, max_num_seqs=1), num_requests()
    head, request = machine.add(), machine.add()
    machine.run_for(head, 1)

    with memory_stays(NUM_ROUNDS // 10):
        for _ in range(NUM_ROUNDS):
            branch = machine.fork(request)
            machine.scheduler.abort(request.request_id)
            request = branch
        del branch

    assert num_requests() - before == 2


class Content(dict):
    """A page's content that a weak reference can watch."""


@BY_MODEL
@pytest.mark.parametrize("num_back", [0, 3], ids=["whole", "rewound"])
def test_a_restored_request_drops_its_file_when_it_has_its_pages(model, num_back):
    machine = Machine(model)
    request = machine.add(list(range(100, 110)))
    machine.run_for(request, 7)
    restored = machine.restored(request)
    if num_back:
        rewind(restored, num_back, ADMISSION)
    begun = list(restored.token_ids)
    contents = [ref(content) for content in restored.table.saved[0].values()]  # the fake device copies only these
    branch = machine.fork(restored)
    num_prefill_tokens = machine.scheduler.metrics().num_prefill_tokens

    machine.run_for(branch, branch.num_output_tokens + 1)

    for one in (restored, branch):
        assert (one.table.saved, one.table.num_saved) == ((), 0)
    assert contents
    assert not any(content() for content in contents)
    assert num_back or machine.scheduler.metrics().num_prefill_tokens == num_prefill_tokens
    machine.run_for(restored, 9)
    assert restored.token_ids[10:] == expected_tokens(restored, restored.num_output_tokens, begun, model[0])


TERMS = {
    "one tenant": lambda i: {},
    "several tenants": lambda i: {"tenant": f"tenant {i % 3}", "priority": ["interactive", "batch"][i % 2]},
    "deadlines": lambda i: {"time_limit": 1e9 + i},
    "deadlines that come nearer": lambda i: {"time_limit": 1e9 - i, "tenant": f"tenant {i % 3}"},
    "close deadlines": lambda i: {"time_limit": 20.0 - i / NUM_ROUNDS, "tenant": f"tenant {i % 3}"},
}


@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
@pytest.mark.parametrize("num_waiting", [1, 5], ids=["behind one", "behind five"])
def test_requests_that_are_aborted_while_they_wait_are_gone(terms, num_waiting):
    machine, before = Machine(max_num_seqs=1, max_waiting=num_waiting + 1), num_requests()
    running = machine.add()
    machine.run_for(running, 1)
    for i in range(num_waiting):
        machine.add(**terms(i))

    with memory_stays(NUM_ROUNDS // 10):
        for i in range(NUM_ROUNDS):
            machine.scheduler.abort(machine.add(**terms(i)).request_id)

    assert num_requests() - before == 1 + num_waiting


def test_requests_that_finish_before_their_deadlines_are_gone():
    machine, before = Machine(), num_requests()

    with memory_stays():
        for _ in range(NUM_ROUNDS):
            machine.add([1, 2, 3], max_tokens=1, time_limit=1e9)
            machine.step()

    assert num_requests() == before
