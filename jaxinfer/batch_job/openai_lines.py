"""Lines of OpenAI's batch file format: requests with `custom_id`, `method`, `url` and `body`, and their results.

A body is read as the server reads it, so that a line of a job and a request over HTTP have the same answer. The result
has nothing that differs between two runs, such as the time: a job that is run again writes the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jaxinfer.engine.request.request import QueueFullError
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.validation import MAX_INT, shown

if TYPE_CHECKING:
    from jaxinfer.engine.request.completion import Completion
    from jaxinfer.openai.bodies import ChatBody, CompletionBody
    from jaxinfer.text.tokenizer import Tokenizer

KEYS = ("custom_id", "method", "url", "body")
CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def is_openai_line(fields: Mapping[str, Any]) -> bool:
    """True if a line of a job is in OpenAI's format."""
    return "url" in fields or "body" in fields


def read_body(fields: Mapping[str, Any], defaults: SamplingParams) -> dict[str, Any]:
    """Returns the fields of a `JobRequest` for a line in OpenAI's format; ValueError with the reason if it is wrong."""
    try:
        from pydantic import ValidationError

        from jaxinfer.openai.bodies import ChatBody, CompletionBody
        from jaxinfer.openai.errors import refused_body
        from jaxinfer.openai.parameters import options_of
        from jaxinfer.openai.work import work_of
    except ModuleNotFoundError as error:
        raise ValueError(f"OpenAI's batch format needs {error.name}; run pip install 'jaxinfer[serve]'") from None
    if unknown := sorted(fields.keys() - set(KEYS)):
        raise ValueError(f"keys {shown(unknown)} are unknown; a line has {', '.join(KEYS)}")
    method, url = fields.get("method", "POST"), fields.get("url")
    if method != "POST" or url not in (CHATS, COMPLETIONS):
        raise ValueError(f"{shown(method)} {shown(url)} is no request of a job; give POST and {CHATS} or {COMPLETIONS}")
    try:
        body = (ChatBody if url == CHATS else CompletionBody).model_validate(fields.get("body"))
    except ValidationError as error:
        raise ValueError(f"body: {refused_body(list(error.errors()))}") from None
    if body.stream:
        raise ValueError("body.stream is true, and a job has no streams; leave it out")
    work = work_of(body, defaults, MAX_INT)
    if len(work.prompts) > 1:
        raise ValueError("body.prompt has several prompts; give each a line of its own")
    prompt = None if work.chat is not None else work.prompts[0]
    return {
        "prompt": tuple(prompt) if isinstance(prompt, list) else prompt,
        "chat": work.chat,
        "sampling_params": work.sampling,
        "options": options_of(body),
        "body": body,
    }


def result_of(
    digest: str, body: ChatBody | CompletionBody, completions: Sequence[Completion], tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """Returns the keys `id`, `response` and `error` of a request's result; `digest` is that of its line."""
    from jaxinfer.openai.bodies import ChatBody
    from jaxinfer.openai.work import answer_of

    is_chat = isinstance(body, ChatBody)
    heading = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{digest}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": 0,
        "model": body.model,
    }
    # Calls have random ids.
    completions = [
        replace(c, tool_calls=tuple(replace(call, id=f"call_{i}") for i, call in enumerate(c.tool_calls)))
        for c in completions
    ]
    content = answer_of(body, heading, completions, len(completions), tokenizer)
    content["choices"] = list(content["choices"])
    del content["usage"]["prompt_tokens_details"]  # tokens found in the cache: they depend on what ran before
    response = {"status_code": 200, "request_id": f"req_{digest}", "body": content}
    return {"id": f"batch_req_{digest}", "response": response, "error": None}


def refusal_of(digest: str, body: ChatBody | CompletionBody, error: Exception, message: str) -> dict[str, Any]:
    """Returns the keys `id`, `response` and `error` of a request that was refused, with the server's answer to it."""
    from jaxinfer.openai.errors import RefusedError, refusal_of

    if isinstance(error, ValueError | QueueFullError):
        refused = refusal_of(error, message, type(body).model_fields)
    else:
        refused = RefusedError(500, message, kind="server_error")
    return failure_of(digest, str(refused), refused.status, refused.kind, refused.param, refused.code)


def failure_of(
    digest: str,
    message: str,
    status: int = 400,
    kind: str = "invalid_request_error",
    param: str | None = None,
    code: str | None = None,
) -> dict[str, Any]:
    """Returns the keys `id`, `response` and `error` of a request that has no result."""
    detail = {"message": message, "type": kind, "param": param, "code": code}
    response = {"status_code": status, "request_id": f"req_{digest}", "body": {"error": detail}}
    return {"id": f"batch_req_{digest}", "response": response, "error": None}
