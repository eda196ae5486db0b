"""Chat templates: from the messages of a conversation to the text that a model was trained on.

A template is a program in Jinja that comes with a checkpoint. It is not trusted: Jinja's sandbox keeps it from
everything but the messages, and it runs in a process of its own, because the sandbox does not end endless loops.
The result is that of `transformers`.
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from threading import Lock
from typing import Any

from jaxinfer.plain_values import is_missing, plain_mapping
from jaxinfer.text.conversation.facts import TemplateFacts, facts_of
from jaxinfer.text.conversation.messages import fit_messages, plain_message
from jaxinfer.text.files import read_object, read_text
from jaxinfer.text.limited_process import EndedError, LimitedProcesses, LimitError
from jaxinfer.validation import as_bool, as_plain, as_tuple, cut, require, shown

MAX_SECONDS = 1  # of processor time
MAX_TRIAL_SECONDS = 3  # for the facts of a template, which renders some 30 short conversations
NUM_PROCESSES = min(max(os.cpu_count() or 1, 2), 4)
NUM_KNOWN, MAX_KNOWN = 16, 2**18  # templates with known facts, and characters of each
MAX_CHARACTERS = 2**24  # of a template and its variables, and of its text
MAX_DEPTH = 100  # of a template's variables
MAX_MESSAGE = 300  # characters of a template's own error
CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "  # marks where the final message ends
DEFAULT, TOOL_USE = "default", "tool_use"  # names of templates
# Variables that every template has, or that Jinja has itself.
OWN = frozenset(
    {
        *("messages", "tools", "documents", "add_generation_prompt"),
        *("continue_final_message", "chat_template", "conversation", "self"),
    }
)
SWITCHES = ("enable_thinking", "thinking")  # which clients turn off for every model


class ChatTemplates:
    """The chat templates of a checkpoint by name, and the special tokens that they may use."""

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._templates = dict(templates)
        self._special_tokens = dict(special_tokens)
        self._processes = LimitedProcesses("jaxinfer.text.chat_template", NUM_PROCESSES)
        self._facts: OrderedDict[str, TemplateFacts] = OrderedDict()
        self._facts_lock = Lock()

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

    def facts(self, template: str) -> TemplateFacts:
        """Returns the facts of a template; ValueError if it is none, or takes too long."""
        with self._facts_lock:
            known = self._facts.get(template)
        if known is None:
            question = {"template": template, "special_tokens": self._special_tokens}
            known = TemplateFacts.from_json(self._ask(question, MAX_TRIAL_SECONDS))
        if len(template) > MAX_KNOWN:
            return known
        with self._facts_lock:
            self._facts[template] = known
            self._facts.move_to_end(template)
            if len(self._facts) > NUM_KNOWN:
                self._facts.popitem(last=False)
        return known

    def render(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        variables: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        **arguments: Any,
    ) -> str:
        """Returns the text of a conversation, as `transformers` does.

        The template gets the messages as they are, and `variables` that it may not read. The other arguments are those
        of `Tokenizer.apply_chat_template`.
        """
        template = self._chosen(chat_template, arguments)
        messages = [plain_message(message) for message in json_objects("messages", conversation)]
        return self._rendered(template, messages, variables or {}, **arguments)

    def render_chat(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        variables: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        **arguments: Any,
    ) -> str:
        """Returns the text of a conversation whose messages come from a client, see `fit_messages`.

        Raises ValueError for messages, documents and `variables` that the template does not read. The other arguments
        are those of `render`.
        """
        template = self._chosen(chat_template, arguments)
        facts, variables = self.facts(template), variables or {}
        self._require_read(template, facts, variables)
        if arguments.get("documents") and "documents" not in facts.variables:
            raise ValueError("documents cannot be honoured: the chat template does not show them; leave them out")
        messages = fit_messages(json_objects("messages", conversation), facts)
        return self._rendered(template, messages, variables, **arguments)

    def _chosen(self, chat_template: str | None, arguments: Mapping[str, Any]) -> str:
        return self.choose(as_plain("chat_template", chat_template), arguments.get("tools") is not None)

    def _require_read(self, template: str, facts: TemplateFacts, variables: Mapping[str, Any]) -> None:
        """Raises ValueError for a variable that a template has already, or does not read."""
        if taken := sorted(variables.keys() & OWN):
            raise ValueError(f"chat_template_kwargs has {shown(taken[0])}; give it as an argument of its own")
        for name, value in variables.items():
            if name in facts.variables or value is None:
                continue
            # A model that never thinks need not be told so.
            is_off = name in SWITCHES and value is False
            if not is_off or any(word in template.lower() for word in ("think", "reasoning")):
                read = sorted(facts.inputs - OWN - self._special_tokens.keys())
                raise ValueError(
                    f"chat_template_kwargs has {shown(name)}, which the chat template does not read; leave it out, or"
                    f" give what it reads: {', '.join(read) or 'nothing beside the conversation'}"
                )

    def _rendered(
        self,
        template: str,
        messages: list[dict[str, Any]],
        variables: Mapping[str, Any],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
    ) -> str:
        add_generation_prompt = as_bool("add_generation_prompt", add_generation_prompt)
        continue_final_message = as_bool("continue_final_message", continue_final_message)
        if continue_final_message and add_generation_prompt:
            raise ValueError(
                "continue_final_message=True with add_generation_prompt=True: the first continues the last message, the"
                " second begins another one; give one of them"
            )
        require(bool(messages), "messages", messages, "at least one message")
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
        text = self._ask(question, MAX_SECONDS)
        return text if final is None else _cut_at_end(text, final)

    def _ask(self, question: dict[str, Any], max_seconds: float) -> Any:
        """Returns the text of a conversation, or the facts of a template."""
        if len(json.dumps(question)) > MAX_CHARACTERS:
            raise ValueError(f"template and messages have more than {MAX_CHARACTERS:,} characters; give fewer")
        try:
            found, error = self._processes.ask(question, max_seconds)
        except LimitError as limit:
            raise ValueError(f"the chat template takes more than {limit}; use another one") from None
        except EndedError as end:
            raise ValueError(f"the chat template ends the process that renders it ({end}); use another one") from None
        if error is not None:
            raise ValueError(f"the chat template cannot render these messages: {error}")
        return found


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


def answers() -> Callable[[dict[str, Any]], tuple[Any, str | None]]:
    """Returns the function of the process, from a template and its variables to a text, or to an error.

    A template alone, with the special tokens that it may use, is answered by its facts.
    """
    import jinja2

    environment = _environment()
    compiled: dict[str, jinja2.Template] = {}

    def answer(question: dict[str, Any]) -> tuple[Any, str | None]:
        source = question["template"]
        try:
            if "special_tokens" in question:
                return facts_of(environment, source, question["special_tokens"]), None
            if source not in compiled:
                compiled.clear()
                compiled[source] = environment.from_string(source)
            text = compiled[source].render(question["variables"])
        except MemoryError:
            raise  # ends the process, as the limit should
        except Exception as error:  # a template can raise any
            return None, f"{type(error).__name__}: {error}"[:MAX_MESSAGE]
        if len(text) > MAX_CHARACTERS:
            size = f"{len(text):,} characters, more than {MAX_CHARACTERS:,}"
            return None, f"the text has {size}; use another chat_template"
        return text, None

    return answer


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
