"""The routes of files and batches, as OpenAI's API has them, on a server that keeps files."""

from __future__ import annotations

import asyncio
import codecs
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, BinaryIO, ClassVar, Literal

from fastapi import FastAPI, Query, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from python_multipart.multipart import parse_options_header
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.types import Message

from jaxinfer.openai.bodies import Body, Name
from jaxinfer.openai.errors import RefusedError
from jaxinfer.serve.access import client_of
from jaxinfer.serve.batches.batches import Batches, BatchObject, Endpoint
from jaxinfer.serve.batches.file_store import FileObject, Purpose, page_of
from jaxinfer.serve.state import ServerState
from jaxinfer.validation import shown

UPLOADS = "/v1/files"
FORM_BYTES = 2**16  # of an upload beside the file
MAX_UPLOADS = 8  # of a tenant at a time, for each may fill a temporary file
STALL_SECONDS = 30.0  # in which some of an upload has to come
CHARSETS = ("utf-8", "ascii", "iso8859-1")  # of names in a form; others may decode to what is no text
MAX_FIELDS = 8
READ_BYTES = 2**16
UPLOAD_FORM = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": ["batch"]},
                    },
                    "required": ["file", "purpose"],
                    "additionalProperties": False,
                }
            }
        },
    }
}
BYTES: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}
}


class FileQuery(BaseModel):
    """The query of a list of files."""

    model_config = ConfigDict(extra="forbid")

    after: Name | None = None
    limit: Annotated[int, Field(ge=1, le=10_000)] = 10_000
    order: Literal["asc", "desc"] = "desc"
    purpose: Purpose | None = None


class BatchQuery(BaseModel):
    """The query of a list of batches."""

    model_config = ConfigDict(extra="forbid")

    after: Name | None = None
    limit: Annotated[int, Field(ge=1, le=100)] = 20


class FileList(BaseModel):
    """Some of the files."""

    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class BatchList(BaseModel):
    """Some of the batches, the newest first."""

    object: Literal["list"]
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(BaseModel):
    """The answer to the deletion of a file."""

    id: str
    object: Literal["file"]
    deleted: bool


Key = Annotated[str, Field(max_length=64)]
Value = Annotated[str, Field(max_length=512)]


class BatchBody(Body):
    """The body of /v1/batches."""

    input_file_id: Name
    endpoint: Endpoint
    completion_window: Literal["24h"]
    metadata: Annotated[dict[Key, Value], Field(max_length=16)] | None = None

    REFUSED: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {
        "output_expires_after": ((), "files stay until they are deleted"),
    }


def add_batches(app: FastAPI, state: ServerState, service: Batches | None) -> None:
    """Adds the routes of files and batches. They are refused if the server keeps no files."""
    uploads = Counter[str | None]()  # under way, by tenant

    def kept() -> Batches:
        if service is None:
            raise RefusedError(404, "this server keeps no files and batches; start it with --files DIR")
        return service

    @app.post(UPLOADS, response_model=FileObject, openapi_extra=UPLOAD_FORM)
    async def upload(request: Request) -> Response:
        """Stores the input of a batch."""
        state.require_open()
        batches = kept()
        _require_form(request.headers.get("content-type", ""))
        tenant = _tenant(request)
        if uploads[tenant] >= MAX_UPLOADS:
            message = f"{uploads[tenant]} files are being uploaded, the most at a time; try again"
            raise RefusedError(429, message, kind="rate_limit_error", code="too_many_uploads", retry_after=5)
        uploads[tenant] += 1
        try:
            whole = Request(request.scope, partial(_receive_some, request))
            form = whole.form(max_files=1, max_fields=MAX_FIELDS, max_part_size=FORM_BYTES)
            async with form as fields:
                file = _uploaded(fields.multi_items(), batches.store.max_file_bytes)
                place = (file.file, file.size or 0, file.filename or "")
                stored = await run_in_threadpool(batches.upload, *place, tenant)
        finally:
            uploads[tenant] -= 1
        return JSONResponse(stored.model_dump())

    @app.get(UPLOADS, response_model=FileList)
    def files(query: Annotated[FileQuery, Query()], request: Request) -> Response:
        """Lists files."""
        found = [f for f in kept().store.of(_tenant(request)) if query.purpose in (None, f.purpose)]
        return _page(found if query.order == "asc" else found[::-1], query)

    @app.get("/v1/files/{file_id}", response_model=FileObject)
    def file(file_id: str, request: Request) -> Response:
        """Describes a file."""
        return JSONResponse(kept().store.find(file_id, _tenant(request)).model_dump())

    @app.get("/v1/files/{file_id}/content", response_class=StreamingResponse, responses=BYTES)
    def content(file_id: str, request: Request) -> Response:
        """Returns the bytes of a file."""
        store = kept().store
        found = store.find(file_id, _tenant(request))
        opened = store.verified(found).open("rb")
        headers = {"Content-Length": str(found.bytes)}
        return StreamingResponse(_pieces(opened), media_type="application/octet-stream", headers=headers)

    @app.delete("/v1/files/{file_id}", response_model=FileDeleted)
    def delete(file_id: str, request: Request) -> Response:
        """Deletes a file that no unfinished batch reads."""
        kept().remove_file(file_id, _tenant(request))
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})

    @app.post("/v1/batches", response_model=BatchObject)
    def create(body: BatchBody, request: Request) -> Response:
        """Begins a batch."""
        state.require_open()
        client = client_of(request)
        key = None if client is None else client.name
        batch = kept().create(body.input_file_id, body.endpoint, body.metadata, _tenant(request), key)
        return JSONResponse(batch.model_dump())

    @app.get("/v1/batches", response_model=BatchList)
    def batches(query: Annotated[BatchQuery, Query()], request: Request) -> Response:
        """Lists batches, the newest first."""
        return _page(kept().of(_tenant(request))[::-1], query)

    @app.get("/v1/batches/{batch_id}", response_model=BatchObject)
    def batch(batch_id: str, request: Request) -> Response:
        """Describes a batch."""
        return JSONResponse(kept().find(batch_id, _tenant(request)).model_dump())

    @app.post("/v1/batches/{batch_id}/cancel", response_model=BatchObject)
    def cancel(batch_id: str, request: Request) -> Response:
        """Has a batch end with the results so far."""
        return JSONResponse(kept().cancel(batch_id, _tenant(request)).model_dump())


def _tenant(request: Request) -> str | None:
    client = client_of(request)
    return None if client is None else client.tenant


def _require_form(content_type: str) -> None:
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data":
        raise RefusedError(400, "the body is no form; upload the file as multipart/form-data")
    charset = options.get(b"charset", b"utf-8").decode("latin-1")
    try:
        name = codecs.lookup(charset).name
    except (LookupError, ValueError):
        name = ""
    if name not in CHARSETS:
        raise RefusedError(400, f"charset={shown(charset)} cannot be honoured; send the form in UTF-8")


async def _receive_some(request: Request) -> Message:
    """Returns the next part of an upload; RefusedError 408 if none comes."""
    try:
        return await asyncio.wait_for(request.receive(), STALL_SECONDS)
    except TimeoutError:
        message = f"nothing of the upload has come for {STALL_SECONDS:g} seconds; send it again"
        raise RefusedError(408, message, code="upload_stalled") from None


def _uploaded(fields: list[tuple[str, UploadFile | str]], max_bytes: int) -> UploadFile:
    """Returns the file of a form for an upload; RefusedError 400 for any other form."""
    names = [name for name, _ in fields]
    if unknown := sorted(set(names) - {"file", "purpose"}):
        raise RefusedError(400, f"{shown(unknown[0])} cannot be honoured; a form has file and purpose")
    if sorted(names) != ["file", "purpose"]:
        raise RefusedError(400, "give a form with one file and one purpose")
    form = dict(fields)
    file, purpose = form["file"], form["purpose"]
    if not isinstance(file, UploadFile):
        raise RefusedError(400, "file is no file; upload one with its name", param="file")
    if purpose != "batch":
        raise RefusedError(400, f"purpose {shown(purpose)} cannot be honoured; give batch", param="purpose")
    if (file.size or 0) > max_bytes:
        message = f"the file has {file.size:,} bytes, more than {max_bytes:,}; send a smaller one"
        raise RefusedError(413, message, param="file", code="file_too_large")
    return file


def _page(objects: list[Any], query: FileQuery | BatchQuery) -> Response:
    page, has_more = page_of(objects, after=query.after, limit=query.limit)
    ids = [value.id for value in page] or [None]
    data = [value.model_dump() for value in page]
    return JSONResponse({"object": "list", "data": data, "first_id": ids[0], "last_id": ids[-1], "has_more": has_more})


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    with file:
        while piece := file.read(READ_BYTES):
            yield piece
