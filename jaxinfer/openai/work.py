"""One reading of a request and one writing of its answer, for HTTP, streams and lines of batch files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxinfer.config import SamplingParams
from jaxinfer.engine.frontend.admission import Prompt
from jaxinfer.engine.request.completion import Completion
from jaxinfer.openai.answers import as_asked, chat_choice, completion_choice, usage_of
from jaxinfer.openai.bodies import ChatBody, CompletionBody
from jaxinfer.openai.messages import require_messages
from jaxinfer.openai.parameters import of_chat, of_completion, rendering_of
from jaxinfer.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Work:
    """A request as the engine takes it: prompts, or a conversation as arguments of `render_chats`."""

    prompts: Sequence[Prompt] = ()
    chat: Mapping[str, Any] | None = None
    sampling: SamplingParams


def work_of(body: ChatBody | CompletionBody, defaults: SamplingParams, max_model_len: int) -> Work:
    """Returns the work that a body asks for; `defaults` has the sampling parameters that the body leaves out.

    Raises ValueError with the field, its value and the way out.
    """
    if isinstance(body, ChatBody):
        sampling = of_chat(body, defaults, max_model_len)
        require_messages(body.messages)
        chat = {**rendering_of(body), "messages": [body.messages]}
        return Work(chat=chat, sampling=sampling)
    sampling = of_completion(body, defaults, max_model_len)
    return Work(prompts=prompts_of(body.prompt), sampling=sampling)


def prompts_of(given: Any) -> list[Any]:
    """Returns one prompt or several, text or token ids, as a list of prompts."""
    is_one = isinstance(given, str) or isinstance(given[0], int)
    return [given] if is_one else list(given)


def answer_of(
    body: ChatBody | CompletionBody,
    heading: Mapping[str, Any],
    completions: Sequence[Completion],
    num_samples: int,
    tokenizer: Tokenizer | None,
) -> dict[str, Any]:
    """Returns the answer to a body: its heading, choices and usage; each prompt has `num_samples` completions.

    `choices` is an iterator, so that a large answer is not there as a whole.
    """
    if isinstance(body, ChatBody):
        assert tokenizer is not None  # which has rendered the conversation
        choices = (chat_choice(c, i, body, tokenizer) for i, c in enumerate(completions))
    else:
        completions = as_asked(completions, body)
        choices = (completion_choice(c, i, body, tokenizer) for i, c in enumerate(completions))
    groups = [completions[i : i + num_samples] for i in range(0, len(completions), num_samples)]
    answer = {**heading, "choices": choices, "usage": usage_of(groups)}
    if isinstance(body, ChatBody) and body.return_token_ids:
        answer["prompt_token_ids"] = list(completions[0].prompt_token_ids)
    return answer
