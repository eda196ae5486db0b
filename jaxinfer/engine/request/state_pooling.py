"""Pools the hidden states of a prompt's tokens into one vector, while steps compute them."""

from __future__ import annotations

import numpy as np

POOLINGS = ("last", "mean")


class StatePooling:
    """The last state of a prompt of `num_tokens` tokens, or the mean of all its states.

    The states come in chunks, the first tokens first. After a preemption some come again, with the same bits.
    """

    def __init__(self, num_tokens: int, pooling: str) -> None:
        self.is_mean = pooling == "mean"
        self._num_tokens = num_tokens
        self.begin_again()

    def begin_again(self) -> None:
        """Forgets all states: the model's parameters have changed."""
        self._num_added = 0
        self._total: np.ndarray | None = None  # f64[1, D], of the first `_num_added` states
        self.pooled: np.ndarray | None = None  # f64[D], once the last state is there

    def record(self, start: int, states: np.ndarray) -> None:
        """Takes the states f32[n, D] of the tokens from position `start` on."""
        if not self.is_mean:
            if start + len(states) == self._num_tokens:
                self.pooled = states[-1].astype(np.float64)
            return
        new = states[max(self._num_added - start, 0) :].astype(np.float64)
        if len(new) == 0:
            return
        rows = new if self._total is None else np.concatenate([self._total, new])
        # Adds one state after another, so that the chunks do not show in the bits.
        self._total = np.add.accumulate(rows)[-1:]
        self._num_added += len(new)
        if self._num_added == self._num_tokens:
            self.pooled = self._total[0] / self._num_tokens
