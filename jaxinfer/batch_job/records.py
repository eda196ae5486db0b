"""Parses the input lines of a job as requests, and formats results as output lines; free of jax."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from jaxinfer.batch_job.line_form import PLAIN, LineForm
from jaxinfer.batch_job.openai_lines import failure_of, is_openai_line, read_body, refusal_of, result_of
from jaxinfer.config import SamplingParams
from jaxinfer.json_lines import parse_json, parse_line
from jaxinfer.names import way_out
from jaxinfer.validation import shown

if TYPE_CHECKING:
    from jaxinfer.engine.llm import Completion
    from jaxinfer.text.tokenizer import Tokenizer

PARAMETERS = tuple(parameter.name for parameter in dataclasses.fields(SamplingParams))
DEFAULTS = SamplingParams()
SEED_BYTES = 8  # SamplingParams.seed has 64 bits
DIGEST_BYTES = 8  # of an input line, and of a record

# Keys of a line with messages: arguments of `LLM.chat`, as `OPTIONS` are for any line.
RENDERING = (
    *("tools", "tool_choice", "parallel_tool_calls", "documents", "chat_template", "answer_style"),
    *("add_generation_prompt", "continue_final_message"),
)
CHAT = ("messages", *RENDERING, "chat_template_kwargs")
OPTIONS = ("priority", "tenant", "deadline", "cache_salt", "prediction", "adapter")

OK = 200  # the HTTP status of a result in OpenAI's format
# Each output line begins with this, which tells an incomplete record from a foreign file.
RECORD_START = b'{"line": '
# Each ends with a digest of all before it.
SEAL = b', "record": "%s"}}\n'
SEAL_START, SEAL_END = SEAL.split(b"%s")
OLD_ADAPTERS = re.compile("(.+?)=([0-9a-f]+)(?:, |$)")  # in records that have all adapters of the engine


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """One line of the input; `line` counts from 1, blank lines included."""

    line: int
    custom_id: str
    digest: str  # of the line
    prompt: str | tuple[int, ...] | None
    chat: Mapping[str, Any] | None  # arguments of `render_chats`, where there is no prompt
    sampling_params: SamplingParams
    options: Mapping[str, Any] = field(default_factory=dict)  # the `RequestOptions` that the line gives
    body: Any = None  # of a line in OpenAI's format: `ChatBody` or `CompletionBody`
    kept: Mapping[str, Any] = field(default_factory=dict)  # keys of the line that its record has too

    @property
    def is_openai(self) -> bool:
        return self.body is not None


@dataclass(frozen=True, kw_only=True)
class InvalidLine:
    """A line of the input that is no request; `message` has the reason."""

    line: int
    custom_id: str | None
    digest: str  # of the line
    message: str
    is_openai: bool = False


@dataclass(frozen=True, kw_only=True)
class Record:
    """A line of the output: its input line's number and digest, the engine's identity, and `has_error`.

    `adapters` has the digest of the adapter that the line was computed with, by its name. In records of earlier
    versions it has all adapters that the engine had.
    """

    line: int
    digest: str
    identity: dict[str, str]
    has_error: bool
    adapters: dict[str, str] = field(default_factory=dict)


def digest_of(raw: bytes) -> str:
    """Returns the digest of an input line, without surrounding white space."""
    return blake2b(raw.strip(), digest_size=DIGEST_BYTES).hexdigest()


def read_requests(
    lines: Iterable[tuple[int, bytes]],
    done: Container[int],
    defaults: SamplingParams = DEFAULTS,
    form: LineForm = PLAIN,
) -> Iterator[JobRequest | InvalidLine]:
    """Yields the requests of all numbered lines that are not `done`, in order, reading one line at a time.

    `defaults` has the sampling parameters that a line leaves out, unless `form` has them.
    """
    seen: set[str | None] = set()
    for line, raw in lines:
        if line in done:
            seen.add(custom_id_of(raw, line))
        else:
            entry = parse_request(raw, line, defaults, form)
            is_repeated = entry.custom_id is not None and entry.custom_id in seen
            seen.add(entry.custom_id)
            message = f"custom_id {shown(entry.custom_id)} is used on an earlier line; give each request its own"
            repeated = _invalid(entry.line, entry.custom_id, entry.digest, message, entry.is_openai)
            yield repeated if is_repeated else entry


def parse_request(
    raw: bytes, line: int, defaults: SamplingParams = DEFAULTS, form: LineForm = PLAIN
) -> JobRequest | InvalidLine:
    """Parses one request.

    A line without a custom_id has its number as one. A request without a seed gets one derived from its line number
    and custom_id. So a resumed job samples the same tokens as an undisturbed one.
    """
    fields: dict[str, Any] | None = None
    digest = digest_of(raw)
    try:
        fields = _object(parse_line(raw))
        return _request(fields, line, digest, form.sampling_params or defaults, form)
    except Exception as error:
        if not is_of_line(error):
            raise
        custom_id = None if fields is None else _custom_id(fields, line)
        return _invalid(line, custom_id, digest, message_of(error), is_openai_line(fields or {}))


def is_of_line(error: Exception) -> bool:
    """True if an error while a line is read, begun or written is the line's own, and no failure of engine or machine.

    Such an error would come again each time. So it is recorded for its line, and the job goes on.
    """
    return isinstance(error, RecursionError) or not isinstance(error, MemoryError | OSError | RuntimeError)


def message_of(error: Exception) -> str:
    """Returns the reason for the record of a line, with the type of an error that no check has raised."""
    is_foreseen = isinstance(error, ValueError | OverflowError | RuntimeError)
    return str(error) if is_foreseen else f"the request has failed with {type(error).__name__}: {error}"


def _invalid(line: int, custom_id: str | None, digest: str, message: str, is_openai: bool) -> InvalidLine:
    return InvalidLine(line=line, custom_id=custom_id, digest=digest, message=message, is_openai=is_openai)


def custom_id_of(raw: bytes, line: int) -> str | None:
    """Returns the custom_id of an input line, its number if it states none; None for a line or an id that is none."""
    try:
        return _custom_id(_object(parse_line(raw)), line)
    except ValueError:
        return None


def completion_line(
    request: JobRequest,
    completions: Sequence[Completion],
    identity: Mapping[str, str],
    tokenizer: Tokenizer | None = None,
    form: LineForm = PLAIN,
) -> bytes:
    """Formats the result of a request, line end included; infinite log probabilities become null.

    With `n` above 1 the key `samples` has all samples, by sample_index, or best first with `best_of`. If a sample
    ended in an error, `error` has the reason. `identity` is the engine's identity. The result of a line in OpenAI's
    format is in this format too, with our own keys beside it.
    """
    error = error_of(completions)
    if request.is_openai and error is not None:
        from jaxinfer.openai.errors import ended_in_error

        return refusal_line(request, ended_in_error(error), identity)
    record: dict[str, Any] = {"line": request.line, "custom_id": request.custom_id}
    if request.is_openai:
        record |= result_of(request.digest, request.body, completions, tokenizer)
        return _sealed(record, identity, request.digest)
    samples = [form.of_record(_sample(request, completion)) for completion in completions]
    if request.sampling_params.n == 1:
        record |= samples[0]
    else:
        pairs = zip(samples, completions, strict=True)
        record["samples"] = [sample | {"sample_index": completion.sample_index} for sample, completion in pairs]
    first = completions[0]
    record |= form.of_record({"num_prompt_tokens": len(first.prompt_token_ids), "seed": first.seed})
    if request.kept:
        record["kept"] = dict(request.kept)
    if error is not None:
        record["error"] = error
    return _sealed(record, identity, request.digest)


def error_of(completions: Iterable[Completion]) -> str | None:
    """Returns the reason if a sample of the request ended in an error, else None."""
    return next((completion.error for completion in completions if completion.finish_reason == "error"), None)


def _sample(request: JobRequest, completion: Completion) -> dict[str, Any]:
    sample: dict[str, Any] = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "log_probs": _finite(completion.log_probs),
    }
    if completion.sampling_log_probs:
        sample["sampling_log_probs"] = _finite(completion.sampling_log_probs)
    if request.sampling_params.log_probs > 0:
        sample["top_log_probs"] = _alternatives(completion.top_log_probs)
    if request.sampling_params.prompt_log_probs is not None:
        sample["prompt_log_probs"] = _finite(completion.prompt_log_probs)
    if request.sampling_params.prompt_log_probs:
        sample["prompt_top_log_probs"] = _alternatives(completion.prompt_top_log_probs)
    if completion.content is not None:  # of an answer
        sample["content"] = completion.content
    if completion.reasoning is not None:
        sample["reasoning"] = completion.reasoning
    if completion.tool_calls:
        # Without their ids, which are random, or no run would repeat another to the byte.
        sample["tool_calls"] = [{"name": call.name, "arguments": call.arguments} for call in completion.tool_calls]
    sample["finish_reason"] = completion.finish_reason
    return sample


def error_line(entry: InvalidLine, message: str, identity: Mapping[str, str]) -> bytes:
    """Formats the record of a line that is no request, line end included."""
    failure = failure_of(entry.digest, message) if entry.is_openai else {"error": message}
    return _failure_line(entry, failure, identity)


def refusal_line(request: JobRequest, error: Exception, identity: Mapping[str, str]) -> bytes:
    """Formats the record of a request that the engine has refused, line end included."""
    message = message_of(error).removeprefix("conversation 0: ")  # a line has one
    failure = refusal_of(request.digest, request.body, error, message) if request.is_openai else {"error": message}
    return _failure_line(request, failure, identity)


def unanswered_line(raw: bytes, line: int, identity: Mapping[str, str], code: str, message: str) -> bytes:
    """Formats the record of a line in OpenAI's format that was not executed, line end included."""
    digest = digest_of(raw)
    failure = {"id": f"batch_req_{digest}", "response": None, "error": {"code": code, "message": message}}
    entry = InvalidLine(line=line, custom_id=custom_id_of(raw, line), digest=digest, message=message)
    return _failure_line(entry, failure, identity)


def _failure_line(entry: JobRequest | InvalidLine, failure: dict[str, Any], identity: Mapping[str, str]) -> bytes:
    record = {"line": entry.line, "custom_id": entry.custom_id, **failure}
    return _sealed(record, identity, entry.digest)


def _sealed(record: dict[str, Any], identity: Mapping[str, str], digest: str) -> bytes:
    """Formats a record with its identity, the digest of its line, and in the end a digest of all that."""
    content = format_record(record | {"made_by": {**identity, "line": digest}}).removesuffix(b"}}\n")
    return content + SEAL % _seal_of(content).encode()


def _seal_of(content: bytes) -> str:
    # A table has half a surrogate pair as its escape, and so one backslash more.
    return blake2b(content.replace(rb"\\", b"\\"), digest_size=DIGEST_BYTES).hexdigest()


def line_of_record(raw: bytes) -> int:
    """Returns the number of a record's input line, without parsing the rest of the record."""
    return int(raw[len(RECORD_START) : raw.index(b",")])


class DamagedError(ValueError):
    """A record has changed since it was written."""


def parse_record(raw: bytes) -> Record:
    """Parses an output line; ValueError if this module has not written it, DamagedError if it has changed since."""
    record: dict[str, Any] = {}
    if raw.startswith(RECORD_START):
        with contextlib.suppress(ValueError):
            record = _object(parse_json(raw))
    line, custom_id = record.get("line"), record.get("custom_id")
    made_by = record.get("made_by")
    # A record has a seal, which shows that it is whole. Those of earlier versions have all fields.
    has_content = "token_ids" in record or "samples" in record or (isinstance(made_by, dict) and "record" in made_by)
    is_result = "error" in record or (has_content and custom_id is not None)
    if type(line) is not int or line < 1 or not isinstance(custom_id, str | None) or not is_result:
        raise ValueError("not a record of a batch job")
    if not isinstance(made_by, dict) or not isinstance(made_by.get("line"), str):
        raise ValueError("a record of an older version, which does not tell what it was made by")
    # Records of earlier versions have none.
    if (seal := made_by.pop("record", None)) is not None:
        content, start, end = raw.rpartition(SEAL_START)
        if not start or end != f"{seal}".encode() + SEAL_END or seal != _seal_of(content):
            raise DamagedError("a damaged record: its digest is not that of its contents")
    name, is_used, digest = made_by.pop("adapter", "").rpartition("=")
    adapters = dict(OLD_ADAPTERS.findall(made_by.pop("adapters", ""))) | ({name: digest} if is_used else {})
    # OpenAI's format has the errors of requests in their responses.
    response = record.get("response")
    status = response.get("status_code", OK) if isinstance(response, dict) else OK
    has_error = record.get("error") is not None or status != OK
    digest = made_by.pop("line")
    return Record(line=line, digest=digest, identity=made_by, has_error=has_error, adapters=adapters)


def _object(value: Any) -> dict[str, Any]:
    _require(isinstance(value, dict), f"the line is {_kind(value)}; give a JSON object")
    return value


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _request(fields: dict[str, Any], line: int, digest: str, defaults: SamplingParams, form: LineForm) -> JobRequest:
    is_openai, custom_id = is_openai_line(fields), _custom_id(fields, line)
    if custom_id is None:
        raise ValueError(f"custom_id is {_kind(fields.get('custom_id'))}; give each request a string of its own")
    if is_openai:
        own = dataclasses.replace(form, sampling_params=None)
        _require(own.is_plain, "a line in OpenAI's format takes no prompt, system, kept and fields of the job")
        content = read_body(fields, defaults)
        content["sampling_params"] = _seeded(content["sampling_params"], line, custom_id)
        return JobRequest(line=line, custom_id=custom_id, digest=digest, **content)
    known = ("custom_id", "prompt", *CHAT, *OPTIONS, *PARAMETERS)
    unknown = sorted(fields.keys() - {*known, *form.kept, *form.columns})
    if unknown:
        answer = way_out(unknown[0], known) or f"remove them or use {', '.join(known)}"
        raise ValueError(f"keys {shown(unknown)} are unknown; {answer}")
    parameters = {name: fields[name] for name in PARAMETERS if name in fields}
    for name, value in parameters.items():
        if name == "logit_bias" and isinstance(value, dict):
            parameters[name] = _biases(value)
        elif name not in ("json_schema", "logits_processors"):
            # SamplingParams would take an object as the list of its keys.
            _require(not isinstance(value, dict), f"{name} is an object; give a value or a list")
    params = _seeded(dataclasses.replace(defaults, **parameters), line, custom_id)
    kept = {name: fields[name] for name in form.kept if name in fields}
    others = {name: value for name, value in fields.items() if name not in ("prompt", "messages")}
    fields = others | form.content_of(fields)
    chat = _chat(fields)
    prompt = _prompt(fields) if chat is None else None
    options = {name: fields[name] for name in OPTIONS if name in fields}
    content = {"prompt": prompt, "chat": chat, "sampling_params": params, "options": options, "kept": kept}
    return JobRequest(line=line, custom_id=custom_id, digest=digest, **content)


def _seeded(params: SamplingParams, line: int, custom_id: str) -> SamplingParams:
    return params if params.seed is not None else dataclasses.replace(params, seed=seed_of(line, custom_id))


def _chat(fields: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the arguments of `render_chats` for a line with messages, None for one with a prompt."""
    if "messages" not in fields:
        others = sorted(set(CHAT) & fields.keys())
        _require(not others, f"{shown(others)} without messages; give messages instead of a prompt, or remove them")
        return None
    _require("prompt" not in fields, "the line has both prompt and messages; give one of them")
    messages, variables = fields["messages"], fields.get("chat_template_kwargs") or {}
    _require(isinstance(messages, list), f"messages is {_kind(messages)}; give a list of messages")
    _require(isinstance(variables, dict), f"chat_template_kwargs is {_kind(variables)}; give an object")
    taken = sorted({"conversation", "tokenize", *RENDERING} & variables.keys())
    _require(
        not taken, f"chat_template_kwargs has {shown(taken)}, no variables; give them beside messages or not at all"
    )
    given = {name: fields[name] for name in RENDERING if fields.get(name) is not None}
    return {**given, "messages": [messages], "chat_template_kwargs": variables}


def _biases(biases: dict[str, Any]) -> list[tuple[int, Any]]:
    """Converts the keys to integers, because JSON's keys are strings."""
    for key in biases:
        _require(key.isascii() and key.isdecimal(), f"logit_bias has a key {key!r}; give token ids")
    return [(int(key), bias) for key, bias in biases.items()]


def _custom_id(fields: dict[str, Any], line: int) -> str | None:
    if "custom_id" not in fields and not is_openai_line(fields):
        return str(line)
    custom_id = fields.get("custom_id")
    return str(custom_id) if type(custom_id) is int else custom_id if isinstance(custom_id, str) else None


def _prompt(fields: dict[str, Any]) -> str | tuple[int, ...]:
    prompt: Any = fields.get("prompt")
    if isinstance(prompt, str):
        return prompt
    way_out = "give a string or a list of token ids"
    _require(isinstance(prompt, list), f"prompt is {_kind(prompt)}; {way_out}")
    # isinstance would accept bool as int.
    has_ids_only = all(type(token_id) is int for token_id in prompt)
    _require(has_ids_only, f"prompt is a list with something else than integers; {way_out}")
    return tuple(prompt)


def seed_of(line: int, custom_id: str) -> int:
    """Returns the seed of a request that has none."""
    name = f"{line}\n{custom_id}".encode(errors="surrogatepass")
    return int.from_bytes(blake2b(name, digest_size=SEED_BYTES).digest(), "big")


def _kind(value: Any) -> str:
    kinds = {bool: "a truth value", int: "a number", float: "a number", str: "a string", list: "a list"}
    return "missing or null" if value is None else kinds.get(type(value), "an object")


def _alternatives(rows: Sequence[Mapping[int, float]]) -> list[dict[int, float | None]]:
    return [dict(zip(row, _finite(list(row.values())), strict=True)) for row in rows]


def _finite(values: Sequence[float | None]) -> list[float | None]:
    return [None if value is None or not math.isfinite(value) else value for value in values]


def format_record(record: dict[str, Any]) -> bytes:
    """Formats a record, line end included."""
    text = json.dumps(record, ensure_ascii=False, allow_nan=False)
    # A lone surrogate has no UTF-8; Python's escape for it is also valid JSON.
    return text.encode("utf-8", "backslashreplace") + b"\n"
