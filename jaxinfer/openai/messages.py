"""The messages of OpenAI's API as chat templates expect them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.validation import shown

TEXT_PARTS = {"text": "text", "refusal": "refusal", "input_text": "text"}  # type of a part -> its key with text


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns messages with contents of text, arguments of tool calls as objects, and no keys that are null.

    Raises ValueError for a message without a role, and for content that is no text.
    """
    return [_plain(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _plain(message: Mapping[str, Any], place: str) -> dict[str, Any]:
    plain = {key: value for key, value in message.items() if value is not None}
    role = plain.get("role")
    if not isinstance(role, str) or not role:
        raise ValueError(f"{place}.role is {shown(role)}; give a role, such as system, user, assistant or tool")
    if "content" in plain:
        plain["content"] = _text(plain["content"], f"{place}.content")
    elif "tool_calls" not in plain and "refusal" not in plain:
        raise ValueError(f"{place} has neither content nor tool_calls; give one")
    if "tool_calls" in plain:
        plain["tool_calls"] = _calls(plain["tool_calls"], f"{place}.tool_calls")
    return plain


def _text(content: Any, place: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"{place} is {shown(content)}; give text, or a list of parts with text")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get(TEXT_PARTS[kind]) if isinstance(kind, str) and kind in TEXT_PARTS else None
        if not isinstance(text, str):
            raise ValueError(
                f"{place}[{index}] is {shown(part)}; the models read text alone, so give parts of type text"
            )
        texts.append(text)
    return "\n".join(texts)


def _calls(calls: Any, place: str) -> list[Any]:
    if not isinstance(calls, list):
        raise ValueError(f"{place} is {shown(calls)}; give a list of calls")
    return [_call(call, f"{place}[{index}]") for index, call in enumerate(calls)]


def _call(call: Any, place: str) -> Any:
    """Returns a call whose arguments are an object, which templates write in the way of their model."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise ValueError(f"{place} is {shown(call)}; give a call with a function")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise ValueError(f"{place}.function.arguments is {shown(arguments)}; give JSON") from None
    if arguments is not None and not isinstance(arguments, Mapping):
        raise ValueError(f"{place}.function.arguments is {shown(arguments)}; give a JSON object")
    return {**call, "function": {**function, "arguments": arguments}}
