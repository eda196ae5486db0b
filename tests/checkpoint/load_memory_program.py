"""Run by test_load_memory in a process with 8 devices: loads checkpoints onto one device, and onto meshes of all.

Arguments: paths of checkpoints, each followed by a quantization. Prints a list of JSON objects, one per load on a mesh.
"""

from __future__ import annotations

import json
import sys
import tracemalloc
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxinfer.checkpoint import load_checkpoint, stored
from jaxinfer.checkpoint.making import reading
from jaxinfer.model.params import fit_params
from jaxinfer.quantization import PACKED

MESHES = {("model",): (8,), ("experts", "model"): (4, 2)}


def load_on(mesh: jax.sharding.Mesh, path: str, **options: Any) -> dict[str, Any]:
    """Returns if the parameters are those of one device, and the bytes of NumPy that loading takes beside them."""
    one, _ = load_checkpoint(path, **options)
    load_checkpoint(path, mesh=mesh, **options)  # fills caches
    tracemalloc.start()
    params, config = load_checkpoint(path, mesh=mesh, **options)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    pairs = zip(
        jax.tree.leaves(fit_params(one, replace(config, vocab_padding=0))), jax.tree.leaves(params), strict=True
    )
    tensors = jax.tree.leaves(params, is_leaf=lambda node: isinstance(node, PACKED))
    return {
        # Rows of padding follow those of the vocabulary.
        "same": all(np.array_equal(own, array[: len(own)]) for own, array in pairs),
        "beside": peak - held,
        "largest": max(sum(array.nbytes for array in jax.tree.leaves(tensor)) for tensor in tensors),
    }


def main(numbers_at_once: str, *arguments: str) -> None:
    stored.NUMBERS_AT_ONCE = reading.NUMBERS_AT_ONCE = int(numbers_at_once)
    meshes = [jax.sharding.Mesh(np.array(jax.devices()).reshape(sizes), axes) for axes, sizes in MESHES.items()]
    cases = [
        (path, None if name == "None" else name) for path, name in zip(arguments[::2], arguments[1::2], strict=True)
    ]
    options = {"dtype": "bfloat16"}

    print(json.dumps([load_on(mesh, path, quantization=name, **options) for path, name in cases for mesh in meshes]))


if __name__ == "__main__":
    main(*sys.argv[1:])
