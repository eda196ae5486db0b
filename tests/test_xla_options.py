"""On x86, importing jaxinfer keeps XLA from adding to products before they are rounded; JAX takes most of a GPU.

The user's flags or an early start of JAX may prevent that; then the engine and the doctor say so.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from jaxinfer import LLM, xla_options
from jaxinfer.cli import doctor
from jaxinfer.cli.main import main
from jaxinfer.engine import assembly
from kernels_pallas import row_products

pytestmark = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the option is for x86")

IMPORT = "import jaxinfer, os; from kernels_pallas.row_products import fuses_products; "
SHOW = "print(fuses_products(), os.environ.get('XLA_FLAGS'))"


def run(program: str, flags: str) -> str:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("program", "flags", "shown"),
    [
        (IMPORT + SHOW, "", "False --xla_cpu_max_isa=AVX"),
        (
            IMPORT + SHOW,
            "--xla_cpu_enable_fast_math=false",
            "False --xla_cpu_enable_fast_math=false --xla_cpu_max_isa=AVX",
        ),
        (IMPORT + SHOW, "--xla_cpu_max_isa=AVX2", "True --xla_cpu_max_isa=AVX2"),
        ("import jax; jax.devices(); " + IMPORT + SHOW, "", "True --xla_cpu_max_isa=AVX"),
    ],
    ids=["nothing set", "another option", "the user's own set", "too late"],
)
def test_products_are_rounded_unless_the_user_says_otherwise_or_jax_has_started(program, flags, shown):
    assert run(program, flags) == shown


@pytest.mark.parametrize(
    ("variables", "fraction"),
    [
        ({}, "0.92"),
        ({"XLA_CLIENT_MEM_FRACTION": "0.5"}, "None"),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}, "0.5"),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, "None"),
        ({"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, "None"),
    ],
)
def test_jax_takes_most_of_a_gpu_unless_the_user_says_otherwise(variables, fraction, monkeypatch):
    for name in xla_options.MEMORY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    assert run("import jaxinfer, os; print(os.environ.get('XLA_PYTHON_CLIENT_MEM_FRACTION'))", "") == fraction


def test_an_option_of_the_commands_sets_the_part_whatever_variables_say(monkeypatch, capsys):
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.4")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")

    assert main(["generate", "p", "--memory-fraction", "0.7"]) == 2
    assert os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.7"
    assert "XLA_CLIENT_MEM_FRACTION" not in os.environ
    assert "--memory-fraction 0.7 is a part of a GPU's memory, and the device here is a cpu; leave it out" in (
        capsys.readouterr().err
    )
    for wrong in ("0", "1.5", "most", "nan"):
        assert main(["generate", "p", "--memory-fraction", wrong]) == 2
        assert f"'{wrong}' is no part; give a number above 0 and up to 1" in capsys.readouterr().err


def test_a_jaxlib_that_may_not_know_the_option_does_not_get_it(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setattr(xla_options, "version", lambda _: "0.13.0")

    xla_options.forbid_fused_products()

    assert os.environ["XLA_FLAGS"] == ""


def test_an_engine_and_the_doctor_say_where_products_are_not_rounded(monkeypatch, caplog, capsys):
    monkeypatch.setattr(assembly, "fuses_products", lambda: True)
    monkeypatch.setattr(row_products, "fuses_products", lambda: True)
    monkeypatch.setattr(doctor, "examine", lambda *_: iter(()))

    LLM().close()
    assert main(["doctor", "--quiet"]) == 1

    assert "--xla_cpu_max_isa=AVX in XLA_FLAGS prevents it" in caplog.text
    assert "--xla_cpu_max_isa=AVX in XLA_FLAGS prevents it" in capsys.readouterr().out


def test_an_engine_warns_of_nothing_where_products_are_rounded(caplog):
    LLM().close()

    assert "products" not in caplog.text
