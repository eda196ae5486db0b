"""Lets many clients stream from `jaxinfer serve` for minutes, of which some vanish, read slowly, or take nothing.

    python scripts/measure/endure_server.py --seconds 600 --streams 200

Every whole answer must be the one that the server gives to the same request alone. In the end no request may run and no
page may be owned, and the process may not have grown after the first minute. Prints a line a minute and the result. The
exit status is 1 if something was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from typing import Any

import httpx
import psutil

MAX_GROWTH = 1.05  # of the resident memory after the first minute
NUM_REQUESTS = 64  # different ones
KINDS = {"whole": 80, "vanishing": 10, "slow": 8, "half-open": 2}  # shares of clients


def make_requests(seed: int) -> list[dict[str, Any]]:
    """Requests of several lengths, each with a seed of its own."""
    rng = random.Random(seed)
    words = ["def", "return", "class", "self", "value", "import", "list", "name", "key", "item", "for", "in", "open"]
    requests = []
    for number in range(NUM_REQUESTS):
        prompt = " ".join(rng.choices(words, k=rng.randint(3, 60)))
        requests.append(
            {"model": "tiny", "prompt": prompt, "seed": number, "temperature": 1.0, "max_tokens": rng.randint(4, 64)}
        )
    return requests


class Clients:
    """The clients of one run, and the counts of what they met."""

    def __init__(self, address: str, requests: list[dict[str, Any]]) -> None:
        self._http = httpx.AsyncClient(base_url=address, timeout=None, limits=httpx.Limits(max_connections=None))
        self._address = httpx.URL(address)
        self._requests = requests
        self._expected: list[str] = []
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def learn(self) -> None:
        """Asks for each answer alone."""
        for body in self._requests:
            answer = await self._http.post("/v1/completions", json=body)
            self._expected.append(answer.raise_for_status().json()["choices"][0]["text"])

    async def run(self, number: int, end: float) -> None:
        """Is one client after another, until the end."""
        rng = random.Random(number)
        while time.monotonic() < end:
            kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
            index = rng.randrange(len(self._requests))
            body = {**self._requests[index], "stream": True}
            if kind == "half-open":
                await self._take_nothing(body, rng)
            else:
                await self._read(kind, body, self._expected[index], rng)
            self.counts[kind] += 1

    async def _read(self, kind: str, body: dict[str, Any], expected: str, rng: random.Random) -> None:
        text, num_lines, limit = "", 0, rng.randint(1, 20)
        async with self._http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                self.wrong.append(f"{answer.status_code}: {(await answer.aread())[:200]!r}")
                return
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    break
                if not line.startswith("data: "):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    self.wrong.append(str(chunk)[:200])
                    return
                text += chunk["choices"][0]["text"]
                num_lines += 1
                if kind == "vanishing" and num_lines == limit:
                    return
                if kind == "slow":
                    await asyncio.sleep(rng.random() / 4)
        if kind != "vanishing" and text != expected:
            self.wrong.append(f"{body['prompt'][:40]!r} has {text!r}, and alone {expected!r}")

    async def _take_nothing(self, body: dict[str, Any], rng: random.Random) -> None:
        """Sends a request, or half of one, and reads no answer."""
        content = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(content)}\r\n\r\n"
        sent = (head.encode() + content)[: rng.choice([10, len(head), len(head) + 5, None])]
        _, writer = await asyncio.open_connection(self._address.host, self._address.port)
        writer.write(sent)
        await asyncio.sleep(rng.random() * 10)
        writer.transport.abort()

    async def number_of(self, name: str) -> float:
        """Returns a metric of the server."""
        text = (await self._http.get("/metrics")).text
        found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        assert found is not None
        return float(found[1])


def start_server(arguments: argparse.Namespace) -> tuple[subprocess.Popen[str], str]:
    """Starts a server and returns its process and address."""
    command = [sys.executable, "-m", "jaxinfer", "serve", "--port", "0", "--max-num-seqs", str(arguments.rows)]
    command += ["--max-model-len", "256", "--served-name", "tiny", "--log-format", "json", "--warm-up"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"serves at (\S+)/v1", line):
            return process, found[1]
    raise RuntimeError("the server has not started")


async def endure(process: subprocess.Popen[str], address: str, arguments: argparse.Namespace) -> bool:
    """Returns True if nothing was wrong."""
    requests = make_requests(arguments.seed)
    clients = Clients(address, requests)
    await clients.learn()
    memory, sizes = psutil.Process(process.pid), []
    end = time.monotonic() + arguments.seconds
    tasks = [asyncio.create_task(clients.run(number, end)) for number in range(arguments.streams)]
    while not all(task.done() for task in tasks):
        await asyncio.wait(tasks, timeout=60)
        sizes.append(memory.memory_info().rss)
        tokens = await clients.number_of('vllm:generation_tokens_total{model_name="tiny"}')
        print(
            f"{len(sizes)} min: {sizes[-1] / 2**20:.0f} MiB, {tokens:.0f} tokens, {dict(clients.counts)},"
            f" {len(clients.wrong)} wrong",
            flush=True,
        )
    await asyncio.gather(*tasks)
    running = waiting = -1.0
    for _ in range(100):
        running = await clients.number_of('vllm:num_requests_running{model_name="tiny"}')
        waiting = await clients.number_of('vllm:num_requests_waiting{model_name="tiny"}')
        if running == waiting == 0:
            break
        await asyncio.sleep(0.1)
    owned = await clients.number_of('jaxinfer:pages{model_name="tiny",state="owned"}')
    growth = max(sizes) / sizes[0]
    for message in clients.wrong[:10]:
        print(message)
    print(
        f"{sum(clients.counts.values())} clients, {len(clients.wrong)} wrong, {running:.0f} running and {waiting:.0f}"
        f" waiting in the end, {owned:.0f} pages owned, memory {growth:.3f} of that after a minute"
    )
    return not clients.wrong and running == waiting == owned == 0 and growth <= MAX_GROWTH


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--rows", type=int, default=32, help="requests in a step of the server")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    process, address = start_server(arguments)
    assert process.stderr is not None
    # The server would wait for a reader of its log.
    threading.Thread(target=process.stderr.read, daemon=True).start()
    try:
        is_right = asyncio.run(endure(process, address, arguments))
        process.terminate()
        is_right &= process.wait(60) == 0
    finally:
        process.kill()
    sys.exit(0 if is_right else 1)


if __name__ == "__main__":
    main()
