"""The bodies of requests, as OpenAI's API defines them, and the engine's own fields beside them.

A body takes no field that is not here. `REFUSED` has the fields of OpenAI's API that the server cannot honour, with the
values that ask for nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from jaxinfer.names import way_out
from jaxinfer.text.answers.tools import MAX_TOOLS
from jaxinfer.validation import cut

# Bounds of what a body may list: the engine has its own, narrower ones.
MAX_PROMPTS = 2_048
MAX_MESSAGES = 4_096
MAX_STOPS = 128
MAX_LISTED = 4_096  # of each other list
MAX_TOKENS = 2**20  # of a prompt
PIECE = 2**14


def _whole(value: Any) -> Any:
    """Returns 4 for 4.0: JSON has one kind of number, and some languages write a point into each."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Integer = Annotated[int, BeforeValidator(_whole)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]


def _in_pieces(values: Any, validate: ValidatorFunctionWrapHandler) -> list[int]:
    """Checks a long list piece by piece: one call for all of it would hold the interpreter's lock."""
    if not isinstance(values, list) or not PIECE < len(values) <= MAX_TOKENS:
        return validate(values)
    checked: list[int] = []
    for start in range(0, len(values), PIECE):
        try:
            checked += validate(values[start : start + PIECE])
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise ValueError(f"item {start + int(first['loc'][-1])}: {first['msg']}") from None
    return checked


# Of a long list only the first wrong item is reported: an error for each would take seconds and gigabytes.
_Ids = Annotated[list[TokenId], Field(max_length=MAX_TOKENS, fail_fast=True), WrapValidator(_in_pieces)]
TokenIds = Annotated[_Ids, Field(min_length=1)]
Text = Annotated[str, Field(max_length=2**24)]
Texts = Annotated[list[Text], Field(max_length=MAX_LISTED, fail_fast=True)]
Name = Annotated[str, Field(max_length=4_096)]
Objects = Annotated[list[dict[str, Any]], Field(max_length=MAX_MESSAGES, fail_fast=True)]


Prompts = Annotated[list[Text | TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]


def _bounded(values: Any) -> Any:
    if isinstance(values, dict) and len(values) > MAX_LISTED:
        raise ValueError(f"it has {len(values):,} entries; give at most {MAX_LISTED:,}")
    return values


def _plain(name: str) -> str:
    """Returns the name of a field for an error; half a surrogate pair has no UTF-8."""
    return cut(name).encode(errors="backslashreplace").decode()


Numbers = Annotated[dict[str, float], BeforeValidator(_bounded)]
Labels = Annotated[dict[str, Any], BeforeValidator(_bounded)]


class Body(BaseModel):
    """A JSON object without unknown fields. A field that is null counts as left out."""

    model_config = ConfigDict(extra="forbid", strict=True, json_schema_extra={"additionalProperties": False})
    # Fields of OpenAI's API that cannot be honoured: their values that ask for nothing, and the reason.
    REFUSED: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        given = {name: value for name, value in values.items() if value is not None}
        known = {field.alias or name for name, field in cls.model_fields.items()} | cls.REFUSED.keys()
        for name in given:
            if name not in known:
                answer = way_out(name, known) or "leave it out"
                raise ValueError(f"{_plain(name)}: this field is unknown, and no field is ignored; {answer}")
        for name, (harmless, reason) in cls.REFUSED.items():
            if name in given and given.pop(name) not in harmless:
                raise ValueError(f"{name} cannot be honoured: {reason}; leave it out")
        return given


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool = False
    continuous_usage_stats: Annotated[bool, Field(description="each chunk has the usage so far")] = False
    include_obfuscation: Literal[False] = False


class SamplingBody(Body):
    """The fields of `SamplingParams` and `RequestOptions` that completions and chats share, under the same names."""

    model: Name
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[Integer, Field(ge=1)] | None = None
    seed: Integer | None = None
    stop: Text | Annotated[list[Text], Field(max_length=MAX_STOPS)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Numbers | None = None
    user: Annotated[Name, Field(description="the tenant, if the key has none")] | None = None
    # The engine's own.
    top_k: Integer | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    no_repeat_ngram_size: Integer | None = None
    bad_words: Annotated[list[TokenIds], Field(max_length=MAX_LISTED, fail_fast=True)] | None = None
    allowed_token_ids: TokenIds | None = None
    min_tokens: Integer | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    json_schema: Text | dict[str, Any] | None = None
    regex: Text | None = None
    choices: Texts | None = None
    grammar: Text | None = None
    logits_processors: Numbers | None = None
    prompt_log_probs: Integer | None = None
    priority: Literal["interactive", "batch"] | None = None
    deadline: Annotated[float, Field(gt=0)] | None = None
    cache_salt: Name | None = None
    # Hints and labels, which change no token: the server finds equal prefixes by itself, and keeps nothing else.
    metadata: Labels | None = None
    safety_identifier: Name | None = None
    prompt_cache_key: Name | None = None
    prompt_cache_options: Labels | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    return_token_ids: Annotated[bool, Field(description="add the ids of prompt and output to the answer")] = False

    @model_validator(mode="after")
    def _streams_if_it_says_how(self) -> SamplingBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream=true")
        return self

    REFUSED: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {
        "service_tier": (("auto", "default"), "`priority` says what goes first"),
    }


class CompletionBody(SamplingBody):
    """The body of /v1/completions."""

    prompt: Annotated[
        Text | TokenIds | Prompts,
        Field(description="text, token ids, or several of these"),
    ]
    max_tokens: Annotated[Integer, Field(ge=-1, description="-1: all that the prompt leaves")] | None = None
    best_of: Annotated[Integer, Field(ge=1)] | None = None
    echo: bool = False
    logprobs: Annotated[Integer, Field(ge=0)] | None = None
    prediction: Annotated[Text | TokenIds, Field(description="what the output may resemble")] | None = None

    REFUSED: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {
        **SamplingBody.REFUSED,
        "suffix": (("",), "the models have no insertion"),
        "thinking_token_budget": ((), "only a chat template shows how reasoning ends; use /v1/chat/completions"),
    }


class JsonSchema(Body):
    """A schema of structured output."""

    name: Name
    description: Text | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    # The output always follows the schema, as with strict.
    strict: bool | None = None


class ResponseFormat(Body):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("give response_format.json_schema with type json_schema, and with no other")
        return self


class TextPart(Body):
    """A piece of text."""

    type: Literal["text"]
    text: Text


class Prediction(Body):
    """Text that the answer may resemble, from which drafts come."""

    type: Literal["content"]
    content: Text | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_MESSAGES)]


class ChatBody(SamplingBody):
    """The body of /v1/chat/completions."""

    messages: Annotated[Objects, Field(min_length=1)]
    max_tokens: Annotated[Integer, Field(ge=-1, description="-1: all that the prompt leaves")] | None = None
    max_completion_tokens: Annotated[Integer, Field(ge=-1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[Integer, Field(ge=0)] | None = None
    response_format: ResponseFormat | None = None
    prediction: Prediction | None = None
    tools: Annotated[Objects, Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: Annotated[Name, Field(description="for templates that read it")] | None = None
    thinking_token_budget: Annotated[Integer, Field(ge=0, description="most tokens of reasoning")] | None = None
    # Further arguments of `LLM.chat`.
    answer_style: Name | None = None
    documents: Objects | None = None
    chat_template: Text | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    REFUSED: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {
        **SamplingBody.REFUSED,
        "modalities": ((["text"],), "the models write text alone"),
        "audio": ((), "the models write text alone"),
        "store": ((False,), "the server stores nothing"),
        "verbosity": (("medium",), "no template reads it"),
        "moderation": ((), "the server judges no text"),
        "web_search_options": ((), "the server searches nothing"),
        "functions": (([],), "it is the older name of `tools`, which has another form"),
        "function_call": (("auto", "none"), "it is the older name of `tool_choice`, which has another form"),
    }

    @model_validator(mode="after")
    def _is_consistent(self) -> ChatBody:
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise ValueError("max_tokens and max_completion_tokens are both given, and differ; give one")
        if 0 in limits:
            raise ValueError("max_tokens=0 leaves no answer; give at least 1, or -1 for all that the prompt leaves")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        if self.tools and self.skip_special_tokens is False:
            raise ValueError("skip_special_tokens=false shows an answer as it is, and tools need its parts; give one")
        return self


class ReadingBody(Body):
    """What the bodies of embeddings, labels and scores have in common."""

    model: Name
    user: Name | None = None
    # The engine's own.
    priority: Literal["interactive", "batch"] | None = None
    deadline: Annotated[float, Field(gt=0)] | None = None
    cache_salt: Name | None = None


class EmbeddingBody(ReadingBody):
    """The body of /v1/embeddings."""

    input: Text | TokenIds | Prompts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Integer | None = None
    # The engine's own.
    pooling: Literal["last", "mean"] | None = None
    normalize: bool = True


class TokenizeBody(Body):
    """The body of /tokenize: a text or a conversation."""

    model: Name | None = None
    prompt: Text | None = None
    messages: Annotated[Objects, Field(min_length=1)] | None = None
    tools: Annotated[Objects, Field(max_length=MAX_TOOLS)] | None = None
    documents: Objects | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template: Text | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _has_one_text(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        if self.prompt is not None and (self.tools or self.documents):
            raise ValueError("tools and documents belong to messages; give these, or leave them out")
        return self


class DetokenizeBody(Body):
    """The body of /detokenize."""

    model: Name | None = None
    tokens: _Ids
