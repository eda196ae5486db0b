"""A server on a thread of its own, at a free port of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxinfer.engine.async_llm import AsyncLLM
from jaxinfer.serve.access import Client
from jaxinfer.serve.server import Server, ServerConfig, make_server

NAME = "small"
TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }} {% endfor %}{% if add_generation_prompt %}a:{% endif %}"
WAIT = 100.0  # seconds; only a test that fails waits for as long


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
