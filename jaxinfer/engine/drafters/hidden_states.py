"""The last hidden states of each request, kept on the device for drafters that use them."""

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
from jaxinfer.model.components.layers import linear
from jaxinfer.parallel.placement import DEFAULT_DEVICE, Placement
from jaxinfer.plan.memory import num_bytes


@dataclass
class Window:
    """The location of a request's states in the buffer."""

    row: int
    num_known: int  # states of the row that are valid, at its end
    end: int  # position after the token of the newest state


@dataclass(frozen=True)
class Piece:
    """The location of a request's states among those of a step, [T, S]."""

    place: int  # index of the first state
    count: int
    start: int  # position of the first state's token in the request


class StateWindows:
    """A buffer of the hidden states of the last W tokens of up to R requests, [R, W, D], newest last.

    `note` only keeps a reference to a step's states, and `enter` copies them when a drafter needs the buffer. So steps
    without drafts cost nothing, except large prefills, which `note` enters before their states take too much memory. If
    a request's new states do not continue its window, the window starts again.

    The states of a step are [T, S]. With a `reduction` [D, S] the buffer has their products with it, else D = S.
    """

    def __init__(
        self,
        num_rows: int,
        width: int,
        state_size: int,
        dtype: Any,
        step_sizes: Iterable[int],
        reduction: jax.Array | None = None,
        placement: Placement = DEFAULT_DEVICE,
    ) -> None:
        hidden_size = state_size if reduction is None else reduction.shape[0]
        self._width, self._reduction = width, placement.put(reduction)
        self._windows = placement.put(jnp.zeros((num_rows, width, hidden_size), dtype))
        self._requests: dict[int, Window] = {}  # by request id, least recently updated first
        self._free = list(range(num_rows))
        self._noted: deque[tuple[Any, dict[int, Piece]]] = deque(maxlen=width)
        self._sources = np.arange(num_rows * width, dtype=np.int32).reshape(num_rows, width)
        self._compiled: dict[int, jax.stages.Compiled] = {}
        sizes = sorted(set(step_sizes))
        self._most_noted = num_rows * width + sizes[-1]  # tokens; W decode steps have no more
        enter = jax.jit(enter_states, out_shardings=placement.whole)
        for size in sizes:
            states = placement.replicated(jax.ShapeDtypeStruct((size, state_size), dtype))
            arguments = (self._windows, states, placement.replicated(self._sources), self._reduction)
            self._compiled[size] = compile_or_load(enter, *arguments, num_rows=size)
        # The buffer before and after an update, and the noted states.
        most = jax.ShapeDtypeStruct((self._most_noted + sizes[-1], state_size), dtype)
        self.num_bytes = 2 * num_bytes(self._windows) + num_bytes(most)

    @property
    def num_executables(self) -> int:
        return len(self._compiled)

    def note(self, step: Step, emitted: Sequence[Sequence[SampledToken]], hidden: Any) -> None:
        """Notes the states [T, S] of a step, leaving out those of rejected drafts."""
        pieces, place = {}, 0
        num_right = [max(len(tokens) - 1, 0) for tokens in emitted] if step.is_verify else [0] * len(step.chunks)
        for chunk, count_right in zip(step.chunks, num_right, strict=True):
            if not chunk.is_stale:
                count = chunk.num_tokens + count_right
                pieces[chunk.request.request_id] = Piece(place, count, chunk.start)
            place += chunk.num_tokens + len(chunk.drafts)
        self._noted.append((hidden, pieces))
        if sum(states.shape[0] for states, _ in self._noted) > self._most_noted:
            self.enter()

    def forget(self, request: Request) -> None:
        """Drops the states of a request that has ended."""
        window = self._requests.pop(request.request_id, None)
        if window is not None:
            self._free.append(window.row)
        for _, pieces in self._noted:
            pieces.pop(request.request_id, None)

    def forget_all(self) -> None:
        """Drops the states of all requests."""
        self._free += [window.row for window in self._requests.values()]
        self._requests.clear()
        self._noted.clear()

    def enter(self) -> jax.Array:
        """Copies the noted states into the buffer and returns it, [R, W, D]."""
        while self._noted:
            hidden, pieces = self._noted.popleft()
            sources = self._sources.copy()
            for request_id, piece in pieces.items():
                self._enter(request_id, piece, sources)
            enter = self._compiled[hidden.shape[0]]
            self._windows = enter(self._windows, hidden, sources, self._reduction)
        return self._windows

    def find(self, request: Request) -> Window | None:
        """Returns the request's window; None if its last token was not sampled from the newest state.

        Call `enter` first.
        """
        window = self._requests.get(request.request_id)
        # After a rewind, the request has fewer tokens than `window.end` + 1.
        return window if window is not None and window.end == len(request.token_ids) - 1 else None

    def _enter(self, request_id: int, piece: Piece, sources: np.ndarray) -> None:
        window = self._requests.pop(request_id, None)
        if window is None:
            if not self._free:  # then the least recently updated row belongs to a preempted request
                self._free.append(self._requests.pop(next(iter(self._requests))).row)
            window = Window(self._free.pop(), 0, piece.start)
        if window.end != piece.start:
            window.num_known = 0
        # W = 4, 2 old states stay, 2 new ones:  sources[row] = 4 row + 2, 4 row + 3, 4 R + place, 4 R + place + 1
        num_new = min(piece.count, self._width)
        old = self._sources[window.row, num_new:]
        first = self._sources.size + piece.place + piece.count - num_new
        sources[window.row] = np.concatenate([old, np.arange(first, first + num_new, dtype=np.int32)])
        window.num_known = min(window.num_known + num_new, self._width)
        window.end = piece.start + piece.count
        self._requests[request_id] = window


def enter_states(
    windows: jax.Array, hidden: jax.Array, sources: jax.Array, reduction: jax.Array | None = None
) -> jax.Array:
    """Returns new windows [R, W, D]; `sources` i32[R, W] index the old ones, flattened, and then the states of a step.

    These are hidden [T, S], times the reduction [D, S] if there is one.
    """
    states = hidden if reduction is None else linear(hidden, reduction)
    return jnp.concatenate([windows.reshape(-1, windows.shape[-1]), states])[sources]
