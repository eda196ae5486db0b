"""The policy of speculation: how many drafts the next step verifies, none included.

Drafts begin with the last token, so a step with drafts waits until the host has read that token, while other steps are
launched ahead. What a step costs is known from the engine's own steps (`step_times`), how often drafts are right from
all drafts so far, verified or not (`acceptance`). The policy takes the number of drafts that promises the most tokens
per second. Since the promise may be wrong, a budget bounds what drafts may lose against plain decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxinfer.engine.request.request import Request
from jaxinfer.engine.scheduling.drafts import Drafts, rest_of
from jaxinfer.engine.scheduling.step import Step
from jaxinfer.engine.scheduling.step_results import SampledToken
from jaxinfer.engine.speculation.draft_choice import choose_count, choose_drafts
from jaxinfer.engine.speculation.proposer import DraftProposer
from jaxinfer.engine.speculation.step_times import MAX_RATIO, StepTimeTable

# Budgets in plain steps. Drafts that promise to pay may lose what drafts have gained, up to BUDGET: drafts that pay
# have bad luck as well. Trials, which promise nothing and show whether drafts have begun to pay, have their own budget.
# Both begin with BUDGET and earn LOSS_PART of all time. With 4 instead of 16 the engine learned much later that a draft
# model pays, and ten outputs of 128 tokens took 1 % less time if it did not pay (`simulate_drafts.py`).
LOSS_PART = 0.01
BUDGET = 16.0
TRIAL = 4  # drafts per request
# While drafts do not pay, the policy looks again after 1, 2, 4, … MAX_GAP steps. A drafter on the host that takes less
# than FREE_PART of a step is asked for this, since it works while a plain step runs.
FREE_PART, MAX_GAP = 0.05, 16
# The engine begins with NUM_PLAIN plain steps, to measure them, and repeats them after at least MAX_DRAFTING steps with
# drafts, if that costs at most LOOK_PART of the time in between.
NUM_PLAIN, MAX_DRAFTING, LOOK_PART = 5, 96, 0.005


@dataclass
class Attempt:
    """The expected seconds of a step that was not launched ahead, and what drafting for it took."""

    has_waited: bool = False  # because of drafts; others wait because no step ran before
    plain: float = 0.0  # expected without drafts, launched ahead; 0 if the policy was not asked
    expected: float = 0.0  # expected with its drafts, drafting included
    drafting: float = 0.0  # measured
    reading: float = 0.0  # of these, an investment in all later tokens of the requests
    rows: Sequence[int] = ()  # the rows of the step that decode
    is_trial: bool = False


class DraftPolicy:
    """Decides for all requests of a step, which has at most `max_tokens` tokens with its drafts.

    `limits[i]` is the most drafts that the i-th request can use and has pages for.
    """

    def __init__(self, times: StepTimeTable, proposer: DraftProposer, max_tokens: int) -> None:
        self.times = times
        self._proposer = proposer
        self._max_tokens = max_tokens
        self._budget = self._trial_budget = BUDGET
        self._trial_loss = 0.0  # the expected loss of the last trial that was considered
        self._num_plain = NUM_PLAIN  # plain steps that are to come, to measure them
        self._gap, self._until_look = 1, 1  # in steps
        # Steps with drafts since the last plain step, their seconds and their gain, both in plain steps.
        self._num_drafting, self._seconds_drafting, self._gain = 0, 0.0, 0.0
        self._num_owed = 0  # drafts per request that are decided on, once the drafter has read the requests

    def count_promising(self, requests: Sequence[Request], limits: Sequence[int], num_others: int) -> int:
        """Returns for how many drafts the next step should wait for the tokens of the running step; 0 for not at all.

        num_others: tokens of the next step in rows that prefill; drafts may take the place of half of them
        """
        most = self._max_tokens - len(requests)
        room = min(max(most - num_others, most // 2), sum(limits))
        if (self._num_plain > 0 and not num_others) or room <= 0:
            return 0
        seconds = self.times.seconds(len(requests), room, is_mixed=num_others > 0)
        if not self._is_free(requests, max(limits), seconds[0]):
            count = self._affordable(requests, max(limits), seconds)[0] * len(requests)
            self._plan_look(is_worth=count > 0)
            return count
        # The first drafts are guesses of the tokens that the running step samples.
        drafts = self._proposer.draft(requests, [limit + 1 for limit in limits])
        rests = [rest_of(own, own[0]) if own else own for own in drafts]
        count = sum(self._choose(requests, rests, seconds)) if self._budget >= 0 else 0
        if any(rests):
            self._plan_look(is_worth=count > 0)
        return count

    def take_turn(self) -> bool:
        """True if `count_promising` is due after this step."""
        self._until_look -= 1
        return self._until_look <= 0

    def expect_others(self) -> None:
        """Looks again after every step: a request has ended, and drafts of others may pay."""
        self._gap = self._until_look = 1

    def _plan_look(self, *, is_worth: bool) -> None:
        self._gap = 1 if is_worth else min(2 * self._gap, MAX_GAP)
        self._until_look = self._gap

    def draft(
        self, requests: Sequence[Request], limits: Sequence[int], num_others: int, attempt: Attempt
    ) -> list[Drafts]:
        """Returns the drafts of each request that the next step verifies, and enters what is expected in `attempt`.

        num_others: tokens of the step in rows that prefill
        """
        nothing: list[Drafts] = [[] for _ in requests]
        if self._num_plain > 0 and not num_others:
            return nothing
        room = max(min(self._max_tokens - len(requests) - num_others, sum(limits)), 0)
        seconds = self.times.seconds(len(requests), room, is_mixed=num_others > 0)
        attempt.plain = attempt.expected = float(seconds[0])
        if room == 0:
            return nothing
        count = max(limits) * (self._budget >= 0)
        if not self._is_free(requests, max(limits), seconds[0]):
            count, attempt.is_trial = self._affordable(requests, max(limits), seconds)
        if count == 0:
            return nothing
        attempt.reading = 0.0 if attempt.is_trial else self._proposer.reading_seconds(requests)
        drafts = self._proposer.draft(requests, [min(limit, count) for limit in limits])
        self._num_owed = count if not any(drafts) and self._proposer.is_reading(requests) else 0
        counts = self._choose(requests, drafts, seconds)
        attempt.expected = float(seconds[sum(counts)] + self._proposer.seconds(count)[-1] + attempt.reading)
        return [own[:count] for own, count in zip(drafts, counts, strict=True)]

    def observe(self, step: Step, emitted: Sequence[Sequence[SampledToken]], seconds: float, attempt: Attempt) -> None:
        """Learns from a step's tokens and seconds."""
        if step.is_mixed:
            self.times.observe_prefill(step, max(seconds - attempt.drafting, 1e-9))
            seconds = attempt.expected  # how much of a mixed step is due to drafts is not measured
        if step.is_decode and step.is_ahead:
            self.times.observe(step, seconds)
            self._num_plain = max(self._num_plain - 1, 0)
            self._num_drafting, self._seconds_drafting, self._gain = 0, 0.0, 0.0
            self._earn(1.0)
        elif attempt.plain > 0 and np.isfinite(attempt.expected):
            if step.is_verify and not step.is_mixed:
                self.times.observe(step, max(seconds - attempt.drafting, 1e-9))
            if not attempt.has_waited:
                return
            seconds = (min(seconds, MAX_RATIO * attempt.expected) - attempt.reading) / attempt.plain
            gain = sum(len(emitted[row]) for row in attempt.rows) / len(attempt.rows) - seconds
            self._earn(seconds)
            if attempt.is_trial:
                self._trial_budget = min(self._trial_budget + gain, self._max_trial_budget)
            else:
                self._budget = min(self._budget + gain, BUDGET)
            if not step.is_mixed:
                self._plan_plain_steps(seconds, gain)

    def _earn(self, num_steps: float) -> None:
        """Adds to the budgets after so much time, in plain steps."""
        self._budget = min(self._budget + LOSS_PART * num_steps, BUDGET)
        self._trial_budget = min(self._trial_budget + LOSS_PART * num_steps, self._max_trial_budget)

    @property
    def _max_trial_budget(self) -> float:
        # A trial that reads a long prompt first may cost more than BUDGET: it waits until its time has earned that.
        return max(BUDGET, self._trial_loss)

    def _plan_plain_steps(self, seconds: float, gain: float) -> None:
        self._num_drafting += 1
        self._seconds_drafting += seconds
        self._gain += gain
        loss = NUM_PLAIN * self._gain / self._num_drafting
        if self._num_drafting >= MAX_DRAFTING and loss <= LOOK_PART * self._seconds_drafting:
            self._num_plain = NUM_PLAIN

    def _is_free(self, requests: Sequence[Request], count: int, plain: float) -> bool:
        """True if drafts can be made before it is known whether they are worth verifying."""
        if self._proposer.device_drafter is not None:
            return False
        reading = self._proposer.reading_seconds(requests) / max(map(num_to_come, requests))
        return float(self._proposer.seconds(count)[-1] + reading) < FREE_PART * plain

    def _affordable(self, requests: Sequence[Request], limit: int, seconds: np.ndarray) -> tuple[int, bool]:
        """Returns how many drafts to make for each request before any is seen, and whether that is a trial.

        Enters the expected loss of a trial that it considers.

        seconds: of a step with 0, 1, … drafts in all. Reading new text is spread over the tokens to come.
        """
        # With 0, 1, … drafts of every request, up to the room in the step.
        of_each = seconds[:: len(requests)][: limit + 1].copy()
        most = len(of_each) - 1
        if most == 0:
            return 0, False
        if self._num_owed > 0:
            return min(self._num_owed, most), False
        of_each += self._proposer.seconds(most)
        reading, num_left = self._proposer.reading_seconds(requests), max(map(num_to_come, requests))

        def best_count(likelihoods: np.ndarray) -> int:
            num_tokens = 1 + likelihoods.sum(0).cumsum() / len(requests)
            shares = np.concatenate([[0.0], num_tokens * reading / num_left])
            return choose_count(likelihoods, (of_each + shares).tolist())

        expected = self._proposer.expected_likelihoods(requests, most)
        if count := best_count(expected):
            return count * (self._budget >= 0), False
        if best_count(np.ones_like(expected)) == 0:  # not even if all drafts were right
            return 0, False
        trial = min(TRIAL, most)
        num_tokens = 1 + expected[:, :trial].sum() / len(requests)
        self._trial_loss = float((of_each[trial] + reading) / seconds[0] - num_tokens)
        credit = self._trial_budget + LOSS_PART * num_left  # earned before the last request ends
        return (trial, True) if credit >= self._trial_loss else (0, False)

    def _choose(self, requests: Sequence[Request], drafts: Sequence[Drafts], seconds: np.ndarray) -> list[int]:
        """Returns how many of its drafts each request has verified."""
        return choose_drafts(self._proposer.likelihoods(requests, drafts), seconds.tolist())


def num_to_come(request: Request) -> int:
    """Returns how many tokens the request may still sample."""
    return request.max_tokens - request.num_output_tokens
