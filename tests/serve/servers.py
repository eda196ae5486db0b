"""A server on a thread of its own, at a free port of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from jaxinfer.engine.async_llm import AsyncLLM
from jaxinfer.serve.access import Client
from jaxinfer.serve.server import Server, ServerConfig, make_server

NAME = "small"
TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }} {% endfor %}{% if add_generation_prompt %}a:{% endif %}"
WAIT = 100.0  # seconds; only a test that fails waits for as long


@contextlib.contextmanager
def serving(llm: AsyncLLM, *, clients: Sequence[Client] = (), **options: Any) -> Iterator[tuple[Server, str]]:
    """Yields a server and its address; closes the engine in the end."""
    config = ServerConfig(port=0, served_names=[NAME, "other"], chat_template=TEMPLATE, clients=clients, **options)
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
