"""Steps over a mesh, experts along one axis and heads along the other, against `transformers`."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from tests.on_devices import run_on_devices
from tests.oracles import CONFIGS, load_reference, reference_logits, save_random_checkpoint

LENGTHS = (27, 9, 16)
# Latents and a shared expert, attention beside a state space, experts with biases and sinks, gated delta nets. The
# others differ in other parts.
FAMILIES = ("deepseek_v3", "falcon_h1", "gpt_oss", "qwen3_next")
# Two devices share the experts: an odd number cannot be split.
EVEN: dict[str, Any] = {
    **{"mixtral": {"num_local_experts": 6}, "granitemoehybrid": {"num_local_experts": 6}},
    "jamba": {"num_experts": 6},
}


@pytest.mark.shows("mesh")
@pytest.mark.parametrize(
    "family",
    [*FAMILIES, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in CONFIGS if name not in FAMILIES)],
)
def test_steps_over_a_mesh_give_the_logits_of_transformers(family, tmp_path):
    checkpoint = save_random_checkpoint(tmp_path / "checkpoint", family, **EVEN.get(family, {}))
    generator, reference = np.random.default_rng(0), load_reference(checkpoint)
    sequences = [generator.integers(0, reference.config.vocab_size, n).tolist() for n in LENGTHS]
    (tmp_path / "sequences.json").write_text(json.dumps(sequences))

    files = [str(tmp_path / name) for name in ("checkpoint", "sequences.json", "results.npy")]
    run_on_devices(4, "-m", "tests.steps.mesh_program", *files)

    logits = [reference_logits(reference, sequence)[-3:] for sequence in sequences]
    expected = torch.log_softmax(torch.tensor(np.stack(logits, axis=1)), -1).numpy()
    # float32 sums in another order, over devices too.
    np.testing.assert_allclose(np.load(tmp_path / "results.npy"), expected, rtol=0, atol=1e-4)
