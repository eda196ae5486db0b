"""Steps over a mesh, experts along one axis and heads along the other: against `transformers`, or one device."""

from __future__ import annotations

import json
from pathlib import Path
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


def run_steps(folder: Path, checkpoint: Path, way: str) -> tuple[list[list[int]], np.ndarray]:
    """Returns random sequences and what `mesh_program` gives for them."""
    vocab_size = json.loads((checkpoint / "config.json").read_text())["vocab_size"]
    generator = np.random.default_rng(0)
    sequences = [generator.integers(0, vocab_size, n).tolist() for n in LENGTHS]
    (folder / "sequences.json").write_text(json.dumps(sequences))
    files = [str(checkpoint), str(folder / "sequences.json"), str(folder / "results.npy")]
    run_on_devices(4, "-m", "tests.steps.mesh_program", *files, way)
    return sequences, np.load(folder / "results.npy")


@pytest.mark.shows("mesh")
@pytest.mark.parametrize(
    "family",
    [*FAMILIES, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in CONFIGS if name not in FAMILIES)],
)
def test_steps_over_a_mesh_give_the_logits_of_transformers(family, tmp_path):
    checkpoint = save_random_checkpoint(tmp_path / "checkpoint", family, **EVEN.get(family, {}))

    sequences, results = run_steps(tmp_path, checkpoint, "plain")

    reference = load_reference(checkpoint)
    logits = [reference_logits(reference, sequence)[-3:] for sequence in sequences]
    expected = torch.log_softmax(torch.tensor(np.stack(logits, axis=1)), -1).numpy()
    # float32 sums in another order, over devices too.
    np.testing.assert_allclose(results, expected, rtol=0, atol=1e-4)


KERNEL = "by the kernel of a TPU"
# In 4 bits, devices cut the groups of `o` and `down`.
QUANTIZED = (("llama", f"int8 {KERNEL}"), ("qwen3_moe", f"int4 {KERNEL}"))
EXHAUSTIVE = ((family, way) for way in (f"int8 {KERNEL}", f"int4 {KERNEL}", "int8", "int4") for family in CONFIGS)


@pytest.mark.parametrize(
    ("family", "way"),
    [
        *QUANTIZED,
        *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in EXHAUSTIVE if case not in QUANTIZED),
    ],
)
def test_quantized_steps_over_a_mesh_give_the_logits_of_one_device(family, way, tmp_path):
    checkpoint = save_random_checkpoint(tmp_path / "checkpoint", family, **EVEN.get(family, {}))

    _, (of_one_device, over_mesh) = run_steps(tmp_path, checkpoint, way)

    np.testing.assert_allclose(over_mesh, of_one_device, rtol=0, atol=1e-4)
