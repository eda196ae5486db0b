"""`jaxinfer doctor`: whether this CPU gives a token the same bits whatever is computed beside it.

It traces every step of an engine's configuration, without any weights, and runs each shape of product that it finds
there. `kernels_pallas.row_products` says why a shape might fail.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.checkpoint import abstract_checkpoint
from jaxinfer.config import EngineConfig
from jaxinfer.engine.compiling import StepCompiler
from jaxinfer.engine.warm_up import plan_target
from jaxinfer.plan.products import ProductShape, product_shapes
from kernels_pallas.row_products import BY_WEIGHTS, PRODUCTS, ROW_BLOCK, multiply, trial_operands

# Products that are run side by side: two weights at once as in steps, and pages of several rows and KV heads.
SIDE_BY_SIDE = (2, 8)


@dataclass(frozen=True)
class Finding:
    """A product of the engine's steps, with all numbers of rows that it has in them, and what depends on the batch."""

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
    """Yields a finding for each product in the steps of an engine; none of them has faults if bits are exact.

    Raises ValueError if the default device is no CPU: elsewhere bits depend on the batch.
    """
    if jax.default_backend() != "cpu":
        raise ValueError(
            f"the device is a {jax.default_backend()}, on which bits depend on the batch; jaxinfer promises them on CPU"
            " (run with JAX_PLATFORMS=cpu)"
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
    counts = sorted({ROW_BLOCK, *row_counts})
    num_rows = -(-counts[-1] // ROW_BLOCK) * ROW_BLOCK
    rows, operand = trial_operands(form, num_rows, num_inputs, num_outputs, dtype)
    run = functools.partial(multiply, form=form)
    blocks = [rows[..., i : i + ROW_BLOCK, :] for i in range(0, num_rows, ROW_BLOCK)]
    products = [np.asarray(run(block, operand)) for block in blocks]
    expected = np.concatenate(products, axis=-2)
    faults = [
        f"other bits with {count} rows than with {ROW_BLOCK}"
        for count in counts
        if not np.array_equal(run(rows[..., :count, :], operand), expected[..., :count, :])
    ]
    block, product = blocks[0], products[0]
    for shift in range(1, ROW_BLOCK):
        if not np.array_equal(run(np.roll(block, shift, axis=-2), operand), np.roll(product, shift, axis=-2)):
            faults.append(f"other bits {shift} places further on")
    alone = np.full_like(block, np.nan)
    alone[..., :1, :] = block[..., :1, :]
    if not np.array_equal(np.asarray(run(alone, operand))[..., :1, :], product[..., :1, :]):
        faults.append("other bits beside other rows")
    for count in SIDE_BY_SIDE:
        many = _multiply_many(np.stack([block[..., ::-1, :], *[block] * (count - 1)]), operand, form=form)
        if not all(np.array_equal(one, product) for one in np.asarray(many)[1:]):
            faults.append(f"other bits beside {count - 1} other products")
    return faults


@functools.partial(jax.jit, static_argnames="form")
def _multiply_many(rows: jax.Array, operand: jax.Array, *, form: str) -> jax.Array:
    """Returns the products of each of rows [n, ...] by one operand, side by side as steps compute them."""
    if form == BY_WEIGHTS:
        return jnp.stack([PRODUCTS[form](x, operand) for x in rows])
    many = PRODUCTS[form](rows[:, 0], jnp.broadcast_to(operand, (rows.shape[0], *operand.shape[1:])))
    return many[:, None]
