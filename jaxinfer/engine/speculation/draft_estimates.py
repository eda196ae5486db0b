"""What is known of drafts before they are made: how often they are right, and what making them takes."""

from __future__ import annotations

from collections import deque

import numpy as np

from jaxinfer.engine.speculation.cost_fit import fit_weights

# How often drafts of which nothing is known are believed to be right, and how many tries that belief outweighs.
FIRST_RATE, FIRST_TRIES = 0.5, 2.0
# The same of a request's drafts if they are like those of others: as often as theirs.
ALIKE_TRIES = 12.0
# The same of a second draft for a place where the first is wrong, and so on.
FIRST_RANK_RATE = 0.25
# What a try still counts after the next one: a text changes, and with it how well it can be guessed.
REQUEST_MEMORY, DRAFTER_MEMORY = 0.98, 0.995
# How likely a request is like others, how many of them that belief outweighs, and what one still counts after the next.
FIRST_LIKENESS, LIKENESS_TRIES, LIKENESS_MEMORY = 0.8, 5.0, 0.9
LEAST_LIKELY = 0.01  # nothing is ruled out for good
# Times that the fit looks back on, and after how many new ones it is made again where there are many; before, whenever
# there are twice as many.
WINDOW, REFIT_AFTER = 64, 128


class Acceptance:
    """How often drafts were right, given that those before them were; late tries count more than early ones."""

    def __init__(self, rate: float, memory: float, tries: float) -> None:
        self._right, self.tried, self._memory = rate * tries, tries, memory

    @property
    def rate(self) -> float:
        return self._right / self.tried

    def enter(self, is_right: float) -> None:
        self._right = self._right * self._memory + is_right
        self.tried = self.tried * self._memory + 1


class Belief:
    """How often a request's drafts are right: as often as those of others, or as its own have shown.

    Where drafts are right nearly always for some requests and hardly ever for others, few tries of one have to outweigh
    what many of those before have shown: a mixture of the two, whose weights are what each has foretold.
    """

    def __init__(self, others: Acceptance, likeness: float) -> None:
        self._alike = Acceptance(others.rate, REQUEST_MEMORY, min(others.tried, ALIKE_TRIES))
        self._alone = Acceptance(FIRST_RATE, REQUEST_MEMORY, FIRST_TRIES)
        self.likeness = likeness  # how likely the request is like others
        self.is_tried = False

    @property
    def rates(self) -> tuple[tuple[float, float], ...]:
        """The rates that there may be, each after how likely it is."""
        return (self.likeness, self._alike.rate), (1 - self.likeness, self._alone.rate)

    def enter(self, is_right: bool) -> None:
        alike, alone = (weight * max(rate if is_right else 1 - rate, LEAST_LIKELY) for weight, rate in self.rates)
        self.likeness = min(max(alike / (alike + alone), LEAST_LIKELY), 1 - LEAST_LIKELY)
        self._alike.enter(is_right)
        self._alone.enter(is_right)
        self.is_tried = True


class DraftTimes:
    """What drafting takes, by the tokens that the drafter has not seen yet, the drafts in a row, and all of them.

    A text that is new to a model takes it far longer than the next token of one that it knows.
    """

    def __init__(self) -> None:
        self._measured: deque[tuple[tuple[float, ...], float]] = deque(maxlen=WINDOW)
        self._num_entered = 0
        self._weights = np.zeros(4)
        self._seconds: dict[tuple[int, int], np.ndarray] = {}  # by requests and most drafts, for these weights

    @property
    def seconds_per_token(self) -> float:
        return float(self._weights[1])

    def enter(self, num_read: int, num_requests: int, num_drafts: int, seconds: float) -> None:
        """Enters what it took to read tokens and to draft so many for each request."""
        self._measured.append(((1.0, num_read, num_drafts, num_requests * num_drafts), max(seconds, 1e-7)))
        self._num_entered += 1
        is_doubled = self._num_entered & (self._num_entered - 1) == 0
        if self._num_entered < 8 or is_doubled or self._num_entered % REFIT_AFTER == 0:
            features, times = (np.array(column, np.float64) for column in zip(*self._measured, strict=True))
            if len(times) == 1:  # which tells no cause from another, and what was new took most of it
                self._weights = np.array([0.0, times[0] / features[0, 1], 0.0, 0.0])
            else:
                self._weights = np.array(fit_weights(features, times))
            self._seconds.clear()

    def seconds(self, num_requests: int, most: int) -> np.ndarray:
        """Returns what 0, 1, … `most` drafts take for each request of which one token is unseen, f64[most + 1];
        0 before any were made.
        """
        seconds = self._seconds.get((num_requests, most))
        if seconds is None:
            once, unseen, drafts, all_drafts = self._weights
            seconds = once + unseen * num_requests + (drafts + all_drafts * num_requests) * np.arange(most + 1)
            seconds[0] = 0.0
            self._seconds[num_requests, most] = seconds
        return seconds
