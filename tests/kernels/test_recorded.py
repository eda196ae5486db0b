"""Recorded figures of compilers stand in for a compilation only while nothing that they depend on has changed."""

from __future__ import annotations

import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from scripts.kernels.compilers import ENVIRONMENT, Case, lower_case
from tests.kernels import recorded
from tests.kernels.recorded import figures_of

SOURCE = '"""A module."""\n\n\ndef double(x):\n    """Returns 2 x."""\n    return 2 * x  # exactly\n'


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Lowers to `programs`, and counts what it lowers and compiles, of sources in a folder of their own."""
    for name in ("kernels_pallas/double.py", "scripts/read.py"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(SOURCE)
    monkeypatch.setattr(recorded, "ROOT", tmp_path)
    monkeypatch.setattr(recorded, "READING", ("scripts/read.py",))
    monkeypatch.setattr(recorded, "KERNEL_SOURCES", ("kernels_pallas", "scripts/read.py"))
    monkeypatch.setattr(recorded, "FOLDER", tmp_path / "recorded")

    def compile_for(device, cases):
        script.compiled += cases
        return {name: {"bundles": 7} for name in cases}

    def lower_for(device, cases):
        script.lowered += cases
        return {name: {"program": script.programs[name], "lowering_seconds": 0.1} for name in cases}

    programs = {"decode": "2 x", "verify": "3 x"}
    script = SimpleNamespace(compile_for=compile_for, lower_for=lower_for, programs=programs, compiled=[], lowered=[])
    return script


def figures(*cases, **seconds):
    return {name: {"bundles": 7, "lowering_seconds": 0.1, **seconds} for name in cases}


def change(path, old, new):
    path.write_text(path.read_text().replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "is_lowered"),
    [
        ("exactly", "always", False),
        ("A module", "Some module", False),
        ("Returns 2 x", "Doubles x", False),
        ("2 * x", "x + x", True),
    ],
    ids=["a comment", "a docstring of a module", "a docstring", "code"],
)
def test_only_other_code_is_lowered_and_only_another_program_compiled(script, tmp_path, old, new, is_lowered):
    cases = ["decode", "verify"]
    assert figures_of("v6e", cases, script) == figures(*cases)
    change(tmp_path / "kernels_pallas" / "double.py", old, new)
    script.programs["verify"] = "4 x"

    for _ in range(2):
        assert figures_of("v6e", cases, script) == figures(*cases)
    assert script.lowered == cases * (1 + is_lowered)
    assert script.compiled == cases + ["verify"] * is_lowered


def test_seconds_to_lower_are_those_of_the_present_code(script, tmp_path, monkeypatch):
    figures_of("v6e", ["decode"], script)
    change(tmp_path / "kernels_pallas" / "double.py", "2 * x", "x + x")
    monkeypatch.setattr(
        script, "lower_for", lambda device, cases: {"decode": {"program": "2 x", "lowering_seconds": 9}}
    )

    for _ in range(2):
        assert figures_of("v6e", ["decode"], script) == figures("decode", lowering_seconds=9)
    assert script.compiled == ["decode"]


def test_other_code_that_reads_figures_and_other_compilers_compile_all_anew(script, tmp_path, monkeypatch):
    cases = ["decode", "verify"]
    figures_of("v6e", cases, script)
    change(tmp_path / "scripts" / "read.py", "2 * x", "x + x")
    figures_of("v6e", cases, script)
    assert script.compiled == cases * 2

    monkeypatch.setattr(recorded, "compiler_versions", lambda: {"libtpu": "another"})
    figures_of("v6e", cases, script)
    assert script.compiled == cases * 3


def test_a_further_case_compiles_alone(script):
    figures_of("v6e", ["decode"], script)

    assert figures_of("v6e", ["decode", "verify"], script) == figures("decode", "verify")
    assert script.compiled == ["decode", "verify"]


@pytest.mark.parametrize("fails", ["lower_for", "compile_for"])
def test_an_error_is_not_recorded(script, tmp_path, monkeypatch, fails):
    with monkeypatch.context() as patch:
        patch.setattr(script, fails, lambda device, cases: {"decode": {"error": "no room"}})
        assert figures_of("v6e", ["decode"], script)["decode"]["error"] == "no room"
        assert not (tmp_path / "recorded").exists()

    assert figures_of("v6e", ["decode"], script) == figures("decode")
    assert json.loads((tmp_path / "recorded" / "v6e-decode.json").read_text())["figures"] == figures("decode")


KERNEL = """
import jax
from jax.experimental import pallas as pl

def double(x):
    def kernel(x_ref, o_ref):
        o_ref[...] = 2 * x_ref[...]
    return pl.pallas_call(kernel, x)(x)
"""


def test_a_program_is_that_of_the_same_code_on_other_lines_of_another_file():
    def program(source, name, size=8):
        names = {}
        exec(compile(source, name, "exec"), names)

        def for_tpu(x):
            return jax.jit(names["double"]).trace(x).lower(lowering_platforms=("tpu",))

        x = jax.ShapeDtypeStruct((size, 128), "float32")
        return lower_case(
            Mesh(np.array(jax.devices()[:1]), "model"), lambda mesh: Case(SimpleNamespace(lower=for_tpu), {"x": x})
        )["program"]

    limit = jax.config.values["jax_traceback_in_locations_limit"]
    jax.config.update("jax_traceback_in_locations_limit", int(ENVIRONMENT["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"]))
    try:
        same = program(KERNEL, "/here/double.py"), program("\n# Moved.\n\n" + KERNEL, "/elsewhere/double.py")
        others = program(KERNEL.replace("2 *", "3 *"), "/here/double.py"), program(KERNEL, "/here/double.py", size=16)
    finally:
        jax.config.update("jax_traceback_in_locations_limit", limit)

    assert len(set(same)) == 1
    assert len({*same, *others}) == 3
