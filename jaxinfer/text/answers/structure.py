"""The structure of an answer: free reasoning up to its end, within its budget, then a document or calls."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import Self

import numpy as np

from jaxinfer.sampling_params import AnswerParams, AnswerShape, SamplingParams
from jaxinfer.text.grammar import Grammar, GrammarCompiler, allowed_places, early_ones, masks_after
from jaxinfer.text.tokenizer import Tokenizer

SPACE = " \t\n\r"  # that may stand before reasoning
NO_TEXT_LEFT = (
    "the structure goes on only with text that the style of this model takes for reasoning or for a call; give a"
    " structure of other texts"
)


def compile_structure(
    compiler: GrammarCompiler, tokenizer: Tokenizer | None, sampling: SamplingParams
) -> Grammar | AnswerGrammar | None:
    """Returns the structure of an output, which binds the content of an answer; None if any output will do.

    Raises ValueError as `GrammarCompiler.compile` does, and for a budget of thinking without the style of an answer.
    """
    if isinstance(sampling, AnswerParams):
        return AnswerGrammar(_Parts.compiled(compiler, tokenizer, sampling))
    if sampling.thinking_token_budget is not None:
        raise ValueError(
            f"thinking_token_budget={sampling.thinking_token_budget} needs an answer to a conversation, whose chat"
            " template shows how reasoning ends; give messages, or leave it out"
        )
    return compiler.compile(sampling)


@dataclass
class _Path:
    """One reading of the tokens so far: as text before a document, or as a document, or as an answer with calls."""

    grammar: Grammar
    content: Grammar | None = None  # of all texts that a document may be
    start: int | None = 0  # tokens of the answer before the document; None if that has not begun

    def begin_again(self, start: int | None) -> _Path:
        content = None if self.content is None else self.content.begin_again()
        return _Path(self.grammar.begin_again(), content, start)

    @property
    def is_complete(self) -> bool:
        return self.start is not None and self.grammar.is_complete

    def possible(self, ends: np.ndarray) -> np.ndarray:
        """Returns the tokens that may come next; `ends` has the bits of the end tokens."""
        words = self.grammar.possible()
        if self.start is None:  # the answer cannot end before its document
            return words & ~ends
        return words if self.content is None else words & self.content.possible()

    def allows(self, token_id: int, is_end: bool) -> bool:
        if self.start is None and is_end:
            return False
        return self.grammar.allows(token_id) and (self.content is None or self.content.allows(token_id))

    def accept(self, token_id: int) -> None:
        self.grammar.accept(token_id)
        if self.content is not None:
            self.content.accept(token_id)

    def after(self, token_id: int) -> _Path:
        content = None if self.content is None else self.content.after(token_id)
        return _Path(self.grammar.after(token_id), content, self.start)


@dataclass(frozen=True)
class _Budget:
    """The rest of a budget of thinking: after `left` tokens of it, the mark of its end is forced."""

    shape: AnswerShape
    tokenizer: Tokenizer
    left: int
    is_thinking: bool
    is_over: bool = False  # no thinking can come any more
    text: str = ""  # the last characters, which may belong to a mark
    num_forced: int = 0  # tokens of the mark

    @property
    def forced(self) -> int | None:
        """The token that has to come next, None if others may."""
        return self.shape.end_token_ids[self.num_forced] if self.is_thinking and not self.left else None

    def after(self, token_id: int) -> _Budget:
        if self.is_over:
            return self
        text = self.text + _text_of(self.tokenizer, token_id, self.shape)
        if not self.is_thinking:
            return self._before_thinking(text)
        after = self._thinking(text)
        if not after.is_thinking:  # the mark itself is no thinking
            return after
        return replace(after, left=self.left - 1) if self.left else replace(after, num_forced=self.num_forced + 1)

    def _thinking(self, text: str) -> _Budget:
        found = [(at, mark) for mark in map(_in_bytes, self.shape.end_thinking) if (at := text.find(mark)) >= 0]
        if not found:
            longest = max(map(len, map(_in_bytes, self.shape.end_thinking)))
            return replace(self, is_thinking=True, text=text[-longest:])
        if not self.shape.thinks_again:
            return replace(self, is_thinking=False, is_over=True)
        at, mark = min(found)
        return replace(self, is_thinking=False, num_forced=0)._before_thinking(text[at + len(mark) :])

    def _before_thinking(self, text: str) -> _Budget:
        begin = _in_bytes(self.shape.begin_thinking)
        if self.shape.thinks_again:
            before, found, rest = text.partition(begin)
            return self._begun(rest) if found else replace(self, text=before[-len(begin) :])
        text = text.lstrip(SPACE)
        if begin and text.startswith(begin):
            return self._begun(text.removeprefix(begin))
        return replace(self, text=text, is_over=not begin.startswith(text) or not begin)

    def _begun(self, text: str) -> _Budget:
        return replace(self, num_forced=0)._thinking(text)


def _in_bytes(text: str) -> str:
    """Returns the UTF-8 bytes of a text as characters, for tokens may have a part of a character."""
    return text.encode().decode("latin-1")


def _text_of(tokenizer: Tokenizer, token_id: int, shape: AnswerShape) -> str:
    """Returns the bytes of a token as characters, with the space before a word."""
    if tokenizer.is_byte_level:
        return tokenizer.token_bytes(token_id, skip_special_tokens=False).decode("latin-1")
    piece = tokenizer.id_to_token(token_id) or ""
    if piece == shape.begin_thinking or piece in shape.end_thinking:
        return _in_bytes(piece)
    text = tokenizer.text_of(token_id)
    return _in_bytes(f" {text}" if piece.startswith("\u2581") and not text.startswith(" ") else text)


@dataclass(frozen=True)
class _Parts:
    """An answer that is compiled: any number of samples may begin it."""

    compiler: GrammarCompiler
    sampling: AnswerParams
    paths: Sequence[_Path]  # at the beginning of the answer
    document: _Path | None  # that follows a path without one
    budget: _Budget | None
    early: np.ndarray  # i32[ceil(V / 32)]  of each token a bit, 0 if it may come only where no other may
    ends: np.ndarray  # i32[ceil(V / 32)]  the bits of the end tokens
    end_ids: frozenset[int]

    @classmethod
    def compiled(cls, compiler: GrammarCompiler, tokenizer: Tokenizer | None, sampling: AnswerParams) -> _Parts:
        shape = sampling.shape

        def begun(grammar: str) -> Grammar | None:
            return compiler.begin(sampling, "grammar", grammar) if grammar else None

        paths, document = [], None
        if (structure := compiler.compile(sampling)) is not None:
            document = _Path(structure, begun(shape.content))
            before = begun(shape.before)
            paths.append(document if before is None else _Path(before, start=None))
        if (calls := begun(shape.calls)) is not None:
            paths.append(_Path(calls))
        budget = None
        if sampling.thinking_token_budget is not None:
            assert tokenizer is not None
            begins = bool(shape.begin_thinking) or shape.is_thinking
            budget = _Budget(shape, tokenizer, sampling.thinking_token_budget, shape.is_thinking, is_over=not begins)
        end_ids = frozenset(compiler.ends(sampling)) if paths or sampling.ignore_eos else frozenset[int]()
        bits = compiler.bits(end_ids)
        early = ~bits if sampling.ignore_eos else np.full_like(bits, -1)
        return cls(compiler, sampling, paths, document, budget, early, bits, end_ids)


class AnswerGrammar:
    """The state of one answer, which may have several readings: each goes on while it allows the tokens.

    A document begins wherever the text before it may end. Without a structure, all tokens are allowed within the
    budget.
    """

    def __init__(self, parts: _Parts) -> None:
        self._parts = parts
        self._token_ids: list[int] = []
        self._budget = parts.budget
        self._paths = [path.begin_again(path.start) for path in parts.paths]
        self._begin_documents()

    def begin_again(self) -> AnswerGrammar:
        """Returns the beginning of the same answer; nothing is compiled."""
        return AnswerGrammar(self._parts)

    def _begin_documents(self) -> None:
        document = self._parts.document
        if document is not None and any(path.start is None and path.grammar.may_end for path in self._paths):
            self._paths.append(document.begin_again(len(self._token_ids)))

    @property
    def is_complete(self) -> bool:
        """True if the answer is complete and nothing can follow."""
        return any(path.is_complete for path in self._paths)

    @property
    def error(self) -> str | None:
        """The cause if nothing may follow although the answer is not complete, else None."""
        errors = [error for path in self._paths if (error := path.grammar.error) is not None]
        if errors:
            return errors[0]
        is_held = any(path.content is not None for path in self._paths)
        return NO_TEXT_LEFT if is_held and not self.mask().any() else None

    @property
    def has_check(self) -> bool:
        """True if the document of a complete answer may have a `fault`."""
        return any(path.is_complete and path.grammar.has_check for path in self._paths)

    def fault(self, text: str) -> str | None:
        """Returns what is wrong with the document of a complete answer, None if nothing is.

        The document is a part of `text`, that of the whole answer.
        """
        for path in self._paths:
            if path.is_complete:
                document = self._parts.compiler.text(self._parts.sampling, self._token_ids[path.start :])
                return path.grammar.fault(document)
        return None

    def accept(self, token_id: int) -> None:
        """Goes on by a token that the mask allowed."""
        is_end = token_id in self._parts.end_ids
        self._paths = [path for path in self._paths if path.allows(token_id, is_end)]
        for path in self._paths:
            path.accept(token_id)
        self._token_ids.append(token_id)
        self._go_on(token_id)

    def after(self, token_id: int) -> Self:
        """Returns a copy that has gone on by a token that the mask allowed, if anything can follow."""
        ahead = copy(self)
        if not self.is_complete:
            is_end = token_id in self._parts.end_ids
            ahead._paths = [path.after(token_id) for path in self._paths if path.allows(token_id, is_end)]
            ahead._token_ids = [*self._token_ids, token_id]
            ahead._go_on(token_id)
        return ahead

    def _go_on(self, token_id: int) -> None:
        self._begin_documents()
        if self._budget is not None:
            self._budget = self._budget.after(token_id)

    def mask(self) -> np.ndarray:
        """Returns the tokens that may come next, one bit each, i32[ceil(V / 32)]."""
        if self._budget is not None and (forced := self._budget.forced) is not None:
            return self._parts.compiler.bits([forced])
        if not self._parts.paths:
            return self._parts.early
        words = [path.possible(self._parts.ends) for path in self._paths]
        return early_ones(reduce(or_, words, np.zeros_like(self._parts.early)), self._parts.early)

    def allows(self, token_id: int) -> bool:
        """True if a token may come next."""
        if self._budget is not None and (forced := self._budget.forced) is not None:
            return token_id == forced
        is_end = token_id in self._parts.end_ids
        return not self._parts.paths or any(path.allows(token_id, is_end) for path in self._paths)

    def allowed(self, token_ids: Sequence[int], parents: Sequence[int]) -> list[int]:
        """Returns the places of the tokens that the answer has room for; the arguments are those of a `Grammar`."""
        return allowed_places(self, token_ids, parents)

    def masks(self, token_ids: Sequence[int], parents: Sequence[int]) -> list[np.ndarray]:
        """Returns the mask as it is, and as it would be after each of some tokens that are allowed."""
        return masks_after(self, token_ids, parents)
