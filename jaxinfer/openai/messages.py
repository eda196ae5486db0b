"""The messages of a body: the roles and contents that OpenAI's API demands.

Below every door, `jaxinfer.text.conversation.messages` gives them the form that the chat template reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.text.conversation.messages import has_parts
from jaxinfer.validation import shown


def require_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raises ValueError for a message without a role or content, and for content that is neither text nor parts."""
    for index, message in enumerate(messages):
        place, role, content = f"messages[{index}]", message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            raise ValueError(f"{place}.role is {shown(role)}; give a role, such as system, user, assistant or tool")
        if content is None and not any(message.get(name) for name in ("tool_calls", "refusal")):
            raise ValueError(f"{place} has neither content nor tool_calls; give one")
        if not (content is None or content == [] or isinstance(content, str) or has_parts(content)):
            raise ValueError(f"{place}.content is {shown(content)}; give text, or a list of parts with their types")
        if not isinstance(calls := message.get("tool_calls") or [], list):
            raise ValueError(f"{place}.tool_calls is {shown(calls)}; give a list of calls")
