"""How measured steps differ from what a fit of earlier ones says: the machine is faster now, or one kind is misjudged.

A machine's speed changes by the second, where others use it as well or its clock does, and for all kinds of steps
alike; what the fit does not know of a kind of step hardly changes. So of every surprise the share goes to each of the
two that its doubt has in all of it (a Kalman filter in logarithms, without the covariance of the two): what steps
without drafts say of the machine holds for steps with drafts as well, though none was computed meanwhile.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable

# Standard deviations of logarithms: of one step's time, of the machine's speed at most, of a kind before it was seen.
NOISE, SPEED_DOUBT, KIND_DOUBT = 0.15, 0.3, 0.1
# By which variance speed and kinds become doubtful in a second of steps.
SPEED_CHANGE, KIND_CHANGE = 0.04, 1e-4
# A step that was interrupted counts as one that took this many times what was expected.
OUTLIER = 1.5


class Estimate:
    """A logarithm and its variance."""

    def __init__(self, doubt: float) -> None:
        self.value, self.variance = 0.0, doubt**2

    def learn(self, surprise: float, variance: float) -> None:
        """Takes its share of a surprise, of which it knows the variance."""
        gain = self.variance / variance
        self.value += gain * surprise
        self.variance *= 1 - gain


class CostDrift:
    """Factors between fitted and measured times, by kind of step."""

    def __init__(self) -> None:
        self._speed = Estimate(SPEED_DOUBT)
        self._kinds: defaultdict[Hashable, Estimate] = defaultdict(lambda: Estimate(KIND_DOUBT))

    @property
    def speed(self) -> float:
        """How many times as long as the fit says all steps take now."""
        return math.exp(self._speed.value)

    def factor(self, kind: Hashable) -> float:
        """How many times as long as the fit says steps of a kind take now."""
        return math.exp(self._speed.value + self._kinds[kind].value)

    def enter(self, kind: Hashable, fitted: float, seconds: float, count: int = 1) -> None:
        """Learns that a step took so many seconds, or `count` alike in the mean, where the fit says `fitted`."""
        own, expected = self._kinds[kind], fitted * self.factor(kind)
        seconds = min(max(seconds, expected / OUTLIER), expected * OUTLIER)
        passed, surprise = seconds * count, math.log(seconds / expected)
        self._speed.variance = min(self._speed.variance + SPEED_CHANGE * passed, SPEED_DOUBT**2)
        own.variance = min(own.variance + KIND_CHANGE * passed, KIND_DOUBT**2)
        variance = self._speed.variance + own.variance + NOISE**2 / count
        self._speed.learn(surprise, variance)
        own.learn(surprise, variance)

    def forget(self, *kinds: Hashable) -> None:
        """Is told that the fit knows these kinds now."""
        for kind in kinds:
            self._kinds.pop(kind, None)
