"""Batches: resumable jobs on the server's engine, whose state survives a kill of the server.

    DIR/batches/batch_….json           an object of the API, with its tenant
    DIR/batches/batch_….jsonl          records of its results, as a job writes them
    DIR/batches/batch_….errors.jsonl   records of its failed lines

    validating ─► in_progress ─► finalizing ─► completed
        │             │  └─ 24 hours are over ─► expired
        ├─ cancel ────┴─► cancelling ─► cancelled
        └─ the input is wrong ─► failed

A server that is started again takes each batch up in the state that it has on disk.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from threading import Event, RLock, Thread
from typing import Any, Literal
from uuid import uuid4

from pydantic import BaseModel

from jaxinfer.batch_job.input import open_lines
from jaxinfer.batch_job.job import Progress, run_job
from jaxinfer.batch_job.output import OutputFile
from jaxinfer.batch_job.records import format_record, unanswered_line
from jaxinfer.openai.errors import RefusedError
from jaxinfer.serve.access import Client
from jaxinfer.serve.batches.engine import BatchEngine
from jaxinfer.serve.batches.file_store import FileObject, FileStore, Objects, Stored, StoredObject
from jaxinfer.serve.batches.input import BatchFault, faults_of
from jaxinfer.serve.state import ServerState

logger = logging.getLogger(__name__)

WINDOW_SECONDS = 24 * 3600  # the completion window, of which OpenAI's API has one
MAX_RUNNING = 4  # batches at a time, one of each tenant
MAX_BATCHES = 1_000  # of a tenant; the oldest that have ended are forgotten
LOOK_SECONDS = 5.0  # until a batch that waits is seen to have expired
NUM_OUTPUTS = 2  # files that a batch may make
DEFAULT_ROWS = 64
JOB_KEYS = ("line", "made_by")  # of a record
EXPIRED = "the completion window was over before this request could be executed"
UNKNOWN_FAILURE = "the server has failed on this batch; its log says why"

Endpoint = Literal["/v1/chat/completions", "/v1/completions"]
Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
UNFINISHED: tuple[Status, ...] = ("validating", "in_progress", "finalizing", "cancelling")


class RequestCounts(BaseModel):
    """Numbers of the requests of a batch."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchErrors(BaseModel):
    """The reasons why a batch has failed as a whole."""

    object: Literal["list"] = "list"
    data: list[BatchFault]


class BatchObject(StoredObject):
    """A batch, as OpenAI's API describes it."""

    object: Literal["batch"] = "batch"
    endpoint: Endpoint
    model: str
    input_file_id: str
    completion_window: Literal["24h"] = "24h"
    status: Status = "validating"
    errors: BatchErrors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    metadata: dict[str, str] | None = None


class _StopError(Exception):
    """A batch is to stop: it is cancelled or has expired, or the server shuts down."""


class Batches:
    """The batches of all tenants, of which some run. Any thread may call its methods."""

    def __init__(self, state: ServerState, store: FileStore, clients: Sequence[Client]) -> None:
        """Reads the batches of the store's folder; `start` goes on with those that are unfinished."""
        self._state, self.store, self._clients = state, store, clients
        self._folder = store.folder / "batches"
        self._objects: Objects[BatchObject] = Objects(self._folder, Stored[BatchObject])
        self._lock = RLock()  # one change of the state at a time
        self._running: dict[str, Thread] = {}  # by batch
        self._is_stopping, self._has_news = False, Event()
        self._supervisor = Thread(target=self._supervise, name="batches", daemon=True)
        for batch_id, stored in self._objects.all.items():
            if stored.object.status not in UNFINISHED:
                self._remove_journals(batch_id)  # left by a killed process

    def start(self) -> None:
        """Goes on with the unfinished batches, on threads of their own."""
        self._supervisor.start()

    def stop(self) -> None:
        """Ends the requests of all batches, which go on when the server is started again."""
        self._is_stopping = True
        self._has_news.set()

    def close(self) -> None:
        """Stops, and returns when no thread writes to the folder any more."""
        self.stop()
        if self._supervisor.ident is not None:
            self._supervisor.join()
        for thread in list(self._running.values()):
            thread.join()
        self.store.close()

    # ---- routes

    def upload(self, content: Any, num_bytes: int, filename: str, tenant: str | None) -> FileObject:
        """Stores an input; RefusedError 400 if the tenant may have no more files."""
        return self.store.upload(content, num_bytes, filename, tenant, self._num_to_come(tenant))

    def remove_file(self, file_id: str, tenant: str | None) -> None:
        """Removes a file; RefusedError 404 if there is none, 400 while a batch reads it."""
        with self._lock:
            for batch in self._unfinished(tenant):
                if batch.input_file_id == file_id:
                    message = f"{file_id} is the input of {batch.id}, which is unfinished; cancel it first"
                    raise RefusedError(400, message, param="file_id")
            self.store.remove(file_id, tenant)

    def create(self, file_id: str, endpoint: Endpoint, metadata: dict[str, str] | None, tenant: str | None) -> Any:
        """Begins a batch and returns it; RefusedError if there is no such input or too many files and batches."""
        with self._lock:
            file = self.store.find(file_id, tenant, "input_file_id")
            if file.purpose != "batch":
                message = f"{file_id} has purpose {file.purpose}; give a file that was uploaded with purpose batch"
                raise RefusedError(400, message, param="input_file_id")
            self.store.require_room(tenant, self._num_to_come(tenant) + NUM_OUTPUTS)
            batches = self._objects.of(tenant)
            if len(batches) >= MAX_BATCHES:
                ended = [b for b in batches if b.status not in UNFINISHED and b.id not in self._running]
                if not ended:
                    message = f"{len(batches)} batches are unfinished, the most there may be; wait for one to end"
                    raise RefusedError(429, message, kind="rate_limit_error", code="too_many_batches", retry_after=60)
                self._objects.remove(ended[0].id)
            now = int(time.time())
            batch = BatchObject(
                id=f"batch_{uuid4().hex}",
                created_at=now,
                endpoint=endpoint,
                model=self._state.names[0],
                input_file_id=file_id,
                expires_at=now + WINDOW_SECONDS,
                metadata=metadata,
            )
            self._objects.add(batch, tenant)
        self._has_news.set()
        return batch

    def find(self, batch_id: str, tenant: str | None) -> BatchObject:
        """Returns a batch of a tenant; RefusedError 404 if it has no such batch."""
        return self._objects.find(batch_id, tenant, "batch_id")

    def of(self, tenant: str | None) -> list[BatchObject]:
        """Returns the batches of a tenant, the oldest first."""
        return self._objects.of(tenant)

    def cancel(self, batch_id: str, tenant: str | None) -> BatchObject:
        """Has a batch end with the results so far; RefusedError 400 if it has ended."""
        with self._lock:
            batch = self.find(batch_id, tenant)
            if batch.status not in ("validating", "in_progress", "cancelling"):
                raise RefusedError(400, f"{batch.id} is {batch.status}, so it cannot be cancelled", param="batch_id")
            if batch.status != "cancelling":
                batch = self._set(batch_id, status="cancelling", cancelling_at=int(time.time()))
        self._has_news.set()
        return batch

    def _num_to_come(self, tenant: str | None) -> int:
        return NUM_OUTPUTS * len(self._unfinished(tenant))

    def _unfinished(self, tenant: str | None) -> list[BatchObject]:
        return [batch for batch in self.of(tenant) if batch.status in UNFINISHED]

    def _set(self, batch_id: str, **changes: Any) -> BatchObject:
        """Changes a batch, on disk too; returns it."""
        with self._lock:
            stored = self._objects.all[batch_id]
            stored.object = stored.object.model_copy(update=changes)
            self._objects.save(stored)
            return stored.object

    # ---- threads

    def _supervise(self) -> None:
        while not self._is_stopping:
            self._has_news.clear()
            with self._lock:
                for batch_id in self._next():
                    self._running[batch_id] = Thread(target=self._run, args=[batch_id], name=batch_id, daemon=True)
                    self._running[batch_id].start()
            self._has_news.wait(LOOK_SECONDS)

    def _next(self) -> Iterator[str]:
        """Yields the batches that begin or go on now: the oldest of each tenant, and all that have only to be ended."""
        computing = [batch_id for batch_id in self._running if not self._is_ending(batch_id)]
        tenants = {self._objects.all[batch_id].tenant for batch_id in computing}
        for batch_id, stored in list(self._objects.all.items()):
            if stored.object.status not in UNFINISHED or batch_id in self._running:
                continue
            if self._is_ending(batch_id):
                yield batch_id
            elif stored.tenant not in tenants and len(tenants) < MAX_RUNNING:
                tenants.add(stored.tenant)
                yield batch_id

    def _is_ending(self, batch_id: str) -> bool:
        batch = self._objects.all[batch_id].object
        return batch.status in ("finalizing", "cancelling") or time.time() >= batch.expires_at

    def _max_rows(self) -> int:
        """Returns the requests that a batch may have in the engine: a share of its rows."""
        config = self._state.llm.engine_config
        rows = (config.max_num_seqs or DEFAULT_ROWS) * config.num_replicas
        return max(rows // max(len(self._running), 1), 1)

    def _run(self, batch_id: str) -> None:
        """Brings a batch to its end, unless the server ends before."""
        try:
            self._advance(batch_id)
        except Exception:
            if self._is_stopping or not self._state.llm.is_open:
                logger.info("%s goes on when the server is started again", batch_id)
                return
            logger.exception("%s has failed", batch_id)
            # If this fails too, as on a full disk, the batch stays as it is until the next start.
            self._end(batch_id, "failed", [BatchFault(code="server_error", message=UNKNOWN_FAILURE)])
        with self._lock:
            del self._running[batch_id]
        self._has_news.set()

    def _advance(self, batch_id: str) -> None:
        stored = self._objects.all[batch_id]
        source = self.store.path(self.store.find(stored.object.input_file_id, stored.tenant))
        if stored.object.status == "validating" and (faults := self._validate(batch_id, source)):
            self._end(batch_id, "failed", faults)
            return
        faults = []
        if self._objects.all[batch_id].object.status == "in_progress":
            try:
                self._compute(batch_id, source)
            except _StopError:
                if self._is_stopping:
                    raise
            except ValueError as error:  # such as for results of another model, of an earlier start
                message = str(error).replace(f"{self._folder}/", "").replace(str(source), source.stem)
                faults = [BatchFault(code="job_refused", message=message)]
        self._end(batch_id, self._final_status(batch_id, source, is_refused=bool(faults)), faults)

    def _validate(self, batch_id: str, source: Path) -> list[BatchFault]:
        """Returns the faults of the input; without one the batch is in progress, unless it was cancelled meanwhile."""
        batch = self._objects.all[batch_id].object
        faults, num_lines = faults_of(source, batch.input_file_id, batch.endpoint)
        with self._lock:
            if not faults and self._objects.all[batch_id].object.status == "validating":
                counts = RequestCounts(total=num_lines)
                self._set(batch_id, status="in_progress", in_progress_at=int(time.time()), request_counts=counts)
        return faults

    def _compute(self, batch_id: str, source: Path) -> None:
        """Runs the lines that have no record; raises _StopError if the batch is to stop before all have one."""
        stored = self._objects.all[batch_id]

        def check_stop() -> None:
            batch = stored.object
            if self._is_stopping or batch.status == "cancelling" or time.time() >= batch.expires_at:
                raise _StopError

        def observe(progress: Progress) -> None:
            failed = progress.num_errors_before + progress.num_errors
            counts = RequestCounts(total=progress.num_requests, completed=progress.num_done - failed, failed=failed)
            with self._lock:  # in memory alone: on disk the records count
                stored.object = stored.object.model_copy(update={"request_counts": counts})

        clients = [client for client in self._clients if client.tenant == stored.tenant]
        engine = BatchEngine(self._state, stored.tenant, clients, self._max_rows, check_stop)
        summary = run_job(engine, source, *self._journals(batch_id), observe=observe)
        if summary.num_done_before + summary.num_completed + summary.num_errors < summary.num_requests:
            raise RuntimeError("requests of the batch were aborted")  # by the end of the engine

    def _final_status(self, batch_id: str, source: Path, *, is_refused: bool) -> Status:
        """Returns the status in which the batch ends; lines without a record get one if it has expired."""
        if is_refused:
            return "failed"
        with self._lock:
            batch = self._objects.all[batch_id].object
            if batch.status == "cancelling":
                return "cancelled"
            if batch.status == "in_progress":
                counts, now = batch.request_counts, int(time.time())
                is_expired = counts.completed + counts.failed < counts.total
                expired_at = {"expired_at": now} if is_expired else {}
                batch = self._set(batch_id, status="finalizing", finalizing_at=now, **expired_at)
        if batch.expired_at is None:
            return "completed"
        results, errors = self._journals(batch_id)
        with OutputFile(results) as output, OutputFile(errors) as failed:
            done = output.read_done() | failed.read_done()
            failed.drop_incomplete()
            identity = output.identity or failed.identity or self._state.llm.identity()
            with open_lines(source) as lines:
                for number, raw in lines:
                    if number not in done:
                        failed.append(unanswered_line(raw, number, identity, "batch_expired", EXPIRED))
        return "expired"

    def _end(self, batch_id: str, status: Status, faults: list[BatchFault]) -> None:
        """Ends a batch with the results so far, and the reasons if it has failed as a whole."""
        tenant, changes, counts = self._objects.all[batch_id].tenant, {}, {}
        for kind, count, path in zip(
            ("output", "error"), ("completed", "failed"), self._journals(batch_id), strict=True
        ):
            counts[count] = 0
            if not path.exists():
                continue
            with OutputFile(path) as journal:
                counts[count] = len(journal.read_done())
                journal.drop_incomplete()
                journal.finish()
            # Of the batch's id, so that an end that was cut off by a kill is repeated on the same files.
            file_id = f"file-{blake2b(f'{batch_id} {kind}'.encode(), digest_size=16).hexdigest()}"
            if self.store.write_output(file_id, f"{batch_id}_{kind}.jsonl", tenant, _records_of(path)):
                changes[f"{kind}_file_id"] = file_id
        if faults:
            changes["errors"] = BatchErrors(data=faults)
        with self._lock:
            total = self._objects.all[batch_id].object.request_counts.total
            changes |= {"status": status, f"{status}_at": int(time.time())}
            self._set(batch_id, **changes, request_counts=RequestCounts(total=total, **counts))
        self._remove_journals(batch_id)

    def _journals(self, batch_id: str) -> tuple[Path, Path]:
        """Returns the files for the records of results and of failed lines."""
        return self._folder / f"{batch_id}.jsonl", self._folder / f"{batch_id}.errors.jsonl"

    def _remove_journals(self, batch_id: str) -> None:
        for path in self._journals(batch_id):
            path.unlink(missing_ok=True)


def _records_of(path: Path) -> Iterator[bytes]:
    """Yields the records of a job as OpenAI's API has them: without the keys by which the job goes on."""
    with path.open("rb") as file:
        for raw in file:
            record = json.loads(raw)
            yield format_record({name: value for name, value in record.items() if name not in JOB_KEYS})
