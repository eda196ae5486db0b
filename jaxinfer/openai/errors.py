"""Errors as OpenAI's API writes them: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from typing import Any

from pydantic import BaseModel

from jaxinfer.engine.frontend.admission import PromptTooLongError
from jaxinfer.engine.request.request import BAD_LOGITS_ERROR, QueueFullError
from jaxinfer.validation import shown

MAX_MESSAGE = 2_000  # characters


class ErrorDetail(BaseModel):
    """The reason why a request has no answer."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of an answer with an error."""

    error: ErrorDetail


class RefusedError(ValueError):
    """A request is refused with an HTTP status, a message, and the parameter at fault if there is one."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.param, self.code, self.retry_after = status, kind, param, code, retry_after

    def body(self) -> dict[str, Any]:
        """Returns the error as a JSON object."""
        # Half a surrogate pair has no UTF-8.
        message = str(self)[:MAX_MESSAGE].encode(errors="backslashreplace").decode()
        detail = {"message": message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": detail}


# The ends of paths that clients ask for, and the routes that answer the same questions.
CHAT_ROUTE = "/v1/chat/completions"
INSTEAD = {
    "/responses": f"POST {CHAT_ROUTE}, for which most clients have a setting",
    "/messages": f"POST {CHAT_ROUTE}, in OpenAI's form and not Anthropic's",
    "/chat/completions": f"POST {CHAT_ROUTE}; give the client a base URL that ends in /v1",
    "/completions": "POST /v1/completions; give the client a base URL that ends in /v1",
    "/embeddings": "POST /v1/embeddings; give the client a base URL that ends in /v1",
    "/models": "GET /v1/models; give the client a base URL that ends in /v1",
    "/api/chat": f"POST {CHAT_ROUTE}, in OpenAI's form and not Ollama's",
    "/api/generate": "POST /v1/completions, in OpenAI's form and not Ollama's",
}
UNKNOWN_FAILURE = RefusedError(500, "the server has failed on this request; its log says why", kind="server_error")


def require_known_model(name: str | None, names: Sequence[str], owner: str, way_out: str = "") -> None:
    """Raises RefusedError 404 for the name of a model that is none of `names`, those of the owner's models."""
    if name is not None and name not in names:
        message = f"the model {shown(name)} does not exist; this {owner} has {', '.join(names)}{way_out}"
        raise RefusedError(404, message, param="model", code="model_not_found")


def unknown_route(method: str, path: str, reason: str, status: int) -> RefusedError:
    """Returns the refusal of a request to a path or by a method that is not there; of OpenAI's API it names what is."""
    message = f"{method} {path}: {reason}"
    if status == 404 and path.rstrip("/").endswith(tuple(INSTEAD)):
        name = next(ending for ending in INSTEAD if path.rstrip("/").endswith(ending))
        message += f"; this server has {INSTEAD[name]}"
    return RefusedError(status, message)


def refusal_of(
    error: Exception, message: str, fields: Container[str] = (), *, retry_after: float | None = None
) -> RefusedError:
    """Returns the refusal of a request that the engine does not take: a ValueError or QueueFullError of it.

    A message that begins with one of the `fields` names it as the parameter at fault.
    """
    if isinstance(error, RefusedError):
        return error
    # A client cannot do what the engine's user can.
    message = message.replace("raise EngineConfig.", "ask the server's operator to raise ")
    if isinstance(error, QueueFullError):
        return RefusedError(429, message, kind="rate_limit_error", code="queue_full", retry_after=retry_after)
    found = re.match(r"\w+", message)
    param = found[0] if found and found[0] in fields else None
    code = "context_length_exceeded" if isinstance(error, PromptTooLongError) else None
    return RefusedError(400, message, param=param, code=code)


def ended_in_error(message: str) -> RefusedError:
    """Returns the refusal of a request that the engine has ended with finish reason "error"."""
    if message.startswith(BAD_LOGITS_ERROR):
        return RefusedError(500, message, kind="server_error")
    return RefusedError(400, message, code="structure_failed")  # it cannot be followed to its end


def refused_body(errors: list[Any]) -> RefusedError:
    """Returns the refusal of a body that does not fit its schema, from the first of pydantic's errors."""
    error = errors[0]
    place = [str(part) for part in error["loc"] if part not in ("body", "query")]
    param = next(iter(place), None)
    message = error["msg"].removeprefix("Value error, ")
    if refused := re.match(r"(\w+)(?: cannot be honoured|: this field is unknown)", message):
        param = refused[1]
    if error["type"] == "json_invalid":
        place, param, message = [], None, f"the body is no JSON: {error.get('ctx', {}).get('error', message)}"
    return RefusedError(400, f"{'.'.join(place)}: {message}" if place else message, param=param)
