"""How many drafts are worth their time: those that bring the most tokens per second, by what they are expected to."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# Speculation must promise so much before it is tried: costs are known to a few percent.
MARGIN = 1.05


def choose_count(rates: np.ndarray, seconds: np.ndarray) -> int:
    """Returns how many drafts to make for each request, 0 if none pay.

    rates f64[B]: how likely each request's draft is right if those before it are. seconds f64[K + 1]: what a step
    takes in which each has 0, 1, … K of them.
    """
    gains = [(rates**depth).sum() for depth in range(1, len(seconds))]
    return _most_per_second(len(rates), gains, seconds)


def choose_drafts(rates: np.ndarray, counts: Sequence[int], seconds: np.ndarray) -> list[int]:
    """Returns how many of its `counts[i]` drafts each request is to have verified: the likeliest of all first.

    seconds f64[N + 1]: what a step takes with 0, 1, … N drafts, whose ever they are.
    """
    likelihoods = [(rate**depth, i) for i, rate in enumerate(rates.tolist()) for depth in range(1, counts[i] + 1)]
    likelihoods = sorted(likelihoods, reverse=True)[: len(seconds) - 1]
    gains = [likelihood for likelihood, _ in likelihoods]
    best = _most_per_second(len(rates), gains, seconds[: len(gains) + 1])
    return np.bincount([i for _, i in likelihoods[:best]], minlength=len(rates)).tolist()


def share_out(counts: Sequence[int], room: int) -> list[int]:
    """Returns how many drafts each request may have where there is room for so many: the first of all come first."""
    places = sorted((depth, i) for i, count in enumerate(counts) for depth in range(count))[:room]
    return np.bincount([i for _, i in places], minlength=len(counts)).tolist()


def _most_per_second(num_requests: int, gains: Sequence[float], seconds: np.ndarray) -> int:
    """Returns how many of the gains to take; each request has one token without any."""
    values = (num_requests + np.cumsum([0.0, *gains])) / seconds
    best = int(values.argmax())
    return best if values[best] > MARGIN * values[0] else 0
