"""Servers of OpenAI's API, each in a process of its own: jaxinfer, and both of llama.cpp in float32.

`llama_cpp.server` of the package llama-cpp-python runs one request at a time; `llama-server` of llama.cpp runs many.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import psutil

from jaxinfer import EngineConfig
from scripts.bench.llama_gguf import write_gguf

NUM_ROWS, MAX_LEN = 64, 512
CONFIG = EngineConfig(max_num_seqs=NUM_ROWS, max_model_len=MAX_LEN)
NUM_THREADS = 2
START_SECONDS = 300.0
# A process rests if it takes less of a core in each of some seconds. On a busy machine others may hold it up for one.
IDLE_PERCENT, IDLE_SECONDS = 1.0, 5


@dataclass(frozen=True, kw_only=True)
class Server:
    """A running server; its URL ends with /v1, and its bodies have `fields` beside those of OpenAI's API."""

    name: str
    url: str
    fields: dict[str, Any] = field(default_factory=dict)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


@contextlib.contextmanager
def started(name: str, command: Sequence[str], port: int, path: str) -> Iterator[Server]:
    """Yields the server of a command when it answers at `path` and rests, and ends it."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            end, address = time.monotonic() + START_SECONDS, f"http://127.0.0.1:{port}"
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if httpx.get(f"{address}{path}").is_success:
                        break
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"{name} has not started: {' '.join(command)}")
                time.sleep(0.1)
            wait_until_idle(process.pid)
            yield Server(name=name, url=f"{address}/v1")
        finally:
            process.terminate()


def wait_until_idle(process_id: int) -> None:
    """Waits until a process rests: what it began at its start has ended."""
    process, num_idle = psutil.Process(process_id), 0
    while num_idle < IDLE_SECONDS:
        num_idle = num_idle + 1 if process.cpu_percent(1.0) < IDLE_PERCENT else 0


@contextlib.contextmanager
def jaxinfer_server(folder: Path) -> Iterator[Server]:
    """Yields `jaxinfer serve`."""
    port = free_port()
    command = [sys.executable, "-m", "jaxinfer", "serve", "--model", str(folder), "--served-name", "model"]
    command += ["--port", str(port), "--max-num-seqs", str(NUM_ROWS), "--max-model-len", str(MAX_LEN), "--warm-up"]
    with started("jaxinfer serve", command, port, "/ready") as server:
        yield server


@contextlib.contextmanager
def llama_cpp_servers(folder: Path, binary: str | None, python: str | None) -> Iterator[list[Server]]:
    """Yields the servers of llama.cpp: a llama-server, and by a Python that has llama-cpp-python[server]."""
    with contextlib.ExitStack() as stack:
        model = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gguf-"))) / "model.gguf"
        if python or binary:
            write_gguf(folder, model)
        servers, port = [], free_port()
        if binary:
            command = [binary, "--model", str(model), "--port", str(port), "--threads", str(NUM_THREADS)]
            command += ["--parallel", str(NUM_ROWS), "--ctx-size", str(NUM_ROWS * MAX_LEN)]
            command += ["--cache-type-k", "f32", "--cache-type-v", "f32"]
            started_one = started("llama-server", command, port, "/health")
            servers.append(stack.enter_context(started_one))
            port = free_port()
        if python:
            command = [python, "-m", "llama_cpp.server", "--model", str(model), "--port", str(port)]
            command += ["--host", "127.0.0.1", "--n_ctx", str(MAX_LEN), "--type_k", "0", "--type_v", "0"]
            command += ["--n_threads", str(NUM_THREADS), "--n_threads_batch", str(NUM_THREADS)]
            # Else a new request ends the one that runs. All logits of a prompt are not asked for.
            command += ["--interrupt_requests", "false", "--logits_all", "false"]
            started_one = started("llama_cpp.server", command, port, "/v1/models")
            # It penalizes repetitions by default, as no other server does.
            servers.append(replace(stack.enter_context(started_one), fields={"repeat_penalty": 1.0}))
        yield servers
