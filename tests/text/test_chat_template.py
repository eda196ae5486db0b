"""Chat templates render as `transformers` renders them, and what they cannot do ends in an error within a second."""

from __future__ import annotations

import json
import shutil
import time

import pytest
import transformers

from jaxinfer.engine.engine import BUNDLED_MODEL
from jaxinfer.text.tokenizer import Tokenizer
from tests.text.chat_templates import TEMPLATES

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'Tells the weather of a "city" <now>',
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "unit": {"enum": ["°C", "°F"]},
                "days": {"type": "array", "items": {"type": ["integer", "null"]}},
            },
            "required": ["city"],
        },
    },
}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich", "days": [1, 2.5, None]}}}
USER, ANSWER = {"role": "user", "content": " What's 2 < 3? "}, {"role": "assistant", "content": "Yes & \U0001f600\n"}
CONVERSATIONS = {
    "question": [USER],
    "system": [{"role": "system", "content": "Be brief.\n"}, USER],
    "turns": [USER, ANSWER, {"role": "user", "content": "Why?\nExplain."}],
    "reasoning": [USER, {**ANSWER, "reasoning_content": "two\nthree"}, USER, {**ANSWER, "thinking": "again"}],
    "think tags": [USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes"}, USER],
    "tool": [
        {"role": "system", "content": "Use tools."},
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": '{"t": 3}', "name": "weather"},
        {"role": "tool", "content": "sunny"},
    ],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "Look "}, {"type": "image"}]}],
}
OPTIONS = {
    "plain": {},
    "prompt": {"add_generation_prompt": True},
    "tools": {"tools": [WEATHER, WEATHER], "add_generation_prompt": True},
    "documents": {"documents": [{"title": "A", "text": "one\ntwo"}, {"title": "", "text": "three " * 9}]},
    "variables": {"enable_thinking": False, "date_string": "1 Jan", "effort": "high", "add_generation_prompt": True},
    "continued": {"continue_final_message": True},
}
CONFIG = json.loads((BUNDLED_MODEL / "tokenizer_config.json").read_text())


@pytest.fixture(scope="module")
def make_checkpoint(tmp_path_factory):
    def make(files, **config):
        folder = tmp_path_factory.mktemp("chat")
        shutil.copy(BUNDLED_MODEL / "tokenizer.json", folder)
        (folder / "tokenizer_config.json").write_text(json.dumps({**CONFIG, **config}))
        for name, text in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
        return folder

    return make


@pytest.fixture(scope="module", params=TEMPLATES.values(), ids=list(TEMPLATES))
def both(request, make_checkpoint):
    folder = make_checkpoint({"chat_template.jinja": request.param})
    return Tokenizer.from_path(folder), transformers.AutoTokenizer.from_pretrained(folder)


def read(folder):
    tokenizer = Tokenizer.from_path(folder)
    assert tokenizer is not None
    return tokenizer


def result_of(function, *args, **kwargs):
    """Returns what a call returns, or that it raises."""
    try:
        return function(*args, **kwargs)
    except Exception:
        return "an error"


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_text_and_ids_are_those_of_transformers(both, messages, options):
    ours, theirs = (tokenizer.apply_chat_template for tokenizer in both)

    assert result_of(ours, messages, tokenize=False, **options) == result_of(
        theirs, messages, tokenize=False, **options
    )
    expected = result_of(theirs, messages, return_dict=False, **options)
    assert result_of(ours, messages, **options) == expected


def test_each_template_renders_most_conversations(both):
    ours, _ = both
    texts = [
        result_of(ours.apply_chat_template, messages, tokenize=False, add_generation_prompt=True)
        for messages in CONVERSATIONS.values()
    ]

    assert len(set(texts) - {"an error"}) >= 4


NAMED = [
    {"name": "default", "template": "D{{ messages[0].content }}"},
    {"name": "tool_use", "template": "T{{ tools }}"},
]
PLACES = {
    "tokenizer_config.json": ({}, {"chat_template": "C{{ messages[0].content }}{{ eos_token }}"}),
    "names": ({}, {"chat_template": NAMED}),
    "a file before the configuration": (
        {"chat_template.jinja": "F{{ messages[0].content }}"},
        {"chat_template": "C{{ messages[0].content }}"},
    ),
    "more files": (
        {"chat_template.jinja": "F", "additional_chat_templates/tool_use.jinja": "more", "tool_use.jinja": "not read"},
        {},
    ),
    "special tokens as objects": (
        {"chat_template.jinja": "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ unk_token }}"},
        {"bos_token": {"content": "<s>", "__type": "AddedToken"}, "pad_token": "<p>", "eos_token": None},
    ),
}


@pytest.mark.parametrize(("files", "config"), PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("options", [{}, {"tools": [WEATHER]}, {"chat_template": "given {{ messages | length }}"}])
def test_templates_are_found_where_transformers_finds_them(make_checkpoint, files, config, options):
    folder = make_checkpoint(files, **config)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)

    text = read(folder).apply_chat_template([USER], tokenize=False, **options)

    assert text == theirs.apply_chat_template([USER], tokenize=False, **options)


def test_a_template_is_chosen_by_its_name(make_checkpoint):
    tokenizer = read(make_checkpoint({}, chat_template=NAMED))

    assert tokenizer.apply_chat_template([USER], chat_template="tool_use", tokenize=False) == "TNone"


HOSTILE = {
    "loops for ever": ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "1 second"),
    "computes for ever": ("{{ 7 ** 99999999 }}", "1 second"),
    "writes too much": ("{{ 'é' * (2**24 + 1) }}", "16,777,217 characters, more than 16,777,216"),
    "takes all memory": ("{{ 'a' * 10 ** 10 }}", "2 GiB"),
    "pads a text": ("{{ 'a' | center(10 ** 10) }}", "2 GiB"),
    "reads attributes": ("{{ messages.__class__ }}", "'__class__' of a list is unsafe"),
    "reads globals": ("{{ cycler.__init__.__globals__ }}", "'__init__' of a type is unsafe"),
    "formats attributes": ("{{ '{0.__class__}'.format(messages) }}", "'__class__' of a list is unsafe"),
    "changes the messages": ("{{ messages.append(1) }}", "SecurityError"),
    "raises": ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    "is no template": ("{% if %}", "TemplateSyntaxError"),
    "includes a file": ("{% include '/etc/passwd' %}", "no loader"),
    "reads what is not there": ("{{ messages[0].name.first }}", "has no attribute 'name'"),
}


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = read(BUNDLED_MODEL)
    tokenizer.apply_chat_template([USER], chat_template="begins the process")
    return tokenizer


@pytest.mark.parametrize(("template", "message"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_template_ends_in_an_error(tokenizer, template, message):
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"the chat template") as error:
        tokenizer.apply_chat_template([USER], chat_template=template)

    assert message in str(error.value)
    assert time.monotonic() - began < 5  # a second, on a machine with other work
    assert tokenizer.apply_chat_template([USER], chat_template="next", tokenize=False) == "next"


class Rich:
    def __repr__(self):
        return "Rich()"


REFUSED = {
    "no template": ({}, [USER], "no chat template; give one"),
    "no messages": ({"chat_template": "x"}, [], "at least one message"),
    "text": ({"chat_template": "x"}, "Hello", "a list of mappings"),
    "no mapping": ({"chat_template": "x"}, ["Hello"], r"messages\[0\]='Hello'"),
    "an object": ({"chat_template": "x"}, [{"role": "user", "content": Rich()}], r"messages\[0\].content=Rich\(\)"),
    "a key": ({"chat_template": "x"}, [{1: "user"}], "a key of messages"),
    "a function": ({"chat_template": "x", "tools": [print]}, [USER], "is a function; give its JSON schema"),
    "tensors": ({"chat_template": "x", "return_tensors": "pt"}, [USER], "return_tensors='pt' is not supported"),
    "two wishes": (
        {"chat_template": "x", "add_generation_prompt": True, "continue_final_message": True},
        [ANSWER],
        "give one of them",
    ),
    "nothing to continue": (
        {"chat_template": "x", "continue_final_message": True},
        [{"role": "assistant", "tool_calls": []}],
        "no text to continue",
    ),
    "a hidden end": ({"chat_template": "x", "continue_final_message": True}, [ANSWER], "does not show the final"),
    "too much": ({"chat_template": "x"}, [{"role": "user", "content": "a" * 2**24}], "more than 16,777,216 characters"),
}


@pytest.mark.parametrize(("options", "messages", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_rendered_is_refused(tokenizer, options, messages, message):
    with pytest.raises(ValueError, match=message):
        tokenizer.apply_chat_template(messages, **options)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config.json", "{", "is not JSON"),
        ("tokenizer_config.json", "[]", "not an object"),
        ("tokenizer_config.json", '{"chat_template": 3}', "neither text nor a list"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "a"}]}', "neither text nor a list"),
        ("chat_template.jinja", b"\xff", "not text in UTF-8"),
    ],
)
def test_damaged_files_are_refused_by_name(make_checkpoint, name, content, message):
    folder = make_checkpoint({})
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    with pytest.raises(ValueError, match=message) as error:
        Tokenizer.from_path(folder)
    assert name in str(error.value)
