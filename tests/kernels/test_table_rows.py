"""Rows of a table that lies turned on a TPU, by its kernel: those of plain indexing, to the bit."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.device import lies_turned
from kernels_pallas.table_rows import table_rows
from tests.on_devices import with_devices


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("V", "D"), [(256, 72), (1000, 200), (1000, 8)])
@pytest.mark.parametrize("T", [1, 5, 128, 131])
def test_rows_are_those_of_the_table(V, D, T, dtype):
    assert lies_turned(V, D)
    draw = np.random.default_rng(V + T)
    table = jnp.asarray(draw.standard_normal((V, D)), dtype)
    tokens = jnp.asarray(draw.integers(0, V, T), jnp.int32)

    rows = table_rows(table, tokens, interpret=True)

    np.testing.assert_array_equal(rows, table[tokens])


def test_first_and_last_tokens_and_repeated_ones():
    table = jnp.asarray(np.random.default_rng(0).standard_normal((300, 72)), jnp.float32)
    tokens = jnp.asarray([299, 0, 299, 127, 128, 0], jnp.int32)

    np.testing.assert_array_equal(table_rows(table, tokens, interpret=True), table[tokens])


def test_a_table_of_whole_registers_is_left_to_xla():
    table, tokens = jnp.zeros((256, 128)), jnp.zeros((3,), jnp.int32)

    jaxpr = jax.make_jaxpr(lambda table, tokens: table_rows(table, tokens))(table, tokens)

    assert "platform_index" not in str(jaxpr)


PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from kernels_pallas.table_rows import table_rows

mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("experts", "model"))
draw = np.random.default_rng(0)
table, tokens = draw.standard_normal((512, 72)).astype(np.float32), draw.integers(0, 512, 37).astype(np.int32)
for spec in (PartitionSpec("model", None), PartitionSpec(None, None)):
    sharding = NamedSharding(mesh, spec)
    placed = jax.device_put(table, sharding)
    rows = jax.jit(lambda table, tokens: table_rows(table, tokens, sharding=sharding, interpret=True))(placed, tokens)
    np.testing.assert_array_equal(rows, table[tokens])
print("equal")
"""


def test_rows_of_a_table_over_a_mesh():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=with_devices(4), capture_output=True, text=True, check=False
    )

    assert done.stdout.endswith("equal\n"), done.stderr
