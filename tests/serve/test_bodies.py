"""Bodies of requests: who waits for whom, how many bytes they have together, and that the event loop is free."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from jaxinfer.serve import bodies
from jaxinfer.serve.access import read_clients
from tests.engine.engines import small_async_engine
from tests.serve.servers import NAME, SHORT, WAIT, serving, until, with_key

ANN, BOB, CAT = (f"key-of-{name}-0123456789" for name in ("ann", "bob", "cat"))
MAX_BYTES = 100_000
LARGE = {**SHORT, "regex": "a" * 30_000}  # more than one that is read at once
JSON = {"Content-Type": "application/json"}


@contextlib.contextmanager
def guarded(checkpoint: Any, folder: Any) -> Iterator[str]:
    keys = [{"key": key} for key in (ANN, BOB, CAT)]
    (folder / "keys").write_text("\n".join(map(json.dumps, keys)))
    clients = read_clients(folder / "keys")
    with serving(small_async_engine(checkpoint), clients=clients, max_body_bytes=MAX_BYTES) as (_, address):
        yield address


@contextlib.contextmanager
def held_reading(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Holds up the reading of large bodies; the list has the names of the threads that read."""
    may_go, readers, read = threading.Event(), [], bodies.read_body

    def hold(content: bytes, model: Any) -> Any:
        readers.append(threading.current_thread().name)
        if len(content) > bodies.SMALL_BYTES:
            assert may_go.wait(WAIT)
        return read(content, model)

    monkeypatch.setattr(bodies, "read_body", hold)
    try:
        yield readers
    finally:
        may_go.set()


def post(address: str, body: dict[str, Any], key: str, answers: list[httpx.Response]) -> threading.Thread:
    def work() -> None:
        url = f"{address}/v1/completions"
        answers.append(httpx.post(url, json=body, headers=with_key(key), timeout=WAIT))

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_a_tenant_whose_bodies_are_read_leaves_room_for_another(checkpoint, tmp_path, monkeypatch):
    with guarded(checkpoint, tmp_path) as address:
        answers: list[httpx.Response] = []
        with held_reading(monkeypatch) as readers:
            threads = [post(address, LARGE, ANN, answers) for _ in range(3)]
            until(lambda: len(readers) == 1)
            threads.append(post(address, LARGE, BOB, answers))
            until(lambda: len(readers) == 2)  # and not a second one of ann's
            # The loop is free, and small bodies wait for none.
            small = httpx.post(f"{address}/v1/completions", json=SHORT, headers=with_key(ANN), timeout=WAIT)
            assert small.status_code == httpx.get(f"{address}/health").status_code == 200
            assert [name.startswith("heavy-work") for name in readers] == [True, True, False]
        for thread in threads:
            thread.join(WAIT)
        assert len(answers) == 4


def begun(address: str, key: str, num_bytes: int) -> socket.socket:
    """A connection on which a part of a body was sent."""
    url = httpx.URL(address)
    connection = socket.create_connection((url.host, url.port))
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json\r\n"
    )
    connection.sendall(f"{head}Content-Length: {MAX_BYTES}\r\n\r\n".encode() + b" " * num_bytes)
    return connection


def test_all_bodies_together_have_a_bound_and_a_tenant_has_half_of_it(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(bodies, "HELD_BODIES", 4)
    held, hold = [0], bodies.BodyLimit._hold

    def counted(limit: Any, tenant: str, count: int, **more: Any) -> None:
        hold(limit, tenant, count, **more)
        held[0] += count

    monkeypatch.setattr(bodies.BodyLimit, "_hold", counted)
    with guarded(checkpoint, tmp_path) as address, contextlib.ExitStack() as stack:

        def status(key: str) -> tuple[int, str | None]:
            content = json.dumps(SHORT).encode().ljust(50_000)
            headers = JSON | with_key(key)
            answer = httpx.post(f"{address}/v1/completions", content=content, headers=headers, timeout=WAIT)
            return answer.status_code, answer.headers.get("Retry-After")

        def begin_two(key: str) -> None:
            held[0] = 0
            for _ in range(2):
                stack.enter_context(begun(address, key, MAX_BYTES - 1))
            until(lambda: held[0] == 2 * (MAX_BYTES - 1))

        begin_two(ANN)
        assert status(ANN) == (429, "1")
        assert status(BOB) == (200, None)
        begin_two(BOB)
        assert status(CAT) == (503, "1")
        stack.close()  # the clients go away

        for key in (ANN, BOB, CAT):
            until(lambda key=key: status(key) == (200, None))


@pytest.mark.parametrize(
    "headers",
    [{"Content-Type": "application/x-www-form-urlencoded"}, {"Content-Type": "text/plain"}, {}],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize"])
def test_a_body_that_is_not_said_to_be_json_is_refused_with_the_way_out(http, path, headers):
    answer = http.post(path, content=json.dumps(SHORT), headers=headers)

    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "content_type_not_json"
    assert "send Content-Type: application/json" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"model": "small", "prompt": "a", "max_tokens": 1, "max_tokens": 2}', "keys ['max_tokens'] are given more"),
        (b'{"model": "small", "prompt": "a", "\\ud800": 1}', "\\ud800: this field is unknown"),
        (b'{"model": "small", "prompt": "a", "logit_bias": {"\\ud800": 1}}', "logit_bias"),
        (b'{"model": "small", "prompt": "a"', "the body is no JSON"),
    ],
)
def test_a_body_of_wrong_json_is_refused_by_its_mistake(http, content, message):
    answer = http.post("/v1/completions", content=content, headers=JSON)

    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


def test_a_client_that_goes_away_while_it_sends_leaves_nothing(checkpoint, tmp_path):
    with guarded(checkpoint, tmp_path) as address:
        for _ in range(40):  # more than may be held at a time
            begun(address, BOB, MAX_BYTES - 1).close()
        answer = httpx.post(
            f"{address}/v1/embeddings", json={"model": NAME, "input": "a" * 30}, headers=with_key(BOB), timeout=WAIT
        )
        assert answer.status_code == 200
