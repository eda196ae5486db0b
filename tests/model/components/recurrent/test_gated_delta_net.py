"""Gated delta nets against a formula."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxinfer.model.components.recurrent.gated_delta_net import GatedDeltaNet, gated_delta_net
from jaxinfer.model.config import RMS_NORM
from tests.model.components.recurrent.layers import (
    model_of,
    naive_conv,
    run_layer_alone,
    sigmoid,
    softplus,
    wide_params,
)
from tests.replay import lively_params

# No size is a multiple of the vectors of a CPU.
ODD = GatedDeltaNet(num_key_heads=3, num_value_heads=6, key_head_dim=13, value_head_dim=10, conv_size=4)
CASES = {
    "odd sizes": (ODD, 36),
    "a key head for each value head, a narrow convolution": (
        GatedDeltaNet(num_key_heads=2, num_value_heads=2, key_head_dim=16, value_head_dim=32, conv_size=2),
        64,
    ),
}


def naive_gated_delta_net(params, x, config, norm):
    """The output of the layer for x [T, D] by definition, one token and head at a time."""
    p, G, R = wide_params(params), config.num_key_heads, config.values_per_key
    K, V, H, num_tokens = config.key_head_dim, config.value_head_dim, G * R, len(x)
    names = ("query", "key", "value", "z", "beta", "dt")
    q, k, v, gate, beta, dt = (x @ p[name].reshape(-1, x.shape[1]).T for name in names)
    channels = np.concatenate([q, k, v], axis=1)
    q, k, v = np.split(naive_conv(channels, p["conv"], 0.0), [G * K, 2 * G * K], axis=1)
    beta, dt = sigmoid(beta), softplus(dt + p["dt_bias"])
    out = np.zeros((num_tokens, H, V))
    for h in range(H):
        state, head = np.zeros((V, K)), slice(h // R * K, (h // R + 1) * K)
        for t in range(num_tokens):
            key, query = (part[t, head] / np.sqrt((part[t, head] ** 2).sum() + 1e-6) for part in (k, q))
            value = v[t, h * V : (h + 1) * V]
            # As in the paper: what the key maps to fades, and a part of it is replaced.
            forgotten = np.eye(K) - beta[t, h] * np.outer(key, key)
            state = np.exp(-np.exp(p["a_log"][h]) * dt[t, h]) * state @ forgotten + beta[t, h] * np.outer(value, key)
            out[t, h] = state @ query / np.sqrt(K)
    out = out / np.sqrt((out**2).mean(-1, keepdims=True) + norm.epsilon) * p["norm"]
    gate = gate.reshape(num_tokens, H, V)
    return (out * gate * sigmoid(gate)).reshape(num_tokens, -1) @ p["out_proj"].T


@pytest.mark.parametrize("name", CASES)
def test_the_layer_computes_its_formula(name):
    mixer, D = CASES[name]
    params = lively_params(model_of(mixer, D)).layers[0].mixer
    x = np.random.default_rng(1).standard_normal((40, D))

    y = run_layer_alone(gated_delta_net, params, mixer, x, RMS_NORM)

    # Outputs of order 1, in float32 against float64; the norm of each head magnifies small outputs.
    np.testing.assert_allclose(y, naive_gated_delta_net(params, x, mixer, RMS_NORM), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_value_heads": 4}, "num_value_heads"),
        ({"conv_size": 1}, "conv_size"),
        ({"key_head_dim": 0}, "key_head_dim"),
    ],
    ids=str,
)
def test_a_wrong_description_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(ODD, **fields)
