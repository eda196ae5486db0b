"""Compiles structures for trial in a process of their own.

Some take `llguidance` minutes or gigabytes, and its own limits stop not all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from jaxinfer.text.limited_process import LimitedProcess, LimitError
from jaxinfer.text.schema_check import schema_error

MAX_SECONDS = 5


class Trial:
    """Compiles structures one after the other, in a process that is begun with the first."""

    def __init__(self) -> None:
        self._process = LimitedProcess("jaxinfer.text.structure_trial")

    def run(self, kind: str, grammar: str, schema: str | None) -> None:
        """Returns when a structure, in Lark's notation, was compiled; `schema` is its JSON schema, if it has one.

        Raises ValueError if that takes too much time or memory, or if the schema is none. What else is wrong with a
        structure shows where it is compiled for use.
        """
        try:
            error = self._process.ask([grammar, schema], MAX_SECONDS)
        except LimitError as limit:
            raise ValueError(f"{kind} takes more than {limit} to compile; make it smaller or simpler") from None
        if error:
            raise ValueError(f"{kind} is not a JSON schema: {error}")


def answers() -> Callable[[tuple[str, str | None]], str | None]:
    """Returns the function of the process, from a structure and its schema to the schema's error."""
    from llguidance import LLMatcher, LLTokenizer

    tokenizer = LLTokenizer("byte")

    def compile_structure(structure: tuple[str, str | None]) -> str | None:
        grammar, schema = structure
        error = None if schema is None else schema_error(schema)
        if error is None:
            with contextlib.suppress(ValueError):
                LLMatcher(tokenizer, grammar, log_level=0).compute_bitmask()
        return error

    return compile_structure
