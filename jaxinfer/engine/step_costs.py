"""What drafts would cost: how long a step of decoding rows takes with so many tokens more, from measured steps."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxinfer.config import SamplingParams
from jaxinfer.engine.batching import Bucket, choose_bucket
from jaxinfer.engine.cost_fit import fit_weights
from jaxinfer.engine.request import Request
from jaxinfer.engine.step import Chunk, Step
from jaxinfer.engine.step_times import step_features

WINDOW = 256  # steps of a kind that the fit looks back on
REFIT_AFTER = 256  # steps of a kind, so that the fit costs some microseconds a step
# How far one step moves the correction of its shape: what the fit knows nothing of changes over tens of steps.
RATE = 0.1


class StepCosts:
    """Seconds of decode and verify steps, fitted from the engine's own: each kind on its own, each shape corrected."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = tuple(bucket for bucket in buckets if bucket.is_decode or bucket.is_verify)
        self._measured = {is_verify: deque(maxlen=WINDOW) for is_verify in (False, True)}
        self._weights: dict[bool, np.ndarray] = {}
        self._corrections: defaultdict[Bucket, float] = defaultdict(lambda: 1.0)
        self._num_new = {False: 0, True: 0}

    def enter(self, step: Step, seconds: float) -> None:
        """Learns what a step took; one that only prefills tells nothing here."""
        if not step.is_decode and not step.is_verify:
            return
        bucket = choose_bucket(self._buckets, step)
        features = step_features(step, bucket)
        self._measured[bucket.is_verify].append((features, seconds))
        self._num_new[bucket.is_verify] += 1
        if bucket.is_verify in self._weights:
            ratio = seconds / max(float(self._weights[bucket.is_verify] @ np.array(features)), 1e-9)
            # A step that something interrupted moves it no further than one that was a little slow.
            self._corrections[bucket] += RATE * (min(ratio, 1.5) - self._corrections[bucket])
        if self._num_new[bucket.is_verify] >= REFIT_AFTER or bucket.is_verify not in self._weights:
            self._fit(bucket.is_verify)

    def _fit(self, is_verify: bool) -> None:
        self._num_new[is_verify] = 0
        features, seconds = (np.array(column) for column in zip(*self._measured[is_verify], strict=True))
        self._weights[is_verify] = np.array(fit_weights(features, seconds))

    def seconds(self, chunks: Sequence[Chunk], max_drafts: int) -> np.ndarray:
        """Returns what a step of these chunks of one token takes with 0, 1, … max_drafts drafts, f64[max_drafts + 1].

        Where no step of a kind was measured so far, it is infinite.
        """
        plain = choose_bucket(self._buckets, Step(tuple(chunks)))
        verify = [bucket for bucket in self._buckets if bucket.is_verify and bucket.num_rows >= len(chunks)]
        base = np.array(step_features(Step(tuple(chunks)), plain), np.float64)
        out = np.full(max_drafts + 1, np.inf)
        if False in self._weights:
            out[0] = self._weights[False] @ base * self._corrections[plain]
        if True not in self._weights or max_drafts == 0:
            return out
        tokens = len(chunks) + np.arange(1, max_drafts + 1)
        mean_context = base[-1] / len(chunks)
        index = np.searchsorted([bucket.num_tokens for bucket in verify], tokens)
        features = np.empty((max_drafts, len(base)))
        features[:, 0], features[:, 1] = 1, np.array([bucket.num_tokens for bucket in verify])[index]
        features[:, 2], features[:, 3], features[:, 4] = tokens, -(-tokens // 16), len(chunks)
        features[:, 5], features[:, 6] = base[5] + tokens - len(chunks), tokens * mean_context
        out[1:] = features @ self._weights[True] * np.array([self._corrections[bucket] for bucket in verify])[index]
        return out

    def rehearse(self, run: Callable[[Step], Any], num_pages: int, page_size: int) -> None:
        """Measures made-up steps of every shape, so that something is known before the first request.

        `run` computes a step on a cache of which nobody needs anything yet.
        """
        for bucket in self._buckets:
            for step in made_up_steps(bucket, num_pages, page_size):
                run(step)  # the first run touches new memory
                for _ in range(2):
                    began = time.perf_counter()
                    run(step)
                    self.enter(step, time.perf_counter() - began)
        for is_verify in self._weights:
            self._fit(is_verify)

    def made_up_requests(self, num_pages: int, page_size: int) -> list[list[Request]]:
        """Returns the requests of made-up decode steps, as many in each as a shape holds."""
        steps = [made_up_steps(bucket, num_pages, page_size)[-1] for bucket in self._buckets if bucket.is_decode]
        return [[chunk.request for chunk in step.chunks] for step in steps]


def made_up_steps(bucket: Bucket, num_pages: int, page_size: int) -> list[Step]:
    """Returns steps of decoding rows that fill a bucket with tokens, and one that hardly does."""
    rows = min(bucket.num_rows, num_pages)
    counts = {rows + 1, min(bucket.num_tokens, rows * bucket.q_len)} if bucket.is_verify else {(rows + 1) // 2, rows}
    steps = []
    for num_tokens in sorted(counts):
        num_rows = rows if bucket.is_verify else num_tokens
        chunks = []
        for row in range(num_rows):
            token_ids = [0] * (page_size - max(bucket.q_len, 1))
            greedy = SamplingParams(temperature=0)
            request = Request(-1 - row, token_ids, greedy, seed=0, max_tokens=1, stop_token_ids=(), text_stream=None)
            request.pages = [row]
            num_drafts = (num_tokens - num_rows + row) // num_rows  # as even as can be
            chunks.append(Chunk(request, len(token_ids) - 1, 1, [0] * num_drafts))
        steps.append(Step(tuple(chunks)))
    return steps
