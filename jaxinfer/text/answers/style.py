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

# Where a prompt leaves off: at the beginning of the answer, in its reasoning, or in its content.
Opening = Literal["beginning", "reasoning", "content"]
Functions = Mapping[str, Function]  # those that the answer may call
BlockReader = Callable[[Source, Output, Functions], Generator[None, None, None]]


@dataclass(frozen=True)
class Style:
    """How a family of models writes its answers.

    * `marks`: the strings that the style gives a meaning; an answer is read from its text with these shown.
    * `is_used_by`: from the text of a chat template to whether its model has the style.
    * `opening`: from the end of a prompt to where that leaves off.
    * `read`: reads an answer.
    * `grammar`: returns the grammar of an answer with tools, None if the style has none for that opening.
    """

    name: str
    marks: tuple[str, ...]
    is_used_by: Callable[[str], bool]
    opening: Callable[[str], Opening]
    read: Callable[[Source, Output, Functions, Opening], Reader[None]]
    grammar: Callable[[Lark, ToolUse, SchemaRules, Opening], str | None] | None = None


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


def reasoning_up_to(*ends: str) -> BlockReader:
    """Returns the reader of a block of reasoning."""

    def read(source: Source, output: Output, functions: Functions) -> Generator[None, None, None]:
        source.release()
        yield from read_prose(source, output, output.reasoning, *ends)

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


def thinking(lark: Lark, opening: Opening, begin: str, end: str) -> tuple[str, str]:
    """Returns an expression for the reasoning that comes first, and a pattern of texts that begin it.

    There is none after a prompt that ends in content, and nothing begins it again after one that has begun it.
    """
    if opening == "content":
        return "", ""
    if opening == "reasoning":
        return f"{lark.up_to(end, 'reasoning')} {space(lark)}?", ""
    begins = f"[ \\n]{{0,4}}{regex_of(begin)}(?s:.*)"
    if lark.is_special(begin):
        return f"({space(lark)}? {lark.mark(begin)} {lark.up_to(end, 'reasoning')} {space(lark)}?)?", begins
    lark.rule("reasoning[lazy]", f"/[ \\n]{{0,4}}{regex_of(begin)}(?s:.*){regex_of(end)}/")
    return f"(reasoning {space(lark)}?)?", begins


def space(lark: Lark) -> str:
    """Returns the name of the terminal for some white space."""
    return lark.rule("SPACE", r"/[ \n]{1,4}/")


def answer_grammar(
    lark: Lark, use: ToolUse, thinking: tuple[str, str], begin: str, calls: Sequence[str], end: str, between: str
) -> str:
    """Returns the grammar of an answer whose calls stand between two marks.

    `calls` has an expression for each thing that may stand between the marks. An answer begins with reasoning. If no
    call is required, any text may come next, with or without calls after it.
    """
    reasoning, begins_reasoning = thinking
    call = lark.rule("call", " | ".join(calls))
    rest = f"{call} {end}"
    if use.is_parallel:
        rest += f" ({between} {lark.mark(begin)} {call} {end})*"
    if use.is_required:
        return lark.start(f"{reasoning} {lark.mark(begin)} {rest}")
    excluded = [begins_reasoning] if begins_reasoning else []
    before = lark.up_to(begin, "call_mark", *excluded)
    content = lark.text_without("CONTENT", holding(begin), *excluded)
    return lark.start(f"{reasoning} ({content}? | {before} {rest})")


def json_call(name: str, key: str, arguments: str) -> str:
    """Returns an expression for a call as a JSON object, with the spaces that templates write."""
    head = '{"name": "' + name + f'", "{key}": '
    return f"{quoted(head)} {arguments} {quoted('}')}"
