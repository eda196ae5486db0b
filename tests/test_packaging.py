"""The sdist and the wheel have every file of both packages, and nothing of a checkout around them."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = ("jaxinfer", "kernels_pallas")
FILES = {
    path.relative_to(ROOT).as_posix()
    for package in PACKAGES
    for path in (ROOT / package).rglob("*")
    if path.is_file() and "__pycache__" not in path.parts
}
NEEDED = {
    "jaxinfer/py.typed",
    "kernels_pallas/py.typed",
    "jaxinfer/assets/tiny/model.safetensors",
    "jaxinfer/serve/page/index.html",
    "kernels_pallas/paged_attention/tuned/tpu_v6e.json",
}
BUILD = "from setuptools import build_meta; build_meta.build_{kind}({folder!r})"


def builds() -> bool:
    """True if the setuptools at hand can build; pyproject.toml says the oldest that can."""
    (requirement,) = PROJECT["build-system"]["requires"]
    try:
        return int(version("setuptools").split(".")[0]) >= int(requirement.partition(">=")[2])
    except PackageNotFoundError:
        return False


@pytest.fixture
def source(tmp_path):
    """A source tree of the packages alone; building writes to it."""
    source = tmp_path / "source"
    source.mkdir()
    for name in (*PACKAGES, "pyproject.toml", "README.md", "LICENSE"):
        (source / name).symlink_to(ROOT / name)
    return source


@pytest.mark.skipif(not builds(), reason="setuptools is missing or too old")
@pytest.mark.parametrize("kind", ["sdist", "wheel"])
def test_a_distribution_has_every_file_of_both_packages(kind, source, tmp_path):
    command = [sys.executable, "-c", BUILD.format(kind=kind, folder=str(tmp_path))]
    built = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)

    assert built.returncode == 0, built.stderr[-3000:]
    if kind == "sdist":
        (path,) = tmp_path.glob("jaxinfer-*.tar.gz")
        with tarfile.open(path) as archive:
            names = {member.name.partition("/")[2] for member in archive if not member.isdir()}
    else:
        (path,) = tmp_path.glob("jaxinfer-*-py3-none-any.whl")
        with zipfile.ZipFile(path) as archive:
            names = set(archive.namelist())
    assert NEEDED <= FILES
    assert FILES - names == set()
    assert {name for name in names if name.startswith(PACKAGES)} - FILES == {
        name for name in names if ".egg-info/" in name or ".dist-info/" in name
    }


def test_every_file_beside_the_code_is_package_data():
    data = PROJECT["tool"]["setuptools"]["package-data"]
    patterns = [f"{package.replace('.', '/')}/{glob}" for package, globs in data.items() for glob in globs]
    others = [name for name in sorted(FILES) if not name.endswith(".py")]

    expanded = [pattern.replace("**/*", "*" + "/*" * depth) for pattern in patterns for depth in range(4)]
    assert [name for name in others if not any(PurePosixPath(name).match(pattern) for pattern in expanded)] == []
