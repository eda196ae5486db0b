"""Builds the grammar of an answer with tool calls, in the dialect of Lark that `llguidance` reads."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from jaxinfer.text.tokenizer import Tokenizer

ANY = "/(?s:.*)/"


class Lark:
    """The rules of a grammar so far.

    A mark of a style is a token in the checkpoints that write it. Then text never matches the token, and a rule names
    its id. In any other tokenizer a mark is text. A mark that is spelled in other tokens is read as one too, so no text
    of an answer may have it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._rules: dict[str, str] = {}
        self._num_names = 0

    def text(self) -> str:
        """Returns the lines of the grammar, whose first rule is `start`."""
        return "".join(f"{name}: {body}\n" for name, body in self._rules.items())

    def rule(self, name: str, body: str) -> str:
        """Adds a rule, and returns its name; the name of a terminal has capitals."""
        assert self._rules.setdefault(name, body) == body, f"{name} has two meanings"
        return name

    def new_name(self) -> str:
        """Returns a name for a rule that comes later."""
        self._num_names += 1
        return f"part_{self._num_names}"

    def named(self, body: str) -> str:
        """Adds a rule, and returns a name for it."""
        return self.rule(self.new_name(), body)

    def start(self, body: str) -> str:
        """Adds the first rule, and returns the grammar."""
        self.rule("start", body)
        return self.text()

    def is_special(self, mark: str) -> bool:
        """True if a mark is a token that `llguidance` keeps apart from text."""
        token_id = self._tokenizer.token_to_id(mark)
        if token_id is None or mark in self._tokenizer.ordinary_tokens:
            return False
        # Of added tokens those in angle brackets, whether the checkpoint calls them special or not.
        return not self._tokenizer.has_text(token_id) or (mark[0] == "<" and mark[-1] == ">")

    def mark(self, mark: str) -> str:
        """Returns an expression for a mark."""
        return f"<[{self._tokenizer.token_to_id(mark)}]>" if self.is_special(mark) else quoted(mark)

    def up_to(self, mark: str, name: str, *excluded: str, begin: str = "") -> str:
        """Returns an expression for text and the first mark after it; `name` is that of its rule.

        The text begins with the pattern `begin`, and is none that one of the patterns `excluded` matches.
        """
        text, is_special = f"{begin}(?s:.*)", self.is_special(mark)
        none = [holding(mark), *excluded] if is_special else excluded
        body = _without(f"/{text if is_special else text + regex_of(mark)}/", none)
        terminal = self.rule(f"BEFORE_{name.upper()}", body)
        if is_special:
            return f"{terminal}{'' if begin else '?'} {self.mark(mark)}"
        return self.rule(f"{name}[lazy]", terminal).removesuffix("[lazy]")

    def text_without(self, name: str, *excluded: str) -> str:
        """Returns the name of a terminal for text that none of the patterns `excluded` matches."""
        return self.rule(name, _without(ANY, excluded))


def _without(terminal: str, excluded: Iterable[str]) -> str:
    return " & ".join([terminal, *(f"~/{pattern}/" for pattern in excluded)])


def quoted(text: str) -> str:
    """Returns the literal of a text."""
    return json.dumps(text, ensure_ascii=False)


def holding(*marks: str) -> str:
    """Returns a pattern of texts that hold one of some marks."""
    return f"(?s:.*)({'|'.join(map(regex_of, marks))})(?s:.*)"


def regex_of(text: str) -> str:
    """Returns the pattern of a text, for a place between slashes."""
    return re.escape(text).replace("/", r"\/")
