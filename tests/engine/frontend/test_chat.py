"""Conversations through the engine: the chat template makes the prompt, the checkpoint the default sampling."""

from __future__ import annotations

import json
import shutil

import pytest

from jaxinfer import SamplingParams
from jaxinfer.checkpoint import read_sampling_defaults
from tests.engine.engines import quick_engine

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
        (
            HELLO,
            {"chat_template": TEMPLATE, "chat_template_kwargs": {"padding": True}},
            "padding=True is not supported",
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
    llm = quick_engine(tmp_path)

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
    assert read_sampling_defaults(tmp_path) == SamplingParams()
    (tmp_path / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6, "top_p": 0.95}')
    assert read_sampling_defaults(tmp_path) == SamplingParams(temperature=0.6, top_p=0.95)
    (tmp_path / "generation_config.json").write_text('{"temperature": "hot"}')
    with pytest.raises(ValueError, match=r"generation_config.json: temperature='hot'"):
        read_sampling_defaults(tmp_path)
