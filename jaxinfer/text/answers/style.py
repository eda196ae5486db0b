"""A style: how a family of models writes reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from jaxinfer.text.answers.lark import Lark, holding, quoted, regex_of
from jaxinfer.text.answers.parts import Output, Prose
from jaxinfer.text.answers.schemas import SchemaRules
from jaxinfer.text.answers.source import Marks, Reader, Source
from jaxinfer.text.answers.tools import Function, ToolUse

MAX_SPACE = 4  # characters of white space beside a mark
# Where a prompt leaves off: at the beginning of the answer, in its reasoning, or in its content.
Opening = Literal["beginning", "reasoning", "content"]
Functions = Mapping[str, Function]  # those that the answer may call
BlockReader = Callable[[Source, Output, Functions], Generator[None, None, None]]


@dataclass(frozen=True)
class Thinking:
    """How a style writes reasoning."""

    begin: str  # the mark before it
    end: str  # the mark after it
    word: str = ""  # that follows the mark before it
    is_anywhere: bool = False  # else it stands at the beginning of an answer alone

    @property
    def head(self) -> str:
        """The text before the reasoning."""
        return self.begin + self.word


def reasoning_before(style: Style, lark: Lark, use: ToolUse, opening: Opening) -> str:
    """Returns an expression for the reasoning that a style has before content, "" for none."""
    if style.thinking is None or opening == "content":
        return ""
    call = style.call if use.functions else ""
    first = f"{reasoning(lark, style, use, opening, style.thinking.end, 'reasoning', call)} {space(lark)}?"
    return first if opening == "reasoning" else f"({first})?"


def no_content(style: Style, use: ToolUse, opening: Opening) -> list[str]:
    """Returns patterns of the texts that are read as reasoning or as calls."""
    patterns = [holding(style.call)] if use.functions and style.call else []
    if style.thinking is not None and style.thinking.is_anywhere:
        patterns.append(holding(style.thinking.begin))
    elif style.thinking is not None and opening == "beginning":
        patterns.append(f"[ \\t\\r\\n]*{regex_of(style.thinking.head)}(?s:.*)")
    return patterns


@dataclass(frozen=True)
class Style:
    """How a family of models writes its answers.

    * `marks`: the strings that the style gives a meaning; an answer is read from its text with these shown.
    * `is_used_by`: from the text of a chat template to whether its model has the style.
    * `opening`: from the end of a prompt to where that leaves off.
    * `read`: reads an answer.
    * `grammar`: returns the grammar of an answer with tools, None if the style has none for that opening.
    * `thinking`: how the style writes reasoning, None if it has none.
    * `call`: the mark that begins calls.
    * `before`: returns an expression for the text before the content, "" for none.
    * `excluded`: returns patterns of the texts that are no content.
    """

    name: str
    marks: tuple[str, ...]
    is_used_by: Callable[[str], bool]
    opening: Callable[[str], Opening]
    read: Callable[[Source, Output, Functions, Opening], Reader[None]]
    grammar: Callable[[Lark, ToolUse, SchemaRules, Opening], str | None] | None = None
    thinking: Thinking | None = None
    call: str = ""
    before: Callable[[Style, Lark, ToolUse, Opening], str] = reasoning_before
    excluded: Callable[[Style, ToolUse, Opening], list[str]] = no_content


def ends_in(mark: str) -> Callable[[str], Opening]:
    """Returns the `opening` of a style whose templates begin the reasoning with a mark, or leave that to the model."""
    return lambda prompt: "reasoning" if prompt.rstrip().endswith(mark) else "beginning"


def read_blocks(
    source: Source, output: Output, functions: Functions, blocks: Mapping[str, BlockReader]
) -> Reader[None]:
    """Reads content to the end, and the blocks that marks begin in it.

    Text that begins a block and breaks off before that says anything is content, mark included.
    """
    marks = Marks(*blocks)
    while mark := (yield from source.until(marks, output.content.write)):
        source.hold(mark)
        yield from blocks[mark](source, output, functions)
        output.content.write(source.release())


def read_prose(source: Source, output: Output, prose: Prose, *ends: str) -> Reader[str]:
    """Reads a block of text up to one of several marks, which it returns."""
    output.content.end_block()
    output.reasoning.end_block()
    end = yield from source.until(Marks(*ends), prose.write)
    if end:
        prose.end_block()
    return end


def read_thoughts(
    source: Source, output: Output, functions: Functions, end: str, blocks: Mapping[str, BlockReader]
) -> Reader[None]:
    """Reads reasoning up to its end, and the calls that the model writes before that."""
    output.content.end_block()
    output.reasoning.end_block()
    marks = Marks(end, *blocks)
    while mark := (yield from source.until(marks, output.reasoning.write)):
        if mark == end:
            output.reasoning.end_block()
            return
        source.hold(mark)
        yield from blocks[mark](source, output, functions)
        text, found, rest = source.release().partition(end)  # text that is no call may have the end
        output.reasoning.write(text)
        if found:
            source.unread(rest)
            output.reasoning.end_block()
            return


def thoughts_up_to(end: str, blocks: Mapping[str, BlockReader]) -> BlockReader:
    """Returns the reader of a block of reasoning, which may have other blocks in it."""

    def read(source: Source, output: Output, functions: Functions) -> Generator[None, None, None]:
        source.release()
        yield from read_thoughts(source, output, functions, end, blocks)

    return read


def read_named_call(source: Source, output: Output, functions: Functions) -> Reader[bool]:
    """Reads a call that is a JSON object: {"name": …, "arguments": {…}}, in any order and with any other keys.

    Llama's word for the arguments is `parameters`. Returns False if this is no call, or breaks off.
    """
    if not (yield from source.accept("{")):
        return False
    name, early = None, list[str]()  # arguments before the name
    yield from source.skip_space()
    while (key := (yield from source.json_string())) is not None:
        yield from source.skip_space()
        if not (yield from source.accept(":")):
            return False
        yield from source.skip_space()
        is_object = (yield from source.peek()) == "{"
        if key == "name" and name is None:
            name = yield from source.json_string()
            if name not in functions:
                return False
        elif key in ("arguments", "parameters") and source.is_holding and not early and is_object:
            write = early.append
            if name is not None:
                begin_call(source, output, name)
                write = output.arguments
            if not (yield from source.json_value(write)):
                return False
        elif not (yield from source.json_value()):
            return False
        yield from source.skip_space()
        if (yield from source.accept("}")):
            if source.is_holding and name is not None:
                begin_call(source, output, name)
                output.arguments("".join(early) or "{}")
            return name is not None
        if not (yield from source.accept(",")):
            return False
        yield from source.skip_space()
    return False


def read_arguments(source: Source, output: Output, name: str, call_id: str | None = None) -> Reader[bool]:
    """Reads the arguments of a call whose name came before them; False if they are no JSON object, or break off."""
    yield from source.skip_space()
    if (yield from source.peek()) != "{":
        return False
    begin_call(source, output, name, call_id)
    return (yield from source.json_value(output.arguments))


def begin_call(source: Source, output: Output, name: str, call_id: str | None = None) -> None:
    """Takes what the source holds for the beginning of a call."""
    source.release()
    output.begin_call(name, call_id)


def reasoning(lark: Lark, style: Style, use: ToolUse, opening: Opening, mark: str, name: str, *excluded: str) -> str:
    """Returns an expression for reasoning and a mark that ends it; the reasoning has no text with those excluded.

    Nothing begins it again after a prompt that has begun it. `name` is that of its rule.
    """
    thinking, others = style.thinking, [holding(other) for other in excluded if other]
    assert thinking is not None
    if opening == "reasoning":
        return lark.up_to(mark, name, *others)
    # White space that no reasoning follows would be a part of the document.
    most = 0 if use.is_beside_document else MAX_SPACE
    if lark.is_special(thinking.begin):
        head = f"{space(lark) + '?' if most else ''} {lark.mark(thinking.begin)}"
        word = quoted(thinking.word) if thinking.word else ""
        return f"{head} {word} {lark.up_to(mark, name, *others)}"
    return lark.up_to(mark, name, *others, begin=f"[ \\n]{{0,{most}}}{regex_of(thinking.head)}")


def space(lark: Lark) -> str:
    """Returns the name of the terminal for some white space."""
    return lark.rule("SPACE", f"/[ \\n]{{1,{MAX_SPACE}}}/")


def answer_grammar(
    lark: Lark, style: Style, use: ToolUse, opening: Opening, calls: Sequence[str], end: str = "", between: str = ""
) -> str:
    """Returns the grammar of an answer whose calls stand between the style's mark of calls and an end.

    `calls` has an expression for each thing that may stand between the marks. An answer begins with reasoning, which
    calls end as well as its mark does. If no call is required, any text may come next, with or without calls after it.
    """
    call = lark.rule("call", " | ".join(calls))
    rest = f"{call} {end}"
    if use.is_parallel:
        rest += f" ({between} {lark.mark(style.call)} {call} {end})*"
    first, begins, at_once = style.before(style, lark, use, opening), [], ""
    if first and style.thinking is not None:
        if opening == "beginning":
            begins = [f"[ \\n]{{0,{MAX_SPACE}}}{regex_of(style.thinking.head)}(?s:.*)"]
            begins = [holding(style.thinking.begin)] if style.thinking.is_anywhere else begins
        in_reasoning = reasoning(lark, style, use, opening, style.call, "call_in_reasoning", style.thinking.end)
        at_once = f" | {in_reasoning} {rest}"
    if use.is_required:
        return lark.start(f"{first} {lark.mark(style.call)} {rest}{at_once}")
    before = lark.up_to(style.call, "call_mark", *begins)
    content = lark.text_without("CONTENT", holding(style.call), *begins)
    return lark.start(f"{first} ({content}? | {before} {rest}){at_once}")


def json_call(name: str, key: str, arguments: str) -> str:
    """Returns an expression for a call as a JSON object, with the spaces that templates write."""
    head = '{"name": "' + name + f'", "{key}": '
    return f"{quoted(head)} {arguments} {quoted('}')}"
