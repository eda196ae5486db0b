"""The last states of each request, kept on the device for those who draft from them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.engine.execution.executable_cache import compile_or_load
from jaxinfer.engine.request.request import Request
from jaxinfer.engine.scheduling.step import Step
from jaxinfer.engine.scheduling.step_results import SampledToken
from jaxinfer.plan.memory import num_bytes


@dataclass
class Window:
    """Where the states of a request are: in which row, of how many tokens, up to which."""

    row: int
    num_known: int
    end: int


@dataclass(frozen=True)
class Piece:
    """States of a request in those of a step: from which place on, of how many tokens, the first at which position."""

    place: int
    count: int
    start: int


class StateWindows:
    """The states of the last W tokens of up to R requests, [R, W, D], the newest last.

    Steps are only noted; what they have computed is entered when somebody asks, so steps nobody asks after cost
    nothing. A request whose states do not follow those in its window begins a new one.
    """

    def __init__(self, num_rows: int, width: int, hidden_size: int, dtype: Any, step_sizes: Iterable[int]) -> None:
        self._width = width
        self._windows = jnp.zeros((num_rows, width, hidden_size), dtype)
        self._requests: dict[int, Window] = {}  # the one that was entered last comes last
        self._free = list(range(num_rows))
        self._noted: deque[tuple[Any, dict[int, Piece]]] = deque(maxlen=width)
        self._sources = np.arange(num_rows * width, dtype=np.int32).reshape(num_rows, width)
        self._compiled: dict[int, jax.stages.Compiled] = {}
        self.num_bytes = 0  # of the windows, before and after a step is entered, and of the states that are noted
        for size in sorted(set(step_sizes)):
            arguments = (self._windows, jax.ShapeDtypeStruct((size, hidden_size), dtype), self._sources)
            self._compiled[size] = compile_or_load(enter_states, *arguments)
            self.num_bytes = 2 * num_bytes(self._windows) + width * num_bytes(arguments[1])

    @property
    def num_executables(self) -> int:
        return len(self._compiled)

    def note(self, step: Step, emitted: Sequence[Sequence[SampledToken]], hidden: Any) -> None:
        """Notes the states [T, D] of a step. Those of drafts that were not accepted are none of the request's."""
        pieces, place = {}, 0
        num_right = [max(len(tokens) - 1, 0) for tokens in emitted] if step.is_verify else [0] * len(step.chunks)
        for chunk, count_right in zip(step.chunks, num_right, strict=True):
            if not chunk.is_stale:
                count = chunk.num_tokens + count_right
                pieces[chunk.request.request_id] = Piece(place, count, chunk.start)
            place += chunk.num_tokens + len(chunk.drafts)
        self._noted.append((hidden, pieces))

    def forget(self, request: Request) -> None:
        """Is told that a request has ended."""
        window = self._requests.pop(request.request_id, None)
        if window is not None:
            self._free.append(window.row)
        for _, pieces in self._noted:
            pieces.pop(request.request_id, None)

    def enter(self) -> jax.Array:
        """Enters what was noted and returns the windows."""
        while self._noted:
            hidden, pieces = self._noted.popleft()
            sources = self._sources.copy()
            for request_id, piece in pieces.items():
                self._enter(request_id, piece, sources)
            self._windows = self._compiled[hidden.shape[0]](self._windows, hidden, sources)
        return self._windows

    def find(self, request: Request) -> Window | None:
        """Returns where the states are from the last of which the request's last token was drawn, after `enter`."""
        window = self._requests.get(request.request_id)
        # One that was set back since has fewer tokens than the step has left it with.
        return window if window is not None and window.end == len(request.token_ids) - 1 else None

    def _enter(self, request_id: int, piece: Piece, sources: np.ndarray) -> None:
        window = self._requests.pop(request_id, None)
        if window is None:
            if not self._free:  # of one that gave way
                self._free.append(self._requests.pop(next(iter(self._requests))).row)
            window = Window(self._free.pop(), 0, piece.start)
        if window.end != piece.start:
            window.num_known = 0
        # window 4, of which 2 stay, and 2 of the step:  sources 2 3 (of the row) 4 R + place …
        num_new = min(piece.count, self._width)
        old = self._sources[window.row, num_new:]
        first = self._sources.size + piece.place + piece.count - num_new
        sources[window.row] = np.concatenate([old, np.arange(first, first + num_new, dtype=np.int32)])
        window.num_known = min(window.num_known + num_new, self._width)
        window.end = piece.start + piece.count
        self._requests[request_id] = window


@jax.jit
def enter_states(windows: jax.Array, hidden: jax.Array, sources: jax.Array) -> jax.Array:
    """Returns windows [R, W, D] made of the old ones and states [T, D], all in a row, as `sources` i32[R, W] say."""
    return jnp.concatenate([windows.reshape(-1, windows.shape[-1]), hidden])[sources]
