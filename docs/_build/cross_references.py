"""A hook of MkDocs: names of the API in running text lead to their entries, on every page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1]
ENTRY = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)
# Parts of a page whose names stay as they are.
KEPT = re.compile(r"(<(pre|h[1-6]|a|script|autoref)\b.*?</\2>)", re.DOTALL)
NAME = re.compile(r"<code>((?:jaxinfer\.)?[A-Za-z_]\w*(?:\.\w+)?)(\(\))?</code>")


def entries() -> dict[str, str]:
    """Returns the path of each entry of the API by its last name; one that two entries have stands for none."""
    paths = [path for page in sorted((DOCS / "api").glob("*.md")) for path in ENTRY.findall(page.read_text("utf-8"))]
    names = [path.rpartition(".")[2] for path in paths]
    return {name: path for name, path in zip(names, paths, strict=True) if names.count(name) == 1}


def linked(text: str, paths: dict[str, str]) -> str:
    """Returns HTML in which the names of these entries, and of their members, are references."""

    def reference(found: re.Match[str]) -> str:
        name, _, member = found[1].removeprefix("jaxinfer.").partition(".")
        if name not in paths:
            return found[0]
        identifier = f"{paths[name]}.{member}" if member else paths[name]
        return f'<autoref identifier="{identifier}" optional>{found[0]}</autoref>'

    pieces = KEPT.split(text)
    # Of each three pieces the second is kept, and the third is the name of its element.
    return "".join(NAME.sub(reference, piece) if i % 3 == 0 else piece for i, piece in enumerate(pieces) if i % 3 < 2)


def on_page_content(html: str, **_: Any) -> str:
    """Called by MkDocs with the HTML of each page."""
    return linked(html, entries())
