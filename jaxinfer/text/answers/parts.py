"""The parts of an answer, whole and piece by piece."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True)
class ToolCall:
    """A call of a function.

    `arguments` is the text of a JSON object. If the answer ended or broke off inside the call, it is the beginning of
    one. Ids are random, so comparisons leave them out.
    """

    id: str = field(compare=False)
    name: str
    arguments: str


@dataclass(frozen=True)
class Answer:
    """An answer without special tokens and marks."""

    content: str
    reasoning: str | None = None  # None for an answer without any
    tool_calls: tuple[ToolCall, ...] = ()


class ContentPiece(NamedTuple):
    """More text of the content."""

    text: str


class ReasoningPiece(NamedTuple):
    """More text of the reasoning."""

    text: str


class CallBegin(NamedTuple):
    """The beginning of a tool call; its arguments follow."""

    index: int  # among the calls of the answer
    id: str
    name: str


class ArgumentsPiece(NamedTuple):
    """More text of the arguments of the tool call at `index`."""

    index: int
    text: str


Part = ContentPiece | ReasoningPiece | CallBegin | ArgumentsPiece


def answer_of(parts: Iterable[Part]) -> Answer:
    """Returns the answer that has these parts."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[CallBegin] = []
    arguments: list[list[str]] = []
    for part in parts:
        match part:
            case ContentPiece(text):
                content.append(text)
            case ReasoningPiece(text):
                reasoning.append(text)
            case CallBegin():
                calls.append(part)
                arguments.append([])
            case ArgumentsPiece(index, text):
                arguments[index].append(text)
    return Answer(
        content="".join(content),
        reasoning="".join(reasoning) or None,
        tool_calls=tuple(
            ToolCall(id=call.id, name=call.name, arguments="".join(pieces))
            for call, pieces in zip(calls, arguments, strict=True)
        ),
    )


def random_call_id() -> str:
    """Returns a new id of a tool call: nine letters and digits, for the templates of Mistral take no others."""
    return secrets.token_hex(5)[:9]


class Prose:
    """Text without the white space beside marks. Between its blocks, which marks separate, stands a line feed."""

    def __init__(self, emit: Callable[[str], None], *, follows_mark: bool) -> None:
        self._emit = emit
        self._follows_mark = follows_mark
        self._is_empty = True  # so far
        self._is_block_empty = True
        self._gap: list[str] = []  # white space that counts only if more text follows

    def write(self, text: str) -> None:
        """Adds text to the block."""
        body = text.rstrip()
        begins = self._is_block_empty and self._follows_mark
        if not body:
            self._gap += [] if begins else [text]
            return
        gap = text[len(body) :]
        if begins:
            body = body.lstrip() if self._is_empty else "\n" + body.lstrip()
        self._emit("".join(self._gap) + body)
        self._gap = [gap] if gap else []
        self._is_empty = self._is_block_empty = False

    def end_block(self) -> None:
        """Ends the block at a mark, before which white space is no text."""
        self._gap = []
        self._is_block_empty = self._follows_mark = True

    def finish(self) -> None:
        """Ends the answer, at whose end white space is text."""
        if self._gap:
            self._emit("".join(self._gap))
            self._gap = []


class Output:
    """Receives what a style reads, and keeps it as parts until they are taken."""

    def __init__(self, new_id: Callable[[], str] = random_call_id) -> None:
        self._new_id = new_id
        self._parts: list[Part] = []
        self._num_calls = 0
        self.content = Prose(lambda text: self._parts.append(ContentPiece(text)), follows_mark=False)
        self.reasoning = Prose(lambda text: self._parts.append(ReasoningPiece(text)), follows_mark=True)

    def begin_call(self, name: str, call_id: str | None = None) -> None:
        """Begins the next tool call; the text before it ends."""
        self.content.end_block()
        self.reasoning.end_block()
        self._parts.append(CallBegin(self._num_calls, call_id or self._new_id(), name))
        self._num_calls += 1

    def arguments(self, text: str) -> None:
        """Adds text to the arguments of the call begun last."""
        if text:
            self._parts.append(ArgumentsPiece(self._num_calls - 1, text))

    def take(self) -> list[Part]:
        """Returns the parts since the last call."""
        parts, self._parts = self._parts, []
        return parts
