"""Replicas that prefill and replicas that decode, on devices without arrays: requests move once they have a token."""

from __future__ import annotations

from typing import Any

import pytest

from jaxinfer.engine.frontend.branches import fork, rewind
from jaxinfer.engine.request.request import Request
from tests.engine.fake_device import FakeDevice, expected_tokens
from tests.engine.scheduling.test_replicas import ADMISSION, PAGE, Group, prompt
from tests.engine.sights import Endless


class FakeMover:
    """Copies what is in pages, of which now and then a token is lost on the way; contents arrive late by chance."""

    def __init__(self, group: Group, *, damage: float = 0.0) -> None:
        self.group, self.damage = group, damage
        self.moved: list[tuple[int, int]] = []  # the replicas
        self.num_pages = 0
        self.is_done = True

    def move(self, source: Any, target: Any, pages: Any) -> FakeArrival:
        for replica in (source, target):
            for batch in replica.tables.copies.batches(2):
                self.device(replica).copy(batch)
        is_intact = self.group.random.random() >= self.damage
        for kind, pairs in enumerate(pages):
            for old, new in pairs:
                self.num_pages += 1
                self.copy(self.device(source), self.device(target), kind, old, new, is_intact)
        self.moved.append((source.index, target.index))
        return FakeArrival(self, is_intact)

    def device(self, replica: Any) -> FakeDevice:
        return self.group.devices[replica.index]

    def copy(self, source: FakeDevice, target: FakeDevice, kind: int, old: int, new: int, is_intact: bool) -> None:
        if kind:
            contents = source.bounded[kind - 1].get(old, {} if source.further[kind - 1] else [])
            target.bounded[kind - 1][new] = contents if is_intact else type(contents)()
            return
        target.fill(new, source.content(old) if is_intact else {0: -1})
        target.turns[new] = source.turns.get(old, 0)


class FakeArrival:
    def __init__(self, mover: FakeMover, has_arrived_whole: bool) -> None:
        self.mover, self.has_arrived_whole = mover, has_arrived_whole

    @property
    def is_done(self) -> bool:
        return self.mover.is_done and self.mover.group.random.random() < 0.5

    def is_intact(self) -> bool:
        return self.has_arrived_whole


def apart(num_replicas: int, num_prefill: int, *, damage: float = 0.0, **limits: Any) -> tuple[Group, FakeMover]:
    group = Group(num_replicas, num_prefill_replicas=num_prefill, **limits)
    group.scheduler.mover = mover = FakeMover(group, damage=damage)
    return group, mover


def assert_nothing_is_left(group: Group) -> None:
    metrics = group.scheduler.metrics()
    assert metrics.num_owned_pages == metrics.num_running == metrics.num_waiting == 0
    for replica in group.scheduler.replicas:
        assert not replica.running.prefilled
        assert not replica.running.arriving
        assert all(pool.pages.num_available == pool.pages.num_pages for pool in replica.tables.pools)


@pytest.mark.parametrize(
    ("num_prefill", "options"),
    [
        (1, {}),
        (2, {"tier_pages": 8, "damage": 0.1}),
        (1, {"sight": 6, "damage": 0.1}),
        (1, {"sight": Endless(PAGE, 4 * PAGE, PAGE)}),
        (2, {"further": (6, 0), "damage": 0.1}),
        (1, {"decode_loop_steps": 3}),
    ],
)
def test_requests_that_are_handed_over_and_disturbed_at_random_have_the_tokens_of_one_alone(num_prefill, options):
    preempted = damaged = handed = forked = 0
    for seed in range(25):
        # So few pages that decoding requests are preempted, and prefilled ones wait.
        group, mover = apart(3, num_prefill, seed=seed, num_pages=12, max_num_batched_tokens=12, **options)
        draw = group.random
        for _ in range(150):
            match draw.randrange(8):
                case 0 | 1:
                    end = [draw.randrange(3) for _ in range(draw.randrange(12))]
                    terms: dict[str, Any] = {"priority": draw.choice(["interactive", "batch"])}
                    terms |= {"tenant": draw.choice("ab"), "time_limit": draw.choice([1e9, 1e9, 20.0])}
                    group.add(prompt(draw.randrange(3), *end)[draw.choice([0, 0, 15]) :], draw.randint(1, 16), **terms)
                case 2 if group.scheduler.num_unfinished:
                    number = draw.choice(list(group.scheduler._requests))
                    forked += change(group, draw.choice(["abort", "fork", "rewind"]), number)
                case _:
                    group.step()
        group.finish()

        for number, completion in group.completions.items():
            count, begun = len(completion.token_ids), group.begun.get(number)
            request = group.requests[number]
            assert list(completion.token_ids) == expected_tokens(request, count, begun, options.get("sight"))
            is_whole = completion.finish_reason in ("abort", "deadline")
            assert is_whole or count == request.max_tokens
        assert group.completions.keys() == group.requests.keys()
        assert_nothing_is_left(group)
        metrics = group.scheduler.metrics()
        assert metrics.num_hand_overs == len(mover.moved)
        assert all(source < num_prefill <= target for source, target in mover.moved)
        preempted += metrics.num_preemptions - metrics.num_damaged_hand_overs
        damaged += metrics.num_damaged_hand_overs
        handed += metrics.num_hand_overs
    assert min(handed, forked) > 20
    assert (damaged > 0) == ("damage" in options)
    assert preempted > 0


def change(group: Group, what: str, number: int) -> bool:
    """Aborts, forks or rewinds a request; True for a fork."""
    request = group.requests[number]
    if what == "abort":
        group.keep([group.scheduler.abort(number)])
    elif what == "fork":
        branch = fork(request, next(group.ids), ADMISSION, time_limit=group.scheduler.time_left(request))
        group.requests[branch.request_id] = branch
        group.begun[branch.request_id] = list(branch.token_ids)
        group.scheduler.add(branch)
    elif request.num_output_tokens:
        request.seed += 1
        rewind(request, group.random.randint(1, request.num_output_tokens), ADMISSION)
        group.scheduler.rewind(request)
        group.begun[number] = list(request.token_ids)
    return what == "fork"


def until(group: Group, is_reached: Any) -> None:
    for _ in range(100):
        if is_reached():
            return
        group.step()
    pytest.fail("not reached")


def stage_of(group: Group, request: Request) -> str:
    """Returns the stage of a request on its way from the queue to its tokens."""
    for replica in group.scheduler.replicas:
        if request in replica.running.prefilled:
            return "prefilled"
        if request in replica.running.arriving:
            return "arriving"
        if request in replica.running:
            return "prefilling" if replica.running.hands_over else "decoding"
    return "waiting"


@pytest.mark.parametrize("end", ["abort", "deadline"])
@pytest.mark.parametrize("stage", ["waiting", "prefilling", "prefilled", "arriving", "decoding"])
def test_a_request_that_ends_at_any_stage_leaves_no_page_and_no_other_request_notices(stage, end):
    group, mover = apart(2, 1, max_num_seqs=2, num_pages=40, max_num_batched_tokens=8)
    others = [group.add(prompt(letter), 30) for letter in range(2)]
    until(group, lambda: all(stage_of(group, other) == "decoding" for other in others))
    mover.is_done = False
    request = group.add(prompt(5), 8, time_limit=1000.0)
    if stage in ("arriving", "decoding"):  # else there is no room for it
        group.keep([group.scheduler.abort(others.pop().request_id)])
    mover.is_done = stage == "decoding"
    until(group, lambda: stage_of(group, request) == stage)

    if end == "abort":
        group.keep([group.scheduler.abort(request.request_id)])
    else:
        group.now += 1000.0
    mover.is_done = True
    group.finish()

    completion = group.completions[request.request_id]
    assert completion.finish_reason == end
    assert bool(completion.token_ids) == (stage in ("prefilled", "arriving", "decoding"))
    for other in others:
        assert list(group.completions[other.request_id].token_ids) == expected_tokens(other, 30)
    assert_nothing_is_left(group)


def test_prefilled_requests_wait_where_they_are_while_the_decoding_side_is_full():
    group, mover = apart(2, 1, max_num_seqs=3, num_pages=60)
    requests = [group.add(prompt(letter), 40) for letter in range(9)]
    until(group, lambda: len(group.scheduler.replicas[0].running.prefilled) == 3)

    prefilling, decoding = (replica.running for replica in group.scheduler.replicas)
    assert len(decoding) == 3
    assert set(requests[:3]) == set(decoding)
    assert list(prefilling.prefilled) == requests[3:6]  # the queue gets no further
    assert all(stage_of(group, request) == "waiting" for request in requests[6:])
    group.finish()

    assert [len(completion.token_ids) for completion in group.completions.values()] == [40] * 9
    assert mover.moved == [(0, 1)] * 9
    assert group.scheduler.metrics().num_preemptions == 0


def test_a_request_goes_to_the_decoding_replica_that_runs_fewest_and_has_most_pages():
    group, mover = apart(3, 1, max_num_seqs=8, num_pages=80)
    for letter, length in enumerate([40, 2, 40, 40, 40]):
        group.add(prompt(letter), length)
        until(group, lambda count=letter + 1: len(mover.moved) == count)
        until(group, lambda: not any(replica.running.arriving for replica in group.scheduler.replicas))
        for _ in range(3):
            group.step()

    # The second one has ended when the third comes, which then has fewer pages than the first.
    assert mover.moved == [(0, 1), (0, 2), (0, 2), (0, 2), (0, 1)]


def test_an_urgent_request_takes_the_room_of_batch_work_that_decodes():
    group, _ = apart(2, 1, max_num_seqs=2, num_pages=40)
    batch = [group.add(prompt(letter), 40, priority="batch") for letter in range(2)]
    until(group, lambda: all(stage_of(group, request) == "decoding" for request in batch))

    urgent = group.add(prompt(5), 4)
    until(group, lambda: urgent.request_id in group.completions)

    assert batch[0].request_id not in group.completions
    assert group.scheduler.metrics().num_preemptions == 1
    group.finish()
    for request in batch:
        assert list(group.completions[request.request_id].token_ids) == expected_tokens(request, 40)


def test_a_request_whose_pages_are_damaged_on_the_way_is_prefilled_again_and_others_do_not_find_them():
    group, mover = apart(2, 1, damage=1.0)
    request = group.add(prompt(1), 8)
    until(group, lambda: group.scheduler.metrics().num_damaged_hand_overs == 2)
    assert group.scheduler.replicas[1].tables.pages.num_cached == 0

    mover.damage = 0.0
    later = group.add(prompt(1, 3), 8)
    group.finish()

    for each in (request, later):
        assert list(group.completions[each.request_id].token_ids) == expected_tokens(each, 8)
    assert group.scheduler.metrics().num_found_tokens >= 4 * PAGE  # the first replica still has the prompt


def test_a_request_of_one_token_is_never_handed_over():
    group, mover = apart(2, 1)
    for letter in range(3):
        group.add(prompt(letter), 1)
    group.finish()

    assert mover.moved == []
