"""What it would have brought lately to wait for tokens and verify drafts: unlike what is believed, it has happened.

Who drafts on the host is asked while steps without drafts run. What he drafts then could have been verified in the step
that runs: the tokens that come show how many of them were right.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from jaxinfer.engine.request.request import Request
from jaxinfer.engine.scheduling.drafts import Drafts, first_of, rest_of

# What a step still counts after the next one.
MEMORY = 0.98
# Looks whose tokens are still to come; a request that was set back may never have them.
MAX_LOOKS = 64
# A step that was interrupted counts no more than this many times what it should have taken.
OUTLIER = 2.0


class Look(NamedTuple):
    """Drafts of some requests, how many tokens these had, and what a step takes that verifies them, in plain steps."""

    requests: Sequence[Request]
    num_tokens: Sequence[int]
    drafts: Sequence[Drafts]
    cost: float

    @property
    def is_over(self) -> bool:
        """Whether all tokens have come that the drafts were guesses of."""
        return all(
            request.finish_reason is not None or len(request.token_ids) >= start + len(drafts)
            for request, start, drafts in zip(self.requests, self.num_tokens, self.drafts, strict=True)
        )

    @property
    def num_right(self) -> int:
        rows = zip(self.requests, self.num_tokens, self.drafts, strict=True)
        return sum(
            _num_right(drafts, request.token_ids[start : start + len(drafts)]) for request, start, drafts in rows
        )


class Prospect:
    """Tokens of each request and costs, in steps without drafts, of the last steps that have waited for tokens, or
    could have.
    """

    def __init__(self) -> None:
        self._looks: deque[Look] = deque(maxlen=MAX_LOOKS)
        self._num_tokens = self._cost = 0.0
        # What steps take that have waited, in what they should: those that verify drafts, and those that found none.
        self._slack = {True: 1.0, False: 1.0}

    @property
    def rate(self) -> float:
        """How many times the tokens per second of plain decoding there were; 0 before anything is known."""
        return self._num_tokens / max(self._cost, 1e-9)

    @property
    def price_of_waiting(self) -> float:
        """How many times as long as one that is launched ahead a step takes that has waited and has no drafts."""
        return max(self._slack[False], 1.0)

    def look(self, requests: Sequence[Request], drafts: Sequence[Drafts], cost: float) -> None:
        """Enters what the step that runs could have verified, and what it should take then, in plain steps."""
        while self._looks and self._looks[0].is_over:
            look = self._looks.popleft()
            self._enter(1 + look.num_right / len(look.requests), look.cost)
        num_tokens = [len(request.token_ids) for request in requests]
        self._looks.append(Look(requests, num_tokens, drafts, cost * self._slack[any(drafts)]))

    def enter_step(self, num_tokens: float, cost: float, expected: float, *, is_verify: bool) -> None:
        """Enters a step that has waited: the tokens of each request, what it took and what it should have taken."""
        ratio = min(cost / expected, OUTLIER)
        self._slack[is_verify] += (1 - MEMORY) * (ratio - self._slack[is_verify])
        self._enter(num_tokens, ratio * expected)

    def _enter(self, num_tokens: float, cost: float) -> None:
        self._num_tokens = self._num_tokens * MEMORY + num_tokens
        self._cost = self._cost * MEMORY + cost


def _num_right(drafts: Drafts, token_ids: Sequence[int]) -> int:
    """Returns how many of the drafts a request emits that draws these tokens."""
    for count, token_id in enumerate(token_ids):
        if token_id not in first_of(drafts):
            return count
        drafts = rest_of(drafts, token_id)
    return len(token_ids)
