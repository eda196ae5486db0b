"""Chat templates: from the messages of a conversation to the text that a model was trained on.

A template is a program in Jinja that comes with a checkpoint. It is not trusted: Jinja's sandbox keeps it from
everything but the messages, and it runs in a process of its own, because the sandbox does not end endless loops.
The result is that of `transformers`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jaxinfer.plain_values import is_missing, plain_mapping
from jaxinfer.text.files import read_object, read_text
from jaxinfer.text.limited_process import EndedError, LimitedProcess, LimitError
from jaxinfer.validation import as_bool, as_plain, as_tuple, cut, require, shown

MAX_SECONDS = 1
MAX_CHARACTERS = 2**24  # of a template and its variables, and of its text
MAX_DEPTH = 100  # of a template's variables
MAX_MESSAGE = 300  # characters of a template's own error
REASONING = ("reasoning_content", "thinking", "reasoning")  # names under which a message has its reasoning
CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "  # marks where the final message ends
DEFAULT, TOOL_USE = "default", "tool_use"  # names of templates


class ChatTemplates:
    """The chat templates of a checkpoint by name, and the special tokens that they may use."""

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._templates = dict(templates)
        self._special_tokens = dict(special_tokens)
        self._process = LimitedProcess("jaxinfer.text.chat_template")

    @classmethod
    def from_path(cls, path: Path, special_tokens: Mapping[str, str]) -> ChatTemplates:
        """Reads the templates in a checkpoint's folder, if there are any.

        A template lies in chat_template.jinja, in additional_chat_templates, or in tokenizer_config.json.
        """
        files = {file.stem: file for file in sorted((path / "additional_chat_templates").glob("*.jinja"))}
        if (path / "chat_template.jinja").is_file():
            files[DEFAULT] = path / "chat_template.jinja"
        templates = {name: read_text(file) for name, file in files.items()}
        if not templates:
            config = path / "tokenizer_config.json"
            stated = read_object(config).get("chat_template")
            templates = _by_name(stated, config) if stated is not None else {}
        return cls(templates, special_tokens)

    def __bool__(self) -> bool:
        return bool(self._templates)

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """The special tokens that templates may use, by names such as "eos_token"."""
        return self._special_tokens

    def choose(self, template: str | None, has_tools: bool) -> str:
        """Returns the template to use: `template` itself or its name here, else the default one."""
        if template is not None:
            require(isinstance(template, str), "chat_template", template, "a template, or the name of one")
            return self._templates.get(template, template)
        if not self._templates:
            raise ValueError(
                "this checkpoint has no chat template; give one as chat_template=..., or a prompt instead of messages"
            )
        for name in (TOOL_USE, DEFAULT) if has_tools else (DEFAULT,):
            if name in self._templates:
                return self._templates[name]
        names = ", ".join(sorted(self._templates))
        raise ValueError(f"this checkpoint has no default chat template; give chat_template=... as one of {names}")

    def render(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """Returns the text of a conversation; the arguments are those of `Tokenizer.apply_chat_template`."""
        add_generation_prompt = as_bool("add_generation_prompt", add_generation_prompt)
        continue_final_message = as_bool("continue_final_message", continue_final_message)
        if continue_final_message and add_generation_prompt:
            raise ValueError(
                "continue_final_message=True with add_generation_prompt=True: the first continues the last message, the"
                " second begins another one; give one of them"
            )
        template = self.choose(as_plain("chat_template", chat_template), tools is not None)
        messages = [_message(message) for message in json_objects("messages", conversation)]
        require(bool(messages), "messages", conversation, "at least one message")
        final = _mark_end(messages[-1], template) if continue_final_message else None
        question = {
            "template": template,
            "variables": {
                **self._special_tokens,
                **{name: _as_json(value, f"chat_template variable {name}") for name, value in variables.items()},
                "messages": messages,
                "tools": None if tools is None else json_objects("tools", tools),
                "documents": None if documents is None else json_objects("documents", documents),
                "add_generation_prompt": add_generation_prompt,
            },
        }
        text = self._ask(question)
        return text if final is None else _cut_at_end(text, final)

    def _ask(self, question: dict[str, Any]) -> str:
        if len(json.dumps(question)) > MAX_CHARACTERS:
            raise ValueError(f"template and messages have more than {MAX_CHARACTERS:,} characters; give fewer")
        try:
            text, error = self._process.ask(question, MAX_SECONDS)
        except LimitError as limit:
            raise ValueError(f"the chat template takes more than {limit}; use another one") from None
        except EndedError as end:
            raise ValueError(f"the chat template ends the process that renders it ({end}); use another one") from None
        if error is not None:
            raise ValueError(f"the chat template cannot render these messages: {error}")
        return text


def _by_name(stated: Any, file: Path) -> dict[str, str]:
    """Returns the templates of tokenizer_config.json: one, or a list of objects with names."""
    pairs = [(DEFAULT, stated)] if isinstance(stated, str) else stated
    if isinstance(stated, list) and all(isinstance(entry, dict) for entry in stated):
        pairs = [(entry.get("name"), entry.get("template")) for entry in stated]
    is_right = isinstance(pairs, list) and all(isinstance(text, str) for pair in pairs for text in pair)
    if not is_right:
        raise ValueError(f"chat_template={shown(stated)} in {file} is neither text nor a list of named templates")
    return dict(pairs)


def json_objects(name: str, values: Any) -> list[dict[str, Any]]:
    """Returns a list of mappings as JSON has them; ValueError with `name` for any other value."""
    values = as_tuple(name, values, "a list of mappings", plain_mapping)
    for index, value in enumerate(values):
        if callable(value):
            raise ValueError(f"{name}[{index}]={shown(value)} is a function; give its JSON schema, as a mapping")
        require(
            isinstance(value, Mapping), f"{name}[{index}]", value, "a mapping, such as a message with role and content"
        )
    return [_as_json(dict(value), f"{name}[{index}]", depth=1) for index, value in enumerate(values)]


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message as templates expect it: without keys that are None, its reasoning under each of its names."""
    message = {key: value for key, value in message.items() if value is not None}
    reasoning = next((message[name] for name in REASONING if name in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _as_json(value: Any, place: str, depth: int = 0) -> Any:
    """Returns a value as JSON has it; ValueError for any other. A template gets no object with methods of its own."""
    if depth > MAX_DEPTH:
        raise ValueError(f"{cut(place)} is nested more than {MAX_DEPTH} deep; give flatter values")
    value = as_plain(place, value)
    if isinstance(value, Mapping):
        for key in value:
            require(isinstance(key, str), f"a key of {place}", key, "text")
        return {key: _as_json(item, f"{place}.{key}", depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(item, f"{place}[{index}]", depth + 1) for index, item in enumerate(value)]
    if value is not None and is_missing(value):
        raise ValueError(f"{cut(place)} {shown(value)} is a missing value; fill it, or leave it out")
    is_scalar = value is None or isinstance(value, str | bool | int | float)
    require(is_scalar, place, value, "text, a number, a truth value, None, or a list or mapping of these")
    return value


def _mark_end(message: dict[str, Any], template: str) -> str:
    """Appends a mark to the text of the final message; returns that text without the mark."""
    content = message.get("content")
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
        if parts:
            last = parts[-1]
            message["content"] = [
                {**part, "text": part["text"] + CONTINUED} if part is last else part for part in content
            ]
            return last["text"]
    if not isinstance(content, str):
        raise ValueError(
            "continue_final_message=True, but the final message has no text to continue; give it a content"
        )
    message["content"] = content + CONTINUED
    return content


def _cut_at_end(text: str, final: str) -> str:
    mark = text.rfind(CONTINUED.strip())
    if mark < 0 or final.strip() not in text:
        raise ValueError("continue_final_message=True, but the chat template does not show the final message as it is")
    is_whole = text[mark : mark + len(CONTINUED)] == CONTINUED
    # Without its space the mark stands at the end of a text that the template has stripped.
    return text[:mark] if is_whole else text[:mark].rstrip()


def answers() -> Callable[[dict[str, Any]], tuple[str | None, str | None]]:
    """Returns the function of the process, from a template and its variables to a text, or to an error."""
    import jinja2

    environment = _environment()
    compiled: dict[str, jinja2.Template] = {}

    def render(question: dict[str, Any]) -> tuple[str | None, str | None]:
        source = question["template"]
        try:
            if source not in compiled:
                compiled.clear()
                compiled[source] = environment.from_string(source)
            text = compiled[source].render(**question["variables"])
        except MemoryError:
            raise  # ends the process, as the limit should
        except Exception as error:  # a template can raise any
            return None, f"{type(error).__name__}: {error}"[:MAX_MESSAGE]
        if len(text) > MAX_CHARACTERS:
            size = f"{len(text):,} characters, more than {MAX_CHARACTERS:,}"
            return None, f"the text has {size}; use another chat_template"
        return text, None

    return render


def _environment() -> Any:
    """Returns Jinja's sandbox with what templates may use beside Jinja: as in `transformers`."""
    import jinja2
    from jinja2 import ext, nodes, sandbox

    class Generation(ext.Extension):
        """Marks what the assistant generated; only training needs the marks."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    class Environment(sandbox.ImmutableSandboxedEnvironment):
        def unsafe_undefined(self, obj: Any, attribute: str) -> Any:  # in Jinja's own it may also be empty text
            raise jinja2.exceptions.SecurityError(f"access to {attribute!r} of a {type(obj).__name__} is unsafe")

    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
