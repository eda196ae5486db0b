"""Batches whose journals are damaged, whose machine lacks something for a while, or whose clock is set anew."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.batch_job import output as output_module
from jaxinfer.openai.errors import RefusedError
from jaxinfer.serve.access import Client
from jaxinfer.serve.batches import batches as batches_module
from jaxinfer.serve.batches.batches import Batches
from jaxinfer.serve.batches.file_store import FileStore, Objects
from jaxinfer.serve.state import ServerState
from tests.engine.engines import small_async_engine
from tests.serve.servers import NAME, until

ENDED = ("completed", "failed", "expired", "cancelled")
NUM_LINES = 12
LINES = b"".join(
    json.dumps(
        {
            "custom_id": f"c{i}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": NAME, "prompt": f"p{i}", "max_tokens": 8, "ignore_eos": True, "temperature": 1.0},
        }
    ).encode()
    + b"\n"
    for i in range(NUM_LINES)
)


@pytest.fixture(scope="module")
def async_llm(checkpoint):
    return small_async_engine(checkpoint)


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Batches are tried again soon."""
    monkeypatch.setattr(batches_module, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(batches_module, "RETRY_SECONDS", 0.05)


@contextlib.contextmanager
def begun(llm: Any, folder: Path, clients: Any = ()) -> Iterator[Batches]:
    batches = Batches(ServerState(llm=llm, names=[NAME]), FileStore(folder, max_file_bytes=2**20), clients)
    batches.start()
    try:
        yield batches
    finally:
        batches.close()


def create(batches: Batches, tenant: str | None = None, key: str | None = None) -> str:
    file = batches.upload(io.BytesIO(LINES), len(LINES), "in.jsonl", tenant)
    return batches.create(file.id, "/v1/completions", None, tenant, key).id


def ended(batches: Batches, batch_id: str, tenant: str | None = None) -> Any:
    return until(lambda: (b := batches.find(batch_id, tenant)).status in ENDED and b)


def content(batches: Batches, file_id: str | None) -> bytes:
    return b"" if file_id is None else batches.store.path(batches.store.find(file_id, None)).read_bytes()


def num_done(batches: Batches, batch_id: str) -> int:
    return batches.find(batch_id, None).request_counts.completed


@pytest.fixture(scope="module")
def undisturbed(async_llm, tmp_path_factory) -> bytes:
    with begun(async_llm, tmp_path_factory.mktemp("undisturbed")) as batches:
        batch = ended(batches, create(batches))
        assert (batch.status, batch.request_counts.completed) == ("completed", NUM_LINES)
        return content(batches, batch.output_file_id)


@pytest.fixture(scope="module")
def half_done(async_llm, tmp_path_factory) -> tuple[Path, str]:
    """A folder in which a server has left a batch, whose first records are there."""
    folder = tmp_path_factory.mktemp("half")
    with begun(async_llm, folder) as batches:
        batch_id = create(batches)
        until(lambda: num_done(batches, batch_id) >= 4)
    assert (folder / f"batches/{batch_id}.jsonl").read_bytes().count(b"\n") < NUM_LINES
    return folder, batch_id


def first(raw: bytes) -> bytes:
    return raw.splitlines(keepends=True)[0]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "zeros at the end": lambda raw: raw + bytes(512),
    "a record cut in the middle": lambda raw: raw[40:],
    "a record twice": lambda raw: first(raw) + raw,
    "binary": lambda raw: b"\xff\xfe" * 100,
    "another text": lambda raw: raw.replace(b'"text": "', b'"text": "Q', 1),
    "another custom_id": lambda raw: raw.replace(b'"custom_id": "c', b'"custom_id": "d', 1),
    "half a record at the end": lambda raw: raw[:-20],
    "nothing": lambda raw: b"",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_journal_is_taken_as_far_as_it_is_sound_and_the_batch_ends_whole(
    async_llm, half_done, undisturbed, tmp_path, damage
):
    source, batch_id = half_done
    shutil.copytree(source, tmp_path / "x")
    journal = tmp_path / f"x/batches/{batch_id}.jsonl"
    journal.write_bytes(DAMAGES[damage](journal.read_bytes()))

    with begun(async_llm, tmp_path / "x") as batches:
        batch = ended(batches, batch_id)

        assert (batch.status, batch.request_counts.completed) == ("completed", NUM_LINES)
        assert content(batches, batch.output_file_id) == undisturbed
    kept = [path.name for path in (tmp_path / "x/lost").iterdir()]
    is_usual = damage in ("half a record at the end", "nothing")  # as a kill leaves it
    assert kept == ([] if is_usual else [f"{batch_id}.jsonl.damaged"])


def test_a_damaged_journal_does_not_keep_a_batch_from_being_cancelled(async_llm, half_done, tmp_path):
    source, batch_id = half_done
    shutil.copytree(source, tmp_path / "x")
    journal = tmp_path / f"x/batches/{batch_id}.jsonl"
    num_records = journal.read_bytes().count(b"\n")
    journal.write_bytes(journal.read_bytes() + b"\0" * 100 + b"\n")
    batches = Batches(ServerState(llm=async_llm, names=[NAME]), FileStore(tmp_path / "x", max_file_bytes=2**20), [])
    batches.cancel(batch_id, None)

    batches.start()
    batch = ended(batches, batch_id)
    batches.close()

    assert (batch.status, batch.request_counts.completed) == ("cancelled", num_records)


INPUTS = {
    "another line": lambda path: path.write_bytes(LINES.replace(b"p0", b"p9")),
    "cut": lambda path: path.write_bytes(LINES[:100]),
    "none": lambda path: path.unlink(),
}


@pytest.mark.parametrize("damage", INPUTS)
def test_a_batch_whose_input_is_damaged_fails_with_the_reason_and_keeps_its_results(
    async_llm, half_done, tmp_path, damage
):
    source, batch_id = half_done
    shutil.copytree(source, tmp_path / "x")
    (path,) = (tmp_path / "x/files").glob("*.content")
    INPUTS[damage](path)

    with begun(async_llm, tmp_path / "x") as batches:
        batch = ended(batches, batch_id)

        assert (batch.status, batch.errors.data[0].code) == ("failed", "invalid_file")
        assert 4 <= content(batches, batch.output_file_id).count(b"\n") == batch.request_counts.completed
        assert ended(batches, create(batches)).status == "completed"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EMFILE, errno.EIO])
@pytest.mark.parametrize("place", ["record", "open", "object"])
def test_a_batch_goes_on_when_the_machine_has_again_what_it_lacked(
    async_llm, undisturbed, tmp_path, monkeypatch, code, place
):
    """No room or no descriptors: while a record is written, a journal is opened, or the end is stored."""
    num_failures, is_lacking = [0], threading.Event()

    def failing(function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            if is_lacking.is_set():
                num_failures[0] += 1
                raise OSError(code, "lacking")
            return function(*arguments, **options)

        return call

    with begun(async_llm, tmp_path) as batches:
        if place == "record":
            monkeypatch.setattr(output_module.OutputFile, "append", failing(output_module.OutputFile.append))
        elif place == "open":
            monkeypatch.setattr(batches_module, "run_job", failing(batches_module.run_job))
        batch_id = create(batches)
        if place == "object":
            monkeypatch.setattr(Objects, "save", failing(Objects.save))
        is_lacking.set()
        until(lambda: num_failures[0] >= 2)  # it is tried again meanwhile
        assert batches.find(batch_id, None).status not in ENDED
        is_lacking.clear()

        batch = ended(batches, batch_id)

        assert batch.status == "completed"
        assert content(batches, batch.output_file_id) == undisturbed
        assert ended(batches, create(batches)).status == "completed"


def test_the_wait_for_another_try_grows_and_has_a_bound(async_llm, tmp_path, monkeypatch):
    monkeypatch.setattr(batches_module, "MAX_RETRY_SECONDS", 0.2)
    waits = []

    def fail(*_: Any, **__: Any) -> None:
        waits.append(batches._retries.get(batch_id, (0.0, 0.0))[1])
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(batches_module, "run_job", fail)
    with begun(async_llm, tmp_path) as batches:
        with batches._lock:
            batch_id = create(batches)
        until(lambda: len(waits) >= 5)
    assert waits[:5] == [0.0, 0.05, 0.1, 0.2, 0.2]


def test_a_batch_that_waits_for_another_try_can_be_cancelled_and_holds_up_no_other(async_llm, tmp_path, monkeypatch):
    monkeypatch.setattr(batches_module, "RETRY_SECONDS", 1000.0)
    monkeypatch.setattr(batches_module, "MAX_RETRY_SECONDS", 1000.0)
    run = batches_module.run_job
    failures = [OSError(errno.ENOSPC, "full")]
    monkeypatch.setattr(batches_module, "run_job", lambda *a, **k: _raise(failures.pop()) if failures else run(*a, **k))
    with begun(async_llm, tmp_path) as batches:
        batch_id = create(batches)
        until(lambda: not failures)

        assert ended(batches, create(batches)).status == "completed"
        batches.cancel(batch_id, None)

        assert ended(batches, batch_id).status == "cancelled"


def _raise(error: Exception) -> None:
    raise error


def test_an_error_that_would_come_again_ends_the_batch_alone(async_llm, tmp_path, monkeypatch):
    run = batches_module.run_job
    failures = [TypeError("a defect")]
    monkeypatch.setattr(batches_module, "run_job", lambda *a, **k: _raise(failures.pop()) if failures else run(*a, **k))
    with begun(async_llm, tmp_path) as batches:
        batch = ended(batches, create(batches))
        assert (batch.status, batch.errors.data[0].code) == ("failed", "server_error")
        assert ended(batches, create(batches)).status == "completed"


def test_a_thread_that_cannot_be_started_stops_no_batch_for_good(async_llm, tmp_path, monkeypatch):
    failures = [RuntimeError("can't start new thread"), MemoryError()]
    start = threading.Thread.start

    def failing(thread: threading.Thread) -> None:
        if thread.name.startswith("batch_") and failures:
            raise failures.pop()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", failing)
    with begun(async_llm, tmp_path) as batches:
        assert ended(batches, create(batches)).status == "completed"
    assert not failures


@pytest.mark.parametrize("days", [2, -2])
def test_a_clock_that_is_set_anew_ends_no_batch(async_llm, tmp_path, monkeypatch, days):
    now = time.time
    with begun(async_llm, tmp_path) as batches:
        batch_id = create(batches)
        monkeypatch.setattr(batches_module.time, "time", lambda: now() + days * 86400)
        assert ended(batches, batch_id).status == "completed"


def test_a_batch_expires_after_a_new_start_by_the_time_since_it_was_made(async_llm, half_done, tmp_path, monkeypatch):
    source, batch_id = half_done
    shutil.copytree(source, tmp_path / "x")
    now = time.time
    monkeypatch.setattr(batches_module.time, "time", lambda: now() + 86400)

    with begun(async_llm, tmp_path / "x") as batches:
        batch = ended(batches, batch_id)

        assert batch.status == "expired"
        assert batch.request_counts.completed + batch.request_counts.failed == NUM_LINES


def test_requests_are_refused_with_the_reason_while_the_disk_is_full(async_llm, tmp_path, monkeypatch):
    with begun(async_llm, tmp_path) as batches:
        file = batches.upload(io.BytesIO(LINES), len(LINES), "in.jsonl", None)
        monkeypatch.setattr(Objects, "save", lambda *_: _raise(OSError(errno.ENOSPC, "No space left on device")))
        for call in (
            lambda: batches.upload(io.BytesIO(LINES), len(LINES), "in.jsonl", None),
            lambda: batches.create(file.id, "/v1/completions", None, None),
        ):
            with pytest.raises(RefusedError, match="No space left on device") as error:
                call()
            assert error.value.status == 503
        assert [path.stem for path in (tmp_path / "files").glob("*.content")] == [file.id]


def test_a_batch_counts_for_the_key_that_has_made_it(async_llm, tmp_path):
    one, two = clients = [Client(digest=bytes([i]) * 32, tenant="a", tokens_per_minute=1e9) for i in (1, 2)]
    one.tokens_per_minute = 1
    one.count(1)  # so that its batches wait

    with begun(async_llm, tmp_path, clients) as batches:
        batch = ended(batches, create(batches, "a", two.name), "a")

    assert (batch.status, batch.request_counts.completed) == ("completed", NUM_LINES)
    assert sum(count for _, count in two._used) >= NUM_LINES * 8
    assert sum(count for _, count in one._used) == 1


def test_a_batch_whose_key_is_gone_counts_for_another_of_its_tenant(async_llm, tmp_path):
    client = Client(digest=bytes(32), tenant="a", tokens_per_minute=1e9)
    with begun(async_llm, tmp_path, [client]) as batches:
        assert ended(batches, create(batches, "a", "a key of before"), "a").status == "completed"
    assert sum(count for _, count in client._used) >= NUM_LINES * 8


def test_a_request_that_the_engine_refuses_late_fails_alone(async_llm, tmp_path, monkeypatch):
    """As for an adapter that is unloaded between the check of a request and its turn."""
    submit, refused = async_llm.engine_thread.submit, []

    def submit_but_one(samples: Any, sink: Any) -> None:
        if refused:
            submit(samples, sink)
        else:
            refused.append(samples)
            sink(ValueError("adapter='poet' is not loaded; load it first"))

    monkeypatch.setattr(async_llm.engine_thread, "submit", submit_but_one)
    with begun(async_llm, tmp_path) as batches:
        batch = ended(batches, create(batches))

        assert (batch.status, batch.request_counts.failed) == ("completed", 1)
        failed = json.loads(content(batches, batch.error_file_id))
        assert "is not loaded" in failed["response"]["body"]["error"]["message"]
