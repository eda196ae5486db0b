"""The parameters of a request under vLLM's names, and the same in `jaxinfer.SamplingParams`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from jaxinfer import sampling_params as ours
from jaxinfer.names import explains_names
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.validation import as_tuple, require, require_bool, require_int, shown


class RequestOutputKind(Enum):
    """How an engine returns the outputs of a stream; `LLM` returns whole ones in each case."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@explains_names
@dataclass
class StructuredOutputsParams:
    """The structure of an output: one of JSON schema, regular expression, choices, Lark's grammar, any JSON object."""

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def native(self) -> dict[str, Any]:
        """Returns the parameter of this package that says the same."""
        given = {"json_schema": self.json, "regex": self.regex, "choices": self.choice, "grammar": self.grammar}
        given = {name: value for name, value in given.items() if value is not None}
        if self.json_object:
            given["json_schema" if "json_schema" not in given else "json_object"] = {"type": "object"}
        if len(given) != 1:
            raise ValueError(f"{self} has {len(given)} kinds of structure; give one")
        return given


GuidedDecodingParams = StructuredOutputsParams


@explains_names
@dataclass(kw_only=True)
class SamplingParams:
    """vLLM's parameters of a request; see `jaxinfer.SamplingParams` for what they do.

    Differences from there: `max_tokens` is 16 by default. `logprobs` and `prompt_logprobs` list the most probable
    tokens and the token itself. `bad_words` are words, and biases beyond 100 are cut to it.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    structured_outputs: StructuredOutputsParams | None = None
    guided_decoding: StructuredOutputsParams | None = None
    logit_bias: Mapping[Any, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids", "bad_words"):  # None and arrays become lists, which a script may extend
            value = getattr(self, name)
            if not isinstance(value, str):
                setattr(self, name, [] if value is None else list(as_tuple(name, value, "several of them")))
        require_bool("detokenize", self.detokenize)
        require_bool("include_stop_str_in_output", self.include_stop_str_in_output)
        # Of both values: the decoder that tokenizer.json states adds no spaces of its own.
        require_bool("spaces_between_special_tokens", self.spaces_between_special_tokens)
        if not self.detokenize and self.stop:
            raise ValueError(f"stop={shown(self.stop)} needs text, and detokenize=False; leave one out")
        self.native(None)

    def clone(self) -> SamplingParams:
        """Returns a copy."""
        return replace(self)

    def native(self, tokenizer: Tokenizer | None, seed: int | None = None) -> ours.SamplingParams:
        """Returns the parameters of this package that say the same; the words that are ruled out need a tokenizer.

        `seed` is that of a request without one. Raises ValueError for a value that is not allowed.
        """
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                require_int(name, value, 0)
        if self.structured_outputs is not None and self.guided_decoding is not None:
            raise ValueError("structured_outputs and guided_decoding are both given; leave one out")
        structure, words = self.structured_outputs or self.guided_decoding, self.bad_words or ()
        are_words = not isinstance(words, str) and all(isinstance(word, str) and word.strip() for word in words)
        require(are_words, "bad_words", words, "a list of words")
        names = SamplingParams.__annotations__.keys() & ours.SamplingParams.__annotations__.keys()
        # None is not given where it is vLLM's default, but for max_tokens, of which it means all that fit.
        same = {
            name: value
            for name in names
            if (value := getattr(self, name)) is not None or getattr(SamplingParams, name) is not None
        }
        translated = {
            "seed": seed if self.seed in (None, ours.OFF) else self.seed,
            "log_probs": self.logprobs or 0,
            "prompt_log_probs": self.prompt_logprobs,
            "logit_bias": {int(token_id): _bias(bias) for token_id, bias in (self.logit_bias or {}).items()},
            "bad_words": () if tokenizer is None else [ids for word in words for ids in _spellings(tokenizer, word)],
        }
        same["max_tokens"] = self.max_tokens
        return ours.SamplingParams(**same | translated, **({} if structure is None else structure.native()))


def _bias(bias: Any) -> float:
    return min(max(float(bias), -ours.MAX_BIAS), ours.MAX_BIAS)


def _spellings(tokenizer: Tokenizer, word: str) -> Iterator[list[int]]:
    """Yields the tokens of a word at the beginning of a text, and after a space if the word begins another token."""
    plain = tokenizer.encode(word.lstrip(), add_special_tokens=False)
    spaced = tokenizer.encode(f" {word.lstrip()}", add_special_tokens=False)
    yield plain
    if spaced[0] != plain[0] and len(spaced) == len(plain):
        yield spaced
