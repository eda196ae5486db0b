"""An agent with tools: the model calls functions, reads their results, and answers.

    python docs/examples/agent.py Qwen/Qwen3-8B "How many days is it from 2026-02-10 to 2026-04-01?"

Needs `jaxinfer[grammar]`. Arguments of a call always fit their schema. The bundled model has no idea of tools, so
without a model the first call is required, and its arguments mean nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from datetime import date
from typing import Any

from jaxinfer import LLM, Completion, SamplingParams

PLAIN = (
    "{% for t in tools or [] %}{{ t.function.name }}: {{ t.function.description }}\n{% endfor %}"
    "{% for m in messages %}# {{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %} {{ c.function.name }}"
    "{% endfor %}\n{% endfor %}{% if add_generation_prompt %}# assistant: {% endif %}"
)
DAY = {"type": "string", "pattern": "^20[0-9]{2}-0[1-9]-[12][0-8]$"}


def days_between(first: str, last: str) -> int:
    return (date.fromisoformat(last) - date.fromisoformat(first)).days


TOOLS: Mapping[str, Callable[..., Any]] = {"days_between": days_between}
DESCRIPTIONS = [
    {
        "type": "function",
        "function": {
            "name": "days_between",
            "description": "number of days from one date to another",
            "parameters": {
                "type": "object",
                "properties": {"first": DAY, "last": DAY},
                "required": ["first", "last"],
                "additionalProperties": False,
            },
        },
    }
]


def turns_of(completion: Completion) -> list[dict[str, Any]]:
    """Returns the messages of a turn with calls: the model's own, and the result of each call."""
    calls = [(call, json.loads(call.arguments)) for call in completion.tool_calls]
    own = {
        "role": "assistant",
        "content": completion.content,
        "tool_calls": [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
            for call, arguments in calls
        ],
    }
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": json.dumps(TOOLS[call.name](**arguments))}
        for call, arguments in calls
    ]
    return [own, *results]


def main(model: str | None = None, task: str = "How many days has February 2028?", *, max_turns: int = 4) -> str | None:
    llm = LLM(model, max_num_seqs=8, max_model_len=1024)  # for the bundled model; leave limits out for another
    options: dict[str, Any] = {} if model else {"chat_template": PLAIN, "answer_style": "llama3"}
    messages: list[dict[str, Any]] = [{"role": "user", "content": task}]
    for turn in range(max_turns):
        choice = "required" if turn == 0 and model is None else "none" if turn == max_turns - 1 else "auto"
        params = SamplingParams(max_tokens=512 if model else 64, temperature=0.0, seed=0)
        (completion,) = llm.chat(messages, params, tools=DESCRIPTIONS, tool_choice=choice, **options)
        if not completion.tool_calls:
            return completion.content
        if completion.finish_reason == "length":  # the last call may be cut off
            return None
        turns = turns_of(completion)
        for call, result in zip(completion.tool_calls, turns[1:], strict=True):
            print(f"{call.name}({call.arguments}) -> {result['content']}")
        messages += turns
    return None


if __name__ == "__main__":
    print(main(*sys.argv[1:3]))
