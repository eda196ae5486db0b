"""Outputs of a given structure: which tokens may come next, worked out on the host by `llguidance`; free of jax."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxinfer.sampling_params import SamplingParams
from jaxinfer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


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

    def compile(self, sampling: SamplingParams) -> Grammar | None:
        """Returns the structure that the output must have, None where any will do.

        Raises ValueError, with the reason, for one that cannot be compiled, or where what that takes is missing.
        """
        structure = sampling.structure
        if structure is None:
            return None
        kind, value = structure
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
            raise ValueError(f"{kind}={value!r} cannot be compiled: {error}") from None
        if matcher.is_error():
            raise ValueError(f"{kind}={value!r} cannot be compiled: {matcher.get_error()}")
        early = np.ones(-(-self._vocab_size // 32) * 32, np.bool_)
        if sampling.ignore_eos:
            early[self._eos_token_ids or [self._llguidance_tokenizer().eos_token]] = False
        return Grammar(matcher, np.packbits(early, bitorder="little").view(np.int32))

    def _llguidance_tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        if self._tokenizer is None:
            raise ValueError("this checkpoint has no tokenizer, without which its tokens have no text")
        if self._compiled is None:
            eos = self._eos_token_ids or None
            self._compiled = LLTokenizer(self._tokenizer.to_json(), n_vocab=self._vocab_size, eos_token=eos)
        return self._compiled
