"""The notebooks as files: nothing is stored in them but text and code, and their first cell installs for the device."""

from __future__ import annotations

import fnmatch
import glob
import importlib.util
from types import SimpleNamespace

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager

from tests.notebooks.notebooks import NOTEBOOKS, ROOT, code_cells, read

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@each_notebook
def test_a_notebook_is_valid_and_has_no_outputs(path):
    notebook = read(path)

    nbformat.validate(notebook)
    assert [cell for cell in code_cells(notebook) if cell.outputs or cell.execution_count is not None] == []


@each_notebook
def test_the_first_code_cell_of_a_notebook_is_the_same_as_in_all(path):
    first, *others = code_cells(read(path))

    assert first.source == code_cells(read(NOTEBOOKS[0]))[0].source
    assert [cell for cell in others if "install" in cell.source] == []


@each_notebook
def test_a_notebook_is_listed_on_its_page(path):
    assert f"`{path.name}`" in (ROOT / "docs" / "notebooks.md").read_text()


@each_notebook
def test_each_code_cell_of_a_notebook_is_short(path):
    assert [cell.source for cell in code_cells(read(path)) if len(cell.source.splitlines()) > 30] == []


def run_first_cell(monkeypatch, folder, *, nvidia_smi=None, tpu_files=(), environ=(), is_installed=False):
    """Returns the arguments of each `%pip` of the first cell on a machine that has these devices.

    `nvidia_smi` is the exit status of that program, or None if there is none.
    """
    if nvidia_smi is not None:
        (folder / "nvidia-smi").write_text(f"#!/bin/sh\nexit {nvidia_smi}\n")
        (folder / "nvidia-smi").chmod(0o700)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(glob, "glob", lambda pattern: fnmatch.filter(tpu_files, pattern))
    monkeypatch.delenv("TPU_ACCELERATOR_TYPE", raising=False)
    for name, value in dict(environ).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace() if is_installed else None)
    calls = []
    shell = SimpleNamespace(run_line_magic=lambda name, line: calls.append((name, line)))
    source = TransformerManager().transform_cell(code_cells(read(NOTEBOOKS[0]))[0].source)
    names = {"get_ipython": lambda: shell}

    exec(compile(source, "first cell", "exec"), names)

    # IPython itself puts the values of names into the line.
    return [(name, line.format(**names)) for name, line in calls]


@pytest.mark.parametrize(
    ("machine", "extras"),
    [
        ({}, "notebook"),
        ({"nvidia_smi": 9}, "notebook"),
        ({"nvidia_smi": 0}, "notebook,cuda"),
        ({"environ": {"TPU_ACCELERATOR_TYPE": "v5e-1"}}, "notebook,tpu"),
        ({"tpu_files": ["/dev/accel0"]}, "notebook,tpu"),
        ({"tpu_files": ["/dev/vfio/0"]}, "notebook,tpu"),
        ({"tpu_files": ["/dev/vfio/vfio"]}, "notebook"),
    ],
    ids=["cpu", "driver without a gpu", "gpu", "colab tpu", "tpu vm", "tpu vm with vfio", "vfio without a tpu"],
)
def test_the_first_cell_installs_for_the_device_that_it_finds(monkeypatch, tmp_path, machine, extras):
    monkeypatch.chdir(ROOT / "scripts" / "notebooks")

    assert run_first_cell(monkeypatch, tmp_path, **machine) == [
        ("pip", f'install --quiet "jaxinfer[{extras}] @ {ROOT.resolve().as_uri()}"')
    ]


def test_the_first_cell_leaves_an_installation_alone(monkeypatch, tmp_path):
    assert run_first_cell(monkeypatch, tmp_path, nvidia_smi=0, is_installed=True) == []
