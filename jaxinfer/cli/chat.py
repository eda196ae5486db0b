"""`jaxinfer chat`: a conversation with the model, line by line, answers as they are generated."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.cli.output import show
from jaxinfer.json_lines import parse_json
from jaxinfer.validation import as_path, shown

if TYPE_CHECKING:
    from jaxinfer import LLM, SamplingParams

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


def read_options(arguments: argparse.Namespace) -> tuple[list[Message], str | None]:
    """Returns the messages to begin with, and the chat template if one is given."""
    messages = [] if arguments.load is None else read_messages(arguments.load)
    if arguments.system is not None:
        messages = [_system(arguments.system), *_without_system(messages)]
    return messages, read_template(arguments.chat_template)


def read_template(template: str | None) -> str | None:
    """Returns the template in a file, or the name of one of the checkpoint's; None for None."""
    if template is not None and (path := as_path("--chat-template", template)).is_file():
        return _read(path)
    return template


def read_messages(name: str) -> list[Message]:
    """Returns the messages in a file of /save."""
    path = as_path("FILE", name)
    if not path.is_file():
        raise ValueError(f"{path} is no file; give one that /save has written")
    try:
        messages = parse_json(_read(path).encode())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); give a file that /save has written") from None
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError(f"{path} is not a list of messages; give a file that /save has written")
    return messages


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


class Chat:
    """A conversation: its messages so far, and the commands that change them."""

    def __init__(self, llm: LLM, params: SamplingParams, messages: list[Message], template: str | None) -> None:
        if llm.tokenizer is None:
            raise ValueError("a conversation needs a tokenizer, which this checkpoint does not have; use another one")
        llm.tokenizer.chat_templates.choose(template, has_tools=False)  # raises if there is none
        self._tokenizer = llm.tokenizer
        self._llm = llm
        self._params = params
        self._messages = messages
        self._template = template

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

    def _read_line(self) -> str | None:
        if sys.stdin.isatty():
            try:
                return input("> ")
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
        """Generates the answer to a question; both become messages once the answer has begun."""
        question = {"role": "user", "content": text}
        prompt = self._tokenizer.apply_chat_template(
            [*self._messages, question], chat_template=self._template, add_generation_prompt=True
        )
        pieces: list[str] = []
        stream = self._llm.stream(prompt, self._params, adapter=next(iter(self._llm.adapters), None))
        try:
            for delta in stream:
                pieces.append(delta.text)
                show(delta.text, end="")
                if delta.completion is not None and delta.completion.error is not None:
                    raise ValueError(f"the answer ended in an error: {delta.completion.error}")
        except KeyboardInterrupt:
            show(" ...", end="")
        finally:
            stream.close()  # pyright: ignore[reportAttributeAccessIssue]  it is a generator
            show("")
        self._messages += [question, {"role": "assistant", "content": "".join(pieces)}]

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
