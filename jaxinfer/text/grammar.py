"""Outputs of a given structure: which tokens may come next, worked out on the host by `llguidance`; free of jax."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxinfer.sampling_params import SamplingParams
from jaxinfer.text.schema_check import load_json, schema_checker
from jaxinfer.text.structure_trial import Trial
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.validation import cut, shown

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_CHARACTERS = 2**18  # of a structure
MAX_EXACT = 2**53  # above it `llguidance` rounds integers to floats
MAX_MESSAGE = 1_000
NUM_KNOWN = 32

Check = Callable[[str], str | None]  # from a text that is complete to what is wrong with it


class Grammar:
    """Where one request stands in its structure.

    `early` i32[ceil(V / 32)] has a bit for each token; those whose bit is 0 may come only where no other may. `ends`
    are the end tokens, each with its text in the output.
    """

    def __init__(self, matcher: LLMatcher, early: np.ndarray, check: Check | None, ends: Mapping[int, str]) -> None:
        self._matcher = matcher
        self._early = early
        self._check = check
        self._ends = ends
        self._end = ""  # the text of the last token if that is an end token

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def error(self) -> str | None:
        """Why `llguidance` gave up, None where it did not."""
        if not self._matcher.is_error():
            return None
        reason, _, _ = self._matcher.get_error().partition("\n")  # below that it lists its state
        return f"llguidance could not follow the structure further: {_cut(reason)}"

    def fault(self, text: str) -> str | None:
        """Returns what is wrong with a text that is complete, None if nothing is."""
        return None if self._check is None else self._check(text.removesuffix(self._end))

    def accept(self, token_id: int) -> None:
        """Goes on by a token that the mask allowed."""
        self._matcher.consume_token(token_id)
        self._end = self._ends.get(token_id, "")

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
        ahead = Grammar(self._matcher.deep_copy(), self._early, self._check, self._ends)
        if not self._matcher.is_stopped():
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
        self._llg_tokenizer: LLTokenizer | None = None
        self._trial = Trial()
        # Compiled lately: all samples of a prompt, and its forks, have the same, and many prompts have.
        self._known: OrderedDict[tuple[str, Any, bool], tuple[LLMatcher, Check | None]] = OrderedDict()

    def compile(self, sampling: SamplingParams) -> Grammar | None:
        """Returns the structure that the output must have, None where any will do.

        Raises ValueError, with the reason, for one that cannot be compiled, or where what that takes is missing.
        """
        if sampling.structure is None:
            return None
        # Where only one text can follow, `llguidance` allows only the tokens that its tokenizer would make of it.
        # Parameters may rule these out; then any that spell the text are allowed.
        is_free = bool(sampling.allowed_token_ids or sampling.bad_words or sampling.logits_processors)
        known = (*sampling.structure, is_free or sampling.no_repeat_ngram_size > 0)
        if known not in self._known:
            self._known[known] = self._compiled(*known)
            if len(self._known) > NUM_KNOWN:
                self._known.popitem(last=False)
        self._known.move_to_end(known)
        matcher, check = self._known[known]
        early = np.ones(-(-self._vocab_size // 32) * 32, np.bool_)
        end_ids = self._eos_token_ids or [self._tokens().eos_token]
        if sampling.ignore_eos:
            early[end_ids] = False
        assert self._tokenizer is not None
        options = {"skip_special_tokens": sampling.skip_special_tokens}
        ends = {token_id: self._tokenizer.decode([token_id], **options) for token_id in end_ids}
        return Grammar(matcher.deep_copy(), np.packbits(early, bitorder="little").view(np.int32), check, ends)

    def _compiled(self, kind: str, value: Any, is_free: bool) -> tuple[LLMatcher, Check | None]:
        """Compiles a structure, and what holds a complete text against it, if that is to be done."""
        count = sum(map(len, value))  # of a text its characters, of choices those of each
        if count > MAX_CHARACTERS:
            raise ValueError(f"{kind} has {count:,} characters; give at most {MAX_CHARACTERS:,}")
        if self._tokenizer is None:
            raise ValueError(f"{kind}={shown(value)} needs a tokenizer, which this checkpoint does not have")
        schema = value if kind == "json_schema" else None
        if schema is not None:
            _check_schema(schema)
        try:
            from llguidance import LLMatcher

            grammar = _in_lark(kind, value)
            if is_free:
                grammar = f'%llguidance {{"no_forcing": true}}\n{grammar}'
            tokens = self._tokens()
            check = None if schema is None else schema_checker(schema)
        except ImportError as missing:
            raise ValueError(f"{kind} needs the package {missing.name}: pip install 'jaxinfer[grammar]'") from None
        self._trial.run(kind, grammar, schema)
        matcher = LLMatcher(tokens, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(f"{kind}={shown(value)} cannot be compiled: {_cut(matcher.get_error())}")
        return matcher, check

    def _tokens(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        assert self._tokenizer is not None
        if self._llg_tokenizer is None:
            eos = self._eos_token_ids or None
            tokenizer = self._tokenizer.to_json(self._vocab_size)
            self._llg_tokenizer = LLTokenizer(tokenizer, n_vocab=self._vocab_size, eos_token=eos)
        return self._llg_tokenizer


def _in_lark(kind: str, value: Any) -> str:
    """Writes a structure in Lark's notation."""
    from llguidance import LLMatcher

    if kind == "json_schema":
        return f"start: %json {value}"
    if kind == "choices":
        return "start: " + " | ".join(map(json.dumps, value))
    if kind == "regex":
        if (len(value) - len(value.rstrip("\\"))) % 2 == 1:
            raise ValueError(
                f"regex={shown(value)} ends in a backslash with nothing after it; double it or leave it out"
            )
        return json.loads(LLMatcher.grammar_from_regex(value))["grammars"][0]["lark_grammar"]
    return value


def _check_schema(schema: str) -> None:
    """Raises ValueError for text that is not JSON, and for what `llguidance` would take for something else."""
    try:
        loaded = load_json(schema)
    except RecursionError:
        raise ValueError(f"json_schema={shown(schema)} is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"json_schema={shown(schema)} is not JSON: {error}") from None
    if not isinstance(loaded, dict):
        raise ValueError(f"json_schema={shown(schema)} is not an object of keywords")
    if not isinstance(draft := loaded.get("$schema", ""), str):
        raise ValueError(f"json_schema has $schema={shown(draft)}, which names no draft of JSON Schema")
    options = loaded.get("x-guidance")
    if isinstance(options, dict) and options.get("lenient"):
        raise ValueError(
            "json_schema has the option lenient, by which keywords would be passed over; leave it out, and what cannot"
            " be kept is refused by name"
        )
    todo = [loaded]
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            todo += [part for name, part in value.items() if name not in ("default", "examples")]
        elif isinstance(value, list):
            todo += value
        elif _is_whole(value) and abs(value) > MAX_EXACT:
            raise ValueError(
                f"json_schema has the integer {cut(str(value))}, which would be rounded: integers are exact up to"
                " 2**53; give smaller ones, or strings"
            )


def _is_whole(value: Any) -> bool:
    """Whether a number is written as an integer."""
    return isinstance(value, int) or (isinstance(value, Decimal) and value.as_tuple().exponent == 0)


def _cut(message: object) -> str:
    text = str(message)
    return text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]} … ({len(text):,} characters)"
