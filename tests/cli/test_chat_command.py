"""`jaxinfer chat` on an engine without a model: the conversation, its commands, what they refuse."""

from __future__ import annotations

import io
import json
import sys
from typing import Any

import pytest

import jaxinfer
from jaxinfer.cli.main import main
from jaxinfer.config import SamplingParams
from jaxinfer.engine.request.completion import Delta
from jaxinfer.text.answers.answers import Answers
from jaxinfer.text.tokenizer import Tokenizer
from tests.batch_job.fake_llm import FakeLLM
from tests.text.answers.checkpoints import save_checkpoint_with_marks


class ChattingLLM(FakeLLM):
    """Answers with its prompt in capitals; `prompts` are the conversations that were rendered."""

    prompts: list[list[dict[str, str]]]
    params: SamplingParams
    stops_with: BaseException | None

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__()

    def warm_up(self, **options: Any) -> None:
        pass

    def stream(self, prompt: str, sampling_params: SamplingParams, *, adapter: str | None) -> Any:
        ChattingLLM.params = sampling_params
        ChattingLLM.prompts.append(self.tokenizer.rendered["conversation"])
        self.add(prompt, sampling_params)
        return self._answers(prompt)

    def _answers(self, prompt: str) -> Any:
        while self.has_unfinished:
            for delta in self.step():
                yield delta._replace(text=prompt.upper())
                if self.stops_with is not None:
                    raise self.stops_with


@pytest.fixture(autouse=True)
def llm(monkeypatch):
    ChattingLLM.prompts, ChattingLLM.stops_with = [], None
    monkeypatch.setattr(jaxinfer, "LLM", ChattingLLM)
    return ChattingLLM


@pytest.fixture
def chat(monkeypatch, capsys):
    """Holds a conversation of these lines; returns status, output and errors."""

    def run(*lines, options=()):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        status = main(["chat", "--quiet", "--max-tokens", "1", *options])
        return status, *capsys.readouterr()

    return run


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def test_each_line_is_answered_and_remembered(chat, llm):
    assert chat("hi", "", "how") == (0, "HI\nHOW\n", "")
    assert llm.prompts == [[user("hi")], [user("hi"), assistant("HI"), user("how")]]
    assert llm.params.max_tokens == 1


def test_the_system_prompt_comes_first_and_can_be_changed(chat, llm):
    status, _, errors = chat("a", "/system  be brief ", "b", "/clear", "c", options=["--system", "be kind"])

    assert (status, errors) == (0, "")
    kind, brief = ({"role": "system", "content": text} for text in ("be kind", "be brief"))
    assert llm.prompts == [[kind, user("a")], [brief, user("a"), assistant("A"), user("b")], [brief, user("c")]]


def test_undo_takes_back_the_last_question_and_its_answer(chat, llm):
    _, _, errors = chat("/undo", "a", "b", "/undo", "c", "/quit", "d")

    assert errors == "jaxinfer: there is no question to take back\n"
    assert llm.prompts[-1] == [user("a"), assistant("A"), user("c")]


def test_a_conversation_is_saved_and_gone_on_with(chat, llm, tmp_path):
    file = tmp_path / "chat.json"
    chat("é", f"/save {file}")
    assert json.loads(file.read_text(encoding="utf-8")) == [user("é"), assistant("É")]

    assert chat("b", options=["--load", str(file)])[0] == 0
    assert llm.prompts[-1] == [user("é"), assistant("É"), user("b")]
    chat(f"/load {file}", "c")
    assert llm.prompts[-1] == [user("é"), assistant("É"), user("c")]


def test_a_mistake_is_told_and_the_conversation_goes_on(chat, llm, tmp_path):
    (tmp_path / "number").write_text("3")
    lines = ["/nonsense", "/save", f"/save {tmp_path}/no/file", f"/load {tmp_path}/number", "too long a question", "ok"]

    status, out, errors = chat(*lines)

    assert (status, out) == (0, "OK\n")
    assert [line.partition(" ")[0] for line in errors.splitlines()] == ["jaxinfer:"] * 5
    assert "/nonsense" in errors
    assert llm.prompts == [[user("too long a question")], [user("ok")]]


def test_ctrl_c_ends_the_answer_and_keeps_its_beginning(chat, llm):
    llm.stops_with = KeyboardInterrupt()
    status, out, _ = chat("a", "b")

    assert (status, out) == (0, "A ...\nB ...\n")
    assert llm.prompts[-1] == [user("a"), assistant("A"), user("b")]


def test_the_template_is_read_from_a_file(chat, llm, monkeypatch, tmp_path):
    (tmp_path / "t.jinja").write_text("{{ messages }}")
    rendered = []
    monkeypatch.setattr(
        "tests.batch_job.fake_llm.FakeTokenizer.render_chat",
        lambda self, conversation, **arguments: (
            rendered.append(arguments) or setattr(self, "rendered", {"conversation": conversation}) or "x"
        ),
    )
    chat("a", options=["--chat-template", str(tmp_path / "t.jinja")])

    assert rendered == [{"chat_template": "{{ messages }}", "add_generation_prompt": True}]


WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
# The first part is never rendered. It shows the style of Hermes.
TOOL_TEMPLATE = (
    """{% if false %}{{ '<tool_call>\\n{"name": "' }}{{ '", "arguments": ' }}{% endif %}{{ tools }} {{ messages }}"""
)


@pytest.fixture
def scripted(monkeypatch, tmp_path):
    """Makes an engine that gives these answers, and returns the conversations that were rendered."""

    def make(*answers):
        tokenizer = Tokenizer.from_path(save_checkpoint_with_marks(tmp_path / "model"))
        assert tokenizer is not None
        rendered, texts = [], iter(answers)

        class ScriptedLLM(ChattingLLM):
            def __init__(self, model: Any, **options: Any) -> None:
                super().__init__(model)
                self.tokenizer, self.answers = tokenizer, Answers(tokenizer)

            def stream(self, prompt: Any, sampling_params: SamplingParams, *, adapter: str | None) -> Any:
                ChattingLLM.params = sampling_params
                rendered.append(tokenizer.decode(prompt, skip_special_tokens=False))
                for token_id in tokenizer.encode(next(texts), add_special_tokens=False):
                    yield Delta(0, "", (token_id,), (0.0,))

        monkeypatch.setattr(jaxinfer, "LLM", ScriptedLLM)
        (tmp_path / "t.jinja").write_text(TOOL_TEMPLATE)
        (tmp_path / "tools.json").write_text(json.dumps([WEATHER]))
        return rendered

    return make


def test_calls_are_shown_and_the_user_types_their_results(chat, scripted, llm, tmp_path):
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "%s"}}\n</tool_call>'
    rendered = scripted("<think>\nRome too\n</think>\n\nWell" + call % "Paris" + call % "Rome", "Rain.")
    file = tmp_path / "chat.json"

    status, out, errors = chat(
        "how",
        "wet",
        "dry",
        f"/save {file}",
        options=["--tools", f"{tmp_path}/tools.json", "--chat-template", f"{tmp_path}/t.jinja"],
    )

    assert (status, errors) == (0, "")
    shown = [
        "Rome too",
        "Well",
        'weather {"city": "Paris"}',
        'weather {"city": "Rome"}',
        "Rain.",
        f"5 messages are in {file}",
    ]
    assert out.splitlines() == shown
    question, first, wet, dry, last = json.loads(file.read_text())
    assert (question, last) == (user("how"), assistant("Rain."))
    assert (first["content"], first["reasoning_content"]) == ("Well", "Rome too")
    functions = [found["function"] for found in first["tool_calls"]]
    assert functions == [{"name": "weather", "arguments": {"city": city}} for city in ("Paris", "Rome")]
    results = [{"role": "tool", "tool_call_id": found["id"], "name": "weather"} for found in first["tool_calls"]]
    assert [wet, dry] == [{**result, "content": text} for result, text in zip(results, ("wet", "dry"), strict=True)]
    assert "'name': 'weather'" in rendered[0]
    assert "wet" in rendered[1]
    assert llm.params.grammar is not None


def test_a_call_that_breaks_off_is_told_and_forgotten(chat, scripted, tmp_path):
    scripted('<tool_call>\n{"name": "weather", "arguments": {"ci', "Hello.")
    file = tmp_path / "chat.json"

    _, _, errors = chat(
        "a",
        "b",
        f"/save {file}",
        options=["--tools", f"{tmp_path}/tools.json", "--chat-template", f"{tmp_path}/t.jinja"],
    )

    assert "the call of weather broke off" in errors
    assert json.loads(file.read_text()) == [user("b"), assistant("Hello.")]


def test_tools_need_a_style(chat, scripted, tmp_path):
    scripted("Hello.")
    (tmp_path / "t.jinja").write_text("{{ tools }} {{ messages }}")
    options = ["--tools", f"{tmp_path}/tools.json", "--chat-template", f"{tmp_path}/t.jinja"]

    status, _, errors = chat("a", options=options)
    assert status == 2
    assert "give --answer-style NAME" in errors
    assert chat("a", options=[*options, "--answer-style", "hermes"]) == (0, "Hello.\n", "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tools", "/no/such/file"], "/no/such/file is no file; give [{"),
        (["--answer-style", "hermes"], "give --tools too"),
        (["--load", "/no/such/file"], "/no/such/file is no file"),
        (["--temperature", "-1"], "temperature=-1.0"),
        (["--n", "2"], "unrecognized arguments: --n ("),
    ],
)
def test_mistakes_in_options_are_told_before_a_model_is_loaded(chat, llm, options, message):
    status, out, errors = chat("a", options=options)

    assert (status, out, llm.prompts) == (2, "", [])
    assert message in errors
