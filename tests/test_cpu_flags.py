"""On x86, importing jaxinfer keeps XLA from adding to products before they are rounded.

The user's flags or an early start of JAX may prevent that; then the engine and the doctor say so.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from jaxinfer import LLM, cpu_flags
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


def test_a_jaxlib_that_may_not_know_the_option_does_not_get_it(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setattr(cpu_flags, "version", lambda _: "0.13.0")

    cpu_flags.forbid_fused_products()

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
