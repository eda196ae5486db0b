"""Sums over the devices of a mesh on CPU: in the order of devices, and not by a collective that chooses an order."""

from __future__ import annotations

from tests.on_devices import run_on_devices

PROGRAM = """
import functools, operator, re
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxinfer.model.batch import StepTokens
from jaxinfer.model.components.layers import product
from jaxinfer.quantization.quantized_array import quantize
from kernels_pallas.device_sums import sum_over_devices

mesh = Mesh(np.array(jax.devices()), ("model",))
numbers = np.random.default_rng(0)
x, w = numbers.standard_normal((5, 64), np.float32), numbers.standard_normal((24, 64), np.float32)
tokens = StepTokens(jnp.int32(5), is_split=True, summing=mesh)

def compiled(function, *operands):
    at, whole = [NamedSharding(mesh, P(None, "model"))] * len(operands), NamedSharding(mesh, P())
    step = jax.jit(function, in_shardings=at, out_shardings=whole).lower(*operands).compile()
    assert "all-reduce" not in step.as_text(), step.as_text()
    return np.asarray(step(*(jax.device_put(a, s) for a, s in zip(operands, at))))

own = lambda x: sum_over_devices(x, "model", mesh)
total = jax.shard_map(own, mesh=mesh, in_specs=P(None, "model"), out_specs=P(), check_vma=False)
ordered = functools.reduce(operator.add, np.split(x, 4, axis=1))
assert np.array_equal(compiled(total, x), ordered)
parts = zip(np.split(x, 4, axis=1), np.split(w, 4, axis=1))
multiply = jax.jit(lambda x, w: product(x, w, StepTokens(jnp.int32(5), is_split=True)))
expected = functools.reduce(operator.add, [np.asarray(multiply(*part)) for part in parts])
found = compiled(lambda x, w: product(x, w, tokens, input_units=w.shape[1]), x, w)
assert np.array_equal(found, expected), abs(found - expected).max()
by_integers = compiled(lambda x: product(x, quantize(w), tokens, input_units=w.shape[1]), x)
np.testing.assert_allclose(by_integers, x @ w.T, atol=0.5)  # 8 bits
"""


def test_devices_add_their_parts_of_a_product_in_their_order():
    run_on_devices(4, "-c", PROGRAM)
