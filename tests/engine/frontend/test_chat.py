"""Conversations through the engine: the chat template makes the prompt, the checkpoint the default sampling."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest

from jaxinfer import SamplingParams
from jaxinfer.batch_job import run_batch
from jaxinfer.checkpoint import Checkpoint, read_sampling_defaults
from jaxinfer.engine.frontend.admission import PromptTooLongError
from tests.engine.engines import small_engine, spelled

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
HELLO, BYE = [{"role": "user", "content": "Hello"}], [{"role": "user", "content": "Bye"}]
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def test_a_conversation_is_completed_as_the_text_that_its_template_makes(llm):
    (chat,) = llm.chat(HELLO, GREEDY, chat_template=TEMPLATE, show_progress=False)

    ids = llm.tokenizer.encode("<user>Hello<a>", add_special_tokens=False)
    (plain,) = llm.generate(ids, GREEDY, show_progress=False)
    assert chat.prompt_token_ids == tuple(ids)
    assert (chat.token_ids, chat.log_probs) == (plain.token_ids, plain.log_probs)


def test_several_conversations_are_completed_in_their_order(llm):
    both = llm.chat([HELLO, BYE], [GREEDY, GREEDY], chat_template=TEMPLATE, show_progress=False)
    each = [llm.chat(one, GREEDY, chat_template=TEMPLATE, show_progress=False)[0] for one in (HELLO, BYE)]

    assert [c.token_ids for c in both] == [c.token_ids for c in each]
    assert [c.prompt_token_ids for c in both] == [c.prompt_token_ids for c in each]


def test_the_last_message_is_continued(llm):
    messages = [*HELLO, {"role": "assistant", "content": "Good day"}]
    options = {"add_generation_prompt": False, "continue_final_message": True}

    (chat,) = llm.chat(messages, GREEDY, chat_template=TEMPLATE, show_progress=False, **options)

    assert chat.prompt_token_ids == tuple(
        llm.tokenizer.encode("<user>Hello<assistant>Good day", add_special_tokens=False)
    )


def test_the_last_message_is_continued_without_a_word_about_an_answer(llm):
    messages = [*HELLO, {"role": "assistant", "content": "Good day"}]

    (chat,) = llm.chat(messages, GREEDY, chat_template=TEMPLATE, show_progress=False, continue_final_message=True)

    assert spelled(chat.prompt_token_ids) == "<user>Hello<assistant>Good day"
    with pytest.raises(ValueError, match="continue_final_message=True with add_generation_prompt=True"):
        llm.chat(messages, chat_template=TEMPLATE, add_generation_prompt=True, continue_final_message=True)


ANSWERED = "<user>Hello<assistant>Good"


@pytest.mark.parametrize("part", ["messages", "tools", "documents", "template"])
def test_a_conversation_too_long_for_the_model_is_refused_before_it_is_encoded(llm, part, monkeypatch):
    long = "ab" * 5_000
    arguments: dict[str, Any] = {
        "messages": {"messages": [{"role": "user", "content": long}]},
        "tools": {"messages": HELLO, "tools": [{"name": "f", "description": long}]},
        "documents": {"messages": HELLO, "documents": [{"text": long}]},
        "template": {"messages": HELLO, "chat_template": f"{long}{TEMPLATE}"},
    }[part]
    template = TEMPLATE + "{{ tools }}{{ documents }}"
    encoded = []
    monkeypatch.setattr(type(llm.tokenizer), "encode", lambda _, text, **__: encoded.append(text) or [1])

    with pytest.raises(PromptTooLongError, match=r"^conversation 0: its text has 10,\d+ characters.* cannot spell it"):
        llm.chat(sampling_params=GREEDY, show_progress=False, **{"chat_template": template, **arguments})

    assert not encoded


# What a line says beside its messages, and the prompt.
LINES = [
    ({}, f"{ANSWERED}<a>0"),
    ({"add_generation_prompt": False}, f"{ANSWERED}0"),
    ({"continue_final_message": True}, ANSWERED),
    ({"continue_final_message": True, "add_generation_prompt": False}, ANSWERED),
    ({"chat_template_kwargs": {"mood": "!"}, "priority": "interactive", "tenant": "b"}, f"{ANSWERED}<a>!0"),
    ({"tools": [{"name": "f"}], "documents": [{"text": "d"}], "deadline": 600}, f"{ANSWERED}<a>1d"),
    ({"chat_template": "{{ messages[0].content }}", "cache_salt": "a"}, "Hello"),
]


def test_a_line_of_a_job_has_the_completion_of_chat(llm, tmp_path):
    messages = [*HELLO, {"role": "assistant", "content": "Good"}]
    template = TEMPLATE + "{{ mood }}{{ (tools or []) | length }}{{ (documents or [{}])[0].text }}"
    arguments: list[dict[str, Any]] = [{"chat_template": template, **line} for line, _ in LINES]
    sampling: dict[str, Any] = {"temperature": 0, "max_tokens": 3, "ignore_eos": True}
    rows = [{"custom_id": str(i), "messages": messages, **line, **sampling} for i, line in enumerate(arguments)]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))

    run_batch(llm, tmp_path / "in.jsonl", tmp_path / "out.jsonl", show_progress=False)

    records = sorted(map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines()), key=lambda r: r["line"])
    for record, line, (_, prompt) in zip(records, arguments, LINES, strict=True):
        (chat,) = llm.chat(messages, SamplingParams(**sampling), show_progress=False, **line)
        assert spelled(chat.prompt_token_ids) == prompt
        assert (record["num_prompt_tokens"], record["token_ids"]) == (len(prompt), list(chat.token_ids))


def test_a_line_with_a_wrong_option_gets_an_error_by_its_name(llm, tmp_path):
    wrong = {"priority": "first", "tenant": 5, "deadline": -1, "cache_salt": "", "add_generation_prompt": "no"}
    rows = [{"custom_id": name, "messages": HELLO, "chat_template": "x", name: wrong[name]} for name in wrong]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))

    run_batch(llm, tmp_path / "in.jsonl", tmp_path / "out.jsonl", show_progress=False)

    for record in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines()):
        assert record["error"].startswith(f"{record['custom_id']}=")


def test_parts_of_text_are_those_of_a_text_at_every_door(llm, tmp_path):
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]}]
    (name, *_) = llm.model_names
    body = {"model": name, "messages": parts, "temperature": 0, "max_tokens": 4, "ignore_eos": True}
    own = {"custom_id": "own", "messages": parts, "chat_template": TEMPLATE, "temperature": 0, "max_tokens": 4}
    line = {
        "custom_id": "line",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {**body, "chat_template": TEMPLATE},
    }
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, (own | {"ignore_eos": True}, line))))

    (chat,) = llm.chat(parts, GREEDY, chat_template=TEMPLATE, show_progress=False)
    run_batch(llm, tmp_path / "in.jsonl", tmp_path / "out.jsonl", show_progress=False)

    whole = [{"role": "user", "content": "Hel\nlo"}]
    (other,) = llm.chat(whole, GREEDY, chat_template=TEMPLATE, show_progress=False)
    assert (chat.prompt_token_ids, chat.token_ids) == (other.prompt_token_ids, other.token_ids)
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    records = {record["custom_id"]: record for record in map(json.loads, lines)}
    assert records["own"]["num_prompt_tokens"] == len(chat.prompt_token_ids)
    assert records["line"]["response"]["body"]["usage"]["prompt_tokens"] == len(chat.prompt_token_ids)


def test_variables_reach_the_template(llm):
    template = "{{ mood }} {{ tools | length }} {{ documents[0].text }}"
    arguments = {"tools": [{"name": "f"}], "documents": [{"text": "d"}], "chat_template_kwargs": {"mood": "calm"}}

    (chat,) = llm.chat(HELLO, GREEDY, chat_template=template, show_progress=False, **arguments)

    assert chat.prompt_token_ids == tuple(llm.tokenizer.encode("calm 1 d", add_special_tokens=False))


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        (HELLO, {}, "no chat template"),
        ([], {"chat_template": TEMPLATE}, "at least one message"),
        ("Hello", {"chat_template": TEMPLATE}, "messages='Hello'"),
        (3, {"chat_template": TEMPLATE}, "messages=3"),
        ([HELLO, "Hello"], {"chat_template": TEMPLATE}, "messages='Hello'"),
        (HELLO, {"chat_template": TEMPLATE, "chat_template_kwargs": 3}, "chat_template_kwargs=3"),
        (HELLO, {"chat_template": TEMPLATE, "chat_template_kwargs": {"tools": []}}, "an argument of its own"),
        (HELLO, {"chat_template": TEMPLATE, "chat_template_kwargs": {"self": 1}}, "an argument of its own"),
        (HELLO, {"chat_template": TEMPLATE, "chat_template_kwargs": {"messages": []}}, "an argument of its own"),
        (HELLO, {"chat_template": TEMPLATE, "tools": [{"name": "f"}]}, "does not show the model these 1"),
        (HELLO, {"chat_template": TEMPLATE, "documents": [{"text": "a"}]}, "does not show them"),
        ([{"role": "user", "content": [{"type": "image"}]}], {"chat_template": TEMPLATE}, "a part of type 'image'"),
        (
            HELLO,
            {"chat_template": TEMPLATE, "chat_template_kwargs": {"padding": True}},
            "'padding', which the chat template does not read",
        ),
    ],
)
def test_what_cannot_be_rendered_is_refused_and_nothing_is_begun(llm, messages, options, message):
    with pytest.raises(ValueError, match=message):
        llm.chat(messages, GREEDY, show_progress=False, **options)

    assert not llm.has_unfinished


def test_messages_need_a_tokenizer(mute_llm):
    with pytest.raises(ValueError, match="messages need a tokenizer"):
        mute_llm.chat(HELLO, GREEDY, chat_template=TEMPLATE)


def test_requests_that_give_no_parameters_get_those_of_generation_config(checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    stated = {"do_sample": False, "repetition_penalty": 1.5, "max_new_tokens": 5, "top_k": None, "eos_token_id": 2**20}
    (tmp_path / "generation_config.json").write_text(json.dumps(stated))
    llm = small_engine(tmp_path)

    expected = SamplingParams(temperature=0, repetition_penalty=1.5, max_tokens=5)
    assert llm.default_sampling_params == expected
    default, given, other = (
        llm.generate("def f", params, show_progress=False)[0]
        for params in (None, expected, SamplingParams(max_tokens=3))
    )
    assert default.token_ids == given.token_ids
    assert len(default.token_ids) == 5
    assert len(other.token_ids) == 3


def test_a_generation_config_that_states_nothing_leaves_the_defaults(tmp_path):
    assert read_sampling_defaults(Checkpoint(tmp_path)) == SamplingParams()
    (tmp_path / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6, "top_p": 0.95}')
    assert read_sampling_defaults(Checkpoint(tmp_path)) == SamplingParams(temperature=0.6, top_p=0.95)
    (tmp_path / "generation_config.json").write_text('{"temperature": "hot"}')
    with pytest.raises(ValueError, match=r"generation_config.json: temperature='hot'"):
        read_sampling_defaults(Checkpoint(tmp_path))
