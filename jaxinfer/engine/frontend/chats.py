"""Conversations: from messages to prompts and parameters, and from completions to answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict

from jaxinfer.engine.frontend.admission import RequestOptions, as_params, refusals_of, require_value
from jaxinfer.engine.request.completion import Completion
from jaxinfer.plain_values import plain, plain_mapping
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.text.answers.answers import AnswerForm, Answers
from jaxinfer.text.answers.tools import read_choice
from jaxinfer.text.chat_template import json_objects
from jaxinfer.validation import as_bool, as_plain, as_tuple, require

Conversation = Sequence[Mapping[str, Any]]  # messages


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


def as_conversations(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    """Returns one conversation or several as a list of conversations."""

    def plain_item(value: Any) -> Any:
        """Returns a row of a table of messages as a message; another column may be a conversation."""
        row = plain_mapping(value)
        return row if isinstance(row, Mapping) and "role" in row else plain(value)

    items: Any = as_tuple("messages", messages, "a list of messages, or several of these", plain_item)
    return [items] if all(isinstance(item, Mapping) for item in items) else list(items)


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
    prompts = _render(
        answers,
        messages,
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


def _render(
    answers: Answers,
    messages: Conversation | Sequence[Conversation],
    *,
    variables: Mapping[str, Any] | None,
    add_generation_prompt: bool | None,
    continue_final_message: bool,
    **arguments: Any,
) -> list[list[int]]:
    """Returns the token ids of each conversation by the chat template, which reads `variables`.

    With add_generation_prompt=None the template begins an answer, unless it continues the final message. The other
    arguments are those of `Tokenizer.render_chat`. Raises ValueError if a conversation cannot be rendered.
    """
    variables = as_plain("chat_template_kwargs", variables, plain_mapping)
    is_mapping = variables is None or (isinstance(variables, Mapping) and all(isinstance(n, str) for n in variables))
    require(is_mapping, "chat_template_kwargs", variables, "a mapping from the names of variables to values")
    continues = as_bool("continue_final_message", continue_final_message)
    begins = not continues if add_generation_prompt is None else add_generation_prompt
    arguments |= {"continue_final_message": continues, "add_generation_prompt": begins}
    prompts: list[list[int]] = []
    for i, conversation in enumerate(as_conversations(messages)):
        with refusals_of(f"conversation {i}"):
            require_value("messages", conversation)
            text = answers.tokenizer.render_chat(conversation, variables=variables, **arguments)
            answers.check_text("its text", text)
            prompts.append(answers.tokenizer.encode(text, add_special_tokens=False))
    return prompts


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
