"""Outputs of a given structure: which tokens may come next, worked out on the host by `llguidance`; free of jax."""

from __future__ import annotations

import contextlib
import json
from collections import OrderedDict
from collections.abc import Collection, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxinfer.sampling_params import SamplingParams
from jaxinfer.tokenizer import Tokenizer
from jaxinfer.validation import shown

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_CHARACTERS = 2**18  # of a structure: it takes some tenths of a second to compile, in which no step is begun
MAX_MULTIPLE = 100_000  # as well; ten times as much takes a quarter of a minute
MAX_EXPONENT = 15
MAX_EXACT = 2**53  # above it `llguidance` rounds integers to floats
MAX_MESSAGE = 1_000
NUM_KNOWN = 32


class Grammar:
    """Where one request stands in its structure.

    `early` i32[ceil(V / 32)] has a bit for each token; those whose bit is 0 may come only where no other may.
    """

    def __init__(self, matcher: LLMatcher, early: np.ndarray) -> None:
        self._matcher = matcher
        self._early = early

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow."""
        return self._matcher.is_stopped()

    def accept(self, token_id: int) -> None:
        """Goes on by a token that the mask allowed."""
        self._matcher.consume_token(token_id)

    def mask(self) -> np.ndarray:
        """Returns the tokens that may come next, one bit each, i32[ceil(V / 32)]; none after `llguidance` gave up."""
        words = np.zeros_like(self._early)
        if not self._matcher.is_error():
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():  # a limit was met, before or just now
            words[:] = 0
        others = words & self._early
        return others if others.any() else words

    def after(self, token_id: int) -> Grammar:
        """Returns a copy that has gone on by a token that the mask allowed, if anything can follow."""
        ahead = Grammar(self._matcher.deep_copy(), self._early)
        if not ahead.is_complete:
            ahead.accept(token_id)
        return ahead

    def allowed(self, token_ids: Sequence[int], parents: Sequence[int]) -> list[int]:
        """Returns the places of the tokens that the structure has room for.

        `parents`: the place of the token that each follows, -1 for those so far.
        """
        states: list[Grammar | None] = [self]
        for token_id, parent in zip(token_ids, parents, strict=True):
            before = states[1 + parent]
            states.append(None if before is None or not before._allows(token_id) else before.after(token_id))
        return [place for place, state in enumerate(states[1:]) if state is not None]

    def _allows(self, token_id: int) -> bool:
        return not self._matcher.is_error() and self._matcher.validate_tokens([token_id]) == 1

    def masks(self, token_ids: Sequence[int], parents: Sequence[int]) -> list[np.ndarray]:
        """Returns the mask as it is, and as it would be after each of some tokens that are allowed; as in `allowed`."""
        # Copies, for there may be no way back from the end of the structure, or from a limit that is met.
        states: list[Grammar] = [self]
        for token_id, parent in zip(token_ids, parents, strict=True):
            states.append(states[1 + parent].after(token_id))
        return [state.mask() for state in states]


class GrammarCompiler:
    """Makes the grammars of requests for one tokenizer; `vocab_size` is that of the model's logits."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._compiled: LLTokenizer | None = None
        # Compiled lately: all samples of a prompt, and its forks, have the same, and many prompts have.
        self._known: OrderedDict[tuple[str, Any], LLMatcher] = OrderedDict()

    def compile(self, sampling: SamplingParams) -> Grammar | None:
        """Returns the structure that the output must have, None where any will do.

        Raises ValueError, with the reason, for one that cannot be compiled, or where what that takes is missing.
        """
        structure = sampling.structure
        if structure is None:
            return None
        if structure not in self._known:
            self._known[structure] = self._matcher(*structure)
            if len(self._known) > NUM_KNOWN:
                self._known.popitem(last=False)
        self._known.move_to_end(structure)
        early = np.ones(-(-self._vocab_size // 32) * 32, np.bool_)
        if sampling.ignore_eos:
            early[self._eos_token_ids or [self._llguidance_tokenizer().eos_token]] = False
        return Grammar(self._known[structure].deep_copy(), np.packbits(early, bitorder="little").view(np.int32))

    def _matcher(self, kind: str, value: Any) -> LLMatcher:
        """Compiles a structure."""
        count = sum(map(len, value))  # of a text its characters, of choices those of each
        if count > MAX_CHARACTERS:
            raise ValueError(f"{kind} has {count:,} characters; give at most {MAX_CHARACTERS:,}")
        if kind == "json_schema":
            _check_numbers(value)
        if kind == "regex" and (len(value) - len(value.rstrip("\\"))) % 2 == 1:
            raise ValueError(
                f"regex={shown(value)} ends in a backslash with nothing after it; double it or leave it out"
            )
        try:
            from llguidance import LLMatcher
        except ImportError:
            raise ValueError(f"{kind} needs the package llguidance: pip install 'jaxinfer[grammar]'") from None

        sources = {
            "json_schema": LLMatcher.grammar_from_json_schema,
            "regex": LLMatcher.grammar_from_regex,
            "grammar": LLMatcher.grammar_from_lark,
            "choices": lambda choices: LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, choices))),
        }
        try:
            matcher = LLMatcher(self._llguidance_tokenizer(), sources[kind](value), log_level=0)
        except ValueError as error:
            raise ValueError(f"{kind}={shown(value)} cannot be compiled: {_cut(error)}") from None
        if matcher.is_error():
            raise ValueError(f"{kind}={shown(value)} cannot be compiled: {_cut(matcher.get_error())}")
        return matcher

    def _llguidance_tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        if self._tokenizer is None:
            raise ValueError("this checkpoint has no tokenizer, without which its tokens have no text")
        if self._compiled is None:
            eos = self._eos_token_ids or None
            self._compiled = LLTokenizer(self._tokenizer.to_json(), n_vocab=self._vocab_size, eos_token=eos)
        return self._compiled


def _check_numbers(schema: str) -> None:
    """Raises ValueError for numbers of a JSON schema that `llguidance` would round, or be busy with for long."""

    def check(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for name, value in pairs:
            # Its states are the remainders of a value by this one, both as integers.
            if name != "multipleOf" or not isinstance(value, int | Decimal):
                continue
            if abs(Decimal(value).adjusted()) > MAX_EXPONENT or Fraction(value).numerator > MAX_MULTIPLE:
                raise ValueError(
                    f"json_schema has multipleOf={shown(str(value))[1:-1]}, for which too many remainders would have to"
                    f" be told apart; give at most {MAX_MULTIPLE:,} in units of its last digit"
                )
        return dict(pairs)

    def exact(text: str) -> int:
        if len(text) > 17 or abs(int(text)) > MAX_EXACT:
            raise ValueError(
                f"json_schema has the integer {shown(text)[1:-1]}, which would be rounded: integers are exact up to"
                " 2**53; give smaller ones, or strings"
            )
        return int(text)

    with contextlib.suppress(json.JSONDecodeError, RecursionError):  # which the compiler tells better
        json.loads(schema, object_pairs_hook=check, parse_int=exact, parse_float=Decimal)


def _cut(message: object) -> str:
    text = str(message)
    return text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]} … ({len(text):,} characters)"
