"""The README and the pages under docs/: examples run, commands parse, and links lead somewhere."""

from __future__ import annotations

import posixpath
import re
import shlex
from pathlib import Path

import pytest

from jaxinfer.checkpoint import families
from jaxinfer.cli import main as cli
from scripts.measure.family_table import PASSED, REFUSED
from tests.on_demand import steps_on_demand
from tests.oracles import CONFIGS

ROOT = Path(__file__).parents[1]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
}
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
SCRIPT = re.compile(r"[\w/]+\.(?:py|sh)\b")
SCRIPTS = [
    f"/{path.relative_to(ROOT).as_posix()}"
    for folder in ("jaxinfer", "kernels_pallas", "scripts", "tests")
    for path in (ROOT / folder).rglob("*.*")
    if path.suffix in (".py", ".sh")
]
STRUCTURES = re.compile(r"json_schema=|regex=|choices=|grammar=|tool_choice=")


def blocks(page: str, *languages: str) -> list[str]:
    return [text for language, text in BLOCK.findall(PAGES[page]) if language in languages]


def examples(page: str) -> str:
    """The Python blocks of a page, one after another."""
    return "\n".join(blocks(page, "python"))


def commands(page: str) -> list[list[str]]:
    """The arguments of each `jaxinfer ...` command in the shell blocks of a page."""
    found: list[list[str]] = []
    for line in "".join(blocks(page, "sh", "bash")).replace("\\\n", " ").splitlines():
        words: list[str] = []
        for word in [*shlex.shlex(line, posix=True, punctuation_chars=True), ";"]:
            if word.strip("&|;"):
                words.append(word)
                continue
            if words and Path(words[0]).name == "jaxinfer":
                found.append(words[1:])
            words = []
    return found


def anchors(page: str) -> set[str]:
    """The anchors of a page's headings: lower case, words joined by hyphens, no punctuation."""
    headings = HEADING.findall(BLOCK.sub("", PAGES[page]))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(page: str) -> list[str]:
    """The relative links of a page that lead to no file, or to no heading of a page."""
    dead = []
    for link in LINK.findall(BLOCK.sub("", PAGES[page])):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        name = posixpath.normpath(posixpath.join(posixpath.dirname(page), path)) if path else page
        is_there = name in PAGES or (ROOT / name).exists()
        is_outside = page.startswith("docs/") and not name.startswith("docs/")  # where the site has no page
        if not is_there or is_outside or (anchor and (name not in PAGES or anchor not in anchors(name))):
            dead.append(link)
    return dead


@pytest.mark.parametrize("page", [page for page in PAGES if examples(page)])
def test_the_examples_of_a_page_run_one_after_another(page, monkeypatch, capsys, tmp_path):
    source = examples(page)
    if STRUCTURES.search(source):
        pytest.importorskip("llguidance")
    monkeypatch.chdir(tmp_path)  # examples write files
    (tmp_path / "jaxinfer").symlink_to(ROOT / "jaxinfer")  # and name a folder of the repository
    monkeypatch.setattr(families, "FAMILIES", dict(families.FAMILIES))  # and add a family

    with steps_on_demand():
        exec(compile(source, page, "exec"), {"__name__": page})

    assert capsys.readouterr().out.strip() or "print(" not in source


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)])
def test_the_commands_of_a_page_parse(page):
    for arguments in commands(page):
        if arguments != ["--help"]:
            assert callable(cli._parser().parse_args(arguments).run)


@pytest.mark.parametrize("page", PAGES)
def test_the_scripts_and_modules_of_a_page_exist(page):
    # A page about a folder may leave the folder out.
    names = SCRIPT.findall(PAGES[page])
    assert [name for name in names if not any(path.endswith(f"/{name}") for path in SCRIPTS)] == []


@pytest.mark.parametrize("page", PAGES)
def test_the_links_of_a_page_lead_somewhere(page):
    assert dead_links(page) == []


def test_dead_links_are_found(monkeypatch):
    text = "# A heading, of a page\n[a](#a-heading-of-a-page) [b](sampling.md#order) [c](no.md) [d](sampling.md#no)"
    monkeypatch.setitem(
        PAGES, "docs/made_up.md", text + " [e](#no) [f](https://jax.dev) ![g](../no.png) [h](../README.md)"
    )

    assert dead_links("docs/made_up.md") == ["no.md", "sampling.md#no", "#no", "../no.png", "../README.md"]


def test_every_page_is_linked_from_the_readme_and_from_the_index():
    pages = {page.removeprefix("docs/") for page in PAGES} - {"README.md", "index.md"}

    assert pages <= {link.partition("#")[0] for link in LINK.findall(PAGES["docs/index.md"])}
    assert pages - {"api.md"} <= {
        link.partition("#")[0].removeprefix("docs/") for link in LINK.findall(PAGES["README.md"])
    }


def test_the_table_of_families_is_of_all_families_and_none_failed():
    page = PAGES["docs/families.md"]

    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert [family for family in CONFIGS if f"| `{family}` |" not in page] == []
    assert len(rows) == len(CONFIGS)
    assert {cell.strip() for row in rows for cell in row.split("|")[2:-1]} == {PASSED, REFUSED}
