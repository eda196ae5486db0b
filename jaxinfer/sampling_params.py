"""The sampling parameters of one request."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from jaxinfer.names import explains_names
from jaxinfer.plain_values import plain_mapping
from jaxinfer.validation import (
    MAX_FLOAT,
    MAX_INT,
    as_float,
    as_plain,
    as_tuple,
    is_int,
    is_real,
    make_scalars_plain,
    require,
    require_bool,
    require_characters,
    require_int,
    require_real,
    shown,
)

MAX_SEED = 2**64 - 1
# Results of a step in place of a token. NO_TOKEN: the row's parameters rule out every token. BAD_LOGITS: the row's
# logits have NaN or infinity, or are all -inf before its parameters. (-2 is `speculative.NO_DRAFT`.)
NO_TOKEN, BAD_LOGITS = -1, -3
# As in OpenAI's API. To forbid or force a token, use bad_words or allowed_token_ids.
MAX_PENALTY, MAX_BIAS = 2.0, 100.0
# The host compares the text of every token with all stop strings, and does nothing else at that time.
MAX_STOP_CHARACTERS = 4_096


MAX_SCHEMA_ITEMS = 2**17  # with a comma each, they fill the characters that a structure may have
STRUCTURES = ("json_schema", "regex", "choices", "grammar")


class TotalLength(int):
    """A number of tokens of prompt and output together, for `max_tokens` or `min_tokens`.

    In `transformers` these are `max_length` and `min_length`. After a prompt of 200 tokens,
    `SamplingParams(max_tokens=TotalLength(256))` leaves 56 for the output.
    """

    def after(self, num_prompt_tokens: int) -> int:
        """Returns the number of tokens that a prompt leaves for the output, at least 0."""
        return max(int(self) - num_prompt_tokens, 0)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TotalLength) and int(self) == int(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((TotalLength, int(self)))

    def __repr__(self) -> str:
        return f"TotalLength({int(self)})"


OFF = -1  # as other engines switch off a filter, a chosen seed or a limit
MEANINGS_OF_OFF: Mapping[str, int | None] = {"top_k": 0, "seed": None, "max_tokens": TotalLength(MAX_INT)}


# The forms in which a step draws, each of which can do more than the one before: by the temperature alone; with top_k,
# top_p and min_p; and with every parameter.
Form = Literal["plain", "filtered", "full"]
FORMS: tuple[Form, ...] = ("plain", "filtered", "full")


def widest_form(params: Iterable[SamplingParams]) -> Form:
    """Returns the least form in which a step can draw tokens by all of these parameters."""
    forms = {p.form for p in params}
    return "full" if "full" in forms else "filtered" if "filtered" in forms else "plain"


@explains_names
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the engine samples the tokens of one request, and when the request ends.

    Parameters that change the logits, in the order of their effect. Definitions follow `transformers` unless stated
    otherwise:

    * `logit_bias`: from token id to a number from -100 to 100, which is added to the token's logit.
    * `repetition_penalty` (above 0; 1 is off) divides positive logits of tokens in the prompt or the output, and
      multiplies negative ones.
    * `frequency_penalty` (-2 to 2) is subtracted once per occurrence of a token in the output, as in OpenAI's API.
    * `presence_penalty` (-2 to 2) is subtracted once if a token is in the output, as in OpenAI's API.
    * `no_repeat_ngram_size` n rules out every token that would repeat n tokens of prompt and output; 0 is off.
    * `bad_words`: sequences of token ids that the output never completes. Unlike in `transformers`, an end token in
      this list is ruled out too.
    * `min_tokens`: before this number of tokens, stop tokens are ruled out and stop strings are ignored.
    * `allowed_token_ids`: all other tokens are ruled out; None allows all.
    * `logits_processors`: names of functions given to the LLM, each with its float argument for this request.
    * `json_schema` (JSON text or a mapping), `regex` (Rust's notation, for the whole output), `choices` (strings, of
      which the output is one) or `grammar` (Lark's notation): at most one structure. It rules out every token after
      which the output could no longer match. The request ends when nothing can follow.

    If the parameters rule out every token, the request ends with finish reason "exhausted".

    Sampling, in this order:

    * `temperature` divides the logits. 0 takes the most probable token; the filters then have no effect.
    * `top_k` (0 or -1 is off), `top_p` (1 is off), `min_p` (0 is off) and `typical_p` (1 is off) filter the tokens.
    * `seed` (64 bits) fixes the samples: token i of sample j depends on (seed, j, i) and the logits alone. None or -1
      lets the engine choose a seed, which the completion reports.

    Samples and log-probabilities:

    * `n`: samples of one prompt, each a completion with its `sample_index`.
    * `sample_index`: that of the first sample; the others count on from it. A sample of an earlier request goes on if
      its tokens end the prompt, and `seed` and `sample_index` are its own.
    * `best_of`: generate this number of samples and return `n`, with the greatest sums of log-probabilities, best
      first. They come out when all have ended. None is off.
    * `log_probs`: alternatives to report per token, besides the sampled one.
    * `prompt_log_probs`: the same per token of the prompt, besides the prompt's own. None reports nothing. Otherwise
      the engine computes the whole prompt, even if it is cached.

    End of the request:

    * `max_tokens`: the most tokens to generate; -1 and None allow all that the prompt leaves of the model's length,
      and with `EngineConfig.num_sink_tokens` any number.
      This number and `min_tokens` may be a `TotalLength`, which counts the prompt's tokens too.
    * `stop`: strings; the text ends before the first of them.
    * `stop_token_ids`: the output ends at one of these tokens, in addition to the model's end tokens.
    * `ignore_eos`: go on after the model's end tokens. A structure then ends only when nothing else may follow.
    * `thinking_token_budget`: the most tokens of reasoning in an answer of `LLM.chat`. After them the model's mark of
      its end is forced. 0 leaves no reasoning. None leaves its length to the model.

    Text:

    * `skip_special_tokens`: leave special tokens out of the text. False shows them all, such as the marks of channels
      and tool calls and the end token. Stop strings are looked for in them in both cases.
    """

    n: int = 1
    sample_index: int = 0
    best_of: int | None = None
    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()
    bad_words: Sequence[Sequence[int]] = ()
    allowed_token_ids: Sequence[int] | None = None
    json_schema: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choices: Sequence[str] | None = None
    grammar: str | None = None
    logits_processors: Mapping[str, float] | Sequence[tuple[str, float]] = ()
    seed: int | None = None
    log_probs: int = 0
    prompt_log_probs: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    thinking_token_budget: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        make_scalars_plain(self)
        for name, value in MEANINGS_OF_OFF.items():
            if is_int(getattr(self, name)) and getattr(self, name) == OFF:
                object.__setattr__(self, name, value)
        if self.max_tokens is None:
            object.__setattr__(self, "max_tokens", MEANINGS_OF_OFF["max_tokens"])
        require_int("n", self.n, 1)
        if self.best_of is not None:
            require_int("best_of", self.best_of, self.n)
        require_int("sample_index", self.sample_index, 0)
        last = MAX_INT - self.num_samples
        require(
            self.sample_index <= last, "sample_index", self.sample_index, f"at most {last}, for the last sample too"
        )
        require_int("max_tokens", self.max_tokens, 1)
        require_int("min_tokens", self.min_tokens, 0)
        are_alike = isinstance(self.min_tokens, TotalLength) == isinstance(self.max_tokens, TotalLength)
        is_possible = not are_alike or int(self.min_tokens) <= int(self.max_tokens)
        require(is_possible, "min_tokens", self.min_tokens, f"at most max_tokens={self.max_tokens}")
        require_real("temperature", self.temperature, 0.0)
        several = "1 with temperature=0, for all samples would be the same"
        require(self.n == 1 or self.temperature != 0, "n", self.n, several)
        require(self.best_of in (None, 1) or self.temperature != 0, "best_of", self.best_of, several)
        require_int("top_k", self.top_k, 0)
        for name in ("top_p", "typical_p"):
            require_real(name, getattr(self, name), 0.0, 1.0)
            way_out = "greater than 0 (use temperature=0 for the most probable token)"
            require(getattr(self, name) > 0, name, getattr(self, name), way_out)
        require_real("min_p", self.min_p, 0.0, 1.0)
        require_real("repetition_penalty", self.repetition_penalty, 0.0)
        require(self.repetition_penalty > 0, "repetition_penalty", self.repetition_penalty, "greater than 0")
        require_real("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
        require_real("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
        require_int("no_repeat_ngram_size", self.no_repeat_ngram_size, 0)
        if self.seed is not None:
            require_int("seed", self.seed, 0, MAX_SEED)
        require_int("log_probs", self.log_probs, 0)
        if self.prompt_log_probs is not None:
            require_int("prompt_log_probs", self.prompt_log_probs, 0)
        if self.thinking_token_budget is not None:
            require_int("thinking_token_budget", self.thinking_token_budget, 0)
        require_bool("ignore_eos", self.ignore_eos)
        require_bool("skip_special_tokens", self.skip_special_tokens)
        # Callers may give lists; tuples keep the object hashable.
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        object.__setattr__(self, "logits_processors", _arguments(self.logits_processors))
        object.__setattr__(self, "bad_words", _words(self.bad_words))
        if self.allowed_token_ids is not None:
            allowed = _token_ids("allowed_token_ids", self.allowed_token_ids)
            require(bool(allowed), "allowed_token_ids", allowed, "at least one token id, or None to allow all")
            object.__setattr__(self, "allowed_token_ids", allowed)
        self._check_structure()
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))

    def after(self, num_prompt_tokens: int, longest: int = MAX_INT) -> SamplingParams:
        """Returns the parameters for a prompt of this length, which count the tokens of the output alone.

        A total length is cut to `longest`. As in `transformers`, the most tokens count more than the least. Raises
        ValueError if the prompt leaves none.
        """
        most, least = (
            min(length, TotalLength(longest)).after(num_prompt_tokens) if isinstance(length, TotalLength) else length
            for length in (self.max_tokens, self.min_tokens)
        )
        if (most, least) == (self.max_tokens, self.min_tokens):
            return self
        if most == 0:
            raise ValueError(
                f"prompt has {num_prompt_tokens} tokens, and max_tokens={self.max_tokens} counts them, so none is left"
                " for the output; shorten it, or give another max_tokens"
            )
        return replace(self, max_tokens=most, min_tokens=min(least, most))

    @property
    def num_samples(self) -> int:
        """The number of samples to generate."""
        return self.n if self.best_of is None else self.best_of

    @cached_property
    def reads_context(self) -> bool:
        """True if all earlier tokens of the request, however old, may change the logits."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.no_repeat_ngram_size)
        return self.repetition_penalty != 1 or any(penalties) or bool(self.bad_words or self.logits_processors)

    @cached_property
    def form(self) -> Form:
        """The least form in which a step can draw the request's tokens."""
        if self.changes_logits or self.log_probs or (self.typical_p < 1 and self.temperature > 0):
            return "full"
        has_filters = self.top_k > 0 or self.top_p < 1 or self.min_p > 0
        return "filtered" if has_filters and self.temperature > 0 else "plain"

    @cached_property
    def changes_logits(self) -> bool:
        """True if some parameter changes the logits before the temperature."""
        listed = self.logit_bias or self.allowed_token_ids or self.structure
        return self.reads_context or self.needs_prompt_len or bool(listed)

    @property
    def needs_prompt_len(self) -> bool:
        """True if some parameter treats prompt and output tokens differently."""
        return bool(self.presence_penalty or self.frequency_penalty or self.min_tokens)

    @cached_property
    def structure(self) -> tuple[str, Any] | None:
        """The name and value of the parameter that gives the output a structure, or None."""
        given = [(name, getattr(self, name)) for name in STRUCTURES if getattr(self, name) is not None]
        return given[0] if given else None

    def _check_structure(self) -> None:
        schema = as_plain("json_schema", self.json_schema, plain_mapping)
        if isinstance(schema, Mapping):
            object.__setattr__(self, "json_schema", _schema_text(schema))
        for name in ("json_schema", "regex", "grammar"):
            value = getattr(self, name)
            require(value is None or (isinstance(value, str) and bool(value)), name, value, "text that is not empty")
            require_characters(name, value or "")
        if self.choices is not None:
            choices = as_tuple("choices", self.choices, "several strings")
            are_texts = all(isinstance(choice, str) and choice for choice in choices)
            require(bool(choices) and are_texts, "choices", choices, "one string or more, none of them empty")
            require_characters("choices", "".join(choices))
            object.__setattr__(self, "choices", choices)
        given = [name for name in STRUCTURES if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are both given; an output can have one structure")


@dataclass(frozen=True, kw_only=True)
class AnswerShape:
    """The parts of an answer to one prompt, by the style of its model.

    A grammar is in Lark's notation, and "" for none.
    """

    before: str = ""  # grammar of the text before the content
    content: str = ""  # grammar of all texts that content may be, whatever its structure
    calls: str = ""  # grammar of whole answers that call functions
    begin_thinking: str = ""  # the text that begins the reasoning, "" if nothing does
    end_thinking: Sequence[str] = ()  # the marks that end it
    end_token_ids: Sequence[int] = ()  # the tokens of the first of them
    is_thinking: bool = False  # the prompt ends in the reasoning
    thinks_again: bool = False  # reasoning may begin anywhere, not only at the beginning

    def __post_init__(self) -> None:
        object.__setattr__(self, "end_thinking", tuple(self.end_thinking))
        object.__setattr__(self, "end_token_ids", tuple(self.end_token_ids))


@dataclass(frozen=True, kw_only=True)
class AnswerParams(SamplingParams):
    """The parameters of an answer to a conversation, whose structure binds its content; an `AnswerForm` makes them."""

    shape: AnswerShape

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.shape, Mapping):  # of a saved request
            object.__setattr__(self, "shape", AnswerShape(**self.shape))

    @cached_property
    def changes_logits(self) -> bool:
        return True


def params_of(fields: Mapping[str, Any]) -> SamplingParams:
    """Returns the parameters that `dataclasses.asdict` has made fields of."""
    return AnswerParams(**fields) if "shape" in fields else SamplingParams(**fields)


def _schema_text(schema: Mapping[str, Any]) -> str:
    def as_json(value: Any) -> Any:
        plain = dict(value) if isinstance(value, Mapping) else as_plain("json_schema", value)
        if plain is value:
            raise TypeError(f"JSON has no {type(value).__name__}")
        return plain

    if _has_too_many_items(schema):
        raise ValueError(
            f"json_schema={type(schema).__name__} is not allowed: it has more than {MAX_SCHEMA_ITEMS:,} keys and"
            f" values, too many for a structure of at most {2 * MAX_SCHEMA_ITEMS:,} characters; give a smaller one"
        )
    try:
        return json.dumps(schema, default=as_json, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"json_schema={shown(schema)} is not allowed: {error}; give JSON text, or a mapping of what JSON has"
        ) from None


def _has_too_many_items(schema: Mapping[str, Any]) -> bool:
    """True for a schema whose text would have too many characters: writing it would hold the interpreter's lock."""
    num_items, containers = 0, [schema]
    while containers and num_items <= MAX_SCHEMA_ITEMS:
        container = containers.pop()
        num_items += len(container)
        if num_items <= MAX_SCHEMA_ITEMS:
            items = container.values() if isinstance(container, Mapping) else container
            containers += [item for item in items if isinstance(item, Mapping | list | tuple)]
    return num_items > MAX_SCHEMA_ITEMS


def _stop_strings(values: Any) -> tuple[str, ...]:
    stop = (values,) if isinstance(values, str) else as_tuple("stop", values, "a string or several")
    is_text = all(isinstance(s, str) and s for s in stop)
    require(is_text, "stop", values if isinstance(values, str) else stop, "a non-empty string or several")
    count = sum(map(len, stop))
    if count > MAX_STOP_CHARACTERS:
        raise ValueError(
            f"stop has {count:,} characters in {len(stop):,} strings; give at most {MAX_STOP_CHARACTERS:,} in all"
        )
    return stop


def _token_ids(name: str, values: Any) -> tuple[int, ...]:
    ids = as_tuple(name, values, "several token ids")
    require(all(is_int(i) and 0 <= i <= MAX_INT for i in ids), name, ids, "token ids of at least 0")
    return tuple(int(i) for i in ids)


def _biases(values: Any) -> tuple[tuple[int, float], ...]:
    requirement = f"from token ids to numbers from -{MAX_BIAS} to {MAX_BIAS}"
    pairs = _pairs("logit_bias", values, requirement)

    def is_bias(pair: tuple[Any, Any]) -> bool:
        token_id, bias = pair
        is_token = is_int(token_id) and 0 <= token_id <= MAX_INT
        return is_token and is_real(bias) and -MAX_BIAS <= bias <= MAX_BIAS

    require(all(map(is_bias, pairs)), "logit_bias", values, requirement)
    biases = {int(token_id): float(bias) for token_id, bias in pairs}
    require(len(biases) == len(pairs), "logit_bias", values, "one bias per token id")
    return tuple(sorted(biases.items()))


def _arguments(values: Any) -> tuple[tuple[str, float], ...]:
    requirement = "from names of processors to finite numbers"
    pairs = _pairs("logits_processors", values, requirement)
    for name, number in pairs:
        require(isinstance(name, str), "logits_processors", values, requirement)
        is_finite = is_real(number) and -MAX_FLOAT <= as_float(number) <= MAX_FLOAT
        require(is_finite, "logits_processors", values, requirement)
    arguments = {name: float(number) for name, number in pairs}
    require(len(arguments) == len(pairs), "logits_processors", values, "one argument per processor")
    return tuple(sorted(arguments.items()))


def _pairs(name: str, values: Any, requirement: str) -> list[tuple[Any, Any]]:
    """Returns the pairs of a mapping, or of a list of pairs."""
    mapping = as_plain(name, values, plain_mapping)
    pairs = list(mapping.items()) if isinstance(mapping, Mapping) else as_tuple(name, values, requirement)
    for pair in pairs:
        require(isinstance(pair, tuple | list) and len(pair) == 2, name, values, requirement)
    return [(as_plain(name, key), as_plain(name, number)) for key, number in pairs]


def _words(values: Any) -> tuple[tuple[int, ...], ...]:
    requirement = "several words, each of one token id or more"
    words = as_tuple("bad_words", values, requirement)
    require(all(isinstance(word, Iterable) for word in words), "bad_words", words, requirement)
    words = tuple(as_tuple("bad_words", word, requirement) for word in words)
    require(all(words), "bad_words", words, requirement)
    require(all(is_int(i) and 0 <= i <= MAX_INT for word in words for i in word), "bad_words", words, requirement)
    return tuple(tuple(int(i) for i in word) for word in words)
