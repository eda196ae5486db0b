"""A body becomes the parameters that it means, in the words of the servers that clients were written for."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types import chat, completion_create_params
from pydantic import ValidationError

from jaxinfer.openai.bodies import ChatBody, CompletionBody, StreamOptions, TokenizeBody
from jaxinfer.openai.errors import refused_body
from jaxinfer.openai.parameters import rendering_of
from jaxinfer.openai.work import work_of
from jaxinfer.sampling_params import SamplingParams, TotalLength

LONGEST = 96
DEFAULTS = SamplingParams(temperature=0.6, top_k=20, top_p=0.9)  # as a checkpoint may state them


def body_of(fields: dict[str, Any], *, is_chat: bool) -> Any:
    own = {"messages": [{"role": "user", "content": "Hi"}]} if is_chat else {"prompt": "Hi"}
    content = json.dumps({"model": "m", **own, **fields})
    return (ChatBody if is_chat else CompletionBody).model_validate(json.loads(content))


def sampling_of(fields: dict[str, Any], *, is_chat: bool) -> SamplingParams:
    return work_of(body_of(fields, is_chat=is_chat), DEFAULTS, LONGEST).sampling


BOTH = pytest.mark.parametrize("is_chat", [True, False], ids=["chat", "completion"])


@BOTH
@pytest.mark.parametrize(
    "fields",
    [
        {"metadata": {"user_id": "u", "session": "s"}},
        {"safety_identifier": "u"},
        {"prompt_cache_key": "k", "prompt_cache_retention": "24h"},
        {"service_tier": "auto"},
        {"user": "ann"},
        {"logit_bias": {}},
        {"seed": -1},
        {"seed": None, "top_k": None},
    ],
)
def test_a_field_that_changes_no_token_changes_no_parameter(is_chat, fields):
    assert sampling_of(fields, is_chat=is_chat) == sampling_of({}, is_chat=is_chat)


@BOTH
@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({"top_k": -1}, "top_k", 0),
        ({"top_k": 0}, "top_k", 0),
        ({"max_tokens": -1}, "max_tokens", TotalLength(LONGEST)),
        ({"max_tokens": 4.0}, "max_tokens", 4),
        ({"seed": 1.0}, "seed", 1),
        ({"n": 2.0, "top_k": 5.0}, "n", 2),
        ({"min_tokens": 3.0}, "min_tokens", 3),
        ({"top_p": 1}, "top_p", 1.0),
    ],
)
def test_a_value_of_other_servers_has_its_meaning_there(is_chat, fields, name, value):
    assert getattr(sampling_of(fields, is_chat=is_chat), name) == value


def test_a_budget_of_thinking_may_be_a_whole_number_with_a_point():
    assert sampling_of({"thinking_token_budget": 4.0}, is_chat=True).thinking_token_budget == 4


@pytest.mark.parametrize(
    ("params", "body"),
    [
        (chat.completion_create_params.CompletionCreateParamsBase, ChatBody),
        (completion_create_params.CompletionCreateParamsBase, CompletionBody),
    ],
)
def test_every_field_of_openais_client_is_honoured_or_refused_for_a_reason(params, body):
    assert params.__annotations__.keys() - body.model_fields.keys() - body.REFUSED.keys() == set()


@BOTH
def test_no_mass_leaves_the_most_probable_token_alone(is_chat):
    assert 0 < sampling_of({"top_p": 0}, is_chat=is_chat).top_p < 1e-6


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 5, "max_completion_tokens": 5},
        {"top_logprobs": 0},
        {"top_logprobs": 0, "logprobs": False},
        {"tools": []},
        {"functions": [], "function_call": "auto"},
        {"store": False, "modalities": ["text"], "verbosity": "medium"},
        {"max_completion_tokens": -1},
    ],
)
def test_a_chat_that_asks_for_nothing_more_is_a_plain_one(fields):
    expected = {name: value for name, value in fields.items() if name == "max_tokens"}

    assert sampling_of(fields, is_chat=True) == sampling_of(expected, is_chat=True)
    assert rendering_of(body_of(fields, is_chat=True)) == rendering_of(body_of({}, is_chat=True))


def test_the_best_of_all_samples_may_be_streamed():
    for fields in ({"best_of": 1}, {"best_of": 3, "n": 3}):
        n = fields.get("n", 1)
        assert sampling_of({"stream": True, **fields}, is_chat=False) == sampling_of({"n": n}, is_chat=False)
    with pytest.raises(ValueError, match="best_of=3 cannot be streamed"):
        sampling_of({"stream": True, "best_of": 3, "n": 2}, is_chat=False)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 5, "max_completion_tokens": 6}, "both given, and differ"),
        ({"max_tokens": 0}, "max_tokens=0 leaves no answer"),
        ({"max_completion_tokens": -2}, "greater than or equal to -1"),
        ({"top_logprobs": 2}, "top_logprobs needs logprobs=true"),
        ({"max_tokens": 4.5}, "valid integer"),
        ({"store": True}, "store cannot be honoured: the server stores nothing"),
        ({"verbosity": "low"}, "verbosity cannot be honoured"),
        ({"functions": [{"name": "f"}]}, "functions cannot be honoured: it is the older name of `tools`"),
        ({"service_tier": "flex"}, "service_tier cannot be honoured"),
        ({"prompt_cache_retention": "1h"}, "prompt_cache_retention"),
        ({"stream": True, "stream_options": {"include_usages": True}}, "include_usages: this field is unknown"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "schema: this field is unknown"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schemas": {}}}}, "schemas: this"),
    ],
)
def test_a_chat_that_cannot_be_honoured_is_refused_by_name(fields, message):
    with pytest.raises((ValidationError, ValueError)) as refused:
        sampling_of(fields, is_chat=True)

    error = refused.value
    text = str(refused_body(list(error.errors()))) if isinstance(error, ValidationError) else str(error)
    assert message in text


@pytest.mark.parametrize("value", [1e300, 1e308, -1.0])
def test_a_whole_number_may_have_any_size(value):
    with pytest.raises((ValidationError, ValueError)):
        sampling_of({"min_tokens": value}, is_chat=True)


def test_usage_may_be_asked_for_in_each_chunk():
    options = StreamOptions.model_validate({"include_usage": True, "continuous_usage_stats": True})

    assert options.continuous_usage_stats


def test_tools_are_tokenized_with_messages_alone():
    tools = [{"type": "function", "function": {"name": "f"}}]

    assert TokenizeBody.model_validate({"messages": [{"role": "user", "content": "a"}], "tools": tools}).tools == tools
    with pytest.raises(ValidationError, match="tools and documents belong to messages"):
        TokenizeBody.model_validate({"prompt": "a", "tools": tools})
