"""Recorded figures of compilers stand in for a compilation only while nothing that they depend on has changed."""

from __future__ import annotations

import json

import pytest

from tests.kernels import recorded
from tests.kernels.recorded import digest_of, figures_of

SOURCE = '"""A module."""\n\n\ndef double(x):\n    """Returns 2 x."""\n    return 2 * x  # exactly\n'


@pytest.fixture
def compile_for(tmp_path, monkeypatch):
    """Counts compilations, of sources in a folder of their own."""
    (tmp_path / "kernels_pallas").mkdir()
    (tmp_path / "kernels_pallas" / "double.py").write_text(SOURCE)
    monkeypatch.setattr(recorded, "ROOT", tmp_path)
    monkeypatch.setattr(recorded, "FOLDER", tmp_path / "recorded")
    monkeypatch.setattr(recorded, "digest_of", lambda sources, cases: digest_of(sources, cases, tmp_path))

    def compile_for(device, cases):
        compile_for.calls += 1
        return {name: {"bundles": 7} for name in cases}

    compile_for.calls = 0
    return compile_for


@pytest.mark.parametrize(
    ("change", "num_calls"),
    [
        (lambda text: text, 1),
        (lambda text: text.replace("A module", "Some module").replace("exactly", "always"), 1),
        (lambda text: text.replace("Returns 2 x", "Doubles x"), 1),
        (lambda text: text.replace("2 * x", "x + x"), 2),
    ],
    ids=["nothing", "comments", "a docstring", "code"],
)
def test_only_another_code_compiles_anew(compile_for, tmp_path, change, num_calls):
    figures_of("v6e", ["decode"], compile_for)
    (tmp_path / "kernels_pallas" / "double.py").write_text(change(SOURCE))

    assert figures_of("v6e", ["decode"], compile_for) == {"decode": {"bundles": 7}}
    assert compile_for.calls == num_calls


def test_other_cases_and_other_compilers_compile_anew(compile_for, monkeypatch):
    figures_of("v6e", ["decode"], compile_for)
    figures_of("v6e", ["decode", "verify"], compile_for)
    monkeypatch.setattr(recorded, "compiler_versions", lambda: {"libtpu": "another"})
    figures_of("v6e", ["decode", "verify"], compile_for)

    assert compile_for.calls == 3


def test_an_error_is_not_recorded(compile_for, tmp_path):
    figures_of("v6e", ["decode"], lambda device, cases: {"decode": {"error": "no room"}})

    assert not (tmp_path / "recorded").exists()
    assert figures_of("v6e", ["decode"], compile_for)["decode"] == {"bundles": 7}
    assert json.loads((tmp_path / "recorded" / "v6e-decode.json").read_text())["figures"]["decode"] == {"bundles": 7}
