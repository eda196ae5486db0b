"""The bodies of answers, as OpenAI's API defines them, from completions of the engine."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from uuid import uuid4

from pydantic import BaseModel

from jaxinfer.engine.request.completion import Completion, Delta
from jaxinfer.openai.bodies import ChatBody, CompletionBody
from jaxinfer.text.answers.answers import AnswerReader
from jaxinfer.text.answers.parts import ArgumentsPiece, CallBegin, ContentPiece, ReasoningPiece
from jaxinfer.text.detokenizer import Detokenizer
from jaxinfer.text.tokenizer import Tokenizer

# The log-probability of an impossible token, as in OpenAI's API; JSON has no infinity.
IMPOSSIBLE = -9999.0
# OpenAI's API knows no other reasons; `engine_finish_reason` has the engine's own.
FINISH_REASONS = {"stop": "stop", "length": "length", "exhausted": "stop", "deadline": "length", "abort": "stop"}
FinishReason = Literal["stop", "length", "tool_calls"]
EngineFinishReason = Literal["stop", "length", "exhausted", "deadline", "abort"]


class PromptTokensDetails(BaseModel):
    """The number of the prompt's tokens that were found in the prefix cache."""

    cached_tokens: int


class Usage(BaseModel):
    """Numbers of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class TopLogProb(BaseModel):
    """A token that could have come."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogProb(TopLogProb):
    """A token that came, and the most probable ones in its place."""

    top_logprobs: list[TopLogProb]


class ChatLogProbs(BaseModel):
    """The log-probabilities of an answer's tokens under the model, before temperature and filters."""

    content: list[TokenLogProb]
    refusal: None = None


class CalledFunction(BaseModel):
    """A function and its arguments, the text of a JSON object."""

    name: str
    arguments: str


class CallOfTool(BaseModel):
    """A call that the model asks for."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(BaseModel):
    """The answer to a conversation."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning_content: str | None = None
    tool_calls: list[CallOfTool] | None = None


class ChatChoice(BaseModel):
    """One sample of an answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogProbs | None
    finish_reason: FinishReason
    engine_finish_reason: EngineFinishReason
    seed: int
    token_ids: list[int] | None = None


class ChatAnswer(BaseModel):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None


class CompletionLogProbs(BaseModel):
    """The log-probabilities of a text's tokens under the model, before temperature and filters."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None] | None


class CompletionChoice(BaseModel):
    """One sample of a prompt's completion."""

    index: int
    text: str
    logprobs: CompletionLogProbs | None
    finish_reason: FinishReason
    engine_finish_reason: EngineFinishReason
    seed: int
    token_ids: list[int] | None = None
    sampling_log_probs: list[float | None] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_log_probs: list[float | None] | None = None


class CompletionAnswer(BaseModel):
    """The answer of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage


class Embedding(BaseModel):
    """The vector of one input: numbers, or the bytes of little-endian float32 in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingAnswer(BaseModel):
    """The answer of /v1/embeddings."""

    object: Literal["list"]
    model: str
    data: list[Embedding]
    usage: Usage


class ModelCard(BaseModel):
    """A model of the server."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(BaseModel):
    """The models of the server."""

    object: Literal["list"]
    data: list[ModelCard]


class Tokens(BaseModel):
    """The answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class TokenText(BaseModel):
    """The answer of /detokenize."""

    prompt: str


class Health(BaseModel):
    """The state of the server in a word."""

    status: str


@dataclass(frozen=True, kw_only=True)
class Heading:
    """The fields that all pieces of an answer share; `prefix` begins its id."""

    prefix: str
    object: str
    model: str
    system_fingerprint: str
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", self.id or f"{self.prefix}-{uuid4().hex}")

    def fields(self) -> dict[str, Any]:
        """Returns the fields in the order of OpenAI's API."""
        names = ("id", "object", "created", "model", "system_fingerprint")
        return {name: getattr(self, name) for name in names}


def usage_of(prompts: Iterable[Sequence[Completion]]) -> dict[str, Any]:
    """Returns the numbers of tokens of the completions of several prompts; a prompt counts once for its samples."""
    groups = [group for group in prompts if group]
    num_prompt = sum(len(group[0].prompt_token_ids) for group in groups)
    num_output = sum(len(completion.token_ids) for group in groups for completion in group)
    num_cached = sum(group[0].num_cached_tokens for group in groups)
    return usage_so_far(num_prompt, num_output) | {"prompt_tokens_details": {"cached_tokens": num_cached}}


def usage_so_far(num_prompt: int, num_output: int) -> dict[str, Any]:
    """Returns the numbers of tokens of a stream that goes on."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
    }


def chat_choice(completion: Completion, index: int, body: ChatBody, tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns a sample of an answer, which has its parts, as a choice."""
    calls = [_call(call.id, call.name, call.arguments) for call in completion.tool_calls]
    content = completion.text if _is_shown_whole(body) else completion.content
    message = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
    if completion.reasoning is not None and not _is_shown_whole(body):
        message["reasoning_content"] = completion.reasoning
    choice: dict[str, Any] = {
        "index": index,
        "message": message | ({"tool_calls": calls} if calls else {}),
        "logprobs": _chat_log_probs(completion, tokenizer) if body.logprobs else None,
        **_end(completion, has_calls=bool(calls)),
    }
    return choice | _token_fields(completion, body)


def _token_fields(output: Completion | Delta, body: ChatBody | CompletionBody) -> dict[str, Any]:
    """Returns the fields of a choice that `return_token_ids` asks for, those of a trainer if the engine gives them."""
    if not body.return_token_ids:
        return {}
    fields: dict[str, Any] = {"token_ids": list(output.token_ids)}
    if output.sampling_log_probs:
        fields["sampling_log_probs"] = [_finite(value) for value in output.sampling_log_probs]
    return fields


class ChatChunks:
    """Makes the choices of a stream's chunks for the samples of an answer."""

    def __init__(self, body: ChatBody, tokenizer: Tokenizer, new_reader: Callable[[], AnswerReader]) -> None:
        self._body, self._tokenizer = body, tokenizer
        self._readers: defaultdict[int, AnswerReader] = defaultdict(new_reader)  # by sample
        self._with_calls: set[int] = set()  # samples

    def choice(self, delta: Delta) -> dict[str, Any] | None:
        """Returns the choice of a delta; None if it has nothing to say."""
        body, completion = self._body, delta.completion
        change = {"content": delta.text} if delta.text else {}
        if not _is_shown_whole(body):
            change = self._parts(delta)
        if not (change or completion or (delta.token_ids and (body.logprobs or body.return_token_ids))):
            return None
        choice: dict[str, Any] = {
            "index": delta.sample_index,
            "delta": change,
            "logprobs": _chat_log_probs(delta, self._tokenizer) if body.logprobs else None,
            "finish_reason": None,
        }
        choice |= _token_fields(delta, body)
        if completion is not None:
            choice |= _end(completion, has_calls=delta.sample_index in self._with_calls)
        return choice

    def _parts(self, delta: Delta) -> dict[str, Any]:
        """Returns the additions of a delta to the parts of its answer."""
        reader = self._readers[delta.sample_index]
        parts = reader.push(delta.token_ids)
        if delta.completion is not None:
            parts += reader.close()
        texts: defaultdict[str, str] = defaultdict(str)
        calls: list[dict[str, Any]] = []
        for part in parts:
            match part:
                case ContentPiece(text):
                    texts["content"] += text
                case ReasoningPiece(text):
                    texts["reasoning_content"] += text
                case CallBegin(index, call_id, name):
                    calls.append({"index": index, **_call(call_id, name, "")})
                case ArgumentsPiece(index, text):
                    if not calls or calls[-1]["index"] != index:
                        calls.append({"index": index, "function": {"arguments": ""}})
                    calls[-1]["function"]["arguments"] += text
        if calls:
            self._with_calls.add(delta.sample_index)
        return {**texts, "tool_calls": calls} if calls else dict(texts)


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _is_shown_whole(body: ChatBody) -> bool:
    """True if the client wants the text as the model writes it, special tokens included, and not its parts."""
    return body.skip_special_tokens is False


def as_asked(completions: Sequence[Completion], body: CompletionBody) -> list[Completion]:
    """Returns completions without the token that the engine samples for max_tokens=0."""
    if body.max_tokens != 0:
        return list(completions)
    nothing: dict[str, Any] = {"token_ids": (), "log_probs": (), "top_log_probs": (), "sampling_log_probs": ()}
    return [replace(one, text="", **nothing) for one in completions]


def completion_choice(
    completion: Completion, index: int, body: CompletionBody, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """Returns a sample of a prompt's completion as a choice."""
    tokens = _CompletionTokens(body, tokenizer)
    prompt, rows = tokens.prompt_text(completion), tokens.prompt_rows(completion)
    choice: dict[str, Any] = {
        "index": index,
        "text": prompt + completion.text,
        "logprobs": tokens.log_probs(_output_rows(completion), rows, prompt),
        **_end(completion),
    }
    choice |= _token_fields(completion, body)
    if body.return_token_ids:
        choice["prompt_token_ids"] = list(completion.prompt_token_ids)
    if body.prompt_log_probs is not None:
        choice["prompt_log_probs"] = [_finite(value) for value in completion.prompt_log_probs]
    return choice


class CompletionChunks:
    """Makes the choices of a stream's chunks for the samples of one prompt, from `first_index` on."""

    def __init__(self, body: CompletionBody, tokenizer: Tokenizer | None, first_index: int) -> None:
        self._body, self._first_index = body, first_index
        # By sample, for each has text offsets of its own.
        self._tokens: defaultdict[int, _CompletionTokens]
        self._tokens = defaultdict(lambda: _CompletionTokens(body, tokenizer))

    def choice(self, delta: Delta) -> dict[str, Any] | None:
        """Returns the choice of a delta; None if it has nothing to say."""
        body, completion = self._body, delta.completion
        has_tokens = delta.token_ids and (body.logprobs is not None or body.return_token_ids)
        if not (delta.text or completion or has_tokens):
            return None
        tokens = self._tokens[delta.sample_index]
        choice: dict[str, Any] = {
            "index": self._first_index + delta.sample_index,
            "text": delta.text,
            "logprobs": tokens.log_probs(_output_rows(delta)),
            "finish_reason": None,
        }
        choice |= _token_fields(delta, body)
        if completion is not None:
            choice |= _end(completion)
        return choice


# A token, its log-probability, and those of the alternatives; None for the first token of a prompt.
_Row = tuple[int, float | None, Mapping[int, float]]


class _CompletionTokens:
    """Writes tokens as /v1/completions does. A text offset is the place of a token in the choice's text.

    A token that is not in the text, such as a begin token, has the place of the next one that is; one that goes on with
    a character has that character's place.
    """

    def __init__(self, body: CompletionBody, tokenizer: Tokenizer | None) -> None:
        self._body, self._tokenizer = body, tokenizer
        self._offset = 0
        self._detokenizer = self._new_detokenizer(skips=body.skip_special_tokens is not False)

    def prompt_text(self, completion: Completion) -> str:
        if not self._body.echo:
            return ""
        if isinstance(self._body.prompt, str):
            return self._body.prompt
        return self._tokenizer.decode(completion.prompt_token_ids) if self._tokenizer is not None else ""

    def prompt_rows(self, completion: Completion) -> list[_Row]:
        if not self._body.echo or self._body.logprobs is None:
            return []
        tops = completion.prompt_top_log_probs or ({},) * len(completion.prompt_token_ids)
        return list(zip(completion.prompt_token_ids, completion.prompt_log_probs, tops, strict=False))

    def _prompt_offsets(self, rows: Sequence[_Row], text: str) -> list[int]:
        """Returns the places of a prompt's tokens in its text, behind which the output's tokens then begin."""
        offsets, at = [], 0
        detokenizer = self._new_detokenizer(skips=True)
        for token_id, _, _ in rows:
            offsets.append(min(at, len(text)))
            name = self._text(token_id)
            if detokenizer is None or self._tokenizer is None:
                continue
            # A special token is in the text only if the client has written it there.
            is_special = not self._tokenizer.has_text(token_id)
            shown = name if is_special and text.startswith(name, at) else detokenizer.push(token_id)
            at += len(shown)
        self._offset = len(text)
        return offsets

    def log_probs(self, rows: Sequence[_Row], prompt: Sequence[_Row] = (), text: str = "") -> dict[str, Any] | None:
        """Returns the fields of tokens, those of a prompt and its text before those of the output."""
        if self._body.logprobs is None:
            return None
        offsets = self._prompt_offsets(prompt, text) if prompt or text else []
        for token_id, _, _ in rows:
            offsets.append(self._offset)
            self._offset += self._length(token_id)
        rows = [*prompt, *rows]
        return {
            "text_offset": offsets,
            "token_logprobs": [None if value is None else _finite(value) for _, value, _ in rows],
            "tokens": [self._text(token_id) for token_id, _, _ in rows],
            "top_logprobs": [self._alternatives(*row) for row in rows] if self._body.logprobs else None,
        }

    def _alternatives(self, token_id: int, log_prob: float | None, top: Mapping[int, float]) -> dict[str, float] | None:
        if log_prob is None:
            return None
        found: dict[str, float] = {}
        # The token itself is there too, as in OpenAI's API. Of tokens that read alike, the most probable one counts.
        for other, value in (*top.items(), (token_id, log_prob)):
            text = self._text(other)
            found[text] = max(_finite(value), found.get(text, -math.inf))
        return found

    def _new_detokenizer(self, *, skips: bool) -> Detokenizer | None:
        if self._tokenizer is None or self._body.logprobs is None:
            return None
        return Detokenizer(self._tokenizer, skip_special_tokens=skips)

    def _length(self, token_id: int) -> int:
        """Returns the number of characters by which the next token of the output makes the text longer."""
        return 0 if self._detokenizer is None else len(self._detokenizer.push(token_id))

    def _text(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._tokenizer is None else self._tokenizer.text_of(token_id)


def _end(completion: Completion, *, has_calls: bool = False) -> dict[str, Any]:
    reason = completion.finish_reason
    shown = "tool_calls" if has_calls and reason == "stop" else FINISH_REASONS[reason]
    return {"finish_reason": shown, "engine_finish_reason": reason, "seed": completion.seed}


def _output_rows(output: Completion | Delta) -> list[tuple[int, float, Mapping[int, float]]]:
    tops = output.top_log_probs or ({},) * len(output.token_ids)
    return list(zip(output.token_ids, output.log_probs, tops, strict=True))


def _chat_log_probs(output: Completion | Delta, tokenizer: Tokenizer) -> dict[str, Any]:
    content = [
        {**_log_prob(token_id, value, tokenizer), "top_logprobs": [_log_prob(*pair, tokenizer) for pair in top.items()]}
        for token_id, value, top in _output_rows(output)
    ]
    return {"content": content, "refusal": None}


def _log_prob(token_id: int, value: float, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "token": tokenizer.text_of(token_id),
        "logprob": _finite(value),
        "bytes": list(tokenizer.token_bytes(token_id, skip_special_tokens=False)) if tokenizer.is_byte_level else None,
    }


def _finite(value: float | None) -> float | Any:
    return value if value is None or math.isfinite(value) else IMPOSSIBLE
