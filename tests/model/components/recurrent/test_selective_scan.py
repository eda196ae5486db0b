"""Mamba's mixer against a formula."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxinfer.model.components.recurrent.selective_scan import SelectiveScan, selective_scan
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
ODD = SelectiveScan(inner_size=51, state_size=13, time_step_rank=3, conv_size=4, has_bias=True)
CASES = {
    "odd sizes": (ODD, 36),
    "norms, a wide convolution": (
        SelectiveScan(
            inner_size=128,
            state_size=16,
            time_step_rank=8,
            conv_size=6,
            has_conv_bias=False,
            has_norms=True,
        ),
        64,
    ),
}


def naive_selective_scan(params, x, config, norm):
    """The output of the layer for x [T, D] by definition, one token and channel at a time."""
    p, (I, N, R) = wide_params(params), (config.inner_size, config.state_size, config.time_step_rank)

    def normed(y, name):
        return y if name not in p else y / np.sqrt((y * y).mean(-1, keepdims=True) + norm.epsilon) * p[name]

    channels, gate = np.split(x @ p["in_proj"].T + p.get("in_bias", 0), 2, axis=1)
    channels = naive_conv(channels, p["conv"], p.get("conv_bias", 0))
    dt, b, c = np.split(channels @ p["x_proj"].T, [R, R + N], axis=1)
    dt, b, c = normed(dt, "dt_norm"), normed(b, "b_norm"), normed(c, "c_norm")
    dt = softplus(dt @ p["dt_proj"].T + p["dt_bias"])
    out = np.zeros((len(x), I))
    for i in range(I):
        state = np.zeros(N)
        for t in range(len(x)):
            state = np.exp(-np.exp(p["a_log"][:, i]) * dt[t, i]) * state + dt[t, i] * b[t] * channels[t, i]
            out[t, i] = state @ c[t] + p["d"][i] * channels[t, i]
    return (out * gate * sigmoid(gate)) @ p["out_proj"].T + p.get("out_bias", 0)


@pytest.mark.parametrize("name", CASES)
def test_the_layer_computes_its_formula(name):
    mixer, D = CASES[name]
    params = lively_params(model_of(mixer, D)).layers[0].mixer
    x = np.random.default_rng(1).standard_normal((40, D))

    y = run_layer_alone(selective_scan, params, mixer, x, RMS_NORM)

    # Outputs of order 1, in float32 against float64.
    np.testing.assert_allclose(y, naive_selective_scan(params, x, mixer, RMS_NORM), rtol=0, atol=2e-5)


@pytest.mark.parametrize("fields", [{"conv_size": 1}, {"state_size": 0}, {"time_step_rank": True}], ids=str)
def test_a_wrong_description_is_refused(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        dataclasses.replace(ODD, **fields)
