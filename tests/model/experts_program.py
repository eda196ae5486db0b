"""Run by test_experts in a process with 4 devices: experts over meshes of 2 x 2, 1 x 4 and 4 x 1 of them.

Prints a JSON object with the largest error against NumPy, for each case and mesh.
"""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxinfer.model.components.experts import sum_of_experts
from jaxinfer.model.components.mlp import MLP, MLPParams
from jaxinfer.quantization import quantize

T, X, D, F = 7, 2, 16, 32
NUM_REAL = 5  # tokens that are not padding
# Experts, options of the weights' quantization, and if the experts have biases.
CASES: dict[str, tuple[int, dict[str, Any], bool]] = {
    "biases": (4, {}, True),
    "experts that no mesh divides": (5, {}, True),
    "8 bits": (4, {"bits": 8}, False),
    "4 bits": (4, {"bits": 4}, False),
    "4 bits in groups": (4, {"bits": 4, "group_size": 8}, False),
}
MESHES = ((2, 2), (1, 4), (4, 1))


def random_experts(generator: np.random.Generator, num_experts: int, has_bias: bool) -> dict[str, np.ndarray]:
    """Returns tensors by their names in `MLPParams`; quantization changes no weight."""
    weights = {}
    for name, shape in (("gate", (F, D)), ("up", (F, D)), ("down", (D, F))):
        weights[name] = generator.integers(-7, 8, (num_experts, *shape)) / 8
        weights[name][..., ::8] = 7 / 8
    if has_bias:
        weights |= {f"{name}_bias": generator.standard_normal((num_experts, F)) for name in ("gate", "up")}
        weights |= {"down_bias": generator.standard_normal((num_experts, D))}
    return weights


def expected_sums(tensors: dict[str, np.ndarray], x: Any, experts: Any, weights: Any) -> np.ndarray:
    """Returns the sums f64[T, D] by the formula, token after token and expert after expert."""
    out = np.zeros((T, D))
    for t in range(T):
        for expert, weight in zip(experts[t], weights[t], strict=True):
            own = {name: tensor[expert] for name, tensor in tensors.items()}
            gate = own["gate"] @ x[t] + own.get("gate_bias", 0)
            up = own["up"] @ x[t] + own.get("up_bias", 0)
            out[t] += weight * (own["down"] @ (gate / (1 + np.exp(-gate)) * up) + own.get("down_bias", 0))
    return out


def errors(num_experts: int, quantization: dict[str, Any], has_bias: bool) -> dict[str, float]:
    generator = np.random.default_rng(0)
    tensors = random_experts(generator, num_experts, has_bias)
    x, weights = generator.standard_normal((T, D)), generator.random((T, X))
    experts = np.stack([generator.permutation(num_experts)[:X] for _ in range(T)])
    expected = expected_sums(tensors, x, experts, weights)[:NUM_REAL]
    params: Any = MLPParams(**{"gate": None, **{name: jnp.asarray(w, jnp.float32) for name, w in tensors.items()}})
    if quantization:
        products = {name: quantize(getattr(params, name), **quantization) for name in ("gate", "up", "down")}
        params = params.replace(**products)
    arrays = (jnp.asarray(x, jnp.float32), jnp.asarray(experts, jnp.int32), jnp.asarray(weights, jnp.float32))
    config, found = MLP(intermediate_size=F), {}
    for sizes in MESHES:
        mesh = Mesh(np.array(jax.devices()).reshape(sizes), ("experts", "model"))
        compute = jax.jit(lambda params, *arrays, mesh=mesh: sum_of_experts(params, *arrays, config=config, mesh=mesh))
        out = np.asarray(compute(params, *arrays, jnp.asarray(NUM_REAL)))
        found["{}x{}".format(*sizes)] = float(np.abs(out[:NUM_REAL] - expected).max() / np.abs(expected).max())
    return found


if __name__ == "__main__":
    print(json.dumps({name: errors(*case) for name, case in CASES.items()}))
