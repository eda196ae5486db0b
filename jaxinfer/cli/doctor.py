"""`jaxinfer doctor`: checks that on this CPU no product of an engine's steps has other bits in another batch.

It traces every step of an engine's configuration, without any weights, and runs each shape of product that it finds
there. `kernels_pallas.row_products` says why a shape might fail.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.checkpoint import abstract_checkpoint
from jaxinfer.config import EngineConfig
from jaxinfer.engine.execution.step_compiler import StepCompiler
from jaxinfer.engine.execution.warm_up import plan_target
from jaxinfer.plan.products import ProductShape, product_shapes
from kernels_pallas.row_products import (
    BY_WEIGHTS,
    PRODUCTS,
    ROW_BLOCK,
    equal_row_counts,
    is_equal_together,
    multiply,
    trial_operands,
)

# How many products steps run side by side: two blocks of rows by weights, pages of several rows and KV heads.
WEIGHTS_TOGETHER, MATRICES_TOGETHER = (2,), (2, 8, 64)


@dataclass(frozen=True)
class Finding:
    """A product in the engine's steps: its sizes, every number of rows that it has in them, and its faults."""

    form: str
    num_inputs: int
    num_outputs: int
    dtype: str
    row_counts: tuple[int, ...]
    faults: tuple[str, ...]

    def __str__(self) -> str:
        counts = ", ".join(map(str, self.row_counts))
        shape = f"[n, {self.num_inputs}] -> [n, {self.num_outputs}] for n = {counts}"
        return f"{self.form or 'another product'} {shape}: {'; '.join(self.faults) or 'the same bits'}"


def examine(model: str | Path, config: EngineConfig, dtype: str) -> Iterator[Finding]:
    """Yields a finding for each product in the steps of an engine, without faults if its bits are independent.

    Raises ValueError if the default device is no CPU: elsewhere bits depend on the batch.
    """
    if jax.default_backend() != "cpu":
        raise ValueError(
            f"the device is a {jax.default_backend()}, on which bits depend on the batch; jaxinfer promises exact bits"
            " on CPU alone (JAX_PLATFORMS=cpu)"
        )
    counts: dict[tuple[str, int, int, str], set[int]] = defaultdict(set)
    for shape in engine_products(model, config, dtype):
        counts[shape.form, shape.num_inputs, shape.num_outputs, shape.dtype].add(shape.num_rows)
    for product, row_counts in sorted(counts.items()):
        yield Finding(*product, tuple(sorted(row_counts)), tuple(find_faults(*product, row_counts)))


def engine_products(model: str | Path, config: EngineConfig, dtype: str) -> frozenset[ProductShape]:
    """Returns the products of all steps of an engine, those that verify drafts included."""
    params, model_config = abstract_checkpoint(model, dtype, quantization=config.quantization)
    target = plan_target(params, model_config, config, dtype, {}, None)
    compiler = StepCompiler(target, 0 if config.decode_loop_steps > 1 else config.max_drafts)
    return frozenset().union(
        *(product_shapes(compiler.trace(target.cache_config, bucket)) for bucket in compiler.buckets)
    )


def find_faults(form: str, num_inputs: int, num_outputs: int, dtype: str, row_counts: Iterable[int]) -> list[str]:
    """Returns in what way the bits of a row depend on the rows and products beside it."""
    if form not in PRODUCTS:
        return ["not a product of kernels_pallas.row_products"]
    others = tuple(sorted({*row_counts} - {ROW_BLOCK}))
    equal = equal_row_counts(form, others, num_inputs, num_outputs, dtype) if others else frozenset()
    faults = [f"other bits with {count} rows than with {ROW_BLOCK}" for count in others if count not in equal]
    block, operand = trial_operands(form, ROW_BLOCK, num_inputs, num_outputs, dtype)
    operand = jnp.asarray(operand)
    expected = np.asarray(multiply(block, operand, form=form))
    for shift in range(1, ROW_BLOCK):
        moved = multiply(np.roll(block, shift, axis=-2), operand, form=form)
        if not np.array_equal(moved, np.roll(expected, shift, axis=-2)):
            faults.append(f"other bits {shift} places further down")
    alone = np.full_like(block, np.nan)
    alone[..., :1, :] = block[..., :1, :]
    if not np.array_equal(multiply(alone, operand, form=form)[..., :1, :], expected[..., :1, :]):
        faults.append("other bits beside other rows")
    for count in WEIGHTS_TOGETHER if form == BY_WEIGHTS else MATRICES_TOGETHER:
        if not is_equal_together(block, operand, expected, count, form=form):
            faults.append(f"other bits beside {count - 1} other products")
    return faults
