"""The state that all routes share, and the steps that they have in common."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from fastapi import Request

from jaxinfer.config import SamplingParams
from jaxinfer.engine.async_llm import AsyncLLM, SlowReaderError
from jaxinfer.engine.frontend.admission import RequestOptions
from jaxinfer.engine.frontend.chats import Chats
from jaxinfer.engine.frontend.embeddings import NoEmbeddingError
from jaxinfer.engine.frontend.sample_group import CompletionCollector
from jaxinfer.engine.request.completion import Completion, Delta
from jaxinfer.engine.request.request import QueueFullError
from jaxinfer.openai.answers import Heading
from jaxinfer.openai.bodies import Body, ReadingBody, SamplingBody
from jaxinfer.openai.errors import RefusedError, ended_in_error, refusal_of, require_known_model
from jaxinfer.openai.parameters import options_of, with_effort
from jaxinfer.serve.access import client_of
from jaxinfer.serve.logs import TokenCount
from jaxinfer.serve.metrics import ObservedStream, ServerMetrics
from jaxinfer.text.limited_process import BusyError


@dataclass(kw_only=True)
class ServerState:
    """The state that all routes share: the engine, the names of its model, and if new requests are taken."""

    llm: AsyncLLM
    names: Sequence[str]  # of the model; answers have the first
    chat_template: str | None = None  # in place of the checkpoint's
    allows_chat_templates: bool = False  # of requests
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

    def options(self, request: Request, body: SamplingBody | ReadingBody) -> RequestOptions:
        """Returns the options of a request, as far as its client may choose them; its model may be an adapter."""
        client, options = client_of(request), options_of(body)
        if body.model not in self.names:
            options["adapter"] = body.model
        return options if client is None else client.restrict(options)

    def require_success(self, completions: Sequence[Completion]) -> None:
        """Raises RefusedError if a completion ended in an error."""
        for completion in completions:
            if completion.finish_reason == "error":
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
        except BusyError as error:
            raise RefusedError(503, str(error), kind="server_error", code="busy", retry_after=1.0) from error
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

    async def render(self, chat: Mapping[str, Any], sampling: SamplingParams | None, *, tenant: str = "") -> Chats:
        """Returns a conversation as a prompt with its parameters; `chat` has the arguments of `render_chats`.

        Conversations of tenants are rendered in turns. Raises ValueError if it cannot be rendered.
        """
        chat = with_effort(self.llm.tokenizer, self.with_template(chat))
        messages = chat.pop("messages")
        return await self.llm.render(messages, sampling, tenant=tenant, **chat)

    async def generate(
        self, request: Request, prompts: Sequence[Any], sampling: SamplingParams, options: RequestOptions
    ) -> list[Completion]:
        """Returns the completions of prompts, and counts their tokens as they come."""
        async with await self.open(request, prompts, sampling, options) as stream:
            collector = CompletionCollector(dict.fromkeys(stream.request_ids, sampling))
            async for delta in stream:
                self.count_output(request, sampling, delta)
                collector.add(delta)
        return collector.completions()

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
        request.state.tokens = TokenCount(stream.num_prompt_tokens, arrival)
        return ObservedStream(stream, self.metrics, arrival, num_completions)

    def count_output(self, request: Request, sampling: SamplingParams, delta: Delta) -> None:
        """Counts the tokens of a delta; with `best_of` only some samples come, and stand for all."""
        num_output = len(delta.token_ids) * sampling.num_samples // sampling.n
        request.state.tokens.add(num_output)
        self.count(request, num_output)
