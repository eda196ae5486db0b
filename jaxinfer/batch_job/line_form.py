"""What all lines of a job have in common; free of jax."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from hashlib import blake2b
from string import Formatter
from typing import Any

from jaxinfer.config import SamplingParams
from jaxinfer.names import way_out
from jaxinfer.validation import as_tuple, require, shown

DIGEST_BYTES = 8
SYSTEM_ROLES = ("system", "developer")
# What a record may leave out.
RECORD_FIELDS = (
    *("text", "token_ids", "log_probs", "sampling_log_probs", "top_log_probs", "prompt_log_probs"),
    *("prompt_top_log_probs", "content", "reasoning", "tool_calls", "finish_reason"),
    *("num_prompt_tokens", "seed"),
)


def _names(name: str, values: Any) -> tuple[str, ...]:
    names = as_tuple(name, values, "several names")
    require(all(isinstance(each, str) and each for each in names), name, names, "several names")
    return names


def _filling(name: str, line: Mapping[str, Any]) -> Any:
    """Returns the value of a line's key for a template."""
    if isinstance(value := line.get(name), dict | list | None):
        raise ValueError(f"the prompt needs {name}, which is {shown(value)} here; give text or a number")
    return value


@dataclass(frozen=True, kw_only=True)
class LineForm:
    """How lines become requests beside what they say themselves, and what their records have.

    * `sampling_params`: the parameters that a line leaves out; None takes those that the checkpoint recommends.
    * `prompt`: the prompt of each line, with its keys in braces: "Translate this: {text}". "{{" is a brace. The lines
      then have no prompt of their own.
    * `system`: a system prompt. A line with a prompt in text becomes a conversation, whose answer is the record's
      `content`. A conversation without a system message gets it as its first.
    * `kept`: keys of a line that its record has under `kept`.
    * `fields`: what a record has beside `line`, `custom_id`, `kept`, `error` and `made_by`; None is everything.

    Raises ValueError for another template, and for names that no record has.
    """

    sampling_params: SamplingParams | None = None
    prompt: str | None = None
    system: str | None = None
    kept: Sequence[str] = ()
    fields: Sequence[str] | None = None

    def __post_init__(self) -> None:
        are_params = self.sampling_params is None or isinstance(self.sampling_params, SamplingParams)
        require(are_params, "sampling_params", self.sampling_params, "SamplingParams or None")
        for name in ("prompt", "system"):
            value = getattr(self, name)
            require(value is None or isinstance(value, str), name, value, "text or None")
        object.__setattr__(self, "kept", _names("kept", self.kept))
        if self.fields is not None:
            object.__setattr__(self, "fields", _names("fields", self.fields))
            for name in self.fields:
                answer = way_out(name, RECORD_FIELDS) or f"they are {', '.join(RECORD_FIELDS)}"
                require(name in RECORD_FIELDS, "fields", name, f"fields of a record; {answer}")
        _ = self.columns  # an error comes now

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """The keys of a line that `prompt` has in braces."""
        if self.prompt is None:
            return ()
        way = "text with keys of a line in braces, as in {text}; write {{ and }} for braces"
        try:
            parsed = list(Formatter().parse(self.prompt))
        except ValueError:
            parsed = []
        names = [name for _, name, _, _ in parsed if name is not None]
        are_plain = all(
            name and name.isidentifier() and not form and not how for _, name, form, how in parsed if name is not None
        )
        require(bool(names) and are_plain, "prompt", self.prompt, way)
        return tuple(dict.fromkeys(names))

    @property
    def is_plain(self) -> bool:
        """True if lines say everything themselves, and records have everything."""
        return self == LineForm()

    def identity(self) -> dict[str, str]:
        """Returns what tells records of this form from others, for their `made_by`: nothing if it is plain."""
        if self.is_plain:
            return {}
        values = [getattr(self, field.name) for field in fields(self)]
        return {"lines": blake2b(repr(values).encode(errors="backslashreplace"), digest_size=DIGEST_BYTES).hexdigest()}

    def content_of(self, line: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the prompt or the messages of a line; ValueError if it has its own too, or lacks a key."""
        content: dict[str, Any] = {name: line[name] for name in ("prompt", "messages") if name in line}
        if self.prompt is not None:
            if content:
                raise ValueError("the line has a prompt, and so has the job; give one")
            content["prompt"] = self.prompt.format_map({name: _filling(name, line) for name in self.columns})
        if self.system is None:
            return content
        if "messages" not in content and isinstance(content.get("prompt"), str):
            content = {"messages": [{"role": "user", "content": content["prompt"]}]}
        messages = content.get("messages")
        if isinstance(messages, list):
            has_own = bool(messages) and isinstance(messages[0], dict) and messages[0].get("role") in SYSTEM_ROLES
            content["messages"] = messages if has_own else [{"role": "system", "content": self.system}, *messages]
        return content

    def of_record(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what a record, or a sample in it, has of all that may be left out."""
        return {
            name: value
            for name, value in record.items()
            if self.fields is None or name in self.fields or name not in RECORD_FIELDS
        }


PLAIN = LineForm()
