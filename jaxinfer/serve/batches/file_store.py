"""A folder of files that clients have uploaded or that batches have made; it survives a kill of the server.

    DIR/lock                     held by the one server that uses the folder
    DIR/files/file-….json        an object of the API, with its tenant
    DIR/files/file-….content     the bytes, which are there before the object
    DIR/batches/…                see `batches`

Ids are random and made here. A request's id is looked up among them and never becomes a path by itself.
"""

from __future__ import annotations

import fcntl
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, Generic, Literal, TypeVar
from uuid import uuid4

from pydantic import BaseModel, ValidationError

from jaxinfer.batch_job.files import replace_file
from jaxinfer.openai.errors import RefusedError
from jaxinfer.validation import shown

MAX_FILES = 1_000  # of a tenant
MAX_TENANT_BYTES = 2**34  # of the files of a tenant
MAX_FILENAME = 255  # characters

Purpose = Literal["batch", "batch_output"]


class StoredObject(BaseModel):
    """An object of the API that the server keeps."""

    id: str
    created_at: int  # seconds since 1970


O = TypeVar("O", bound=StoredObject)


class Stored(BaseModel, Generic[O]):
    """An object with its tenant, None on a server without keys, and its time in ns, which orders a list."""

    tenant: str | None
    created_ns: int
    object: O


class Objects(Generic[O]):
    """Objects in memory and in a folder: each in a file of its own, which is replaced at once."""

    def __init__(self, folder: Path, kind: type[Stored[O]]) -> None:
        """Reads the folder; ValueError if a file in it is damaged."""
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        found = []
        for path in folder.glob("*.json"):
            try:
                found.append(kind.model_validate_json(path.read_bytes()))
            except ValidationError as error:
                raise ValueError(f"{path} is damaged ({error.errors()[0]['msg']}); remove it") from None
        found.sort(key=lambda stored: stored.created_ns)
        self._kind = kind
        self.all = {stored.object.id: stored for stored in found}  # the oldest first

    def of(self, tenant: str | None) -> list[O]:
        """Returns the objects of a tenant, the oldest first."""
        return [stored.object for stored in list(self.all.values()) if stored.tenant == tenant]

    def find(self, object_id: str, tenant: str | None, param: str) -> O:
        """Returns an object; RefusedError 404 if there is none with this id, or it is another tenant's."""
        stored = self.all.get(object_id)
        if stored is None or stored.tenant != tenant:
            raise RefusedError(404, f"{param}={shown(object_id)} does not exist", param=param)
        return stored.object

    def add(self, value: O, tenant: str | None) -> None:
        """Adds an object, in memory and on disk."""
        self.save(self._kind(tenant=tenant, created_ns=time.time_ns(), object=value))

    def remove(self, object_id: str) -> None:
        (self._folder / f"{object_id}.json").unlink(missing_ok=True)
        self.all.pop(object_id, None)

    def save(self, stored: Stored[O]) -> None:
        """Writes an object that has changed."""
        content = stored.model_dump_json().encode()
        replace_file(self._folder / f"{stored.object.id}.json", lambda file: file.writelines([content]))
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
        """Opens or creates the folder; ValueError if another server uses it or a file in it is damaged."""
        self.folder, self.max_file_bytes = folder, max_file_bytes
        self._held = self._hold()
        self._lock = Lock()
        self._objects: Objects[FileObject] = Objects(folder / "files", Stored[FileObject])
        for path in (folder / "files").iterdir():  # left by a killed process
            if path.suffix != ".json" and path.stem not in self._objects.all:
                path.unlink()

    def _hold(self) -> BinaryIO:
        """Returns the file whose lock keeps other servers away, and ends with the process."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # prompts are private
            file = (self.folder / "lock").open("wb")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BaseException:
                file.close()
                raise
        except BlockingIOError:
            raise ValueError(f"another server uses {self.folder}; give it another folder") from None
        except OSError as error:
            raise ValueError(f"{self.folder} cannot be used ({error.strerror}); give another folder") from None
        return file

    def close(self) -> None:
        """Lets another server use the folder."""
        self._held.close()

    def path(self, file: FileObject) -> Path:
        """Returns the path of a file's content."""
        return self.folder / "files" / f"{file.id}.content"

    def find(self, file_id: str, tenant: str | None, param: str = "file_id") -> FileObject:
        """Returns a file of a tenant; RefusedError 404, which names the parameter, if it has no such file."""
        return self._objects.find(file_id, tenant, param)

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
        file = FileObject(
            id=f"file-{uuid4().hex}", created_at=int(time.time()), bytes=num_bytes, filename=name, purpose="batch"
        )
        with self._lock:
            self.require_room(tenant, 1 + num_to_come, num_bytes)
            replace_file(self.path(file), lambda target: shutil.copyfileobj(content, target))
            self._objects.add(file, tenant)
        return file

    def write_output(self, file_id: str, filename: str, tenant: str | None, records: Iterator[bytes]) -> bool:
        """Stores the records of a batch as a file; False if there are none. It may be repeated after a kill."""
        first = next(records, None)
        if first is None:
            return False
        file = FileObject(id=file_id, created_at=int(time.time()), bytes=0, filename=filename, purpose="batch_output")

        def write(target: BinaryIO) -> None:
            target.write(first)
            target.writelines(records)

        replace_file(self.path(file), write)
        file = file.model_copy(update={"bytes": self.path(file).stat().st_size})
        with self._lock:
            self._objects.add(file, tenant)
        return True

    def remove(self, file_id: str, tenant: str | None) -> None:
        """Removes a file of a tenant; RefusedError 404 if it has no such file."""
        with self._lock:
            file = self.find(file_id, tenant)
            # In this order, so that a kill leaves no object without content.
            self._objects.remove(file.id)
            with suppress(FileNotFoundError):
                self.path(file).unlink()
