"""Run by test_orbax in a process with 4 devices: loads, saves and restores on meshes of 4, 2 and 1 of them.

Arguments: a Hugging Face checkpoint, and the path for an Orbax one. Prints a JSON object with what was seen.
"""

from __future__ import annotations

import json
import sys

import jax
import numpy as np

from jaxinfer.checkpoint import load_params, read_config
from jaxinfer.checkpoint.orbax import read_saved_config, restore_params, save_params
from jaxinfer.model.params import shardings


def model_mesh(num_devices: int) -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(jax.devices()[:num_devices]), ("model",))


def describe(params, reference) -> dict:
    q = params.layers[0].mixer.q
    same = jax.tree.map(lambda a, b: np.array_equal(np.asarray(a), np.asarray(b)), params, reference)
    return {
        "devices": len(q.sharding.device_set),
        "shard": q.addressable_shards[0].data.shape,
        "same": all(jax.tree.leaves(same)),
    }


def main(checkpoint: str, saved: str) -> None:
    config = read_config(checkpoint)
    reference = load_params(checkpoint, config, "bfloat16")
    params = load_params(checkpoint, config, "bfloat16", placement=shardings(config, model_mesh(4)))
    seen = {"loaded": describe(params, reference)}
    save_params(saved, params, config)
    for num_devices in (4, 2, 1):
        placement = shardings(read_saved_config(saved), model_mesh(num_devices))
        restored, _ = restore_params(saved, placement=placement)
        seen[str(num_devices)] = describe(restored, reference)
    print(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
