"""Messages as clients send them, in the form that a chat template reads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

from jaxinfer.text.conversation.facts import DEVELOPER, NO_CONTENTS, ROLES, Place, TemplateFacts
from jaxinfer.validation import cut, shown

REASONING = ("reasoning_content", "thinking", "reasoning")  # names under which a message has its reasoning
SPEAKERS = ("user", "assistant")  # roles that a template need not name
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}  # type -> key of text
# Keys that clients send along, or send back from an answer. A template that does not read one loses nothing.
MESSAGE_KEYS = frozenset(
    {
        *("role", "content", "refusal", "tool_calls", "tool_call_id", "name", "id", "index", "annotations", "parsed"),
        *("cache_control", "weight", "created_at", "metadata", *REASONING),
        *("reasoning_details", "thinking_blocks", "provider_specific_fields"),
    }
)
# Beside the text.
PART_KEYS = frozenset({"type", "id", "index", "annotations", "logprobs", "cache_control", "prompt_cache_breakpoint"})
CALL_KEYS = frozenset({"id", "type", "index", "function", "extra_content", "provider_specific_fields"})
FUNCTION_KEYS = frozenset({"name", "arguments", "parsed_arguments"})


def fit_messages(messages: Sequence[Mapping[str, Any]], facts: TemplateFacts) -> list[dict[str, Any]]:
    """Returns messages, which are JSON, in the form that the template of some facts reads.

    * Contents are parts if the template goes through parts, else one text.
    * A `developer` is `system` to a template that does not name it.
    * Arguments of calls are objects, or texts if the template joins them as such. None at all are an empty object.

    Raises ValueError for anything that the template would leave out: a message by its role and place, a part that is no
    text, and a key that it does not read.
    """
    fitted = []
    place: Place = "first"
    for index, message in enumerate(messages):
        one = _fitted(message, f"messages[{index}]", facts)
        is_system = one.get("role") in ("system", DEVELOPER)
        if is_system or message.get("role") not in SPEAKERS:
            _require_shown(message.get("role"), one.get("role"), f"messages[{index}]", place, facts)
        place = "second" if is_system and place != "late" else "late"
        fitted.append(one)
    return fitted


def plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message without keys that are None, its reasoning under each of its names; as `transformers` does."""
    plain = {key: value for key, value in message.items() if value is not None}
    reasoning = next((plain[name] for name in REASONING if name in plain), None)
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def has_parts(content: Any) -> bool:
    """True if a content is a list of parts, each with its type."""
    return isinstance(content, list) and bool(content) and all(isinstance(p, Mapping) and "type" in p for p in content)


def _fitted(message: Mapping[str, Any], place: str, facts: TemplateFacts) -> dict[str, Any]:
    fitted = plain_message(message)
    role = fitted.get("role")
    if role == DEVELOPER and DEVELOPER not in facts.words:
        fitted["role"] = role = "system"
    if not fitted.get("tool_calls", True):
        del fitted["tool_calls"]  # templates ask if the key is there
    if "content" not in fitted and isinstance(fitted.get("refusal"), str):
        fitted["content"] = fitted["refusal"]
    if "content" in fitted:
        fitted["content"] = _content(fitted["content"], f"{place}.content", str(role), facts)
    if isinstance(calls := fitted.get("tool_calls"), list):
        fitted["tool_calls"] = [_call(call, f"{place}.tool_calls[{i}]", facts) for i, call in enumerate(calls)]
        fitted = {**NO_CONTENTS[facts.no_content], **fitted}
    if not facts.shows_all_keys:
        _require_read(fitted, MESSAGE_KEYS, place, facts)
    return fitted


def _content(content: Any, place: str, role: str, facts: TemplateFacts) -> Any:
    """Returns a content as parts or text. Other JSON stays as it is: some templates show results of calls so."""
    role = role if role in ROLES else "system" if role == DEVELOPER else "user"
    if has_parts(content):
        texts = [_text(part, f"{place}[{index}]") for index, part in enumerate(content)]
        return [{"type": "text", "text": text} for text in texts] if role in facts.parts_roles else "\n".join(texts)
    if isinstance(content, str) and role not in facts.text_roles:
        return [{"type": "text", "text": content}]
    return "" if content == [] else content


def _text(part: Mapping[str, Any], place: str) -> str:
    kind = part["type"]
    key = TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    text = None if key is None else part.get(key)
    if key is None or not isinstance(text, str):
        raise ValueError(
            f"{place} is a part of type {shown(kind)}; the models read text alone, so give parts of type text"
        )
    for unknown in _asking(part, PART_KEYS | {key}):
        raise ValueError(f"{place}.{cut(unknown)}: no template reads this key of a part; leave it out")
    return text


def _call(call: Any, place: str, facts: TemplateFacts) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        # As Hugging Face writes calls too: the name and arguments without a mapping around them.
        if isinstance(call, Mapping) and isinstance(call.get("name"), str) and "name" in facts.words:
            return {**call, "arguments": _arguments(call.get("arguments"), place, facts)}
        raise ValueError(f"{place} is {shown(call)}; give a call with a function")
    _require_read(call, CALL_KEYS, place, facts)
    _require_read(function, FUNCTION_KEYS, f"{place}.function", facts)
    arguments = _arguments(function.get("arguments"), f"{place}.function", facts)
    return {**call, "function": {**function, "arguments": arguments}}


def _arguments(arguments: Any, place: str, facts: TemplateFacts) -> Any:
    text = arguments
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise ValueError(f"{place}.arguments is {shown(arguments)}; give JSON") from None
    if arguments is None:
        arguments = text = {}
    if not isinstance(arguments, Mapping):
        raise ValueError(f"{place}.arguments is {shown(arguments)}; give a JSON object")
    if not facts.has_text_arguments:
        return arguments
    return text if isinstance(text, str) and text else json.dumps(arguments, ensure_ascii=False)


def _require_shown(stated: Any, role: Any, where: str, place: Place, facts: TemplateFacts) -> None:
    """Raises ValueError for a message that the template leaves out; it gets the stated role as `role`."""
    if not isinstance(role, str):
        return
    if stated != "system" and role not in facts.words and facts.drops_roles:
        raise ValueError(
            f"{where}.role is {shown(stated)}, and the chat template leaves such a message out; give one of the roles"
            f" that it names: {', '.join(sorted({*ROLES, DEVELOPER} & facts.words)) or 'none'}"
        )
    if (role, place) in facts.dropped:
        words = {
            "first": "shows none",
            "second": "shows one of them alone",
            "late": "shows them at the beginning alone",
        }
        raise ValueError(
            f"{where}.role is {shown(stated)}: of the messages with instructions, the chat template"
            f" {words[place]}; put the text into {'a message of the user' if place == 'first' else 'the first message'}"
        )


def _require_read(values: Mapping[str, Any], harmless: Set[str], place: str, facts: TemplateFacts) -> None:
    for name in _asking(values, harmless, facts.words):
        raise ValueError(f"{place}.{cut(name)}: the chat template does not read this key; leave it out")


def _asking(values: Mapping[str, Any], *known: Set[str]) -> Iterator[str]:
    """Yields the keys that are in no set of known ones, and ask for something."""
    asking = (name for name, value in values.items() if value not in (None, "", [], {}, False))
    return (name for name in asking if not any(name in names for names in known))
