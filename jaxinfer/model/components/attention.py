"""Attention over paged keys and values: its description, tensors and function."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxinfer.model.components.layers import (
    KV_HEADS,
    MakeSpec,
    Norm,
    PoolSize,
    TensorSpec,
    linear,
    linears,
    product_in_dtype,
    rms_norm,
)
from jaxinfer.model.components.mixer_inputs import MixerInputs
from jaxinfer.model.components.rope import Rope, require_pairs, rotary_embedding
from jaxinfer.validation import require, require_bool, require_int, require_positive
from kernels_pallas.paged_attention import (
    AttentionCall,
    HeadOptions,
    Pages,
    RoundedPages,
    abstract_pages,
    abstract_rounded_pages,
    append_products,
    can_append_products,
    gather_tokens,
    paged_attention,
    pieces_of,
    plan_attention,
    rounded_attention,
    write_kv,
)
from kernels_pallas.paged_attention.call import token_slots
from kernels_pallas.row_products import rounded
from kernels_pallas.whole_rows import PagedCall, PlainCall, plain_attention


@dataclass(frozen=True, kw_only=True)
class QueryGrowth:
    """A factor on queries that grows with the position: 1 + beta log(1 + floor(position / length))."""

    beta: float
    length: int  # tokens, of which the first have the factor 1

    def __post_init__(self) -> None:
        require_positive("beta", self.beta)
        require_int("length", self.length, 1)

    def grown(self, q: jax.Array, positions: jax.Array) -> jax.Array:
        """Returns queries [T, N, H] of tokens at positions i32[T] times their factors, in float32."""
        factors = 1.0 + rounded(self.beta * jnp.log((1 + positions // self.length).astype(jnp.float32)))
        return rounded(q.astype(jnp.float32) * jnp.broadcast_to(factors[:, None, None], q.shape)).astype(q.dtype)


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Grouped-query attention (Ainslie et al. 2023) of N query heads over K heads of keys and values."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope | None = None  # None: the layer knows no positions, only their order
    window: int | None = None  # tokens that a token attends to, itself included; None: all
    scale: float | None = None  # of scores; None: 1 / sqrt(head_dim)
    query_growth: QueryGrowth | None = None  # None: a token's position changes its scores by rotation alone
    softcap: float | None = None  # bounds scores by softcap * tanh(score / softcap)
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    qk_norm: str | None = None  # of queries and keys before rotation: "head", over each head, or "all", over all heads
    has_rotated_norm: bool = False  # the norm of queries and keys comes after their rotation
    has_value_norm: bool = False  # of each head's value, without a weight
    has_values: bool = True  # False: a value is the key before its norm and rotation
    source: int | None = None  # the layer whose keys and values it reads; None: it has its own
    has_gate: bool = False  # multiplies each head's output by a sigmoid of the token's state
    has_sinks: bool = False  # a learned score per head that takes part in the softmax without a value
    has_cache_scales: bool = False  # a scale of its keys and one of its values, for a cache in fp8
    # How often parameters and pages have each KV head, one after another, for devices that cannot split the heads.
    num_kv_copies: int = 1

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads", "num_kv_copies"):
            require_int(name, getattr(self, name), 1)
        require_pairs("head_dim", self.head_dim)
        is_multiple = f"a multiple of num_kv_heads={self.num_kv_heads}"
        is_multiple += f" times num_kv_copies={self.num_kv_copies}" if self.num_kv_copies > 1 else ""
        require(self.num_heads % self.num_held_heads == 0, "num_heads", self.num_heads, is_multiple)
        require(self.rope is None or isinstance(self.rope, Rope), "rope", self.rope, "a Rope or None")
        if self.window is not None:
            require_int("sliding_window", self.window, 1)
        for name in ("scale", "softcap"):
            if getattr(self, name) is not None:
                require_positive(name, getattr(self, name))
        is_growth = self.query_growth is None or isinstance(self.query_growth, QueryGrowth)
        require(is_growth, "query_growth", self.query_growth, "a QueryGrowth or None")
        if self.source is not None:
            require_int("source", self.source, 0)
        for name in ("has_qkv_bias", "has_output_bias", "has_value_norm", "has_values", "has_gate", "has_sinks"):
            require_bool(name, getattr(self, name))
        require_bool("has_cache_scales", self.has_cache_scales)
        is_owner = self.source is None or not self.has_cache_scales
        require(is_owner, "has_cache_scales", self.has_cache_scales, "False in a layer that reads those of another")
        makes_values = self.has_value_norm or not self.has_values
        are_own = "None in a layer with a norm of values or with keys as values"
        require(self.source is None or not makes_values, "source", self.source, are_own)
        is_name = isinstance(self.qk_norm, str) and self.qk_norm in ("head", "all")
        require(self.qk_norm is None or is_name, "qk_norm", self.qk_norm, "'head', 'all' or None")
        require_bool("has_rotated_norm", self.has_rotated_norm)
        has_both = not self.has_rotated_norm or (self.qk_norm is not None and self.rope is not None)
        require(has_both, "has_rotated_norm", self.has_rotated_norm, "False without qk_norm or rope")

    @property
    def num_held_heads(self) -> int:
        """The KV heads of parameters and pages, with their copies."""
        return self.num_kv_heads * self.num_kv_copies

    def for_devices(self, *numbers: int) -> Attention:
        """Returns the layer with copies of KV heads, the fewest that devices can split.

        Their number is the first of `numbers` that can split its query heads too, in groups of a KV head each. If none
        can, returns the layer itself.
        """
        for num_devices in numbers:
            copies = num_devices // math.gcd(num_devices, self.num_kv_heads)
            if self.num_heads % (self.num_kv_heads * copies) == 0:
                return replace(self, num_kv_copies=copies)
        return self

    @property
    def width(self) -> int:
        """0, for queries, keys and values do not count."""
        return 0


@struct.dataclass
class AttentionParams:
    """Tensors of n stacked layers; weights are [out..., in] as checkpoints store them."""

    q: Any  # [n, N, H, D]
    k: Any  # [n, K, H, D]  None in layers that read the keys and values of another
    v: Any  # [n, K, H, D]  the same; None where values are keys too
    o: Any  # [n, D, N H]  of two axes, for the compiler of a TPU copies heads apart out of the stack at each step
    q_bias: Any = None  # [n, N, H]
    k_bias: Any = None  # [n, K, H]
    v_bias: Any = None  # [n, K, H]
    o_bias: Any = None  # [n, D]
    q_norm: Any = None  # [n, H], or [n, N, H] over all heads
    k_norm: Any = None  # [n, H], or [n, K, H]
    sinks: Any = None  # [n, N]
    gate: Any = None  # [n, N, H, D]
    gate_bias: Any = None  # [n, N, H]
    k_scale: Any = None  # [n, 1]  the worth of a number in a cache in fp8
    v_scale: Any = None  # [n, 1]
    # [n, P, S / P, H, D]  those that there are of q, k, v and gate, with S heads in all, in parts for P devices. They
    # are None then, or the changes of adapters alone.
    qkv: Any = None


def declare_attention(config: Attention, hidden_size: int, spec: MakeSpec) -> AttentionParams:
    """Returns a `TensorSpec` per tensor; `spec(sizes, axes, scale)` makes one of n layers."""
    D, N, K, H = hidden_size, config.num_heads, config.num_held_heads, config.head_dim
    q, kv = ("heads", "head_dim"), (KV_HEADS, "head_dim")

    def of_kv(sizes: tuple[int, ...], axes: tuple[str, ...], *scale: Any, num_inputs: int = 0) -> TensorSpec:
        return replace(spec(sizes, axes, *scale, num_inputs=num_inputs), num_copies=config.num_kv_copies)

    tensors: dict[str, TensorSpec | None] = {
        "q": spec((N, H, D), (*q, "embed"), num_inputs=1),
        "k": of_kv((K, H, D), (*kv, "embed"), num_inputs=1),
        "v": of_kv((K, H, D), (*kv, "embed"), num_inputs=1),
        "o": spec((D, N * H), ("embed", "heads"), num_inputs=1, num_together=H),
    }
    if config.has_qkv_bias:
        tensors |= {"q_bias": spec((N, H), q), "k_bias": of_kv((K, H), kv), "v_bias": of_kv((K, H), kv)}
    if config.has_output_bias:
        tensors |= {"o_bias": spec((D,), ("embed",))}
    if config.qk_norm == "head":
        tensors |= {name: spec((H,), ("head_dim",), None) for name in ("q_norm", "k_norm")}
    if config.qk_norm == "all":
        tensors |= {"q_norm": spec((N, H), q, None), "k_norm": of_kv((K, H), kv, None)}
    if config.has_sinks:
        tensors |= {"sinks": spec((N,), ("heads",))}
    if config.has_gate:
        tensors |= {"gate": spec((N, H, D), (*q, "embed"), num_inputs=1)}
    if config.has_gate and config.has_qkv_bias:
        tensors |= {"gate_bias": spec((N, H), q)}
    if config.has_cache_scales:
        tensors |= {name: spec((1,), ("one",), None) for name in ("k_scale", "v_scale")}
    if not config.has_values:
        tensors |= dict.fromkeys(("v", "v_bias"))
    if config.source is not None:
        tensors |= dict.fromkeys(("k", "k_bias", "k_norm", "v", "v_bias"))
    return AttentionParams(**tensors)


def abstract_keys_and_values(config: Attention, size: PoolSize) -> Pages | RoundedPages:
    """Returns the pool of keys and values as `jax.ShapeDtypeStruct`s."""
    heads = config.num_held_heads, config.head_dim
    if size.dtype == "int2":
        return abstract_rounded_pages(size.num_pages, size.page_size, *heads, size.layout)
    return abstract_pages(
        size.num_pages, size.page_size, *heads, size.dtype, size.layout, has_scales=size.dtype == "int8"
    )


def plan_attention_of(config: Attention, pages: Pages | RoundedPages, inputs: MixerInputs) -> Any:
    """Returns the plan of a step for `inputs.plan` of each layer like this one."""
    num_tokens = len(inputs.step.batch.tokens)
    if isinstance(pages, RoundedPages):
        return pieces_of(inputs.call(**_scoring(config)), num_tokens, pages.page_size)
    return plan_attention(pages, inputs.call(**_scoring(config)), num_tokens=num_tokens, num_heads=config.num_heads)


def _scoring(config: Attention) -> dict[str, Any]:
    scale = config.head_dim**-0.5 if config.scale is None else config.scale
    return {"scale": scale, "window": config.window, "softcap": config.softcap}


def attend(
    params: AttentionParams,
    pages: Any,
    x: jax.Array,
    inputs: MixerInputs,
    *,
    config: Attention,
    norm: Norm,
) -> tuple[jax.Array, Any]:
    """Returns the layer's output [T, D] for x [T, D], and the pages with the tokens' keys and values appended.

    The pages are `Pages`, or `RoundedPages` and the open `Pages` beside them. A layer that reads those of another gets
    the other's pages, and returns them as they came.
    """
    options = _scoring(config)
    scales: dict[str, Any] = {}
    outputs: Iterator[jax.Array]
    k: Any = None
    v: Any = None
    if _appends_products(params, pages, x, inputs, config):
        products = product_in_dtype(x, params.qkv, inputs.tokens)
        q, pages, outputs = _append(params, products, pages, inputs, config=config, norm=norm)
    else:
        outputs = linears(x, params, projected_sizes(config), params.qkv, inputs.tokens)
        q, k, v = project_qkv(params, outputs, inputs, config=config, norm=norm)
    if config.query_growth is not None:
        q = config.query_growth.grown(q, inputs.step.batch.positions)
    if config.has_cache_scales and isinstance(pages, Pages) and pages.dtype == jnp.float8_e4m3fn:
        pairs = {"k_scale": params.k_scale, "v_scale": params.v_scale}
        scales = {name: jnp.repeat(scale.astype(jnp.float32), config.num_held_heads) for name, scale in pairs.items()}

    def run(q: Any, k: Any, v: Any, sinks: Any, pages: Any, call: AttentionCall) -> tuple[jax.Array, Any]:
        if inputs.opened is None:
            return paged_attention(q, k, v, pages, call, sinks=sinks, **scales)
        (full, opened), open_call = pages, inputs.opened.call(**options)
        out, full, opened = rounded_attention(
            q, k, v, full, opened, call, open_call, num_exact=inputs.opened.num_exact, sinks=sinks
        )
        return out, (full, opened)

    call, plain = inputs.call(**options), functools.partial(plain_attention, **options)
    if inputs.step.num_whole_rows is not None and inputs.is_shared:
        attended, pages = _attend_through_pages(run, plain, (q, k, v), params.sinks, pages, call, inputs)
    else:
        attended, pages = inputs.run(run, plain, (q, k, v), params.sinks, pages, call)
    if config.has_gate:
        attended = attended * jax.nn.sigmoid(next(outputs))
    attended = attended.reshape(attended.shape[0], -1)
    return linear(attended, params.o, params.o_bias, inputs.tokens, input_units=config.num_heads), pages


def projected_sizes(config: Attention) -> dict[str, int]:
    """Returns the weights that multiply a layer's input, by name, with their heads, in the order of `params.qkv`."""
    N, K = config.num_heads, config.num_held_heads
    own, has_values = config.source is None, config.source is None and config.has_values
    sizes = {"q": N, "k": K if own else 0, "v": K if has_values else 0, "gate": N if config.has_gate else 0}
    return {name: size for name, size in sizes.items() if size}


def _appends_products(
    params: AttentionParams, pages: Any, x: jax.Array, inputs: MixerInputs, config: Attention
) -> bool:
    """Returns whether `append_products` can take the products of a joined tensor.

    Not if adapters change them, if they have a derivative, or if norms are over other numbers than a head's, or after
    rotation.
    """
    sizes = projected_sizes(config)
    has_all = sizes.keys() >= {"q", "k", "v"} and config.qk_norm != "all" and not config.has_value_norm
    has_all = has_all and not config.has_rotated_norm
    are_adapted = any(getattr(params, name) is not None for name in sizes)
    if params.qkv is None or not has_all or are_adapted or inputs.step.num_whole_rows is not None:
        return False
    if not isinstance(pages, Pages):
        return False
    return can_append_products(pages, inputs.call(**_scoring(config)), num_parts=params.qkv.shape[0], dtype=x.dtype)


def _append(
    params: AttentionParams, products: jax.Array, pages: Pages, inputs: MixerInputs, *, config: Attention, norm: Norm
) -> tuple[jax.Array, Pages, Iterator[jax.Array]]:
    """Returns the queries [T, N, H], the pages with keys and values, and the outputs that are left: the gate's."""
    cos, sin = (None, None) if config.rope is None else inputs.step.angles_of(config.rope)
    heads = HeadOptions(
        q_bias=params.q_bias,
        k_bias=params.k_bias,
        v_bias=params.v_bias,
        q_norm=params.q_norm,
        k_norm=params.k_norm,
        cos=cos,
        sin=sin,
        epsilon=norm.epsilon,
        adds_one=norm.adds_one,
        is_interleaved=config.rope is not None and config.rope.is_interleaved,
    )
    end = (config.num_heads + 2 * config.num_held_heads) // products.shape[1]
    gate = products[:, :, end:].reshape(products.shape[0], -1, config.head_dim)
    gate = gate if params.gate_bias is None else gate + params.gate_bias[None]
    q, pages = append_products(products[:, :, :end], pages, inputs.call(**_scoring(config)), heads)
    return q, pages, iter([gate])


def project_qkv(
    params: AttentionParams,
    outputs: Iterator[jax.Array],
    inputs: MixerInputs,
    *,
    config: Attention,
    norm: Norm,
) -> tuple[jax.Array, Any, Any]:
    """Returns queries [T, N, H], keys and values [T, K, H], normalised and rotated as `config` says.

    `outputs` are the products of the layer's input, of which they are the first. Keys and values are None in a layer
    that reads those of another.
    """

    def placed(heads: jax.Array, weight: Any) -> jax.Array:
        if config.qk_norm is not None and not config.has_rotated_norm:
            heads = _normed(heads, weight, norm)
        if config.rope is not None:
            angles = inputs.step.angles_of(config.rope)
            heads = rotary_embedding(heads, *angles, is_interleaved=config.rope.is_interleaved)
        return _normed(heads, weight, norm) if config.has_rotated_norm else heads

    q = placed(next(outputs), params.q_norm)
    if config.source is not None:
        return q, None, None
    k = next(outputs)
    v = next(outputs) if config.has_values else k
    return q, placed(k, params.k_norm), rms_norm(v, None, norm) if config.has_value_norm else v


def _normed(heads: jax.Array, weight: jax.Array, norm: Norm) -> jax.Array:
    """Returns heads [T, N, H] normalised one by one for a weight [H], all together for a weight [N, H]."""
    if weight.ndim == 1:
        return rms_norm(heads, weight, norm)
    return rms_norm(heads.reshape(heads.shape[0], -1), weight.reshape(-1), norm).reshape(heads.shape)


def _attend_through_pages(
    run: PagedCall,
    plain: PlainCall,
    qkv: tuple[Any, ...],
    sinks: jax.Array | None,
    pages: Pages,
    call: AttentionCall,
    inputs: MixerInputs,
) -> tuple[jax.Array, Pages]:
    """Returns what `inputs.run` does, in a step of whole rows, for layers that share keys and values.

    The pages have a derivative here, by which that of a reader reaches the layer that made the keys and values.
    """
    q, k, v = qkv
    slots = token_slots(q.shape[0], pages, call)
    if k is not None:
        pages = write_kv(pages, k, v, slots)

    def read(q: Any, k: Any, v: Any, sinks: Any, pages: Pages, call: AttentionCall) -> tuple[jax.Array, Pages]:
        return run(q, None, None, sinks, pages, call)

    attended, _ = inputs.run(read, plain, (q, *gather_tokens(pages, slots)), sinks, pages, call)
    return attended, pages
