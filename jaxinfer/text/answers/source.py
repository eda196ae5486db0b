"""Text that arrives piece by piece, for readers that are generators: they suspend where they need more of it.

Each reader consumes what it has understood, and decides nothing that a later piece could change. So the cuts between
pieces change nothing, and the time is linear in the text: what stays unread is shorter than a mark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from typing import Literal, TypeVar

T = TypeVar("T")
Reader = Generator[None, None, T]  # suspends until there is more text
Write = Callable[[str], object]

SPACE = re.compile(r"[ \t\n\r]*")
STRING_RUN = re.compile(r'[^"\\\x00-\x1f]*')
SCALAR_RUN = re.compile(r"[-+.0-9A-Za-z]*")
SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
HEX = frozenset("0123456789abcdefABCDEF")


class Marks:
    """Several strings to look for, none of which begins inside another."""

    def __init__(self, *marks: str) -> None:
        self._marks = marks
        self._longest = max(map(len, marks), default=0)
        self.pattern = re.compile("|".join(map(re.escape, marks)) or r"(?!)")
        self._begin = re.compile("|".join(re.escape(mark[0]) for mark in marks) or r"(?!)")

    def undecided(self, text: str, at: int) -> int:
        """Returns the place from `at` on from which the end of `text` may be the beginning of a mark."""
        for begin in self._begin.finditer(text, max(at, len(text) - self._longest + 1)):
            if any(mark.startswith(text[begin.start() :]) for mark in self._marks):
                return begin.start()
        return len(text)


class Source:
    """The text so far that no reader has consumed yet."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._is_ended = False
        self._held: list[str] | None = None

    def feed(self, text: str) -> None:
        """Adds a piece."""
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self) -> None:
        """Says that no more comes."""
        self._is_ended = True

    def hold(self, text: str = "") -> None:
        """Keeps what is consumed from here on, after `text`, until it is clear what that is."""
        self._held = [text]

    def release(self) -> str:
        """Returns what was kept since `hold`, and keeps no more; nothing if it was released before."""
        held, self._held = self._held, None
        return "".join(held or ())

    def unread(self, text: str) -> None:
        """Puts text before what is unread."""
        self._text, self._at = text + self._text[self._at :], 0

    @property
    def is_holding(self) -> bool:
        """True from `hold` to `release`."""
        return self._held is not None

    def _consume(self, end: int) -> str:
        text = self._text[self._at : end]
        self._at = end
        if self._held is not None:
            self._held.append(text)
        return text

    def peek(self) -> Reader[str]:
        """Returns the next character, which stays unread; nothing at the end."""
        while self._at == len(self._text) and not self._is_ended:
            yield
        return self._text[self._at : self._at + 1]

    def take(self, write: Write) -> Reader[None]:
        """Consumes all text that is there."""
        while self._at == len(self._text) and not self._is_ended:
            yield
        write(self._consume(len(self._text)))

    def accept(self, word: str) -> Reader[bool]:
        """Consumes `word` if it comes next."""
        while (next_text := self._text[self._at : self._at + len(word)]) != word:
            if self._is_ended or not word.startswith(next_text):
                return False
            yield
        self._consume(self._at + len(word))
        return True

    def accept_end(self, word: str) -> Reader[bool]:
        """Consumes `word` if it comes next, or the beginning of it if the text ends there."""
        if (yield from self.accept(word)):
            return True
        rest = self._text[self._at :]
        is_cut = self._is_ended and word.startswith(rest)
        self._consume(len(self._text) if is_cut else self._at)
        return is_cut

    def skip_space(self) -> Reader[None]:
        """Consumes the white space of JSON."""
        while True:
            found = SPACE.match(self._text, self._at)
            assert found is not None
            self._consume(found.end())
            if self._at < len(self._text) or self._is_ended:
                return
            yield

    def word(self, pattern: re.Pattern[str], most: int) -> Reader[str]:
        """Consumes and returns up to `most` characters of one kind; `pattern` matches any number of them."""
        pieces: list[str] = []
        while True:
            found = pattern.match(self._text, self._at, self._at + most)
            assert found is not None
            most -= found.end() - self._at
            pieces.append(self._consume(found.end()))
            if self._at < len(self._text) or self._is_ended or not most:
                return "".join(pieces)
            yield

    def until(self, marks: Marks, write: Write) -> Reader[str]:
        """Consumes the text up to the first mark, which goes to `write`, and the mark; returns the mark.

        Returns nothing if the text ends without one.
        """
        while True:
            if found := marks.pattern.search(self._text, self._at):
                write(self._consume(found.start()))
                self._at = found.end()
                if self._held is not None:
                    self._held.append(found[0])
                return found[0]
            end = len(self._text) if self._is_ended else marks.undecided(self._text, self._at)
            if end > self._at:
                write(self._consume(end))
            if self._is_ended:
                return ""
            yield

    def json_value(self, write: Write = lambda _: None) -> Reader[bool]:
        """Consumes a JSON value, whose text goes to `write`; False if it breaks off, before what does not fit."""
        scanner = JsonScanner()
        while True:
            end = scanner.scan(self._text, self._at)
            if end > self._at:
                write(self._consume(end))
            if scanner.is_complete or scanner.is_broken:
                return scanner.is_complete
            if self._is_ended:
                return scanner.ends_complete()
            yield

    def json_string(self) -> Reader[str | None]:
        """Consumes a JSON string and returns its characters; None if none comes next, or if it breaks off."""
        if (yield from self.peek()) != '"':
            return None
        pieces: list[str] = []
        is_complete = yield from self.json_value(pieces.append)
        return json.loads("".join(pieces)) if is_complete else None


class JsonScanner:
    """Follows a JSON value piece by piece, as strictly as RFC 8259 has it; its depth is not bounded."""

    def __init__(self) -> None:
        self.is_complete = False
        self.is_broken = False
        self._open: list[str] = []  # the brackets
        self._wants: Literal["value", "item or end", "key", "key or end", "colon", "comma or end"] = "value"
        self._inside: Literal["", "string", "escape", "hex", "scalar"] = ""
        self._is_key = False  # the open string
        self._num_hex = 0  # digits to come
        self._scalar: list[str] = []

    def scan(self, text: str, at: int) -> int:
        """Returns the place up to which a text continues the value."""
        while at < len(text) and not (self.is_complete or self.is_broken):
            at = self._inside_step(text, at) if self._inside else self._outside_step(text, at)
        return at

    def ends_complete(self) -> bool:
        """True if the value is complete, should nothing follow: a number may end so."""
        if self._inside == "scalar" and not self._open:
            self._end_scalar()
        return self.is_complete

    def _outside_step(self, text: str, at: int) -> int:
        space = SPACE.match(text, at)
        assert space is not None
        at = space.end()
        if at == len(text):
            return at
        character, wants = text[at], self._wants
        if character in "]}" and wants.endswith("or end") and self._open[-1] == ("[" if character == "]" else "{"):
            self._open.pop()
            self._end_value()
        elif character == "," and wants == "comma or end":
            self._wants = "key" if self._open[-1] == "{" else "value"
        elif character == ":" and wants == "colon":
            self._wants = "value"
        elif character == '"' and wants in ("key", "key or end", "value", "item or end"):
            self._inside, self._is_key = "string", wants.startswith("key")
        elif wants not in ("value", "item or end"):
            self.is_broken = True
            return at
        elif character in "{[":
            self._open.append(character)
            self._wants = "key or end" if character == "{" else "item or end"
        elif character == "-" or character in "0123456789tfn":
            self._inside = "scalar"
            return at
        else:
            self.is_broken = True
            return at
        return at + 1

    def _inside_step(self, text: str, at: int) -> int:
        match self._inside:
            case "string":
                found = STRING_RUN.match(text, at)
                assert found is not None
                at = found.end()
                if at == len(text):
                    return at
                if text[at] == "\\":
                    self._inside = "escape"
                elif text[at] == '"':
                    self._inside = ""
                    if self._is_key:
                        self._wants = "colon"
                    else:
                        self._end_value()
                else:
                    self.is_broken = True
                    return at
            case "escape" if text[at] in '"\\/bfnrt':
                self._inside = "string"
            case "escape" if text[at] == "u":
                self._inside, self._num_hex = "hex", 4
            case "hex" if text[at] in HEX:
                self._num_hex -= 1
                self._inside = "hex" if self._num_hex else "string"
            case "scalar":
                found = SCALAR_RUN.match(text, at)
                assert found is not None
                self._scalar.append(found[0])
                if found.end() < len(text):
                    self._end_scalar()
                return found.end()
            case _:
                self.is_broken = True
                return at
        return at + 1

    def _end_scalar(self) -> None:
        self._inside = ""
        scalar, self._scalar = "".join(self._scalar), []
        if SCALAR.fullmatch(scalar):
            self._end_value()
        else:
            self.is_broken = True

    def _end_value(self) -> None:
        self._wants = "comma or end"
        self.is_complete = not self._open
