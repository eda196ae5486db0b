"""Batches: resumable jobs on the server's engine, whose state survives a kill of the server.

    DIR/batches/batch_….json           an object of the API, with its tenant
    DIR/batches/batch_….jsonl          records of its results, as a job writes them
    DIR/batches/batch_….errors.jsonl   records of its failed lines
    DIR/lost/batch_….jsonl.damaged     what could not be read of them; the lines are computed again

    validating ─► in_progress ─► finalizing ─► completed
        │             │  └─ 24 hours are over ─► expired
        ├─ cancel ────┴─► cancelling ─► cancelled
        └─ the input is wrong ─► failed

A server that is started again takes each batch up in the state that it has on disk. If the disk is full or the machine
lacks something else for a while, a batch stays as it is and is tried again. Only an error that would come again ends
it.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from threading import Event, RLock, Thread
from typing import Any, Literal
from uuid import uuid4

from pydantic import BaseModel

from jaxinfer.batch_job.job import Progress, run_job
from jaxinfer.batch_job.records import format_record
from jaxinfer.openai.errors import RefusedError
from jaxinfer.serve.access import Client
from jaxinfer.serve.batches.engine import BatchEngine
from jaxinfer.serve.batches.file_store import FileObject, FileStore, Objects, Stored, StoredObject
from jaxinfer.serve.batches.input import BatchFault, faults_of
from jaxinfer.serve.batches.journals import Journals
from jaxinfer.serve.batches.own_folder import BATCH, is_aside, keep_lost
from jaxinfer.serve.state import ServerState

logger = logging.getLogger(__name__)

WINDOW_SECONDS = 24 * 3600  # the completion window, of which OpenAI's API has one
MAX_RUNNING = 4  # batches at a time, one of each tenant
MAX_BATCHES = 1_000  # of a tenant; the oldest that have ended are forgotten
LOOK_SECONDS = 5.0  # until a batch that waits is seen to have expired
RETRY_SECONDS, MAX_RETRY_SECONDS = 5.0, 300.0  # until a batch that could not go on is tried again; doubles each time
NUM_OUTPUTS = 2  # files that a batch may make
DEFAULT_ROWS = 64
JOB_KEYS = ("line", "made_by")  # of a record
BATCH_FAILURE = "the server has failed on this batch; its log says why"

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


class _StopError(RuntimeError):
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
        self._retries: dict[str, tuple[float, float]] = {}  # the time on time.monotonic, and the seconds waited for it
        self._is_stopping, self._has_news = False, Event()
        self._supervisor = Thread(target=self._supervise, name="batches", daemon=True)
        # By this process's own time, so that a clock that is set anew ends no batch.
        self._deadlines: dict[str, float] = {}
        for batch_id, stored in self._objects.all.items():
            if stored.object.status not in UNFINISHED:
                self._journals(batch_id).remove()  # left by a killed process
            else:
                left = stored.object.expires_at - time.time()
                self._deadlines[batch_id] = time.monotonic() + min(max(left, 0), WINDOW_SECONDS)
        for path in list(self._folder.iterdir()):
            own = BATCH.fullmatch(path.name)
            if is_aside(path.name):
                path.unlink()
            elif own is not None and own[1] not in self._objects.all:
                keep_lost(store.folder, path, "has lost its batch")

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
        with _writing():
            return self.store.upload(content, num_bytes, filename, tenant, self._num_to_come(tenant))

    def remove_file(self, file_id: str, tenant: str | None) -> None:
        """Removes a file; RefusedError 404 if there is none, 400 while a batch reads it."""
        with self._lock, _writing():
            for batch in self._unfinished(tenant):
                if batch.input_file_id == file_id:
                    message = f"{file_id} is the input of {batch.id}, which is unfinished; cancel it first"
                    raise RefusedError(400, message, param="file_id")
            self.store.remove(file_id, tenant)

    def create(
        self,
        file_id: str,
        endpoint: Endpoint,
        metadata: dict[str, str] | None,
        tenant: str | None,
        key: str | None = None,
    ) -> Any:
        """Begins a batch and returns it; RefusedError if there is no such input or too many files and batches.

        `key` is the name of the key that makes it, for whose limits it counts.
        """
        with self._lock, _writing():
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
                self._deadlines.pop(ended[0].id, None)
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
            self._objects.add(batch, tenant, key=key)
            self._deadlines[batch.id] = time.monotonic() + WINDOW_SECONDS
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
                with _writing():
                    batch = self._set(batch_id, status="cancelling", cancelling_at=int(time.time()))
            self._retries.pop(batch_id, None)
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
            before = stored.object
            stored.object = before.model_copy(update=changes)
            try:
                self._objects.save(stored)
            except BaseException:
                stored.object = before
                raise
            return stored.object

    # ---- threads

    def _supervise(self) -> None:
        while not self._is_stopping:
            self._has_news.clear()
            try:
                with self._lock:
                    for batch_id in self._next():
                        thread = Thread(target=self._run, args=[batch_id], name=batch_id, daemon=True)
                        thread.start()
                        self._running[batch_id] = thread  # whose end takes the lock, so it comes later
            except Exception:  # such as for want of memory: no batch may stop all others
                logger.exception("batches could not be begun; this is tried again in %.0f s", LOOK_SECONDS)
            self._has_news.wait(LOOK_SECONDS)

    def _next(self) -> Iterator[str]:
        """Yields the batches that begin or go on now: the oldest of each tenant, and all that have only to be ended."""
        computing = [batch_id for batch_id in self._running if not self._is_ending(batch_id)]
        tenants = {self._objects.all[batch_id].tenant for batch_id in computing}
        for batch_id, stored in list(self._objects.all.items()):
            if stored.object.status not in UNFINISHED or batch_id in self._running:
                continue
            if time.monotonic() < self._retries.get(batch_id, (0.0, 0.0))[0]:
                continue
            if self._is_ending(batch_id):
                yield batch_id
            elif stored.tenant not in tenants and len(tenants) < MAX_RUNNING:
                tenants.add(stored.tenant)
                yield batch_id

    def _is_ending(self, batch_id: str) -> bool:
        batch = self._objects.all[batch_id].object
        return batch.status in ("finalizing", "cancelling") or self._has_expired(batch_id)

    def _has_expired(self, batch_id: str) -> bool:
        return time.monotonic() >= self._deadlines[batch_id]

    def _max_rows(self) -> int:
        """Returns the requests that a batch may have in the engine: a share of its rows."""
        config = self._state.llm.engine_config
        rows = (config.max_num_seqs or DEFAULT_ROWS) * config.num_replicas
        return max(rows // max(len(self._running), 1), 1)

    def _run(self, batch_id: str) -> None:
        """Brings a batch to its end, unless the server ends before, or it has to be tried again."""
        try:
            self._advance(batch_id)
        except Exception as error:
            self._take_failure(batch_id, error)
        finally:
            with self._lock:
                del self._running[batch_id]
            self._has_news.set()

    def _take_failure(self, batch_id: str, error: Exception) -> None:
        """Ends a batch for an error that would come again; after any other it is tried again."""
        if self._is_stopping or not self._state.llm.is_open:
            logger.info("%s goes on when the server is started again", batch_id)
            return
        if not _is_passing(error):
            logger.error("%s has failed", batch_id, exc_info=error)
            try:
                self._end(batch_id, "failed", [BatchFault(code="server_error", message=BATCH_FAILURE)])
                return
            except Exception as other:
                error = other
        wait = min(2 * self._retries.get(batch_id, (0.0, RETRY_SECONDS / 2))[1], MAX_RETRY_SECONDS)
        with self._lock:
            self._retries[batch_id] = time.monotonic() + wait, wait
        logger.error("%s cannot go on (%s); it is tried again in %.0f s", batch_id, error, wait, exc_info=error)

    def _advance(self, batch_id: str) -> None:
        stored, source, faults = self._objects.all[batch_id], None, []
        try:
            source = self.store.verified(self.store.find(stored.object.input_file_id, stored.tenant))
        except RefusedError as error:
            faults = [BatchFault(code="invalid_file", message=str(error), param="input_file_id")]
        self._journals(batch_id).put_damage_aside(source)
        if source is not None and stored.object.status == "validating":
            faults = self._validate(batch_id, source)
        # A batch that was being ended may have lost records.
        is_begun = stored.object.status == "in_progress"
        is_begun |= stored.object.status == "finalizing" and stored.object.expired_at is None
        if source is not None and not faults and is_begun:
            try:
                self._compute(batch_id, source)
            except _StopError:
                if self._is_stopping:
                    raise
            except ValueError as error:  # such as for results of another model, of an earlier start
                if _is_passing(error):
                    raise
                message = str(error).replace(f"{self._folder}/", "").replace(str(source), source.stem)
                faults = [BatchFault(code="job_refused", message=message)]
        self._end(batch_id, self._final_status(batch_id, is_refused=bool(faults)), faults, source)
        self._retries.pop(batch_id, None)

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
            if self._is_stopping or batch.status == "cancelling" or self._has_expired(batch_id):
                raise _StopError

        def observe(progress: Progress) -> None:
            failed = progress.num_errors_before + progress.num_errors
            counts = RequestCounts(total=progress.num_requests, completed=progress.num_done - failed, failed=failed)
            with self._lock:  # in memory alone: on disk the records count
                stored.object = stored.object.model_copy(update={"request_counts": counts})

        clients = [client for client in self._clients if client.tenant == stored.tenant]
        clients.sort(key=lambda client: client.name != stored.key)  # that of the batch first, if it is still one
        journals = self._journals(batch_id)
        journals.create()
        engine = BatchEngine(self._state, stored.tenant, clients, self._max_rows, check_stop)
        summary = run_job(engine, source, *journals.paths, observe=observe)
        if summary.num_done_before + summary.num_completed + summary.num_errors < summary.num_requests:
            raise RuntimeError("requests of the batch were aborted")  # by the end of the engine

    def _final_status(self, batch_id: str, *, is_refused: bool) -> Status:
        """Returns the status in which the batch ends, and which it has on disk from now on but for the word."""
        with self._lock:
            batch = self._objects.all[batch_id].object
            if batch.status == "cancelling":
                return "cancelled"
            if is_refused:
                return "failed"
            if batch.expired_at is None:
                counts, now = batch.request_counts, int(time.time())
                is_expired = counts.completed + counts.failed < counts.total
                expired_at = {"expired_at": now} if is_expired else {}
                batch = self._set(batch_id, status="finalizing", finalizing_at=batch.finalizing_at or now, **expired_at)
        return "completed" if batch.expired_at is None else "expired"

    def _end(self, batch_id: str, status: Status, faults: list[BatchFault], source: Path | None = None) -> None:
        """Ends a batch with the results so far, and the reasons if it has failed as a whole."""
        tenant, changes, counts = self._objects.all[batch_id].tenant, {}, {"completed": 0, "failed": 0}

        def counted(count: str, records: Iterator[bytes]) -> Iterator[bytes]:
            for raw in records:
                counts[count] += 1
                record = json.loads(raw)  # as OpenAI's API has it: without the keys by which the job goes on
                yield format_record({name: value for name, value in record.items() if name not in JOB_KEYS})

        journals = self._journals(batch_id)
        failed = journals.failures()
        if status == "expired" and source is not None:
            failed = journals.expired_failures(source)
        for kind, count, records in (("output", "completed", journals.results()), ("error", "failed", failed)):
            # Of the batch's id, so that an end that was cut off by a kill is repeated on the same files.
            file_id = f"file-{blake2b(f'{batch_id} {kind}'.encode(), digest_size=16).hexdigest()}"
            if self.store.write_output(file_id, f"{batch_id}_{kind}.jsonl", tenant, counted(count, records)):
                changes[f"{kind}_file_id"] = file_id
        if faults and status == "failed":
            changes["errors"] = BatchErrors(data=faults)
        with self._lock:
            total = self._objects.all[batch_id].object.request_counts.total
            changes |= {"status": status, f"{status}_at": int(time.time())}
            self._set(batch_id, **changes, request_counts=RequestCounts(total=total, **counts))
        journals.remove()

    def _journals(self, batch_id: str) -> Journals:
        return Journals(self.store.folder, batch_id)


def _is_passing(error: BaseException | None) -> bool:
    """True if the machine lacked something, such as room on the disk or open files, which it may have again."""
    while error is not None:
        if isinstance(error, OSError | MemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def _writing() -> Iterator[None]:
    """Refuses a request with 503 if the server cannot write to its folder."""
    try:
        yield
    except OSError as error:
        logger.exception("a request could not be honoured")
        message = f"the server cannot write to its files now ({error.strerror or error}); try again later"
        raise RefusedError(503, message, kind="server_error", code="storage_failed", retry_after=60) from error
