"""Compiled functions on disk: loads an executable that the same code has compiled on the same kind of machine.

JAX's own compilation cache needs the traced and lowered function for its key: half of a small model's start. Our key
hashes the inputs of tracing (source, versions, options, shapes), so a hit skips tracing too. The files lie in JAX's
cache folder, within its limit or MAX_BYTES; disabling that cache disables this one.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import pickle
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from jax._src import config as jax_config
from jax.experimental.serialize_executable import deserialize_and_load, serialize

from jaxinfer.atomic_file import SEAL_BYTES, files_by_use, read_checked, remove_orphans, try_lock, write_checked
from jaxinfer.device import COMPILATION_CACHE
from jaxinfer.engine.execution.executable_key import devices_of, executable_key

logger = logging.getLogger(__name__)

# Longest wait for another process that compiles the same, which may have been stopped; then both compile.
MAX_WAIT_SECONDS = 600
POLL_SECONDS = 0.05
# Limit of the files if the user sets none for JAX's cache. The ten steps of the bundled model take 15 MB on a CPU.
MAX_BYTES = 2**32
NAME = "jaxinfer-[0-9a-f]+"
JAXS_NAME = ".+-cache"

# Exceptions of the device, the disk or JAX when an executable cannot be written or read. Pickle raises AttributeError
# for a function that is local to another, such as a callback to Python.
_FAILURES = (
    *(OSError, ValueError, TypeError, AttributeError, NotImplementedError, pickle.PickleError),
    jax.errors.JaxRuntimeError,
)


def compile_or_load(function: Any, *args: Any, **statics: Any) -> jax.stages.Compiled:
    """Returns `function.lower(*args, **statics).compile()` for a jitted function of this package, from disk if cached.

    Always compiles if options have logits processors of the user (`custom`), because no key shows their changes.
    """
    folder = cache_folder()
    if folder is None or _has_custom(statics) or jax.process_count() > 1:
        return _compile(function, args, statics)
    path, devices = folder / f"jaxinfer-{_key(function, args, statics)}", devices_of(args)
    found = _inode(path)
    if (loaded := _load(path, devices)) is not None:
        return loaded
    with _compiling_alone(path):
        if _inode(path) != found and (loaded := _load(path, devices)) is not None:  # another has just written it
            return loaded
        with _no_jax_entry():
            compiled = _compile(function, args, statics, without=[_no_pass()])
        try:
            _keep(path, pickle.dumps(serialize(compiled)))
        except _FAILURES as error:
            logger.warning("%s cannot be kept for the next start: %s", path, error)
    return compiled


def _inode(path: Path) -> int | None:
    """Returns the number that another file at this path does not have; None if there is no file."""
    with contextlib.suppress(OSError):
        return path.stat().st_ino
    return None


def _load(path: Path, devices: list[Any]) -> jax.stages.Compiled | None:
    """Returns the executable in a file; None if there is none that can be loaded."""
    try:
        if not _is_private(path):  # unpickling could run code of another user
            raise PermissionError("another user can write to it")
        with contextlib.suppress(OSError):  # root's file may be read here, but not touched
            os.utime(path)  # tells all processes when it was last used
        return deserialize_and_load(*pickle.loads(read_checked(path)), execution_devices=devices)
    except FileNotFoundError:
        pass
    except _FAILURES as error:
        logger.warning("%s cannot be loaded and is made anew: %s", path, error)
    return None


@contextlib.contextmanager
def _compiling_alone(path: Path) -> Iterator[None]:
    """Waits while another thread or process compiles for the same file.

    The system releases the lock of a process that ends. A compilation goes on without the lock after MAX_WAIT_SECONDS,
    or if the folder has no locks.
    """
    # A name that `remove_orphans` knows, should a process be killed here.
    lock = path.with_name(f".{path.name}.0")
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            file = stack.enter_context(open(os.open(lock, os.O_RDWR | os.O_CREAT, 0o600), "rb"))
            deadline = time.monotonic() + MAX_WAIT_SECONDS
            while not (is_locked := try_lock(file)) and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
            if is_locked:  # a thread that has opened the file by now waits for this lock, and finds the result
                stack.callback(lock.unlink, missing_ok=True)
        yield


def _has_custom(statics: dict[str, Any]) -> bool:
    return any(getattr(value, "custom", ()) for value in statics.values())


def _keep(path: Path, content: bytes) -> None:
    """Writes a file to the folder, unless it is larger than all files together may be."""
    if SEAL_BYTES + len(content) > _max_bytes():
        return
    write_checked(path, [content])
    with contextlib.suppress(FileNotFoundError):  # another process has just removed it
        path.chmod(0o600)  # else `_is_private` refuses it if the umask lets a group write
    _make_room(path.parent)


def _make_room(folder: Path) -> None:
    """Removes the files that were used longest ago, if all together exceed the limit."""
    files = _counted_files(folder)
    excess = sum(size for *_, size in files) - _max_bytes()
    for _, name, size in files:
        if excess <= 0:
            break
        excess -= size
        with contextlib.suppress(OSError):
            (folder / name).unlink()


def _counted_files(folder: Path) -> list[Any]:
    """Returns the files that the limit is for, as `files_by_use` does."""
    # In the package's own folder JAX's entries count too, among them those that no process can read any more: earlier
    # versions let JAX write one beside each of ours. JAX bounds its entries only if the user sets a limit.
    is_own = folder == COMPILATION_CACHE and _jaxs_limit() < 0
    return files_by_use(folder, f"{NAME}|{JAXS_NAME}" if is_own else NAME)


def cache_bytes(folder: Path) -> tuple[int, int]:
    """Returns the bytes of the files in the folder of the cache, and their limit."""
    return sum(size for *_, size in _counted_files(folder)), _max_bytes()


def _max_bytes() -> int:
    limit = _jaxs_limit()
    return MAX_BYTES if limit < 0 else limit


def _jaxs_limit() -> int:
    """Returns the limit of JAX's cache in bytes, below 0 if the user has set none; 0 disables the cache."""
    return jax.config.values["jax_compilation_cache_max_size"]


def _no_jax_entry() -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which this thread's compilations leave no entry in JAX's own cache.

    Such an entry would never be read: `_no_pass` gives each a key of its own.
    """
    # Options have a value per thread, but JAX exports no context manager for this one.
    min_seconds = getattr(jax_config, "persistent_cache_min_compile_time_secs", None)
    return contextlib.nullcontext() if min_seconds is None else min_seconds(math.inf)


def _no_pass() -> str:
    """Returns the name of no pass of XLA, with which JAX compiles anew instead of reading its own cache.

    XLA for CPU serialises an executable that it has itself read from a cache without the functions in it.
    """
    return f"no-pass-{os.urandom(8).hex()}"


def _compiler_options(without: Sequence[str]) -> dict[str, str]:
    """Returns the options of a compilation that leaves out passes of XLA, beside those of XLA_FLAGS.

    On GPU it leaves out rematerialization, which computes again what memory seems to lack. XLA counts pages as memory
    that steps need. If they take more than 80 % of the device, it would compute a decode step of 463 kernels by 603.
    """
    flags = re.findall(r"--xla_disable_hlo_passes=(\S+)", os.environ.get("XLA_FLAGS", ""))
    passes = [*flags[-1:], *(["rematerialization"] if jax.default_backend() == "gpu" else []), *without]
    return {"xla_disable_hlo_passes": ",".join(passes)} if passes else {}


def _compile(
    function: Any, args: Sequence[Any], statics: dict[str, Any], without: Sequence[str] = ()
) -> jax.stages.Compiled:
    compiled = function.lower(*args, **statics).compile(compiler_options=_compiler_options(without))
    # Otherwise JAX keeps all traces and executables until the process ends: thousands of memory maps per engine.
    function.clear_cache()
    return compiled


def cache_folder() -> Path | None:
    """Returns the folder of the cache, or None if the cache is off or the folder cannot be used."""
    settings = jax.config.values
    folder = settings["jax_compilation_cache_dir"]
    # JAX also accepts URLs of cloud storage; this cache does not.
    is_used = folder and settings["jax_enable_compilation_cache"] and _jaxs_limit() and "://" not in folder
    return Path(folder) if is_used and _is_usable(Path(folder)) else None


@functools.cache  # checks once, and so warns once
def _is_usable(folder: Path) -> bool:
    """True if the folder can be used; creates it if necessary, and removes orphaned files and those above the limit.

    False, with a warning, if another user can write to it.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_private(folder):
            logger.warning(
                "%s belongs to another user, or others can write to it: compiled steps in it could run their code, so"
                " they are neither loaded nor kept; run `chmod go-w %s`, or set JAX_COMPILATION_CACHE_DIR to a folder"
                " of your own",
                folder,
                folder,
            )
            return False
        remove_orphans(folder, NAME)
        _make_room(folder)
    except OSError as error:
        logger.warning("%s cannot be used, so compiled steps cannot be kept for the next start: %s", folder, error)
        return False
    return True


def _is_private(path: Path) -> bool:
    """True if only this user and root can write to the path; always True on Windows, which has no such check."""
    status = path.stat()
    return os.name == "nt" or (status.st_uid in (0, os.getuid()) and not status.st_mode & 0o022)


def _key(function: Any, args: Sequence[Any], statics: dict[str, Any]) -> str:
    return executable_key(function, args, statics, compiler=__name__)
