"""A server on a thread of its own, at a free port of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from jaxinfer.engine.async_llm import AsyncLLM
from jaxinfer.serve.access import Client
from jaxinfer.serve.server import Server, ServerConfig, make_server

NAME = "small"
TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }} {% endfor %}{% if add_generation_prompt %}a:{% endif %}"
WAIT = 100.0  # seconds; only a test that fails waits for as long
LONG = {"model": NAME, "prompt": "hello", "temperature": 0, "max_tokens": 80, "ignore_eos": True}
SHORT = {**LONG, "max_tokens": 4}


@contextlib.contextmanager
def serving(llm: AsyncLLM, *, clients: Sequence[Client] = (), **options: Any) -> Iterator[tuple[Server, str]]:
    """Yields a server and its address; closes the engine in the end. Raw requests of tests call it "a"."""
    options = {
        "served_names": [NAME, "other"],
        "allowed_hosts": [] if clients else ["a"],
        "chat_template": TEMPLATE,
        **options,
    }
    config = ServerConfig(port=0, clients=clients, **options)
    server, has_begun, ports = make_server(llm, config), threading.Event(), []
    server.on_start = lambda port: (ports.append(port), has_begun.set())
    thread = threading.Thread(target=server.run, name="server")
    thread.start()
    try:
        assert has_begun.wait(WAIT)
        yield server, f"http://127.0.0.1:{ports[0]}"
    finally:
        server.drain()
        thread.join(WAIT)
        asyncio.run(llm.close())


@contextlib.contextmanager
def server_process(checkpoint: Path, folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yields a process of the command and its address; kills it in the end."""
    template = folder / "template.jinja"
    template.write_text(TEMPLATE)
    command = [sys.executable, "-m", "jaxinfer", "serve", "--model", str(checkpoint), "--served-name", NAME]
    command += ["--chat-template", str(template), "--max-num-seqs", "4", "--max-model-len", "96"]
    command += ["--max-num-batched-tokens", "32", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if found := re.search(r"serves at (\S+)/v1", line):
                    yield process, found[1]
                    break
            else:
                raise AssertionError("the server has not begun")
        finally:
            process.kill()


def until(condition: Callable[[], Any]) -> Any:
    """Waits until a condition holds; returns its value."""
    end = time.monotonic() + WAIT
    while not (value := condition()):
        assert time.monotonic() < end
        time.sleep(0.005)
    return value


def number_of(http: httpx.Client, name: str) -> float:
    found = re.search(rf"^{re.escape(name)}\{{.*\}} (\S+)$", http.get("/metrics").text, re.MULTILINE)
    assert found is not None
    return float(found[1])


def ended_by(http: httpx.Client, reason: str) -> float:
    """The number of requests that have ended for a reason."""
    found = re.search(rf'request_success_total\{{finished_reason="{reason}",.*\}} (\S+)', http.get("/metrics").text)
    return 0.0 if found is None else float(found[1])


@contextlib.contextmanager
def held(llm: Any) -> Iterator[threading.Event]:
    """Holds up the engine's steps until the event is set, or the end."""
    is_held, may_go = threading.Event(), threading.Event()
    llm._thread.call(lambda _: (is_held.set(), may_go.wait(WAIT)))
    assert is_held.wait(WAIT)
    try:
        yield may_go
    finally:
        may_go.set()


def raw_request(http: httpx.Client, body: dict[str, Any], key: str = "") -> socket.socket:
    """A connection on which a request was sent and nothing is read."""
    connection = socket.create_connection((http.base_url.host, http.base_url.port))
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {key}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(content)}"
    connection.sendall(head.encode() + b"\r\n\r\n" + content)
    return connection


def with_key(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}
