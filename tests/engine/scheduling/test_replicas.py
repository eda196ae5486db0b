"""Several replicas behind one queue, on devices without arrays: which of them computes a request, and what it gives."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest

from jaxinfer.engine.execution.pipeline import Pipeline, advance
from jaxinfer.engine.frontend.branches import fork, rewind
from jaxinfer.engine.kv_cache.page_pool import BoundedKind
from jaxinfer.engine.kv_cache.tiers import HostTier, PageTiers
from jaxinfer.engine.request.request import QueueFullError, Request
from jaxinfer.engine.scheduling.scheduler import Scheduler
from tests.engine.fake_device import FakeDevice, expected_tokens, make_request
from tests.engine.sights import Sight, window_of

ADMISSION: Any = SimpleNamespace(detokenizer=lambda sampling: None)
PAGE = 4


class Group:
    """Replicas with a clock that is set by hand. A device has ended a step or not, by chance."""

    def __init__(
        self, num_replicas: int, *, seed: int = 0, tier_pages: int = 0, sight: Sight = None, **limits: Any
    ) -> None:
        self.now, self.random, self.ids = 0.0, random.Random(seed), itertools.count()
        tiers = PageTiers([HostTier(tier_pages, size_of=lambda _: 1)]) if tier_pages else None
        limits = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "num_pages": 24, "page_size": PAGE, **limits}
        further = limits.pop("further", ())  # tokens in the windows of further kinds of pages, 0 for states
        self.scheduler = Scheduler(
            **limits,
            num_replicas=num_replicas,
            tiers=tiers,
            window=window_of(sight, PAGE, limits["max_num_batched_tokens"]),
            bounded=[self.plan_kind(window, limits["max_num_seqs"]) for window in further],
            clock=lambda: self.now,
        )
        self.devices = [FakeDevice(PAGE, tiers, sight, further) for _ in range(num_replicas)]
        self.pipelines = [
            Pipeline(self.scheduler, self.launcher(fake), replica=i) for i, fake in enumerate(self.devices)
        ]
        self.requests: dict[int, Request] = {}
        self.begun: dict[int, list[int]] = {}
        self.completions: dict[int, Any] = {}

    def plan_kind(self, window: int, num_rows: int) -> BoundedKind:
        num_kept = -(-max(window - 1, 0) // PAGE)
        return BoundedKind(num_kept, num_rows * (num_kept + 4) + 4, is_state=window == 0)

    def launcher(self, fake: FakeDevice) -> Any:
        return SimpleNamespace(
            launch=fake.run,
            draw=lambda step, output: output,
            is_done=lambda output: self.random.random() < 0.5,
            read=lambda output: output,
        )

    def add(self, prompt: list[int], max_tokens: int, **terms: Any) -> Request:
        terms = {"cache_salt": "", **terms}
        request = make_request(next(self.ids), prompt, max_tokens, page_size=PAGE, **terms)
        self.requests[request.request_id] = request
        self.scheduler.add(request)
        return request

    def step(self) -> None:
        self.keep(self.scheduler.expire())
        if self.scheduler.num_unfinished:
            result = advance(self.pipelines)
            assert result is not None, "requests are unfinished and nothing is computed"
            self.keep(result.deltas)
        self.now += 1.0

    def keep(self, deltas: Any) -> None:
        for delta in deltas:
            if delta.completion is not None:
                self.completions[delta.request_id] = delta.completion

    def finish(self) -> None:
        while self.scheduler.num_unfinished:
            self.step()

    def replica_of(self, request: Request) -> int | None:
        return next((r.index for r in self.scheduler.replicas if request in r.running), None)


def prompt(letter: int, *end: int) -> list[int]:
    """Four pages that prompts of a letter share, and an end of its own."""
    return [letter] * (4 * PAGE) + list(end)


@pytest.mark.parametrize("tier_pages", [0, 8])
@pytest.mark.parametrize("num_replicas", [2, 3])
def test_requests_that_come_move_fork_rewind_and_end_at_random_have_the_tokens_of_one_alone(num_replicas, tier_pages):
    moved = preempted = forked = 0
    for seed in range(40):
        # So few pages that requests are preempted, and go on where there is room.
        group = Group(num_replicas, seed=seed, tier_pages=tier_pages, num_pages=12, max_num_batched_tokens=12)
        draw, homes = group.random, {}
        for _ in range(150):
            match draw.randrange(8):
                case 0 | 1:
                    end = [draw.randrange(3) for _ in range(draw.randrange(12))]
                    terms = {"priority": draw.choice(["interactive", "batch"]), "tenant": draw.choice("ab")}
                    group.add(prompt(draw.randrange(3), *end), draw.randint(1, 16), **terms)
                case 2 if group.scheduler.num_unfinished:
                    number = draw.choice(list(group.scheduler._requests))
                    what = draw.choice(["abort", "fork", "rewind"])
                    request = group.requests[number]
                    if what == "abort":
                        group.keep([group.scheduler.abort(number)])
                    elif what == "fork":
                        left = group.scheduler.time_left(request)
                        branch = fork(request, next(group.ids), ADMISSION, time_limit=left)
                        group.requests[branch.request_id] = branch
                        group.begun[branch.request_id] = list(branch.token_ids)
                        group.scheduler.add(branch)
                        forked += 1
                    elif request.num_output_tokens:
                        request.seed += 1
                        rewind(request, draw.randint(1, request.num_output_tokens), ADMISSION)
                        group.scheduler.rewind(request)
                        group.begun[number] = list(request.token_ids)
                case _:
                    group.step()
            for request in group.requests.values():
                if (place := group.replica_of(request)) is not None:
                    moved += homes.get(request.request_id, place) != place
                    homes[request.request_id] = place
        group.finish()

        for number, completion in group.completions.items():
            count, begun = len(completion.token_ids), group.begun.get(number)
            assert list(completion.token_ids) == expected_tokens(group.requests[number], count, begun)
            assert completion.finish_reason == "abort" or count == group.requests[number].max_tokens
        assert group.completions.keys() == group.requests.keys()
        metrics = group.scheduler.metrics()
        assert metrics.num_owned_pages == metrics.num_running == metrics.num_waiting == 0
        assert metrics.num_steps == sum(replica.num_steps for replica in metrics.replicas)
        preempted += metrics.num_preemptions
    assert min(moved, preempted, forked) > 20


def test_a_request_goes_to_the_replica_that_has_its_prefix_and_without_one_to_the_emptier():
    group = Group(2)
    first = [group.add(prompt(letter), 8) for letter in (1, 2)]
    group.step()
    assert [group.replica_of(request) for request in first] == [0, 1]

    # The pages of the first are computed by now, or on their way.
    later = [group.add(prompt(letter, 9), 8) for letter in (2, 1, 3)]
    group.step()

    assert [group.replica_of(request) for request in later[:2]] == [1, 0]
    group.finish()
    assert group.scheduler.metrics().num_found_tokens == 2 * 4 * PAGE


def test_a_replica_takes_no_more_for_its_prefix_than_a_quarter_of_its_rows_above_the_other():
    group = Group(2, max_num_seqs=8, num_pages=80)
    group.add(prompt(1), 1)
    group.finish()

    requests = [group.add(prompt(1, end), 30) for end in range(6)]
    group.step()

    counts = [len(replica.running) for replica in group.scheduler.replicas]
    assert counts == [4, 2] or counts == [3, 3]
    assert all(group.replica_of(request) is not None for request in requests)


@pytest.mark.parametrize("order", ["by prefix", "mixed"])
def test_two_replicas_find_as_many_prefixes_as_one_less_five_points(order):
    rates = []
    for num_replicas in (1, 2):
        group = Group(num_replicas, max_num_seqs=8, num_pages=400)
        letters = [letter for letter in range(8) for _ in range(25)]
        if order == "mixed":
            group.random.shuffle(letters)
        for number, letter in enumerate(letters):
            group.add(prompt(letter, *range(number % 7)), 1 + number % 12)
        group.finish()
        rates.append(group.scheduler.metrics().prefix_hit_rate)
    assert rates[1] > rates[0] - 0.05


def test_an_interactive_request_preempts_a_batch_request_only_if_all_rows_are_taken():
    group = Group(2, max_num_seqs=1)
    batch = [group.add(prompt(letter), 20, priority="batch") for letter in (1, 2)]
    group.step()
    assert {group.replica_of(request) for request in batch} == {0, 1}

    urgent = group.add(prompt(3), 2)
    for _ in range(3):
        group.step()

    assert group.replica_of(urgent) is not None
    assert group.scheduler.metrics().num_preemptions == 1
    group.finish()
    assert {len(c.token_ids) for c in group.completions.values()} == {20, 2}


def test_tenants_take_turns_over_all_replicas():
    group = Group(2, max_num_seqs=1)
    many = [group.add([tenant] * 8, 4, tenant="many") for tenant in range(8)]
    one = group.add([9] * 8, 4, tenant="one")
    group.finish()

    order = list(group.completions)
    assert order.index(one.request_id) <= 3  # two of the other tenant had begun
    assert len(order) == len(many) + 1


def test_a_deadline_ends_a_request_that_waits_and_one_that_runs():
    group = Group(2, max_num_seqs=1)
    requests = [group.add([letter] * 8, 40, time_limit=limit) for letter, limit in enumerate([20.0, 1000.0])]
    group.step()
    requests.append(group.add([2] * 8, 40, time_limit=3.0))
    group.finish()

    reasons = [group.completions[request.request_id].finish_reason for request in requests]
    assert reasons == ["deadline", "length", "deadline"]
    assert group.completions[0].token_ids
    assert not group.completions[2].token_ids


def test_the_queue_has_room_beyond_the_rows_of_all_replicas():
    group = Group(2, max_num_seqs=2, max_waiting=1)
    for letter in range(5):
        group.add([letter] * 4, 4)
    with pytest.raises(QueueFullError, match="max_num_seqs=2 of each of 2 replicas"):
        group.add([5] * 4, 4)
