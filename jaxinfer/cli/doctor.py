"""`jaxinfer doctor`: checks that on this CPU no matrix product of the steps changes its bits with the batch.

It traces all steps of an engine's configuration without weights, and runs every product shape that it finds.
`kernels_pallas.row_products` explains possible failures.
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
from jaxinfer.config import EngineConfig, Parallelism
from jaxinfer.engine.execution.step_compiler import StepCompiler
from jaxinfer.engine.execution.warm_up import plan_target
from jaxinfer.plan.cache import MemoryQuestion, model_of_engine
from jaxinfer.plan.products import ProductShape, product_shapes
from jaxinfer.plan.step_shapes import loop_steps
from jaxinfer.validation import require
from kernels_pallas.row_products import (
    BY_WEIGHTS,
    PRODUCTS,
    ROW_BLOCK,
    equal_row_counts,
    is_equal_together,
    multiply,
    trial_operands,
)

# Products that a step runs side by side: two row blocks times weights; pages of several rows and KV heads.
WEIGHTS_TOGETHER, MATRICES_TOGETHER = (2,), (2, 8, 64)


@dataclass(frozen=True)
class Finding:
    """A product in the engine's steps: its sizes, all its row counts, and its faults."""

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
    """Yields a finding for each product in the steps of an engine; it has no faults if its bits never change.

    Raises ValueError if the default device is no CPU, because elsewhere bits depend on the batch.
    """
    if jax.default_backend() != "cpu":
        raise ValueError(
            f"the device is a {jax.default_backend()}, on which bits depend on the batch without --exact; these trials"
            " are of CPUs (JAX_PLATFORMS=cpu)"
        )
    counts: dict[tuple[str, int, int, str], set[int]] = defaultdict(set)
    for shape in engine_products(model, config, dtype):
        counts[shape.form, shape.num_inputs, shape.num_outputs, shape.dtype].add(shape.num_rows)
    for product, row_counts in sorted(counts.items()):
        yield Finding(*product, tuple(sorted(row_counts)), tuple(find_faults(*product, row_counts)))


def engine_products(model: str | Path, config: EngineConfig, dtype: str) -> frozenset[ProductShape]:
    """Returns the products of all steps of an engine, including steps that verify drafts.

    Raises ValueError for an engine on several devices, each of which computes other products.
    """
    require(config.parallelism in (None, Parallelism()), "parallelism", config.parallelism, "left out by the doctor")
    params, model_config = abstract_checkpoint(model, dtype, quantization=config.quantization)
    question = MemoryQuestion(model=model_of_engine(model_config, config), config=config, dtype=dtype)
    target = plan_target(params, question, {})
    compiler = StepCompiler(target, 0 if loop_steps(config) > 1 else config.max_drafts)
    return frozenset().union(
        *(product_shapes(compiler.trace(target.cache_config, bucket)) for bucket in compiler.buckets)
    )


def find_faults(form: str, num_inputs: int, num_outputs: int, dtype: str, row_counts: Iterable[int]) -> list[str]:
    """Returns a description of each way in which a row's bits depend on other rows or other products."""
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
