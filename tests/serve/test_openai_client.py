"""OpenAI's own client over a real socket gets the results of `LLM` on the same seeds."""

from __future__ import annotations

import base64
import json
from itertools import chain
from typing import Any

import httpx
import jsonschema
import numpy as np
import openai
import pytest

from jaxinfer.config import SamplingParams
from jaxinfer.openai import answers, reading
from jaxinfer.openai.errors import refused_body
from tests.engine.engines import small_async_engine
from tests.serve.servers import NAME, TEMPLATE, serving

pytestmark = pytest.mark.usefixtures("stays_idle")

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
SHORT = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
# Fields that OpenAI's client has under the names of `SamplingParams`; it sends the others as they are.
OWN = {"temperature", "max_tokens", "n", "best_of", "seed", "stop", "top_p", "presence_penalty", "frequency_penalty"}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seed": {"temperature": 1.2, "seed": 3},
    "n": {"temperature": 1.5, "seed": 4, "n": 3},
    "best_of": {"temperature": 1.5, "seed": 5, "n": 2, "best_of": 3},
    "top_p": {"temperature": 1.5, "seed": 6, "top_p": 0.5},
    "top_k": {"temperature": 1.5, "seed": 6, "top_k": 4},
    "min_p": {"temperature": 1.5, "seed": 6, "min_p": 0.2},
    "typical_p": {"temperature": 1.5, "seed": 6, "typical_p": 0.5},
    "presence_penalty": {"presence_penalty": 2.0},
    "frequency_penalty": {"frequency_penalty": 1.5},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "bad_words": {"bad_words": [[5], [6, 7]]},
    "allowed_token_ids": {"allowed_token_ids": [5, 6, 7]},
    "stop": {"temperature": 1.5, "seed": 7, "max_tokens": 40, "stop": ["a", "e", "Q"]},
    "stop_token_ids": {"temperature": 1.5, "seed": 7, "max_tokens": 40, "stop_token_ids": [*range(10, 40)]},
    "min_tokens": {"min_tokens": 4, "ignore_eos": False, "max_tokens": 12},
    "skip_special_tokens": {"skip_special_tokens": False, "logit_bias": {0: 100.0}},
    "logit_bias": {"logit_bias": {9: 50.0}},
    "json_schema": {"json_schema": SCHEMA, "ignore_eos": False, "max_tokens": 40},
    "regex": {"regex": "[a-c]{3,6}", "ignore_eos": False},
    "choices": {"choices": ["yes", "no"], "ignore_eos": False},
    "grammar": {"grammar": 'start: "a" | "b" start', "ignore_eos": False},
    "logits_processors": {"logits_processors": {"turns": 2.0}},
}


def own_and_extra(fields: dict[str, Any]) -> dict[str, Any]:
    """The arguments of OpenAI's client for fields of `SamplingParams`."""
    own = {name: value for name, value in fields.items() if name in OWN}
    extra = {name: value for name, value in fields.items() if name not in OWN}
    if "logit_bias" in extra:
        own["logit_bias"] = {str(token): bias for token, bias in extra.pop("logit_bias").items()}
    return {**own, "extra_body": {**extra, "return_token_ids": True}}


def joined(chunks: Any, text_of: Any) -> list[dict[str, Any]]:
    """The choices of a stream, joined by index."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            empty = {"text": "", "token_ids": [], "sampling_log_probs": [], "finish_reason": None}
            found = choices.setdefault(choice.index, empty)
            assert found["finish_reason"] is None  # nothing comes after the end
            found["text"] += text_of(choice) or ""
            for name in ("token_ids", "sampling_log_probs"):
                found[name] += getattr(choice, name, None) or []
            found["finish_reason"] = choice.finish_reason
    return [choices[index] for index in sorted(choices)]


def of_completions(completions: Any) -> list[dict[str, Any]]:
    reasons = {"stop": "stop", "length": "length", "exhausted": "stop"}
    return [fields_of(c, c.text) | {"finish_reason": reasons[c.finish_reason]} for c in completions]


def fields_of(found: Any, text: str | None) -> dict[str, Any]:
    """The fields that are compared, of a completion or of a choice."""
    values = getattr(found, "sampling_log_probs", None) or []
    return {
        "text": text,
        "token_ids": list(found.token_ids),
        "sampling_log_probs": list(values),
        "finish_reason": found.finish_reason,
    }


# ---- completions


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_completions(llm, client, case, stream):
    fields = {**SHORT, **CASES[case]}
    if "best_of" in fields and stream:
        pytest.skip("the best samples are known at the end")
    prompts = ["hello", [5, 6, 7]]
    expected = llm.generate(prompts, SamplingParams(**fields), show_progress=False)

    answer = client.completions.create(model=NAME, prompt="hello", stream=stream, **own_and_extra(fields))
    second = client.completions.create(model=NAME, prompt=[5, 6, 7], stream=stream, **own_and_extra(fields))

    found = []
    for each in (answer, second):
        if stream:
            found += joined(each, lambda choice: choice.text)
        else:
            answers.CompletionAnswer.model_validate(each.model_dump(), strict=True)
            found += [fields_of(choice, choice.text) for choice in each.choices]
    assert found == of_completions(expected)


def test_several_prompts_have_choices_in_their_order(llm, client):
    prompts, fields = ["hello", "bye", "x"], {"temperature": 1.5, "seed": 2, "n": 2, "max_tokens": 5}
    expected = of_completions(llm.generate(prompts, SamplingParams(**fields), show_progress=False))

    answer = client.completions.create(model=NAME, prompt=prompts, **own_and_extra(fields))
    stream = client.completions.create(model=NAME, prompt=prompts, stream=True, **own_and_extra(fields))

    assert [choice.text for choice in answer.choices] == [each["text"] for each in expected]
    assert joined(stream, lambda choice: choice.text) == expected
    with_logs = client.completions.create(model=NAME, prompt="x", n=2, seed=1, max_tokens=5, logprobs=0, stream=True)
    offsets: dict[int, list[int]] = {0: [], 1: []}
    for chunk in with_logs:
        offsets[chunk.choices[0].index] += chunk.choices[0].logprobs.text_offset
    assert [found[0] for found in offsets.values()] == [0, 0]
    assert answer.usage.prompt_tokens == 9
    assert answer.usage.completion_tokens == 30


def test_echo_and_log_probs_are_those_of_the_prompt_and_the_output(llm, client):
    params = SamplingParams(temperature=0, max_tokens=4, log_probs=2, prompt_log_probs=2)
    (expected,) = llm.generate(["hello"], params, show_progress=False)

    answer = client.completions.create(
        model=NAME, prompt="hello", echo=True, logprobs=2, temperature=0, max_tokens=4
    ).choices[0]

    tokens = [*expected.prompt_token_ids, *expected.token_ids]
    text_of = llm.tokenizer.text_of
    assert answer.text == "hello" + expected.text
    assert answer.logprobs.tokens == [text_of(token) for token in tokens]
    assert answer.logprobs.token_logprobs == [*expected.prompt_log_probs, *expected.log_probs]
    assert answer.logprobs.text_offset == [*np.cumsum([0, *(len(text_of(token)) for token in tokens)])][:-1]
    tops = [*expected.prompt_top_log_probs, *expected.top_log_probs]
    for found, top in zip(answer.logprobs.top_logprobs, tops, strict=True):
        assert found is None or {text_of(token): value for token, value in top.items()}.items() <= found.items()


def test_the_log_probs_of_a_prompt_alone(llm, client):
    params = SamplingParams(temperature=0, max_tokens=1, prompt_log_probs=1)
    (expected,) = llm.generate(["hello"], params, show_progress=False)

    answer = client.completions.create(model=NAME, prompt="hello", echo=True, logprobs=1, max_tokens=0)

    assert answer.choices[0].text == "hello"
    assert answer.choices[0].logprobs.token_logprobs == list(expected.prompt_log_probs)
    assert answer.usage.completion_tokens == 0


@pytest.mark.parametrize("logprobs", [0, 2])
def test_streamed_log_probs_join_to_the_whole_answer(client, logprobs):
    fields: dict[str, Any] = {"prompt": "hello", "temperature": 0, "max_tokens": 6, "logprobs": logprobs}

    whole = client.completions.create(model=NAME, **fields).choices[0].logprobs
    pieces = [chunk.choices[0].logprobs for chunk in client.completions.create(model=NAME, stream=True, **fields)]

    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        parts = [getattr(piece, name) for piece in pieces]
        expected = getattr(whole, name)
        assert (None if expected is None else [*chain.from_iterable(parts)]) == expected


def test_max_tokens_is_sixteen_unless_it_is_given(client):
    answer = client.completions.create(model=NAME, prompt="hello", extra_body={"ignore_eos": True})

    assert answer.usage.completion_tokens == 16


# ---- chat

TALK: list[Any] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", ["greedy", "seed", "n", "stop", "logit_bias", "json_schema", "min_p"])
def test_chats(llm, client, case, stream):
    fields = {**SHORT, **CASES[case]}
    expected = llm.chat(TALK, SamplingParams(**fields), chat_template=TEMPLATE, show_progress=False)

    answer = client.chat.completions.create(model=NAME, messages=TALK, stream=stream, **own_and_extra(fields))

    if stream:
        found = joined(answer, lambda choice: choice.delta.content)
    else:
        answers.ChatAnswer.model_validate(answer.model_dump(exclude_none=False), strict=True)
        assert answer.usage.prompt_tokens == len(expected[0].prompt_token_ids)
        assert answer.prompt_token_ids == list(expected[0].prompt_token_ids)
        found = [fields_of(choice, choice.message.content) for choice in answer.choices]
    assert found == of_completions(expected)


@pytest.mark.parametrize(
    ("form", "schema"),
    [
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}, SCHEMA),
    ],
    ids=["json_object", "json_schema"],
)
def test_an_answer_has_the_form_that_is_asked_for(llm, client, form, schema):
    # Biases that end the text soon: closing quotes and braces, digits.
    bias = {str(llm.tokenizer.token_to_id(c)): 20.0 for c in '"}'}
    answer = client.chat.completions.create(
        model=NAME, messages=TALK, response_format=form, temperature=0, max_completion_tokens=60, logit_bias=bias
    )

    assert answer.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(answer.choices[0].message.content), schema)


@pytest.mark.parametrize("stream", [False, True])
def test_the_log_probs_of_an_answer(llm, client, stream):
    params = SamplingParams(temperature=0, max_tokens=5, log_probs=2)
    (expected,) = llm.chat(TALK, params, chat_template=TEMPLATE, show_progress=False)

    answer = client.chat.completions.create(
        model=NAME, messages=TALK, temperature=0, max_tokens=5, logprobs=True, top_logprobs=2, stream=stream
    )

    parts = [chunk.choices[0] for chunk in answer] if stream else [answer.choices[0]]
    content = [token for part in parts if part.logprobs is not None for token in part.logprobs.content]
    assert [token.logprob for token in content] == list(expected.log_probs)
    assert [[top.logprob for top in token.top_logprobs] for token in content] == [
        list(top.values()) for top in expected.top_log_probs
    ]
    assert b"".join(bytes(token.bytes) for token in content).decode() == expected.text


def test_an_answer_may_take_what_the_prompt_leaves(client):
    answer = client.chat.completions.create(model=NAME, messages=TALK, temperature=0, extra_body={"ignore_eos": True})

    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == 96  # max_model_len


def test_a_stream_tells_its_usage_if_it_is_asked(client):
    fields: dict[str, Any] = {"model": NAME, "messages": TALK, "temperature": 0, "max_tokens": 5, "stream": True}

    *chunks, last = client.chat.completions.create(stream_options={"include_usage": True}, **fields)

    assert last.choices == []
    assert last.usage == client.chat.completions.create(**{**fields, "stream": False}).usage
    assert {chunk.usage for chunk in chunks} == {None}
    assert len({chunk.id for chunk in [*chunks, last]}) == 1


@pytest.mark.parametrize("has_last", [True, False])
@pytest.mark.parametrize("is_chat", [True, False])
def test_each_chunk_of_a_stream_tells_the_usage_so_far_if_it_is_asked(client, is_chat, has_last):
    options: Any = {"include_usage": has_last, "continuous_usage_stats": True}
    fields: dict[str, Any] = {"model": NAME, "temperature": 0, "max_tokens": 5, "stream": True}
    fields |= {"stream_options": options, "extra_body": {"ignore_eos": True}}
    create = client.chat.completions.create if is_chat else client.completions.create

    chunks = list(create(**fields, **({"messages": TALK} if is_chat else {"prompt": ["a", "bc"]})))

    usages = [chunk.usage for chunk in chunks]
    counts = [usage.completion_tokens for usage in usages]
    assert counts == sorted(counts)
    assert counts[-1] == (5 if is_chat else 10)
    assert len({chunk.usage.prompt_tokens for chunk in chunks}) == 1
    assert all(
        chunk.usage.total_tokens == chunk.usage.prompt_tokens + n for chunk, n in zip(chunks, counts, strict=True)
    )
    assert (chunks[-1].choices == []) == has_last


def test_parts_of_text_and_the_last_message_to_continue(llm, client):
    talk = [*TALK, {"role": "assistant", "content": "yes"}]
    params = SamplingParams(temperature=0, max_tokens=5)
    (expected,) = llm.chat(talk, params, chat_template=TEMPLATE, continue_final_message=True, show_progress=False)
    parts: list[Any] = [*talk[:1], {"role": "user", "content": [{"type": "text", "text": "hi"}]}, talk[2]]

    answer = client.chat.completions.create(
        model=NAME, messages=parts, temperature=0, max_tokens=5, extra_body={"continue_final_message": True}
    )

    assert answer.choices[0].message.content == expected.text


# ---- embeddings, models, texts


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_embeddings(llm, client, encoding):
    texts = ["hello", "good bye"]

    answer = client.embeddings.create(model=NAME, input=texts, encoding_format=encoding)

    vectors = [item.embedding for item in answer.data]
    if encoding == "base64":  # OpenAI's client decodes what it has asked for itself alone
        vectors = [np.frombuffer(base64.b64decode(vector), "<f4") for vector in vectors]
    np.testing.assert_allclose(np.array(vectors), llm.embed(texts, show_progress=False), atol=1e-6)
    assert answer.usage.prompt_tokens == 13


def test_models_have_their_names(client):
    assert [model.id for model in client.models.list()] == [NAME, "other"]
    assert client.models.retrieve("other").id == "other"
    assert client.completions.create(model="other", prompt="a", max_tokens=1).model == NAME


def test_tokens_there_and_back(llm, http):
    text = "hello you"

    answer = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()

    assert answer["tokens"] == llm.tokenizer.encode(text)
    assert answer["count"] == len(answer["tokens"])
    assert "".join(answer["token_strs"]) == text
    assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": text}
    rendered = http.post("/tokenize", json={"messages": TALK}).json()["tokens"]
    assert llm.tokenizer.decode(rendered) == "system:be brief user:hi a:"


def test_tools_of_a_conversation_are_tokenized_with_it(checkpoint, tmp_path):
    template = TEMPLATE + "{% if tools %}{{ tools[0].function.name }}{% endif %}"
    tools = [{"type": "function", "function": {"name": "f"}}]
    with (
        serving(small_async_engine(checkpoint), chat_template=template) as (_, address),
        httpx.Client(base_url=address, timeout=100) as http,
    ):
        bare, shown = (
            http.post("/tokenize", json={"messages": TALK, **more, "return_token_strs": True}).json()["token_strs"]
            for more in ({}, {"tools": tools})
        )
    assert "".join(shown) == "".join(bare) + "f"


# ---- refusals


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"temperatur": 1}, "temperatur", "this field is unknown"),
        ({"suffix": "a"}, "suffix", "cannot be honoured"),
        ({"service_tier": "flex"}, "service_tier", "cannot be honoured"),
        ({"temperature": -1}, "temperature", "temperature=-1.0 is not allowed"),
        ({"temperature": "1"}, "temperature", "valid number"),
        ({"top_k": -2}, "top_k", "top_k=-2 is not allowed"),
        ({"max_tokens": 0}, "max_tokens", "without echo"),
        ({"n": 129, "temperature": 1.0}, "n", "more than max_samples=128"),
        ({"logprobs": 5}, None, "log_probs=5 is more than max_log_probs=4"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "give token ids"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "logit_bias"),
        ({"prompt": []}, "prompt", ""),
        ({"prompt": ""}, "prompt", "is empty"),
        ({"prompt": [96]}, "prompt", "token ids of this model are integers from 0 to 95"),
        ({"prompt": "a" * 200}, "prompt", "max_model_len"),
        ({"stream": True, "best_of": 2}, "best_of", "cannot be streamed"),
        ({"regex": "(", "max_tokens": 4}, "regex", "unclosed group"),
        ({"deadline": 0}, "deadline", "greater than 0"),
        ({"stream_options": {"include_usage": True}, "stream": False}, None, "needs stream=true"),
        ({"top_k": 1.5}, "top_k", "integer"),
        ({"prediction": "hello"}, "prediction", "this engine drafts from no text"),
    ],
    ids=lambda value: "-".join(map(str, value))[:40] if isinstance(value, dict) else None,
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_field_that_cannot_be_honoured_is_refused_by_its_name(client, fields, param, message, stream):
    own = {"model": NAME, "prompt": "hello", "stream": stream, **fields}

    with pytest.raises(openai.BadRequestError) as refused:
        client.post("/completions", body=own, cast_to=object)

    assert message in refused.value.message
    assert refused.value.param == param


def test_a_template_of_a_request_is_refused_unless_the_server_allows_it(client):
    with pytest.raises(openai.BadRequestError, match="--allow-chat-templates") as refused:
        client.chat.completions.create(model=NAME, messages=TALK, extra_body={"chat_template": "a"})
    assert refused.value.param == "chat_template"


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs", "an argument of its own"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "an argument of its own"),
        ({"chat_template_kwargs": {"conversation": []}}, "chat_template_kwargs", "an argument of its own"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs", "does not read"),
        ({"documents": [{"text": "a"}]}, "documents", "does not show them"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "does not show the model"),
        ({"messages": [*TALK, {"role": "user", "content": "a", "mood": "b"}]}, "messages", "messages[2].mood"),
    ],
)
def test_a_field_that_the_template_does_not_read_is_refused_by_its_name(client, fields, param, message):
    with pytest.raises(openai.BadRequestError) as refused:
        client.post("/chat/completions", body={"model": NAME, "messages": TALK, **fields}, cast_to=object)

    assert message in refused.value.message
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("path", "instead"),
    [
        ("/v1/responses", "POST /v1/chat/completions"),
        ("/v1/messages", "not Anthropic's"),
        ("/chat/completions", "a base URL that ends in /v1"),
        ("/api/chat", "not Ollama's"),
    ],
)
def test_a_path_of_another_api_is_answered_with_the_route_that_there_is(http, path, instead):
    answer = http.post(path, json={})

    assert answer.status_code == 404
    assert instead in answer.json()["error"]["message"]


def test_an_unknown_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError, match="this server has small, other") as refused:
        client.completions.create(model="gpt-4", prompt="a")
    assert refused.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "[" * 100_000}}]}], "give JSON"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "[1]"}}]}], "a JSON object"),
        ([{"content": "a"}], "messages[0].role is None"),
        ([{"role": "user"}], "neither content nor tool_calls"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}], "text alone"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{"}}]}], "give JSON"),
    ],
)
def test_messages_that_cannot_be_read_are_refused(client, messages, message):
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=NAME, messages=messages)

    assert message in refused.value.message


@pytest.mark.parametrize(
    ("content", "status"), [(b"{", 400), (b"[]", 400), (b"null", 400), (b'{"a": ' * 5000, 400), (b"\xff", 400)]
)
def test_what_is_no_json_object_is_refused(http, content, status):
    answer = http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})

    assert answer.status_code == status
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "body",
    [
        {"tokens": [-1] * 300_000},
        {"prompt": [-1] * 300_000, "model": NAME},
        {f"field{i}": 0 for i in range(100_000)},
        {"model": NAME, "prompt": "a", "logit_bias": {f"a{i}": "b" for i in range(100_000)}},
        {"model": NAME, "prompt": "a", "stop": [1] * 100_000},
    ],
    ids=["tokens", "prompt", "fields", "logit_bias", "stop"],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/detokenize"])
def test_many_mistakes_in_a_body_are_one_error(http, path, body, monkeypatch):
    errors = []
    monkeypatch.setattr(reading, "refused_body", lambda found: errors.extend(found) or refused_body(found))

    assert http.post(path, json=body).status_code == 400
    assert len(errors) < 10  # a few for each form that a field may have


def test_half_a_surrogate_pair_in_an_error_is_written_as_its_escape(http):
    body = b'{"model": "small", "messages": [{"role": "user", "content": "a", "\\ud800": NaN}]}'
    headers = {"Content-Type": "application/json"}

    assert http.post("/v1/chat/completions", content=body, headers=headers).status_code == 400


def test_unknown_routes_and_methods_are_refused_in_the_same_form(http):
    for answer, status in (
        (http.get("/v1/nothing"), 404),
        (http.get("/v1/completions"), 405),
        (http.get("/../a"), 404),
    ):
        assert answer.status_code == status
        assert answer.json()["error"]["type"] == "invalid_request_error"
