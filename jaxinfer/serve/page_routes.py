"""The routes that the page alone calls: the model's defaults, and the HTML of an answer's Markdown."""

from __future__ import annotations

import asyncio
from functools import partial
from importlib.util import find_spec
from typing import Annotated, Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from jaxinfer.config import SamplingParams
from jaxinfer.engine.fair_threads import FairThreads
from jaxinfer.openai.bodies import Body
from jaxinfer.openai.errors import RefusedError
from jaxinfer.serve.access import tenant_of
from jaxinfer.serve.state import ServerState
from jaxinfer.text.limited_process import EndedError, LimitedProcess, LimitError

MAX_CHARACTERS = 2**17  # of a text, which takes some tenths of a second
MAX_SECONDS = 1.0  # of processor time for one text
MAX_WAITING = 32  # texts of a tenant; a page sends one at a time
DEFAULTS = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)


class MarkdownBody(Body):
    """The body of /page/markdown."""

    text: Annotated[str, Field(max_length=MAX_CHARACTERS)]


def add_page_routes(app: FastAPI, state: ServerState) -> None:
    """Adds the page's own routes, which need a key as all others do and are not part of the API's document."""
    is_installed = find_spec("markdown_it") is not None
    threads = FairThreads(1, "markdown", max_at_once=1, max_waiting=MAX_WAITING)
    # A text may be written so that it takes for ever, and would then hold the interpreter's lock.
    process = LimitedProcess("jaxinfer.display.markdown")

    @app.get("/page/model", include_in_schema=False)
    async def model() -> Response:
        """Returns the values that stand for the page's empty settings."""
        defaults = _defaults(state.llm.default_sampling_params, state.llm.max_model_len)
        return JSONResponse(
            {"max_model_len": state.llm.max_model_len, "renders_markdown": is_installed, "defaults": defaults}
        )

    @app.post("/page/markdown", include_in_schema=False)
    async def markdown(body: MarkdownBody, request: Request) -> Response:
        """Returns the HTML of a text in Markdown."""
        if not is_installed:
            message = "Markdown needs the package markdown-it-py; ask the server's operator for jaxinfer[serve]"
            raise RefusedError(501, message, kind="server_error", code="not_installed")
        with state.refusals(body):
            work = partial(_html, process, body.text)
            html = await asyncio.wrap_future(threads.submit(tenant_of(request) or "", work))
        return JSONResponse({"html": html})


def _html(process: LimitedProcess, text: str) -> str:
    try:
        return process.ask(text, MAX_SECONDS)
    except (LimitError, EndedError) as error:
        raise ValueError(f"text takes too long or too much to format ({error}); show it as it is") from None


def _defaults(sampling: SamplingParams, max_model_len: int) -> dict[str, Any]:
    """Returns the sampling parameters of a request that gives none; `max_tokens` None is all that the prompt leaves."""
    is_given = sampling.max_tokens != SamplingParams.max_tokens
    max_tokens = min(int(sampling.max_tokens), max_model_len) if is_given else None
    return {name: getattr(sampling, name) for name in DEFAULTS} | {"max_tokens": max_tokens}
