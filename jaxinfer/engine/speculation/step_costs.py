"""What drafts would cost: how long a step of decoding rows takes with so many tokens more, from measured steps."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median

import numpy as np

from jaxinfer.config import SamplingParams
from jaxinfer.engine.execution.pipeline import Device
from jaxinfer.engine.execution.step_shapes import Bucket, choose_bucket, find_bucket
from jaxinfer.engine.request.request import Request
from jaxinfer.engine.scheduling.step import Chunk, Chunks, Step
from jaxinfer.engine.speculation.cost_drift import CostDrift
from jaxinfer.engine.speculation.cost_fit import NUM_REHEARSALS, fit_weights

# What a step costs grows with each of these, so no coefficient is negative.
FEATURES = ("step", "padded tokens", "tokens", "tokens in sixteens", "rows", "context tokens", "attended tokens")


def step_features(step: Step, bucket: Bucket) -> tuple[float, ...]:
    """Returns the FEATURES of a step in its compiled shape."""
    context = attended = 0
    for start, count, drafts in zip(step.chunks.starts, step.chunks.lens, step.chunks.drafts, strict=True):
        count += len(drafts)
        context += start + count
        attended += count * (2 * start + count) // 2
    tokens = step.num_tokens
    return (1, bucket.num_tokens, tokens, -(-tokens // 16), len(step.chunks), context, attended)


WINDOW = 256  # steps of a kind that the fit looks back on
REFIT_AFTER = 256  # steps of a kind, so that the fit costs some microseconds a step
MOST_CONTEXT_PAGES = 4  # of requests in rehearsals
NUM_AHEAD = 4  # steps that are launched ahead of each other to be measured


# A shape, and whether steps of it are launched ahead.
Kind = tuple[Bucket, bool]
# By drafts: the kinds that there are, which of them it is, seconds of it, and of them per token of context.
Layout = tuple[list[Kind], list[int], list[float], list[float]]


class StepCosts:
    """Seconds of decode and verify steps, fitted from the engine's own: those with drafts and those without on their
    own, at the speed that the machine had; and what each shape has lately taken beside that.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = tuple(bucket for bucket in buckets if bucket.is_decode or bucket.is_verify)
        self._measured = {is_verify: deque(maxlen=WINDOW) for is_verify in (False, True)}
        self._weights: dict[bool, np.ndarray] = {}
        self._drift = CostDrift()  # by `Kind`
        self._num_new = {False: 0, True: 0}
        self._layouts: dict[tuple[int, int], Layout] = {}  # by rows and most drafts, for these weights

    def enter(self, step: Step, seconds: float, count: int = 1) -> None:
        """Learns what a step took, or `count` alike in the mean; one that only prefills tells nothing here."""
        if not step.is_decode and not step.is_verify:
            return
        bucket, is_verify = choose_bucket(self._buckets, step), step.is_verify
        features = step_features(step, bucket)
        if is_verify in self._weights:
            fitted = max(float(self._weights[is_verify] @ np.array(features)), 1e-9)
            self._drift.enter((bucket, step.is_ahead), fitted, seconds, count)
            if not (is_verify or step.is_ahead):  # not what drafts are held against
                return
        self._collect(is_verify, features, seconds / self._drift.speed)
        if self._num_new[is_verify] >= REFIT_AFTER or is_verify not in self._weights:
            self._fit(is_verify)
            self._drift.forget(*((other, not is_verify) for other in self._buckets if other.is_verify == is_verify))

    def _collect(self, is_verify: bool, features: tuple[float, ...], seconds: float) -> None:
        self._measured[is_verify].append((features, seconds))
        self._num_new[is_verify] += 1

    def _fit(self, is_verify: bool) -> None:
        self._num_new[is_verify] = 0
        features, seconds = (np.array(column) for column in zip(*self._measured[is_verify], strict=True))
        self._weights[is_verify] = np.array(fit_weights(features, seconds))
        self._layouts.clear()

    def seconds(self, chunks: Sequence[Chunk], max_drafts: int) -> list[float]:
        """Returns what a step of these chunks of one token takes with 0, 1, … max_drafts drafts.

        Where no step of a kind was measured so far, it is infinite.
        """
        context = sum(chunk.start for chunk in chunks) + len(chunks)
        kinds, which, fixed, per_context = self._layout(len(chunks), max_drafts)
        factors = [self._drift.factor(kind) for kind in kinds]
        return [(a + context * b) * factors[i] for a, b, i in zip(fixed, per_context, which, strict=True)]

    def _layout(self, count: int, max_drafts: int) -> Layout:
        """Returns of which kind steps of so many rows are with 0, 1, 2, … drafts, and what they take."""
        if (count, max_drafts) not in self._layouts:
            tokens = range(count, count + max_drafts + 1)
            chosen = [find_bucket(self._buckets, n, count, is_decode=n == count, is_verify=n > count) for n in tokens]
            fixed, per_context = [math.inf] * len(chosen), [0.0] * len(chosen)
            for i, (bucket, n) in enumerate(zip(chosen, tokens, strict=True)):
                if (weights := self._weights.get(bucket.is_verify)) is not None:
                    # Of the FEATURES, the last two follow from the context of all rows.
                    fixed[i] = float(weights[:6] @ (1, bucket.num_tokens, n, -(-n // 16), count, n - count))
                    per_context[i] = float(weights[5] + weights[6] * n / count)
            kinds = list(dict.fromkeys((bucket, bucket.is_decode) for bucket in chosen))
            which = [kinds.index((bucket, bucket.is_decode)) for bucket in chosen]
            self._layouts[count, max_drafts] = kinds, which, fixed, per_context
        return self._layouts[count, max_drafts]

    def rehearse(
        self,
        device: Device,
        num_pages: int,
        page_size: int,
        table_width: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Measures made-up steps of every shape, so that something is known before the first request.

        `device` computes steps on a cache of which nobody needs anything yet. Steps without drafts are launched ahead
        of each other, as they are later. Full ones have long contexts as well: else nobody could tell what is due to
        the tokens from what is due to their contexts.
        """
        steps = [(b, step) for b in self._buckets for step in made_up_steps(b, num_pages, page_size)]
        if (long := min(table_width, MOST_CONTEXT_PAGES)) > 1:
            steps += [(b, made_up_steps(b, num_pages, page_size, long)[-1]) for b in self._buckets]
        for _, step in steps:
            device.read(device.launch(step))  # the first run touches new memory
        times = [[] for _ in steps]
        for _ in range(NUM_REHEARSALS):  # in turn, so that a machine that slows down slows all of them
            for (_, step), own in zip(steps, times, strict=True):
                began = clock()
                launched = [device.launch(step) for _ in range(1 if step.is_verify else NUM_AHEAD)]
                for output in launched:
                    device.read(output)
                own.append((clock() - began) / len(launched))
        for (bucket, step), own in zip(steps, times, strict=True):
            self._collect(step.is_verify, step_features(step, bucket), median(own))
        for is_verify, measured in self._measured.items():
            if measured:
                self._fit(is_verify)

    def full_decode_steps(self, num_pages: int, page_size: int) -> list[Step]:
        """Returns made-up decode steps with as many requests as their shapes hold."""
        return [made_up_steps(bucket, num_pages, page_size)[-1] for bucket in self._buckets if bucket.is_decode]


def made_up_steps(bucket: Bucket, num_pages: int, page_size: int, context_pages: int = 1) -> list[Step]:
    """Returns a step of decoding rows that hardly fills a bucket with tokens, and one that does. Each row has the same
    page so many times.
    """
    rows = min(bucket.num_rows, num_pages)
    counts = {rows + 1, min(bucket.num_tokens, rows * bucket.q_len)} if bucket.is_verify else {(rows + 1) // 2, rows}
    steps = []
    for num_tokens in sorted(counts):
        num_rows = rows if bucket.is_verify else num_tokens
        chunks = []
        for row in range(num_rows):
            token_ids = [0] * (context_pages * page_size - max(bucket.q_len, 1))
            greedy = SamplingParams(temperature=0)
            request = Request(-1 - row, token_ids, greedy, seed=0, max_tokens=1, stop_token_ids=(), detokenizer=None)
            request.pages = (row,) * context_pages
            num_drafts = (num_tokens - num_rows + row) // num_rows  # as even as can be
            chunks.append(Chunk(request, len(token_ids) - 1, 1, drafts=[0] * num_drafts))
        steps.append(Step(Chunks.of(chunks), is_ahead=not bucket.is_verify))
    return steps
