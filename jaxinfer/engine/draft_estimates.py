"""What is known of drafts before they are made: how often they are right, and what making them takes."""

from __future__ import annotations

from collections import deque

import numpy as np

from jaxinfer.engine.cost_fit import fit_weights

# What a request's first drafts are believed to be worth, and how many tries that belief outweighs.
FIRST_RATE, FIRST_TRIES = 0.5, 12.0
# The same of a second draft for a place where the first is wrong, and so on.
FIRST_RANK_RATE = 0.25
# What a try still counts after the next one: a text changes, and with it how well it can be guessed.
REQUEST_MEMORY, DRAFTER_MEMORY = 0.98, 0.995
# Times that the fit looks back on, and after how many new ones it is made again once there are some.
WINDOW, REFIT_AFTER = 64, 128


class Acceptance:
    """How often drafts were right, given that those before them were; late tries count more than early ones."""

    def __init__(self, rate: float, memory: float) -> None:
        self._right, self._tried, self._memory = rate * FIRST_TRIES, FIRST_TRIES, memory

    @property
    def rate(self) -> float:
        return self._right / self._tried

    def enter(self, is_right: bool) -> None:
        self._right = self._right * self._memory + is_right
        self._tried = self._tried * self._memory + 1


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

    def enter(self, num_unseen: int, num_requests: int, count: int, seconds: float) -> None:
        self._measured.append((_features(num_unseen, num_requests, count), max(seconds, 1e-7)))
        self._num_entered += 1
        if self._num_entered < 8 or self._num_entered % REFIT_AFTER == 0:
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


def _features(num_unseen: int, num_requests: int, count: int) -> tuple[float, ...]:
    return (1.0, num_unseen, count, num_requests * count)
