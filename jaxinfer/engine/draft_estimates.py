"""What is known of drafts before they are made: how often they are right, and what making them takes."""

from __future__ import annotations

# What a request's first drafts are believed to be worth, and how many tries that belief outweighs.
FIRST_RATE, FIRST_TRIES = 0.5, 2.0
# What a try still counts after the next one: a text changes, and with it how well it can be guessed.
REQUEST_MEMORY, DRAFTER_MEMORY = 0.95, 0.995


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
    """What drafting takes, by the number of requests and of drafts of each."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, int], float] = {}

    def enter(self, num_requests: int, count: int, seconds: float) -> None:
        key = (_size(num_requests), count)
        known = self._seconds.get(key)
        # Never more than double at once: one interruption must not rule drafting out.
        self._seconds[key] = seconds if known is None else known + 0.2 * (min(seconds, 2 * known) - known)

    def seconds(self, num_requests: int, count: int) -> float:
        """Returns what it took, in proportion from the nearest count that is known; 0 where nothing is."""
        size = _size(num_requests)
        known = [(abs(other - count), other) for n, other in self._seconds if n == size]
        if not known or count == 0:
            return 0.0
        nearest = min(known)[1]
        return self._seconds[size, nearest] * count / nearest


def _size(num_requests: int) -> int:
    return (num_requests - 1).bit_length()
