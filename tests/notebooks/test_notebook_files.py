"""The notebooks as files: nothing is stored in them but text and code, and their first cell is a form that installs."""

from __future__ import annotations

import fnmatch
import glob
import importlib.util
import os
import re
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import nbformat
import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.plan import parse_devices, plan_deployment
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
def test_each_code_cell_of_a_notebook_but_the_form_is_short(path):
    _, *others = code_cells(read(path))

    assert [cell.source for cell in others if len(cell.source.splitlines()) > 30] == []


@each_notebook
def test_the_first_code_cell_of_a_notebook_is_a_form_that_hides_its_code(path):
    first = code_cells(read(path))[0]

    assert first.metadata == {"cellView": "form"}
    assert first.source.startswith("# @title ")
    assert re.findall(r"^(\w+) = .*  # @param ", first.source, re.MULTILINE) == [
        *("MODEL", "SOURCE", "USE_DRIVE", "USE_HF_TOKEN")
    ]


@pytest.fixture
def first_cell(monkeypatch, tmp_path):
    """Returns the first cell, to be run in a folder where neither jaxinfer is installed nor a wheel or a clone is."""
    folder = tmp_path / "notebooks"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return FirstCell(monkeypatch, tmp_path)


class FirstCell:
    """The first cell of the notebooks on a machine that has the devices and files of a test, and no network."""

    def __init__(self, monkeypatch, programs):
        self._monkeypatch, self._programs, self._run = monkeypatch, programs, subprocess.run
        self.requirements = []  # of each call of pip
        self.pip_status = 0
        monkeypatch.setenv("PATH", str(programs))
        monkeypatch.delenv("TPU_ACCELERATOR_TYPE", raising=False)
        for name in ("JAX_COMPILATION_CACHE_DIR", "HF_TOKEN"):
            monkeypatch.setenv(name, "before")
        monkeypatch.delitem(sys.modules, "jax", raising=False)
        monkeypatch.setattr(subprocess, "run", self._call)
        self.has(tpu_files=(), is_installed=False)

    def has(self, *, nvidia_smi=None, tpu_files=None, environ=(), is_installed=None):
        """Gives the machine some devices; `nvidia_smi` is the exit status of that program."""
        if nvidia_smi is not None:
            (self._programs / "nvidia-smi").write_text(f"#!/bin/sh\nexit {nvidia_smi}\n")
            (self._programs / "nvidia-smi").chmod(0o700)
        if tpu_files is not None:
            self._monkeypatch.setattr(glob, "glob", lambda pattern: fnmatch.filter(tpu_files, pattern))
        for name, value in dict(environ).items():
            self._monkeypatch.setenv(name, value)
        if is_installed is not None:
            spec = SimpleNamespace() if is_installed else None
            self._monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)

    def has_colab(self):
        """Makes the machine one of Colab; returns what is mounted."""
        mounted = []
        names = {
            "drive": SimpleNamespace(mount=mounted.append),
            "userdata": SimpleNamespace(get=lambda name: f"secret {name}"),
        }
        for name in ("google", "google.colab"):
            self._monkeypatch.setitem(sys.modules, name, ModuleType(name))
        for name, value in names.items():
            setattr(sys.modules["google.colab"], name, value)
        return mounted

    def __call__(self, **fields):
        """Runs the cell with these values in its form; returns the names that it has set."""
        source = code_cells(read(NOTEBOOKS[0]))[0].source
        for field, value in fields.items():
            source, num_set = re.subn(rf"^{field} = .*(?=  # @param)", f"{field} = {value!r}", source, flags=re.M)
            assert num_set == 1
        names = {}
        exec(compile(source, "first cell", "exec"), names)
        return names

    def _call(self, command, **options):
        if command[1:4] != ["-m", "pip", "install"]:
            return self._run(command, **options)
        self.requirements += [argument for argument in command[4:] if not argument.startswith("-")]
        return subprocess.CompletedProcess(command, self.pip_status, stdout="pip's reason")


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
def test_in_a_clone_the_first_cell_installs_the_clone_for_the_device(first_cell, monkeypatch, machine, extras):
    monkeypatch.chdir(ROOT / "scripts" / "notebooks")
    first_cell.has(**machine)

    assert first_cell()["MODEL"] is None

    assert first_cell.requirements == [f"jaxinfer[{extras}] @ {ROOT.resolve().as_uri()}"]


def test_the_first_cell_installs_the_newest_wheel_beside_the_notebook(first_cell, tmp_path):
    for seconds, name in enumerate(("jaxinfer-0.2.0-py3-none-any.whl", "jaxinfer-0.1.0-py3-none-any.whl")):
        (tmp_path / "notebooks" / name).touch()
        os.utime(tmp_path / "notebooks" / name, (seconds, seconds))

    first_cell()

    newest = tmp_path / "notebooks" / "jaxinfer-0.1.0-py3-none-any.whl"
    assert first_cell.requirements == [f"jaxinfer[notebook] @ {newest.as_uri()}"]


@pytest.mark.parametrize("address", ["https://host/jaxinfer-0.1.0-py3-none-any.whl", "git+https://host/jaxinfer.git"])
def test_the_first_cell_takes_an_address_before_a_wheel(first_cell, tmp_path, address):
    (tmp_path / "notebooks" / "jaxinfer-0.1.0-py3-none-any.whl").touch()

    first_cell(SOURCE=address)

    assert first_cell.requirements == [f"jaxinfer[notebook] @ {address}"]


def test_the_first_cell_takes_the_path_of_a_wheel(first_cell, tmp_path):
    path = tmp_path / "jaxinfer-0.1.0-py3-none-any.whl"

    first_cell(SOURCE=str(path))

    assert first_cell.requirements == [f"jaxinfer[notebook] @ {path.as_uri()}"]


def test_with_nothing_to_install_the_first_cell_says_what_to_do(first_cell, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"`pip wheel --no-deps \.` .* upload .* SOURCE the address") as error:
        first_cell()

    assert str(tmp_path / "notebooks") in str(error.value)
    assert first_cell.requirements == []


def test_the_first_cell_stops_if_pip_fails(first_cell, capsys):
    first_cell.pip_status = 1

    with pytest.raises(RuntimeError, match="pip could not install"):
        first_cell(SOURCE="https://host/jaxinfer-0.1.0-py3-none-any.whl")

    assert "pip's reason" in capsys.readouterr().out


def test_the_first_cell_asks_for_a_restart_if_jax_was_imported_before_the_installation(first_cell, monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", ModuleType("jax"))
    with pytest.raises(RuntimeError, match="Restart session"):
        first_cell(SOURCE="https://host/jaxinfer-0.1.0-py3-none-any.whl")

    first_cell.has(is_installed=True)
    first_cell()


def test_the_first_cell_leaves_an_installation_alone(first_cell):
    first_cell.has(nvidia_smi=0, is_installed=True)

    assert first_cell(MODEL="Qwen/Qwen3-4B")["MODEL"] == "Qwen/Qwen3-4B"

    assert first_cell.requirements == []
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == os.environ["HF_TOKEN"] == "before"


def test_on_colab_drive_keeps_the_compiled_steps_and_the_token_is_its_secret(first_cell):
    mounted = first_cell.has_colab()
    first_cell.has(is_installed=True)

    first_cell(USE_DRIVE=True, USE_HF_TOKEN=True)

    assert mounted == ["/content/drive"]
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == "/content/drive/MyDrive/jaxinfer/compiled_steps"
    assert os.environ["HF_TOKEN"] == "secret HF_TOKEN"


def test_elsewhere_the_token_stays_that_of_the_environment(first_cell, capsys):
    first_cell.has(is_installed=True)

    first_cell(USE_HF_TOKEN=True)

    assert os.environ["HF_TOKEN"] == "before"
    assert "hf auth login" in capsys.readouterr().out


def test_the_page_has_the_bounds_that_the_plan_gives_a_t4():
    page = (ROOT / "docs" / "notebooks.md").read_text()
    limits = EngineConfig(max_num_seqs=8, max_num_batched_tokens=128, max_model_len=512)

    for config in (EngineConfig(max_num_seqs=1), limits, EngineConfig()):
        best = plan_deployment("Qwen3-4B", parse_devices("T4x1"), config).best
        assert best is not None
        assert best.decode is not None
        assert best.prefill is not None
        decode, prefill = best.decode.tokens_per_second, best.prefill.tokens_per_second
        assert f"| {best.num_rows} | {best.num_tokens:,} | {decode:.0f} | {prefill:,.0f} |" in page
