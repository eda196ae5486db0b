"""GPTQ (Frantar et al. 2022): weights are rounded input by input, and the inputs that follow make up for the errors.

With H = Σ x xᵀ over the inputs x of a product, rounding weights w [out, in] to q costs tr((w - q) H (w - q)ᵀ). Rounding
input j to an error e [out] costs least if the weights of each later input k change by -e U[j, k] / U[j, j]. Uᵀ U is
H⁻¹, and U an upper triangle. The largest inputs come first, for which the most others make up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import scipy.linalg

DAMPING = 0.01  # of the mean of H's diagonal, added to it, as in the paper
BLOCK = 128  # inputs whose errors reach those behind the block in one product


class Feedback(NamedTuple):
    """How the errors of a product's inputs reach the inputs that follow."""

    order: np.ndarray  # i64[in]  the inputs, as they are rounded one after the other
    factor: np.ndarray  # f32[in, in]  U, of inputs in this order
    importance: np.ndarray  # f32[in]  the diagonal of H


def plan_feedback(moments: np.ndarray) -> Feedback:
    """Returns the feedback for the moments H f32[in, in] of a product's inputs.

    Raises ValueError for moments that are no finite numbers, or all zero.
    """
    importance = np.diagonal(moments)
    mean = importance.mean(dtype=np.float64)
    if not np.isfinite(moments).all() or mean <= 0:
        raise ValueError(f"the inputs of a product have a mean square of {mean}; give other calibration texts")
    order = np.argsort(-importance, kind="stable")
    H = moments[np.ix_(order, order)].astype(np.float64)
    H[np.diag_indices_from(H)] += DAMPING * mean
    # With inputs in reverse order H is L Lᵀ, so with R = L in reverse it is R Rᵀ, and H⁻¹ = (R⁻¹)ᵀ R⁻¹.
    R = scipy.linalg.cholesky(H[::-1, ::-1], lower=True)[::-1, ::-1]
    factor = scipy.linalg.solve_triangular(R, np.eye(len(H))).astype(np.float32)
    return Feedback(order, factor, importance.copy())


def round_with_feedback(
    w: np.ndarray, feedback: Feedback, nearest: Callable[[np.ndarray, int], np.ndarray]
) -> np.ndarray:
    """Returns weights f32[out, in] on a grid, by the feedback of their inputs.

    `nearest` returns the numbers f32[out] of the grid that are nearest to weights f32[out] of an input, by its index.
    """
    order, factor, _ = feedback
    left = w[:, order]
    for start in range(0, len(order), BLOCK):
        end = min(start + BLOCK, len(order))
        errors = np.empty((len(w), end - start), np.float32)
        for j in range(start, end):
            rounded = nearest(left[:, j], int(order[j]))
            error = (left[:, j] - rounded) / factor[j, j]
            left[:, j] = rounded
            left[:, j + 1 : end] -= error[:, None] * factor[j, j + 1 : end]
            errors[:, j - start] = error
        left[:, end:] -= errors @ factor[start:end, end:]
    on_grid = np.empty_like(left)
    on_grid[:, order] = left
    return on_grid
