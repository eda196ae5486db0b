"""Files and batches by the official client: they equal `LLM`, survive a kill, and are their tenant's alone."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from jaxinfer.batch_job.job import Refusal
from jaxinfer.config import SamplingParams
from jaxinfer.serve.access import Client, read_clients
from jaxinfer.serve.batches import batches, engine, file_store
from jaxinfer.serve.batches.file_store import FileStore
from tests.engine.engines import small_async_engine
from tests.serve.servers import NAME, WAIT, server_process, serving, until
from tests.serve.test_server import held

COMPLETIONS: Any = "/v1/completions"
CHATS: Any = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")


def line(custom_id: str, endpoint: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    body = {"model": NAME, "temperature": 1.0, "max_tokens": 6, **body}
    if endpoint == COMPLETIONS:
        body.setdefault("prompt", "hello")
    return {"custom_id": custom_id, "method": "POST", "url": endpoint, "body": body}


def begin(client: openai.OpenAI, lines: Sequence[Any], endpoint: Any = COMPLETIONS, **options: Any) -> Any:
    content = "\n".join(json.dumps(entry) for entry in lines).encode()
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **options)


def ended(client: openai.OpenAI, batch: Any) -> Any:
    def get() -> Any:
        found: Any = client.batches.retrieve(batch.id)
        return found if found.status in ENDED else None

    return until(get)


def num_completed(client: openai.OpenAI, batch: Any) -> int:
    counts = client.batches.retrieve(batch.id).request_counts
    assert counts is not None
    return counts.completed


def records(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(raw) for raw in client.files.content(file_id).content.splitlines()]


@contextlib.contextmanager
def with_files(
    checkpoint: Any, folder: Any, *, max_file_bytes: int = 2**16, clients: Sequence[Client] = (), **config: Any
) -> Iterator[tuple[Any, str]]:
    llm = small_async_engine(checkpoint, **config)
    store = FileStore(folder / "files", max_file_bytes=max_file_bytes)
    with serving(llm, store=store, clients=clients) as (_, address):
        yield llm, address


def openai_client(address: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0, timeout=WAIT)


def test_results_are_those_of_llm_in_the_order_of_the_lines(client, llm):
    lines = [
        line("text", seed=3),
        line("ids", prompt=[5, 6, 7], n=2, seed=4),
        line("wrong", temperatur=1),
        line("greedy", temperature=0, logprobs=2),
        line("other model", model="gpt"),
        line("long", prompt="a" * 90 + "b" * 90),
    ]
    (text,) = llm.generate("hello", SamplingParams(temperature=1.0, max_tokens=6, seed=3), show_progress=False)
    params = SamplingParams(temperature=1.0, max_tokens=6, seed=4, n=2)
    samples = llm.generate([5, 6, 7], params, show_progress=False)

    batch = begin(client, lines, metadata={"for": "a test"})
    assert (batch.status, batch.object, batch.completion_window) == ("validating", "batch", "24h")
    batch = ended(client, batch)

    assert (batch.status, batch.metadata, batch.errors) == ("completed", {"for": "a test"}, None)
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (6, 3, 3)
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at < batch.expires_at
    results = records(client, batch.output_file_id)
    assert [result["custom_id"] for result in results] == ["text", "ids", "greedy"]
    assert all(result.keys() == {"id", "custom_id", "response", "error"} for result in results)
    bodies = [openai.types.Completion.model_validate(result["response"]["body"]) for result in results]
    assert bodies[0].choices[0].text == text.text
    assert [choice.text for choice in bodies[1].choices] == [sample.text for sample in samples]
    failed = records(client, batch.error_file_id)
    assert [failure["custom_id"] for failure in failed] == ["wrong", "other model", "long"]
    assert [failure["response"]["status_code"] for failure in failed] == [400, 404, 400]
    codes = [failure["response"]["body"]["error"]["code"] for failure in failed]
    assert codes == [None, "model_not_found", "context_length_exceeded"]


def test_conversations_have_the_servers_template_and_the_answers_of_its_route(client):
    messages: Any = [{"role": "user", "content": "hello"}]
    lines = [line("a", CHATS, messages=messages, seed=5), line("b", CHATS, messages=messages, chat_template="x")]

    batch = ended(client, begin(client, lines, CHATS))

    (result,), (failed,) = records(client, batch.output_file_id), records(client, batch.error_file_id)
    answer = client.chat.completions.create(model=NAME, messages=messages, seed=5, temperature=1.0, max_tokens=6)
    assert result["response"]["body"]["choices"][0]["message"]["content"] == answer.choices[0].message.content
    assert "--allow-chat-templates" in failed["response"]["body"]["error"]["message"]


def test_files_are_listed_described_read_and_deleted(checkpoint, tmp_path):
    with with_files(checkpoint, tmp_path) as (_, address), openai_client(address) as client:
        files = [client.files.create(file=(f"{i}.jsonl", b"{}" * i), purpose="batch") for i in range(3)]

        assert [(file.bytes, file.filename, file.status) for file in files] == [
            (0, "0.jsonl", "processed"),
            (2, "1.jsonl", "processed"),
            (4, "2.jsonl", "processed"),
        ]
        ids = [file.id for file in files]
        assert [file.id for file in client.files.list()] == ids[::-1]
        assert [file.id for file in client.files.list(order="asc", limit=1)] == ids  # over three pages
        assert [file.id for file in client.files.list(order="asc", after=ids[1]).data] == ids[2:]
        assert client.files.list(purpose="batch_output").data == []
        assert client.files.retrieve(ids[1]) == files[1]
        assert client.files.content(ids[2]).content == b"{}{}"
        assert client.files.delete(ids[2]).deleted
        for call in (client.files.retrieve, client.files.content, client.files.delete):
            with pytest.raises(openai.NotFoundError):
                call(ids[2])
        assert (tmp_path / "files").stat().st_mode & 0o077 == 0
        assert sorted(path.stem for path in (tmp_path / "files/files").glob("*.content")) == sorted(ids[:2])


@pytest.mark.parametrize(
    ("content", "code", "number"),
    [
        (b"", "empty_file", None),
        (b"{}\n{", "missing_required_parameter", 1),
        (json.dumps(line("a")).encode() + b"\nx", "invalid_json_line", 2),
        (json.dumps(line("a", CHATS, messages=[])).encode(), "mismatched_endpoint", 1),
        (b"\n".join([json.dumps(line("a")).encode()] * 2), "duplicate_custom_id", 2),
        (json.dumps({**line("a"), "method": "GET"}).encode(), "invalid_method", 1),
        (json.dumps({**line("a"), "more": 1}).encode(), "unknown_parameter", 1),
        (json.dumps({**line("a"), "custom_id": 1}).encode(), "invalid_custom_id", 1),
        (json.dumps({**line("a"), "body": []}).encode(), "invalid_body", 1),
        (json.dumps([line("a")]).encode(), "invalid_file", None),
        (b"\x1f\x8b\x08\0", "invalid_file", None),
    ],
)
def test_an_input_that_is_wrong_fails_as_a_whole_with_its_lines(client, content, code, number):
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h")
    batch = ended(client, batch)

    assert (batch.status, batch.output_file_id, batch.error_file_id) == ("failed", None, None)
    assert (batch.errors.data[0].code, batch.errors.data[0].line) == (code, number)
    assert "/" not in batch.errors.data[0].message.replace(COMPLETIONS, "").replace(CHATS, "")
    assert batch.failed_at is not None


def test_more_lines_than_the_bound_fail(client, monkeypatch):
    monkeypatch.setattr("jaxinfer.serve.batches.input.MAX_LINES", 2)
    batch = ended(client, begin(client, [line(str(i)) for i in range(3)]))
    assert batch.errors.data[0].code == "too_many_lines"


def test_batches_are_listed_from_the_newest(checkpoint, tmp_path):
    with with_files(checkpoint, tmp_path) as (_, address), openai_client(address) as client:
        ids = [begin(client, [line("a")]).id for _ in range(3)]

        assert [batch.id for batch in client.batches.list(limit=2)] == ids[::-1]  # over two pages
        page = client.batches.list(limit=1, after=ids[2])
        assert ([batch.id for batch in page.data], page.has_more) == ([ids[1]], True)
        with pytest.raises(openai.BadRequestError):
            client.batches.list(after="batch_of_another")
        for batch_id in ids:
            assert ended(client, client.batches.retrieve(batch_id)).status == "completed"


def test_a_cancelled_batch_has_the_results_so_far(checkpoint, tmp_path):
    with with_files(checkpoint, tmp_path) as (llm, address), openai_client(address) as client:
        lines = [line("short", max_tokens=1), *(line(str(i), max_tokens=80, ignore_eos=True) for i in range(200))]
        batch = begin(client, lines)
        until(lambda: num_completed(client, batch))
        with pytest.raises(openai.BadRequestError, match="is the input of"):
            client.files.delete(batch.input_file_id)

        assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")

        batch = ended(client, batch)
        assert batch.status == "cancelled"
        assert batch.cancelling_at <= batch.cancelled_at
        results = records(client, batch.output_file_id)
        assert results[0]["custom_id"] == "short"
        assert batch.request_counts.completed == len(results) < 200
        until(lambda: llm.metrics().num_running == llm.metrics().num_waiting == 0)
        assert llm.metrics().num_owned_pages == 0
        with pytest.raises(openai.BadRequestError, match="cannot be cancelled"):
            client.batches.cancel(batch.id)


def test_an_expired_batch_answers_every_line(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(batches, "WINDOW_SECONDS", 0)
    with with_files(checkpoint, tmp_path) as (_, address), openai_client(address) as client:
        batch = ended(client, begin(client, [line("a"), line("b")]))

        assert (batch.status, batch.output_file_id, batch.request_counts.failed) == ("expired", None, 2)
        failed = records(client, batch.error_file_id)
        assert [record["custom_id"] for record in failed] == ["a", "b"]
        assert {(record["response"], record["error"]["code"]) for record in failed} == {(None, "batch_expired")}


def test_interactive_requests_go_first(checkpoint, tmp_path):
    with with_files(checkpoint, tmp_path, max_waiting=8) as (llm, address), openai_client(address) as client:
        batch = begin(client, [line(str(i), max_tokens=80, ignore_eos=True) for i in range(100)])
        until(lambda: llm.metrics().num_running == 4)

        for _ in range(3):
            client.completions.create(model=NAME, prompt="hello", max_tokens=4)

        assert num_completed(client, batch) < 50
        client.batches.cancel(batch.id)
        ended(client, batch)


def test_a_full_queue_holds_a_batch_up_and_loses_no_line(checkpoint, tmp_path, monkeypatch):
    refusals = []
    monkeypatch.setattr(engine, "Refusal", lambda *place: refusals.append(place) or Refusal(*place))
    with with_files(checkpoint, tmp_path, max_waiting=0) as (_, address), openai_client(address) as client:
        long = client.completions.create(
            model=NAME, prompt=["a"] * 4, max_tokens=80, extra_body={"ignore_eos": True}, stream=True
        )
        batch = begin(client, [line(str(i), n=3) for i in range(8)])
        assert sum(chunk.choices[0].finish_reason is not None for chunk in long) == 4
        batch = ended(client, batch)

        assert (batch.status, batch.request_counts.completed) == ("completed", 8)
        assert refusals


ANN, BOB = "key-of-ann-0123456789", "key-of-bob-0123456789"


def two_tenants(folder: Path) -> list[Client]:
    """Writes a file with the keys of two tenants, and returns their clients."""
    (folder / "keys").write_text("\n".join(json.dumps({"key": k, "tenant": t}) for k, t in ((ANN, "a"), (BOB, "b"))))
    return read_clients(folder / "keys")


def test_a_tenant_sees_its_own_files_and_batches_alone(checkpoint, tmp_path):
    clients = two_tenants(tmp_path)
    with (
        with_files(checkpoint, tmp_path, clients=clients) as (_, address),
        openai_client(address, ANN) as ann,
        openai_client(address, BOB) as bob,
    ):
        clients[0].tokens_per_minute = 1e9
        batch = ended(ann, begin(ann, [line("a"), line("b", user="b"), line("c", n=0)]))

        assert (batch.request_counts.completed, batch.request_counts.failed) == (2, 1)  # the key decides the tenant
        assert sum(count for _, count in clients[0]._used) >= 6
        for file_id in (batch.input_file_id, batch.output_file_id, batch.error_file_id):
            assert ann.files.retrieve(file_id).id == file_id
            for call in (bob.files.retrieve, bob.files.content, bob.files.delete):
                with pytest.raises(openai.NotFoundError):
                    call(file_id)
        for call in (bob.batches.retrieve, bob.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                call(batch.id)
        with pytest.raises(openai.NotFoundError):
            bob.batches.create(input_file_id=batch.input_file_id, endpoint=COMPLETIONS, completion_window="24h")
        assert (list(bob.files.list()), list(bob.batches.list())) == ([], [])
        assert len(list(ann.files.list())) == 3
        assert {httpx.get(f"{address}/v1/{path}").status_code for path in ("files", "batches")} == {401}


def test_a_key_that_has_used_its_tokens_holds_up_its_batch(checkpoint, tmp_path):
    keys = [{"key": key, "tenant": "a"} for key in (ANN, BOB)]
    (tmp_path / "keys").write_text("\n".join(map(json.dumps, keys)))
    ann, _ = clients = read_clients(tmp_path / "keys")
    with (
        with_files(checkpoint, tmp_path, clients=clients) as (llm, address),
        openai_client(address, ANN) as client,
        openai_client(address, BOB) as other,
    ):
        file = client.files.create(
            file=("a", "\n".join(json.dumps(line(str(i))) for i in range(12)).encode()), purpose="batch"
        )
        with held(llm):
            batch = client.batches.create(input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h")
            until(lambda: llm._thread._commands.qsize() == 4)  # as many as there are rows
            ann.tokens_per_minute = 5
            ann.count(5)
        until(lambda: num_completed(other, batch) >= 4 and not llm.metrics().num_running)
        assert num_completed(other, batch) == 4
        ann.tokens_per_minute = 1e9

        assert ended(client, batch).request_counts.completed == 12


BODIES = [
    ({"input_file_id": "file-0", "endpoint": COMPLETIONS, "completion_window": "24h"}, 404, "input_file_id"),
    ({"input_file_id": "../../etc/passwd", "endpoint": COMPLETIONS, "completion_window": "24h"}, 404, "input_file_id"),
    ({"input_file_id": "file-0", "endpoint": "/v1/embeddings", "completion_window": "24h"}, 400, "endpoint"),
    ({"input_file_id": "file-0", "endpoint": COMPLETIONS, "completion_window": "1h"}, 400, "completion_window"),
    ({"input_file_id": "file-0", "endpoint": COMPLETIONS, "completion_window": "24h", "x": 1}, 400, "x"),
    (
        {"input_file_id": "f", "endpoint": COMPLETIONS, "completion_window": "24h", "metadata": {"a": "b" * 513}},
        400,
        "metadata",
    ),
    (
        {"input_file_id": "f", "endpoint": COMPLETIONS, "completion_window": "24h", "output_expires_after": {}},
        400,
        "output_expires_after",
    ),
]


@pytest.mark.parametrize(("body", "status", "param"), BODIES)
def test_a_batch_that_cannot_be_begun_is_refused(http, body, status, param):
    answer = http.post("/v1/batches", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


FILE = {"file": ("a.jsonl", b"{}")}
FORMS = [
    ({"data": {"purpose": "batch"}}, "upload the file as multipart/form-data"),
    ({"files": FILE}, "one file and one purpose"),
    ({"files": FILE, "data": {"purpose": "fine-tune"}}, "purpose 'fine-tune' cannot be honoured"),
    ({"files": FILE, "data": {"purpose": "batch", "expires_after[seconds]": "9"}}, "'expires_after[seconds]' cannot"),
    ({"files": [("file", FILE["file"])] * 2, "data": {"purpose": "batch"}}, "Too many files"),
    ({"files": {"purpose": FILE["file"]}, "data": {"file": "a"}}, "file is no file"),
    ({"data": {f"a{i}": "b" for i in range(99)}, "files": FILE}, "Too many fields"),
    ({"data": {"purpose": "a" * 100_000}, "files": FILE}, "exceeded maximum size"),
    ({"content": b"--a\r\nx", "headers": {"Content-Type": "multipart/form-data"}}, "Missing boundary"),
]


@pytest.mark.parametrize(("form", "message"), FORMS)
def test_a_form_that_is_no_upload_is_refused(http, form, message):
    answer = http.post("/v1/files", **({"headers": {}} | form))
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/files?limit=0", "/v1/files?x=1", "/v1/batches?limit=101", "/v1/batches?after=b"])
def test_a_query_that_cannot_be_honoured_is_refused(http, path):
    assert http.get(path).status_code == 400


@pytest.mark.parametrize("file_id", ["..%2f..%2fbatches", "%2e%2e", "lock", "file-%00", "a" * 5000])
def test_no_id_leads_out_of_the_folder(http, file_id):
    for path in (f"/v1/files/{file_id}", f"/v1/files/{file_id}/content", f"/v1/batches/{file_id}"):
        assert http.get(path).status_code == 404
    assert http.delete(f"/v1/files/{file_id}").status_code == 404


def test_bounds_of_files_are_kept(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(file_store, "MAX_FILES", 3)
    with with_files(checkpoint, tmp_path, max_file_bytes=500) as (_, address), openai_client(address) as client:
        for size in (501, 500_000):
            with pytest.raises(openai.APIStatusError) as error:
                client.files.create(file=("a", b"a" * size), purpose="batch")
            assert error.value.status_code == 413
        batch = ended(client, begin(client, [line("a")]))
        assert batch.status == "completed"
        second = client.files.create(file=("a", b"{}"), purpose="batch")
        with pytest.raises(openai.BadRequestError, match="delete some"):
            client.files.create(file=("a", b"{}"), purpose="batch")
        with pytest.raises(openai.BadRequestError, match="delete some"):  # its outputs would have no room
            client.batches.create(input_file_id=second.id, endpoint=COMPLETIONS, completion_window="24h")
        client.files.delete(batch.output_file_id)
        monkeypatch.setattr(file_store, "MAX_TENANT_BYTES", 300)
        with pytest.raises(openai.BadRequestError, match="may have 300 bytes"):
            client.files.create(file=("a", io.BytesIO(b"a" * 400)), purpose="batch")


def test_the_oldest_batches_are_forgotten(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(batches, "MAX_BATCHES", 2)
    with with_files(checkpoint, tmp_path) as (_, address), openai_client(address) as client:
        ids = [ended(client, begin(client, [line("a")])).id for _ in range(3)]
        assert [batch.id for batch in client.batches.list()] == ids[:0:-1]


def test_without_a_folder_the_routes_name_the_option(checkpoint):
    with serving(small_async_engine(checkpoint)) as (_, address), httpx.Client(base_url=address) as http:
        for answer in (http.get("/v1/files"), http.get("/v1/batches/a"), http.post("/v1/files")):
            assert answer.status_code == 404
            assert "--files" in answer.json()["error"]["message"]


def test_a_folder_has_one_server(tmp_path):
    first = FileStore(tmp_path, max_file_bytes=1)
    with pytest.raises(ValueError, match="another server uses"):
        FileStore(tmp_path, max_file_bytes=1)
    first.close()
    FileStore(tmp_path, max_file_bytes=1).close()


def test_a_server_that_ends_leaves_its_batches_to_the_next(checkpoint, tmp_path):
    lines = [line(str(i), max_tokens=30, ignore_eos=True) for i in range(12)]
    with with_files(checkpoint, tmp_path) as (_, address), openai_client(address) as client:
        batch = begin(client, lines)
        until(lambda: num_completed(client, batch))
    with with_files(checkpoint, tmp_path) as (_, address), openai_client(address) as client:
        again = ended(client, batch)
        undisturbed = ended(client, begin(client, lines))

        assert again.status == undisturbed.status == "completed"
        contents = [client.files.content(b.output_file_id).content for b in (again, undisturbed)]
        assert contents[0] == contents[1]


def test_a_batch_does_not_go_on_with_another_model_and_keeps_its_results(checkpoint, tmp_path):
    lines = [line(str(i), max_tokens=30, ignore_eos=True) for i in range(12)]
    with with_files(checkpoint, tmp_path) as (_, address), openai_client(address) as client:
        batch = begin(client, lines)
        until(lambda: num_completed(client, batch))
    with with_files(checkpoint, tmp_path, max_model_len=64) as (_, address), openai_client(address) as client:
        batch = ended(client, batch)

        assert (batch.status, batch.errors.data[0].code) == ("failed", "job_refused")
        assert "was made with max_model_len=96, and this run has max_model_len=64" in batch.errors.data[0].message
        assert str(tmp_path) not in batch.errors.data[0].message
        assert 1 <= len(records(client, batch.output_file_id)) == batch.request_counts.completed < 12


def test_a_server_that_is_killed_goes_on_at_the_same_port_and_finishes_its_batches(checkpoint, tmp_path):
    lines = [line(str(i), max_tokens=10 + i % 40, ignore_eos=True) for i in range(24)] + [line("wrong", top=1)]
    options = ["--files", str(tmp_path / "files")]
    with server_process(checkpoint, tmp_path, *options, "--port", "0") as (server, address):
        with openai_client(address) as client:
            batch = begin(client, lines)
            until(lambda: num_completed(client, batch) >= 3)
        server.kill()
        assert server.wait(WAIT) == -9
    assert 3 <= (tmp_path / "files/batches" / f"{batch.id}.jsonl").read_bytes().count(b"\n") < 24

    port = address.rsplit(":", 1)[1]
    with (
        server_process(checkpoint, tmp_path, *options, "--port", port) as (_, address),
        openai_client(address) as client,
    ):
        answer = client.completions.create(model=NAME, prompt="hello", seed=1, max_tokens=4)
        assert answer.choices[0].finish_reason == "length"
        again = ended(client, batch)
        undisturbed = ended(client, begin(client, lines))

        assert (again.status, again.request_counts) == ("completed", undisturbed.request_counts)
        for kind in ("output_file_id", "error_file_id"):
            contents = [client.files.content(getattr(b, kind)).content for b in (again, undisturbed)]
            assert contents[0] == contents[1]
