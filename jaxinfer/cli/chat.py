"""`jaxinfer chat`: a conversation with the model, line by line, answers as they are generated."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.cli.output import show
from jaxinfer.json_lines import parse_json
from jaxinfer.text.answers.parts import ArgumentsPiece, CallBegin, Part, ToolCall, answer_of
from jaxinfer.validation import as_path, shown

if TYPE_CHECKING:
    from jaxinfer import LLM, SamplingParams
    from jaxinfer.engine.request.completion import Delta

COMMANDS = (
    "In the conversation: /system TEXT sets the system prompt, /undo takes back the last question and its answer,"
    " /clear all of them, /save FILE and /load FILE write and read the messages as JSON, /help lists these, /quit or"
    " Ctrl-D ends. Ctrl-C ends an answer early."
)
# SamplingParams fields that a single stream of text does not show, and one that would put marks into the messages.
OMITTED = ("n", "best_of", "log_probs", "prompt_log_probs", "skip_special_tokens")
MAX_FILE_BYTES = 2**26
MAX_LINE = 2**24  # characters

Message = dict[str, Any]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of a conversation."""
    group = parser.add_argument_group("conversation")
    group.add_argument("--system", metavar="TEXT", help="system prompt")
    group.add_argument("--load", metavar="FILE", help="go on with the messages that /save wrote")
    group.add_argument(
        "--chat-template", metavar="FILE", help="template in Jinja, or the name of one of the checkpoint's templates"
    )
    group.add_argument(
        "--tools", metavar="FILE", help="functions that the model may call, a JSON list as in OpenAI's API; you answer"
    )
    group.add_argument(
        "--answer-style", metavar="NAME", help="style of calls and reasoning, if the template does not show it"
    )


def read_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the arguments of `Chat` beside the engine and its parameters."""
    messages = [] if arguments.load is None else read_messages(arguments.load)
    if arguments.system is not None:
        messages = [_system(arguments.system), *_without_system(messages)]
    tools = None if arguments.tools is None else read_functions(arguments.tools)
    if tools is None and arguments.answer_style is not None:
        raise ValueError(f"--answer-style {shown(arguments.answer_style)} is that of calls; give --tools too")
    template = read_template(arguments.chat_template)
    return {"messages": messages, "template": template, "tools": tools, "style": arguments.answer_style}


def read_template(template: str | None) -> str | None:
    """Returns the template in a file, or the name of one of the checkpoint's; None for None."""
    if template is not None and (path := as_path("--chat-template", template)).is_file():
        return _read(path)
    return template


def read_messages(name: str) -> list[Message]:
    """Returns the messages in a file of /save."""
    return _read_objects("FILE", name, "messages", "give a file that /save has written")


def read_functions(name: str) -> list[dict[str, Any]]:
    """Returns the functions in a file of OpenAI's form."""
    return _read_objects("--tools", name, "functions", 'give [{"type": "function", "function": {"name": …}}, …]')


def _read_objects(option: str, name: str, what: str, way_out: str) -> list[dict[str, Any]]:
    path = as_path(option, name)
    if not path.is_file():
        raise ValueError(f"{path} is no file; {way_out}")
    try:
        values = parse_json(_read(path).encode())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); {way_out}") from None
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise ValueError(f"{path} is not a list of {what}; {way_out}")
    return values


def _read(path: Path) -> str:
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"{path} has more than {MAX_FILE_BYTES:,} bytes; give a smaller file")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not text in UTF-8; convert it") from None


def _system(text: str) -> Message:
    return {"role": "system", "content": text}


def _without_system(messages: list[Message]) -> list[Message]:
    return messages[1:] if messages and messages[0].get("role") == "system" else messages


def _call_message(call: ToolCall) -> dict[str, Any]:
    try:
        arguments = json.loads(call.arguments)
    except ValueError:
        raise ValueError(
            f"the call of {call.name} broke off and is forgotten; ask again, or raise --max-tokens"
        ) from None
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _show_part(part: Part, last: Part | None) -> None:
    """Shows a part of an answer after the last one. Reasoning, content and each call begin a line."""
    if last is not None and (isinstance(part, CallBegin) or not isinstance(part, (ArgumentsPiece, type(last)))):
        show("")
    show(f"{part.name} " if isinstance(part, CallBegin) else part.text, end="")


def _require_no_error(delta: Delta) -> None:
    if delta.completion is not None and delta.completion.error is not None:
        raise ValueError(f"the answer ended in an error: {delta.completion.error}")


class Chat:
    """A conversation: its messages so far, and the commands that change them."""

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        *,
        messages: list[Message],
        template: str | None,
        tools: list[dict[str, Any]] | None,
        style: str | None,
    ) -> None:
        if llm.tokenizer is None or llm.answers is None:
            raise ValueError(
                "a conversation needs a tokenizer, which this checkpoint does not have; put its tokenizer.json into its"
                " folder, or use another checkpoint"
            )
        llm.tokenizer.chat_templates.choose(template, has_tools=tools is not None)  # raises if there is none
        self._tokenizer = llm.tokenizer
        self._llm = llm
        self._params = params
        self._messages = messages
        self._rendering: dict[str, Any] = {"chat_template": template, "add_generation_prompt": True}
        self._form = llm.answers.form(tools, chat_template=template, style=style)
        self._has_parts = tools is not None
        if tools is not None:
            self._rendering["tools"] = tools
            if not self._form.use.functions:
                raise ValueError("--tools: the chat template shows no style of calls; give --answer-style NAME")

    def run(self) -> None:
        """Answers each line until the input ends or says /quit."""
        if sys.stdin.isatty():
            with contextlib.suppress(ImportError):  # arrow keys and history, where the system has them
                import readline  # noqa: F401
            show("Ctrl-D ends the conversation, /help lists commands.")
        while (line := self._read_line()) is not None and line.strip() != "/quit":
            try:
                if line.startswith("/"):
                    self._obey(*line[1:].strip().partition(" ")[::2])
                elif line.strip():
                    self._answer(line)
            except (ValueError, OSError) as error:
                print(f"jaxinfer: {error}", file=sys.stderr, flush=True)

    def _read_line(self, prompt: str = "> ") -> str | None:
        if sys.stdin.isatty():
            try:
                return input(prompt)
            except EOFError:
                show("")
                return None
        try:
            line = sys.stdin.readline(MAX_LINE + 1)
        except UnicodeDecodeError:
            raise ValueError("standard input is not text in UTF-8; convert it") from None
        if len(line) > MAX_LINE:
            raise ValueError(f"a line has more than {MAX_LINE:,} characters; give shorter ones")
        return line.removesuffix("\n") if line else None

    def _answer(self, text: str) -> None:
        """Generates the answer to a question, and asks for the results of the calls that it makes.

        The question and all that follows it become messages once the answer has begun.
        """
        messages = [*self._messages, {"role": "user", "content": text}]
        while True:
            rendered = self._tokenizer.render_chat(messages, **self._rendering)
            prompt = self._tokenizer.encode(rendered, add_special_tokens=False)
            params = self._form.sampling_params(self._params, prompt)
            message = self._text_or_calls(prompt, params) if self._has_parts else self._text(prompt, params)
            messages = [*messages, message]
            if "tool_calls" not in message:
                break
            messages += map(self._result_of, message["tool_calls"])
        self._messages = messages

    def _text(self, prompt: Any, params: SamplingParams) -> Message:
        """Shows the answer while it comes, and returns it as a message."""
        pieces: list[str] = []
        with self._stream(prompt, params) as deltas:
            for delta in deltas:
                pieces.append(delta.text)
                show(delta.text, end="")
                _require_no_error(delta)
        return {"role": "assistant", "content": "".join(pieces)}

    def _text_or_calls(self, prompt: Any, params: SamplingParams) -> Message:
        """Shows text, reasoning and calls while they come, and returns them as a message."""
        reader, parts = self._form.reader(params, prompt), []

        def take(new: list[Part]) -> None:
            for part in new:
                _show_part(part, parts[-1] if parts else None)
                parts.append(part)

        with self._stream(prompt, params) as deltas:
            for delta in deltas:
                take(reader.push(delta.token_ids))
                _require_no_error(delta)
            take(reader.close())
        answer = answer_of(parts)
        message: Message = {"role": "assistant", "content": answer.content}
        if answer.reasoning is not None:
            message["reasoning_content"] = answer.reasoning
        if answer.tool_calls:
            message["tool_calls"] = list(map(_call_message, answer.tool_calls))
        return message

    @contextlib.contextmanager
    def _stream(self, prompt: Any, params: SamplingParams) -> Iterator[Iterator[Delta]]:
        """Yields the deltas of an answer. Ctrl-C ends it, and its line ends in any case."""
        stream = self._llm.stream(prompt, params, adapter=next(iter(self._llm.adapters), None))
        try:
            yield stream
        except KeyboardInterrupt:
            show(" ...", end="")
        finally:
            stream.close()  # pyright: ignore[reportAttributeAccessIssue]  it is a generator
            show("")

    def _result_of(self, call: dict[str, Any]) -> Message:
        """Returns the result of a call, a line of the input, as a message."""
        name = call["function"]["name"]
        line = self._read_line(f"{name} returns> ")
        if line is None:
            raise ValueError(f"the input ended before the result of {name}")
        return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": line}

    def _obey(self, command: str, argument: str) -> None:
        argument = argument.strip()
        match command:
            case "system" if argument:
                self._messages = [_system(argument), *_without_system(self._messages)]
            case "undo":
                self._undo()
            case "clear":
                self._messages = self._messages[: len(self._messages) - len(_without_system(self._messages))]
            case "save" if argument:
                text = json.dumps(self._messages, ensure_ascii=False, indent=1)
                as_path("FILE", argument).write_text(text + "\n", encoding="utf-8")
                show(f"{len(self._messages)} messages are in {argument}")
            case "load" if argument:
                self._messages = read_messages(argument)
                show(f"{len(self._messages)} messages")
            case "help":
                show(COMMANDS)
            case _:
                raise ValueError(f"/{command} {shown(argument)} is no command; /help lists them")

    def _undo(self) -> None:
        """Takes back the last question and what follows it. The next prompt finds what stays in the prefix cache."""
        questions = [i for i, message in enumerate(self._messages) if message.get("role") == "user"]
        if not questions:
            raise ValueError("there is no question to take back")
        del self._messages[questions[-1] :]
