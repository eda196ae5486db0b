"""Streams from a server of OpenAI's API, timed by a client in this process."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx
import numpy as np

from scripts.bench.servers import Server

# Each is one token of the bundled model, after a space too, and the tokenizer puts one token before a text.
WORDS = ["def", "return", "class", "self", "value", "import", "list", "name", "key", "item", "for", "in", "open"]
END_TOKEN = "0"  # of the bundled model


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A request of a load: `arrival` in seconds from its start."""

    prompt: str
    num_tokens: int
    arrival: float = 0.0


def prompt_of(draw: random.Random, num_tokens: int) -> str:
    """Returns a text that the bundled model reads as `num_tokens` tokens."""
    return " ".join(draw.choices(WORDS, k=num_tokens - 1))


@dataclass
class Load:
    """Seconds of the streams of all loads that have run, and the answers of the last."""

    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    tokens_per_second: list[float] = field(default_factory=list)
    client_cores: list[float] = field(default_factory=list)  # processor seconds of this process per second
    answers: dict[str, str] = field(default_factory=dict)

    def run(self, server: Server, asks: Sequence[Ask], num_streams: int | None = None) -> None:
        """Sends the requests when they arrive; `num_streams` bounds how many are open at a time."""
        asyncio.run(self._run(server, asks, num_streams or len(asks)))

    async def _run(self, server: Server, asks: Sequence[Ask], num_streams: int) -> None:
        turns, self.answers = asyncio.Semaphore(num_streams), {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(timeout=None, limits=limits) as http:
            began, worked = time.perf_counter(), time.process_time()

            async def ask(one: Ask) -> None:
                await asyncio.sleep(began + one.arrival - time.perf_counter())
                async with turns:
                    await self._ask(http, server, one)

            await asyncio.gather(*map(ask, asks))
            seconds = time.perf_counter() - began
        self.tokens_per_second.append(sum(one.num_tokens for one in asks) / seconds)
        self.client_cores.append((time.process_time() - worked) / seconds)

    async def _ask(self, http: httpx.AsyncClient, server: Server, one: Ask) -> None:
        body = {"model": "model", "prompt": one.prompt, "max_tokens": one.num_tokens, "temperature": 0, "stream": True}
        body["logit_bias"] = {END_TOKEN: -100}  # so that every answer has `num_tokens`
        moments, text = [time.perf_counter()], ""
        async with http.stream("POST", f"{server.url}/completions", json=body | server.fields) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith("data: {") and (choices := json.loads(line.removeprefix("data: "))["choices"]):
                    text += choices[0]["text"]
                    moments.append(time.perf_counter())
        first, *others = np.diff(moments).tolist()
        self.ttft.append(first)
        self.itl += others
        self.tpot.append(sum(others) / (one.num_tokens - 1))
        self.answers[one.prompt] = text


def percentiles(seconds: Sequence[float]) -> str:
    """Returns the median and the 99th percentile in milliseconds."""
    p50, p99 = np.percentile(seconds, (50, 99)) * 1e3
    return f"{p50:.1f} / {p99:.1f}"
