"""Reads answers of chat models piece by piece or whole, and keeps their tool calls to the schemas of a request.

answers = Answers(tokenizer)                                   # once
form = answers.form(tools, tool_choice="required")             # for each request
params = form.sampling_params(params, prompt_token_ids)        # with the structure of its answer
reader = form.reader(params, prompt_token_ids)                 # for each sample
parts = reader.push(delta.token_ids) … parts = reader.close()
answer = form.read(token_ids, params, prompt_token_ids)        # the same for a whole output
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxinfer.sampling_params import STRUCTURES, AnswerParams, AnswerShape, SamplingParams
from jaxinfer.text.answers.lark import Lark
from jaxinfer.text.answers.parts import Answer, Output, Part, answer_of, random_call_id
from jaxinfer.text.answers.schemas import SchemaRules
from jaxinfer.text.answers.source import Reader, Source
from jaxinfer.text.answers.style import Opening, Style
from jaxinfer.text.answers.styles.table import STYLES, style_of
from jaxinfer.text.answers.tools import NO_TOOLS, ToolUse, is_free, read_tools
from jaxinfer.text.detokenizer import Detokenizer
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.validation import as_plain, require_name, shown

MAX_OPENING = 256  # tokens of a prompt's end that show where it leaves off


class AnswerParser:
    """Splits the text of one answer into parts, in time that is linear in the text, wherever that is cut into pieces.

    The text has the marks of the style, and no other special tokens. Every text has parts: what is in the style of no
    call is content.
    """

    def __init__(
        self,
        style: Style | None,
        use: ToolUse = NO_TOOLS,
        opening: Opening = "beginning",
        new_id: Callable[[], str] = random_call_id,
    ) -> None:
        self._source = Source()
        self._output = Output(new_id)
        self._reader = _all_content(self._source, self._output)
        if style is not None:
            self._reader = style.read(self._source, self._output, use.functions, opening)
        self._is_done = False

    def feed(self, text: str) -> list[Part]:
        """Takes the next text; returns the parts that no later text can change."""
        self._source.feed(text)
        return self._advance()

    def close(self) -> list[Part]:
        """Returns the rest, when no more text comes."""
        self._source.end()
        parts = self._advance()
        self._output.content.finish()
        return [*parts, *self._output.take()]

    def _advance(self) -> list[Part]:
        if not self._is_done:
            self._is_done = next(self._reader, self) is self
        return self._output.take()


def _all_content(source: Source, output: Output) -> Reader[None]:
    while (yield from source.peek()):
        yield from source.take(output.content.write)


def parse(
    text: str, style: Style | None, use: ToolUse = NO_TOOLS, opening: Opening = "beginning", **options: Any
) -> Answer:
    """Returns the answer that a text is; the arguments are those of `AnswerParser`."""
    parser = AnswerParser(style, use, opening, **options)
    return answer_of([*parser.feed(text), *parser.close()])


class AnswerReader:
    """Splits the output tokens of one request into parts while they arrive."""

    def __init__(self, detokenizer: Detokenizer, parser: AnswerParser) -> None:
        self._detokenizer = detokenizer
        self._parser = parser

    def push(self, token_ids: Sequence[int]) -> list[Part]:
        """Takes the next tokens; returns the parts that no later tokens can change."""
        return self._parser.feed("".join(map(self._detokenizer.push, token_ids)))

    def close(self) -> list[Part]:
        """Returns the rest, when no more tokens come."""
        return self._parser.feed(self._detokenizer.flush()) + self._parser.close()


@dataclass(frozen=True)
class AnswerForm:
    """The form of the answers to one request: their style, and the functions that they may call."""

    style: Style | None  # None: all text is content
    use: ToolUse
    continues: bool  # the last message of the prompt, rather than beginning one
    _tokenizer: Tokenizer
    _rules: SchemaRules
    may_think: bool = True  # False for a model that does not know the marks of reasoning

    def sampling_params(self, params: SamplingParams, prompt_token_ids: Sequence[int]) -> SamplingParams:
        """Returns the parameters with the structure of an answer after a prompt; the same ones if it has none.

        A structure of the parameters binds the content. Raises ValueError if a function's schema or the budget of
        thinking cannot be honoured.
        """
        if not isinstance(params, SamplingParams):
            return params  # the engine refuses what is no SamplingParams
        if self.use.is_required:  # then the answer has no content
            params = replace(params, **dict.fromkeys(STRUCTURES))
        is_document, budget = params.structure is not None, params.thinking_token_budget
        if budget is not None and (self.style is None or self.style.thinking is None):
            cause = "the chat template shows none" if self.style is None else f"the style {self.style.name} has none"
            raise ValueError(
                f"thinking_token_budget={budget} cannot be honoured, for answers have no reasoning that it could end:"
                f" {cause}; leave it out, or give the answer_style of a model that reasons"
            )
        if self.style is None or not (self.use.functions or is_document or budget is not None):
            return params
        opening, use = self._opening(prompt_token_ids), self.use
        if is_document:  # then all other answers have calls
            use = replace(use, is_required=True, is_beside_document=True)
        # A model without the marks of reasoning would spell them by accident, and never end it.
        begun: Opening = "content" if is_document and opening == "beginning" and not self.may_think else opening
        calls = self._calls(use, begun)
        if not is_document and budget is None:
            return replace(params, grammar=calls) if calls else params
        shape = self._shape(self.style, use, opening, calls, begun)
        if budget is not None:
            _require_end(params, shape)
        fields = {field.name: getattr(params, field.name) for field in dataclasses.fields(SamplingParams)}
        return AnswerParams(**fields, shape=shape)

    def _calls(self, use: ToolUse, opening: Opening) -> str:
        """Returns the grammar of answers that use functions, "" if they cannot."""
        if not use.functions:
            return ""
        assert self.style is not None
        assert self.style.grammar is not None
        grammar = self.style.grammar(Lark(self._tokenizer), use, self._rules, opening)
        if grammar is None and self.use.is_required:
            raise ValueError(
                "the prompt ends in the content of an answer, after which this model makes no tool call; leave out"
                " continue_final_message or tool_choice"
            )
        return grammar or ""

    def _shape(self, style: Style, use: ToolUse, opening: Opening, calls: str, begun: Opening) -> AnswerShape:
        lark, guard, thinking = Lark(self._tokenizer), Lark(self._tokenizer), style.thinking
        before = style.before(style, lark, use, begun) if use.is_beside_document else ""
        excluded = style.excluded(style, use, opening) if use.is_beside_document else []
        shape = AnswerShape(
            before=lark.start(before) if before else "",
            content=guard.start(f"{guard.text_without('CONTENT', *excluded)}?") if excluded else "",
            calls=calls,
        )
        if thinking is None:
            return shape
        begins = thinking.is_anywhere or opening == "beginning"
        end_id = self._tokenizer.token_to_id(thinking.end)
        end_ids = self._tokenizer.encode(thinking.end, add_special_tokens=False) if end_id is None else [end_id]
        return replace(
            shape,
            begin_thinking=thinking.head if begins else "",
            end_thinking=[thinking.end, *([style.call] if self.use.functions and style.call else [])],
            end_token_ids=end_ids,
            is_thinking=opening == "reasoning",
            thinks_again=thinking.is_anywhere,
        )

    def reader(self, params: SamplingParams, prompt_token_ids: Sequence[int]) -> AnswerReader:
        """Returns a reader of an answer after a prompt, by the parameters of the request."""
        marks = () if self.style is None else map(self._tokenizer.token_to_id, self.style.marks)
        shown = [token_id for token_id in marks if token_id is not None]
        detokenizer = Detokenizer(self._tokenizer, params.stop, min_tokens=params.min_tokens, shown=shown)
        return AnswerReader(detokenizer, AnswerParser(self.style, self.use, self._opening(prompt_token_ids)))

    def read(self, token_ids: Sequence[int], params: SamplingParams, prompt_token_ids: Sequence[int]) -> Answer:
        """Returns the answer that output tokens are."""
        reader = self.reader(params, prompt_token_ids)
        return answer_of([*reader.push(token_ids), *reader.close()])

    def _opening(self, prompt_token_ids: Sequence[int]) -> Opening:
        if self.style is None:
            return "beginning"
        opening = self.style.opening(self._tokenizer.decode(prompt_token_ids[-MAX_OPENING:], skip_special_tokens=False))
        return "content" if self.continues and opening == "beginning" else opening


def _require_end(params: SamplingParams, shape: AnswerShape) -> None:
    """Raises ValueError for parameters beside a budget of thinking that may rule out the mark of its end."""
    ends, allowed = set(shape.end_token_ids), params.allowed_token_ids
    beside = {
        "no_repeat_ngram_size": params.no_repeat_ngram_size > 0,
        "bad_words": any(ends & set(word) for word in params.bad_words),
        "allowed_token_ids": allowed is not None and not ends <= set(allowed),
    }
    for name in (name for name, rules_out in beside.items() if rules_out):
        raise ValueError(
            f"thinking_token_budget={params.thinking_token_budget} cannot be honoured: {name} may rule out the mark"
            f" {shown(shape.end_thinking[0])}, which ends the reasoning; leave one of them out"
        )


class Answers:
    """Makes the forms of answers for the model of one tokenizer, on any thread.

    `check_text(name, text)` raises ValueError for a rendered text that is too long to encode; by default none is.
    """

    def __init__(self, tokenizer: Tokenizer, check_text: Callable[[str, str], None] = lambda name, text: None) -> None:
        self.tokenizer, self.check_text = tokenizer, check_text
        self._rules = SchemaRules()

    def form(
        self,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        *,
        chat_template: str | None = None,
        style: str | None = None,
        continues: bool = False,
    ) -> AnswerForm:
        """Returns the form of the answers to a request.

        * The first three arguments are those of `read_tools`.
        * `chat_template`: as for `Tokenizer.apply_chat_template`. The template shows the style.
        * `style`: a name in STYLES, if the template does not show it.
        * `continues`: True if the prompt leaves its last message open.

        Raises ValueError as `read_tools` does, and for a tool call demanded of a model whose style is unknown.
        """
        style = as_plain("answer_style", style)
        template = self._template(as_plain("chat_template", chat_template), tools is not None, style is None)
        if style is None:
            found = style_of(template)
        else:
            require_name("answer_style", style, STYLES)
            found = STYLES[style]
        knows_calls = found is not None and found.grammar is not None
        if not knows_calls and not is_free(tool_choice):
            names = ", ".join(name for name, known in STYLES.items() if known.grammar is not None)
            raise ValueError(
                f"tool_choice={shown(tool_choice)} demands a tool call, and the chat template does not show how this"
                f" model writes one; give answer_style=... as one of {names}"
            )
        # If the style is unknown, the template shows the tools, and a call is content.
        use = read_tools(tools if knows_calls else None, tool_choice, parallel_tool_calls)
        thinking = None if found is None else found.thinking
        has_mark = thinking is not None and self.tokenizer.token_to_id(thinking.begin) is not None
        may_think = thinking is None or has_mark or thinking.end in template
        return AnswerForm(found, use, continues, self.tokenizer, self._rules, may_think)

    def _template(self, given: Any, has_tools: bool, is_needed: bool) -> str:
        """Returns the text of a chat template, "" if there is none and it is not needed."""
        try:
            return self.tokenizer.chat_templates.choose(given, has_tools)
        except ValueError:
            if is_needed:
                raise
            return ""
