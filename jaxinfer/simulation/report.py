"""Reports a load: latencies, throughput and goodput."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np

from jaxinfer.engine.scheduling.metrics import Targets

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, kw_only=True)
class Report:
    """Figures of one trace on one engine; times in seconds.

    `ttft`, `tpot` and `latency` map "mean", "p50", "p90" and "p99" to seconds.

    * `ttft`: from arrival to the first token.
    * `tpot`: per token after the first, of requests with more than one token.
    * `latency`: from arrival to the end.
    * `goodput`: requests per second that met both targets.
    * `hit_rate`: the share of prompt tokens found in the prefix cache.
    """

    num_requests: int
    num_refused: int
    num_steps: int
    num_preemptions: int
    makespan: float
    output_tokens_per_second: float
    goodput: float
    hit_rate: float
    ttft: dict[str, float]
    tpot: dict[str, float]
    latency: dict[str, float]

    def __str__(self) -> str:
        lines = [
            f"{self.num_requests} requests in {self.makespan:.3f} s, {self.num_refused} refused,"
            f" {self.num_steps} steps, {self.num_preemptions} preemptions",
            f"{self.output_tokens_per_second:.1f} output tokens/s, goodput {self.goodput:.3f} requests/s,"
            f" {self.hit_rate:.1%} of prompt tokens cached",
        ]
        for name in ("ttft", "tpot", "latency"):
            figures = ", ".join(f"{key} {1e3 * value:.2f}" for key, value in getattr(self, name).items())
            lines.append(f"{name:8}{figures} ms")
        return "\n".join(lines)


def prediction_errors(predicted: Report, measured: Report) -> dict[str, float]:
    """Returns the relative error of each prediction, as a share of the measured value; positive if too high."""
    pairs = {"mean TTFT": (predicted.ttft, measured.ttft), "mean TPOT": (predicted.tpot, measured.tpot)}
    means = {name: (a["mean"], b["mean"]) for name, (a, b) in pairs.items() if a and b}
    means["makespan"] = (predicted.makespan, measured.makespan)
    return {name: a / max(b, 1e-9) - 1 for name, (a, b) in means.items()}


class Outcomes:
    """Collects the latencies of finished requests, in 12 bytes per request."""

    def __init__(self) -> None:
        self._ttft, self._tpot, self._latency = array("f"), array("f"), array("f")
        self._num_tokens = self._num_prompt_tokens = self._num_cached_tokens = 0
        self._end = 0.0
        self.num_refused = 0

    def add(
        self,
        *,
        arrival: float,
        first: float,
        end: float,
        num_tokens: int,
        num_prompt_tokens: int,
        num_cached_tokens: int,
    ) -> None:
        """Records a finished request; times in seconds from the start of the trace."""
        self._ttft.append(first - arrival)
        self._latency.append(end - arrival)
        self._tpot.append((end - first) / (num_tokens - 1) if num_tokens > 1 else 0.0)
        self._num_tokens += num_tokens
        self._num_prompt_tokens += num_prompt_tokens
        self._num_cached_tokens += num_cached_tokens
        self._end = max(self._end, end)

    def report(self, *, num_steps: int, num_preemptions: int, targets: Targets) -> Report:
        """Returns the figures so far; a request counts as goodput if it meets both targets."""
        ttft, tpot, latency = np.array(self._ttft), np.array(self._tpot), np.array(self._latency)
        makespan = max(self._end, 1e-9)
        return Report(
            num_requests=len(ttft),
            num_refused=self.num_refused,
            num_steps=num_steps,
            num_preemptions=num_preemptions,
            makespan=self._end,
            output_tokens_per_second=self._num_tokens / makespan,
            goodput=float(((ttft <= targets.ttft) & (tpot <= targets.tpot)).sum()) / makespan,
            hit_rate=self._num_cached_tokens / max(self._num_prompt_tokens, 1),
            ttft=_summary(ttft),
            tpot=_summary(tpot[tpot > 0]),
            latency=_summary(latency),
        )


def _summary(seconds: np.ndarray) -> dict[str, float]:
    if len(seconds) == 0:
        return {}
    quantiles = np.percentile(seconds, PERCENTILES)
    return {"mean": float(seconds.mean(dtype=np.float64))} | {
        f"p{percent}": float(value) for percent, value in zip(PERCENTILES, quantiles, strict=True)
    }
