"""Costs as sums of what causes them, fitted from measured times."""

from __future__ import annotations

import numpy as np

# Of a step that was interrupted by something else, the measured time tells nothing.
OUTLIER = 1.5
FIT_ROUNDS = 5
# Times that each cause is measured before the first request: of two nobody can say which was interrupted.
NUM_REHEARSALS = 4


def fit_weights(features: np.ndarray, seconds: np.ndarray) -> tuple[float, ...]:
    """Returns seconds per unit of each feature, for features [times, kinds] and seconds [times].

    Fits non-negative least squares of the relative error, without those that took far longer than their like.
    """
    from scipy.optimize import nnls  # a sixth of the time to import this package, where few need it

    kept = np.ones(len(seconds), bool)
    scale = features.max(0).clip(1)
    weights = np.zeros(features.shape[1])
    for _ in range(FIT_ROUNDS):
        rows = features[kept] / scale / seconds[kept, None]
        weights = nnls(rows, np.ones(kept.sum()))[0] / scale
        ratio = seconds / np.maximum(features @ weights, 1e-12)
        kept = ratio < OUTLIER * np.median(ratio)
    return tuple(weights.tolist())
