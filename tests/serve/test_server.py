"""The server left to itself: clients that vanish or are slow, full queues, signals and failures."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from jaxinfer.cli.main import main
from jaxinfer.engine.engine_thread import EngineThread
from jaxinfer.serve import server as server_module
from jaxinfer.serve import streams
from jaxinfer.serve.logs import ENGINE_SECONDS, EngineLog
from tests.engine.engines import small_async_engine
from tests.serve.servers import (
    LONG,
    NAME,
    SHORT,
    WAIT,
    ended_by,
    held,
    number_of,
    raw_request,
    server_process,
    serving,
    until,
)

# ---- clients that go away, and slow ones


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_closes_its_connection_frees_the_pages(served, stream):
    llm, _, http = served
    with held(llm):
        connection = raw_request(http, {**LONG, "stream": stream})
        until(lambda: llm._engine._routes.sinks or llm._thread._commands.qsize())
        connection.close()
        time.sleep(0.1)

    until(lambda: number_of(http, "vllm:num_requests_running") == 0)
    assert number_of(http, "vllm:generation_tokens_total") < 80
    until(lambda: ended_by(http, "abort") == 1)
    assert http.post("/v1/completions", json=SHORT).status_code == 200
    assert llm.metrics().num_owned_pages == 0


def test_a_silent_connection_is_closed(served, monkeypatch):
    _, _, http = served
    monkeypatch.setattr(server_module, "REQUEST_SECONDS", 0.2)
    silent = socket.create_connection((http.base_url.host, http.base_url.port))
    slow = socket.create_connection((http.base_url.host, http.base_url.port))
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
    slow.sendall(head + b"{")

    for connection in (silent, slow):
        connection.settimeout(WAIT)
        with connection, contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""


def test_the_first_token_counts_before_the_request_has_ended(served):
    llm, _, http = served
    with http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
        assert next(answer.iter_lines()).startswith("data: ")
        with held(llm):
            assert number_of(http, "vllm:time_to_first_token_seconds_count") == 1
            assert ended_by(http, "length") == 0
    until(lambda: ended_by(http, "length") + ended_by(http, "abort") == 1)
    assert number_of(http, "vllm:time_to_first_token_seconds_count") == 1


def test_embeddings_are_counted(served):
    _, _, http = served
    assert http.post("/v1/embeddings", json={"model": NAME, "input": ["hello", [5, 6]]}).status_code == 200
    assert ended_by(http, "stop") == number_of(http, "vllm:request_prompt_tokens_count") == 2
    assert number_of(http, "vllm:request_prompt_tokens_sum") == 7
    late = http.post("/v1/embeddings", json={"model": NAME, "input": "hello", "deadline": 1e-9})
    assert (late.status_code, ended_by(http, "deadline")) == (408, 1)
    assert http.post("/v1/embeddings", json={"model": NAME, "input": "a" * 99}).status_code == 400
    assert ended_by(http, "stop") == 2


def test_an_upload_that_goes_on_has_its_time(served, monkeypatch):
    _, _, http = served
    monkeypatch.setattr(server_module, "REQUEST_SECONDS", 0.2)
    monkeypatch.setattr(server_module, "REQUEST_BYTES", 10)

    def pieces() -> Iterator[bytes]:
        for piece in json.dumps({**SHORT, "prompt": "a" * 40}).encode().partition(b"a" * 20):
            for at in range(0, len(piece), 20):
                time.sleep(0.1)
                yield piece[at : at + 20]

    answer = http.post("/v1/completions", content=pieces(), headers={"Content-Type": "application/json"})
    assert answer.status_code == 200


def test_a_client_that_takes_nothing_loses_its_connection_and_no_other_does(checkpoint, monkeypatch):
    monkeypatch.setattr(server_module, "STALL_SECONDS", 0.2)
    llm = small_async_engine(checkpoint)
    with serving(llm) as (_, address), httpx.Client(base_url=address, timeout=WAIT) as http:
        # Its answer is larger than the buffers of both sockets.
        body = {**LONG, "prompt": [[5, 6]] * 2048, "max_tokens": 60, "stream": True, "logprobs": 4}
        stalled = raw_request(http, body)
        until(lambda: llm.metrics().num_output_tokens > 100)

        assert http.post("/v1/completions", json=SHORT).status_code == 200
        until(lambda: llm.metrics().num_running == llm.metrics().num_waiting == 0)
        assert llm.metrics().num_output_tokens < 2048 * 60
        stalled.close()


def test_a_stream_gives_signs_of_life_while_nothing_comes(served, monkeypatch):
    llm, _, http = served
    monkeypatch.setattr(streams, "HEARTBEAT_SECONDS", 0.05)
    with http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        with held(llm):
            assert any(line.startswith(": ") for line in lines)
        assert "data: [DONE]" in lines


def test_a_connection_stays_open_between_two_requests_for_longer_than_a_request_may_take(served, monkeypatch):
    _, _, http = served
    monkeypatch.setattr(server_module, "REQUEST_SECONDS", 0.5)
    with socket.create_connection((http.base_url.host, http.base_url.port)) as connection:
        connection.settimeout(WAIT)
        for _ in range(2):
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
            assert b" 200 " in connection.recv(1_000)
            time.sleep(1.5)


def test_the_time_of_a_request_begins_with_its_first_byte(served, monkeypatch):
    _, _, http = served
    monkeypatch.setattr(server_module, "REQUEST_SECONDS", 2.0)
    body = json.dumps(SHORT).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nConnection: close\r\n"
    with socket.create_connection((http.base_url.host, http.base_url.port)) as connection:
        connection.settimeout(WAIT)
        time.sleep(1.2)
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[:10])
        time.sleep(1.2)
        connection.sendall(body[10:])
        assert b" 200 " in connection.recv(1_000)


def test_a_request_whose_first_line_never_ends_has_its_time_too(served, monkeypatch):
    _, _, http = served
    monkeypatch.setattr(server_module, "REQUEST_SECONDS", 0.3)
    with socket.create_connection((http.base_url.host, http.base_url.port)) as connection:
        connection.settimeout(WAIT)
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        assert b" 200 " in connection.recv(1_000)
        connection.sendall(b"GET /hea")
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""


class Transport:
    """A transport whose client takes `taken` bytes of the rest of its answer and no more."""

    def __init__(self, taken: list[int]) -> None:
        self.taken, self.rest, self.is_aborted = taken, 1_000, False

    def get_write_buffer_size(self) -> int:
        return self.rest

    def abort(self) -> None:
        self.is_aborted = True


@pytest.mark.parametrize(
    ("taken", "is_aborted"), [([0], True), ([400, 0], True), ([400, 600], False), ([1_000], False)]
)
def test_a_client_that_does_not_take_the_rest_of_its_answer_is_let_go(monkeypatch, taken, is_aborted):
    # The rest fills no buffer, so the transport reports neither a pause nor its end.
    protocol: Any = server_module._TimedProtocol.__new__(server_module._TimedProtocol)
    calls: list[Any] = []
    protocol.loop = SimpleNamespace(call_later=lambda seconds, call, *given: calls.append((seconds, call, given)))
    protocol.transport = transport = Transport(taken)

    protocol._watch_rest()
    for count in taken:
        transport.rest -= count
        seconds, call, given = calls.pop()
        assert seconds == server_module.STALL_SECONDS
        call(*given)

    assert transport.is_aborted == is_aborted
    assert not calls


@pytest.mark.parametrize("taken", [0, 1])
def test_a_client_with_connection_close_that_takes_nothing_is_let_go(checkpoint, monkeypatch, taken):
    monkeypatch.setattr(server_module, "STALL_SECONDS", 0.3)
    open_connections: list[Any] = []
    made = server_module._TimedProtocol.connection_made
    monkeypatch.setattr(
        server_module._TimedProtocol,
        "connection_made",
        lambda self, transport: (open_connections.append(transport), made(self, small_buffered(transport))),
    )
    with serving(small_async_engine(checkpoint)) as (_, address):
        place = httpx.URL(address)
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            connection.connect((place.host, place.port))
            body = json.dumps({"tokens": [40] * 40_000}).encode()
            head = "POST /detokenize HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nConnection: close\r\n"
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            until(lambda: open_connections and open_connections[0].is_closing())
            connection.recv(taken) if taken else None
            until(lambda: open_connections[0].get_extra_info("socket").fileno() == -1)


def small_buffered(transport: Any) -> Any:
    """A transport of a socket that holds little, and that never reports a pause."""
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4_096)
    transport.set_write_buffer_limits(high=2**30)
    return transport


# ---- limits


def test_a_full_queue_is_told_with_the_time_to_wait(served):
    llm, _, http = served
    with held(llm) as may_go:
        answers: list[httpx.Response] = []
        threads = [
            threading.Thread(target=lambda: answers.append(http.post("/v1/completions", json=SHORT))) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        until(lambda: llm._thread._commands.qsize() == 8)
        may_go.set()
        for thread in threads:
            thread.join(WAIT)

    statuses = sorted(answer.status_code for answer in answers)
    refused = [answer for answer in answers if answer.status_code == 429]
    assert statuses == [200] * 6 + [429] * 2  # four run and two wait
    for answer in refused:
        assert answer.json()["error"]["code"] == "queue_full"
        assert int(answer.headers["Retry-After"]) >= 1


@pytest.mark.parametrize("has_length", [True, False])
def test_a_body_over_the_limit_is_refused_before_it_is_read(served, has_length):
    llm, _, http = served
    content = json.dumps({**SHORT, "prompt": "a" * 20_000}).encode()
    pieces = content if has_length else iter([content[:5_000], content[5_000:]])

    answer = http.post("/v1/completions", content=pieces, headers={"Content-Type": "application/json"})

    assert answer.status_code == 413
    assert "more than 10,000 bytes" in answer.json()["error"]["message"]
    assert llm.metrics().num_steps == 0


def test_a_head_over_the_limit_is_refused(served):
    _, _, http = served
    with socket.create_connection((http.base_url.host, http.base_url.port)) as connection:
        connection.settimeout(WAIT)
        with contextlib.suppress(ConnectionError):
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\nX-Long: " + b"a" * 10_000_000)
        with contextlib.suppress(ConnectionResetError):
            answer = connection.recv(100)
            assert not answer or b" 400 " in answer


def test_thousands_of_silent_connections_leave_the_others_served(served, monkeypatch):
    _, _, http = served
    monkeypatch.setattr(server_module, "REQUEST_SECONDS", 5.0)
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most < 8_192:
        pytest.skip(f"this system allows {most} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    place = (http.base_url.host, http.base_url.port)
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (before, most))
        silent = [stack.enter_context(socket.create_connection(place)) for _ in range(2_000)]

        assert http.post("/v1/completions", json=SHORT).status_code == 200
        silent[-1].settimeout(WAIT)
        with contextlib.suppress(ConnectionResetError):
            assert silent[-1].recv(1) == b""


@pytest.mark.parametrize(
    "path", ["/v1/models/../../etc/passwd", "/..%2f..%2fetc/passwd", "//etc/passwd", "/page/../app.py"]
)
def test_no_path_leads_to_a_file(served, path):
    _, _, http = served
    with socket.create_connection((http.base_url.host, http.base_url.port)) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".encode())
        connection.settimeout(WAIT)
        assert b" 404 " in connection.recv(100)


def test_a_request_that_came_while_another_was_answered_has_its_time_too(served, monkeypatch):
    _, _, http = served
    monkeypatch.setattr(server_module, "REQUEST_SECONDS", 0.2)
    with socket.create_connection((http.base_url.host, http.base_url.port)) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\nPOST /tokenize HTTP/1.1\r\nHost: a\r\n")
        connection.sendall(b"Content-Length: 100\r\n\r\n{")
        connection.settimeout(WAIT)
        with contextlib.suppress(ConnectionResetError):
            while connection.recv(1000):
                pass


def test_a_line_end_in_a_path_begins_no_line_of_the_log(served, caplog):
    _, _, http = served
    with caplog.at_level(logging.INFO, "jaxinfer.serve"):
        http.get("/v1/x%0aPOST /v1/completions 200")

    until(lambda: caplog.records)  # the line comes after the answer
    assert [len(record.getMessage().splitlines()) for record in caplog.records] == [1]


@pytest.mark.parametrize("stream", [False, True])
def test_the_log_has_the_tokens_of_a_request(served, caplog, stream):
    _, _, http = served
    with caplog.at_level(logging.INFO, "jaxinfer.serve"):
        usage = http.post("/v1/completions", json={**SHORT, "n": 2, "temperature": 1.0, "stream": stream}).text
        until(lambda: caplog.records)

    (record,) = caplog.records
    fields: Any = record.__dict__["fields"]
    if not stream:
        tokens = json.loads(usage)["usage"]
        assert fields["prompt_tokens"] == tokens["prompt_tokens"]
        assert fields["output_tokens"] == tokens["completion_tokens"]
    assert 0 < fields["ttft"] <= fields["seconds"]
    assert f"{fields['prompt_tokens']} + {fields['output_tokens']} tokens, the first after" in record.getMessage()


def test_the_log_has_the_tokens_of_an_embedding(served, caplog):
    _, _, http = served
    with caplog.at_level(logging.INFO, "jaxinfer.serve"):
        usage = http.post("/v1/embeddings", json={"model": NAME, "input": [[5, 6, 7], [8]]}).json()["usage"]
        until(lambda: caplog.records)

    assert usage["prompt_tokens"] == 4
    assert "4 + 0 tokens" in caplog.records[0].getMessage()


def test_the_log_has_the_rates_of_an_engine_that_works(served, caplog):
    llm, _, http = served
    engine_log = EngineLog(llm.metrics(), 100.0)
    assert not engine_log.is_due(100.0 + ENGINE_SECONDS - 0.1)
    assert engine_log.is_due(100.0 + ENGINE_SECONDS)
    with caplog.at_level(logging.INFO, "jaxinfer.serve.logs"):
        engine_log.write(llm.metrics(), 110.0)
        assert not caplog.records
        usage = http.post("/v1/completions", json=SHORT).json()["usage"]
        caplog.clear()
        engine_log.write(llm.metrics(), 120.0)
        engine_log.write(llm.metrics(), 130.0)

        engine_log.write(replace(llm.metrics(), num_running=1), 140.0)  # such as in a step that takes a minute

    (record, hung) = [each for each in caplog.records if "engine:" in each.getMessage()]
    fields: Any = record.__dict__["fields"]
    assert fields["output_tokens_per_second"] == pytest.approx(usage["completion_tokens"] / 10, abs=0.05)
    assert fields["running"] == fields["waiting"] == 0
    assert "1 running, 0 waiting, 0.0 tokens/s" in hung.getMessage()


def test_health_tells_of_a_step_that_hangs(served, monkeypatch):
    _, _, http = served
    assert http.get("/health").status_code == 200

    monkeypatch.setattr(EngineThread, "step_seconds", 601.0)

    answer = http.get("/health")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "hung")


# ---- the end


def test_a_failed_engine_ends_its_requests_and_the_server(served):
    llm, server, http = served
    answers: list[httpx.Response] = []
    with held(llm) as may_go:
        thread = threading.Thread(target=lambda: answers.append(http.post("/v1/completions", json=LONG)))
        thread.start()
        until(lambda: llm._thread._commands.qsize())
        llm._thread.call(lambda engine: engine._lifecycle.fail(MemoryError("device")))
        may_go.set()
        thread.join(WAIT)

    assert [answer.status_code for answer in answers] == [503]
    until(lambda: server.should_exit)
    assert isinstance(llm.failure, MemoryError)


def test_while_it_drains_running_requests_end_and_new_ones_are_refused(served):
    llm, server, http = served
    with held(llm) as may_go:
        answers: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: answers.append(http.post("/v1/completions", json=SHORT)))
        thread.start()
        until(lambda: llm._thread._commands.qsize())
        server.drain()
        assert http.get("/ready").status_code == 503
        assert http.get("/health").status_code == 200
        refused = http.post("/v1/completions", json=SHORT)
        may_go.set()
        thread.join(WAIT)

    assert refused.status_code == 503
    assert "shutting down" in refused.json()["error"]["message"]
    assert [answer.status_code for answer in answers] == [200]


def test_what_is_unfinished_after_the_drain_ends_with_its_tokens_so_far(checkpoint):
    llm = small_async_engine(checkpoint)
    with serving(llm, drain_seconds=0.0) as (server, address), httpx.Client(base_url=address, timeout=WAIT) as http:
        body = {**LONG, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as answer:
            lines = (line for line in answer.iter_lines() if line)
            first = next(lines)
            server.drain()
            *_, last, done = lines

    assert first.startswith("data: ")
    assert done == "data: [DONE]"
    assert json.loads(last.removeprefix("data: "))["choices"][0]["engine_finish_reason"] in ("abort", "length")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--port", "{used}"], "cannot listen at 127.0.0.1:{used}"),
        (["--host", "192.0.2.1"], "cannot listen at 192.0.2.1:8000"),
        (["--port", "65536"], "port=65536 is not allowed"),
        (["--port", "0", "--tls-key", "a"], "--tls-certificate and --tls-key belong together"),
        (["--port", "0", "--keys", "nowhere"], "No such file"),
        (["--port", "0", "--api-key", "secret"], "the key has 6 characters, which others can guess; give at least 16"),
        (["--port", "0", "--api-key", "x" * 16, "--keys", "k"], "not allowed with argument --api-key"),
        (["--port", "0", "--files", "/dev/null/files"], "/dev/null/files cannot be used"),
        (["--port", "0", "--max-file-bytes", "0"], "max_file_bytes=0 is not allowed"),
    ],
)
def test_a_mistake_is_told_before_a_model_is_loaded(options, message, capsys):
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = str(used.getsockname()[1])
        assert main(["serve", "--model", "nowhere", *(text.replace("{used}", port) for text in options)]) == 2

    assert message.replace("{used}", port) in capsys.readouterr().err


def test_a_server_with_one_key_and_all_steps_compiled(checkpoint, tmp_path):
    options = ["--port", "0", "--api-key", "a key for all of them", "--warm-up"]
    with server_process(checkpoint, tmp_path, *options) as (_, address):
        assert httpx.post(f"{address}/v1/completions", json=SHORT, timeout=WAIT).status_code == 401
        headers = {"Authorization": "Bearer a key for all of them"}
        answer = httpx.post(f"{address}/v1/completions", json=SHORT, headers=headers, timeout=WAIT)
        assert answer.status_code == 200
        metrics = httpx.get(f"{address}/metrics", headers=headers, timeout=WAIT).text
        assert re.search(r"^jaxinfer:late_compiles\w*({.*})? 0.0$", metrics, re.MULTILINE)


def test_sigterm_ends_the_process_after_its_requests(checkpoint, tmp_path):
    with server_process(checkpoint, tmp_path, "--port", "0", "--log-format", "json") as (server, address):
        assert httpx.post(f"{address}/v1/completions", json=SHORT, timeout=WAIT).status_code == 200

        os.kill(server.pid, signal.SIGTERM)

        assert server.wait(WAIT) == 0
        assert server.stderr is not None
        entries = [json.loads(line) for line in server.stderr if line.startswith("{")]
    assert [entry["status"] for entry in entries if "status" in entry] == [200]
    assert "hello" not in json.dumps(entries)
