"""Uploads: a form that is no text stores nothing, and no tenant's uploads take the places of another's."""

from __future__ import annotations

import contextlib
import socket

import httpx
import openai
import pytest

from jaxinfer.serve.batches import routes
from tests.serve.servers import WAIT, until
from tests.serve.test_batches import ANN, BOB, openai_client, two_tenants, with_files


@pytest.mark.parametrize(
    ("charset", "name"),
    [
        ("utf-7", b"+2AA-"),
        ("unicode_escape", b"\\ud800"),
        ("utf-16", b"a"),
        ("no-such", b"a"),
        ("rot13", b"a"),
        ("", b"a"),
    ],
)
def test_a_form_in_a_charset_that_may_yield_no_text_is_refused_and_nothing_is_stored(
    checkpoint, tmp_path, charset, name
):
    with with_files(checkpoint, tmp_path) as (_, address), httpx.Client(base_url=address, timeout=WAIT) as http:
        answer = http.post("/v1/files", content=form(name), headers=form_type(f"; charset={charset}"))

        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
        assert list((tmp_path / "files/files").iterdir()) == []
        for kind in ("utf-8", "ISO-8859-1", "us-ascii"):
            answer = http.post("/v1/files", content=form(b"a.jsonl"), headers=form_type(f"; charset={kind}"))
            assert answer.json()["filename"] == "a.jsonl"


def form(name: bytes) -> bytes:
    purpose = b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    file = b'--x\r\nContent-Disposition: form-data; name="file"; filename="' + name + b'"\r\n\r\n{}\r\n'
    return purpose + file + b"--x--\r\n"


def form_type(more: str = "") -> dict[str, str]:
    return {"Content-Type": f"multipart/form-data; boundary=x{more}"}


def stalled(address: str, key: str) -> socket.socket:
    """A connection with the beginning of an upload, of which no more comes."""
    host, port = address.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    head = f"POST /v1/files HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {key}\r\nContent-Length: 10000\r\n"
    connection.sendall(f"{head}Content-Type: multipart/form-data; boundary=x\r\n\r\n--x\r\n".encode())
    return connection


def test_uploads_of_one_tenant_take_no_place_of_another(checkpoint, tmp_path):
    clients = two_tenants(tmp_path)
    with (
        with_files(checkpoint, tmp_path, clients=clients) as (_, address),
        openai_client(address, ANN) as ann,
        openai_client(address, BOB) as bob,
        contextlib.ExitStack() as held_open,
    ):
        for _ in range(routes.MAX_UPLOADS):
            held_open.enter_context(contextlib.closing(stalled(address, ANN)))
        until(lambda: clients[0].num_in_flight == routes.MAX_UPLOADS)

        with pytest.raises(openai.RateLimitError, match="files are being uploaded"):
            until(lambda: ann.files.create(file=("a", b"{}"), purpose="batch") and False)

        assert bob.files.create(file=("a", b"{}"), purpose="batch").bytes == 2
        held_open.close()
        until(lambda: clients[0].num_in_flight == 0)
        assert ann.files.create(file=("a", b"{}"), purpose="batch").bytes == 2


def test_an_upload_that_makes_no_progress_gives_its_place_back(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(routes, "STALL_SECONDS", 0.2)
    with (
        with_files(checkpoint, tmp_path) as (_, address),
        contextlib.closing(stalled(address, "none")) as connection,
    ):
        connection.settimeout(WAIT)
        assert connection.recv(100).startswith(b"HTTP/1.1 408")


def test_a_damaged_file_is_not_given_out(checkpoint, tmp_path):
    with with_files(checkpoint, tmp_path) as (_, address), openai_client(address) as client:
        file = client.files.create(file=("a", b"{}"), purpose="batch")
        (tmp_path / f"files/files/{file.id}.content").write_bytes(b"[]")
        with pytest.raises(openai.InternalServerError, match=f"{file.id} is damaged"):
            client.files.content(file.id)
