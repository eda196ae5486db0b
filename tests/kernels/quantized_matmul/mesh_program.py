"""Run by test_quantized_matmul_over_mesh in a process with 4 devices: products by integers over meshes of them.

Prints a JSON object with the largest error against NumPy, for each case and implementation.
"""

from __future__ import annotations

import functools
import json
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kernels_pallas.packed_numbers import dequantize, pack_int4
from kernels_pallas.quantized_matmul import quantized_matmul

T, NUM_LAYERS = 9, 2
IMPLEMENTATIONS = ("reference", "tpu_interpret")


class Case(NamedTuple):
    channels: tuple[int, ...]
    num_inputs: int
    num_groups: int
    spec: tuple[str | tuple[str, ...] | None, ...]  # of channels and inputs
    bits: int = 8
    is_packed: bool = False
    has_layer: bool = True
    dtype: str = "float32"


CASES = {
    "channels": Case((256,), 384, 1, ("model", None)),
    "channels of several axes": Case((4, 32), 128, 4, ("model", None, None), bits=4),
    "inputs with a scale per channel": Case((256,), 512, 1, (None, "model")),
    "inputs in groups that the devices divide": Case((256,), 1024, 8, (None, "model"), bits=4),
    "inputs in groups that the devices cut": Case((256,), 768, 6, (None, "model"), bits=4),
    "inputs of channels of several axes in groups that the devices cut": Case((2, 8), 512, 2, (None, None, "model")),
    "inputs over both axes of the mesh": Case((256,), 512, 4, (None, ("experts", "model"))),
    "channels over one axis and inputs over the other": Case((256,), 512, 2, ("experts", "model")),
    "nothing": Case((256,), 384, 3, ()),
    "half precision": Case((256,), 1024, 8, (None, "model"), bits=4, dtype="bfloat16"),
    "packed integers": Case((256,), 512, 4, (None, "model"), bits=4, is_packed=True),
    "no stack": Case((256,), 768, 6, (None, "model"), has_layer=False),
}
# The kernel reads stacks, and no packed integers.
REFERENCE_ONLY = ("packed integers", "no stack")
PAIRS = [(name, way) for name in CASES for way in IMPLEMENTATIONS if way == "reference" or name not in REFERENCE_ONLY]


def error_of(case: Case, implementation: str) -> float:
    """Returns the largest difference from the product in NumPy, of results whose size is about 1."""
    generator, (D, F) = np.random.default_rng(0), (case.num_inputs, int(np.prod(case.channels)))
    # On meshes of two axes both have two devices.
    has_both = "experts" in str(case.spec)
    mesh = Mesh(np.array(jax.devices()).reshape((2, 2) if has_both else (1, 4)), ("experts", "model"))
    limit = 127 if case.bits == 8 else 7
    integers = generator.integers(-limit, limit + 1, (NUM_LAYERS * F, D)).astype(np.int8)
    scales = generator.uniform(0.5, 1.5, (NUM_LAYERS * F, case.num_groups)).astype(np.float32) / limit / D**0.5
    x = jnp.asarray(generator.standard_normal((T, D)), case.dtype)
    whole = np.asarray(dequantize(jnp.asarray(integers), jnp.asarray(scales), None, D))[-F:]
    expected = np.asarray(x, np.float64) @ whole.T.astype(np.float64)

    stored = pack_int4(jnp.asarray(integers), D // case.num_groups) if case.is_packed else jnp.asarray(integers)
    if case.bits == 4 and not case.is_packed:
        stored = stored.astype(jnp.int4)
    weights, scales = (jnp.asarray(a).reshape(NUM_LAYERS, *case.channels, -1) for a in (stored, scales))
    layer, spec = jnp.int32(NUM_LAYERS - 1), PartitionSpec(None, *case.spec)
    if not case.has_layer:
        weights, scales, layer, spec = weights[-1], scales[-1], None, PartitionSpec(*case.spec)
    multiply = functools.partial(quantized_matmul, sharding=NamedSharding(mesh, spec), implementation=implementation)
    compiled = jax.jit(multiply)
    out = compiled(x, jax.device_put(weights, NamedSharding(mesh, spec)), scales, layer=layer)
    assert out.dtype == x.dtype
    return float(np.abs(np.asarray(out, np.float64) - expected).max())


def refusal() -> str:
    """Returns the error for packed integers of which devices cut groups."""
    mesh = Mesh(np.array(jax.devices()), ("model",))
    sharding = NamedSharding(mesh, PartitionSpec(None, "model"))
    try:
        quantized_matmul(jnp.ones((2, 64)), jnp.ones((8, 32), jnp.int8), jnp.ones((8, 2)), sharding=sharding)
    except NotImplementedError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    errors = {f"{name}, {way}": error_of(CASES[name], way) for name, way in PAIRS}
    print(json.dumps({"errors": errors, "refusal": refusal()}))
