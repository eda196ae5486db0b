"""The README and the pages under docs/: examples run, commands parse, links lead somewhere, and the site builds."""

from __future__ import annotations

import ast
import importlib.util
import posixpath
import re
import runpy
import shlex
import subprocess
import sys
from html import unescape
from pathlib import Path
from types import ModuleType

import pytest

import jaxinfer
from jaxinfer.checkpoint import families
from jaxinfer.cli import main as cli
from scripts.measure.family_layers import HEADING as LAYERS
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
    for folder in ("docs", "jaxinfer", "kernels_pallas", "scripts", "tests")
    for path in (ROOT / folder).rglob("*.*")
    if path.suffix in (".py", ".sh")
]
EXAMPLES = ("agent", "chat_bot", "grpo", "rag_batch")
# Beside `jaxinfer.__all__`.
NAMED = {
    *("run_batch", "merge_shards", "LineForm", "Metrics", "Timings", "Ready", "Timeline", "Tokenizer", "EngineThread"),
    *("Engine", "SlowReaderError", "PromptTooLongError", "TotalLength", "plan_deployment", "compile_plan"),
    *("write_quantized", "save_params", "LogitsProcessor", "with_masks", "Prompt", "RequestOptions", "text_identity"),
    "Branches",
}
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
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.wordchars += ","
        for word in [*lexer, ";"]:
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
    of_api = {page for page in pages if page.startswith("api/")} - {"api/index.md"}

    assert {page.removeprefix("api/") for page in of_api} == set(LINK.findall(PAGES["docs/api/index.md"])) - {
        "../changelog.md"
    }
    assert pages - of_api <= {link.partition("#")[0] for link in LINK.findall(PAGES["docs/index.md"])}
    assert pages - of_api - {"changelog.md"} <= {
        link.partition("#")[0].removeprefix("docs/") for link in LINK.findall(PAGES["README.md"])
    }


def test_the_table_of_families_is_of_all_families_and_none_failed():
    page, _, _ = PAGES["docs/families.md"].partition(LAYERS)

    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert [family for family in CONFIGS if f"| `{family}` |" not in page] == []
    assert len(rows) == len(CONFIGS)
    assert {cell.strip() for row in rows for cell in row.split("|")[2:-1]} == {PASSED, REFUSED}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_with_the_bundled_model(name, monkeypatch, capsys, tmp_path):
    if name == "agent":
        pytest.importorskip("llguidance")
    arguments = prepared(name, tmp_path)
    options = {"max_tokens": 8} if name == "chat_bot" else {}
    lines = iter(["Hello", "And then?", ""])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))

    with steps_on_demand():
        result = runpy.run_path(str(ROOT / "docs" / "examples" / f"{name}.py"))["main"](*arguments, **options)

    if name == "rag_batch":
        assert (result.num_completed, result.num_errors) == (2, 0)
        assert (tmp_path / "answers.jsonl").read_text().count("\n") == 2
    else:
        assert capsys.readouterr().out.strip()


def prepared(name: str, folder: Path) -> list[object]:
    """The arguments of an example's `main`, whose files are in the folder."""
    if name == "rag_batch":
        (folder / "texts").mkdir()
        (folder / "texts" / "cities.txt").write_text("Rome is the capital of Italy.")
        (folder / "texts" / "sums.txt").write_text("def add(a, b): return a + b\n" * 40)
        (folder / "questions.txt").write_text("What is the capital of Italy?\nHow are numbers added?\n")
        return [str(folder / part) for part in ("texts", "questions.txt", "answers.jsonl")]
    return [1] if name == "grpo" else []


def test_every_example_has_a_test_and_a_place_on_its_page():
    assert {path.stem for path in (ROOT / "docs" / "examples").glob("*.py")} == set(EXAMPLES)
    page = PAGES["docs/examples.md"]
    assert [name for name in EXAMPLES if f'"docs/examples/{name}.py:' not in page] == []


def texts_of(source: str) -> list[str]:
    """The texts of a program, with "…" for values."""

    def text_of(node: ast.AST) -> str:
        if isinstance(node, ast.JoinedStr):
            return "".join(text_of(part) for part in node.values)
        return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "…"

    return [text_of(node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant | ast.JoinedStr)]


def is_quoted(message: str, texts: list[str]) -> bool:
    """True if one of the texts has the parts of a message between its values, in their order."""
    parts = [re.escape(part.strip()) for part in message.split("…") if part.strip(" ();:.'[]")]
    pattern = re.compile(".*?".join(parts), re.DOTALL)
    return any(pattern.search(text.replace("%s", "…")) for text in texts)


def test_the_messages_of_the_page_of_errors_are_those_of_the_code():
    texts = [text for path in (ROOT / "jaxinfer").rglob("*.py") for text in texts_of(path.read_text(encoding="utf-8"))]
    messages = re.findall(r"^\*\*`(.+)`\*\*$", PAGES["docs/troubleshooting.md"], re.MULTILINE)

    assert len(messages) > 20
    assert [message for message in messages if not is_quoted(message, texts)] == []
    assert not is_quoted("checkpoint … is neither here nor there", texts)


def reference() -> set[str]:
    """The paths of the entries of the API."""
    pages = (text for page, text in PAGES.items() if page.startswith("docs/api/"))
    return {path for text in pages for path in re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE)}


def test_every_public_name_is_in_the_reference():
    entries = {path.rpartition(".")[2] for path in reference()}

    assert set(jaxinfer.__all__) - {"__version__"} <= entries
    assert entries >= NAMED


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site as MkDocs builds it; a warning is an error."""
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_the_site_builds_without_a_warning_and_loads_nothing_from_other_hosts(site):
    loaded = re.compile(
        r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"?(?:https?:)?//|<link\b[^>]*\bhref=\"?(?:https?:)?//"
    )

    assert [str(page) for page in site.rglob("*.html") if loaded.search(page.read_text(encoding="utf-8"))] == []


def test_each_entry_has_an_anchor_and_text_and_names_lead_to_it(site):
    text = "".join(page.read_text(encoding="utf-8") for page in (site / "api").glob("*.html"))

    assert [path for path in reference() if f'id="{path}"' not in text] == []
    engine = (site / "api" / "engine.html").read_text(encoding="utf-8")
    assert re.search(r'href="#jaxinfer.engine.frontend.branches.Branches.fork"><code>Branches.fork</code>', engine)
    assert re.search(r'href="api/requests.html#jaxinfer.SamplingParams"', (site / "engine.html").read_text("utf-8"))


def test_signatures_break_over_lines_and_fields_have_their_comments(site):
    jobs = re.sub(r"<[^>]+>", "", (site / "api" / "jobs.html").read_text(encoding="utf-8"))
    requests = re.sub(r"<[^>]+>", "", (site / "api" / "requests.html").read_text(encoding="utf-8"))

    assert "run_batch(\n    llm: LLM,\n" in unescape(jobs)
    assert "ttft: from arrival to the first output token." in requests


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hook", ROOT / "docs" / "_build" / "cross_references.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("html", "identifier"),
    [
        ("<p><code>LLM</code></p>", "jaxinfer.LLM"),
        ("<p><code>LLM.chat</code></p>", "jaxinfer.LLM.chat"),
        ("<p><code>jaxinfer.LLM</code></p>", "jaxinfer.LLM"),
        ("<p><code>other</code></p>", None),
        ("<pre><code>LLM</code></pre>", None),
        ('<a href="x"><code>LLM</code></a>', None),
        ("<h2><code>LLM</code></h2>", None),
    ],
)
def test_names_in_running_text_become_references(hook, html, identifier):
    linked = hook.linked(html, {"LLM": "jaxinfer.LLM"})

    if identifier is None:
        assert linked == html
    else:
        assert f'<autoref identifier="{identifier}" optional><code>' in linked
