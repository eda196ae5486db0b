"""The number of drafts that promises the most tokens per second.

Computed in every step from a few numbers, for which Python is faster than NumPy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np

# Drafts must promise this many times the tokens per second of plain decoding: step times are known to a few percent.
MARGIN = 1.05


def choose_count(likelihoods: np.ndarray, seconds: Sequence[float]) -> int:
    """Returns the number of drafts to make for each request, 0 if none pay.

    likelihoods: f64[B, K], the probability that each request emits its first, second, … draft
    seconds: of a step with 0, 1, … K drafts for each request
    """
    return _most_per_second(len(likelihoods), likelihoods.sum(0).tolist(), seconds)


def choose_drafts(likelihoods: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[int]:
    """Returns how many of its drafts, from the first on, each request has verified: the likeliest of all first.

    likelihoods: for each request, the probability that it emits its first, second, … draft
    seconds: of a step with 0, 1, … N drafts in all
    """
    # A draft that is likelier than one before it comes after that one.
    turns = [(least, i) for i, row in enumerate(likelihoods) for least in accumulate(row, min)]
    turns = [i for _, i in sorted(turns, reverse=True)[: len(seconds) - 1]]
    rows = [iter(row) for row in likelihoods]
    gains = [next(rows[i]) for i in turns]
    best = _most_per_second(len(likelihoods), gains, seconds)
    return _count(turns[:best], len(likelihoods))


def share_out(counts: Sequence[int], room: int) -> list[int]:
    """Returns how many of its `counts[i]` drafts each request has if there is room for `room`: first drafts first."""
    places = sorted((depth, i) for i, count in enumerate(counts) for depth in range(count))[:room]
    return _count([i for _, i in places], len(counts))


def _count(requests: Iterable[int], num_requests: int) -> list[int]:
    counts = [0] * num_requests
    for i in requests:
        counts[i] += 1
    return counts


def _most_per_second(num_requests: int, gains: Sequence[float], seconds: Sequence[float]) -> int:
    """Returns how many of the gains, in tokens, to take; each request emits one token without any."""
    best, most, num_tokens = 0, MARGIN * num_requests / seconds[0], float(num_requests)
    for count, gain in enumerate(gains, 1):
        num_tokens += gain
        if num_tokens / seconds[count] > most:
            best, most = count, num_tokens / seconds[count]
    return best
