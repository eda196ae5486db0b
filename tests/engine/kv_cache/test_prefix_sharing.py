"""What is computed and what is found: prefixes of others, of turns before, and after a preemption one's own."""

from __future__ import annotations

import pytest

from jaxinfer.engine.kv_cache.page_pool import BoundedKind
from jaxinfer.engine.scheduling.scheduler import Scheduler
from tests.engine.fake_device import FakeDevice, expected_tokens, make_request

S = 16
SHARED = list(range(40))  # two full pages and a half


def make_scheduler(
    *, max_num_seqs=4, max_num_batched_tokens=64, num_pages=16, windows=()
) -> tuple[Scheduler, FakeDevice]:
    """`windows`: of bounded kinds of pages, in tokens; 0 for states."""
    scheduler = Scheduler(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        num_pages=num_pages,
        page_size=S,
        bounded=[BoundedKind(-(-max(window - 1, 0) // S), num_pages, is_state=window == 0) for window in windows],
    )
    return scheduler, FakeDevice(S, further=windows)


def run_to_end(scheduler: Scheduler, device: FakeDevice):
    """Returns the completions by request and the chunks (request, start, length) of all steps."""
    completions, chunks = {}, []
    while (step := scheduler.schedule()) is not None:
        chunks += [(chunk.request.request_id, chunk.start, chunk.num_tokens) for chunk in step.chunks]
        for delta in scheduler.commit(step, device.run(step)):
            if delta.completion is not None:
                completions[delta.request_id] = delta.completion
    return completions, chunks


def after(prompt, *, cache_salt="", num_pages=16, windows=()):
    """A scheduler that has finished a request with this prompt and 4 tokens of output."""
    scheduler, device = make_scheduler(num_pages=num_pages, windows=windows)
    scheduler.add(make_request(0, prompt, 4, cache_salt=cache_salt))
    completions, _ = run_to_end(scheduler, device)
    return scheduler, device, completions[0]


def test_a_prefix_of_a_finished_request_is_not_computed_again():
    scheduler, device, _ = after(SHARED)
    scheduler.add(make_request(1, [*SHARED, 77, 78], 1, cache_salt=""))

    completions, chunks = run_to_end(scheduler, device)

    assert chunks == [(1, 32, 10)]
    assert completions[1].num_cached_tokens == 32


def test_a_prefix_is_shared_with_a_request_that_is_still_running():
    scheduler, device = make_scheduler()
    first, second = (make_request(i, [*SHARED, i], 9, cache_salt="") for i in (50, 51))
    scheduler.add(first)
    step = scheduler.schedule()
    assert step is not None
    scheduler.commit(step, device.run(step))
    scheduler.add(second)

    step = scheduler.schedule()

    assert step is not None
    assert [(c.request.request_id, c.start) for c in step.chunks] == [(50, 41), (51, 32)]
    assert first.table.pages[:2] == second.table.pages[:2]
    assert first.table.pages[2] != second.table.pages[2]


def test_the_last_token_is_computed_even_where_all_pages_are_known():
    scheduler, device, _ = after(SHARED[:32])
    scheduler.add(make_request(1, SHARED[:32], 1, cache_salt=""))

    _, chunks = run_to_end(scheduler, device)

    assert chunks == [(1, 31, 1)]


@pytest.mark.parametrize("windows", [(), (3,), (20, 3)], ids=["one kind", "a window", "two windows"])
@pytest.mark.parametrize(("num_shared", "start"), [(33, 32), (34, 34), (45, 45), (47, 47)])
def test_a_page_that_begins_alike_is_copied_as_far_as_it_does_if_that_is_worth_it(num_shared, start, windows):
    prompt = list(range(48))
    scheduler, device, _ = after(prompt, windows=windows)
    request = make_request(1, [*prompt[:num_shared], *range(100, 120)], 3, cache_salt="")
    scheduler.add(request)

    completions, chunks = run_to_end(scheduler, device)

    assert chunks[0] == (1, start, num_shared + 20 - start)
    assert completions[1].num_cached_tokens == start
    assert list(completions[1].token_ids) == expected_tokens(request, 3)


def test_a_page_that_begins_alike_is_not_copied_if_its_state_has_seen_later_tokens():
    prompt = list(range(48))
    scheduler, device, _ = after(prompt, windows=(0,))
    scheduler.add(make_request(1, [*prompt[:45], 100, 101, 102], 1, cache_salt=""))

    _, chunks = run_to_end(scheduler, device)

    assert chunks == [(1, 32, 16)]


def test_a_page_that_began_alike_is_not_copied_after_it_was_evicted():
    prompt = list(range(48))
    scheduler, device, _ = after(prompt)
    scheduler.replicas[0].tables.pages.evict(1)  # the last one
    scheduler.add(make_request(1, [*prompt[:45], 100, 101, 102], 1, cache_salt=""))

    _, chunks = run_to_end(scheduler, device)

    assert chunks == [(1, 32, 16)]
    finder = scheduler.replicas[0].tables._finder
    assert finder._successors.keys() == set(finder._parents.values())


def test_generated_tokens_are_found_in_the_next_turn():
    scheduler, device, turn = after(SHARED[:30])  # 30 + 4 tokens, of which 33 are computed
    scheduler.add(make_request(1, [*SHARED[:30], *turn.token_ids, 99], 1, cache_salt=""))

    _, chunks = run_to_end(scheduler, device)

    assert chunks == [(1, 32, 3)]


@pytest.mark.parametrize(
    ("prompt", "cache_salt"),
    [([*SHARED, 77], "mine"), ([*SHARED, 77], None), ([*reversed(SHARED)], ""), ([9, *SHARED], "")],
    ids=["another salt", "no cache", "other tokens", "the same tokens one later"],
)
def test_what_differs_in_any_way_is_computed(prompt, cache_salt):
    scheduler, device, _ = after(SHARED)
    scheduler.add(make_request(1, prompt, 1, cache_salt=cache_salt))

    completions, chunks = run_to_end(scheduler, device)

    assert chunks == [(1, 0, len(prompt))]
    assert completions[1].num_cached_tokens == 0


def test_a_page_that_others_finish_meanwhile_is_taken_over_from_the_middle_of_ones_own():
    scheduler, device = make_scheduler(max_num_batched_tokens=44)
    # In one step the first computes 2 pages and a half, the second 4 tokens of the first page.
    scheduler.add(make_request(0, SHARED, 2, cache_salt=""))
    scheduler.add(make_request(1, [*SHARED, 77], 2, cache_salt=""))

    completions, chunks = run_to_end(scheduler, device)

    assert chunks[:4] == [(0, 0, 40), (1, 0, 4), (0, 40, 1), (1, 32, 9)]
    assert completions[1].num_cached_tokens == 28


def test_pages_computed_twice_in_one_step_are_kept_once():
    scheduler, device = make_scheduler(max_num_batched_tokens=128)
    requests = [make_request(i, SHARED, 2, cache_salt="") for i in range(3)]
    for request in requests:
        scheduler.add(request)
    step = scheduler.schedule()
    assert step is not None

    scheduler.commit(step, device.run(step))

    assert [request.table.pages[:2] for request in requests] == [requests[0].table.pages[:2]] * 3
    assert scheduler.num_available_pages == 16 - 2 - 3


def test_a_preempted_request_finds_its_own_full_pages_again():
    scheduler, device = make_scheduler(num_pages=5)
    for request_id in (0, 1):
        scheduler.add(make_request(request_id, 30, 12, cache_salt=""))

    completions, chunks = run_to_end(scheduler, device)

    assert scheduler.metrics().num_preemptions == 1
    assert [start for request_id, start, _ in chunks if request_id == 1] == [0, *range(30, 41)]
    assert completions[1].num_cached_tokens == 0, "what it computed itself is not counted as found"


def test_cached_pages_give_way_to_who_needs_them():
    scheduler, device, _ = after(SHARED, num_pages=4)
    scheduler.add(make_request(1, 60, 2, cache_salt=""))

    completions, _ = run_to_end(scheduler, device)

    assert len(completions[1].token_ids) == 2


def test_a_request_is_admitted_when_shared_pages_make_it_fit():
    scheduler, device = make_scheduler(num_pages=4)
    scheduler.add(make_request(0, SHARED, 9, cache_salt=""))
    step = scheduler.schedule()
    assert step is not None
    scheduler.commit(step, device.run(step))
    scheduler.add(make_request(1, [*SHARED, 77], 1, cache_salt=""))  # 3 pages, of which 1 is free and 2 are shared

    step = scheduler.schedule()

    assert step is not None
    assert [chunk.request.request_id for chunk in step.chunks] == [0, 1]


def test_cached_pages_that_a_request_needs_itself_do_not_make_it_fit():
    scheduler, device, _ = after(SHARED, num_pages=4)
    scheduler.add(make_request(1, 17, 9))  # 2 of the 4 pages
    step = scheduler.schedule()
    assert step is not None
    scheduler.commit(step, device.run(step))
    assert scheduler.num_available_pages == 2

    scheduler.add(make_request(2, [*SHARED, 77], 1, cache_salt=""))  # 3 pages: 2 are cached, and none is left
    step = scheduler.schedule()

    assert step is not None
    assert [chunk.request.request_id for chunk in step.chunks] == [1]
