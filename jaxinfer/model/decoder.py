"""The decoder: any layers that a `ModelConfig` describes, on ragged batches."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice, pairwise
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import keystr, tree_leaves_with_path, tree_map_with_path

from jaxinfer.model.batch import Batch, StepTokens, step_tokens
from jaxinfer.model.cache import KVCache, layer_offset, write_tokens
from jaxinfer.model.components.adapted import AdaptedArray
from jaxinfer.model.components.layer_embedding import add_layer_embedding, embed_for_layers
from jaxinfer.model.components.layers import Norm, TensorSpec, linear, product, rms_norm, scaled, take_rows
from jaxinfer.model.components.mixer_inputs import MixerInputs, StepContext, with_angles
from jaxinfer.model.components.moe import MoEParams
from jaxinfer.model.components.recurrent.states import StateSlots, state_slots
from jaxinfer.model.config import Layer, LayerStack, ModelConfig, PagePlace, PlacedGroup
from jaxinfer.model.layer_parts import FEED_FORWARDS, Mixer, Pool, functions_of
from jaxinfer.model.params import (
    TENSOR_PARALLEL_RULES,
    LayerParams,
    Params,
    declare_stack,
    declare_vocabulary,
    is_spec,
    usual_sharding,
)
from jaxinfer.model.stages import are_shared, cut_step, run_in_stages
from jaxinfer.quantization import PACKED, QuantizedArray
from kernels_pallas.mesh_axes import dividing_axes
from kernels_pallas.row_products import rounded
from kernels_pallas.table_rows import table_rows


@struct.dataclass
class Flow:
    """What passes from one group of layers to the next."""

    x: Any  # [T, D]  the states of the tokens
    numbers: Any = None  # [L, T, d]  those that each layer has of the tokens, of a model with them


def forward(
    params: Params, cache: KVCache, batch: Batch, *, config: ModelConfig, **step: Any
) -> tuple[jax.Array, KVCache]:
    """Runs the batch's tokens through all layers, appending them with their keys and values to the cache.

    Returns the hidden states [T, D] after the final norm, and the cache. `step` are the options of `step_context`.
    """
    context = step_context(batch, config=config, page_size=cache.tokens.shape[1], **step)
    hidden, _, cache = forward_with_states(params, cache, context, config=config)
    return hidden, cache


def step_context(
    batch: Batch,
    *,
    config: ModelConfig,
    page_size: int,
    q_len: int | None = None,
    tree_mask: jax.Array | None = None,
    slots: StateSlots | None = None,
    implementation: str | None = None,
    mesh: Mesh | None = None,
    num_whole_rows: int | None = None,
) -> StepContext:
    """Returns what all layers need of a step beside the states of its tokens.

    `q_len` and `tree_mask` are as in `AttentionCall`. `slots` are those of the states of recurrent layers, None those
    of the batch's pages. `implementation` names a paged-attention kernel, None takes the best. `mesh`: the mesh that
    parameters and cache are split over, if any. Results can be differentiated if `num_whole_rows` is given, the number
    of rows of equally many tokens, of which none is in the cache yet.
    """
    if config.num_exact is not None and tree_mask is not None:
        raise NotImplementedError("pages of 2 bits are rounded before a tree of drafts is moved; verify chains instead")
    if config.is_recurrent and tree_mask is not None:
        raise NotImplementedError("a tree of drafts needs a state per branch; verify chains of drafts instead")
    kind = config.state_kind if config.is_recurrent else None
    of_rows: dict[str, Any] = {"q_len": q_len, "tree_mask": tree_mask, "slots": slots}
    parts = None if mesh is None else cut_step(batch, mesh, page_size=page_size, kind=kind, **of_rows)
    if kind is not None and slots is None:
        slots = state_slots(batch, page_size, kind)
    statics = {"q_len": q_len, "implementation": implementation, "mesh": mesh, "num_whole_rows": num_whole_rows}
    return with_angles(StepContext(batch, tree_mask=tree_mask, slots=slots, parts=parts, **statics), config.mixers)


def forward_with_states(
    params: Params, cache: KVCache, context: StepContext, *, config: ModelConfig, kept_layers: tuple[int, ...] = ()
) -> tuple[jax.Array, jax.Array, KVCache]:
    """Returns the hidden states [T, D] of `forward`, the states [T, S] for drafters, and the cache.

    The states for drafters are those after each of the numbers of layers in `kept_layers`, side by side, without a
    norm: S = len(kept_layers) * D. They are the hidden states if `kept_layers` is (). Raises ValueError at trace time
    if no group of layers ends after one of these numbers.
    """
    ends = config.ends_of_groups
    if not {*kept_layers} <= {*ends}:
        raise ValueError(
            f"kept_layers={kept_layers} are not all in {ends}, after which groups of layers end; load"
            " the checkpoint with layer_cuts=kept_layers"
        )
    flow = begin(params, context, config=config)
    kept = {0: flow.x}
    for first, end in pairwise(sorted({0, *map(ends.index, kept_layers), len(config.groups)})):
        flow, cache = run(params.layers, cache, flow, context, config=config, groups=range(first, end))
        kept[ends[end]] = flow.x
    hidden, cache = finish(params, cache, flow, context, config=config)
    states = jnp.concatenate([kept[i] for i in kept_layers], axis=-1) if kept_layers else hidden
    return hidden, states, cache


def begin(params: Params, context: StepContext, *, config: ModelConfig) -> Flow:
    """Returns the flow before the first layer; of the parameters it reads those of embeddings."""
    batch, mesh = context.batch, context.mesh
    x = embed(params, batch.tokens, config=config, mesh=mesh, is_derived=context.num_whole_rows is not None)
    if params.layer_embedding is None:
        return Flow(x)
    tokens = step_tokens(batch, mesh=mesh)
    return Flow(x, embed_for_layers(params.layer_embedding, batch.tokens, x, tokens, config.norm))


def run(
    layers: Sequence[LayerParams],
    cache: KVCache,
    flow: Flow,
    context: StepContext,
    *,
    config: ModelConfig,
    groups: range,
) -> tuple[Flow, KVCache]:
    """Returns the flow after some groups of layers, for that before the first of them, and the cache.

    `layers` are `Params.layers`. Of them and of the pools only those of these groups are read.
    """
    if context.num_whole_rows is not None and any(a.dtype.itemsize == 1 for a in jax.tree.leaves(cache.pools)):
        raise ValueError(
            "the cache holds numbers of 8 bits or fewer, which have no derivative; give a step of num_whole_rows a"
            " cache whose CacheConfig.dtype is that of the parameters"
        )
    x, pools = flow.x, list(cache.pools)
    for index in groups:
        used, group = config.placed_groups[index]
        compute = run_group
        if context.mesh is not None and are_shared(group, context.mesh):
            compute = functools.partial(run_in_stages, run_group)
        x, new = compute(
            layers[config.stacks_of_groups[index]],
            tuple(pools[pool] for pool in used),
            x,
            numbers_of(flow, config, index),
            context.for_mixers(config.groups[index].mixers),
            group=group,
        )
        for pool, pages in zip(used, new, strict=True):
            pools[pool] = pages
    return replace(flow, x=x), replace(cache, pools=tuple(pools))


def numbers_of(flow: Flow, config: ModelConfig, index: int) -> jax.Array | None:
    """Returns the numbers [repeats, layers, T, d] that the layers of a group have of the tokens, if any."""
    if flow.numbers is None:
        return None
    own, repeats = flow.numbers[slice(*config.ends_of_groups[index : index + 2])], config.groups[index].repeats
    return own.reshape(repeats, -1, *own.shape[1:])


def finish(
    params: Params, cache: KVCache, flow: Flow, context: StepContext, *, config: ModelConfig
) -> tuple[jax.Array, KVCache]:
    """Returns the hidden states [T, D] for the flow after the last layer, and the cache with the ids of the tokens."""
    cache = replace(cache, tokens=write_tokens(cache, context.batch))
    return rms_norm(flow.x, params.final_norm, config.norm), cache


def embed(
    params: Params, tokens: jax.Array, *, config: ModelConfig, mesh: Mesh | None = None, is_derived: bool = False
) -> jax.Array:
    """Returns the states [T, D] of tokens i32[T] before the first layer.

    `mesh`: the mesh that the parameters are split over, if any. `is_derived`: if the states have a derivative.
    """
    table = params.embedding
    if is_derived or isinstance(table, PACKED):
        x = take_rows(table, tokens, params.final_norm)
    else:
        x = table_rows(table, tokens, sharding=_table_sharding(table, config, mesh) if is_split(mesh) else None)
    return x if config.embedding_scale == 1.0 else rounded(x * jnp.asarray(config.embedding_scale, x.dtype))


def _table_sharding(table: jax.Array, config: ModelConfig, mesh: Mesh) -> NamedSharding:
    # By the table's own shape, for draft heads have a configuration of their own beside the target's table.
    return usual_sharding(replace(declare_vocabulary(config), shape=table.shape), mesh)


def is_split(mesh: Mesh | None) -> TypeGuard[Mesh]:
    """True if a mesh splits parameters."""
    return mesh is not None and mesh.size > 1


# Jitted separately, so that groups of equal shape are traced once.
@functools.partial(jax.jit, static_argnames="group")
def _run_group(
    params: Sequence[LayerParams],
    pools: tuple[Pool, ...],
    x: jax.Array,
    numbers: jax.Array | None,
    context: StepContext,
    *,
    group: PlacedGroup,
) -> tuple[jax.Array, tuple[Pool, ...]]:
    """Returns the states [T, D] after a group of layers for x [T, D], and the pools that its mixers read or write.

    numbers [repeats, layers, T, d] are those that layers have of the tokens, if any.
    """
    layers, repeats, places, stacks = group
    mesh = context.mesh
    tokens = step_tokens(context.batch, mesh=mesh)
    # What attention derives from the step alone is derived once, not in each layer.
    mixers = [mixer for layer in layers for mixer in layer.mixers]
    inputs_of = [MixerInputs(context, tokens, stack.kind, num_exact=stack.num_exact or 0) for stack in stacks]
    pairs = zip(mixers, places, strict=True)
    plans = [_plan(mixer, pools[place.pool], inputs_of[place.pool]) for mixer, place in pairs]
    # Experts and integers are no scanned input, for a TPU would copy a layer's to its kernel. In a derivative each
    # layer's would be that of a whole stack.
    reads_stacks = context.num_whole_rows is None
    specs: dict[str, TensorSpec] = {}  # by place; without a mesh nothing reads them
    if is_split(mesh):
        declared = tuple(declare_stack(LayerStack(layer, repeats), x.shape[-1]) for layer in layers)
        specs = {keystr(path): spec for path, spec in tree_leaves_with_path(declared, is_leaf=is_spec)}

    def run_pattern(carry, scanned):
        x, pools = carry[0], list(carry[1])
        pattern, numbers, index = scanned
        if reads_stacks:
            pattern = _with_stacks(pattern, params, specs, index, mesh)

        def inputs_at(place: PagePlace, plan: Any) -> MixerInputs:
            layer = index if place.layer is None else place.layer
            own = inputs_in(place.pool, layer)
            opened = None if place.open_pool is None else inputs_in(place.open_pool, layer)
            return replace(own, is_shared=place.is_shared, plan=plan, opened=opened)

        def inputs_in(pool: int, layer: Any) -> MixerInputs:
            offset = layer_offset(pools[pool], layer, stacks[pool].num_layers)
            return replace(inputs_of[pool], page_offset=offset)

        left = iter(zip(places, plans, strict=True))
        for i, (layer, layer_params) in enumerate(zip(layers, pattern, strict=True)):
            planned = list(islice(left, len(layer.mixers)))
            own, inputs = [place for place, _ in planned], [inputs_at(*pair) for pair in planned]
            x, new = mix(layer_params, tuple(_pages_at(pools, place) for place in own), x, x, inputs, layer=layer)
            for place, pages in zip(own, new, strict=True):
                if place.open_pool is None:
                    pools[place.pool] = pages
                else:
                    pools[place.pool], pools[place.open_pool] = pages
            x = feed_forward(layer_params, x, tokens, layer=layer, mesh=mesh)
            x = _end_layer(layer_params, x, None if numbers is None else numbers[i], tokens, layer=layer)
        return (x, tuple(pools)), None

    # The cache is a carry: as scanned input and output it would be copied whole in every step.
    scanned = _without_stacks(params) if reads_stacks else params
    (x, pools), _ = jax.lax.scan(run_pattern, (x, pools), (scanned, numbers, jnp.arange(repeats)))
    return x, pools


# Programs have the function's own name, by which those recorded are found again.
run_group = _run_group


def _pages_at(pools: Sequence[Pool], place: PagePlace) -> Any:
    """Returns the pages of a mixer: a pool, or that of its full pages and that of its open ones."""
    return pools[place.pool] if place.open_pool is None else (pools[place.pool], pools[place.open_pool])


def _plan(mixer: Mixer, pages: Pool, inputs: MixerInputs) -> Any:
    plan = functions_of(mixer).plan
    return None if plan is None else plan(mixer, pages, inputs)


def _is_whole(node: Any) -> bool:
    return isinstance(node, (MoEParams, *PACKED))


def _without_stacks(params: Any) -> Any:
    """Returns parameters of stacked layers without experts, and without the integers of products and their scales."""

    def drop(node: Any) -> Any:
        if isinstance(node, MoEParams):
            return replace(node, experts=None, shared=_without_stacks(node.shared))
        return None if isinstance(node, QuantizedArray) else node

    return jax.tree.map(drop, params, is_leaf=_is_whole)


def _with_stacks(
    own: Any, stacks: Any, specs: Mapping[str, TensorSpec], layer: jax.Array, mesh: Mesh | None, place: str = ""
) -> Any:
    """Returns the parameters of layers with the experts and integers of their whole stacks, theirs being at `layer`.

    `specs` declare the stacks, which a mesh may split, by their places, which begin with `place`. A joined tensor has
    none, for only kernels of a TPU need the sharding.
    """

    def put(path: Any, stack: Any, node: Any) -> Any:
        if isinstance(stack, AdaptedArray):
            return replace(node, base=None if stack.base is None else put(path, stack.base, node.base))
        if isinstance(stack, MoEParams):
            shared = _with_stacks(node.shared, stack.shared, specs, layer, mesh, f"{place}{keystr(path)}.shared")
            return replace(node, experts=stack.experts, shared=shared, layer=layer)
        if isinstance(stack, QuantizedArray):
            spec = specs.get(place + keystr(path))
            return replace(stack, layer=layer, sharding=usual_sharding(spec, mesh) if spec and mesh else None)
        return node

    return tree_map_with_path(put, stacks, own, is_leaf=lambda node: isinstance(node, AdaptedArray) or _is_whole(node))


def mix(
    params: LayerParams,
    pools: tuple[Any, ...],
    x: jax.Array,
    h: jax.Array,
    inputs: Sequence[MixerInputs],
    *,
    layer: Layer,
) -> tuple[jax.Array, tuple[Any, ...]]:
    """Returns the states x [T, D] after the first half of a layer, whose input is h, and the pools of its mixers.

    x itself if the layer has no mixer. `pools` and `inputs` are for each of `layer.mixers`; one with open pages has a
    pair of pools. In all layers of a decoder h is x.
    """
    if layer.mixer is None:
        return x, ()
    h = _normed(h, params.mixer_norm, layer.norm)
    tensors = params.mixer if isinstance(layer.mixer, tuple) else (params.mixer,)
    outputs, new = [], []
    for branch, own, pages, step in zip(layer.branches, tensors, pools, inputs, strict=True):
        options = {"config": branch.mixer, "norm": layer.norm}
        y, pages = functions_of(branch.mixer).mix(own, pages, scaled(h, branch.input_scale), step, **options)
        outputs.append(scaled(y, branch.output_scale))
        new.append(pages)
    return _add(x, functools.reduce(jnp.add, outputs), params.mixer_post_norm, layer), tuple(new)


def feed_forward(
    params: LayerParams, x: jax.Array, tokens: StepTokens, *, layer: Layer, mesh: Mesh | None = None
) -> jax.Array:
    """Returns the states [T, D] after the second half of a layer for x [T, D]; x itself if there is none.

    `mesh`: the mesh that the parameters are split over, if any.
    """
    if layer.feed_forward is None:
        return x
    h = _normed(x, params.feed_forward_norm, layer.norm)
    options: dict[str, Any] = {"config": layer.feed_forward, "norm": layer.norm, "mesh": mesh}
    h = FEED_FORWARDS[type(layer.feed_forward)].compute(params.feed_forward, x, h, tokens, **options)
    return _add(x, h, params.feed_forward_post_norm, layer)


def _end_layer(
    params: LayerParams, x: jax.Array, numbers: jax.Array | None, tokens: StepTokens, *, layer: Layer
) -> jax.Array:
    """Returns the states [T, D] after a layer for x [T, D] after its halves; numbers [T, d] are the layer's, if any."""
    if layer.embedding is not None:
        assert params.embedding is not None
        assert numbers is not None
        options: dict[str, Any] = {"config": layer.embedding, "norm": layer.norm}
        x = add_layer_embedding(params.embedding, x, numbers, tokens, **options)
    return x if params.scale is None else rounded(x * jnp.broadcast_to(params.scale, x.shape))


def _normed(x: jax.Array, weight: jax.Array | None, norm: Norm) -> jax.Array:
    return x if weight is None else rms_norm(x, weight, norm)


def _add(x: jax.Array, h: jax.Array, post_norm: jax.Array | None, layer: Layer) -> jax.Array:
    """Returns x plus the output h of a mixer or feed-forward network, normalised and scaled as the layer says."""
    if post_norm is not None:
        h = rounded(rms_norm(h, post_norm, layer.norm))
    return x + scaled(h, layer.residual_scale)


def unembed(
    params: Params, hidden: jax.Array, rows: StepTokens | None = None, *, mesh: Mesh | None = None
) -> jax.Array:
    """Returns logits f32[rows, V] of hidden states [rows, D]; `rows` are as in `product`.

    Over the `mesh` that parameters are split over, if any, they are split as `logits_sharding` says.
    Raises ValueError for the parameters of a model without logits.
    """
    if params.logits is None:
        raise ValueError(
            "params are those of an embedding model, which has no unembedding and so no logits; use the states of"
            " `forward`, or the checkpoint of a language model"
        )
    table = params.embedding if params.unembedding is None else params.unembedding
    if rows is not None:
        rows = replace(rows, is_split=is_split(mesh))
    if params.lens is not None:  # Belrose et al. 2023
        hidden = hidden + linear(hidden, params.lens, None, rows)
    logits = product(hidden, table, rows)
    if is_split(mesh):
        logits = jax.lax.with_sharding_constraint(logits, logits_sharding(mesh, logits.shape[1]))
    if params.logits.scale != 1.0:
        logits = rounded(logits * params.logits.scale)
    if params.logits.softcap is not None:
        logits = rounded(jnp.tanh(logits / params.logits.softcap) * params.logits.softcap)
    if params.logits.num_padding:
        is_token = jnp.arange(logits.shape[1]) < logits.shape[1] - params.logits.num_padding
        logits = jnp.where(is_token[None], logits, -jnp.inf)
    return logits


def logits_sharding(mesh: Mesh, vocab_size: int) -> NamedSharding:
    """Returns the sharding of logits [B, V]: that of the unembedding, unless devices cannot divide the vocabulary.

    CPU devices have them whole, and so compute with them as one device does. The compiler for CPU vectorises an `exp`
    by the number of rows, if devices have parts of them: seen in log-probabilities with jax 0.12.0.
    """
    axes = dividing_axes(vocab_size, mesh, TENSOR_PARALLEL_RULES["vocab"])
    return NamedSharding(mesh, PartitionSpec(None, None if mesh.devices.flat[0].platform == "cpu" else axes))
