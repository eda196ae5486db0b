"""Keeps known what steps without drafts take, against which drafts are held: they are launched ahead of each other."""

from __future__ import annotations

from jaxinfer.engine.scheduling.step import Step
from jaxinfer.engine.speculation.step_costs import StepCosts

# Steps in a row whose mean is entered: one alone varies by a third. The first of a row is left out, for it begins
# while the host is still at work on the one before it.
RUN_LEN = 4
# The same where no drafts come between: entering takes as long as a twentieth of a small step.
LONG_RUN_LEN = 16
# Steps that go without drafts at first.
FIRST_LEN = 12
# Steps with drafts after which some may go without, and the part of what drafts gain that this may take.
MIN_DRAFTING, LOOK_PART = 16, 0.01


class PlainRuns:
    """Averages runs of steps without drafts, and calls for one now and then where drafts are verified in every step."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._num_wanted = FIRST_LEN
        self._is_running = False
        self._run_len = RUN_LEN
        self._seconds, self._num_steps = 0.0, 0  # of the run at hand
        self._drafting, self._gain, self._num_drafting = 0.0, 0.0, 0  # since the last one: seconds, those gained, steps

    @property
    def is_wanted(self) -> bool:
        """Whether the next steps are to go without drafts."""
        return self._num_wanted > 0

    def enter_plain(self, step: Step, seconds: float) -> None:
        """Enters a step that was launched ahead."""
        self._num_wanted = max(self._num_wanted - 1, 0)
        if not self._is_running:
            self._is_running = True
            return
        self._seconds, self._num_steps = self._seconds + seconds, self._num_steps + 1
        if self._num_steps == self._run_len:
            self._costs.enter(step, self._seconds / self._run_len, self._run_len)
            self._run_len = LONG_RUN_LEN
            self._drafting, self._gain, self._num_drafting = 0.0, 0.0, 0
            self._seconds, self._num_steps = 0.0, 0

    def enter_drafts(self, seconds: float, gain: float) -> None:
        """Enters a step that was not launched ahead because of drafts."""
        self._is_running, self._run_len, self._seconds, self._num_steps = False, RUN_LEN, 0.0, 0
        self._drafting, self._gain, self._num_drafting = (
            self._drafting + seconds,
            self._gain + gain,
            self._num_drafting + 1,
        )
        loss = self._gain / self._num_drafting * RUN_LEN
        if self._num_drafting >= MIN_DRAFTING and loss <= LOOK_PART * self._drafting:
            self._num_wanted = RUN_LEN + 1
