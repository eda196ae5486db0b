"""The parts of a step's results on the devices of a mesh: no later step depends on a choice of the compiler."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.model.batch import StepOutput
from jaxinfer.model.cache import KVCache, cache_shardings
from jaxinfer.model.decoder import logits_sharding
from jaxinfer.steps.options import StepOptions

Output = TypeVar("Output")


def placed(output: Output, cache: KVCache, options: StepOptions) -> tuple[Output, KVCache]:
    """Returns a step's output, whole on every device but for its logits, and its cache, split as it came."""
    if options.mesh is None:
        return output, cache
    at = cache_shardings(cache, options.mesh, config=options.config)
    return replicated(output, options.mesh), jax.lax.with_sharding_constraint(cache, at)


def replicated(tree: Output, mesh: Mesh | None) -> Output:
    """Returns the arrays of a tree whole on every device of a mesh, but for the logits of a step's output."""
    if mesh is None:
        return tree
    whole = NamedSharding(mesh, PartitionSpec())
    if not isinstance(tree, StepOutput) or tree.logits is None:
        return jax.lax.with_sharding_constraint(tree, whole)
    at = replace(jax.tree.map(lambda _: whole, tree), logits=logits_sharding(mesh, tree.logits.shape[1]))
    return jax.lax.with_sharding_constraint(tree, at)
