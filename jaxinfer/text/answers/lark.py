"""Builds the grammar of an answer with tool calls, in the dialect of Lark that `llguidance` reads."""

from __future__ import annotations

import json
import re

from jaxinfer.text.tokenizer import Tokenizer

ANY = "/(?s:.*)/"


class Lark:
    """The rules of a grammar so far.

    A mark of a style is a special token in the checkpoints that write it. Then text never matches it, and a rule names
    its id. In any other tokenizer a mark is text.
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
        """True if a mark is a special token."""
        token_id = self._tokenizer.token_to_id(mark)
        return token_id is not None and not self._tokenizer.has_text(token_id)

    def mark(self, mark: str) -> str:
        """Returns an expression for a mark."""
        return f"<[{self._tokenizer.token_to_id(mark)}]>" if self.is_special(mark) else quoted(mark)

    def up_to(self, mark: str, name: str) -> str:
        """Returns an expression for any text and the mark after it; `name` is that of its rule."""
        if self.is_special(mark):
            return f"{self.any_text()}? {self.mark(mark)}"
        self.rule(f"{name}[lazy]", f"/(?s:.*){regex_of(mark)}/")
        return name

    def any_text(self) -> str:
        """Returns the name of the terminal for any text, special tokens aside."""
        return self.rule("TEXT", ANY)

    def text_without(self, name: str, *patterns: str) -> str:
        """Returns the name of a terminal for any text that matches none of some patterns."""
        return self.rule(name, " & ".join([ANY, *(f"~/{pattern}/" for pattern in patterns)]))


def quoted(text: str) -> str:
    """Returns the literal of a text."""
    return json.dumps(text, ensure_ascii=False)


def regex_of(text: str) -> str:
    """Returns the pattern of a text, for a place between slashes."""
    return re.escape(text).replace("/", r"\/")
