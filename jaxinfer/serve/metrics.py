"""The server's metrics in the text format of Prometheus, under vLLM's names if vLLM has such a metric."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Self

from prometheus_client import CollectorRegistry, Counter, Histogram, exposition
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from jaxinfer.engine.async_llm import AsyncLLM, Stream
from jaxinfer.engine.frontend.embeddings import NoEmbeddingError
from jaxinfer.engine.request.completion import Completion, Delta
from jaxinfer.engine.scheduling.metrics import Metrics
from jaxinfer.serve.streams import ClientGoneError

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)
NUM_ENDS = 64  # of the latest requests, whose rate tells when the queue has room
MAX_WAIT = 60.0  # seconds whose rate counts, so a refusal tells a client to wait less than that


class ServerMetrics:
    """Latencies of requests, and the engine's own numbers at the time of a scrape."""

    def __init__(self, llm: AsyncLLM, model: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineNumbers(llm, model))
        self._ends: deque[float] = deque(maxlen=NUM_ENDS)
        labels = {"labelnames": ["model_name"], "registry": self._registry}

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(name, text, buckets=buckets, **labels).labels(model)

        self._ttft = histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.", SECONDS)
        self._itl = histogram("vllm:inter_token_latency_seconds", "Between two tokens of a request.", SECONDS)
        self._tpot = histogram(
            "vllm:request_time_per_output_token_seconds", "Mean per token after the first, of a request.", SECONDS
        )
        self._queue = histogram("vllm:request_queue_time_seconds", "From arrival to the first step.", SECONDS)
        self._prompt = histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", TOKENS)
        self._output = histogram("vllm:request_generation_tokens", "Tokens of an output.", TOKENS)
        self._reasons = Counter(
            "vllm:request_success",
            "Requests that have ended.",
            labelnames=["model_name", "finished_reason"],
            registry=self._registry,
        )
        self._model = model

    def observe(self, completion: Completion) -> None:
        """Counts a request that has ended, and its latencies but for that of the first token."""
        self.count(completion)
        timings = completion.timings
        for seconds, histogram in ((timings.queue, self._queue), (timings.tpot, self._tpot)):
            if seconds is not None:
                histogram.observe(seconds)
        for seconds in timings.itl:
            self._itl.observe(seconds)

    def count(self, completion: Completion) -> None:
        """Counts a request that has ended, such as of a batch, whose latencies would say nothing of other requests."""
        self._end(completion.finish_reason)
        self._prompt.observe(len(completion.prompt_token_ids))
        self._output.observe(len(completion.token_ids))

    def observe_first_token(self, seconds: float) -> None:
        """Counts the seconds from the arrival of a request to its first token."""
        self._ttft.observe(seconds)

    def observe_departure(self, count: int) -> None:
        """Counts requests whose client has gone away before their end."""
        for _ in range(count):
            self._end("abort")

    @contextmanager
    def embedding(self, prompt_lens: Sequence[int]) -> Iterator[None]:
        """Counts the requests of an embedding when it ends, also if it fails or its client goes away.

        `prompt_lens` may be filled until then.
        """
        reason = None  # of one that is refused, and so has not begun
        try:
            yield
            reason = "stop"  # there is no output that could be cut off
        except NoEmbeddingError as error:
            reason = error.finish_reason
            raise
        except ClientGoneError:
            reason = "abort"
            raise
        finally:
            if reason is not None:
                for prompt_len in prompt_lens:
                    self._end(reason)
                    self._prompt.observe(prompt_len)

    def _end(self, reason: str) -> None:
        self._ends.append(time.monotonic())
        self._reasons.labels(self._model, reason).inc()

    def seconds_to_room(self) -> float:
        """Returns the seconds in which a request ends, by the rate of the last minute; 1 if it has none."""
        now = time.monotonic()
        recent = [end for end in self._ends if now - end < MAX_WAIT]  # earlier ones tell of a quiet time
        return 1.0 if len(recent) < 2 else (now - recent[0]) / len(recent)

    def text(self) -> tuple[bytes, str]:
        """Returns all metrics, and their media type."""
        return exposition.generate_latest(self._registry), exposition.CONTENT_TYPE_LATEST


class ObservedStream:
    """A stream of an `AsyncLLM` that is observed as it goes on, and at its end if its client leaves before."""

    def __init__(self, stream: Stream, metrics: ServerMetrics, arrival: float, num_completions: int) -> None:
        self.request_ids, self.num_prompt_tokens = stream.request_ids, stream.num_prompt_tokens
        self._stream, self._metrics, self._arrival = stream, metrics, arrival
        self._num_to_come = num_completions
        self._with_tokens: set[tuple[int, int]] = set()  # (request id, sample index)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        delta = await self._stream.__anext__()
        sample = delta.request_id, delta.sample_index
        if delta.token_ids and sample not in self._with_tokens:
            self._with_tokens.add(sample)
            # Samples of `best_of` come whole.
            known = None if delta.completion is None else delta.completion.timings.ttft
            self._metrics.observe_first_token(time.monotonic() - self._arrival if known is None else known)
        if delta.completion is not None:
            self._num_to_come -= 1
            self._metrics.observe(delta.completion)
        return delta

    async def close(self) -> None:
        """Ends the requests that are unfinished, without waiting for their end."""
        num_gone, self._num_to_come = self._num_to_come, 0
        self._metrics.observe_departure(num_gone)
        await self._stream.close()


class _EngineNumbers:
    """Collects the engine's numbers when Prometheus asks."""

    def __init__(self, llm: AsyncLLM, model: str) -> None:
        self._llm, self._model = llm, model

    def describe(self) -> Iterator[Metric]:
        yield from ()  # or registering would collect

    def collect(self) -> Iterator[Metric]:
        try:
            metrics = self._llm.metrics()
        except RuntimeError:  # the engine is closed or has failed, and has no numbers any more
            return
        for family, rows in ((GaugeMetricFamily, _gauges(metrics)), (CounterMetricFamily, _counters(metrics))):
            for name, text, value in rows:
                metric = family(name, text, labels=["model_name"])
                metric.add_metric([self._model], value)
                yield metric
        pages = GaugeMetricFamily("jaxinfer:pages", "Pages of the cache by state.", labels=["model_name", "state"])
        for state in ("owned", "cached", "free"):
            pages.add_metric([self._model, state], getattr(metrics, f"num_{state}_pages"))
        yield pages


def _gauges(metrics: Metrics) -> list[tuple[str, str, float]]:
    usage = metrics.num_owned_pages / max(metrics.num_pages, 1)
    return [
        ("vllm:num_requests_running", "Requests in the running batch.", metrics.num_running),
        ("vllm:num_requests_waiting", "Requests that wait.", metrics.num_waiting),
        ("vllm:kv_cache_usage_perc", "Share of the pages that requests own, from 0 to 1.", usage),
    ]


def _counters(metrics: Metrics) -> list[tuple[str, str, float]]:
    num_queried = metrics.num_found_tokens + metrics.num_prefill_tokens
    drafted, accepted = metrics.num_drafted_tokens, metrics.num_accepted_tokens
    return [
        ("vllm:num_preemptions", "Preemptions.", metrics.num_preemptions),
        ("jaxinfer:hand_overs", "Prefilled requests handed to decode replicas.", metrics.num_hand_overs),
        ("jaxinfer:damaged_hand_overs", "Hand-overs that arrived damaged.", metrics.num_damaged_hand_overs),
        ("vllm:prompt_tokens", "Prompt tokens, found or computed.", num_queried),
        ("vllm:generation_tokens", "Output tokens.", metrics.num_output_tokens),
        ("vllm:prefix_cache_queries", "Prompt tokens looked for in the prefix cache.", num_queried),
        ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", metrics.num_found_tokens),
        ("vllm:spec_decode_num_draft_tokens", "Drafts that steps have verified.", drafted),
        ("vllm:spec_decode_num_accepted_tokens", "Drafts that were accepted.", accepted),
        ("jaxinfer:steps", "Steps.", metrics.num_steps),
        ("jaxinfer:busy_seconds", "Seconds from the scheduling of steps to their results.", metrics.busy_seconds),
        ("jaxinfer:good_requests", "Requests within ttft_target and tpot_target.", metrics.num_good),
        ("jaxinfer:late_compiles", "Compilations that a step had to wait for.", metrics.num_late_compiles),
    ]
