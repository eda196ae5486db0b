"""How many drafts are worth their time: those that bring the most tokens per second, by what they are expected to.

It is asked in every step about a few numbers, with which NumPy takes longer than Python.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np

# Speculation must promise so much before it is tried: costs are known to a few percent.
MARGIN = 1.05


def choose_count(likelihoods: np.ndarray, seconds: Sequence[float]) -> int:
    """Returns how many drafts to make for each request, 0 if none pay.

    likelihoods f64[B, K]: how likely each request emits its first, second, … draft. `seconds`: what a step takes in
    which each has 0, 1, … K of them.
    """
    return _most_per_second(len(likelihoods), likelihoods.sum(0).tolist(), seconds)


def choose_drafts(likelihoods: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[int]:
    """Returns how many of its drafts, from the first on, each request is to have verified: the likeliest of all first.

    `likelihoods[i]`: how likely the i-th request emits its first, second, … draft. `seconds`: what a step takes
    with 0, 1, … N drafts, whose ever they are.
    """
    # One that is likelier than one before it has to wait for that.
    turns = [(least, i) for i, row in enumerate(likelihoods) for least in accumulate(row, min)]
    turns = [i for _, i in sorted(turns, reverse=True)[: len(seconds) - 1]]
    rows = [iter(row) for row in likelihoods]
    gains = [next(rows[i]) for i in turns]
    best = _most_per_second(len(likelihoods), gains, seconds)
    return _count(turns[:best], len(likelihoods))


def share_out(counts: Sequence[int], room: int) -> list[int]:
    """Returns how many drafts each request may have where there is room for so many: the first of all come first."""
    places = sorted((depth, i) for i, count in enumerate(counts) for depth in range(count))[:room]
    return _count([i for _, i in places], len(counts))


def _count(requests: Iterable[int], num_requests: int) -> list[int]:
    counts = [0] * num_requests
    for i in requests:
        counts[i] += 1
    return counts


def _most_per_second(num_requests: int, gains: Sequence[float], seconds: Sequence[float]) -> int:
    """Returns how many of the gains to take; each request has one token without any."""
    best, most, num_tokens = 0, MARGIN * num_requests / seconds[0], float(num_requests)
    for count, gain in enumerate(gains, 1):
        num_tokens += gain
        if num_tokens / seconds[count] > most:
            best, most = count, num_tokens / seconds[count]
    return best
