"""Whether drafts are worth their time: to wait for tokens that they begin with, to make them, to verify them.

What a step takes with so many tokens more is known from the engine's own steps (`step_costs`), how often a request's
drafts are right from what its drafts have met so far, verified or not (`draft_source`), and what those that were not
verified would have brought (`draft_prospect`). And whatever is believed of them, what drafts have cost and brought is
booked (`draft_ledger`): a drafter that loses is left alone until the loss is small beside the time that has passed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxinfer.engine.request.request import Request
from jaxinfer.engine.scheduling.drafts import Drafts, parents_of, rest_of
from jaxinfer.engine.scheduling.step import Chunk, Step
from jaxinfer.engine.scheduling.step_results import SampledToken
from jaxinfer.engine.speculation.draft_choice import MARGIN, choose_count, choose_drafts
from jaxinfer.engine.speculation.draft_ledger import Ledger
from jaxinfer.engine.speculation.draft_prospect import Prospect
from jaxinfer.engine.speculation.draft_source import DraftSource
from jaxinfer.engine.speculation.plain_runs import PlainRuns
from jaxinfer.engine.speculation.step_costs import StepCosts

# A drafter on the host that takes less than this part of a step is asked while one runs, whether it has anything.
CHEAP = 0.05
# Drafts of a request that are made to see whether they have become worth while.
TRIAL = 4
# Steps without drafts after which one has some, so that what that takes stays known.
MAX_IDLE = 128


@dataclass
class Attempt:
    """What was done about drafts for a step that was not launched ahead."""

    seconds: float = 0.0  # that it took
    invested: float = 0.0  # of these, what is paid once for many steps
    plain: float = 0.0  # what the step should take launched ahead without drafts; 0 where nothing is held against that
    expected: float = 0.0  # what it should take as it is


class Decision:
    """Decides on the drafts of `source`, of which a step holds as many as leave its tokens within `max_tokens`."""

    def __init__(self, source: DraftSource, costs: StepCosts, max_tokens: int, clock: Callable[[], float]) -> None:
        self.costs = costs
        self.ledger = Ledger()
        self.plain_runs = PlainRuns(costs)
        self._source = source
        self._max_tokens = max_tokens
        self._clock = clock
        self._plain = 0.0  # what a step takes without drafts, as far as known
        self._num_owed = 0  # drafts of each request that are still to come, when what is new to the drafter is read
        self._num_idle = 0  # steps without drafts since some were verified
        self._prospect = Prospect()

    def takes_rest(self, requests: Sequence[Request]) -> bool:
        """Whether the next step is to have no drafts, without a look; asked once in each."""
        if self.plain_runs.is_wanted or self.ledger.takes_rest():
            return True
        if self._source.device_drafter is not None and self.is_barred(requests):
            self.ledger.rest()  # nothing is to be seen for nothing
            return True
        return False

    def is_worth_waiting(self, chunks: Sequence[Chunk], limits: Sequence[int]) -> bool:
        """Whether the step of these chunks is to have drafts and so waits for the tokens of the one that runs."""
        began = self._clock()
        is_promising = self._is_promising(chunks, limits) and not self.is_barred([chunk.request for chunk in chunks])
        self.ledger.enter_choice(is_promising, self._clock() - began, self._plain)
        return is_promising

    def is_barred(self, requests: Sequence[Request]) -> bool:
        """Whether so much is lost that there are to be no drafts until they are seen to pay, or for some time."""
        return self.ledger.is_in_debt(self._advance(requests)) and not self._is_paying

    def seconds(self, chunks: Sequence[Chunk], room: int) -> Sequence[float]:
        """Returns what a step takes with 0, 1, … `room` drafts, as far as they fit in."""
        costs = self.costs.seconds(chunks, min(room, self._max_tokens - len(chunks)))
        self._plain = costs[0]
        return costs

    def draft(self, requests: Sequence[Request], limits: Sequence[int], costs: Sequence[float], attempt: Attempt):
        """Returns the drafts of each request that are to be verified, at most `limits[i]`; says in `attempt` what they
        cost. costs: what the step takes with 0, 1, … N drafts.
        """
        drafting, unseen = self._source.seconds(requests, max(limits))
        count = max(limits)
        if not self._is_cheap(requests, drafting, unseen):
            count = self._affordable(requests, costs, drafting, unseen)
        if count == 0:
            return [[] for _ in requests]
        if unseen > CHEAP * self._plain:
            self.ledger.invest(unseen)
            attempt.invested = unseen
        drafts = self._source.draft(requests, [min(limit, count) for limit in limits])
        is_reading = self._source.device_drafter is not None and not any(drafts)
        self._num_owed = count if is_reading and self._source.num_unseen(requests) > len(requests) else 0
        # The step has waited, which costs something without drafts as well.
        counts = self._choose(requests, drafts, [costs[0] * self._prospect.price_of_waiting, *costs[1:]])
        attempt.expected = costs[sum(counts)] + float(drafting[max(counts)])
        return [tokens[:count] for tokens, count in zip(drafts, counts, strict=True)]

    def observe(self, step: Step, emitted: Sequence[Sequence[SampledToken]], seconds: float, attempt: Attempt) -> None:
        """Learns from a step what it took, and which drafts were right."""
        self._num_idle = 0 if step.is_verify else self._num_idle + 1
        if step.is_ahead and step.is_decode:
            self.plain_runs.enter_plain(step, seconds)
            self.ledger.enter_step(seconds)
        elif not step.is_ahead and attempt.plain > 0:
            self.costs.enter(step, seconds - attempt.seconds)
            num_tokens = sum(map(len, emitted)) / len(emitted)
            if math.isfinite(attempt.plain):
                expected = attempt.expected / attempt.plain if step.is_verify else 1.0
                self._prospect.enter_step(num_tokens, seconds / attempt.plain, expected, is_verify=step.is_verify)
            self.ledger.enter_step(seconds)
            self.ledger.enter_gain(seconds - attempt.invested, attempt.expected, num_tokens, attempt.plain)
            self.plain_runs.enter_drafts(seconds, attempt.plain * num_tokens - seconds)
        for chunk, tokens in zip(step.chunks, emitted, strict=True) if self._source.is_waiting else ():
            if chunk.is_last and chunk.request.finish_reason is None:
                self._source.compare(chunk.request, [token_id for token_id, _, _ in tokens])

    @property
    def _is_paying(self) -> bool:
        """Whether drafts pay as a rule, so that a loss was bad luck."""
        return self._prospect.rate > 1

    def _is_promising(self, chunks: Sequence[Chunk], limits: Sequence[int]) -> bool:
        requests = [chunk.request for chunk in chunks]
        room = min(self._max_tokens - len(chunks), sum(limits))
        if room <= 0:
            return False
        drafting, unseen = self._source.seconds(requests, max(limits))
        if not self._is_cheap(requests, drafting, unseen):
            return self._affordable(requests, self.seconds(chunks, room), drafting, unseen) > 0
        # Their first tokens are guesses of what is being drawn. All are held against what comes, verified or not.
        drafts = self._source.draft(requests, [limit + 1 for limit in limits])
        costs = self.seconds(chunks, room)
        if math.isfinite(costs[0]):
            self._look(requests, drafts, costs)
        rests = [rest_of(tokens, tokens[0]) if tokens else tokens for tokens in drafts]
        if not any(rests):  # there may be some for what is drawn instead
            return self._prospect.rate > MARGIN
        return any(self._choose(requests, rests, costs))

    def _look(self, requests: Sequence[Request], drafts: Sequence[Drafts], costs: Sequence[float]) -> None:
        """Notes what the step that runs could have verified."""
        counts = self._worth(requests, drafts, costs)
        chosen = [tokens[:count] for tokens, count in zip(drafts, counts, strict=True)]
        self._prospect.look(requests, chosen, costs[sum(counts)] / costs[0])

    def _is_cheap(self, requests: Sequence[Request], drafting: np.ndarray, unseen: float) -> bool:
        """Whether drafts can be made before it is clear what they are good for."""
        seconds = float(drafting[-1]) + unseen / most_to_come(requests)
        return self._source.device_drafter is None and seconds < CHEAP * self._plain

    def _affordable(
        self, requests: Sequence[Request], costs: Sequence[float], drafting: np.ndarray, unseen: float
    ) -> int:
        """Returns how many drafts of each request to make: they have to be paid before they are seen.

        What is paid once is shared out over all tokens that are to come. Without a promise of gain some are tried
        where what that is likely to lose is allowed: they are held against what comes, verified or not.
        """
        seconds = np.array(costs[:: len(requests)][: len(drafting)])
        if len(seconds) == 1:  # not even one draft each has room
            return 0
        if self._num_owed > 0:
            return min(self._num_owed, len(seconds) - 1)
        seconds = seconds + drafting[: len(seconds)]
        seconds[1:] += unseen / most_to_come(requests)
        expected = self._source.expected(requests, len(seconds) - 1)
        count = choose_count(expected, seconds.tolist()) if drafting[-1] > 0 else 1
        if unseen > CHEAP * self._plain and not (self._is_paying or self.ledger.may_invest(self._advance(requests))):
            return 0
        trial = min(TRIAL, len(seconds) - 1)
        num_tokens = 1 + expected[:, :trial].sum() / len(requests)
        loss = seconds[trial] + unseen - seconds[0] * num_tokens
        if count == 0 and self.ledger.credit + self._advance(requests) >= loss:
            count = trial
        return count

    def _choose(self, requests: Sequence[Request], drafts: Sequence[Drafts], costs: Sequence[float]) -> list[int]:
        """Returns how many drafts of each request to verify, of those that it has."""
        chosen = self._worth(requests, drafts, costs)
        if not any(chosen) and self._num_idle >= MAX_IDLE and any(drafts):
            counts = [len(tokens) for tokens in drafts]
            chosen[counts.index(max(counts))] = 1
        return chosen

    def _worth(self, requests: Sequence[Request], drafts: Sequence[Drafts], costs: Sequence[float]) -> list[int]:
        """Returns how many drafts of each request bring the most tokens per second, by what is believed of them."""
        pairs = zip(requests, drafts, strict=True)
        return choose_drafts([self._source.likelihoods(request, parents_of(d)) for request, d in pairs], costs)

    def _advance(self, requests: Sequence[Request]) -> float:
        """Returns what may be lost now because it may be lost before the last of the requests ends."""
        return self.ledger.advance(most_to_come(requests), self._plain)


def num_to_come(request: Request) -> int:
    """Returns how many tokens the request may still draw."""
    return request.max_tokens - request.num_output_tokens


def most_to_come(requests: Sequence[Request]) -> int:
    """Returns how many steps there may be over which is shared out what is paid once: as many as tokens may come."""
    return max(map(num_to_come, requests))
