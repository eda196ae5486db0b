"""The weighted sum of each token's experts, in a form for CPUs and one for accelerators and meshes."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxinfer.model.batch import StepTokens
from jaxinfer.model.components.layers import scaled
from jaxinfer.model.components.mlp import MLP, MLPParams, activate, declare_mlp, mlp
from jaxinfer.model.components.observed import ObservedArray, observe_groups
from jaxinfer.quantization import PackedBlocks, QuantizedArray
from jaxinfer.quantization.activations import round_rows
from kernels_pallas.device_sums import sum_over_devices
from kernels_pallas.grouped_matmul import dequantize_experts, grouped_matmul
from kernels_pallas.mesh_axes import HEADS_AXES, dividing_axes, names_of, over_devices
from kernels_pallas.quantized_matmul import split_groups
from kernels_pallas.row_products import ROW_BLOCK, rounded, row_sum

# The mesh axis that whole experts are split over, and the one that splits each of them.
EXPERTS_AXIS, MLP_AXIS = HEADS_AXES
# By logical axis the mesh axes that split it. Any other network than an expert is split over both.
MESH_AXES = {"experts": (EXPERTS_AXIS,), "mlp": HEADS_AXES}
WEIGHTS = ("gate", "up", "down")
# Tokens that an expert computes at once on CPU, at most: one of `row_products.WEIGHT_ROWS`.
MAX_BLOCK = 136


class SharedExpert(NamedTuple):
    """An expert of all tokens, whose result devices add to their sum of the chosen ones."""

    params: MLPParams
    gate: Any  # f32[T, 1]  multiplies its result; None: nothing does
    config: MLP


class Stacks(NamedTuple):
    """The weights of several layers, of which a kernel reads those of one where they lie."""

    weights: Mapping[str, Any]  # or their integers, [n, E, ...] by their names in WEIGHTS
    layer: Any  # i32[]


def sum_of_experts(
    params: MLPParams,
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    num_tokens: jax.Array,
    *,
    config: MLP,
    layer: jax.Array | None = None,
    mesh: Mesh | None = None,
    shared: SharedExpert | None = None,
) -> jax.Array:
    """Returns the sum [T, D] of each token's experts i32[T, X] times their weights f32[T, X], for x [T, D].

    `params` has the tensors [E, ...] of all experts, or with a `layer` i32[] those of several layers [n, E, ...]: a
    kernel of a TPU reads a layer's experts where they lie. Tokens after the first `num_tokens` are padding. Each device
    of a `mesh` computes its own experts and its own part of them, and the devices' sums are added in float32. There a
    `shared` expert may be added too, see `joins_sum`: so a layer has one sum over devices.
    """
    stacks = Stacks({}, jnp.zeros((), jnp.int32))
    if layer is not None:
        present = {name: getattr(params, name) for name in WEIGHTS}
        present = {name: w for name, w in present.items() if w is not None and not _is_unpacked_first(w)}
        values = {name: w.values if isinstance(w, QuantizedArray) else w for name, w in present.items()}
        stacks = Stacks(values, layer)
        params = jax.tree.map(lambda w: jax.lax.dynamic_index_in_dim(w, layer, keepdims=False), params)
    axes = _split_axes(mesh, params.up.shape[0], config.intermediate_size)
    if mesh is not None and axes:
        return _sum_over_mesh(params, stacks, x, experts, weights, num_tokens, config, mesh, axes, shared)
    results: Any = _of_experts(params, stacks, x, experts, num_tokens, config)
    return _weighted_sum(results, weights).astype(x.dtype)


def _weighted_sum(results: jax.Array, weights: jax.Array) -> jax.Array:
    # Rounded before they are added, and added in a fixed order: so a token's sum has the same bits in any step.
    weighted = rounded(results * weights[..., None])
    return row_sum(weighted.swapaxes(1, 2))


def joins_sum(shared: MLPParams, shared_config: MLP, num_experts: int, config: MLP, mesh: Mesh | None) -> bool:
    """True if the devices of a mesh can add a shared expert to their sum of experts.

    They do if they share its hidden units. Integers are not for it: their own product splits them.
    """
    axes = _split_axes(mesh, num_experts, config.intermediate_size)
    if mesh is None or not axes or not {*_axes_of_shared(shared_config, mesh)} <= {*axes}:
        return False
    return all(isinstance(w, jax.Array) for w in (shared.gate, shared.up, shared.down) if w is not None)


def _axes_of_shared(config: MLP, mesh: Mesh) -> tuple[str, ...]:
    """Returns the axes of a mesh that split the hidden units of a shared expert, as `usual_sharding` does."""
    return names_of(dividing_axes(config.intermediate_size, mesh, MESH_AXES["mlp"]))


def _split_axes(mesh: Mesh | None, num_experts: int, intermediate_size: int) -> tuple[str, ...]:
    """Returns the axes of a mesh that split experts. An axis that does not divide them leaves them whole."""
    sizes = {EXPERTS_AXIS: num_experts, MLP_AXIS: intermediate_size}
    counts = {} if mesh is None else {axis: n for axis, n in mesh.shape.items() if n > 1}
    return tuple(axis for axis, size in sizes.items() if axis in counts and size % counts[axis] == 0)


def _sum_over_mesh(
    params: MLPParams,
    stacks: Stacks,
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    num_tokens: jax.Array,
    config: MLP,
    mesh: Mesh,
    axes: tuple[str, ...],
    shared: SharedExpert | None,
) -> jax.Array:
    E = params.up.shape[0]
    shared_axes = () if shared is None else _axes_of_shared(shared.config, mesh)

    def own_part(x: jax.Array, num_tokens: jax.Array, own: MLPParams, gate: jax.Array | None) -> jax.Array:
        """Returns what a device adds of the shared expert, f32[T, D]."""
        assert shared is not None
        if own.down_bias is not None and shared_axes:
            is_first = jax.lax.axis_index(shared_axes) == 0
            own = replace(own, down_bias=jnp.where(is_first, own.down_bias, 0))
        part = mlp(own, x, StepTokens(num_tokens, is_split=True), config=shared.config).astype(jnp.float32)
        part = part if gate is None else part * jnp.broadcast_to(gate, part.shape)
        # Devices along the other axes have the same part, which one of them adds.
        others = tuple(axis for axis in axes if axis not in shared_axes)
        is_added = jax.lax.axis_index(others) == 0 if others else True
        return rounded(jnp.where(is_added, part, 0.0))

    def sum_of_own(
        params: MLPParams,
        stacks: Stacks,
        x: jax.Array,
        experts: jax.Array,
        weights: jax.Array,
        num_tokens: jax.Array,
        shared_part: tuple[MLPParams, jax.Array | None] | None,
    ) -> jax.Array:
        if EXPERTS_AXIS in axes:  # the first E / n are those of this device
            experts = (experts - jax.lax.axis_index(EXPERTS_AXIS) * params.up.shape[0]) % E
        if MLP_AXIS in axes and params.down_bias is not None:  # one device adds it
            is_first = jax.lax.axis_index(MLP_AXIS) == 0
            params = replace(params, down_bias=jnp.where(is_first, params.down_bias, 0))
        results: Any = _of_experts(params, stacks, x, experts, num_tokens, config)
        total = _weighted_sum(results, weights)
        if shared_part is not None:
            total = total + own_part(x, num_tokens, *shared_part)
        return sum_over_devices(total, axes, mesh)

    def spec_of_shared(_: tuple[int, ...], names: tuple[str, ...], **__: Any) -> Any:
        return PartitionSpec(*(shared_axes if name == "mlp" else None for name in names))

    def spec(_: tuple[int, ...], names: tuple[str, ...], **__: Any) -> Any:
        own = {"experts": EXPERTS_AXIS, "mlp": MLP_AXIS}
        found = map(own.get, ("experts", *names))
        return PartitionSpec(*(axis if axis in axes else None for axis in found))

    whole, specs = PartitionSpec(), declare_mlp(config, x.shape[1], spec)
    of_stacks = {name: PartitionSpec(None, *getattr(specs, name)) for name in stacks.weights}
    whole_params, (params, specs) = params, _split_groups(params, specs, mesh, x, config)
    # Not those that became floating point.
    kept = {
        name: w
        for name, w in stacks.weights.items()
        if type(getattr(params, name)) is type(getattr(whole_params, name))
    }
    stacks, stack_specs = stacks._replace(weights=kept), Stacks({name: of_stacks[name] for name in kept}, whole)
    part, part_specs = None, None
    if shared is not None:
        part = shared.params, shared.gate
        part_specs = declare_mlp(shared.config, x.shape[1], spec_of_shared), None if shared.gate is None else whole
    in_specs = (specs, stack_specs, *(whole,) * 4, part_specs)
    split = over_devices(sum_of_own, mesh, in_specs=in_specs, out_specs=whole)
    return split(params, stacks, x, experts, weights, num_tokens, part).astype(x.dtype)


def _split_groups(params: MLPParams, specs: Any, mesh: Mesh, x: jax.Array, config: MLP) -> tuple[MLPParams, Any]:
    """Returns experts and specs that split quantized weights and their scales alike.

    A group of inputs on two devices becomes several with the same scale. Packed integers cannot be cut so: their
    weights become floating point, in the dtype of x [T, D].
    """
    inputs = {"gate": x.shape[1], "up": x.shape[1], "down": config.intermediate_size}
    for name, num_inputs in inputs.items():
        w, spec = getattr(params, name), getattr(specs, name)
        if not isinstance(w, QuantizedArray):
            continue
        n = 1 if spec[-1] is None else mesh.shape[spec[-1]]
        w = w.with_wide_scales().unpacked().with_divided_zeros(n)
        params = replace(params, **{name: w})
        if w.order is not None or w.activations is not None:
            raise NotImplementedError(
                "experts whose inputs have an order of their own (act-order), or 8 bits (W8A8), cannot be split over a"
                " mesh; use a checkpoint without them"
            )
        groups = w.scales.shape[-1]
        if groups % n and w.values.shape[-1] < num_inputs:
            params = replace(params, **{name: dequantize_experts(w.values, w.scales, w.zeros, num_inputs, x.dtype)})
            continue
        scales, zeros = jax.tree.map(lambda a, size=num_inputs, n=n: split_groups(a, size, n), (w.scales, w.zeros))
        params = replace(params, **{name: replace(w, scales=scales, zeros=zeros)})
        of_zeros = None if zeros is None else spec
        specs = replace(specs, **{name: QuantizedArray(values=spec, scales=spec, zeros=of_zeros)})
    return params, specs


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _of_experts(
    params: MLPParams,
    stacks: Stacks,
    x: jax.Array,
    experts: jax.Array,
    num_tokens: jax.Array,
    config: MLP,
) -> jax.Array:
    operands = (params, stacks, x, experts, num_tokens)
    in_blocks, in_groups = functools.partial(_in_blocks, config=config), functools.partial(_in_groups, config=config)
    if _is_unpacked_first(params.up) or _is_unpacked_first(params.down):
        in_groups = in_blocks  # which unpacks the experts of tokens alone, one after another
    return jax.lax.platform_dependent(*operands, cpu=in_blocks, default=in_groups)


def _is_unpacked_first(w: Any) -> bool:
    """True for weights that no kernel reads as they lie: blocks, and integers in planes."""
    return isinstance(w, PackedBlocks) or (isinstance(w, QuantizedArray) and w.bits is not None)


def _of_experts_derivative(config: MLP, operands: tuple[Any, ...], change: jax.Array) -> tuple[Any, ...]:
    """Returns the derivative of `_in_groups`, for that of `_in_blocks` has a loop whose length is known late."""
    params, stacks, x, experts, num_tokens = operands

    def compute(params: MLPParams, x: jax.Array) -> jax.Array:
        return _in_groups(params, stacks._replace(weights={}), x, experts, num_tokens, config=config)

    of_params, of_x = jax.vjp(compute, params, x)[1](change)
    return of_params, None, of_x, None, None


_of_experts.defvjp(lambda *operands: (_of_experts(*operands), operands[:5]), _of_experts_derivative)


def _sorted_pairs(experts: jax.Array, num_tokens: jax.Array, E: int) -> tuple[jax.Array, jax.Array]:
    """Returns the pairs i32[T X] of a token and its expert, expert after expert, and the number of each i32[E].

    Pairs of padding, and of experts outside [0, E), come last and are not counted.
    """
    T, X = experts.shape
    by_pair = jnp.where(jnp.arange(T * X) // X < num_tokens, experts.reshape(-1), E)  # padding belongs to no expert
    order = jnp.argsort(by_pair, stable=True)
    return order, jnp.zeros((E,), jnp.int32).at[by_pair].add(1, mode="drop")


def _in_blocks(
    params: MLPParams,
    _: Stacks,
    x: jax.Array,
    experts: jax.Array,
    num_tokens: jax.Array,
    *,
    config: MLP,
) -> jax.Array:
    """Returns the results f32[T, X, D] of each token's experts, by products of a block of tokens, expert after expert.

    experts of 5 tokens, blocks of 2:   a b a a b  ->  a: 0 2, 3 -   b: 1 4
    """
    (T, D), X, E = x.shape, experts.shape[1], params.up.shape[0]
    # Most experts have at most a quarter more tokens than the mean, and so one block.
    block = min(-(-5 * T * X // (4 * E * ROW_BLOCK)) * ROW_BLOCK, MAX_BLOCK)
    order, counts = _sorted_pairs(experts, num_tokens, E)
    ends, (used,) = jnp.cumsum(counts), jnp.nonzero(counts, size=E, fill_value=0)

    def compute_expert(i: jax.Array, out: jax.Array) -> jax.Array:
        expert = used[i]
        # Taken once for all of its blocks, for this copies them.
        own = jax.tree.map(lambda w: jax.lax.dynamic_index_in_dim(w, expert, keepdims=False), params)

        def compute_block(j: jax.Array, out: jax.Array) -> jax.Array:
            places = ends[expert] - counts[expert] + j * block + jnp.arange(block)
            pairs = jnp.where(places < ends[expert], order.at[places].get(mode="clip"), T * X)
            rows = x.at[pairs // X].get(mode="fill", fill_value=0)
            tokens = StepTokens(jnp.minimum(counts[expert] - j * block, block))
            y = mlp(own, rows, tokens, config=config)
            return out.at[pairs].set(y.astype(jnp.float32), mode="drop")

        return jax.lax.fori_loop(0, -(-counts[expert] // block), compute_block, out)

    out = jax.lax.fori_loop(0, (counts > 0).sum(), compute_expert, jnp.zeros((T * X, D), jnp.float32))
    return out.reshape(T, X, D)


def _in_groups(
    params: MLPParams,
    stacks: Stacks,
    x: jax.Array,
    experts: jax.Array,
    num_tokens: jax.Array,
    *,
    config: MLP,
) -> jax.Array:
    """Returns the results f32[T, X, D] of each token's experts, by grouped products of all experts.

    The results of padding, and of experts past the last of `params`, are zeros. `stacks` replace weights of `params`.
    """
    (T, X), E = experts.shape, params.up.shape[0]
    order, counts = _sorted_pairs(experts, num_tokens, E)
    expert_of = experts.reshape(-1)[order]
    num_pairs = counts.sum()
    pairs = jnp.where(jnp.arange(T * X) < num_pairs, order, T * X)

    def linear(rows: jax.Array, name: str) -> jax.Array:
        stated, bias = getattr(params, name), getattr(params, f"{name}_bias")
        w = stated.base if isinstance(stated, ObservedArray) else stated
        if isinstance(w, PackedBlocks):
            w = w.widened().astype(rows.dtype)
        if not isinstance(w, QuantizedArray):
            w = QuantizedArray(w, None)
        w = w.with_wide_scales().unpacked()
        values, first = w.values, None
        if w.order is not None:
            rows = jnp.take_along_axis(rows, w.order.at[expert_of].get(mode="clip"), axis=1)
        if w.activations is not None:  # the product widens the integers of weights, so those of rows as well
            ranges = None if w.input_range is None else w.input_range[:, 0].at[expert_of].get(mode="clip")
            rows = round_rows(rows, w.activations, ranges).floats().astype(rows.dtype)
        if name in stacks.weights:
            values, first = stacks.weights[name].reshape(-1, *values.shape[1:]), stacks.layer * E
        y = grouped_matmul(rows, values, counts, w.scales, zeros=w.zeros, first_expert=first)
        if isinstance(stated, ObservedArray):
            y = observe_groups(y, rows, counts, stated.moments)
        return y if bias is None else y + bias.at[expert_of].get(mode="fill", fill_value=0)

    rows = x.at[pairs // X].get(mode="fill", fill_value=0)
    gate = linear(rows, "gate") if config.is_gated else None
    up = linear(rows, "up")
    y = scaled(linear(activate(gate, up, config=config), "down"), config.output_scale)
    places = jnp.argsort(order)  # of each pair's row
    results = y.at[jnp.where(places < num_pairs, places, T * X)].get(mode="fill", fill_value=0)
    return results.astype(jnp.float32).reshape(T, X, -1)
