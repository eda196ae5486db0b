"""Measures for how long `jaxinfer serve` is silent while one client does its worst within the limits.

    python scripts/measure/silence.py [--only NAME ...]

Each attack runs beside a loop of GET /health and a running stream of another client. A line for each: the longest time
without an answer of /health, the longest time between two events of the stream, and the growth of the process's memory
after the attack. The first line is that of one long prompt, whose steps a stream waits for anyway.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import random
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from jaxinfer.device import describe_cpu

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
SIZE = 2**22 - 2**10  # bytes of the largest body
ALONE = 1.0  # seconds of the line without an attack, before and after a prompt


@dataclass(frozen=True)
class Attack:
    """Requests of one client: a path, the bodies, and how many of them are under way at a time."""

    path: str
    bodies: Callable[[], Sequence[bytes]]
    at_once: int = 1


def _completion(**fields: Any) -> bytes:
    return json.dumps({"model": "tiny", "prompt": "x = ", "ignore_eos": True, **fields}).encode()


def _chat(content: str, **fields: Any) -> bytes:
    messages = [{"role": "user", "content": content}]
    return json.dumps({"model": "tiny", "messages": messages, "ignore_eos": True, **fields}).encode()


def _filled(item: bytes, last: bytes = b"1") -> list[bytes]:
    """Bodies of the largest size, whose schema is a list of one item again and again."""
    head = b'{"model":"tiny","prompt":"x","json_schema":{"enum":['
    return [head + item * ((SIZE - 99) // len(item)) + last + b"]}}"] * 4


def _schema(number: int) -> dict[str, Any]:
    bounds = [{"minimum": -i - 1 - number} for i in range(600)]
    items = {"type": "integer", "minimum": 0, "maximum": 9, "allOf": bounds}
    return {"type": "array", "minItems": 40, "maxItems": 60, "items": items}


# The longest steps of the engine, for which a stream waits anyway.
ONE_PROMPT = Attack(
    "/v1/completions", lambda: [_completion(prompt=[7] * 1_900, max_tokens=1, echo=True, logprobs=1)] * 2
)
LARGE = {"n": 128, "max_tokens": 60, "temperature": 1.5}
ATTACKS: dict[str, Attack] = {
    # Bodies.
    "lists": Attack("/v1/completions", lambda: _filled(b"[],"), 4),
    "objects": Attack("/v1/completions", lambda: _filled(b"{},"), 4),
    "texts": Attack("/v1/completions", lambda: _filled(b'"",'), 4),
    "numbers": Attack("/v1/completions", lambda: _filled(b"1,"), 4),
    "one text": Attack("/v1/completions", lambda: _filled(b"\\n", b'"1') + _filled(b"a", b'"'), 4),
    "keys": Attack("/v1/completions", lambda: [b"{%s}" % b",".join(b'"%d":1' % i for i in range(350_000))] * 4, 4),
    "token ids": Attack(
        "/v1/embeddings", lambda: [b'{"model":"tiny","input":[' + b"17," * (2**20 - 1) + b"17]}"] * 4, 4
    ),
    # Answers.
    "completions with log-probabilities": Attack("/v1/completions", lambda: [_completion(**LARGE, logprobs=20)]),
    "the same as a stream": Attack("/v1/completions", lambda: [_completion(**LARGE, logprobs=20, stream=True)]),
    "a chat with log-probabilities": Attack(
        "/v1/chat/completions", lambda: [_chat("hi", n=64, max_tokens=100, logprobs=True, top_logprobs=20)]
    ),
    "an echo with log-probabilities": Attack(
        "/v1/completions",
        lambda: [
            _completion(prompt=[[5 + i] * 1_900 for i in range(20)], max_tokens=0, echo=True, logprobs=20),
        ],
    ),
    "embeddings": Attack("/v1/embeddings", lambda: [json.dumps({"model": "tiny", "input": ["x"] * 1_000}).encode()]),
    "detokenization": Attack("/detokenize", lambda: [b'{"tokens":[' + b"17," * (2**20 - 1) + b"17]}"] * 4, 4),
    # Work of the engine's own threads.
    "a text to tokenize": Attack("/tokenize", lambda: [json.dumps({"prompt": "x y" * 30_000}).encode()] * 4),
    "a chat of 2 MB": Attack("/v1/chat/completions", lambda: [_chat("hello world, " * 150_000)] * 2),
    "many messages": Attack(
        "/v1/chat/completions",
        lambda: (
            [json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "a" * 900}] * 4_096}).encode()] * 4
        ),
        4,
    ),
    "schemas": Attack(
        "/v1/completions", lambda: [_completion(max_tokens=300, json_schema=_schema(i)) for i in range(4)], 4
    ),
    "many requests": Attack("/v1/completions", lambda: [_completion(max_tokens=20, seed=i) for i in range(300)], 64),
}


@dataclass(frozen=True)
class Silence:
    """The longest seconds without an answer of /health and without an event of a stream, and the growth in MiB."""

    health: float
    stream: float
    growth: float


class Server:
    """A server process with the bundled model, which measures itself."""

    def __init__(self, address: str, pid: int) -> None:
        self._place = urlsplit(address).netloc
        self._process = psutil.Process(pid)

    def ask(self, path: str, body: bytes | None = None) -> int:
        """Returns the status of a request whose answer is read to its end."""
        with contextlib.closing(http.client.HTTPConnection(self._place, timeout=300)) as connection:
            method = "GET" if body is None else "POST"
            connection.request(method, path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            while answer.read(2**16):
                pass
            return answer.status

    def silence_during(self, work: Callable[[], object]) -> Silence:
        """Returns the silences while `work` runs, and the growth of the memory from before to after it."""
        before = self._process.memory_info().rss
        is_over, health, stream = threading.Event(), [0.0], [0.0]
        threads = [
            threading.Thread(target=self._probe, args=(is_over, health)),
            threading.Thread(target=self._stream, args=(is_over, stream)),
        ]
        for thread in threads:
            thread.start()
        try:
            work()
        finally:
            is_over.set()
            for thread in threads:
                thread.join()
        return Silence(max(health), max(stream), (self._process.memory_info().rss - before) / 2**20)

    def silence_alone(self) -> Silence:
        """Returns the silences beside a prompt of the engine's longest steps."""

        def work() -> None:
            time.sleep(ALONE)
            self.run(ONE_PROMPT)
            time.sleep(ALONE)

        return self.silence_during(work)

    def _probe(self, is_over: threading.Event, waits: list[float]) -> None:
        while not is_over.is_set():
            began = time.perf_counter()
            self.ask("/health")
            waits.append(time.perf_counter() - began)
            time.sleep(0.02)

    def _stream(self, is_over: threading.Event, waits: list[float]) -> None:
        body = _completion(max_tokens=1_500, stream=True, prompt="def add(", seed=random.randrange(2**31))
        while not is_over.is_set():
            with contextlib.closing(http.client.HTTPConnection(self._place, timeout=300)) as connection:
                connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
                answer = connection.getresponse()
                last: float | None = None  # the time to the first token is the scheduler's
                while not is_over.is_set() and (line := answer.readline()):
                    if line.startswith(b"data: "):
                        now = time.perf_counter()
                        waits.append(0.0 if last is None else now - last)
                        last = now

    def run(self, attack: Attack) -> None:
        """Sends the requests of an attack and reads their answers."""
        bodies = list(attack.bodies())
        lock = threading.Lock()

        def work() -> None:
            while True:
                with lock:
                    if not bodies:
                        return
                    body = bodies.pop()
                status = self.ask(attack.path, body)
                if status not in (200, 400, 429, 503):
                    raise RuntimeError(f"{attack.path} is answered with {status}")

        threads = [threading.Thread(target=work) for _ in range(attack.at_once)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


@contextlib.contextmanager
def bundled_server() -> Iterator[Server]:
    """Yields a server of the bundled model in a process of its own, warmed up by a request of each kind."""
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder) / "template.jinja"
        template.write_text(TEMPLATE)
        command = [sys.executable, "-m", "jaxinfer", "serve", "--port", "0", "--served-name", "tiny"]
        command += ["--chat-template", str(template), "--max-prompt-log-probs", "20", "--warm-up"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            try:
                address = _address(process)
                server = Server(address, process.pid)
                for body in (_completion(max_tokens=40, n=8, logprobs=20), _completion(max_tokens=4, stream=True)):
                    server.ask("/v1/completions", body)
                yield server
            finally:
                process.kill()


def _address(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    for line in process.stderr:
        if "serves at " in line:
            # Or the server would wait for room in the pipe.
            threading.Thread(target=process.stderr.read, daemon=True).start()
            return line.split("serves at ")[1].strip().removesuffix("/v1")
    raise RuntimeError("the server has not begun")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=tuple(ATTACKS), default=tuple(ATTACKS), help="attacks")
    names = parser.parse_args().only
    date = datetime.now(UTC).date().isoformat()
    print(f"{shlex.join(['python', *sys.argv])}, {describe_cpu()}, jax {version('jax')}, {date}", flush=True)
    print("| attack | /health s | stream s | memory MiB |\n|---|--:|--:|--:|")
    with bundled_server() as server:
        works = [("one prompt", server.silence_alone)]
        works += [(name, partial(server.silence_during, partial(server.run, ATTACKS[name]))) for name in names]
        for name, measured in works:
            found = measured()
            print(f"| {name} | {found.health:.2f} | {found.stream:.2f} | {found.growth:+.0f} |", flush=True)


if __name__ == "__main__":
    main()
