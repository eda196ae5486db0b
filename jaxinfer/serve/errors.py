"""Errors as OpenAI's API writes them: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import math
import re
from typing import Any

from fastapi.responses import JSONResponse
from pydantic import BaseModel

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


class RefusedError(Exception):
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

    def response(self) -> JSONResponse:
        """Returns the answer with the error."""
        # Whole seconds, and never 0, which would ask to try again at once.
        headers = {} if self.retry_after is None else {"Retry-After": str(max(math.ceil(self.retry_after), 1))}
        return JSONResponse(self.body(), self.status, headers)


UNKNOWN_FAILURE = RefusedError(500, "the server has failed on this request; its log says why", kind="server_error")


def refused_body(errors: list[Any]) -> RefusedError:
    """Returns the refusal of a body that does not fit its schema, from the first of pydantic's errors."""
    error = errors[0]
    place = [str(part) for part in error["loc"] if part != "body"]
    param = next(iter(place), None)
    message = error["msg"].removeprefix("Value error, ")
    if refused := re.match(r"(\w+)(?: cannot be honoured|: this field is unknown)", message):
        param = refused[1]
    if error["type"] == "json_invalid":
        place, param, message = [], None, f"the body is no JSON: {error.get('ctx', {}).get('error', message)}"
    return RefusedError(400, f"{'.'.join(place)}: {message}" if place else message, param=param)
