"""Lines of OpenAI's batch file format: requests with `custom_id`, `method`, `url` and `body`, and their results.

A body is read as the server reads it, so that a line of a job and a request over HTTP have the same answer. The result
has nothing that differs between two runs, such as the time: a job that is run again writes the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jaxinfer.sampling_params import SamplingParams
from jaxinfer.validation import MAX_INT, shown

if TYPE_CHECKING:
    from jaxinfer.engine.request.completion import Completion
    from jaxinfer.serve.bodies import ChatBody, CompletionBody
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

        from jaxinfer.serve.bodies import ChatBody, CompletionBody
        from jaxinfer.serve.errors import refused_body
        from jaxinfer.serve.messages import plain_messages
        from jaxinfer.serve.parameters import of_chat, of_completion, options_of, rendering_of
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
    options: Any = options_of(body)
    if isinstance(body, ChatBody):
        chat = {**rendering_of(body), "messages": [plain_messages(body.messages)]}
        sampling = of_chat(body, defaults, MAX_INT)
        return {"prompt": None, "chat": chat, "sampling_params": sampling, "options": options, "body": body}
    if not isinstance(body.prompt, str) and not isinstance(body.prompt[0], int):
        raise ValueError("body.prompt has several prompts; give each a line of its own")
    prompt = body.prompt if isinstance(body.prompt, str) else tuple(body.prompt)
    sampling = of_completion(body, defaults)
    return {"prompt": prompt, "chat": None, "sampling_params": sampling, "options": options, "body": body}


def result_of(
    digest: str, body: ChatBody | CompletionBody, completions: Sequence[Completion], tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """Returns the keys `id`, `response` and `error` of a request's result; `digest` is that of its line."""
    from jaxinfer.serve import answers
    from jaxinfer.serve.bodies import ChatBody

    is_chat = isinstance(body, ChatBody)
    if isinstance(body, ChatBody):
        assert tokenizer is not None  # which has rendered the conversation
        # Calls have random ids.
        own = [
            replace(c, tool_calls=tuple(replace(call, id=f"call_{i}") for i, call in enumerate(c.tool_calls)))
            for c in completions
        ]
        choices = [answers.chat_choice(c, i, body, tokenizer) for i, c in enumerate(own)]
    else:
        completions = answers.as_asked(completions, body)
        choices = [answers.completion_choice(c, i, body, tokenizer) for i, c in enumerate(completions)]
    usage = answers.usage_of([completions])
    del usage["prompt_tokens_details"]  # tokens found in the cache: they depend on what ran before
    content = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{digest}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": 0,
        "model": body.model,
        "choices": choices,
        "usage": usage,
    }
    if is_chat and body.return_token_ids:
        content["prompt_token_ids"] = list(completions[0].prompt_token_ids)
    response = {"status_code": 200, "request_id": f"req_{digest}", "body": content}
    return {"id": f"batch_req_{digest}", "response": response, "error": None}


def refusal_of(digest: str, body: ChatBody | CompletionBody, error: Exception, message: str) -> dict[str, Any]:
    """Returns the keys `id`, `response` and `error` of a request that was refused, with the server's answer to it."""
    from jaxinfer.serve.errors import refusal_of

    refused = refusal_of(error, message, type(body).model_fields)
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
