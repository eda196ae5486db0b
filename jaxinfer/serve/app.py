"""The routes of OpenAI's API, and a few of the server's own, as an ASGI application."""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException

from jaxinfer._version import __version__
from jaxinfer.config import SamplingParams
from jaxinfer.engine.async_llm import AsyncLLM
from jaxinfer.engine.frontend.admission import ONE_TOKEN
from jaxinfer.engine.frontend.embeddings import Reading, StateReader
from jaxinfer.engine.frontend.sample_group import CompletionCollector
from jaxinfer.engine.request.completion import Completion, Delta
from jaxinfer.openai import answers
from jaxinfer.openai.answers import ChatChunks, CompletionChunks, Heading, usage_of, usage_so_far
from jaxinfer.openai.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    ReadingBody,
    SamplingBody,
    StreamOptions,
    TokenizeBody,
)
from jaxinfer.openai.errors import (
    UNKNOWN_FAILURE,
    ErrorBody,
    RefusedError,
    refused_body,
    unknown_route,
)
from jaxinfer.openai.messages import require_messages
from jaxinfer.openai.scores import (
    ClassifyAnswer,
    ClassifyBody,
    RerankAnswer,
    RerankBody,
    ScoreAnswer,
    ScoreBody,
    ScoringBody,
    labelled,
    ranked,
    scored,
    usage_of_prompts,
)
from jaxinfer.openai.work import answer_of, prompts_of, work_of
from jaxinfer.serve.access import Client, client_of, tenant_of
from jaxinfer.serve.batches.batches import Batches
from jaxinfer.serve.batches.file_store import FileStore
from jaxinfer.serve.batches.routes import add_batches
from jaxinfer.serve.bodies import BodyRoute, heavy_threads
from jaxinfer.serve.logs import TokenCount
from jaxinfer.serve.metrics import ObservedStream
from jaxinfer.serve.page_routes import add_page_routes
from jaxinfer.serve.refusals import refusal_response
from jaxinfer.serve.state import ServerState
from jaxinfer.serve.static_page import add_page
from jaxinfer.serve.streams import DONE, ClientGoneError, EventStream, event, unless_gone
from jaxinfer.serve.written import written

logger = logging.getLogger(__name__)

REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 403, 404, 405, 408, 413, 429, 500, 503)
}
STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
HUNG_SECONDS = 600.0  # of one step; the longest ones wait for a compiler
GONE_STATUS = 499  # the status that proxies log for a client that went away


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
    batches = None if store is None else Batches(state, store, clients)
    app.state.server, app.state.batches, app.state.heavy_threads = state, batches, heavy_threads()
    app.router.route_class = BodyRoute
    _add_error_handlers(app)
    _add_generation(app, state)
    _add_readings(app, state)
    _add_texts(app, state)
    add_batches(app, state, batches)
    _add_state(app, state)
    add_page_routes(app, state)
    add_page(app)
    return app


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(RefusedError)
    async def refused(_: Request, error: RefusedError) -> Response:
        return refusal_response(error)

    @app.exception_handler(RequestValidationError)
    async def unfit(_: Request, error: RequestValidationError) -> Response:
        return refusal_response(refused_body(list(error.errors())))

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        refused = unknown_route(request.method, request.url.path, str(error.detail), error.status_code)
        response = refusal_response(refused)
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(ClientGoneError)
    async def gone(_: Request, error: ClientGoneError) -> Response:
        return Response(status_code=GONE_STATUS)

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> Response:
        return refusal_response(UNKNOWN_FAILURE)


def _add_generation(app: FastAPI, state: ServerState) -> None:
    llm = state.llm

    @app.post("/v1/chat/completions", response_model=answers.ChatAnswer, responses=STREAMED)
    async def chat(body: ChatBody, request: Request) -> Response:
        """Answers a conversation."""
        state.require_open()
        state.require_model(body.model)
        with state.refusals(body):
            work = await asyncio.to_thread(work_of, body, llm.default_sampling_params, llm.max_model_len)
            assert work.chat is not None
            options = state.options(request, body)
            chats = await state.render(work.chat, work.sampling, tenant=options.get("tenant", ""))
        assert llm.tokenizer is not None  # which has rendered the conversation
        (prompt,), (sampling,) = chats.prompts, chats.params
        tokenizer, heading = llm.tokenizer, state.heading("chatcmpl", "chat.completion", body.model)
        if body.stream:
            with state.refusals(body):
                stream = await state.open(request, [prompt], sampling, options)
            heading = replace(heading, object="chat.completion.chunk")
            first = [_first_chat_choice(index) for index in range(sampling.n)]
            extra = {"prompt_token_ids": prompt} if body.return_token_ids else {}
            chunks = ChatChunks(body, tokenizer, partial(chats.form.reader, sampling, prompt))
            before = [{"choices": first, **extra}]
            events = _chunks(state, request, body, sampling, heading, stream, [chunks.choice], before)
            return EventStream(events, stream.close)
        with state.refusals(body):
            output = state.generate(request, [prompt], sampling, options)
            completions = await unless_gone(request.receive, output)
        state.require_success(completions)

        def answer() -> dict[str, Any]:
            return answer_of(body, heading.fields(), chats.answered(completions), sampling.n, tokenizer)

        return await written(request, answer, _num_values(completions, sampling))

    @app.post("/v1/completions", response_model=answers.CompletionAnswer, responses=STREAMED)
    async def complete(body: CompletionBody, request: Request) -> Response:
        """Completes one prompt or several."""
        state.require_open()
        state.require_model(body.model)
        with state.refusals(body):
            work = await asyncio.to_thread(work_of, body, llm.default_sampling_params, llm.max_model_len)
            prompts, sampling = work.prompts, work.sampling
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
            output = state.generate(request, prompts, sampling, state.options(request, body))
            completions = await unless_gone(request.receive, output)
        state.require_success(completions)
        make = partial(answer_of, body, heading.fields(), completions, sampling.n, llm.tokenizer)
        return await written(request, make, _num_values(completions, sampling))


def _add_readings(app: FastAPI, state: ServerState) -> None:
    llm = state.llm

    async def read(
        body: ReadingBody, request: Request, num_prompts: int, prepare: Callable[[StateReader], Reading]
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Returns what is read from the states of texts, and the fields that answers share."""
        state.require_room(num_prompts, ONE_TOKEN)
        prompt_lens: list[int] = []

        def count(lens: list[int]) -> None:
            prompt_lens.extend(lens)
            request.state.tokens = TokenCount(sum(lens), time.monotonic())
            state.count(request, sum(lens))

        with state.metrics.embedding(prompt_lens):
            result = await unless_gone(request.receive, llm.read(prepare, count, **state.options(request, body)))
        return result, {"model": state.answering(body.model), "usage": usage_of_prompts(sum(prompt_lens))}

    async def scores(
        body: ScoringBody, request: Request, queries: Any, documents: list[str]
    ) -> tuple[np.ndarray, dict[str, Any]]:
        state.require_open()
        state.require_model(body.model)
        with state.refusals(body):
            template = state.with_template({"chat_template": body.chat_template})["chat_template"]
            given: dict[str, Any] = {**body.options(), "chat_template": template}
            prepare = partial(StateReader.scoring, queries=queries, documents=documents, **given)
            return await read(body, request, len(documents), prepare)

    @app.post("/v1/embeddings", response_model=answers.EmbeddingAnswer)
    async def embed(body: EmbeddingBody, request: Request) -> Response:
        """Returns a vector for each input."""
        state.require_open()
        state.require_model(body.model)
        with state.refusals(body):
            prompts = prompts_of(body.input)

            def prepare(reader: StateReader) -> Reading:
                size = llm.model_config.hidden_size if body.pooling else reader.vector_size
                if body.dimensions not in (None, size):
                    raise ValueError(
                        f"dimensions={body.dimensions} cannot be honoured; this model's vectors have {size}"
                    )
                return reader.embedding(prompts, body.pooling, body.normalize)

            vectors, fields = await read(body, request, len(prompts), prepare)
        data = (
            {"object": "embedding", "index": index, "embedding": _vector(row, body.encoding_format)}
            for index, row in enumerate(vectors)
        )
        answer = {"object": "list", **fields, "data": data}
        return await written(request, lambda: answer, vectors.size)

    @app.post("/v1/classify", response_model=ClassifyAnswer, include_in_schema=False)
    @app.post("/classify", response_model=ClassifyAnswer)
    async def classify(body: ClassifyBody, request: Request) -> Response:
        """Returns the labels of each input."""
        state.require_open()
        state.require_model(body.model)
        with state.refusals(body):
            prompts = prompts_of(body.input)
            prepare = partial(StateReader.classification, prompts=prompts, activate=body.activate)
            numbers, fields = await read(body, request, len(prompts), prepare)
        answer = {"object": "list", **fields}
        return await written(request, lambda: {**answer, "data": labelled(numbers, llm.labels)}, numbers.size)

    @app.post("/v1/score", response_model=ScoreAnswer, include_in_schema=False)
    @app.post("/score", response_model=ScoreAnswer)
    async def score(body: ScoreBody, request: Request) -> Response:
        """Returns the score of each pair of texts."""
        found, fields = await scores(body, request, body.text_1, body.documents)
        return await written(request, lambda: {"object": "list", **fields, "data": scored(found)}, found.size)

    @app.post("/v2/rerank", response_model=RerankAnswer, include_in_schema=False)
    @app.post("/v1/rerank", response_model=RerankAnswer, include_in_schema=False)
    @app.post("/rerank", response_model=RerankAnswer)
    async def rerank(body: RerankBody, request: Request) -> Response:
        """Returns documents in the order in which they answer a query."""
        found, fields = await scores(body, request, body.query, body.documents)
        return await written(request, lambda: {**fields, "results": ranked(found, body)}, found.size)


def _add_texts(app: FastAPI, state: ServerState) -> None:
    llm = state.llm

    @app.post("/tokenize", response_model=answers.Tokens)
    async def tokenize(body: TokenizeBody, request: Request) -> Response:
        """Returns the token ids of a text or a conversation."""
        state.require_model(body.model)
        tenant = tenant_of(request) or ""
        with state.refusals(body):
            if body.messages is not None:
                names = ("add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs")
                chat = {name: getattr(body, name) for name in (*names, "documents")}
                # The template shows the tools, and no structure need be compiled for calls.
                chat |= {"messages": [body.messages], "tools": body.tools or None, "tool_choice": "none"}
                require_messages(body.messages)
                (tokens,) = (await state.render(chat, None, tenant=tenant)).prompts
            else:
                assert body.prompt is not None
                special = body.add_special_tokens
                tokens = await llm.tokenize(body.prompt, add_special_tokens=special, tenant=tenant)

        def answer() -> dict[str, Any]:
            fields = {"count": len(tokens), "max_model_len": llm.max_model_len, "tokens": list(tokens)}
            texts = {"token_strs": list(map(_tokenizer(llm).text_of, tokens))} if body.return_token_strs else {}
            return fields | texts

        return await written(request, answer, len(tokens))

    @app.post("/detokenize", response_model=answers.TokenText)
    async def detokenize(body: DetokenizeBody, request: Request) -> Response:
        """Returns the text of token ids."""
        state.require_model(body.model)
        with state.refusals(body):
            decode = partial(_tokenizer(llm).decode, skip_special_tokens=False)
            return await written(request, lambda: {"prompt": decode(body.tokens)}, len(body.tokens))


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
        """Answers as long as the engine has not failed, and its device has not hung."""
        if state.llm.failure is not None:
            state.require_open()
        if (seconds := state.llm.engine_thread.step_seconds) > HUNG_SECONDS:
            message = f"the engine's step has taken {seconds:.0f} seconds so far; restart the server"
            raise RefusedError(503, message, kind="server_error", code="hung")
        return JSONResponse({"status": "healthy"})

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready", response_model=answers.Health)
    async def ready() -> Response:
        """Answers as long as new requests are taken."""
        state.require_open()
        return JSONResponse({"status": "ready"})

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics(request: Request) -> Response:
        """Returns the metrics in the text format of Prometheus."""
        client = client_of(request)
        if client is not None and not client.reads_metrics:
            message = 'this key reads no metrics, which tell of other tenants; write "metrics": true into its line'
            raise RefusedError(403, message, kind="permission_error", code="metrics_not_allowed")
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
    options = body.stream_options or StreamOptions()
    fields = heading.fields() | ({"usage": None} if options.include_usage else {})
    collector = CompletionCollector(dict.fromkeys(stream.request_ids, sampling))

    def chunk(choice: dict[str, Any]) -> bytes:
        is_counted = options.continuous_usage_stats
        usage = {"usage": usage_so_far(stream.num_prompt_tokens, collector.num_tokens)} if is_counted else {}
        return event(fields | choice | usage)

    choice_of = dict(zip(stream.request_ids, choices_of, strict=True))
    for first in before:
        yield chunk(first)
    with state.refusals(body):
        async for delta in stream:
            collector.add(delta)
            state.count_output(request, sampling, delta)
            if delta.completion is not None:
                state.require_success([delta.completion])
            if (choice := choice_of[delta.request_id](delta)) is not None:
                yield chunk({"choices": [choice]})
    if options.include_usage:
        yield event(fields | {"choices": [], "usage": usage_of(collector.by_request.values())})
    yield DONE


def _num_values(completions: Sequence[Completion], sampling: SamplingParams) -> int:
    """Returns the number of token ids and log-probabilities that an answer has at most."""
    num_tokens = sum(len(c.prompt_token_ids) * (sampling.prompt_log_probs is not None) for c in completions)
    num_tokens += sum(len(c.token_ids) for c in completions)
    return num_tokens * (1 + max(sampling.log_probs or 0, sampling.prompt_log_probs or 0))


def _first_chat_choice(index: int) -> dict[str, Any]:
    return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}


def _vector(row: np.ndarray, encoding: str) -> list[float] | str:
    return row.tolist() if encoding == "float" else base64.b64encode(row.astype("<f4").tobytes()).decode()


def _tokenizer(llm: AsyncLLM) -> Any:
    if llm.tokenizer is None:
        raise ValueError("this checkpoint has no tokenizer; give token ids, or put its tokenizer.json into its folder")
    return llm.tokenizer


def _card(state: ServerState, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "jaxinfer",
        "max_model_len": state.llm.max_model_len,
    }
