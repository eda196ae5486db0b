"""What drafts would cost: how long a step of decoding rows takes with so many tokens more, from measured steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import numpy as np

from jaxinfer.config import SamplingParams
from jaxinfer.engine.buckets import Bucket, choose_bucket
from jaxinfer.engine.cost_drift import CostDrift
from jaxinfer.engine.cost_fit import fit_weights
from jaxinfer.engine.pipeline import Device
from jaxinfer.engine.request import Request
from jaxinfer.engine.step import Chunk, Chunks, Step
from jaxinfer.engine.step_times import step_features

WINDOW = 256  # steps of a kind that the fit looks back on
REFIT_AFTER = 256  # steps of a kind, so that the fit costs some microseconds a step
NUM_AHEAD = 4  # steps that are launched ahead of each other to be measured


class StepCosts:
    """Seconds of decode and verify steps, fitted from the engine's own: those with drafts and those without on their
    own, at the speed that the machine had; and what each shape has lately taken beside that.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = tuple(bucket for bucket in buckets if bucket.is_decode or bucket.is_verify)
        self._measured = {is_verify: deque(maxlen=WINDOW) for is_verify in (False, True)}
        self._weights: dict[bool, np.ndarray] = {}
        self._drift = CostDrift()  # by shape, and for decoding by whether the step was launched ahead
        self._num_new = {False: 0, True: 0}
        self._layouts: dict[tuple[int, int], tuple[Bucket, list[Bucket], np.ndarray]] = {}

    def enter(self, step: Step, seconds: float, count: int = 1) -> None:
        """Learns what a step took, or `count` alike in the mean; one that only prefills tells nothing here."""
        if not step.is_decode and not step.is_verify:
            return
        bucket = choose_bucket(self._buckets, step)
        is_verify = bucket.is_verify
        if is_verify in self._weights:
            fitted = max(float(self._weights[is_verify] @ np.array(step_features(step, bucket))), 1e-9)
            self._drift.enter((bucket, step.is_ahead), fitted, seconds, count)
            if not (is_verify or step.is_ahead):  # not what drafts are held against
                return
        self._collect(step, seconds / self._drift.speed)
        if self._num_new[is_verify] >= REFIT_AFTER or is_verify not in self._weights:
            self._fit(is_verify)
            self._drift.forget(*((other, not is_verify) for other in self._buckets if other.is_verify == is_verify))

    def _collect(self, step: Step, seconds: float) -> None:
        bucket = choose_bucket(self._buckets, step)
        self._measured[bucket.is_verify].append((step_features(step, bucket), seconds))
        self._num_new[bucket.is_verify] += 1

    def _fit(self, is_verify: bool) -> None:
        self._num_new[is_verify] = 0
        features, seconds = (np.array(column) for column in zip(*self._measured[is_verify], strict=True))
        self._weights[is_verify] = np.array(fit_weights(features, seconds))

    def seconds(self, chunks: Sequence[Chunk], max_drafts: int) -> np.ndarray:
        """Returns what a step of these chunks of one token takes with 0, 1, … max_drafts drafts, f64[max_drafts + 1].

        Where no step of a kind was measured so far, it is infinite.
        """
        count, out = len(chunks), np.full(max_drafts + 1, np.inf)
        context = sum(chunk.start for chunk in chunks) + count
        plain, verify, features = self._layout(count, max_drafts)
        if False in self._weights:
            out[0] = _total(self._weights[False], features[0], context, count) * self._drift.factor((plain, True))
        if True in self._weights and max_drafts > 0:
            factors = np.array([self._drift.factor((bucket, False)) for bucket in verify])
            out[1:] = _total(self._weights[True], features[1:], context, count) * factors
        return out

    def _layout(self, count: int, max_drafts: int) -> tuple[Bucket, list[Bucket], np.ndarray]:
        """Returns the shapes of steps of so many rows without drafts and with 1, 2, … of them, and the features of each
        that do not depend on the context.
        """
        if (count, max_drafts) not in self._layouts:
            fits = [bucket for bucket in self._buckets if bucket.num_rows >= count]
            plain = next(bucket for bucket in fits if bucket.is_decode)
            tokens = range(count + 1, count + max_drafts + 1)
            verify = [next(b for b in fits if b.is_verify and b.num_tokens >= n) for n in tokens]
            rows = [
                (1, b.num_tokens, n, -(-n // 16), count)
                for b, n in zip([plain, *verify], [count, *tokens], strict=True)
            ]
            self._layouts[count, max_drafts] = plain, verify, np.array(rows, np.float64)
        return self._layouts[count, max_drafts]

    def rehearse(self, device: Device, num_pages: int, page_size: int) -> None:
        """Measures made-up steps of every shape, so that something is known before the first request.

        `device` computes steps on a cache of which nobody needs anything yet. Steps without drafts are launched ahead
        of each other, as they are later.
        """
        for bucket in self._buckets:
            for step in made_up_steps(bucket, num_pages, page_size):
                device.read(device.launch(step))  # the first run touches new memory
                for _ in range(2):
                    began = time.perf_counter()
                    launched = [device.launch(step) for _ in range(1 if step.is_verify else NUM_AHEAD)]
                    for output in launched:
                        device.read(output)
                    self._collect(step, (time.perf_counter() - began) / len(launched))
        for is_verify, measured in self._measured.items():
            if measured:
                self._fit(is_verify)

    def full_decode_steps(self, num_pages: int, page_size: int) -> list[Step]:
        """Returns made-up decode steps with as many requests as their shapes hold."""
        return [made_up_steps(bucket, num_pages, page_size)[-1] for bucket in self._buckets if bucket.is_decode]


def _total(weights: np.ndarray, features: np.ndarray, context: int, count: int) -> np.ndarray:
    """Returns the seconds of steps by all FEATURES, of which the last two follow from the context of `count` rows."""
    num_tokens = features[..., 2]
    attended = context + num_tokens - count, num_tokens * context / count
    return features @ weights[:5] + weights[5] * attended[0] + weights[6] * attended[1]


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
            request.pages = (row,)
            num_drafts = (num_tokens - num_rows + row) // num_rows  # as even as can be
            chunks.append(Chunk(request, len(token_ids) - 1, 1, drafts=[0] * num_drafts))
        steps.append(Step(Chunks.of(chunks), is_ahead=not bucket.is_verify))
    return steps
