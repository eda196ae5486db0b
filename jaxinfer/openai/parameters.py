"""From the body of a request to the engine's `SamplingParams` and `RequestOptions`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxinfer.config import SamplingParams
from jaxinfer.engine.frontend.admission import RequestOptions
from jaxinfer.openai.bodies import ChatBody, CompletionBody, ReadingBody, SamplingBody
from jaxinfer.sampling_params import OFF, TotalLength
from jaxinfer.text.tokenizer import Tokenizer

# Fields with the name, meaning and values that they have in `SamplingParams`.
SAME = (
    *("n", "stop", "temperature", "presence_penalty", "frequency_penalty", "top_k", "min_p", "seed"),
    *("typical_p", "repetition_penalty", "no_repeat_ngram_size", "bad_words", "allowed_token_ids", "min_tokens"),
    *("stop_token_ids", "ignore_eos", "skip_special_tokens", "json_schema", "regex", "choices", "grammar"),
    *("logits_processors", "prompt_log_probs"),
)
EFFORT = "reasoning_effort"  # of OpenAI's API, a variable of some templates
THINKING_SWITCH = "enable_thinking"  # of other templates, which turns reasoning off
ANY_OBJECT = {"type": "object"}
LEAST_TOP_P = 1e-9  # in place of 0: it keeps the most probable token alone
OPTIONS = {"user": "tenant", "priority": "priority", "deadline": "deadline", "cache_salt": "cache_salt"}
MAX_COMPLETION_TOKENS = 16  # of /v1/completions, where neither the request nor the checkpoint states it


def of_completion(body: CompletionBody, defaults: SamplingParams, max_model_len: int) -> SamplingParams:
    """Returns the sampling of a completion; fields that the body leaves out are as in `defaults`.

    With max_tokens=-1 it may take what the prompt leaves of `max_model_len`.

    Raises ValueError with the field, its value and the way out.
    """
    fields = _same(body)
    if body.max_tokens is not None:
        # The engine samples at least one token; the answer leaves it out.
        fields["max_tokens"] = TotalLength(max_model_len) if body.max_tokens == OFF else max(body.max_tokens, 1)
    elif defaults.max_tokens == SamplingParams.max_tokens:
        fields["max_tokens"] = MAX_COMPLETION_TOKENS
    if body.max_tokens == 0 and not body.echo:
        raise ValueError("max_tokens=0 without echo would return nothing; give echo=true, or at least 1")
    if body.best_of is not None and not (body.stream and body.best_of == fields.get("n", defaults.n)):
        if body.stream:
            raise ValueError(f"best_of={body.best_of} cannot be streamed: the best samples are known at the end")
        fields["best_of"] = body.best_of
    if body.logprobs is not None:
        fields["log_probs"] = body.logprobs
        if body.echo and body.prompt_log_probs is None:
            fields["prompt_log_probs"] = body.logprobs
    return replace(defaults, **fields)


def of_chat(body: ChatBody, defaults: SamplingParams, max_model_len: int) -> SamplingParams:
    """Returns the sampling of an answer, which may take what the prompt leaves of `max_model_len` if nothing else says.

    Raises ValueError with the field, its value and the way out.
    """
    fields = _same(body)
    limit = body.max_completion_tokens or body.max_tokens
    if limit is not None and limit != OFF:
        fields["max_tokens"] = limit
    elif limit == OFF or defaults.max_tokens == SamplingParams.max_tokens:
        fields["max_tokens"] = TotalLength(max_model_len)
    if body.top_logprobs:
        fields["log_probs"] = body.top_logprobs
    if body.thinking_token_budget is not None:
        fields["thinking_token_budget"] = body.thinking_token_budget
    if (form := body.response_format) is not None and form.type != "text":
        if "json_schema" in fields:
            raise ValueError("response_format and json_schema are both given; an output can have one structure")
        fields["json_schema"] = ANY_OBJECT if form.json_schema is None else form.json_schema.schema_
    return replace(defaults, **fields)


def options_of(body: SamplingBody | ReadingBody) -> RequestOptions:
    """Returns the scheduling and caching options of a request."""
    options: Any = {ours: value for theirs, ours in OPTIONS.items() if (value := getattr(body, theirs)) is not None}
    if isinstance(body, CompletionBody) and body.prediction is not None:
        options["prediction"] = body.prediction
    if isinstance(body, ChatBody) and body.prediction is not None:
        content = body.prediction.content
        options["prediction"] = content if isinstance(content, str) else "".join(part.text for part in content)
    return options


def rendering_of(body: ChatBody) -> dict[str, Any]:
    """Returns the arguments of `AsyncLLM.render` beside the messages and their sampling."""
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables[EFFORT] = body.reasoning_effort
    return {
        "tools": body.tools or None,
        "tool_choice": body.tool_choice,
        "parallel_tool_calls": body.parallel_tool_calls,
        "answer_style": body.answer_style,
        "documents": body.documents,
        "chat_template": body.chat_template,
        "add_generation_prompt": body.add_generation_prompt,
        "continue_final_message": body.continue_final_message,
        "chat_template_kwargs": variables,
    }


def with_effort(tokenizer: Tokenizer | None, rendering: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a rendering's arguments with a reasoning effort that the template reads.

    The effort "none" becomes `enable_thinking=False` for templates that read this variable instead. Raises ValueError
    for an effort that the template does not read.
    """
    variables = rendering.get("chat_template_kwargs") or {}
    if EFFORT not in variables or tokenizer is None:
        return {**rendering}
    template = tokenizer.chat_templates.choose(rendering.get("chat_template"), bool(rendering.get("tools")))
    if EFFORT in template:
        return {**rendering}
    is_none = variables[EFFORT] == "none" and THINKING_SWITCH in template
    if not is_none or variables.get(THINKING_SWITCH, False) is not False:
        raise ValueError(f"{EFFORT} cannot be honoured: the chat template does not read it; leave it out")
    others = {name: value for name, value in variables.items() if name != EFFORT}
    return {**rendering, "chat_template_kwargs": {**others, THINKING_SWITCH: False}}


def _same(body: SamplingBody) -> dict[str, Any]:
    fields = {name: value for name in SAME if (value := getattr(body, name)) is not None}
    if body.top_p is not None:
        fields["top_p"] = body.top_p or LEAST_TOP_P
    if body.logit_bias is not None:
        fields["logit_bias"] = [(_token_id(key), bias) for key, bias in body.logit_bias.items()]
    return fields


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdecimal()):
        raise ValueError(f"logit_bias has the key {key!r}; give token ids")
    return int(key)
