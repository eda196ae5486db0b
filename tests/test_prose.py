"""Docstrings, comments and the text of notebooks use the field's words, in sentences that a stranger reads once."""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = [
    *sorted(file for folder in ("jaxinfer", "kernels_pallas", "scripts") for file in (ROOT / folder).rglob("*.py")),
    *sorted((ROOT / "scripts" / "notebooks").glob("*.ipynb")),
]
DIALECT = re.compile(r"\b(nobody|somebody|anybody|whoever|whomever|so many|as many|whosever|is told)\b", re.IGNORECASE)
MAX_WORDS = 34


def prose_of(file: Path) -> list[str]:
    """Returns the docstrings of a file and its comments, those of consecutive lines joined; of a notebook its text."""
    text = file.read_text()
    if file.suffix == ".ipynb":
        return ["".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"]
    nodes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef)]
    found = [ast.get_docstring(node) or "" for node in nodes]
    last = -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        comment, is_alone = token.string.lstrip("# "), token.line.lstrip().startswith("#")
        if is_alone and token.start[0] == last + 1:
            found[-1] += f" {comment}"
        else:
            found.append(comment)
        last = token.start[0] if is_alone else -1
    return found


def sentences(text: str) -> list[str]:
    """Returns the sentences of a text; a blank line or a list item ends one, and drawings have none."""
    paragraphs = re.split(r"\n\s*\n|\n\s*[*-] ", text)
    plain = [" ".join(p.split()) for p in paragraphs if not re.search(r"[|│└─►]|  \S", p.replace("\n", " ").strip())]
    return [sentence for p in plain for sentence in re.split(r"(?<=[.;:!?]) ", p)]


def test_prose_has_no_riddles_and_no_endless_sentences():
    def faults(file):
        prose = prose_of(file)
        riddles = [text for text in prose if DIALECT.search(text)]
        return riddles + [s for text in prose for s in sentences(text) if len(s.split()) > MAX_WORDS]

    assert {str(file.relative_to(ROOT)): found for file in FILES if (found := faults(file))} == {}


@pytest.mark.parametrize(
    ("text", "is_fine"),
    [
        ("The scheduler evicts the oldest page.", True),
        ("Nobody uses it.", False),
        ("Returns as many pages as there are.", False),
        ("A sentence " + "that goes on " * 12 + "ends.", False),
        ("Short one. " * 30, True),
    ],
)
def test_the_check_finds_riddles_and_endless_sentences(tmp_path, text, is_fine):
    (tmp_path / "module.py").write_text(f'"""{text}"""\n')
    (found,) = prose_of(tmp_path / "module.py")
    lens = [len(sentence.split()) for sentence in sentences(found)]

    assert (DIALECT.search(found) is None and max(lens) <= MAX_WORDS) == is_fine
