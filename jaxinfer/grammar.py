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
    """Where one request stands in its structure."""

    def __init__(self, matcher: LLMatcher, num_words: int) -> None:
        self._matcher = matcher
        self._num_words = num_words

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow."""
        return self._matcher.is_stopped()

    def accept(self, token_id: int) -> None:
        """Goes on by a token that the mask allowed."""
        self._matcher.consume_token(token_id)

    def mask(self) -> np.ndarray:
        """Returns the tokens that may come next, one bit each, i32[ceil(V / 32)]; none after `llguidance` gave up."""
        words = np.zeros(self._num_words, np.int32)
        if not self._matcher.is_error():
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():  # a limit was met, before or just now
            words[:] = 0
        return words

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """Returns how many of the tokens, from the first on, the structure has room for."""
        return 0 if self._matcher.is_error() else self._matcher.validate_tokens(list(token_ids))

    def masks(self, token_ids: Sequence[int]) -> list[np.ndarray]:
        """Returns the mask as it is, and as it would be after each of some tokens that are allowed."""
        # A copy, for there may be no way back from the end of the structure, or from a limit that is met.
        ahead = Grammar(self._matcher.deep_copy(), self._num_words) if token_ids else self
        masks = [self.mask()]
        for token_id in token_ids:
            if not ahead.is_complete:
                ahead.accept(token_id)
            masks.append(ahead.mask())
        return masks


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
        return Grammar(matcher, -(-self._vocab_size // 32))

    def _llguidance_tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        if self._tokenizer is None:
            raise ValueError("this checkpoint has no tokenizer, without which its tokens have no text")
        if self._compiled is None:
            eos = self._eos_token_ids or None
            self._compiled = LLTokenizer(self._tokenizer.to_json(), n_vocab=self._vocab_size, eos_token=eos)
        return self._compiled
