"""The one signature of paged attention, and the choice among its implementations."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard, TypeVar

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from kernels_pallas.device import device_at_hand
from kernels_pallas.exact_sums import sums_are_exact
from kernels_pallas.mesh_axes import HEADS_AXES, dividing_axes, over_devices
from kernels_pallas.mesh_axes import num_parts as count_parts
from kernels_pallas.paged_attention.call import AttentionCall, HeadOptions, check_call
from kernels_pallas.paged_attention.gpu.append_products import append_products as append_products_gpu
from kernels_pallas.paged_attention.gpu.entry import MAX_HEAD_DIM, PAGE_SIZES, paged_attention_gpu
from kernels_pallas.paged_attention.gpu.sum_order import SumOrder
from kernels_pallas.paged_attention.layout import Pages, head_specs
from kernels_pallas.paged_attention.reference import paged_attention_reference
from kernels_pallas.paged_attention.tpu.entry import paged_attention_tpu, paged_attention_tpu_interpreted, plan_step

Implementation = Callable[..., tuple[jax.Array, Pages]]
F = TypeVar("F", bound=Callable[..., Any])

# The first two are named after the platform whose default they are; the interpreted ones are for tests.
IMPLEMENTATIONS: dict[str, Implementation] = {
    "tpu": paged_attention_tpu,
    "gpu": paged_attention_gpu,
    "reference": paged_attention_reference,
    "tpu_interpret": paged_attention_tpu_interpreted,
    "gpu_interpret": functools.partial(paged_attention_gpu, interpret=True),
}

# Those that take an order of sums.
ORDERED = ("gpu", "gpu_interpret")

# Those that derive from the lengths of a step what is the same in all layers.
PLANNERS: dict[str, Callable[..., Any]] = {"tpu": plan_step, "tpu_interpret": plan_step}


def plan_attention(pages: Pages, call: AttentionCall, *, num_tokens: int, num_heads: int) -> Any:
    """Returns the plan of a step, an opaque tree of arrays for `AttentionCall.plan`; None if none is needed.

    Layers share a plan if their pages have one shape and their query heads one number: `num_tokens` tokens (T) of
    `num_heads` heads (N).
    """
    plan = planner_of(PLANNERS, call.implementation)
    if plan is None or pages.layout != "tpu":
        return None
    (pool,), K, G = pages.arrays, pages.num_kv_heads, num_heads // pages.num_kv_heads
    if splits_heads(call.mesh):
        axes = dividing_axes(K, call.mesh, HEADS_AXES)
        (spec,), K = head_specs(pages, axes).arrays, K // count_parts(call.mesh, axes)
        pool = jax.ShapeDtypeStruct(NamedSharding(call.mesh, spec).shard_shape(pool.shape), pool.dtype)
    sizes = {"num_tokens": num_tokens, "num_kv_heads": K, "num_groups": G}
    return plan(pool, call, **sizes, has_scales=pages.scales is not None)


def paged_attention(
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    pages: Pages,
    call: AttentionCall,
    *,
    sinks: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    order: SumOrder | None = None,
) -> tuple[jax.Array, Pages]:
    """Appends keys and values of a ragged batch to their pages, and attends to all that each row's pages hold.

    Row b owns the tokens `cu_q_lens[b]:cu_q_lens[b + 1]`, which are the last of its context of `kv_lens[b]` tokens.
    Token i of them stands at position p = kv_lens[b] - q_len_b + i, in slot p % S of page block_tables[b, p // S]; its
    key and value are written there first. Query head n reads KV head n // G. The result per row is
    softmax(softcap * tanh(scale * q kᵀ / softcap), mask) v, accumulated in float32. Slots past a row's length are never
    read into the result, whatever they hold, and may hold anything afterwards.

    No row may write to a page that another row of the same call reads: kernels overlap rows. (Rows may share full
    pages; a row that needs what a neighbour computes has to wait for the next step.)

    Args:
      q: [T, N, H] queries, rows one after another, padding last.
      k, v: [T, K, H] keys and values of the same tokens. Both None where they are in the pool already, as in layers
        that share them: then nothing is written and the pool is returned as it came.
      pages: the pool, in any layout. Donate it at the outermost `jit`, and it is updated in place.
      call: the rows, and how they attend.
      sinks: f32[N] a score per query head that takes part in the softmax and carries no value; None for none.
      k_scale, v_scale: f32[K] what a number in the pool is worth; None is 1. A pool of integers needs them, or has a
        scale for each token. A pool of 8 bits holds the largest it can of what is larger.
      order: the order of sums on GPU, by which a token's bits depend on no batch. None takes the fastest of each batch,
        or the usual order inside `exact_sums`.

    Returns:
      [T, N, H] in q's dtype, and the pool. Values at padding positions mean nothing; they are finite where no q_len
      above 1 is given.

    Raises:
      ValueError: for an unknown implementation or arrays that do not fit together.
      NotImplementedError: when the implementation cannot do this call, with the reason.
    """
    check_call(q, k, v, pages, call, sinks, k_scale, v_scale)
    if order is None and sums_are_exact():
        order = SumOrder()
    attend = implementation_of(IMPLEMENTATIONS, call.implementation, "paged attention")
    if order is not None:
        name = call.implementation or default_implementation()
        if name not in ORDERED:
            raise NotImplementedError(
                f"order is not supported by implementation={name!r}; supported: {ORDERED}; leave it out elsewhere"
            )
        attend = functools.partial(attend, order=order)
    if not splits_heads(call.mesh):
        return attend(q, k, v, pages, call, sinks=sinks, k_scale=k_scale, v_scale=v_scale)
    axis = dividing_axes(pages.num_kv_heads, call.mesh, HEADS_AXES)
    heads, pool = PartitionSpec(None, axis), head_specs(pages, axis)
    of_heads = dict.fromkeys(("sinks", "k_scale", "v_scale"), PartitionSpec(axis))
    split = over_devices(
        lambda operands, of_heads: attend(*operands, **of_heads),
        call.mesh,
        in_specs=((heads, heads, heads, pool, PartitionSpec()), of_heads),
        out_specs=(heads, pool),
    )
    return split((q, k, v, pages, call), {"sinks": sinks, "k_scale": k_scale, "v_scale": v_scale})


def can_append_products(pages: Pages, call: AttentionCall, *, num_parts: int, dtype: Any) -> bool:
    """Returns whether `append_products` can do a call: on GPU, for pages that hold keys and values in their dtype.

    Over a mesh products [T, P, S / P, H] have a part for each device with KV heads of its own: `num_parts` is P.
    """
    name = call.implementation or default_implementation()
    axes = dividing_axes(pages.num_kv_heads, call.mesh, HEADS_AXES) if splits_heads(call.mesh) else None
    has_own = num_parts == (1 if axes is None or call.mesh is None else count_parts(call.mesh, axes))
    is_fitting = pages.layout == "gpu" and pages.dtype == dtype and pages.page_size in PAGE_SIZES
    return name in ("gpu", "gpu_interpret") and is_fitting and has_own and pages.head_dim <= MAX_HEAD_DIM


def append_products(
    products: jax.Array, pages: Pages, call: AttentionCall, heads: HeadOptions
) -> tuple[jax.Array, Pages]:
    """Norms and rotates queries, keys and values, and appends the latter two: what precedes attention, in one launch.

    Then `paged_attention(q, None, None, pages, call)` attends. For calls that `can_append_products`.

    Args:
      products: [T, P, (N + 2 K) / P, H] queries, keys and values of each of P devices, rows one after another.
      pages: the pool, of the same dtype.
      call: the rows.
      heads: how they become those of the attention.

    Returns:
      The queries [T, N, H], and the pool with keys and values of the tokens.
    """

    def append(products: jax.Array, pages: Pages, call: AttentionCall, heads: HeadOptions) -> tuple[jax.Array, Pages]:
        own = products.reshape(products.shape[0], -1, products.shape[-1])
        return append_products_gpu(own, pages, call, heads, interpret=call.implementation == "gpu_interpret")

    if not splits_heads(call.mesh):
        return append(products, pages, call, heads)
    axis = dividing_axes(pages.num_kv_heads, call.mesh, HEADS_AXES)
    split, pool = PartitionSpec(None, axis), head_specs(pages, axis)
    split_arrays = ("q_bias", "k_bias", "v_bias")  # those with an axis of heads
    of_heads = {name: PartitionSpec(axis) if name in split_arrays else PartitionSpec() for name in heads.arrays()}
    return over_devices(
        append,
        call.mesh,
        in_specs=(split, pool, PartitionSpec(), dataclasses.replace(heads, **of_heads)),
        out_specs=(split, pool),
    )(products, pages, call, heads)


def splits_heads(mesh: Mesh | None) -> TypeGuard[Mesh]:
    """Returns whether a mesh splits heads.

    Raises:
      ValueError: if it does and has axes that are not automatic.
    """
    if mesh is None or not {*HEADS_AXES} & {*mesh.axis_names}:
        return False
    if any(kind != AxisType.Auto for kind in mesh.axis_types):
        raise ValueError(f"mesh has axes of types {mesh.axis_types}; use automatic ones: Mesh(devices, axis_names)")
    return True


def implementation_of(implementations: Mapping[str, F], name: str | None, operation: str) -> F:
    """Returns the implementation of that name, or the device's own, which says the way out of what it cannot do.

    Raises:
      ValueError: for an unknown name.
    """
    if name is not None and name not in implementations:
        raise ValueError(f"implementation={name!r:.80} is unknown; choose from {sorted(implementations)} or None")
    if name is not None:
        return implementations[name]
    own = default_implementation()

    def attend(*args: Any, **kwargs: Any) -> Any:
        try:
            return implementations[own](*args, **kwargs)
        except NotImplementedError as error:
            raise NotImplementedError(
                f"the {own} kernels of {operation} cannot do this call: {error}; or ask for plain JAX, which is many"
                ' times slower, by implementation="reference" (of an engine EngineConfig.attention)'
            ) from error

    return attend  # pyright: ignore[reportReturnType]


def planner_of(planners: Mapping[str, F], name: str | None) -> F | None:
    """Returns the planner of the implementation of that name, or of the device's own; None if it has none."""
    return planners.get(name or default_implementation())


def default_implementation() -> str:
    """Returns the name of the implementation for the device that is compiled for.

    On an accelerator that is its kernels, whether or not they can do a call: the reference is there for platforms
    without kernels, and for GPUs before Ampere, which Triton does not compile for.
    """
    device = device_at_hand()
    has_kernels = device.platform in ("gpu", "tpu") and not device.is_before_ampere
    return device.platform if has_kernels else "reference"
