"""A folder of files that clients have uploaded or that batches have made; it survives a kill of the server.

    DIR/jaxinfer.json            marks the folder as a server's own
    DIR/lock                     held by the one server that uses the folder
    DIR/files/file-….json        an object of the API, with its tenant and digests of itself and its content
    DIR/files/file-….content     the bytes, which are there before the object
    DIR/batches/…                see `batches`
    DIR/lost/…                   what the server has found without its object or content; it is never read again

Ids are random and made here. A request's id is looked up among them and never becomes a path by itself. The server
removes files of its own alone, by their ids.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, Generic, Literal, TypeVar
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, ValidationError

from jaxinfer.batch_job.files import replace_file
from jaxinfer.openai.errors import RefusedError
from jaxinfer.serve.batches.own_folder import FILE, LOST, PRIVATE, hold_folder, is_aside, keep_lost
from jaxinfer.validation import require_characters, shown

logger = logging.getLogger(__name__)

MAX_FILES = 1_000  # of a tenant
MAX_TENANT_BYTES = 2**34  # of the files of a tenant
MAX_FILENAME = 255  # characters
READ_BYTES = 2**20  # at a time
DIGEST_BYTES = 16
SEAL_START, SEAL_END = b',"seal":"', b'"}'  # around the digest of all before, which ends the file of an object

Purpose = Literal["batch", "batch_output"]


class StoredObject(BaseModel):
    """An object of the API that the server keeps."""

    id: str
    created_at: int  # seconds since 1970


O = TypeVar("O", bound=StoredObject)


class Stored(BaseModel, Generic[O]):
    """An object with its tenant, None on a server without keys, and its time in ns, which orders a list."""

    model_config = ConfigDict(extra="forbid")

    tenant: str | None
    created_ns: int
    object: O
    key: str | None = None  # the name of the key that made it
    content: str | None = None  # the digest of a file's bytes; versions without digests wrote none


def digest_of(pieces: Iterable[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


class Objects(Generic[O]):
    """Objects in memory and in a folder: each in a file of its own, which is replaced at once."""

    def __init__(self, folder: Path, kind: type[Stored[O]]) -> None:
        """Reads the folder; ValueError if a file in it is damaged."""
        self._folder = folder
        self._kind = kind
        found = []
        for path in folder.glob("*.json"):
            try:
                found.append(self._read(path))
            except (ValueError, OSError) as error:
                reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
                raise ValueError(
                    f"{path} is damaged ({reason}); restore it, or move it into {folder.parent / LOST} to go on without"
                    " it: what belongs to it is kept there too"
                ) from None
        found.sort(key=lambda stored: stored.created_ns)
        self.all = {stored.object.id: stored for stored in found}  # the oldest first

    def _read(self, path: Path) -> Stored[O]:
        content, start, seal = path.read_bytes().rpartition(SEAL_START)
        if start and seal != digest_of([content]).encode() + SEAL_END:
            raise ValueError("its digest is not that of its contents")
        # Versions without digests wrote no seal.
        stored = self._kind.model_validate_json(content + b"}" if start else seal)
        if stored.object.id != path.stem:
            raise ValueError(f"it is of {shown(stored.object.id)}")
        return stored

    def of(self, tenant: str | None) -> list[O]:
        """Returns the objects of a tenant, the oldest first."""
        return [stored.object for stored in list(self.all.values()) if stored.tenant == tenant]

    def find(self, object_id: str, tenant: str | None, param: str) -> O:
        """Returns an object; RefusedError 404 if there is none with this id, or it is another tenant's."""
        stored = self.all.get(object_id)
        if stored is None or stored.tenant != tenant:
            raise RefusedError(404, f"{param}={shown(object_id)} does not exist", param=param)
        return stored.object

    def add(self, value: O, tenant: str | None, **more: str | None) -> None:
        """Adds an object, in memory and on disk."""
        self.save(self._kind(tenant=tenant, created_ns=time.time_ns(), object=value, **more))  # pyright: ignore[reportArgumentType]

    def remove(self, object_id: str) -> None:
        (self._folder / f"{object_id}.json").unlink(missing_ok=True)
        self.all.pop(object_id, None)

    def save(self, stored: Stored[O]) -> None:
        """Writes an object that has changed."""
        content = stored.model_dump_json().encode().removesuffix(b"}")
        lines = content, SEAL_START, digest_of([content]).encode(), SEAL_END
        replace_file(self._folder / f"{stored.object.id}.json", lambda file: file.writelines(lines), PRIVATE)
        self.all[stored.object.id] = stored


def page_of(objects: list[O], *, after: str | None, limit: int) -> tuple[list[O], bool]:
    """Returns the objects behind that with id `after`, at most `limit`, and True if more follow.

    Raises RefusedError 400 if none of them has this id.
    """
    start = 0
    if after is not None:
        ids = [value.id for value in objects]
        if after not in ids:
            raise RefusedError(400, f"after={shown(after)} is no id of this list", param="after")
        start = ids.index(after) + 1
    return objects[start : start + limit], len(objects) > start + limit


class FileObject(StoredObject):
    """A file, as OpenAI's API describes it."""

    object: Literal["file"] = "file"
    bytes: int
    filename: str
    purpose: Purpose
    status: Literal["processed"] = "processed"


class FileStore:
    """The files of all tenants in a folder. Any thread may call its methods."""

    def __init__(self, folder: Path, *, max_file_bytes: int) -> None:
        """Opens or creates the folder.

        ValueError if another server uses it, if it has files that no server has written, or if one in it is damaged.
        """
        self.folder, self.max_file_bytes = folder, max_file_bytes
        self._held = hold_folder(folder)
        self._lock = Lock()
        try:
            self._objects: Objects[FileObject] = Objects(folder / "files", Stored[FileObject])
            self._keep_lost()
        except BaseException:
            self.close()
            raise

    def _keep_lost(self) -> None:
        """Puts aside contents without an object, and objects without a content, as a disk may leave them."""
        for path in list((self.folder / "files").iterdir()):
            own = FILE.fullmatch(path.name)
            if is_aside(path.name):
                path.unlink()
            elif own is None:
                logger.warning("%s was not written by a server, and stays as it is", path)
            elif path.suffix == ".content" and own[1] not in self._objects.all:
                keep_lost(self.folder, path, "has lost its object")
        for stored in list(self._objects.all.values()):
            if not self.path(stored.object).exists():
                keep_lost(self.folder, self.path(stored.object).with_suffix(".json"), "has lost its content")
                del self._objects.all[stored.object.id]

    def close(self) -> None:
        """Lets another server use the folder."""
        if self._held >= 0:
            os.close(self._held)
            self._held = -1

    def path(self, file: FileObject) -> Path:
        """Returns the path of a file's content."""
        return self.folder / "files" / f"{file.id}.content"

    def find(self, file_id: str, tenant: str | None, param: str = "file_id") -> FileObject:
        """Returns a file of a tenant; RefusedError 404, which names the parameter, if it has no such file."""
        return self._objects.find(file_id, tenant, param)

    def verified(self, file: FileObject) -> Path:
        """Returns the path of a file's content, which was read and is as it was stored.

        Raises RefusedError 500 if it has changed, and 404 if there is none.
        """
        stored, path = self._objects.all.get(file.id), self.path(file)
        try:
            with path.open("rb") as content:
                is_sound = os.fstat(content.fileno()).st_size == file.bytes
                if is_sound and stored is not None and stored.content is not None:
                    is_sound = stored.content == digest_of(iter(lambda: content.read(READ_BYTES), b""))
        except FileNotFoundError:  # it was deleted meanwhile
            raise RefusedError(404, f"file_id={shown(file.id)} does not exist", param="file_id") from None
        if not is_sound:
            logger.error("%s is damaged: it has other bytes than were stored", path)
            message = (
                f"{file.id} is damaged: it has other bytes than were stored; delete it, and upload or compute it anew"
            )
            raise RefusedError(500, message, kind="server_error", param="file_id", code="file_damaged")
        return path

    def of(self, tenant: str | None) -> list[FileObject]:
        """Returns the files of a tenant, the oldest first."""
        return self._objects.of(tenant)

    def require_room(self, tenant: str | None, num_files: int, num_bytes: int = 0) -> None:
        """Raises RefusedError 400 if a tenant may not have files and bytes in addition to its own."""
        files = self.of(tenant)
        if len(files) + num_files > MAX_FILES:
            raise RefusedError(
                400,
                f"{len(files)} files are stored, and with those to come there may be {MAX_FILES:,}; delete some",
                code="too_many_files",
            )
        if sum(file.bytes for file in files) + num_bytes > MAX_TENANT_BYTES:
            raise RefusedError(
                400, f"the stored files may have {MAX_TENANT_BYTES:,} bytes; delete some", code="too_many_bytes"
            )

    def upload(self, content: BinaryIO, num_bytes: int, filename: str, tenant: str | None, num_to_come: int) -> Any:
        """Stores a file of purpose "batch" and returns it; `num_to_come` is the number of files that batches will make.

        Raises RefusedError 400 if the tenant may have no more.
        """
        name = filename[-MAX_FILENAME:]
        try:
            require_characters("the file's name", name)
        except ValueError as error:
            raise RefusedError(400, str(error), param="file") from None
        file = FileObject(
            id=f"file-{uuid4().hex}", created_at=int(time.time()), bytes=num_bytes, filename=name, purpose="batch"
        )
        with self._lock:
            self.require_room(tenant, 1 + num_to_come, num_bytes)
            return self._store(file, tenant, iter(lambda: content.read(READ_BYTES), b""))

    def write_output(self, file_id: str, filename: str, tenant: str | None, records: Iterator[bytes]) -> bool:
        """Stores the records of a batch as a file; False if there are none. It may be repeated after a kill."""
        first = next(records, None)
        if first is None:
            return False
        file = FileObject(id=file_id, created_at=int(time.time()), bytes=0, filename=filename, purpose="batch_output")
        self._store(file, tenant, chain([first], records))
        return True

    def _store(self, file: FileObject, tenant: str | None, pieces: Iterable[bytes]) -> FileObject:
        """Writes the content of a file, then its object; leaves nothing behind if it fails."""
        path, digest = self.path(file), hashlib.blake2b(digest_size=DIGEST_BYTES)

        def write(target: BinaryIO) -> None:
            for piece in pieces:
                digest.update(piece)
                target.write(piece)

        try:
            replace_file(path, write, PRIVATE)
            file = file.model_copy(update={"bytes": path.stat().st_size})
            self._objects.add(file, tenant, content=digest.hexdigest())
        except BaseException:
            if file.id not in self._objects.all:
                path.unlink(missing_ok=True)
            raise
        return file

    def remove(self, file_id: str, tenant: str | None) -> None:
        """Removes a file of a tenant; RefusedError 404 if it has no such file."""
        with self._lock:
            file = self.find(file_id, tenant)
            # The content has the name of an incomplete one, which a start after a kill removes.
            path = self.path(file)
            aside = path.with_name(f".{path.name}.new")
            with suppress(FileNotFoundError):
                path.rename(aside)
            self._objects.remove(file.id)
            aside.unlink(missing_ok=True)
