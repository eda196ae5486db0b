"""What speculation has cost and brought against plain decoding, so that it cannot go on losing."""

from __future__ import annotations

# The part of the time that may be lost to drafts, most of all to those which only show whether drafting has become
# worth while.
LOSS_PART = 0.01
# Steps whose time may be lost after a good time, and on account of those to come.
MAX_CREDIT = 2
# A step that something interrupted counts no more than this many times what it should have taken.
OUTLIER = 2.0
# The part of the time that may go into the choice itself where nothing comes of it.
CHOICE_PART = 0.005
# Steps that pass in debt before it is looked at again.
REST = 8


class Ledger:
    """Seconds that may be lost, and steps to pass before drafts are considered again."""

    def __init__(self) -> None:
        self.credit = 0.0
        self._loan = 0.0  # what may be owed because it was paid for many steps to come
        self._num_idle = self._rest = 0

    def advance(self, num_tokens: int, plain: float) -> float:
        """Returns what may be owed because so many tokens are to come, of which each takes the time `plain` without."""
        return min(LOSS_PART * num_tokens, MAX_CREDIT) * plain

    def takes_rest(self) -> bool:
        """Whether the step at hand is to have no drafts, without a look; asked once in each."""
        self._rest -= 1
        return self._rest >= 0

    def rest(self) -> None:
        """Has some steps pass without a look."""
        self._rest = REST

    def is_in_debt(self, advance: float) -> bool:
        """Whether so much is lost that there are to be no drafts for some time."""
        return self.credit + advance < -self._loan

    def enter_choice(self, is_chosen: bool, seconds: float, plain: float) -> None:
        """Enters whether drafts were worth verifying, and the seconds that it took to see that."""
        self._num_idle = 0 if is_chosen else self._num_idle + 1
        self._rest = min(self._num_idle, int(seconds / max(CHOICE_PART * plain, 1e-9)))

    def may_invest(self, advance: float) -> bool:
        """Whether something may be paid now for many steps to come: none but who owes nothing may do so."""
        return self.credit + advance >= 0

    def invest(self, seconds: float) -> None:
        """Enters that so much is paid."""
        self.credit = self.credit - seconds
        self._loan = max(-self.credit, 0.0)

    def enter_step(self, seconds: float) -> None:
        """Enters a step in which all decode."""
        self._enter(LOSS_PART * seconds, MAX_CREDIT * seconds)

    def enter_gain(self, seconds: float, expected: float, num_tokens: float, plain: float) -> None:
        """Enters what a step took for which drafts were considered, what it should have taken, how many tokens it
        brought each request, and what one takes without.
        """
        self._enter(plain * num_tokens - min(seconds, OUTLIER * expected), MAX_CREDIT * plain)

    def _enter(self, gain: float, most: float) -> None:
        self.credit = min(self.credit + gain, most)
        if self.credit >= 0:
            self._loan = 0.0
