"""Mamba-2's mixer against a formula."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxinfer.model.components.recurrent.state_space import StateSpace, state_space
from jaxinfer.model.config import RMS_NORM, Layer
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
ODD = StateSpace(
    num_heads=6, head_dim=10, num_groups=2, state_size=13, conv_size=4, has_in_bias=True, has_out_bias=True
)
CASES = {
    "odd sizes": (ODD, 36),
    "one group, bounded steps, a wide convolution": (
        StateSpace(
            num_heads=3,
            head_dim=16,
            num_groups=1,
            state_size=32,
            conv_size=6,
            has_conv_bias=False,
            time_step_limits=(0.2, 0.9),
        ),
        64,
    ),
    "a norm before the gate, scaled parts": (
        dataclasses.replace(ODD, norm="plain", scales=(0.7, 1.3, 0.6, 1.5, 0.9)),
        36,
    ),
    "no norm": (dataclasses.replace(ODD, norm=None), 36),
}


def naive_state_space(params, x, config, norm):
    """The output of the layer for x [T, D] by definition, one token and head at a time."""
    p, (H, P, G, N) = wide_params(params), (config.num_heads, config.head_dim, config.num_groups, config.state_size)
    inner = H * P
    sizes = (inner, inner, G * N, G * N, H)
    projected = (x @ p["in_proj"].T + p.get("in_bias", 0)) * np.repeat(config.scales, sizes)
    gate, channels, dt = np.split(projected, [inner, inner + config.num_channels], axis=1)
    channels = naive_conv(channels, p["conv"], p.get("conv_bias", 0))
    dt = np.clip(softplus(dt + p["dt_bias"]), *config.time_step_limits)
    out = np.zeros((len(x), H, P))
    for h in range(H):
        state, g = np.zeros((P, N)), h // (H // G)
        for t in range(len(x)):
            value = channels[t, h * P : (h + 1) * P]
            b, c = (channels[t, inner + part * G * N + g * N :][:N] for part in (0, 1))
            state = np.exp(-np.exp(p["a_log"][h]) * dt[t, h]) * state + dt[t, h] * np.outer(value, b)
            out[t, h] = state @ c + p["d"][h] * value

    def normed(y):
        groups = y.reshape(len(y), G, -1)
        return (groups / np.sqrt((groups**2).mean(-1, keepdims=True) + norm.epsilon)).reshape(y.shape) * p["norm"]

    out, gate = out.reshape(len(x), inner), gate * sigmoid(gate)
    out = {"gated": lambda: normed(out * gate), "plain": lambda: normed(out) * gate, None: lambda: out * gate}[
        config.norm
    ]()
    return out @ p["out_proj"].T + p.get("out_bias", 0)


@pytest.mark.parametrize("name", CASES)
def test_the_layer_computes_its_formula(name):
    mixer, D = CASES[name]
    params = lively_params(model_of(mixer, D)).layers[0].mixer
    x = np.random.default_rng(1).standard_normal((40, D))

    y = run_layer_alone(state_space, params, mixer, x, RMS_NORM)

    # Outputs of order 1, in float32 against float64.
    np.testing.assert_allclose(y, naive_state_space(params, x, mixer, RMS_NORM), rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_groups": 4}, "num_heads"),
        ({"conv_size": 1}, "conv_size"),
        ({"state_size": 0}, "state_size"),
        ({"time_step_limits": (1.0, 0.5)}, "time_step_limits"),
        ({"norm": "before"}, "norm"),
        ({"scales": (1.0, 1.0, 1.0)}, "scales"),
    ],
    ids=str,
)
def test_a_wrong_description_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(ODD, **fields)


def test_a_layer_needs_one_half_at_least():
    with pytest.raises(ValueError, match="feed_forward"):
        Layer(mixer=None, feed_forward=None)
