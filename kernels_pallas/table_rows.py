"""Rows of a table of embeddings, by token.

XLA for TPU lays an array out with least padding. A table whose rows do not fill whole registers then lies turned, with
tokens along lanes. XLA copies all of it before it takes rows: 592 MB in each step of GPT-OSS, with 2,880 numbers a row.
The Pallas kernel reads the table as it lies, 128 tokens at a time, of which it keeps one. Tokens are sorted, so that
those of one block read it once.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding, PartitionSpec

from kernels_pallas.device import LANES, VMEM_BYTES, lies_turned
from kernels_pallas.mesh_axes import over_devices


def table_rows(
    table: jax.Array, tokens: jax.Array, *, sharding: NamedSharding | None = None, interpret: bool = False
) -> jax.Array:
    """Returns table[tokens] [T, D] for a table [V, D] and tokens i32[T] from 0 to V - 1.

    On a TPU a table that lies turned is read by a kernel, elsewhere by XLA. `sharding`: that of a table over a mesh;
    without it the call runs whole on every device. `interpret` runs the kernel on any device, for tests. The kernel has
    no derivative.
    """
    V, D = table.shape if sharding is None else sharding.shard_shape(table.shape)
    if not lies_turned(V, D) or tokens.shape[0] == 0:
        return table[tokens]
    by_kernel = functools.partial(_by_kernel, interpret=interpret)
    if sharding is not None:
        by_kernel = functools.partial(_over_mesh, by_kernel, sharding)
    if interpret:
        return by_kernel(table, tokens)
    return jax.lax.platform_dependent(table, tokens, tpu=by_kernel, default=lambda table, tokens: table[tokens])


def _over_mesh(by_kernel: Any, sharding: NamedSharding, table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Each device takes the rows of its own tokens, and the sum over devices joins them."""
    axis, *others = [*sharding.spec, None, None][:2]
    if others != [None]:
        raise NotImplementedError(f"a table split by {sharding.spec} is not supported; split its tokens alone")

    def own_rows(table: jax.Array, tokens: jax.Array) -> jax.Array:
        if axis is None:
            return by_kernel(table, tokens)
        own = tokens - jax.lax.axis_index(axis) * table.shape[0]
        is_own = (own >= 0) & (own < table.shape[0])
        # The others sort last, and read one block at most.
        rows = by_kernel(table, jnp.where(is_own, own, table.shape[0] - 1))
        return jax.lax.psum(jnp.where(is_own[:, None], rows, jnp.zeros((), rows.dtype)), axis)

    specs = (PartitionSpec(axis, None), PartitionSpec())
    split = over_devices(own_rows, sharding.mesh, in_specs=specs, out_specs=PartitionSpec())
    return split(table, tokens)


def _by_kernel(table: jax.Array, tokens: jax.Array, *, interpret: bool) -> jax.Array:
    (T,), D = tokens.shape, table.shape[1]
    order = jnp.argsort(tokens)
    turned = pl.pallas_call(
        _kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(T,),
            in_specs=[pl.BlockSpec((D, LANES), lambda turn, tokens: (0, tokens[turn] // LANES))],
            out_specs=pl.BlockSpec((D, LANES), lambda turn, tokens: (0, turn // LANES)),
        ),
        out_shape=jax.ShapeDtypeStruct((D, T), table.dtype),
        interpret=interpret,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM_BYTES),
        name="table_rows",
    )(tokens[order].astype(jnp.int32), table.T)
    return turned.T[jnp.argsort(order)]


def _kernel(tokens: Any, block: Any, out: Any) -> None:
    """One turn: the lane of a token of block [D, LANES] becomes the lane of its turn in out [D, LANES]."""
    turn = pl.program_id(0)
    lane = jax.lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
    # A sum of one number and zeros, in float32, is that number.
    is_token = lane == tokens[turn] % LANES
    row = jnp.where(is_token, block[...].astype(jnp.float32), 0.0).sum(axis=1, keepdims=True)
    out[...] = jnp.where(lane == turn % LANES, row.astype(out.dtype), out[...])
