"""Sums over the devices of a mesh on CPU: in the order of devices, and not by a collective that chooses an order."""

from __future__ import annotations

from tests.on_devices import run_on_devices

PROGRAM = """
import functools, operator
from dataclasses import replace
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxinfer.model.batch import StepTokens
from jaxinfer.model.components.layers import product, widened
from jaxinfer.quantization.planes import pack_planes
from jaxinfer.quantization.quantized_array import QuantizedArray, quantize
from kernels_pallas.device_sums import sum_over_devices

mesh = Mesh(np.array(jax.devices()), ("model",))
numbers = np.random.default_rng(0)
x, w = numbers.standard_normal((5, 64), np.float32), numbers.standard_normal((24, 64), np.float32)
tokens = StepTokens(jnp.int32(5), is_split=True, summing=mesh)
add_up = functools.partial(functools.reduce, operator.add)

def split(a):
    return np.split(np.asarray(a), 4, axis=-1)

def compiled(function, *operands):
    at, whole = jax.tree.map(lambda a: NamedSharding(mesh, P(*[None] * (a.ndim - 1), "model")), operands), P()
    step = jax.jit(function, in_shardings=at, out_shardings=NamedSharding(mesh, whole)).lower(*operands).compile()
    assert "all-reduce" not in step.as_text(), step.as_text()
    return np.asarray(step(*jax.device_put(operands, at)))

own = lambda x: sum_over_devices(x, "model", mesh)
total = jax.shard_map(own, mesh=mesh, in_specs=P(None, "model"), out_specs=P(), check_vma=False)
assert np.array_equal(compiled(total, x), add_up(split(x)))

multiply = jax.jit(lambda x, w: product(x, w, StepTokens(jnp.int32(5), is_split=True)))
over_mesh = lambda x, w: product(x, w, tokens, input_units=64)
expected = add_up([np.asarray(multiply(*part)) for part in zip(split(x), split(w))])
assert np.array_equal(compiled(over_mesh, x, w), expected)

def integers(bits, groups):
    values = numbers.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (24, 64)).astype(np.int8)
    scales = numbers.uniform(0.1, 1, (24, groups)).astype(np.float32)
    zeros = numbers.integers(-2, 2, (24, groups)).astype(np.int8)
    return values, scales, zeros

values, scales, zeros = integers(8, 2)
values_3, scales_3, zeros_3 = integers(3, 8)
planes = QuantizedArray(pack_planes(values_3, 3, 8), scales_3, zeros_3, bits=3)
own_planes = [replace(planes, values=v, scales=s, zeros=z)
              for v, s, z in zip(*map(split, (planes.values, planes.scales, planes.zeros)))]
stack = lambda a: jnp.stack([jnp.zeros_like(a), jnp.asarray(a)])
in_bytes, halves = quantize(jnp.asarray(w)), quantize(jnp.asarray(w), group_size=16, bits=4)
order = numbers.permutation(64).astype(np.int32)
# The weights, and those that each device multiplies by.
CASES = {
    "a scale per channel": (in_bytes, [QuantizedArray(v, in_bytes.scales) for v in split(in_bytes.values)]),
    "a cut group": (
        QuantizedArray(values, scales, zeros),
        [QuantizedArray(v, scales[:, [i // 2]], zeros[:, [i // 2]]) for i, v in enumerate(split(values))],
    ),
    "two to a byte": (halves, [QuantizedArray(*part) for part in zip(split(halves.values), split(halves.scales))]),
    "planes": (planes, own_planes),
    "packed zero points": (replace(planes, zeros=pack_planes(zeros_3, 3, 1)), own_planes),
}
for i, (name, (weights, parts)) in enumerate(CASES.items()):
    # Every second one alone, the others in a stack of layers, which are in an order of their own.
    own = weights if i % 2 else replace(weights, order=order)
    rows = x if own.order is None else x[:, order]
    expected = add_up([np.asarray(multiply(*part)) for part in zip(split(rows), parts)])
    given = own if i % 2 else replace(jax.tree.map(stack, own), layer=jnp.int32(1))
    found = compiled(lambda x, values: over_mesh(x, replace(given, values=values)), x, given.values)
    assert np.array_equal(found, expected), name
    np.testing.assert_allclose(found, x @ np.asarray(widened(own, 64)).T, rtol=1e-4, atol=1e-3)

# Two groups in bytes of two: no device's part is a product, so each multiplies by all.
halves = quantize(jnp.asarray(w), group_size=32, bits=4)
found = compiled(lambda x, values: over_mesh(x, replace(halves, values=values)), x, halves.values)
assert np.array_equal(found, multiply(x, halves))
"""


def test_devices_add_their_parts_of_a_product_in_their_order():
    run_on_devices(4, "-c", PROGRAM)
