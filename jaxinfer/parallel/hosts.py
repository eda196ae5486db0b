"""One engine over several processes: process 0 schedules, and the others launch what it launches.

    process 0   schedule · record 7 · launch 7 · commit 6 · schedule · record 8 · ...
                              │ the key-value store of JAX's distributed service, which is in process 0
    process 1              record 7 · launch 7 · wait · record 8 · ...

A record has a number, the executable, a digest and the arguments of one launch, arrays that have not changed since the
executable's last launch left out. So no process but the first decides anything, and clocks may differ. The record
of an adapter has the adapter's folder or id. Each process reads the adapter, and all compare its digest before they
write it into a slot.

Each process also has a thread that writes its state to the store every second and reads those of the others. If one
has failed, or has not written for `DEAD_SECONDS`, the thread names it on standard error and ends its own process.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import logging
import os
import platform
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import jax
import numpy as np
from jax._src import distributed  # the only access to the store that jax.distributed.initialize connects to

logger = logging.getLogger(__name__)

# A process is dead if its state has not changed for so long; its thread may wait for the interpreter meanwhile.
BEAT_SECONDS, DEAD_SECONDS = 1.0, 20.0
# How long a process waits for another one to begin; how long one that has failed waits for the others to read so.
START_SECONDS, FAREWELL_SECONDS = 600, 5.0
EXIT_FAILED = 1
NOTHING = "nothing"  # in place of a value that a process does not have
# Status of a process. One that is lost has failed with an error of JAX, whose cause may be that another one has died.
ALIVE, ENDED, FAILED, LOST = "alive", "ended", "failed", "lost"
# Number of a launch, its executable and digest; then a bit for each array that is there, and the bytes of these arrays.
HEADER = struct.Struct("<QI16s")
CLOSE = 2**32 - 1  # in place of an executable: process 0 has closed its engine
OUR_KEYS = "jaxinfer"

_joined: Hosts | None = None


class Hosts:
    """This process among all that compute with one engine. A process takes part in one engine only."""

    def __init__(self) -> None:
        self._client: Any = distributed.global_state.client
        self.index, self.count = jax.process_index(), jax.process_count()
        self._status, self._error = ALIVE, ""
        self._states: dict[int, dict[str, Any]] = {}  # by process, as read last
        self._heard: dict[int, tuple[int, float]] = {}  # by process: its last beat, and when it came
        self._lost_since: float | None = None  # when the first other process was lost
        self._has_left = threading.Event()  # set when process 0 has ended
        self._terminates = False  # this process, which is not process 0, has received SIGTERM
        self._lock = threading.RLock()  # for the one line at the end
        self._publishing = threading.Lock()  # no state is written after a later one
        self._num_compared = 0
        # Of launches: their number, their chained digest, and the last arrays of each executable.
        self._number, self._digest = 0, b""
        self._num_deleted = 0
        self._last: dict[int, list[bytes]] = {}
        self._shapes: Sequence[Any] = ()

    @classmethod
    def join(cls) -> Hosts:
        """Takes part in the engine of all processes, and begins to watch the others.

        Raises ValueError at a second call and without the service, and RuntimeError that names a process which does not
        come.
        """
        global _joined
        if distributed.global_state.client is None:
            raise ValueError(
                f"the devices are those of {jax.process_count()} processes, which jax.distributed.initialize has not"
                " connected; call it before anything else of JAX, or take no more devices than one process has"
            )
        if _joined is not None:
            raise ValueError(
                "this process has had an LLM over several processes, and the others left with it; make one LLM in each"
                " start of the processes"
            )
        _joined = hosts = cls()
        atexit.register(hosts._leave)
        hosts._take_signals_back()
        if hosts.index > 0:
            hosts._explain_aborts()
        hosts._publish(0)
        threading.Thread(target=hosts._watch, name="hosts", daemon=True).start()
        for index in range(hosts.count):
            hosts._read(f"state/{index}", f"process {index} of {hosts.count} has not begun")
        return hosts

    def agree(self, facts: Mapping[str, str]) -> None:
        """Waits for all processes to come here; raises ValueError if another one has other facts than process 0."""
        for name, own in facts.items():
            others = self._of_all(own)
            different = [index for index, value in enumerate(others) if value != others[0]]
            if different:
                raise ValueError(
                    f"process {different[0]} has another {name} than process 0: {_cut(others[different[0]])} instead of"
                    f" {_cut(others[0])}; give all processes the same script, arguments and files"
                )

    def least(self, value: int | None) -> int | None:
        """Returns the least of the values of all processes; None if one has none. All must call it."""
        values = self._of_all(NOTHING if value is None else str(value))
        return None if NOTHING in values else min(map(int, values))

    def begin(self, shapes: Sequence[Any]) -> None:
        """Receives the shapes and dtypes of the host's arguments of each executable, a tree for each."""
        self._shapes = shapes

    def tell(self, executable: int, arguments: Any) -> None:
        """Writes a launch to the store, before process 0 makes it. The arguments are arrays of numpy."""
        self._write(executable, [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(arguments)])

    def launches(self) -> Iterator[tuple[int, Any]]:
        """Yields each launch of process 0, its executable and its arguments, until process 0 closes its engine.

        Raises RuntimeError if a launch is not the one that process 0 has written.
        """
        while (record := self._next_record()) is not None:
            number, executable, digest = HEADER.unpack_from(record)
            body = record[HEADER.size :]
            self._digest = _chained(self._digest, executable, body)
            if (number, digest) != (self._number, self._digest):
                raise RuntimeError(
                    f"launch {self._number} is not that of process 0: its number is {number}, its digest"
                    f" {digest.hex()} and here {self._digest.hex()}"
                )
            if executable == CLOSE:
                return
            yield executable, self._arguments(executable, body)
            self._number += 1

    def close(self) -> None:
        """Tells the other processes that no launch will follow."""
        if self.index == 0 and self._status == ALIVE:
            self._write(CLOSE, [])

    def wait_for_end(self) -> None:
        """Waits until process 0 has ended: JAX lets all processes leave together, and takes others for dead."""
        self._has_left.wait()
        logger.info("process %d of %d has made %d launches of process 0", self.index, self.count, self._number)

    def fail(self, error: BaseException) -> None:
        """Lets the other processes end with this error."""
        if self._status == ALIVE:
            self._status = LOST if isinstance(error, jax.errors.JaxRuntimeError) else FAILED
            self._error = f"{type(error).__name__}: {error}"

    @contextlib.contextmanager
    def failing_together(self) -> Iterator[None]:
        """Lets the other processes end with an exception of the block, SystemExit apart, before this one does."""
        try:
            yield
        except SystemExit:
            raise
        except BaseException as error:
            self.fail(error)
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # process 0 has gone
                self._publish(-1)
            if self.index == 0:  # the others read the error in its store
                self._wait_for_others(FAREWELL_SECONDS)
            raise

    def also_failing(self, fail: Callable[[BaseException], None]) -> Callable[[BaseException], None]:
        """Returns a function that calls both `fail`s."""

        def fail_all(error: BaseException) -> None:
            self.fail(error)
            fail(error)

        return fail_all

    def _of_all(self, own: str) -> list[str]:
        """Returns the values that all processes give at their same call."""
        self._num_compared += 1
        key = f"compared/{self._num_compared}"
        self._client.key_value_set(f"{OUR_KEYS}/{key}/{self.index}", own)
        # Some processes compile or read for longer than others. If one dies, the watching thread ends this one.
        return [self._read(f"{key}/{index}") for index in range(self.count)]

    def _read(self, key: str, complaint: str | None = None) -> str:
        """Waits for a value, without a bound if there is no complaint about a missing one."""
        began = time.monotonic()
        while complaint is None or time.monotonic() - began < START_SECONDS:
            with _no_timeout():
                return self._client.blocking_key_value_get(f"{OUR_KEYS}/{key}", int(2000 * BEAT_SECONDS))
        raise RuntimeError(f"{complaint} after {START_SECONDS} s; start the same script in all {self.count} processes")

    # Records.

    def _write(self, executable: int, arrays: list[bytes]) -> None:
        last = self._last.get(executable, [b""] * len(arrays))
        is_there = [own != old for own, old in zip(arrays, last, strict=True)]
        bits = np.packbits(np.array(is_there, np.bool_)).tobytes()
        body = b"".join([bits, *(own for own, there in zip(arrays, is_there, strict=True) if there)])
        self._digest = _chained(self._digest, executable, body)
        record = HEADER.pack(self._number, executable, self._digest) + body
        self._client.key_value_set_bytes(f"{OUR_KEYS}/launch/{self._number}", record)
        self._last[executable] = arrays
        self._number += 1

    def _next_record(self) -> bytes | None:
        """Returns the next launch, None if process 0 has ended without closing its engine."""
        key = f"{OUR_KEYS}/launch/{self._number}"
        while not self._has_left.is_set():
            with _no_timeout():
                return self._client.blocking_key_value_get_bytes(key, int(1000 * BEAT_SECONDS))
        return None

    def _arguments(self, executable: int, body: bytes) -> Any:
        leaves, structure = jax.tree.flatten(self._shapes[executable])
        last = self._last.setdefault(executable, [b""] * len(leaves))
        start = -(-len(leaves) // 8)
        is_there = np.unpackbits(np.frombuffer(body[:start], np.uint8), count=len(leaves))
        for i in np.flatnonzero(is_there):
            end = start + leaves[i].size * np.dtype(leaves[i].dtype).itemsize
            last[i], start = body[start:end], end
        arrays = [np.frombuffer(own, leaf.dtype).reshape(leaf.shape) for own, leaf in zip(last, leaves, strict=True)]
        return jax.tree.unflatten(structure, arrays)

    # Watching.

    def _watch(self) -> None:
        beat = 0
        while self._status != ENDED:
            beat += 1
            try:
                self._publish(beat)
                found = self._client.key_value_dir_get(f"{OUR_KEYS}/state/")
            except jax.errors.JaxRuntimeError:
                if self._status == FAILED:
                    self._end_with_own_failure()
                if self._status != ENDED:
                    self._end(f"{self._name(0)} has ended or cannot be reached")
                return
            self._judge({int(key.rpartition("/")[2]): json.loads(value) for key, value in found})
            time.sleep(BEAT_SECONDS)

    def _publish(self, beat: int) -> None:
        with self._publishing:
            state = {"beat": beat, "number": self._number, "host": platform.node(), "terminates": self._terminates}
            state |= {"status": self._status, "error": self._error}
            self._client.key_value_set(f"{OUR_KEYS}/state/{self.index}", json.dumps(state), allow_overwrite=True)

    def _judge(self, states: dict[int, dict[str, Any]]) -> None:
        """Ends this process if another one has failed or died; process 0 also deletes what all have read."""
        self._states, now = states, time.monotonic()
        for index, state in states.items():
            if index == self.index:
                continue
            if self._heard.get(index, (-1, 0.0))[0] != state["beat"]:
                self._heard[index] = state["beat"], now
            if state["status"] == LOST and self._lost_since is None:
                self._lost_since = now
            # Before that the dead one is named, if there is one.
            is_long_lost = self._lost_since is not None and now - self._lost_since > DEAD_SECONDS + 2 * BEAT_SECONDS
            if state["status"] == FAILED or (state["status"] == LOST and is_long_lost):
                self._end(f"{self._name(index)} has failed: {state['error']}")
            # A process that another one has ended has an error, with the other one's name.
            if state["status"] == ENDED and self._status == ALIVE and state["error"]:
                self._end(state["error"])
            if state["status"] == ENDED and index == 0:
                self._has_left.set()
            elif state["status"] == ENDED and self._status == ALIVE and states.get(0, state)["status"] != ENDED:
                self._end(f"{self._name(index)} has ended before process 0")
            elif state["status"] == ALIVE and now - self._heard[index][1] > DEAD_SECONDS:
                self._end(f"{self._name(index)} has died or hangs: nothing was heard of it for {DEAD_SECONDS:.0f} s")
        if self.index == 0 and not self._terminates and any(state["terminates"] for state in states.values()):
            self._terminates = True
            os.kill(os.getpid(), signal.SIGTERM)
        if self.index == 0 and len(states) == self.count:
            for number in range(self._num_deleted, least := min(state["number"] for state in states.values())):
                self._client.key_value_delete(f"{OUR_KEYS}/launch/{number}")
            self._num_deleted = max(least, self._num_deleted)

    def _name(self, index: int) -> str:
        host = self._states.get(index, {}).get("host", "")
        return f"process {index} of {self.count}{f' ({host})' if host else ''}"

    def _end(self, reason: str) -> None:
        """Prints one line and ends this process at once: its devices may wait for others without end."""
        with self._lock:
            self._say(f"{reason}; {self._name(self.index)} ends with it")
            was_alive = self._status == ALIVE
            if was_alive:
                self._status, self._error = ENDED, reason
        # Without the lock: the store answers in the thread that may be aborting, and that waits for it to explain so.
        if was_alive:
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self._publish(-1)
        os._exit(EXIT_FAILED)

    def _say(self, line: str) -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os.write(2, f"jaxinfer: {line}\n".encode())

    def _explain_aborts(self) -> None:
        """Says why this process may be aborted: the client of JAX does so at once when process 0 has gone."""
        libc = ctypes.CDLL(None)

        def explain(_: int) -> None:
            with self._lock:
                if self._status == FAILED:
                    self._end_with_own_failure()
                if self._status != ENDED:
                    self._say(
                        f"{self._name(self.index)} has aborted, perhaps because {self._name(0)} has ended or cannot be"
                        " reached; see the lines above"
                    )
                libc.signal(signal.SIGABRT, None)  # abort() then ends this process, with a core file if one is wanted

        self._on_abort = ctypes.CFUNCTYPE(None, ctypes.c_int)(explain)  # kept as long as the handler
        libc.signal(signal.SIGABRT, self._on_abort)

    def _take_signals_back(self) -> None:
        """Lets SIGTERM end the engine: JAX's preemption service has taken it in each process, and only notes it.

        Process 0 ends as without JAX, and the others with it; another one that has no handler lets process 0 receive
        the signal, which may first end its requests. Does nothing outside of the main thread.
        """
        if threading.current_thread() is not threading.main_thread():
            return

        def tell_process_0(*_: Any) -> None:
            self._terminates = True

        handler = signal.getsignal(signal.SIGTERM)  # as Python knows it; None: one that is not Python's
        if handler is not None:
            is_own = self.index == 0 or handler != signal.SIG_DFL
            signal.signal(signal.SIGTERM, handler if is_own else tell_process_0)

    def _leave(self) -> None:
        """Tells the others how this process ends, at its end; after an exception waits for them to read so."""
        if self._status == ALIVE and (error := getattr(sys, "last_value", None)) is not None:
            self.fail(error)
        if self._status == ALIVE:
            self._status = ENDED
            self._publish(-1)
            return
        # If another one has died, the watching thread names it and ends this process.
        self._wait_for_others(DEAD_SECONDS + FAREWELL_SECONDS)
        self._end_with_own_failure()

    def _wait_for_others(self, seconds: float) -> None:
        began = time.monotonic()
        while time.monotonic() - began < seconds and not self._have_others_ended:
            time.sleep(BEAT_SECONDS / 4)

    def _end_with_own_failure(self) -> None:
        with self._lock:
            self._say(f"{self._name(self.index)} has failed: {self._error}")
            os._exit(EXIT_FAILED)

    @property
    def _have_others_ended(self) -> bool:
        # The watching thread may not have read their states yet.
        others = [state for index, state in self._states.items() if index != self.index]
        return len(others) == self.count - 1 and all(state["status"] == ENDED for state in others)


def of_this_process() -> Hosts:
    """Returns the part that this process takes; call `Hosts.join` first."""
    assert _joined is not None
    return _joined


def _chained(digest: bytes, executable: int, body: bytes) -> bytes:
    return blake2b(digest + struct.pack("<I", executable) + body, digest_size=16).digest()


@contextlib.contextmanager
def _no_timeout() -> Iterator[None]:
    """Suppresses the error of a read of the store that has waited for its time."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise


def _cut(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:100]} ... {text[-97:]}"
