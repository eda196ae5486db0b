"""The digest of compiled steps covers the source that they are made of, and no other."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jaxinfer import source_digest
from tests.test_imports import MODULES, ROOT, imports_of_ours

STEP = "jaxinfer.steps.steps"
# Prints a digest of a step before and after each of the files given is changed.
PROGRAM = """
import sys
from pathlib import Path

from jaxinfer import source_digest
from jaxinfer.model.params import Params
from jaxinfer.steps.steps import decode_step

for name in ["", *sys.argv[1:]]:
    if name:
        Path(name).write_text(Path(name).read_text() + "# changed\\n")
    for function in (source_digest._digest, source_digest._read, source_digest.imports_of):
        function.cache_clear()
    print(source_digest.source_digest(decode_step, [], [], compiler="jaxinfer.engine.execution.executable_cache"))
"""


@pytest.mark.parametrize("module", MODULES)
def test_the_imports_read_from_lines_have_all_of_the_parsers(module):
    # More is harmless: the lines also name the package of an imported module, and may stand in a text.
    assert source_digest.imports_of(module) >= imports_of_ours(module)


def test_a_step_reaches_layers_and_kernels_and_neither_server_nor_tokenizer():
    found = source_digest.reachable({STEP})

    assert {
        "jaxinfer.model.components.layers",
        "kernels_pallas.paged_attention.reference",
        "jaxinfer.sampling.sample",
    } <= found
    assert [name for name in found if name.startswith(("jaxinfer.serve", "jaxinfer.openai", "jaxinfer.text"))] == []
    assert len(found) < len(MODULES) / 2


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("jaxinfer/model/components/layers.py", True),
        ("kernels_pallas/row_products.py", True),
        ("jaxinfer/engine/execution/executable_cache.py", True),
        ("jaxinfer/serve/app.py", False),
        ("jaxinfer/text/tokenizer.py", False),
        ("jaxinfer/engine/scheduling/scheduler.py", False),
    ],
)
def test_only_a_change_of_a_file_that_steps_are_made_of_changes_the_digest(digests, file, changes):
    before, after = digests[file]

    assert (before != after) == changes


@pytest.fixture(scope="module")
def digests(tmp_path_factory):
    """Returns the digests of a step before and after a change of each file, one after another."""
    folder = tmp_path_factory.mktemp("source")
    for package in source_digest.PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__", "assets"))
    parameters = next(
        mark for mark in test_only_a_change_of_a_file_that_steps_are_made_of_changes_the_digest.pytestmark
    )
    files = [file for file, _ in parameters.args[1]]
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, *files], cwd=folder, capture_output=True, text=True, check=True, timeout=120
    )
    lines = result.stdout.split()
    assert Path(folder, files[0]).read_text().endswith("# changed\n")
    return {file: (lines[i], lines[i + 1]) for i, file in enumerate(files)}


def test_a_function_from_elsewhere_is_covered_by_both_packages_whole(monkeypatch):
    def function():
        pass

    names = []
    monkeypatch.setattr(source_digest, "_digest", lambda found: names.append(found) or "")
    source_digest.source_digest(function, [], [], compiler="jaxinfer")

    assert names == [frozenset(MODULES)]
