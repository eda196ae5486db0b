"""Conversations: from messages to prompts and parameters, and from completions to answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict

from jaxinfer.engine.frontend.admission import Conversation, RequestOptions, as_params, render
from jaxinfer.engine.request.completion import Completion
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.text.answers.answers import AnswerForm, Answers
from jaxinfer.text.answers.tools import read_choice
from jaxinfer.text.chat_template import json_objects
from jaxinfer.validation import as_plain


class Rendering(TypedDict, total=False):
    """Arguments of `LLM.chat` that make a prompt of a conversation and give its answer a form."""

    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool
    documents: Sequence[Mapping[str, Any]] | None
    chat_template: str | None
    answer_style: str | None
    add_generation_prompt: bool | None
    continue_final_message: bool
    chat_template_kwargs: Mapping[str, Any] | None


class ChatOptions(Rendering, RequestOptions, total=False):
    """All arguments of `LLM.chat` by name, but its progress."""


@dataclass(frozen=True)
class Chats:
    """Conversations as requests: one prompt each, with the parameters of its answer."""

    prompts: list[list[int]]
    params: list[SamplingParams]
    form: AnswerForm

    def answered(self, completions: Sequence[Completion]) -> list[Completion]:
        """Returns the completions of the prompts, in their order, with content, reasoning and tool calls."""
        params_of_each = (params for params in self.params for _ in range(params.n))
        return [
            replace(one, **vars(self.form.read(one.token_ids, params, one.prompt_token_ids)))
            for one, params in zip(completions, params_of_each, strict=True)
        ]


def render_chats(
    answers: Answers | None,
    default_params: SamplingParams,
    messages: Conversation | Sequence[Conversation],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: str | Mapping[str, Any] | None = None,
    parallel_tool_calls: bool = True,
    documents: Sequence[Mapping[str, Any]] | None = None,
    chat_template: str | None = None,
    answer_style: str | None = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Chats:
    """Returns the requests of one conversation or several; the arguments are those of `LLM.chat`.

    `default_params` are the parameters of a conversation that has none. Raises ValueError as `LLM.chat` does.
    """
    tools = None if tools is None else json_objects("tools", tools)
    if answers is None:
        raise ValueError("messages need a tokenizer, which this checkpoint does not have; give token ids to generate")
    if tools and answer_style is None:
        _require_shown(answers, tools, tool_choice, chat_template)
    prompts = render(
        answers.tokenizer,
        messages,
        check_text=answers.check_text,
        tools=tools,
        documents=documents,
        chat_template=chat_template,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        variables=chat_template_kwargs,
    )
    form = answers.form(
        tools,
        tool_choice,
        parallel_tool_calls,
        chat_template=chat_template,
        style=answer_style,
        continues=bool(continue_final_message),
    )
    given = [default_params if one is None else one for one in as_params(sampling_params, len(prompts))]
    params = [form.sampling_params(one, prompt) for one, prompt in zip(given, prompts, strict=True)]
    return Chats(prompts, params, form)


def _require_shown(answers: Answers, tools: Sequence[Any], tool_choice: Any, chat_template: str | None) -> None:
    """Raises ValueError if the model may call tools that its template does not show: it could not know of them.

    A demand for calls is another matter: then a structure writes them, or the form of the answer is refused.
    """
    if read_choice(tool_choice).word == "auto":
        templates = answers.tokenizer.chat_templates
        template = templates.choose(as_plain("chat_template", chat_template), has_tools=True)
        if "tools" not in templates.facts(template).variables:
            raise ValueError(
                f"tools cannot be honoured: the chat template does not show the model these {len(tools)}; leave them"
                ' out, demand a call by tool_choice="required", or describe the tools in a message and give'
                " answer_style=..., the style of calls"
            )
