"""Answers as models write them, by a writer of each style's format, and tokenizers that have the styles' marks."""

from __future__ import annotations

import json
from functools import cache

import tokenizers

from jaxinfer.text.answers.parts import Answer, ToolCall
from jaxinfer.text.answers.styles.table import STYLES
from jaxinfer.text.tokenizer import Tokenizer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "maxLength": 8},
                    "days": {"type": "integer", "minimum": 1, "maximum": 9},
                    "units": {"enum": ["C", "F", None]},
                    "hours": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
                    "place": {"$ref": "#/$defs/place"},
                },
                "required": ["city"],
                "$defs": {
                    "place": {
                        "type": "object",
                        "properties": {"x": {"type": "number", "minimum": 0, "maximum": 1}, "y": {"type": "null"}},
                        "required": ["x"],
                        "additionalProperties": False,
                    }
                },
            },
        },
    },
    {"type": "function", "function": {"name": "stop-all"}},
]
SCHEMAS = {
    "get_weather": TOOLS[0]["function"]["parameters"],  # pyright: ignore[reportArgumentType]
    "stop-all": {"type": "object", "additionalProperties": False},
}
TOOL_STYLES = [name for name, style in STYLES.items() if style.grammar is not None]
ONE_CALL = ("gpt_oss", "llama3")  # styles of which an answer has one call
NO_REASONING = ("llama3", "functiongemma")


def call(name: str, **arguments: object) -> ToolCall:
    return ToolCall("", name, json.dumps(arguments, ensure_ascii=False))


def _in_gemma(value: object, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_in_gemma(item, quote)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_in_gemma(item, quote) for item in value) + "]"
    return json.dumps(value)


def _in_blocks(one: ToolCall) -> str:
    values = {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in json.loads(one.arguments).items()
    }
    blocks = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())
    return f"<tool_call>\n<function={one.name}>\n{blocks}</function>\n</tool_call>"


def written(style: str, answer: Answer) -> str:
    """The text of an answer, as the chat templates of the style write it, end tokens left out."""
    reasoning, content, calls = answer.reasoning, answer.content, answer.tool_calls
    match style:
        case "hermes" | "thinking":
            objects = [f'{{"name": "{c.name}", "arguments": {c.arguments}}}' for c in calls]
            text = "" if reasoning is None else f"<think>\n{reasoning}\n</think>\n\n"
            blocks = [f"<tool_call>\n{one}\n</tool_call>" for one in objects]
            return "\n".join([text + content, *blocks] if text + content else blocks)
        case "qwen_coder":
            blocks = [_in_blocks(one) for one in calls]
            text = "" if reasoning is None else f"<think>\n{reasoning}\n</think>\n\n"
            return "\n".join([text + content, *blocks] if text + content else blocks)
        case "llama3":
            objects = [f'{{"name": "{c.name}", "parameters": {c.arguments}}}' for c in calls]
            return content + ("<|python_tag|>" if content and calls else "") + "; ".join(objects)
        case "mistral" | "mistral_list":
            text = ("" if reasoning is None else f"[THINK]{reasoning}[/THINK]") + content
            if style == "mistral":
                return text + "".join(f"[TOOL_CALLS]{c.name}[ARGS]{c.arguments}" for c in calls)
            objects = [f'{{"name": "{c.name}", "arguments": {c.arguments}}}' for c in calls]
            return text + (f"[TOOL_CALLS][{', '.join(objects)}]" if calls else "")
        case "deepseek":
            text = ("" if reasoning is None else f"<think>{reasoning}</think>") + content
            each = [f"<｜tool▁call▁begin｜>{c.name}<｜tool▁sep｜>{c.arguments}<｜tool▁call▁end｜>" for c in calls]
            return text + (f"<｜tool▁calls▁begin｜>{''.join(each)}<｜tool▁calls▁end｜>" if calls else "")
        case "gpt_oss":
            messages = [] if reasoning is None else [f"<|channel|>analysis<|message|>{reasoning}<|end|>"]
            if content:
                on = "commentary" if calls else "final"
                messages.append(f"<|channel|>{on}<|message|>{content}" + ("<|end|>" if calls else ""))
            messages += [
                f"<|channel|>commentary to=functions.{c.name} <|constrain|>json<|message|>{c.arguments}" for c in calls
            ]
            return "<|start|>assistant".join(messages)
        case "gemma" | "functiongemma":
            quote, begin, end = ('<|"|>', "<|tool_call>", "<tool_call|>")
            if style == "functiongemma":
                quote, begin, end = ("<escape>", "<start_function_call>", "<end_function_call>")
            text = ("" if reasoning is None else f"<|channel>thought\n{reasoning}<channel|>") + content
            each = [f"{begin}call:{c.name}{_in_gemma(json.loads(c.arguments), quote)}{end}" for c in calls]
            return text + "".join(each)
    raise ValueError(style)


@cache
def tokenizer_with(style: str, kind: str) -> Tokenizer:
    """The tokenizer of the small model, whose end token is 0, with the marks of a style.

    They are special tokens, other added tokens, as Qwen3 has them, or text.
    """
    backend = tokenizers.Tokenizer.from_file("jaxinfer/assets/tiny/tokenizer.json")
    marks = [tokenizers.AddedToken(mark, special=kind == "special", normalized=False) for mark in STYLES[style].marks]
    if kind != "text":
        backend.add_tokens(marks)
    return Tokenizer(backend)
