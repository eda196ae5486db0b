"""GPT-OSS: an answer is a sequence of messages on channels (the harmony format).

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>
    <|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>
     to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>

The first header begins in the prompt. The channel `analysis` has reasoning, `final` has content, and `commentary` has
calls and the content before them. The mark after a call ends the answer, so the grammar has one call.
"""

from __future__ import annotations

import re

from jaxinfer.text.answers.lark import Lark, holding, quoted
from jaxinfer.text.answers.parts import Output
from jaxinfer.text.answers.schemas import SchemaRules
from jaxinfer.text.answers.source import Marks, Reader, Source
from jaxinfer.text.answers.style import Functions, Opening, Style, Thinking, read_arguments, read_prose
from jaxinfer.text.answers.tools import ToolUse

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
OTHER_ENDS = (CALL, RETURN, START)  # of a message
ENDS = (END, *OTHER_ENDS)
RECIPIENT, ON_CHANNEL = re.compile(r"\sto=functions\.([A-Za-z0-9_.-]+)"), re.compile(r"<\|channel\|>\s*(\w+)")
WORDS = re.compile(r"[^<]*")
MAX_WORDS = 256  # characters between two marks of a header


def _opening(prompt: str) -> Opening:
    header = prompt[prompt.rfind(START) :] if START in prompt else ""
    if MESSAGE not in header:
        return "beginning"
    return "reasoning" if _channel(header) == "analysis" else "content"


def _channel(header: str) -> str:
    found = ON_CHANNEL.search(header)
    return "" if found is None else found[1]


def _read(source: Source, output: Output, functions: Functions, opening: Opening) -> Reader[None]:
    mark, held = START, ""  # the prompt has the first mark
    if opening != "beginning":
        prose = output.reasoning if opening == "reasoning" else output.content
        mark = yield from source.until(Marks(*ENDS), prose.write)
    while mark:
        if mark == START:
            source.hold(held)
            mark = yield from _read_message(source, output, functions)
        else:
            mark = yield from source.until(Marks(START), output.content.write)
        held = START


def _read_message(source: Source, output: Output, functions: Functions) -> Reader[str]:
    """Reads a header and the text after it; returns the mark that ends it."""
    header = yield from _read_header(source)
    if header is None:
        output.content.write(source.release())
        return (yield from source.until(Marks(*ENDS), output.content.write))
    recipient = RECIPIENT.search(header)
    if recipient is not None and recipient[1] in functions:
        yield from read_arguments(source, output, recipient[1])
        output.content.write(source.release())
        return (yield from source.until(Marks(*ENDS), output.content.write))
    source.release()
    prose = output.reasoning if _channel(header) == "analysis" else output.content
    return (yield from read_prose(source, output, prose, *ENDS))


def _read_header(source: Source) -> Reader[str | None]:
    """Reads up to the mark before the text of a message; None if this is no header."""
    header = " " + (yield from source.word(WORDS, MAX_WORDS))
    others = [word for word in header.split() if word != "assistant" and not word.startswith("to=")]
    if others or len(header) > MAX_WORDS:
        return None
    while not (yield from source.accept(MESSAGE)):
        for mark in (CHANNEL, CONSTRAIN):
            if (yield from source.accept(mark)):
                words = yield from source.word(WORDS, MAX_WORDS)
                header += mark + words
                break
        else:
            return None
    return header


def _grammar(lark: Lark, use: ToolUse, rules: SchemaRules, opening: Opening) -> str | None:
    if opening == "content":
        return None
    channel, constrain, message = map(lark.mark, (CHANNEL, CONSTRAIN, MESSAGE))
    heads = lark.rule("format", f"{quoted(' ')} | {quoted(' ')}? {constrain} {quoted('json')} | {quoted(' json')}")
    calls = []
    for name, function in use.functions.items():
        to, commentary = f" to=functions.{name}", quoted("commentary")
        head = f"({channel} {quoted('commentary' + to)} | {quoted(to)} {channel} {commentary})"
        calls.append(f"{head} {heads}? {message} {rules.json(name, function.parameters)}")
    call = lark.rule("call", " | ".join(calls))
    begun, analysis = _analysis(lark, opening)
    if use.is_required:
        return lark.start(f"{begun} {analysis}* {call}")
    preamble = lark.rule("preamble", f"{channel} {quoted('commentary')} {message} {_rest_of_message(lark)}")
    final = lark.rule("final", f"{channel} {quoted('final')} {message} {lark.text_without('FINAL', holding(*ENDS))}?")
    return lark.start(f"{begun} ({analysis} | {preamble})* ({call} | {final})")


def _analysis(lark: Lark, opening: Opening) -> tuple[str, str]:
    """Returns expressions for the rest of the reasoning that the prompt has begun, and for a message of reasoning."""
    rest = _rest_of_message(lark)
    head = f"{lark.mark(CHANNEL)} {quoted('analysis')} {lark.mark(MESSAGE)}"
    return rest if opening == "reasoning" else "", lark.rule("analysis", f"{head} {rest}")


def _rest_of_message(lark: Lark) -> str:
    return f"{lark.up_to(END, 'message', holding(*OTHER_ENDS))} {lark.mark(START)} {quoted('assistant')}"


def _before(style: Style, lark: Lark, use: ToolUse, opening: Opening) -> str:
    if opening == "content":
        return ""
    begun, analysis = _analysis(lark, opening)
    return f"{begun} {analysis}* {lark.mark(CHANNEL)} {quoted('final')} {lark.mark(MESSAGE)}"


HARMONY = Style(
    name="gpt_oss",
    marks=(START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN),
    is_used_by=lambda template: CHANNEL in template and MESSAGE in template,
    opening=_opening,
    read=_read,
    grammar=_grammar,
    thinking=Thinking(CHANNEL, END, f"analysis{MESSAGE}", is_anywhere=True),
    before=_before,
    excluded=lambda style, use, opening: [holding(*ENDS)],
)
