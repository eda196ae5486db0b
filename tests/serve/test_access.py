"""Who may call the server: by a key, by a name of this machine, from a page of some origin."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
from typing import Any

import httpx
import pytest

from jaxinfer.engine.fair_threads import FairThreads
from jaxinfer.serve.access import Client, read_clients
from jaxinfer.serve.batches.file_store import FileStore
from tests.engine.engines import small_async_engine
from tests.serve.servers import (
    LONG,
    NAME,
    SHORT,
    WAIT,
    held,
    raw_request,
    serving,
    until,
    with_key,
)


def test_a_page_of_a_named_origin_may_call_and_reads_refusals(checkpoint, tmp_path):
    (tmp_path / "keys").write_text(json.dumps({"key": ANN}))
    origin = "http://page.example"
    llm = small_async_engine(checkpoint)
    with serving(llm, cors_origins=[origin], clients=read_clients(tmp_path / "keys")) as (_, address):
        asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        assert httpx.options(f"{address}/v1/completions", headers=asked).status_code == 200
        refused = httpx.post(f"{address}/v1/completions", headers={"Origin": origin}, json=SHORT)
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == origin


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
    llm = small_async_engine(checkpoint)
    with serving(llm, clients=read_clients(tmp_path / "keys"), allowed_hosts=hosts) as (_, address):
        headers = {"Host": "proxy.example", **with_key(ANN)}
        assert httpx.get(f"{address}/v1/models", headers=headers).status_code == status


def test_other_origins_may_not_call_unless_they_are_named(served, checkpoint):
    _, _, http = served
    asked = {"Origin": "http://page.example", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in http.options("/v1/completions", headers=asked).headers

    llm = small_async_engine(checkpoint)
    with serving(llm, cors_origins=["http://page.example"]) as (_, address):
        answer = httpx.options(f"{address}/v1/completions", headers=asked)
        assert answer.headers["access-control-allow-origin"] == "http://page.example"
        other = httpx.options(f"{address}/v1/completions", headers={**asked, "Origin": "http://evil.example"})
        assert "access-control-allow-origin" not in other.headers


def test_each_address_of_this_machine_is_guarded_and_is_called_by_itself(checkpoint):
    llm = small_async_engine(checkpoint)
    with serving(llm, host="127.0.0.2", allowed_hosts=[]) as (_, address):
        address = address.replace("127.0.0.1", "127.0.0.2")
        statuses = {
            host: httpx.get(f"{address}/v1/models", headers={"Host": host}).status_code
            for host in ("127.0.0.2:80", "127.0.0.1", "localhost", "evil.example")
        }
    assert statuses == {"127.0.0.2:80": 200, "127.0.0.1": 200, "localhost": 200, "evil.example": 400}


FOREIGN = {"Origin": "http://evil.example"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        (FOREIGN, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://localhost:3000", "Host": "localhost:8000"}, 403),
        ({**FOREIGN, "Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Origin": "http://page.example", "Sec-Fetch-Site": "cross-site"}, 200),  # which is named
        ({"Origin": "http://localhost:8000", "Host": "localhost:8000"}, 200),
        ({"Origin": "https://proxy.example", "Sec-Fetch-Site": "same-origin"}, 200),
    ],
)
@pytest.mark.parametrize("method", ["POST", "DELETE"])
def test_a_page_of_another_origin_changes_nothing_on_a_server_without_keys(checkpoint_server, method, headers, status):
    if method == "POST":
        form = {"data": {"purpose": "batch"}, "files": {"file": ("a.jsonl", b"{}")}}
        answer = checkpoint_server.post("/v1/files", headers=headers, **form)
    else:
        answer = checkpoint_server.delete("/v1/files/file-a", headers=headers)

    assert answer.status_code == (404 if status == 200 and method == "DELETE" else status)
    assert status == 200 or answer.json()["error"]["code"] == "origin_not_allowed"


def test_a_page_of_another_origin_may_ask_for_what_changes_nothing(checkpoint_server):
    assert checkpoint_server.get("/health", headers=FOREIGN).status_code == 200


def test_any_origin_may_call_a_server_with_keys_or_for_all_origins(guarded, checkpoint):
    _, http = guarded
    assert http.post("/v1/completions", json=SHORT, headers={**FOREIGN, **with_key(ANN)}).status_code == 200
    with serving(small_async_engine(checkpoint), cors_origins=["*"]) as (_, address):
        assert httpx.post(f"{address}/v1/completions", json=SHORT, headers=FOREIGN, timeout=WAIT).status_code == 200


@pytest.fixture(scope="module")
def checkpoint_server(checkpoint, tmp_path_factory):
    """A server that keeps files, without keys, for the pages of one other origin."""
    store = FileStore(tmp_path_factory.mktemp("files") / "store", max_file_bytes=2**20)
    llm = small_async_engine(checkpoint)
    of_one_origin = serving(llm, store=store, cors_origins=["http://page.example"])
    with of_one_origin as (_, address), httpx.Client(base_url=address, timeout=WAIT) as http:
        yield http


@pytest.mark.parametrize(
    "head",
    [
        "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding: chunked\r\nContent-Length: 4\r\n",
        "Transfer-Encoding: chunked\r\nContent-Length: 0\r\n",
    ],
)
def test_a_body_of_two_lengths_is_refused_and_no_second_request_is_answered(served, head):
    _, _, http = served
    with socket.create_connection((http.base_url.host, http.base_url.port)) as connection:
        connection.settimeout(WAIT)
        request = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n{head}\r\n"
        connection.sendall(request.encode() + b"0\r\n\r\nGET /metrics HTTP/1.1\r\nHost: a\r\n\r\n")
        answer = b"".join(iter(lambda: connection.recv(10_000), b""))

    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1") == 1
    assert b"both Content-Length and Transfer-Encoding" in answer


@pytest.mark.parametrize("headers", [{"X": "a" * 70_000}, {f"X{i}": "b" for i in range(10_000)}])
def test_a_head_over_the_limit_is_refused_though_it_comes_at_once(served, headers):
    _, _, http = served
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    with socket.create_connection((http.base_url.host, http.base_url.port)) as connection:
        connection.settimeout(WAIT)
        with contextlib.suppress(ConnectionError):
            connection.sendall(f"GET /health HTTP/1.1\r\nHost: a\r\n{lines}\r\n".encode())
            assert b" 400 " in connection.recv(100)


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
    llm = small_async_engine(checkpoint)
    CLIENTS[:] = read_clients(path)
    serving_clients = serving(llm, clients=CLIENTS)
    with serving_clients as (_, address), httpx.Client(base_url=address, timeout=WAIT) as http:
        yield llm, http


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
    assert num_cached(ANN, user="slow") > 0  # a person behind ann's key
    assert num_cached(SLOW, user="ann") == 0
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
    # What takes no tokens is answered all the same.
    assert http.get("/v1/models", headers=with_key(BOB)).status_code == 200
    assert http.post("/v1/batches/none/cancel", headers=with_key(BOB)).status_code == 404  # stores no batches


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


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", SHORT),
        ("/v1/completions", {**SHORT, "stream": True}),
        ("/v1/chat/completions", {"model": NAME, "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}),
        ("/v1/embeddings", {"model": NAME, "input": "hello"}),
    ],
)
def test_a_request_with_a_key_may_name_a_user(guarded, path, body):
    _, http = guarded
    assert http.post(path, json={**body, "user": "bob"}, headers=with_key(ANN)).status_code == 200


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
        ('{"key": "a long random text", "metrics": 1}', "metrics=1 is not allowed"),
        ('{"key": "                    "}', "line 1: the key has a space at an end"),
        ('{"key": " a long random text"}', "line 1: the key has a space at an end"),
        ('{"key": "a long random text "}', "line 1: the key has a space at an end"),
        ('{"key": "a long\\nrandom text"}', "line 1: the key has a space at an end, or a character"),
        ('{"key": "a long\\u0000random text"}', "line 1: the key has a space at an end, or a character"),
        ('{"key": "a long random text", "key": "another random text"}', "line 1: keys ['key'] are given more than"),
        ('{"key": "a long random text"}\n\n{"key": "a long random text"}', "line 3: the key is on an earlier line"),
    ],
)
def test_a_file_of_keys_that_cannot_be_read_is_refused(tmp_path, content, message):
    (tmp_path / "keys").write_text(content)

    with pytest.raises(ValueError, match=re.escape(message)):
        read_clients(tmp_path / "keys")


def test_a_file_of_keys_may_begin_with_a_byte_order_mark(tmp_path):
    (tmp_path / "keys").write_bytes(b"\xef\xbb\xbf" + json.dumps({"key": ANN}).encode())
    assert len(read_clients(tmp_path / "keys")) == 1


def test_a_file_of_keys_that_is_no_utf_8_is_refused_by_its_name(tmp_path):
    (tmp_path / "keys").write_bytes(json.dumps({"key": ANN}).encode("utf-16"))
    with pytest.raises(ValueError, match=r"keys is not in UTF-8 .* convert it"):
        read_clients(tmp_path / "keys")


def test_metrics_are_for_keys_that_may_read_them(checkpoint, tmp_path):
    lines: list[dict[str, Any]] = [{"key": ANN, "tenant": "ann"}, {"key": BOB, "tenant": "bob", "metrics": True}]
    (tmp_path / "keys").write_text("\n".join(map(json.dumps, lines)))
    with serving(small_async_engine(checkpoint), clients=read_clients(tmp_path / "keys")) as (_, address):
        refused = httpx.get(f"{address}/metrics", headers=with_key(ANN))
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "metrics_not_allowed")
        assert httpx.get(f"{address}/metrics", headers=with_key(BOB)).status_code == 200


@pytest.mark.parametrize(("tenants", "may"), [(["a", "a"], True), (["a"], True), (["a", "b"], False)])
def test_every_key_reads_the_metrics_of_a_server_with_one_tenant(tmp_path, tenants, may):
    lines = [{"key": f"{ANN}{i}", "tenant": tenant} for i, tenant in enumerate(tenants)]
    (tmp_path / "keys").write_text("\n".join(map(json.dumps, lines)))
    assert {client.reads_metrics for client in read_clients(tmp_path / "keys")} == {may}
