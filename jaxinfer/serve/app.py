"""The routes of OpenAI's API, and a few of the server's own, as an ASGI application."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from itertools import count
from typing import Any

import numpy as np
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException

from jaxinfer._version import __version__
from jaxinfer.config import SamplingParams
from jaxinfer.engine.async_llm import AsyncLLM, SlowReaderError, Stream
from jaxinfer.engine.frontend.admission import RequestOptions
from jaxinfer.engine.frontend.chats import Chats
from jaxinfer.engine.frontend.embeddings import NoEmbeddingError
from jaxinfer.engine.request.completion import Completion, Delta
from jaxinfer.engine.request.request import BAD_LOGITS_ERROR, QueueFullError
from jaxinfer.serve import answers
from jaxinfer.serve.access import client_of
from jaxinfer.serve.answers import ChatChunks, CompletionChunks, Heading, usage_of
from jaxinfer.serve.bodies import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    SamplingBody,
    TokenizeBody,
)
from jaxinfer.serve.errors import ErrorBody, RefusedError, refused_body
from jaxinfer.serve.messages import plain_messages
from jaxinfer.serve.metrics import ServerMetrics
from jaxinfer.serve.parameters import of_chat, of_completion, options_of, rendering_of
from jaxinfer.serve.streams import DONE, ClientGoneError, EventStream, event, unless_gone
from jaxinfer.validation import shown

logger = logging.getLogger(__name__)

REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 404, 405, 408, 413, 429, 500, 503)
}
STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
EFFORT = "reasoning_effort"  # of OpenAI's API, a variable of some templates
GONE_STATUS = 499  # the status that proxies log for a client that went away


@dataclass(kw_only=True)
class Door:
    """What the routes share: the engine, the names of its model, and whether new requests are taken."""

    llm: AsyncLLM
    names: Sequence[str]  # of the model; answers have the first
    chat_template: str | None = None  # in place of the checkpoint's
    is_draining: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        identity = "\n".join(f"{name}={value}" for name, value in sorted(self.llm.identity().items()))
        self.fingerprint = "fp_" + blake2b(identity.encode(), digest_size=8).hexdigest()
        self.metrics = ServerMetrics(self.llm, self.names[0])

    def require_open(self) -> None:
        """Raises RefusedError 503 if the server takes no more requests."""
        if self.is_draining:
            raise RefusedError(503, "the server is shutting down; try another one", kind="server_error", retry_after=5)
        if self.llm.failure is not None:
            raise RefusedError(503, f"the engine has failed: {self.llm.failure}", kind="server_error")

    def require_model(self, name: str | None) -> None:
        """Raises RefusedError 404 for a name that is none of the model's."""
        if name is not None and name not in self.names:
            known = ", ".join(self.names)
            message = f"the model {shown(name)} does not exist; this server has {known}"
            raise RefusedError(404, message, param="model", code="model_not_found")

    def options(self, request: Request, body: SamplingBody | EmbeddingBody) -> RequestOptions:
        """Returns the scheduling and caching options of a request, as far as its client may choose them."""
        client = client_of(request)
        return options_of(body) if client is None else client.restrict(options_of(body))

    def finish(self, request: Request, completions: Sequence[Completion]) -> None:
        """Counts the completions of a prompt; raises RefusedError if one ended in an error."""
        self.metrics.observe(completions)
        self.count(request, sum(len(completion.token_ids) for completion in completions))
        for completion in completions:
            if completion.finish_reason != "error":
                continue
            error = completion.error or "the request has failed"
            if error.startswith(BAD_LOGITS_ERROR):
                raise RefusedError(500, error, kind="server_error")
            raise RefusedError(400, error, code="structure_failed")  # it cannot be followed to its end

    def count(self, request: Request, num_tokens: int) -> None:
        """Counts tokens towards the limit of the request's client."""
        if (client := client_of(request)) is not None:
            client.count(num_tokens)

    def heading(self, prefix: str, kind: str) -> Heading:
        """Returns the fields that the pieces of an answer share."""
        return Heading(prefix=prefix, object=kind, model=self.names[0], system_fingerprint=self.fingerprint)

    @contextlib.contextmanager
    def refusals(self, body: Body) -> Any:
        """Turns the engine's exceptions into refusals with an HTTP status."""
        try:
            yield
        except ValueError as error:
            message = str(error).removeprefix("prompt 0: ").removeprefix("conversation 0: ")
            found = re.match(r"\w+", message)
            param = found[0] if found and found[0] in type(body).model_fields else None
            raise RefusedError(400, message, param=param) from error
        except QueueFullError as error:
            raise RefusedError(
                429, str(error), kind="rate_limit_error", code="queue_full", retry_after=self.metrics.seconds_to_room()
            ) from error
        except SlowReaderError as error:
            raise RefusedError(500, str(error), kind="server_error", code="slow_reader") from error
        except NoEmbeddingError as error:
            status = {"deadline": 408, "abort": 503}.get(error.finish_reason, 500)
            raise RefusedError(status, str(error), kind="server_error", code=error.finish_reason) from error
        except RuntimeError as error:
            if self.llm.is_open:
                raise
            raise RefusedError(503, str(error), kind="server_error") from error

    async def render(
        self, messages: Sequence[Mapping[str, Any]], sampling: SamplingParams | None, rendering: Mapping[str, Any]
    ) -> Chats:
        """Returns a conversation as a prompt with its parameters; ValueError if it cannot be rendered."""
        template = rendering.get("chat_template") or self.chat_template
        rendering = {**rendering, "chat_template": template}
        if EFFORT in (rendering.get("chat_template_kwargs") or {}) and self.llm.tokenizer is not None:
            text = self.llm.tokenizer.chat_templates.choose(template, bool(rendering.get("tools")))
            if EFFORT not in text:
                raise ValueError(f"{EFFORT} cannot be honoured: the chat template does not read it; leave it out")
        return await self.llm.render([plain_messages(messages)], sampling, **rendering)


def make_app(llm: AsyncLLM, names: Sequence[str], *, chat_template: str | None = None) -> FastAPI:
    """Returns the application that serves a model under some names; `app.state.door` has what its routes share.

    `chat_template` takes the place of the checkpoint's.
    """
    app = FastAPI(
        title="jaxinfer",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        responses=REFUSALS,
        openapi_url="/openapi.json",
    )
    app.state.door = door = Door(llm=llm, names=names, chat_template=chat_template)
    _add_error_handlers(app)
    _add_generation(app, door)
    _add_texts(app, door)
    _add_state(app, door)
    return app


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(RefusedError)
    async def refused(_: Request, error: RefusedError) -> Response:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def unfit(_: Request, error: RequestValidationError) -> Response:
        return refused_body(list(error.errors())).response()

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        response = RefusedError(error.status_code, message, code=None).response()
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(ClientGoneError)
    async def gone(_: Request, error: ClientGoneError) -> Response:
        return Response(status_code=GONE_STATUS)

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> Response:
        return RefusedError(
            500, "the server has failed on this request; its log says why", kind="server_error"
        ).response()


def _add_generation(app: FastAPI, door: Door) -> None:
    llm = door.llm

    @app.post("/v1/chat/completions", response_model=answers.ChatAnswer, responses=STREAMED)
    async def chat(body: ChatBody, request: Request) -> Response:
        """Answers a conversation."""
        door.require_open()
        door.require_model(body.model)
        with door.refusals(body):
            sampling = of_chat(body, llm.default_sampling_params, llm.max_model_len)
            chats = await door.render(body.messages, sampling, rendering_of(body))
        assert llm.tokenizer is not None  # which has rendered the conversation
        (prompt,), (sampling,) = chats.prompts, chats.params
        tokenizer, heading = llm.tokenizer, door.heading("chatcmpl", "chat.completion")
        if body.stream:
            with door.refusals(body):
                stream = await llm.open([prompt], sampling, **door.options(request, body))
            heading = replace(heading, object="chat.completion.chunk")
            first = [_first_chat_choice(index) for index in range(sampling.n)]
            extra = {"prompt_token_ids": prompt} if body.return_token_ids else {}
            chunks = ChatChunks(body, tokenizer, partial(chats.form.reader, sampling, prompt))
            before = [{"choices": first, **extra}]
            return EventStream(_chunks(door, request, body, heading, stream, [chunks.choice], before))
        with door.refusals(body):
            completions = await unless_gone(
                request.receive, llm.generate([prompt], sampling, **door.options(request, body))
            )
        door.count(request, len(prompt))
        door.finish(request, completions)
        answered = await asyncio.to_thread(chats.answered, completions)
        answer = heading.fields() | {
            "choices": [answers.chat_choice(c, i, body, tokenizer) for i, c in enumerate(answered)],
            "usage": usage_of([completions]),
        }
        if body.return_token_ids:
            answer["prompt_token_ids"] = prompt
        return JSONResponse(answer)

    @app.post("/v1/completions", response_model=answers.CompletionAnswer, responses=STREAMED)
    async def complete(body: CompletionBody, request: Request) -> Response:
        """Completes one prompt or several."""
        door.require_open()
        door.require_model(body.model)
        prompts = _prompts(body.prompt)
        with door.refusals(body):
            sampling = of_completion(body, llm.default_sampling_params)
            if body.stream and body.echo:
                raise ValueError("echo=true cannot be streamed; give stream=false, or the prompt yourself")
        heading = door.heading("cmpl", "text_completion")
        if body.stream:
            with door.refusals(body):
                stream = await llm.open(prompts, sampling, **door.options(request, body))
            choices_of = [CompletionChunks(body, llm.tokenizer, i * sampling.n).choice for i in range(len(prompts))]
            return EventStream(_chunks(door, request, body, heading, stream, choices_of, []))
        with door.refusals(body):
            completions = await unless_gone(
                request.receive, llm.generate(prompts, sampling, **door.options(request, body))
            )
        door.count(request, sum(len(c.prompt_token_ids) for c in completions[:: sampling.n]))
        door.finish(request, completions)
        if body.max_tokens == 0:
            none: dict[str, Any] = {"text": "", "token_ids": (), "log_probs": (), "top_log_probs": ()}
            completions = [replace(completion, **none) for completion in completions]
        groups = [completions[i : i + sampling.n] for i in range(0, len(completions), sampling.n)]
        choices = [answers.completion_choice(c, i, body, llm.tokenizer) for i, c in enumerate(completions)]
        return JSONResponse(heading.fields() | {"choices": choices, "usage": usage_of(groups)})


def _add_texts(app: FastAPI, door: Door) -> None:
    llm = door.llm

    @app.post("/v1/embeddings", response_model=answers.EmbeddingAnswer)
    async def embed(body: EmbeddingBody, request: Request) -> Response:
        """Returns a vector for each input."""
        door.require_open()
        door.require_model(body.model)
        size = llm.model_config.hidden_size
        with door.refusals(body):
            if body.dimensions not in (None, size):
                raise ValueError(f"dimensions={body.dimensions} cannot be honoured; this model's vectors have {size}")
            inputs = [await llm.tokenize(p) if isinstance(p, str) else p for p in _prompts(body.input)]
            options = {"pooling": body.pooling, "normalize": body.normalize, **door.options(request, body)}
            vectors = await unless_gone(request.receive, llm.embed(inputs, **options))
        data = [
            {"object": "embedding", "index": index, "embedding": _vector(row, body.encoding_format)}
            for index, row in enumerate(vectors)
        ]
        num_tokens = sum(map(len, inputs))
        door.count(request, num_tokens)
        usage = {"prompt_tokens": num_tokens, "completion_tokens": 0, "total_tokens": num_tokens}
        return JSONResponse({"object": "list", "model": door.names[0], "data": data, "usage": usage})

    @app.post("/tokenize", response_model=answers.Tokens)
    async def tokenize(body: TokenizeBody) -> Response:
        """Returns the token ids of a text or a conversation."""
        door.require_model(body.model)
        with door.refusals(body):
            if body.messages is not None:
                names = ("add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs")
                rendering = {name: getattr(body, name) for name in names}
                (tokens,) = (await door.render(body.messages, None, rendering)).prompts
            else:
                assert body.prompt is not None
                tokens = await llm.tokenize(body.prompt, add_special_tokens=body.add_special_tokens)
        answer: dict[str, Any] = {
            "count": len(tokens),
            "max_model_len": llm.max_model_len,
            "tokens": tokens,
        }
        if body.return_token_strs:
            answer["token_strs"] = [_tokenizer(llm).text_of(token_id) for token_id in tokens]
        return JSONResponse(answer)

    @app.post("/detokenize", response_model=answers.TokenText)
    async def detokenize(body: DetokenizeBody) -> Response:
        """Returns the text of token ids."""
        door.require_model(body.model)
        with door.refusals(body):
            return JSONResponse({"prompt": _tokenizer(llm).decode(body.tokens, skip_special_tokens=False)})


def _add_state(app: FastAPI, door: Door) -> None:
    @app.get("/v1/models", response_model=answers.ModelList)
    async def models() -> Response:
        """Lists the names of the model."""
        return JSONResponse({"object": "list", "data": [_card(door, name) for name in door.names]})

    @app.get("/v1/models/{name:path}", response_model=answers.ModelCard)
    async def model(name: str) -> Response:
        """Describes the model."""
        door.require_model(name)
        return JSONResponse(_card(door, name))

    @app.get("/health", response_model=answers.Health)
    async def health() -> Response:
        """Answers as long as the engine has not failed."""
        if door.llm.failure is not None:
            door.require_open()
        return JSONResponse({"status": "healthy"})

    @app.get("/ready", response_model=answers.Health)
    async def ready() -> Response:
        """Answers as long as new requests are taken."""
        door.require_open()
        return JSONResponse({"status": "ready"})

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Returns the metrics in the text format of Prometheus."""
        text, media_type = door.metrics.text()
        return Response(text, media_type=media_type)


async def _chunks(
    door: Door,
    request: Request,
    body: SamplingBody,
    heading: Heading,
    stream: Stream,
    choices_of: Sequence[Callable[[Delta], dict[str, Any] | None]],
    before: Sequence[dict[str, Any]],
) -> AsyncIterator[bytes]:
    """Yields the events of a stream: what comes `before`, the choices of its deltas, and its usage if asked for."""
    has_usage = body.stream_options is not None and body.stream_options.include_usage
    fields = heading.fields() | ({"usage": None} if has_usage else {})
    place = dict(zip(stream.request_ids, count()))
    completions: list[list[Completion]] = [[] for _ in stream.request_ids]
    async with stream:
        for chunk in before:
            yield event(fields | chunk)
        with door.refusals(body):
            async for delta in stream:
                index = place[delta.request_id]
                if (completion := delta.completion) is not None:
                    if not completions[index]:
                        door.count(request, len(completion.prompt_token_ids))
                    completions[index].append(completion)
                    door.finish(request, [completion])
                if (choice := choices_of[index](delta)) is not None:
                    yield event(fields | {"choices": [choice]})
    if has_usage:
        yield event(fields | {"choices": [], "usage": usage_of(completions)})
    yield DONE


def _first_chat_choice(index: int) -> dict[str, Any]:
    return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}


def _prompts(given: Any) -> list[Any]:
    """Returns one prompt or several, text or token ids, as a list of prompts."""
    is_one = isinstance(given, str) or isinstance(given[0], int)
    return [given] if is_one else list(given)


def _vector(row: np.ndarray, encoding: str) -> list[float] | str:
    return row.tolist() if encoding == "float" else base64.b64encode(row.astype("<f4").tobytes()).decode()


def _tokenizer(llm: AsyncLLM) -> Any:
    if llm.tokenizer is None:
        raise ValueError("this checkpoint has no tokenizer; give token ids")
    return llm.tokenizer


def _card(door: Door, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": door.created,
        "owned_by": "jaxinfer",
        "max_model_len": door.llm.max_model_len,
    }
