"""Run by test_experts in a process with 4 devices: experts over meshes of them.

Prints a JSON object with the largest error against NumPy, for each case.
"""

from __future__ import annotations

import functools
import json
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxinfer.model.components.experts import sum_of_experts
from jaxinfer.model.components.mlp import MLP, MLPParams
from jaxinfer.quantization import quantize

T, X, D, F = 7, 2, 16, 32
NUM_REAL = 5  # tokens that are not padding
GATE_SCALE, OUTPUT_SCALE = 0.75, 1.5


class Case(NamedTuple):
    mesh: tuple[int, int]  # experts, model
    num_experts: int = 4
    quantization: dict[str, Any] | None = None
    has_bias: bool = False


CASES = {
    "experts and parts of them": Case((2, 2), has_bias=True),
    "experts": Case((4, 1), has_bias=True),
    "parts of experts": Case((1, 4), has_bias=True),
    "experts that the mesh does not divide": Case((2, 2), num_experts=5, has_bias=True),
    "8 bits": Case((2, 2), quantization={"bits": 8}),
    "4 bits": Case((2, 2), quantization={"bits": 4, "group_size": 8}),
    "4 bits in groups that the mesh does not divide": Case((1, 4), quantization={"bits": 4, "group_size": 16}),
    "4 bits packed with a scale per channel": Case((2, 2), quantization={"bits": 4}),
}


def random_experts(case: Case, generator: np.random.Generator) -> dict[str, np.ndarray]:
    """Returns tensors by their names in `MLPParams`; the case's quantization changes none by more than a rounding."""
    E, weights = case.num_experts, {}
    largest = 127 if case.quantization == {"bits": 8} else 7
    for name, shape in (("gate", (E, F, D)), ("up", (E, F, D)), ("down", (E, D, F))):
        weights[name] = generator.integers(-largest, largest + 1, shape) / largest
        weights[name][..., ::8] = 1.0
    if case.has_bias:
        weights |= {f"{name}_bias": generator.standard_normal((E, F)) for name in ("gate", "up")}
        weights |= {"down_bias": generator.standard_normal((E, D))}
    return weights


def expected_sums(tensors: dict[str, np.ndarray], x: Any, experts: Any, weights: Any) -> np.ndarray:
    """Returns the sums f64[T, D] by the formula, token after token and expert after expert."""
    out = np.zeros((T, D))
    for t in range(T):
        for expert, weight in zip(experts[t], weights[t], strict=True):
            own = {name: tensor[expert] for name, tensor in tensors.items()}
            gate = GATE_SCALE * (own["gate"] @ x[t] + own.get("gate_bias", 0))
            up = own["up"] @ x[t] + own.get("up_bias", 0)
            down = own["down"] @ (gate / (1 + np.exp(-gate)) * up) + own.get("down_bias", 0)
            out[t] += weight * OUTPUT_SCALE * down
    return out


def error(case: Case) -> float:
    """Returns the largest error, as a part of the largest sum."""
    generator = np.random.default_rng(0)
    tensors = random_experts(case, generator)
    x, weights = generator.standard_normal((T, D)), generator.random((T, X))
    experts = np.stack([generator.permutation(case.num_experts)[:X] for _ in range(T)])
    floats: dict[str, Any] = {name: jnp.asarray(w, jnp.float32) for name, w in tensors.items()}
    params: Any = MLPParams(**floats)
    if case.quantization is not None:
        products = ("gate", "up", "down")
        params = params.replace(**{name: quantize(getattr(params, name), **case.quantization) for name in products})
    arrays = (np.asarray(x, np.float32), np.asarray(experts, np.int32), np.asarray(weights, np.float32))
    mesh = Mesh(np.array(jax.devices()).reshape(case.mesh), ("experts", "model"))
    config = MLP(intermediate_size=F, has_bias=case.has_bias, gate_scale=GATE_SCALE, output_scale=OUTPUT_SCALE)
    compute = jax.jit(functools.partial(sum_of_experts, config=config, mesh=mesh))

    out = np.asarray(compute(params, *arrays, np.int32(NUM_REAL)))

    expected = expected_sums(tensors, x, experts, weights)
    return float(np.abs(out - expected)[:NUM_REAL].max() / np.abs(expected).max())


if __name__ == "__main__":
    print(json.dumps({name: error(case) for name, case in CASES.items()}))
