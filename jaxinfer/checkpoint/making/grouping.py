"""The groups of layers in which a checkpoint is loaded: by what devices compute, and by how the weights are packed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from jaxinfer.checkpoint.making.assemblies import assemblies_of, grid_of
from jaxinfer.checkpoint.stored import Blocks, Stored
from jaxinfer.device import packs_integers
from jaxinfer.model.config import Layer, ModelConfig, scan_sizes
from jaxinfer.model.stages import for_stages, num_stages

# How the tensors of a layer are packed, one after another.
Packing = tuple[Any, ...]


def grouped(
    config: ModelConfig,
    packings: Sequence[Packing],
    layer_cuts: Collection[int] = (),
    *,
    scans: bool,
    mesh: Mesh | AbstractMesh | None = None,
) -> ModelConfig:
    """Returns the model with its layers in the stacks of a device that scans over them, or else with each alone.

    `packings` are those of its layers. A group ends after each of the numbers of layers in `layer_cuts`. Stages of a
    `mesh` share a group, see `for_stages`.
    """
    if num_stages(mesh) > 1:
        return for_stages(config, num_stages(mesh), scans=scans, packings=packings, cuts=layer_cuts)
    if not scans:
        return config.regrouped((1,) * config.num_layers)
    return config.regrouped(scan_sizes(config.layers, {*layer_cuts, *packed_anew(config.layers, packings)}))


def packings_of(layers: Sequence[Any], stored: Mapping[str, Stored]) -> list[Packing]:
    """Returns how the tensors of each layer are packed, for the `Params.layers` of a plan with a stack for each."""

    def packing(layer: Any) -> Packing:
        grids = (grid_of(assembly, stored) for assembly in assemblies_of(layer))
        # A TPU has integers in place of blocks of any type.
        return tuple(Blocks if isinstance(grid, Blocks) and not packs_integers() else grid for grid in grids)

    return [packing(layer) for layer in layers]


def packed_anew(layers: Sequence[Layer], packings: Sequence[Packing]) -> list[int]:
    """Returns the layers packed in another way than the last equal one, with which a new stack must begin."""
    known: dict[Layer, Packing] = {}
    anew = []
    for i, (layer, own) in enumerate(zip(layers, packings, strict=True)):
        anew += [i] if known.setdefault(layer, own) != own else []
        known[layer] = own
    return anew
