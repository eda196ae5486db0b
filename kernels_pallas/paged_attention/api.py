"""The one signature of paged attention, and the choice among its implementations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard, TypeVar

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from kernels_pallas.device import device_at_hand
from kernels_pallas.mesh_axes import HEADS_AXES, dividing_axes, num_parts
from kernels_pallas.paged_attention.gpu.entry import paged_attention_gpu
from kernels_pallas.paged_attention.layout import Pages, head_specs
from kernels_pallas.paged_attention.reference import paged_attention_reference
from kernels_pallas.paged_attention.shapes import check_call
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

# Those that derive from the lengths of a step what is the same in all layers.
PLANNERS: dict[str, Callable[..., Any]] = {"tpu": plan_step, "tpu_interpret": plan_step}


def plan_attention(
    pages: Pages,
    *,
    num_tokens: int,
    num_heads: int,
    block_tables: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    q_len: int | None = None,
    tree_mask: jax.Array | None = None,
    mesh: Mesh | None = None,
    implementation: str | None = None,
) -> Any:
    """Returns the plan of a step, an opaque tree of arrays for `paged_attention`; None if the implementation has none.

    Layers share a plan if their pages have one shape and their query heads one number. The arguments are those
    of `paged_attention`, for `num_tokens` tokens (T) of `num_heads` heads (N).
    """
    plan = planner_of(PLANNERS, implementation)
    if plan is None or pages.layout != "tpu":
        return None
    (pool,), K, G = pages.arrays, pages.num_kv_heads, num_heads // pages.num_kv_heads
    if splits_heads(mesh):
        axes = dividing_axes(K, mesh, HEADS_AXES)
        (spec,), K = head_specs(pages, axes).arrays, K // num_parts(mesh, axes)
        pool = jax.ShapeDtypeStruct(NamedSharding(mesh, spec).shard_shape(pool.shape), pool.dtype)
    lens: dict[str, Any] = {"block_tables": block_tables, "kv_lens": kv_lens, "cu_q_lens": cu_q_lens}
    sizes: dict[str, Any] = {"num_tokens": num_tokens, "num_kv_heads": K, "num_groups": G}
    return plan(pool, **sizes, **lens, q_len=q_len, tree_mask=tree_mask)


def paged_attention(
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    pages: Pages,
    *,
    block_tables: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    scale: float,
    page_offset: jax.Array | int = 0,
    q_len: int | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    tree_mask: jax.Array | None = None,
    plan: Any = None,
    mesh: Mesh | None = None,
    implementation: str | None = None,
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
      block_tables: i32[B, M] page ids; entries past a row's length, and of pages wholly behind the window of its first
        token here, may be anything inside the pool.
      kv_lens: i32[B] context lengths in tokens, this step's included; 0 marks a padding row, which writes nothing.
      cu_q_lens: i32[B + 1] where each row's tokens start; padding rows are empty unless `q_len` is given.
      scale: multiplies the scores.
      page_offset: i32[] added to every page id: where a layer's pages begin in the pool of its group.
      q_len: the most tokens that a row has, where that is known; lets the kernel specialise. 1 says that every row has
        one, the padding rows included.
      window: a query at position p sees only the keys at positions above p - window; None sees all.
      softcap: bounds the scores by a tanh; None leaves them.
      sinks: f32[N] a score per query head that takes part in the softmax and carries no value; None for none.
      k_scale, v_scale: f32[K] what a number in the pool is worth; None is 1. A pool of integers needs them, or has a
        scale for each token. A pool of 8 bits holds the largest it can of what is larger.
      tree_mask: u32[T, words] replaces causality among a row's own tokens, for trees of drafts: all that came before
        this step is visible, and token j of the row if bit j % 32 of word j // 32 is set. A token's bits are itself
        and its ancestors; for `window` it stands where their number puts it, and sees all of its ancestors.
      plan: what `plan_attention` made of the same step, mesh and implementation, so that each layer need not make it.
      mesh: splits heads over the devices of its HEADS_AXES: each computes its own KV heads, with the query heads that
        read them and its part of the pool. If all of these axes do not divide the KV heads, the last ones that do split
        them; devices along the others compute the same. Its axes are automatic, as those of `Mesh(…)` are and those of
        `jax.make_mesh(…)` are not by default. Without it the call runs whole on every device.
      implementation: a name from `IMPLEMENTATIONS`, or None for the device's own: the kernels of a TPU or GPU, which
        raise for a call that they cannot do, or the reference on a CPU and on GPUs of a compute capability below 8.0.

    Returns:
      [T, N, H] in q's dtype, and the pool. Values at padding positions mean nothing; they are finite where no q_len
      above 1 is given.

    Raises:
      ValueError: for an unknown implementation or arrays that do not fit together.
      NotImplementedError: when the implementation cannot do this call, with the reason.
    """
    check_call(q, k, v, pages, block_tables, kv_lens, cu_q_lens, sinks, k_scale, v_scale, tree_mask)
    if window is not None and window < 1:
        raise ValueError(f"window={window} is not allowed: a query sees at least itself; use None for no window")
    arrays = {
        "q": q,
        "k": k,
        "v": v,
        "pages": pages,
        "block_tables": block_tables,
        "kv_lens": kv_lens,
        "cu_q_lens": cu_q_lens,
        "page_offset": page_offset,
        "sinks": sinks,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "tree_mask": tree_mask,
        **({} if plan is None else {"plan": plan}),
    }
    attend = implementation_of(IMPLEMENTATIONS, implementation, "paged attention")
    call = functools.partial(attend, scale=scale, q_len=q_len, window=window, softcap=softcap)
    if not splits_heads(mesh):
        return call(**arrays)
    axis = dividing_axes(pages.num_kv_heads, mesh, HEADS_AXES)
    heads: dict[str, PartitionSpec] = dict.fromkeys(("q", "k", "v"), PartitionSpec(None, axis))
    heads |= dict.fromkeys(("sinks", "k_scale", "v_scale"), PartitionSpec(axis))
    specs = {name: heads.get(name, PartitionSpec()) for name in arrays} | {"pages": head_specs(pages, axis)}
    specs = {name: None if arrays[name] is None else spec for name, spec in specs.items()}
    # Kernels are opaque to the replication check.
    return jax.shard_map(
        lambda arrays: call(**arrays),
        mesh=mesh,
        in_specs=(specs,),
        out_specs=(heads["q"], specs["pages"]),
        check_vma=False,
    )(arrays)


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
