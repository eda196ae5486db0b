"""HTML of the Markdown that a model has written, for a page: no raw HTML, no images, and links that open a new tab.

The text is not trusted. A text may be written so that its patterns take for ever, so a server renders it in a
`LimitedProcess`, of which this module is a program.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from html import escape
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.token import Token

MAX_NESTING = 60  # of lists and quotations, far below the depth of Python's stack
MAX_COLOURED = 20_000  # characters of a piece of code, of which each word may become an element
MAX_GROWTH, MAX_SMALL = 32, 4096  # coloured code of single characters grows most; a small text may always
MAX_LEXERS = 64  # a text may name any languages
HEADING_SHIFT = 2  # the page itself has the first two levels
LINK = re.compile(r"(https?|mailto):", re.IGNORECASE)
LINK_ATTRIBUTES = {"target": "_blank", "rel": "noopener noreferrer nofollow"}
# Pygments' types of tokens, of which the first that fits gives the class. What has none keeps the colour of text.
CLASSES = {
    "Comment": "comment",
    "Keyword": "keyword",
    "Operator.Word": "keyword",
    "Name.Tag": "keyword",
    "Name.Function": "name",
    "Name.Class": "name",
    "Name.Decorator": "name",
    "Name.Attribute": "name",
    "Name.Builtin": "builtin",
    "Literal.String": "string",
    "Literal.Number": "number",
    "Generic.Deleted": "deleted",
    "Generic.Inserted": "inserted",
    "Generic.Heading": "keyword",
    "Generic.Subheading": "keyword",
}


def html_of(text: str) -> str:
    """Returns the HTML of a text in Markdown, CommonMark with tables and strikethrough; a line break stays one.

    Raises ValueError for HTML of more than `MAX_GROWTH` times the text.
    """
    html = _parser().render(text)
    if len(html) > MAX_GROWTH * len(text) + MAX_SMALL:
        raise ValueError(f"the HTML of the text has {len(html):,} characters, too many for its {len(text):,}")
    return html


def answers() -> Callable[[str], str]:
    """Returns the function of a `LimitedProcess`, ready for its first text."""
    html_of("`ready`")
    return html_of


@cache
def _parser() -> MarkdownIt:
    parser = MarkdownIt("commonmark", {"html": False, "breaks": True, "maxNesting": MAX_NESTING})
    # A reference repeats its address at each use, so a short text could become a long page.
    parser.enable(["table", "strikethrough"]).disable(["image", "reference", "html_block", "html_inline"])
    parser.validateLink = lambda url: LINK.match(url) is not None  # pyright: ignore[reportAttributeAccessIssue]
    parser.core.ruler.push("page", lambda state: _fit_page(state.tokens))
    for name in ("fence", "code_block"):
        parser.add_render_rule(name, _code)
    parser.add_render_rule("table_open", lambda *_: '<div class="table" tabindex="0"><table>\n')
    parser.add_render_rule("table_close", lambda *_: "</table></div>\n")
    return parser


def _fit_page(tokens: Sequence[Token]) -> None:
    """Changes headings, links and cells as the page needs them, whose policy allows no inline styles."""
    for token in tokens:
        if token.type in ("heading_open", "heading_close"):
            token.tag = f"h{min(int(token.tag[1]) + HEADING_SHIFT, 6)}"
        elif token.type == "link_open":
            token.attrs |= LINK_ATTRIBUTES
        elif (style := token.attrs.pop("style", None)) is not None:
            token.attrs["class"] = str(style).removeprefix("text-align:")
        _fit_page(token.children or ())


def _code(_: Any, tokens: Sequence[Token], index: int, *__: Any) -> str:
    token = tokens[index]
    language = next(iter(token.info.split()), "")
    coloured = "".join(_coloured(token.content, language))
    return (
        f'<figure class="code"><figcaption>{escape(language)}</figcaption>'
        f'<pre tabindex="0"><code>{coloured}</code></pre></figure>\n'
    )


def _coloured(code: str, language: str) -> Iterator[str]:
    """Yields the HTML of a piece of code, with its colours if the language is known."""
    lexer = _lexer(language) if language and len(code) <= MAX_COLOURED else None
    if lexer is None:
        yield escape(code)
        return
    for kind, text in lexer.get_tokens(code):
        name = _class_of(kind)
        yield f'<span class="{name}">{escape(text)}</span>' if name else escape(text)


@lru_cache(MAX_LEXERS)
def _lexer(language: str) -> Any:
    """Returns Pygments' lexer of a language, which keeps every character; None if there is none."""
    try:
        from pygments.lexers import get_lexer_by_name
        from pygments.util import ClassNotFound
    except ImportError:
        return None
    try:
        return get_lexer_by_name(language, stripnl=False, ensurenl=False)
    except ClassNotFound:
        return None


@cache
def _class_of(kind: Any) -> str:
    names = str(kind).removeprefix("Token.")
    return next((given for name, given in CLASSES.items() if f"{names}.".startswith(f"{name}.")), "")
