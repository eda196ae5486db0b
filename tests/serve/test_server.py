"""The server left to itself: clients that vanish, are slow, or have no key; full queues, signals and failures."""

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
from typing import Any

import httpx
import pytest

from jaxinfer.cli.main import main
from jaxinfer.engine.fair_threads import FairThreads
from jaxinfer.serve import server as server_module
from jaxinfer.serve import streams
from jaxinfer.serve.access import Client, read_clients
from tests.engine.engines import quick_async_engine
from tests.serve.servers import NAME, WAIT, server_process, serving, until

LONG = {"model": NAME, "prompt": "hello", "temperature": 0, "max_tokens": 80, "ignore_eos": True}
SHORT = {**LONG, "max_tokens": 4}


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


@pytest.fixture
def served(checkpoint):
    """A server of its own, and its engine."""
    llm = quick_async_engine(checkpoint, max_waiting=2)
    with serving(llm, max_body_bytes=10_000) as (server, address), httpx.Client(base_url=address, timeout=WAIT) as http:
        yield llm, server, http


def raw_request(http: httpx.Client, body: dict[str, Any], key: str = "") -> socket.socket:
    """A connection on which a request was sent and nothing is read."""
    connection = socket.create_connection((http.base_url.host, http.base_url.port))
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {key}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(content)}"
    connection.sendall(head.encode() + b"\r\n\r\n" + content)
    return connection


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
    slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")

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
    llm = quick_async_engine(checkpoint)
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


def test_a_page_of_a_named_origin_may_call_and_reads_refusals(checkpoint, tmp_path):
    (tmp_path / "keys").write_text(json.dumps({"key": ANN}))
    origin = "http://page.example"
    llm = quick_async_engine(checkpoint)
    with serving(llm, cors_origins=[origin], clients=read_clients(tmp_path / "keys")) as (_, address):
        asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        assert httpx.options(f"{address}/v1/completions", headers=asked).status_code == 200
        refused = httpx.post(f"{address}/v1/completions", headers={"Origin": origin}, json=SHORT)
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == origin


def test_a_line_end_in_a_path_begins_no_line_of_the_log(served, caplog):
    _, _, http = served
    with caplog.at_level(logging.INFO, "jaxinfer.serve"):
        http.get("/v1/x%0aPOST /v1/completions 200")

    assert [len(record.getMessage().splitlines()) for record in caplog.records] == [1]


@pytest.mark.parametrize(
    ("host", "status"),
    [("evil.example", 400), ("127.0.0.1.evil.example", 400), ("localhost:9", 200), ("[::1]:9", 200), ("A.", 200)],
)
def test_a_server_for_this_machine_is_called_by_no_other_name(served, host, status):
    _, _, http = served
    answer = http.get("/v1/models", headers={"Host": host})
    assert answer.status_code == status
    assert status == 200 or answer.json()["error"]["code"] == "host_not_allowed"


@pytest.mark.parametrize(("hosts", "status"), [([], 200), (["other.example"], 400), (["*"], 200)])
def test_a_server_with_keys_is_called_by_any_name_unless_some_are_given(checkpoint, tmp_path, hosts, status):
    (tmp_path / "keys").write_text(json.dumps({"key": ANN}))
    llm = quick_async_engine(checkpoint)
    with serving(llm, clients=read_clients(tmp_path / "keys"), allowed_hosts=hosts) as (_, address):
        headers = {"Host": "proxy.example", **with_key(ANN)}
        assert httpx.get(f"{address}/v1/models", headers=headers).status_code == status


def test_other_origins_may_not_call_unless_they_are_named(served, checkpoint):
    _, _, http = served
    asked = {"Origin": "http://page.example", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in http.options("/v1/completions", headers=asked).headers

    llm = quick_async_engine(checkpoint)
    with serving(llm, cors_origins=["http://page.example"]) as (_, address):
        answer = httpx.options(f"{address}/v1/completions", headers=asked)
        assert answer.headers["access-control-allow-origin"] == "http://page.example"
        other = httpx.options(f"{address}/v1/completions", headers={**asked, "Origin": "http://evil.example"})
        assert "access-control-allow-origin" not in other.headers


# ---- keys

ANN, BOB, SLOW = "key-of-ann-0123456789", "key-of-bob-0123456789", "key-of-slow-0123456789"


CLIENTS: list[Client] = []  # of `guarded`


@pytest.fixture(scope="module")
def guarded(checkpoint, tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "keys.jsonl"
    lines: list[dict[str, Any]] = [
        {"key": ANN, "tenant": "ann"},
        {"key": BOB, "tenant": "bob", "priority": "batch", "tokens_per_minute": 30},
        {"key": SLOW, "tenant": "slow", "max_in_flight": 1},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    llm = quick_async_engine(checkpoint)
    CLIENTS[:] = read_clients(path)
    serving_clients = serving(llm, clients=CLIENTS)
    with serving_clients as (_, address), httpx.Client(base_url=address, timeout=WAIT) as http:
        yield llm, http


def with_key(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


ROUTES = [
    *(("POST", f"/v1/{name}") for name in ("completions", "chat/completions", "embeddings")),
    *(("GET", path) for path in ("/v1/models", "/metrics", "/openapi.json", "/nothing")),
    *(("POST", path) for path in ("/tokenize", "/detokenize")),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize("header", [None, "Bearer wrong", f"Basic {ANN}", ANN, "Bearer", "Bearer \xff"])
def test_no_route_but_health_opens_without_a_key(guarded, method, path, header):
    _, http = guarded
    headers = {} if header is None else {"Authorization": header.encode("latin-1")}

    answer = http.request(method, path, headers=headers)

    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"


def test_health_needs_no_key(guarded):
    _, http = guarded
    assert [http.get(path).status_code for path in ("/health", "/ready")] == [200, 200]


def test_tenants_share_no_cached_prefix(guarded):
    _, http = guarded
    body = {**SHORT, "prompt": "a prompt of more than one page of tokens, so that it is cached"}

    def num_cached(key: str, **more: Any) -> int:
        answer = http.post("/v1/completions", json={**body, **more}, headers=with_key(key))
        assert answer.status_code == 200
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert num_cached(ANN) == 0
    assert num_cached(ANN) > 0
    assert num_cached(SLOW) == 0
    assert num_cached(ANN, cache_salt="other") == 0
    assert num_cached(ANN, cache_salt="other") > 0


def test_a_key_that_has_used_its_tokens_waits(guarded):
    _, http = guarded
    statuses = []
    for _ in range(6):
        answer = http.post("/v1/completions", json=SHORT, headers=with_key(BOB))
        statuses.append(answer.status_code)
    assert statuses == [200] * 4 + [429] * 2  # of 9 tokens each
    assert answer.json()["error"]["code"] == "tokens_per_minute"
    assert 1 <= int(answer.headers["Retry-After"]) <= 60


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_pays_for_the_tokens_that_came(guarded, stream):
    llm, http = guarded
    client = next(client for client in CLIENTS if client.tenant == "ann")
    client.tokens_per_minute, num_before = 1e9, sum(count for _, count in client._used)
    connection = raw_request(http, {**LONG, "stream": stream}, ANN)
    until(lambda: llm.metrics().num_running)
    connection.close()

    until(lambda: llm.metrics().num_running == 0)
    assert sum(count for _, count in client._used) - num_before >= 5  # at least its prompt


def test_a_key_decides_the_tenant(guarded):
    _, http = guarded
    answer = http.post("/v1/completions", json={**SHORT, "user": "bob"}, headers=with_key(ANN))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "user")


@pytest.mark.parametrize(
    ("path", "body"), [("completions", SHORT), ("chat/completions", {"messages": [{"role": "user", "content": "a"}]})]
)
def test_a_request_is_checked_in_the_turns_of_its_tenant(guarded, monkeypatch, path, body):
    _, http = guarded
    submit, tenants = FairThreads.submit, []
    monkeypatch.setattr(
        FairThreads, "submit", lambda fair, name, work: tenants.append(name) or submit(fair, name, work)
    )

    answer = http.post(f"/v1/{path}", json={"model": NAME, "max_tokens": 2, **body}, headers=with_key(ANN))

    assert answer.status_code == 200
    assert set(tenants) == {"ann"}


def test_a_key_has_no_more_requests_in_flight_than_it_may(guarded):
    llm, http = guarded
    with held(llm) as may_go:
        answers: list[httpx.Response] = []
        first = threading.Thread(
            target=lambda: answers.append(http.post("/v1/completions", json=SHORT, headers=with_key(SLOW)))
        )
        first.start()
        until(lambda: llm._thread._commands.qsize())
        second = http.post("/v1/completions", json=SHORT, headers=with_key(SLOW))
        may_go.set()
        first.join(WAIT)

    assert (second.status_code, second.json()["error"]["code"]) == (429, "max_in_flight")
    assert answers[0].status_code == 200
    assert http.post("/v1/completions", json=SHORT, headers=with_key(SLOW)).status_code == 200


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no key"),
        ("{", "line 1: "),
        ('{"key": "short"}', "at least 16 characters"),
        ('{"key": "a long random text", "tenants": "a"}', "'tenants' is unknown"),
        ('{"key": "a long random text", "priority": "high"}', "priority='high' is not allowed"),
        ('{"key": "a long random text", "max_in_flight": 0}', "max_in_flight=0 is not allowed"),
        ('{"key": "a long random text"}\n\n{"key": "a long random text"}', "line 3: the key is on an earlier line"),
    ],
)
def test_a_file_of_keys_that_cannot_be_read_is_refused(tmp_path, content, message):
    (tmp_path / "keys").write_text(content)

    with pytest.raises(ValueError, match=re.escape(message)):
        read_clients(tmp_path / "keys")


# ---- the end


def test_a_failed_engine_ends_its_requests_and_the_server(served):
    llm, server, http = served
    answers: list[httpx.Response] = []
    with held(llm) as may_go:
        thread = threading.Thread(target=lambda: answers.append(http.post("/v1/completions", json=LONG)))
        thread.start()
        until(lambda: llm._thread._commands.qsize())
        llm._thread.call(lambda engine: engine._health.fail(MemoryError("device")))
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
    llm = quick_async_engine(checkpoint)
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
        (["--port", "0", "--files", "/dev/null/files"], "/dev/null/files cannot be used"),
        (["--port", "0", "--max-file-bytes", "0"], "max_file_bytes=0 is not allowed"),
    ],
)
def test_a_mistake_is_told_before_a_model_is_loaded(options, message, capsys):
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = str(used.getsockname()[1])
        assert main(["serve", "--model", "nowhere", *(text.replace("{used}", port) for text in options)]) == 2

    assert message.replace("{used}", port) in capsys.readouterr().err


def test_sigterm_ends_the_process_after_its_requests(checkpoint, tmp_path):
    with server_process(checkpoint, tmp_path, "--port", "0", "--log-format", "json") as (server, address):
        assert httpx.post(f"{address}/v1/completions", json=SHORT, timeout=WAIT).status_code == 200

        os.kill(server.pid, signal.SIGTERM)

        assert server.wait(WAIT) == 0
        assert server.stderr is not None
        entries = [json.loads(line) for line in server.stderr if line.startswith("{")]
    assert [entry["status"] for entry in entries if "status" in entry] == [200]
    assert "hello" not in json.dumps(entries)
