"""What reads the tokens of a request as they come: their text, and the structure that they have to have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np


class TextStream(Protocol):
    """Turns tokens into text as they come; `jaxinfer.tokenizer.Detokenizer` is one.

    A token that is in `texts` now need not be pushed: that is its text.
    """

    @property
    def texts(self) -> Mapping[int, str]: ...

    @property
    def is_stopped(self) -> bool: ...

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class Structure(Protocol):
    """Which tokens may come next; `jaxinfer.grammar.Grammar` is one."""

    @property
    def is_complete(self) -> bool: ...

    @property
    def error(self) -> str | None: ...

    def fault(self, text: str) -> str | None: ...

    def accept(self, token_id: int) -> None: ...

    def mask(self) -> np.ndarray: ...

    def allowed(self, token_ids: Sequence[int], parents: Sequence[int]) -> list[int]: ...

    def masks(self, token_ids: Sequence[int], parents: Sequence[int]) -> list[np.ndarray]: ...
