"""The bodies of answers, as OpenAI's API defines them, from completions of the engine."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from uuid import uuid4

from pydantic import BaseModel

from jaxinfer.engine.request.completion import Completion, Delta
from jaxinfer.serve.bodies import ChatBody, CompletionBody
from jaxinfer.text.tokenizer import Tokenizer

# The log-probability of an impossible token, as in OpenAI's API; JSON has no infinity.
IMPOSSIBLE = -9999.0
# OpenAI's API knows no other reasons; `engine_finish_reason` has the engine's own.
FINISH_REASONS = {"stop": "stop", "length": "length", "exhausted": "stop", "deadline": "length", "abort": "stop"}
FinishReason = Literal["stop", "length", "tool_calls"]
EngineFinishReason = Literal["stop", "length", "exhausted", "deadline", "abort"]


class PromptTokensDetails(BaseModel):
    """How many of the prompt's tokens were found in the prefix cache."""

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


class ChatMessage(BaseModel):
    """The answer to a conversation."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None


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
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": sum(group[0].num_cached_tokens for group in groups)},
    }


def chat_choice(completion: Completion, index: int, body: ChatBody, tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns a sample of an answer as a choice."""
    choice: dict[str, Any] = {
        "index": index,
        "message": {"role": "assistant", "content": completion.text, "refusal": None},
        "logprobs": _chat_log_probs(completion, tokenizer) if body.logprobs else None,
        **_end(completion),
        "seed": completion.seed,
    }
    if body.return_token_ids:
        choice["token_ids"] = list(completion.token_ids)
    return choice


def chat_chunk(delta: Delta, body: ChatBody, tokenizer: Tokenizer) -> dict[str, Any] | None:
    """Returns the choice of a stream's chunk for a delta; None if it has nothing to say."""
    completion = delta.completion
    if not (delta.text or completion or (delta.token_ids and (body.logprobs or body.return_token_ids))):
        return None
    choice: dict[str, Any] = {
        "index": delta.sample_index,
        "delta": {"content": delta.text} if delta.text else {},
        "logprobs": _chat_log_probs(delta, tokenizer) if body.logprobs else None,
        "finish_reason": None,
    }
    if body.return_token_ids:
        choice["token_ids"] = list(delta.token_ids)
    if completion is not None:
        choice |= {**_end(completion), "seed": completion.seed}
    return choice


def completion_choice(
    completion: Completion, index: int, body: CompletionBody, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """Returns a sample of a prompt's completion as a choice."""
    tokens = _CompletionTokens(body, tokenizer)
    rows = [*tokens.prompt_rows(completion), *tokens.output_rows(completion)]
    choice: dict[str, Any] = {
        "index": index,
        "text": tokens.prompt_text(completion) + ("" if body.max_tokens == 0 else completion.text),
        "logprobs": tokens.log_probs(rows),
        **_end(completion),
        "seed": completion.seed,
    }
    if body.return_token_ids:
        choice["token_ids"] = list(completion.token_ids[: body.max_tokens])
        choice["prompt_token_ids"] = list(completion.prompt_token_ids)
    if body.prompt_log_probs is not None:
        choice["prompt_log_probs"] = [_finite(value) for value in completion.prompt_log_probs]
    return choice


class CompletionChunks:
    """Makes the choices of a stream's chunks for the samples of one prompt, from `first_index` on."""

    def __init__(self, body: CompletionBody, tokenizer: Tokenizer | None, first_index: int) -> None:
        self._body, self._tokens = body, _CompletionTokens(body, tokenizer)
        self._first_index = first_index

    def choice(self, delta: Delta) -> dict[str, Any] | None:
        """Returns the choice of a delta; None if it has nothing to say."""
        body, completion = self._body, delta.completion
        has_tokens = delta.token_ids and (body.logprobs is not None or body.return_token_ids)
        if not (delta.text or completion or has_tokens):
            return None
        choice: dict[str, Any] = {
            "index": self._first_index + delta.sample_index,
            "text": delta.text,
            "logprobs": self._tokens.log_probs(self._tokens.output_rows(delta)),
            "finish_reason": None,
        }
        if body.return_token_ids:
            choice["token_ids"] = list(delta.token_ids)
        if completion is not None:
            choice |= {**_end(completion), "seed": completion.seed}
        return choice


# A token, its log-probability, and those of the alternatives; None for the first token of a prompt.
_Row = tuple[int, float | None, Mapping[int, float]]


class _CompletionTokens:
    """Writes tokens as /v1/completions does; text offsets count the characters of the tokens so far."""

    def __init__(self, body: CompletionBody, tokenizer: Tokenizer | None) -> None:
        self._body, self._tokenizer = body, tokenizer
        self._offset = 0

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

    def output_rows(self, output: Completion | Delta) -> Sequence[_Row]:
        tops = output.top_log_probs or ({},) * len(output.token_ids)
        return list(zip(output.token_ids, output.log_probs, tops, strict=True))[: self._body.max_tokens]

    def log_probs(self, rows: Sequence[_Row]) -> dict[str, Any] | None:
        if self._body.logprobs is None:
            return None
        texts = [self._text(token_id) for token_id, _, _ in rows]
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "text_offset": offsets,
            "token_logprobs": [None if value is None else _finite(value) for _, value, _ in rows],
            "tokens": texts,
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

    def _text(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._tokenizer is None else self._tokenizer.text_of(token_id)


def _end(completion: Completion) -> dict[str, Any]:
    reason = completion.finish_reason
    return {"finish_reason": FINISH_REASONS[reason], "engine_finish_reason": reason}


def _chat_log_probs(output: Completion | Delta, tokenizer: Tokenizer) -> dict[str, Any]:
    tops = output.top_log_probs or ({},) * len(output.token_ids)
    rows = zip(output.token_ids, output.log_probs, tops, strict=True)
    content = [
        {**_log_prob(token_id, value, tokenizer), "top_logprobs": [_log_prob(*pair, tokenizer) for pair in top.items()]}
        for token_id, value, top in rows
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
