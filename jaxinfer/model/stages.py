"""Pipeline stages: an axis of the mesh whose devices share the layers, and pass parts of a step's tokens on.

A stage has the parameters and pages of its own layers. At tick t stage s computes part t - s, and hands its states to
the next stage (GPipe, Huang et al. 2019):

    tick      0  1  2  3  4        parts a b c d of the step's tokens, two stages
    stage 0   a  b  c  d  -        - is a part of padding: its device would wait anyway
    stage 1   -  a  b  c  d

A part is a batch of its own. A row that two parts share goes on in the second as a prompt does in the next step, and a
stage computes the parts in order. So no result depends on their number.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jaxinfer.model.batch import PADDING_SLOT, Batch
from jaxinfer.model.components.mixer_inputs import StepContext
from jaxinfer.model.components.recurrent.states import StateSlots, state_slots
from jaxinfer.model.config import Layer, LayerGroup, ModelConfig, PlacedGroup
from jaxinfer.model.layer_parts import Pool, source_of
from kernels_pallas.mesh_axes import STAGES_AXIS, devices_per_stage, num_stages

# Below this number of tokens a part takes no less time: its stage reads all its weights for any of them.
MIN_PART = 128


@struct.dataclass
class Parts:
    """The parts of a step's tokens, M in number. Each array has them on one more axis, in front."""

    batch: Batch
    slots: StateSlots | None = None  # of recurrent layers
    tree_mask: Any = None  # as in `AttentionCall`

    def at(self, index: Any) -> Parts:
        """Returns the part i32[]."""
        return jax.tree.map(lambda array: jax.lax.dynamic_index_in_dim(array, index, keepdims=False), self)


def are_shared(group: LayerGroup | PlacedGroup, mesh: Mesh | AbstractMesh | None) -> bool:
    """Returns whether stages of a mesh share the layers of a group; else each device computes its part of all."""
    return num_stages(mesh) > 1 and group.repeats % num_stages(mesh) == 0


def for_stages(
    config: ModelConfig,
    count: int,
    *,
    scans: bool,
    packings: Sequence[Hashable] = (),
    cuts: Collection[int] = (),
) -> ModelConfig:
    """Returns the same model with a group of layers that stages share: the longest run of `count` equal parts.

    All stages compute the layers before and after the run. If the device `scans`, a part repeats its shortest pattern.
    Layers of different `packings`, if these are given, are not equal. `cuts` are numbers of layers after which a group
    has to end. Raises ValueError if there is no such run, and if a cut is within it.
    """
    layers = config.layers
    numbers = _numbers(layers, packings or [()] * len(layers))
    first, size = _longest_parts(numbers, _are_alone(layers), count)
    end = first + size * count
    if not size:
        others = (n for n in range(2, len(layers) + 1) if _longest_parts(numbers, _are_alone(layers), n)[1])
        working = ", ".join(map(str, (1, *others)))
        raise ValueError(
            f"stages={count} cannot share the {len(layers)} layers of this model: no {count} runs of them are alike,"
            f" one after another, with keys and values of their own; the numbers that can are {working}"
        )
    if within := [cut for cut in cuts if first < cut < end]:
        raise ValueError(
            f"the states after layer {within[0]} are needed, which is within layers {first + 1} to {end} that"
            f" stages={count} share; use tensor in place of stages, or no drafter that reads inner states"
        )
    length = next(n for n in range(1, size + 1) if size % n == 0 and _repeats(numbers[first : first + size], n))
    length = length if scans else size
    shared = LayerGroup(layers[first : first + length], size * count // length)
    alone = [LayerGroup((layer,)) for layer in layers]
    return replace(config, groups=(*alone[:first], shared, *alone[end:]))


def _numbers(layers: Sequence[Layer], packings: Sequence[Hashable]) -> list[int]:
    """Returns a number for each layer, the same for equal ones."""
    known: dict[Any, int] = {}
    return [known.setdefault(pair, len(known)) for pair in zip(layers, packings, strict=True)]


def _are_alone(layers: Sequence[Layer]) -> list[bool]:
    """Returns for each layer whether it reads no other layer's keys and values, and none reads its own."""
    sources = [[source_of(mixer) for mixer in layer.mixers] for layer in layers]
    read = {source for own in sources for source in own}
    return [all(source is None for source in own) and i not in read for i, own in enumerate(sources)]


def _longest_parts(numbers: Sequence[int], is_alone: Sequence[bool], count: int) -> tuple[int, int]:
    """Returns the first layer and the size of `count` equal parts, one after another; a size of 0 if there are none."""
    num_barred = [*accumulate((not own for own in is_alone), initial=0)]  # before each layer
    for size in range(len(numbers) // count, 0, -1):
        # Layers equal to those one part later, in a row: parts are equal where these cover all parts but the last.
        run = 0
        for i in range(len(numbers) - size):
            run = run + 1 if numbers[i] == numbers[i + size] else 0
            first, end = i + 1 - size * (count - 1), i + 1 + size
            if run >= size * (count - 1) and num_barred[end] == num_barred[first]:
                return first, size
    return 0, 0


def _repeats(numbers: Sequence[int], length: int) -> bool:
    return all(number == numbers[i % length] for i, number in enumerate(numbers))


def cut_step(
    batch: Batch,
    mesh: Mesh,
    *,
    q_len: int | None,
    tree_mask: jax.Array | None,
    page_size: int,
    kind: int | None,
    slots: StateSlots | None,
) -> Parts | None:
    """Returns the parts of a step's tokens for the stages of a mesh; None for one stage.

    `q_len` and `tree_mask` are as in `AttentionCall`, `kind` is that of recurrent states, if the model has them. A step
    with `slots` of its own for states, or with trees of drafts, is one part: these need the whole row.
    """
    count = num_stages(mesh)
    if count == 1:
        return None
    M = num_parts_of(batch.tokens.shape[0], count) if slots is None and tree_mask is None else 1
    parts = (_cut_rows if q_len == 1 else _cut_tokens)(batch, M)
    slots, tree_mask = jax.tree.map(lambda array: array[None], (slots, tree_mask))
    if kind is not None and slots is None:
        slots = jax.vmap(lambda own: state_slots(own, page_size, kind))(parts)
    return Parts(parts, slots, tree_mask)


def num_parts_of(num_tokens: int, count: int) -> int:
    """Returns the number of parts of a step's tokens, of equal size: of MIN_PART tokens at least, or else one part."""
    most = min(4 * count, num_tokens // MIN_PART)
    return next((n for n in range(most, 1, -1) if num_tokens % n == 0), 1)


def _apart(array: Any, count: int) -> jax.Array:
    return jnp.reshape(array, (count, -1, *array.shape[1:]))


def _cut_rows(batch: Batch, count: int) -> Batch:
    """Returns the parts of a batch with a token for each row."""
    parts = jax.tree.map(lambda array: _apart(array, count), replace(batch, cu_q_lens=None))
    size = parts.tokens.shape[1]
    return replace(parts, cu_q_lens=jnp.broadcast_to(jnp.arange(size + 1, dtype=jnp.int32), (count, size + 1)))


def _cut_tokens(batch: Batch, count: int) -> Batch:
    """Returns the parts of any batch. Each has all rows, with those of their tokens that are in it.

    q_lens 3, 5 and kv_lens 3, 25, two parts -> q_lens 3 1 and 0 4, kv_lens 3 21 and 0 25.
    """
    tokens = {name: _apart(getattr(batch, name), count) for name in ("tokens", "positions", "slot_mapping")}
    size = tokens["tokens"].shape[1]
    first = (jnp.arange(count, dtype=jnp.int32) * size)[:, None]
    cu_q_lens = jnp.asarray(batch.cu_q_lens)[None]
    ends = jnp.clip(cu_q_lens, first, first + size)  # [M, B + 1]
    num_later = cu_q_lens[:, 1:] - ends[:, 1:]
    kv_lens = jnp.asarray(batch.kv_lens)[None]
    has_tokens = (ends[:, 1:] > ends[:, :-1]) & (kv_lens > 0)

    def in_each(array: Any) -> jax.Array:
        return jnp.broadcast_to(jnp.asarray(array), (count, *array.shape))

    names = ("block_tables", "bounded_tables", "adapters")
    tables = {name: jax.tree.map(in_each, getattr(batch, name)) for name in names}
    kv_lens = jnp.where(has_tokens, kv_lens - num_later, 0)
    return Batch(**tokens, **tables, cu_q_lens=ends - first, kv_lens=kv_lens)


def _idle_unless(is_busy: jax.Array, parts: Parts, q_len: int | None) -> Parts:
    """Returns a part, or one of padding, which writes nothing. `q_len` is as in `AttentionCall`."""

    def padding_unless(slots: jax.Array) -> jax.Array:
        return jnp.where(is_busy, slots, PADDING_SLOT)

    batch = parts.batch
    kv_lens = jnp.where(is_busy, batch.kv_lens, 0)
    # Padding rows are empty, unless every row has a token.
    cu_q_lens = batch.cu_q_lens if q_len == 1 else jnp.where(is_busy, batch.cu_q_lens, 0)
    idle = replace(batch, slot_mapping=padding_unless(batch.slot_mapping), kv_lens=kv_lens, cu_q_lens=cu_q_lens)
    return replace(parts, batch=idle, slots=jax.tree.map(padding_unless, parts.slots))


def run_in_stages(
    run: Callable[..., tuple[jax.Array, tuple[Pool, ...]]],
    params: Any,
    pools: tuple[Pool, ...],
    x: jax.Array,
    numbers: jax.Array | None,
    context: StepContext,
    *,
    group: PlacedGroup,
) -> tuple[jax.Array, tuple[Pool, ...]]:
    """Returns run(params, pools, x, numbers, context, group=group), each stage computing its own layers of the group.

    Raises NotImplementedError for a derivative, and ValueError for layers that read the keys of others.
    """
    mesh, parts = context.mesh, context.parts
    assert mesh is not None
    assert parts is not None
    _refuse_unbuilt(context, group)
    S, M = mesh.shape[STAGES_AXIS], parts.batch.tokens.shape[0]
    own_mesh = stage_mesh(mesh)
    stacks = tuple(stack._replace(num_layers=stack.num_layers // S) for stack in group.stacks)
    own_group = group._replace(repeats=group.repeats // S, stacks=stacks)

    def stage(params: Any, pools: Any, numbers: Any, number: Any, x: jax.Array, angles: Any, parts: Parts) -> Any:
        s = number[0]

        def tick(t: jax.Array, carry: Any) -> Any:
            pools, came, out = carry
            m, is_busy = jnp.clip(t - s, 0, M - 1), (t >= s) & (t - s < M)
            own, own_angles = _idle_unless(is_busy, parts.at(m), context.q_len), jax.tree.map(lambda a: a[m], angles)
            of_part = {"batch": own.batch, "slots": own.slots, "tree_mask": own.tree_mask, "angles": own_angles}
            step = replace(context, **of_part, parts=None, mesh=own_mesh)
            own_numbers = None if numbers is None else numbers[:, :, m]
            y, pools = run(params, pools, jnp.where(s == 0, x[m], came), own_numbers, step, group=own_group)
            # A part of padding is dropped.
            out = out.at[jnp.where(is_busy, m, M)].set(y, mode="drop")
            return pools, jax.lax.ppermute(y, STAGES_AXIS, [(i, i + 1) for i in range(S - 1)]), out

        pools, _, out = jax.lax.fori_loop(0, M + S - 1, tick, (pools, jnp.zeros_like(x[0]), jnp.zeros_like(x)))
        return _of_last_stage(out, s == S - 1), pools

    whole, split = PartitionSpec(), PartitionSpec(STAGES_AXIS)
    specs = (split, split, split, split, whole, whole, whole)
    run_stages = _over_stages(stage, mesh, in_specs=specs, out_specs=(whole, split))
    of_parts = jax.tree.map(lambda array: _apart(array, M), (x, context.angles))
    if numbers is not None:
        numbers = numbers.reshape(*numbers.shape[:2], M, -1, numbers.shape[-1])
    out, pools = run_stages(params, pools, numbers, jnp.arange(S), *of_parts, parts)
    return out.reshape(x.shape), pools


def in_stages(change: Callable[..., Pool], mesh: Mesh | None, pool: Pool, num_layers: int, *arrays: jax.Array) -> Pool:
    """Returns change(pool, num_layers, *arrays) for a pool of n layers, each stage for its own layers."""
    if mesh is None or num_stages(mesh) == 1 or num_layers % num_stages(mesh):
        return change(pool, num_layers, *arrays)
    split, own = PartitionSpec(STAGES_AXIS), num_layers // num_stages(mesh)

    def change_own(pool: Pool, arrays: tuple[jax.Array, ...]) -> Pool:
        return change(pool, own, *arrays)

    return _over_stages(change_own, mesh, in_specs=(split, PartitionSpec()), out_specs=split)(pool, arrays)


def _over_stages(function: Callable[..., Any], mesh: Mesh, *, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Returns the function by which each stage computes with its own parts of the arguments."""
    # Axes of one device too, or kernels would need a `shard_map` of their own.
    axes = {*mesh.axis_names} if devices_per_stage(mesh) == 1 else {STAGES_AXIS}
    specs: dict[str, Any] = {"in_specs": in_specs, "out_specs": out_specs, "axis_names": axes}
    # Kernels are opaque to the replication check.
    return jax.shard_map(function, mesh=mesh, check_vma=False, **specs)


def stage_mesh(mesh: Mesh) -> Mesh | None:
    """Returns the mesh of the first stage's devices; None if a stage has one device."""
    if devices_per_stage(mesh) == 1:
        return None
    axis = mesh.axis_names.index(STAGES_AXIS)
    return Mesh(mesh.devices.take(0, axis), tuple(name for name in mesh.axis_names if name != STAGES_AXIS))


def _of_last_stage(x: jax.Array, is_last: jax.Array) -> jax.Array:
    """Returns the numbers x [..., D] of the last stage on all of them."""
    # As integers of 32 bits: a sum with zeros would turn -0 into 0, and libraries add up no integers of 16.
    each = 4 // x.dtype.itemsize
    words = x if each == 1 else x.reshape(*x.shape[:-1], -1, each)
    words = jax.lax.bitcast_convert_type(words, jnp.uint32)
    words = jax.lax.psum(jnp.where(is_last, words, jnp.uint32(0)), STAGES_AXIS)
    return jax.lax.bitcast_convert_type(words, x.dtype).reshape(x.shape)


def _refuse_unbuilt(context: StepContext, group: PlacedGroup) -> None:
    if context.num_whole_rows is not None:
        raise NotImplementedError(
            "log-probabilities of whole texts and their derivative are not built for stages; use tensor or experts"
        )
    if any(place.layer is not None or place.is_shared for place in group.places):
        raise ValueError(
            "layers that read the keys and values of others cannot be shared by stages; make groups by `for_stages`"
        )
