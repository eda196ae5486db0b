"""Refusals of requests as HTTP responses."""

from __future__ import annotations

import math

from fastapi.responses import JSONResponse

from jaxinfer.openai.errors import RefusedError


def refusal_response(error: RefusedError) -> JSONResponse:
    """Returns the response with an error, its status, and the seconds to wait if it says them."""
    # Whole seconds, and never 0, which would ask to try again at once.
    headers = {} if error.retry_after is None else {"Retry-After": str(max(math.ceil(error.retry_after), 1))}
    return JSONResponse(error.body(), error.status, headers)
