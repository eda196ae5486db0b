"""The routes of OpenAI's API, and a few of the server's own, as an ASGI application."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import time
from collections import defaultdict
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
from jaxinfer.engine.async_llm import AsyncLLM, SlowReaderError
from jaxinfer.engine.frontend.admission import ONE_TOKEN, RequestOptions
from jaxinfer.engine.frontend.chats import Chats
from jaxinfer.engine.frontend.embeddings import NoEmbeddingError
from jaxinfer.engine.frontend.sample_group import in_order
from jaxinfer.engine.request.completion import Completion, Delta
from jaxinfer.engine.request.request import QueueFullError
from jaxinfer.serve import answers
from jaxinfer.serve.access import Client, client_of
from jaxinfer.serve.answers import ChatChunks, CompletionChunks, Heading, usage_of
from jaxinfer.serve.batches.batches import Batches
from jaxinfer.serve.batches.file_store import FileStore
from jaxinfer.serve.batches.routes import add_batches
from jaxinfer.serve.bodies import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    SamplingBody,
    TokenizeBody,
)
from jaxinfer.serve.errors import (
    UNKNOWN_FAILURE,
    ErrorBody,
    RefusedError,
    ended_in_error,
    refusal_of,
    refused_body,
    require_known_model,
)
from jaxinfer.serve.messages import plain_messages
from jaxinfer.serve.metrics import ObservedStream, ServerMetrics
from jaxinfer.serve.parameters import of_chat, of_completion, options_of, rendering_of, require_effort_is_read
from jaxinfer.serve.static_page import add_page
from jaxinfer.serve.streams import DONE, ClientGoneError, EventStream, event, unless_gone

logger = logging.getLogger(__name__)

REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 404, 405, 408, 413, 429, 500, 503)
}
STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
GONE_STATUS = 499  # the status that proxies log for a client that went away


@dataclass(kw_only=True)
class ServerState:
    """The state that all routes share: the engine, the names of its model, and if new requests are taken."""

    llm: AsyncLLM
    names: Sequence[str]  # of the model; answers have the first
    chat_template: str | None = None  # in place of the checkpoint's
    allows_chat_templates: bool = False  # of requests
    batches: Batches | None = None  # None if the server keeps no files
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
            raise RefusedError(503, "the engine has failed; its log says why", kind="server_error")

    def require_room(self, num_prompts: int, sampling: SamplingParams) -> None:
        """Raises ValueError for more samples than the engine could ever hold; fewer may have to wait for room."""
        config, num_samples = self.llm.engine_config, num_prompts * sampling.num_samples
        if config.max_waiting is None or config.max_num_seqs is None:
            return
        if num_samples > config.num_replicas * config.max_num_seqs + config.max_waiting:
            each = f" of each of {config.num_replicas} replicas" if config.num_replicas > 1 else ""
            raise ValueError(
                f"{num_prompts} prompts of {sampling.num_samples} samples are more than max_num_seqs="
                f"{config.max_num_seqs}{each} and max_waiting={config.max_waiting} have room for; send fewer"
            )

    def require_model(self, name: str | None) -> None:
        """Raises RefusedError 404 for a name that is none of the model's and of no adapter."""
        require_known_model(name, self.all_names, "server")

    @property
    def all_names(self) -> Sequence[str]:
        """The names of the model, and of its adapters."""
        return [*self.names, *self.llm.adapters]

    def answering(self, name: str) -> str:
        """Returns the name in answers for one in requests: an adapter's own, or the first of the model."""
        return self.names[0] if name in self.names else name

    def options(self, request: Request, body: SamplingBody | EmbeddingBody) -> RequestOptions:
        """Returns the options of a request, as far as its client may choose them; its model may be an adapter."""
        client, options = client_of(request), options_of(body)
        if body.model not in self.names:
            options["adapter"] = body.model
        return options if client is None else client.restrict(options)

    def require_success(self, completions: Sequence[Completion]) -> None:
        """Raises RefusedError if a completion ended in an error."""
        for completion in completions:
            if completion.finish_reason != "error":
                continue
            raise ended_in_error(completion.error or "the request has failed")

    def count(self, request: Request, num_tokens: int) -> None:
        """Counts tokens towards the limit of the request's client."""
        if (client := client_of(request)) is not None:
            client.count(num_tokens)

    def heading(self, prefix: str, kind: str, name: str) -> Heading:
        """Returns the fields that the pieces of an answer share, for a model's name in a request."""
        model = self.answering(name)
        return Heading(prefix=prefix, object=kind, model=model, system_fingerprint=self.fingerprint)

    @contextlib.contextmanager
    def refusals(self, body: Body) -> Any:
        """Turns the engine's exceptions into refusals with an HTTP status."""
        try:
            yield
        except RefusedError:
            raise
        except (ValueError, QueueFullError) as error:
            message = str(error).removeprefix("prompt 0: ").removeprefix("conversation 0: ")
            wait = self.metrics.seconds_to_room()
            raise refusal_of(error, message, type(body).model_fields, retry_after=wait) from error
        except SlowReaderError as error:
            raise RefusedError(500, str(error), kind="server_error", code="slow_reader") from error
        except NoEmbeddingError as error:
            status = {"deadline": 408, "abort": 503}.get(error.finish_reason, 500)
            raise RefusedError(status, str(error), kind="server_error", code=error.finish_reason) from error
        except RuntimeError as error:
            if self.llm.is_open:
                raise
            raise RefusedError(503, str(error), kind="server_error") from error

    def with_template(self, rendering: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a rendering's arguments with the server's template; ValueError if they may not bring their own."""
        own = rendering.get("chat_template")
        if own is not None and not self.allows_chat_templates:
            raise ValueError(
                "chat_template cannot be honoured: this server takes no templates from requests; leave it out, or start"
                " the server with --allow-chat-templates"
            )
        return {**rendering, "chat_template": own or self.chat_template}

    async def render(
        self, messages: Sequence[Mapping[str, Any]], sampling: SamplingParams | None, rendering: Mapping[str, Any]
    ) -> Chats:
        """Returns a conversation as a prompt with its parameters; ValueError if it cannot be rendered."""
        rendering = self.with_template(rendering)
        require_effort_is_read(self.llm.tokenizer, rendering)
        plain = await asyncio.to_thread(plain_messages, messages)
        return await self.llm.render([plain], sampling, **rendering)

    async def generate(
        self, request: Request, prompts: Sequence[Any], sampling: SamplingParams, options: RequestOptions
    ) -> list[Completion]:
        """Returns the completions of prompts, and counts their tokens as they come."""
        completions = defaultdict[int, list[Completion]](list)
        async with await self.open(request, prompts, sampling, options) as stream:
            async for delta in stream:
                self.count_output(request, sampling, delta)
                if delta.completion is not None:
                    completions[delta.request_id].append(delta.completion)
        return [c for request_id in stream.request_ids for c in in_order(completions[request_id], sampling)]

    async def open(
        self, request: Request, prompts: Sequence[Any], sampling: SamplingParams, options: RequestOptions
    ) -> ObservedStream:
        """Returns the stream of prompts, and counts their tokens."""
        self.require_room(len(prompts), sampling)
        arrival, num_completions = time.monotonic(), len(prompts) * sampling.n
        try:
            stream = await self.llm.open(prompts, sampling, **options)
        except asyncio.CancelledError:
            self.metrics.observe_departure(num_completions)
            raise
        self.count(request, stream.num_prompt_tokens)
        return ObservedStream(stream, self.metrics, arrival, num_completions)

    def count_output(self, request: Request, sampling: SamplingParams, delta: Delta) -> None:
        """Counts the tokens of a delta; with `best_of` only some samples come, and stand for all."""
        self.count(request, len(delta.token_ids) * sampling.num_samples // sampling.n)


def make_app(
    llm: AsyncLLM,
    names: Sequence[str],
    *,
    chat_template: str | None = None,
    allows_chat_templates: bool = False,
    store: FileStore | None = None,
    clients: Sequence[Client] = (),
) -> FastAPI:
    """Returns the application that serves a model under some names; `app.state.server` is shared by its routes.

    `chat_template` takes the place of the checkpoint's. With `allows_chat_templates` requests may bring their own.
    `store` keeps files and batches, and `clients` are the tenants that they may be of.
    """
    app = FastAPI(
        title="jaxinfer",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        responses=REFUSALS,
        openapi_url="/openapi.json",
        redirect_slashes=False,
    )
    state = ServerState(llm=llm, names=names, chat_template=chat_template, allows_chat_templates=allows_chat_templates)
    if store is not None:
        state.batches = Batches(state, store, clients)
    app.state.server = state
    _add_error_handlers(app)
    _add_generation(app, state)
    _add_texts(app, state)
    add_batches(app, state)
    _add_state(app, state)
    add_page(app)
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
        return UNKNOWN_FAILURE.response()


def _add_generation(app: FastAPI, state: ServerState) -> None:
    llm = state.llm

    @app.post("/v1/chat/completions", response_model=answers.ChatAnswer, responses=STREAMED)
    async def chat(body: ChatBody, request: Request) -> Response:
        """Answers a conversation."""
        state.require_open()
        state.require_model(body.model)
        with state.refusals(body):
            sampling = of_chat(body, llm.default_sampling_params, llm.max_model_len)
            chats = await state.render(body.messages, sampling, rendering_of(body))
        assert llm.tokenizer is not None  # which has rendered the conversation
        (prompt,), (sampling,) = chats.prompts, chats.params
        tokenizer, heading = llm.tokenizer, state.heading("chatcmpl", "chat.completion", body.model)
        if body.stream:
            with state.refusals(body):
                stream = await state.open(request, [prompt], sampling, state.options(request, body))
            heading = replace(heading, object="chat.completion.chunk")
            first = [_first_chat_choice(index) for index in range(sampling.n)]
            extra = {"prompt_token_ids": prompt} if body.return_token_ids else {}
            chunks = ChatChunks(body, tokenizer, partial(chats.form.reader, sampling, prompt))
            before = [{"choices": first, **extra}]
            events = _chunks(state, request, body, sampling, heading, stream, [chunks.choice], before)
            return EventStream(events, stream.close)
        with state.refusals(body):
            work = state.generate(request, [prompt], sampling, state.options(request, body))
            completions = await unless_gone(request.receive, work)
        state.require_success(completions)
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
        state.require_open()
        state.require_model(body.model)
        prompts = _prompts(body.prompt)
        with state.refusals(body):
            sampling = of_completion(body, llm.default_sampling_params)
            if body.stream and body.echo:
                raise ValueError("echo=true cannot be streamed; give stream=false, or the prompt yourself")
        heading = state.heading("cmpl", "text_completion", body.model)
        if body.stream:
            with state.refusals(body):
                stream = await state.open(request, prompts, sampling, state.options(request, body))
            choices_of = [CompletionChunks(body, llm.tokenizer, i * sampling.n).choice for i in range(len(prompts))]
            events = _chunks(state, request, body, sampling, heading, stream, choices_of, [])
            return EventStream(events, stream.close)
        with state.refusals(body):
            work = state.generate(request, prompts, sampling, state.options(request, body))
            completions = await unless_gone(request.receive, work)
        state.require_success(completions)
        completions = answers.as_asked(completions, body)
        groups = [completions[i : i + sampling.n] for i in range(0, len(completions), sampling.n)]
        choices = [answers.completion_choice(c, i, body, llm.tokenizer) for i, c in enumerate(completions)]
        return JSONResponse(heading.fields() | {"choices": choices, "usage": usage_of(groups)})


def _add_texts(app: FastAPI, state: ServerState) -> None:
    llm = state.llm

    @app.post("/v1/embeddings", response_model=answers.EmbeddingAnswer)
    async def embed(body: EmbeddingBody, request: Request) -> Response:
        """Returns a vector for each input."""
        state.require_open()
        state.require_model(body.model)
        size = llm.model_config.hidden_size
        with state.refusals(body):
            if body.dimensions not in (None, size):
                raise ValueError(f"dimensions={body.dimensions} cannot be honoured; this model's vectors have {size}")
            state.require_room(len(_prompts(body.input)), ONE_TOKEN)
            options = {"pooling": body.pooling, "normalize": body.normalize, **state.options(request, body)}

            prompt_lens: list[int] = []

            async def work() -> np.ndarray:
                inputs = [await llm.tokenize(p) if isinstance(p, str) else p for p in _prompts(body.input)]
                prompt_lens.extend(map(len, inputs))
                state.count(request, sum(prompt_lens))
                return await llm.embed(inputs, **options)

            with state.metrics.embedding(prompt_lens):
                vectors = await unless_gone(request.receive, work())
        data = [
            {"object": "embedding", "index": index, "embedding": _vector(row, body.encoding_format)}
            for index, row in enumerate(vectors)
        ]
        num_tokens = sum(prompt_lens)
        usage = {"prompt_tokens": num_tokens, "completion_tokens": 0, "total_tokens": num_tokens}
        return JSONResponse({"object": "list", "model": state.answering(body.model), "data": data, "usage": usage})

    @app.post("/tokenize", response_model=answers.Tokens)
    async def tokenize(body: TokenizeBody) -> Response:
        """Returns the token ids of a text or a conversation."""
        state.require_model(body.model)
        with state.refusals(body):
            if body.messages is not None:
                names = ("add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs")
                rendering = {name: getattr(body, name) for name in names}
                (tokens,) = (await state.render(body.messages, None, rendering)).prompts
            else:
                assert body.prompt is not None
                tokens = await llm.tokenize(body.prompt, add_special_tokens=body.add_special_tokens)
        answer: dict[str, Any] = {
            "count": len(tokens),
            "max_model_len": llm.max_model_len,
            "tokens": tokens,
        }
        if body.return_token_strs:
            texts = map(_tokenizer(llm).text_of, tokens)
            answer["token_strs"] = await asyncio.to_thread(list, texts)
        return JSONResponse(answer)

    @app.post("/detokenize", response_model=answers.TokenText)
    async def detokenize(body: DetokenizeBody) -> Response:
        """Returns the text of token ids."""
        state.require_model(body.model)
        with state.refusals(body):
            decode = partial(_tokenizer(llm).decode, body.tokens, skip_special_tokens=False)
            return JSONResponse({"prompt": await asyncio.to_thread(decode)})


def _add_state(app: FastAPI, state: ServerState) -> None:
    @app.get("/v1/models", response_model=answers.ModelList)
    async def models() -> Response:
        """Lists the names of the model and of its adapters."""
        return JSONResponse({"object": "list", "data": [_card(state, name) for name in state.all_names]})

    @app.get("/v1/models/{name:path}", response_model=answers.ModelCard)
    async def model(name: str) -> Response:
        """Describes the model or an adapter."""
        state.require_model(name)
        return JSONResponse(_card(state, name))

    @app.head("/health", include_in_schema=False)
    @app.get("/health", response_model=answers.Health)
    async def health() -> Response:
        """Answers as long as the engine has not failed."""
        if state.llm.failure is not None:
            state.require_open()
        return JSONResponse({"status": "healthy"})

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready", response_model=answers.Health)
    async def ready() -> Response:
        """Answers as long as new requests are taken."""
        state.require_open()
        return JSONResponse({"status": "ready"})

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Returns the metrics in the text format of Prometheus."""
        text, media_type = state.metrics.text()
        return Response(text, media_type=media_type)


async def _chunks(
    state: ServerState,
    request: Request,
    body: SamplingBody,
    sampling: SamplingParams,
    heading: Heading,
    stream: ObservedStream,
    choices_of: Sequence[Callable[[Delta], dict[str, Any] | None]],
    before: Sequence[dict[str, Any]],
) -> AsyncIterator[bytes]:
    """Yields the events of a stream: what comes `before`, the choices of its deltas, and its usage if asked for."""
    has_usage = body.stream_options is not None and body.stream_options.include_usage
    fields = heading.fields() | ({"usage": None} if has_usage else {})
    place = dict(zip(stream.request_ids, count()))
    completions: list[list[Completion]] = [[] for _ in stream.request_ids]
    for chunk in before:
        yield event(fields | chunk)
    with state.refusals(body):
        async for delta in stream:
            index = place[delta.request_id]
            state.count_output(request, sampling, delta)
            if (completion := delta.completion) is not None:
                completions[index].append(completion)
                state.require_success([completion])
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


def _card(state: ServerState, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "jaxinfer",
        "max_model_len": state.llm.max_model_len,
    }
