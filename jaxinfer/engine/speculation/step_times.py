"""The duration of decode and verify steps: a table measured before the first request, which each step corrects.

Beside rows that prefill, a draft takes as long as any other token of such steps, and drafts at all take some time more.
Both are measured while the engine serves requests.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import numpy as np

from jaxinfer.config import SamplingParams
from jaxinfer.engine.execution.compiled_steps import choose_bucket
from jaxinfer.engine.execution.pipeline import Device
from jaxinfer.engine.request.page_table import KindTable
from jaxinfer.engine.request.request import Request
from jaxinfer.engine.scheduling.step import Chunk, Chunks, Step
from jaxinfer.plan.step_shapes import Bucket, find_bucket

# A step that takes r times the expected seconds multiplies the expectation for its shape by r ** SHAPE_GAIN, and that
# for all shapes by r ** SPEED_GAIN: other work on the machine, or its clock, slows all steps at once.
SHAPE_GAIN, SPEED_GAIN = 0.02, 0.2
MAX_RATIO = 2.0  # an interrupted step counts like one that takes this many times the expected seconds
NUM_REHEARSALS = 4  # of each made-up step, because some are interrupted
NUM_AHEAD = 4  # decode steps that a rehearsal launches ahead of each other, as the engine does
MIN_PREFILL = 16  # tokens of a step that tells what a token takes in steps that prefill
PART_GAIN = 0.02  # weight of the last step in the running mean of the part of steps that prefill


class StepTimeTable:
    """Seconds by compiled shape: measured for a nearly empty and for a full step, linear in the tokens between."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        decoding = [bucket for bucket in buckets if bucket.is_decode or bucket.is_verify]
        self._buckets = tuple(bucket for bucket in decoding if not bucket.is_mixed)
        self._lines: dict[Bucket, tuple[float, float]] = {}  # seconds, and seconds per token
        self._factors = dict.fromkeys(self._buckets, 1.0)  # corrections of the lines
        self._speed = 1.0  # a correction of all lines
        self._prefill = math.inf  # seconds per token of steps that prefill
        self._mixed = 0.0  # seconds that mixed steps with drafts take beside those of their tokens
        self._mixed_part = 0.0  # of the steps in which some rows decode, those in which others prefill
        # By rows and drafts: the shape of each number of drafts, as (shape, seconds by the line) for runs of one shape.
        self._runs: dict[tuple[int, int], list[tuple[Bucket, np.ndarray]]] = {}

    def seconds(self, num_rows: int, max_drafts: int, *, is_mixed: bool = False) -> np.ndarray:
        """Returns the seconds of a step of decoding rows with 0, 1, … max_drafts drafts in all, f64[max_drafts + 1].

        They are infinite for shapes that were never measured. For a mixed step, they are those of the drafts, added to
        the seconds in which the rows get a token otherwise: in a decode step, or beside rows that prefill.
        """
        if is_mixed:
            plain = self.seconds(num_rows, 0)[0]
            if self._mixed_part > 0 and math.isfinite(self._prefill):
                plain += self._mixed_part * (self._prefill * num_rows - plain)
            return plain + np.append(0.0, self._mixed + self._prefill * np.arange(1, max_drafts + 1))
        if (num_rows, max_drafts) not in self._runs:
            self._runs[num_rows, max_drafts] = self._find_runs(num_rows, max_drafts)
        runs = self._runs[num_rows, max_drafts]
        return np.concatenate([self._factors[bucket] * self._speed * seconds for bucket, seconds in runs])

    def observe(self, step: Step, seconds: float) -> None:
        """Learns from the seconds of a step: a verify step, or a decode step that was launched ahead."""
        bucket = choose_bucket(self._buckets, step)
        self._mixed_part -= PART_GAIN * self._mixed_part
        if bucket not in self._lines:
            self._enter(bucket, {step.num_tokens: seconds / self._speed})
        fixed, per_token = self._lines[bucket]
        expected = self._factors[bucket] * self._speed * (fixed + per_token * step.num_tokens)
        ratio = min(seconds / expected, MAX_RATIO)
        self._factors[bucket] *= ratio**SHAPE_GAIN
        self._speed *= ratio**SPEED_GAIN

    def observe_prefill(self, step: Step, seconds: float) -> None:
        """Learns from the seconds of a step that prefills some of its rows."""
        if step.chunks.lens[0] == 1:  # a row that decodes comes first
            self._mixed_part += PART_GAIN * (1 - self._mixed_part)
        if step.num_tokens < MIN_PREFILL:
            return
        if math.isinf(self._prefill):
            self._prefill = seconds / step.num_tokens
        expected = self._prefill * step.num_tokens
        if step.is_verify:
            seconds = min(seconds, MAX_RATIO * (expected + self._mixed))
            self._mixed += SPEED_GAIN * (max(seconds - expected, 0.0) - self._mixed)
        else:
            self._prefill *= min(seconds / expected, MAX_RATIO) ** SPEED_GAIN

    def rehearse(
        self,
        device: Device,
        num_pages: int,
        page_size: int,
        clock: Callable[[], float] = time.perf_counter,
        *,
        num_kinds: int = 1,
    ) -> None:
        """Measures made-up steps of every shape on a device whose cache holds nothing that anyone needs.

        `num_kinds` are the model's kinds of pages.
        """
        steps = [(b, step) for b in self._buckets for step in self._made_up_steps(b, num_pages, page_size, num_kinds)]
        for _, step in steps:
            device.read(device.launch(step))  # the first run touches new memory
        times: list[list[float]] = [[] for _ in steps]
        for _ in range(NUM_REHEARSALS):  # in turn, so that a machine that slows down slows all of them
            for (_, step), own in zip(steps, times, strict=True):
                began = clock()
                launched = [device.launch(step) for _ in range(1 if step.is_verify else NUM_AHEAD)]
                for output in launched:
                    device.read(output)
                own.append((clock() - began) / len(launched))
        measured: dict[Bucket, dict[int, float]] = {bucket: {} for bucket in self._buckets}
        for (bucket, step), own in zip(steps, times, strict=True):
            measured[bucket][step.num_tokens] = median(own)
        for bucket, seconds in measured.items():
            if seconds:
                self._enter(bucket, seconds)

    def full_decode_steps(self, num_pages: int, page_size: int, num_kinds: int = 1) -> list[Step]:
        """Returns a full made-up step of each decode shape."""
        return [self._made_up_steps(b, num_pages, page_size, num_kinds)[-1] for b in self._buckets if b.is_decode]

    def _made_up_steps(self, bucket: Bucket, num_pages: int, page_size: int, num_kinds: int) -> list[Step]:
        """Returns the emptiest step that takes this shape and a full one; each row has a page of each kind."""
        rows, make = min(bucket.num_rows, num_pages), partial(made_up_step, page_size=page_size, num_kinds=num_kinds)
        if bucket.is_decode:
            sizes = [n for n in range(1, rows + 1) if self._find(n, n) == bucket]
            return [make(n, n) for n in sorted({sizes[0], sizes[-1]})] if sizes else []
        most = min(bucket.num_tokens, rows * bucket.q_len)
        sizes = [n for n in range(rows + 1, most + 1) if self._find(n, rows) == bucket]
        return [make(n, rows, q_len=bucket.q_len) for n in sorted({sizes[0], sizes[-1]})] if sizes else []

    def _find(self, num_tokens: int, num_rows: int) -> Bucket:
        is_verify = num_tokens > num_rows
        return find_bucket(self._buckets, num_tokens, num_rows, is_decode=not is_verify, is_verify=is_verify)

    def _enter(self, bucket: Bucket, measured: dict[int, float]) -> None:
        """Enters the seconds of a shape by its tokens, one or two measurements."""
        few, many = min(measured), max(measured)
        slope = max(measured[many] - measured[few], 0.0) / max(many - few, 1)
        self._lines[bucket] = measured[many] - slope * many, slope
        self._runs.clear()

    def _find_runs(self, num_rows: int, max_drafts: int) -> list[tuple[Bucket, np.ndarray]]:
        by_bucket: dict[Bucket, list[int]] = {}
        for num_tokens in range(num_rows, num_rows + max_drafts + 1):
            by_bucket.setdefault(self._find(num_tokens, num_rows), []).append(num_tokens)
        runs = []
        for bucket, tokens in by_bucket.items():
            fixed, per_token = self._lines.get(bucket, (math.inf, 0.0))
            runs.append((bucket, fixed + per_token * np.array(tokens)))
        return runs


def made_up_step(num_tokens: int, num_rows: int, *, page_size: int, num_kinds: int, q_len: int = 1) -> Step:
    """Returns a step of decoding rows whose drafts, up to q_len - 1 each, bring it to `num_tokens`.

    Each row has a page of each kind.
    """
    chunks = []
    for row in range(num_rows):
        token_ids = [0] * (page_size - q_len)
        greedy = SamplingParams(temperature=0)
        request = Request(-1 - row, token_ids, greedy, seed=0, max_tokens=1, stop_token_ids=(), detokenizer=None)
        request.table.kinds = tuple(KindTable((row,)) for _ in range(num_kinds))
        num_drafts = (num_tokens - num_rows + row) // num_rows  # as even as can be
        chunks.append(Chunk(request, len(token_ids) - 1, 1, drafts=[0] * num_drafts))
    return Step(Chunks.of(chunks), is_ahead=num_tokens == num_rows)
