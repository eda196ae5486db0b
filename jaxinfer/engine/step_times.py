"""What a step costs, as a function of what is computed in it, fitted from measured steps."""

from __future__ import annotations

import numpy as np
from scipy.optimize import nnls

from jaxinfer.engine.batching import Bucket
from jaxinfer.engine.step import Step

# What a step costs grows with each of these, so no coefficient is negative.
FEATURES = ("step", "padded tokens", "tokens", "tokens in sixteens", "rows", "context tokens", "attended tokens")
# Of a step that was interrupted by something else, the measured time tells nothing.
OUTLIER = 1.5
FIT_ROUNDS = 5


def step_features(step: Step, bucket: Bucket) -> tuple[float, ...]:
    """Returns the FEATURES of a step in its compiled shape."""
    context = attended = 0
    for chunk in step.chunks:
        end = chunk.start + chunk.num_tokens
        context += end
        attended += chunk.num_tokens * (chunk.start + end) // 2
    tokens = step.num_tokens
    return (1, bucket.num_tokens, tokens, -(-tokens // 16), len(step.chunks), context, attended)


def fit_weights(features: np.ndarray, seconds: np.ndarray) -> tuple[float, ...]:
    """Returns seconds per unit of each feature, for features [steps, FEATURES] and seconds [steps].

    Fits non-negative least squares of the relative error, without steps that took far longer than their like.
    """
    kept = np.ones(len(seconds), bool)
    scale = features.max(0).clip(1)
    weights = np.zeros(features.shape[1])
    for _ in range(FIT_ROUNDS):
        rows = features[kept] / scale / seconds[kept, None]
        weights = nnls(rows, np.ones(kept.sum()))[0] / scale
        ratio = seconds / np.maximum(features @ weights, 1e-12)
        kept = ratio < OUTLIER * np.median(ratio)
    return tuple(weights.tolist())
