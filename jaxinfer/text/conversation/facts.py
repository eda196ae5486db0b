"""Facts of a chat template: the names that it reads, and the forms in which it takes messages.

The names come from the template's code. The forms come from short conversations that the template renders on trial.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

ROLES = ("system", "user", "assistant", "tool")
DEVELOPER = "developer"  # the name of `system` in newer clients
Place = Literal["first", "second", "late"]  # of a system message: at the beginning, after such, after others

A, B = "jxaa", "jxbb"  # texts that no template has of its own
ARGUMENTS = {A: B}
# The contents that a message of calls alone may need: none at all, null, or an empty text.
NO_CONTENTS: tuple[dict[str, Any], ...] = ({}, {"content": None}, {"content": ""})


@dataclass(frozen=True)
class TemplateFacts:
    """Facts of one template."""

    variables: frozenset[str] = frozenset()  # that it may read
    inputs: frozenset[str] = frozenset()  # of these, all but the names that it sets before it reads them
    words: frozenset[str] = frozenset()  # names of attributes, and texts, in its code
    parts_roles: frozenset[str] = frozenset()  # of messages that may have a list of parts
    text_roles: frozenset[str] = frozenset(ROLES)  # of messages that may have a text
    has_text_arguments: bool = False  # calls have the text of their arguments, not an object
    no_content: int = 0  # of a message of calls alone, an index of NO_CONTENTS
    drops_roles: bool = False  # messages of roles that the template does not name
    dropped: frozenset[tuple[str, Place]] = frozenset()  # system messages, by role and place
    shows_all_keys: bool = False  # of a message

    @classmethod
    def from_json(cls, answer: Mapping[str, Any]) -> TemplateFacts:
        """Returns the facts that `facts_of` found, after their way through JSON."""
        sets = {name: frozenset(answer[name]) for name in ("variables", "inputs", "words", "parts_roles", "text_roles")}
        return cls(**{**answer, **sets, "dropped": frozenset((role, place) for role, place in answer["dropped"])})


def facts_of(environment: Any, source: str, special_tokens: Mapping[str, str]) -> dict[str, Any]:
    """Returns the fields of `TemplateFacts`, as JSON has them. Raises what Jinja raises for what is no template."""
    from jinja2 import meta, nodes

    tree = environment.parse(source)
    words = {node.attr for node in tree.find_all(nodes.Getattr)}
    words |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    variables = meta.find_undeclared_variables(tree)
    written = {node.name for node in tree.find_all(nodes.Name) if node.ctx != "load"}
    tested = {test.node.name for test in tree.find_all(nodes.Test) if isinstance(test.node, nodes.Name)}
    template = environment.from_string(source)

    def shown(*messages: dict[str, Any]) -> str | None:
        """Returns the text of some messages, None if the template does not take them."""
        fixed = {"messages": list(messages), "tools": None, "documents": None, "add_generation_prompt": False}
        try:
            return template.render({**special_tokens, **fixed})
        except MemoryError:
            raise  # ends the process, as the limit should
        except Exception:  # a template can raise any
            return None

    takes_text = A in (shown({"role": "user", "content": A}) or "")
    probe = _Probe(shown, has_parts=not takes_text and _is_shown(shown({"role": "user", "content": _parts()})))
    has_text_arguments, no_content = _calls(probe)
    of_parts = {role for role in ROLES if _is_shown(probe.content(role, _parts(), has_text_arguments))}
    of_text = {role for role in ROLES if role not in of_parts or A in probe.content(role, A, has_text_arguments)}
    return {
        "variables": sorted(variables),
        "inputs": sorted(variables - (written - tested)),
        "words": sorted(words),
        "parts_roles": sorted(of_parts),
        "text_roles": sorted(of_text),
        "has_text_arguments": has_text_arguments,
        "no_content": no_content,
        "drops_roles": _drops(probe, "jxrole"),
        "dropped": _dropped(probe, ("system", DEVELOPER) if DEVELOPER in words else ("system",)),
        "shows_all_keys": B in (shown({**probe.message("user"), "jxkey": B}) or ""),
    }


def _parts() -> list[dict[str, str]]:
    return [{"type": "text", "text": A}, {"type": "text", "text": B}]


def _is_shown(text: str | None) -> bool:
    """True if a text has both parts, and not in quotes, as Python and JSON write them out."""
    return text is not None and A in text and B in text and not any(f"{quote}{A}{quote}" in text for quote in "'\"")


@dataclass(frozen=True)
class _Probe:
    """Renders conversations whose contents are texts, or parts for a template that takes nothing else."""

    shown: Callable[..., str | None]
    has_parts: bool

    def message(self, role: str, text: str = "hello") -> dict[str, Any]:
        return {"role": role, "content": [{"type": "text", "text": text}] if self.has_parts else text}

    def content(self, role: str, content: Any, has_text_arguments: bool) -> str:
        """Returns the text of a conversation in which the message of a role has a content, "" for an error."""
        user = self.message("user")
        if role == "tool":
            call = _call(json.dumps(ARGUMENTS) if has_text_arguments else ARGUMENTS, self.message("assistant", "yes"))
            ids = {"tool_call_id": "call00001", "name": "jxname"}
            return self.shown(user, call, {"role": role, "content": content, **ids}) or ""
        message = {"role": role, "content": content}
        turns = {"system": (message, user), "assistant": (user, message, user)}
        return self.shown(*turns.get(role, (message,))) or ""


def _call(arguments: Any, message: Mapping[str, Any]) -> dict[str, Any]:
    call = {"id": "call00001", "type": "function", "function": {"name": "jxname", "arguments": arguments}}
    return {"role": "assistant", **message, "tool_calls": [call]}


def _calls(probe: _Probe) -> tuple[bool, int]:
    """Returns `has_text_arguments` and `no_content`."""
    user, result = probe.message("user"), probe.message("tool", "dry")
    result |= {"tool_call_id": "call00001", "name": "jxname"}

    def shown_call(arguments: Any, message: Mapping[str, Any]) -> str | None:
        call = _call(arguments, message)
        text = probe.shown(user, call, result)
        return probe.shown(user, call) if text is None else text

    text, answer = json.dumps(ARGUMENTS), probe.message("assistant", "yes")
    of_object, of_text = (shown_call(arguments, answer) or "" for arguments in (ARGUMENTS, text))
    is_object_right = A in of_object and f"'{A}': '{B}'" not in of_object  # as Python writes it, which no model does
    has_text_arguments = not is_object_right and text in of_text
    arguments = text if has_text_arguments else ARGUMENTS
    taken = (index for index, content in enumerate(NO_CONTENTS) if shown_call(arguments, content) is not None)
    return has_text_arguments, next(taken, 0)


def _drops(probe: _Probe, role: str) -> bool:
    message, user = probe.message(role, B), probe.message("user")
    texts = probe.shown(user, message), probe.shown(message, user)
    return any(text is not None and B not in text for text in texts)


def _dropped(probe: _Probe, roles: tuple[str, ...]) -> list[tuple[str, Place]]:
    """Returns the roles and places of system messages that the template leaves out without an error."""
    dropped: list[tuple[str, Place]] = []
    user, answer = probe.message("user"), probe.message("assistant", "yes")
    for role in roles:
        message = probe.message(role, B)
        conversations: dict[Place, list[tuple[dict[str, Any], ...]]] = {
            "first": [(message, user)],
            "second": [(probe.message(role, A), message, user)],
            "late": [(user, message), (user, answer, message, user)],
        }
        for place, tried in conversations.items():
            texts = [probe.shown(*messages) for messages in tried]
            if any(text is not None and B not in text for text in texts):
                dropped.append((role, place))
    return dropped
