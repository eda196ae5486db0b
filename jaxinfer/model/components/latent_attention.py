"""Multi-head latent attention (MLA): its description, tensors and function."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxinfer.model.batch import StepTokens
from jaxinfer.model.components.layers import MakeSpec, Norm, PoolSize, TensorSpec, linear, rms_norm, widened
from jaxinfer.model.components.mixer_inputs import MixerInputs
from jaxinfer.model.components.rope import Rope, rotary_embedding
from jaxinfer.quantization import QuantizedArray
from jaxinfer.validation import require, require_bool, require_int, require_positive
from kernels_pallas.exact_sums import refuse_if_exact
from kernels_pallas.latent_attention import LatentPages, abstract_latents, latent_attention, plan_latent_attention
from kernels_pallas.paged_attention.call import AttentionCall
from kernels_pallas.row_products import rows_by_matrices
from kernels_pallas.whole_rows import plain_attention


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Attention of N heads to keys and values that are products of one latent per token (DeepSeek-V2, 2024).

    The key of a head is a product of the latent, then one rotated key that all heads share. Only the latent and the
    rotated key are cached: `kv_lora_rank + qk_rope_head_dim` numbers per token.
    """

    num_heads: int
    q_lora_rank: int | None  # numbers of the latent of queries; None: queries are products of the token's state
    kv_lora_rank: int  # numbers of the latent of keys and values
    qk_nope_head_dim: int  # of queries and keys, not rotated
    qk_rope_head_dim: int  # of queries and keys, rotated
    v_head_dim: int
    rope: Rope
    scale: float | None = None  # of scores; None: 1 / sqrt(qk_nope_head_dim + qk_rope_head_dim)
    norm: Norm = Norm(epsilon=1e-6)  # noqa: RUF009  (a Norm is frozen)  of both latents
    has_bias: bool = False  # of the products that make latents, and of the output

    def __post_init__(self) -> None:
        for name in ("num_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
            require_int(name, getattr(self, name), 1)
        if self.q_lora_rank is not None:
            require_int("q_lora_rank", self.q_lora_rank, 1)
        is_whole = isinstance(self.rope, Rope) and self.rope.dim == self.qk_rope_head_dim
        require(is_whole, "rope", self.rope, f"a Rope of dim qk_rope_head_dim={self.qk_rope_head_dim}")
        if self.scale is not None:
            require_positive("scale", self.scale)
        require(isinstance(self.norm, Norm), "norm", self.norm, "a Norm")
        require_bool("has_bias", self.has_bias)

    @property
    def window(self) -> None:
        """A token attends to all tokens before it."""
        return None

    @property
    def width(self) -> int:
        """0, for queries, keys and values do not count."""
        return 0

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def score_scale(self) -> float:
        return self.qk_head_dim**-0.5 if self.scale is None else self.scale


@struct.dataclass
class LatentAttentionParams:
    """Tensors of n stacked layers; weights are [out..., in], except those between a latent and a head."""

    kv_down: Any  # [n, R + r, D]
    kv_norm: Any  # [n, R]
    k_up: Any  # [n, N, H, R]  from a head's query to one of the latent
    v_up: Any  # [n, N, R, V]  from the latent to a head's value; packed [n, N, V, R]
    o: Any  # [n, D, N V]
    q: Any = None  # [n, N, H + r, D]  without a latent of queries
    q_down: Any = None  # [n, Q, D]
    q_norm: Any = None  # [n, Q]
    q_up: Any = None  # [n, N, H + r, Q]
    q_down_bias: Any = None  # [n, Q]
    kv_down_bias: Any = None  # [n, R + r]
    o_bias: Any = None  # [n, D]


def declare_latent_attention(config: LatentAttention, hidden_size: int, spec: MakeSpec) -> LatentAttentionParams:
    """Returns a `TensorSpec` per tensor; `spec(sizes, axes, scale)` makes one of n layers."""
    D, N, Q, R = hidden_size, config.num_heads, config.q_lora_rank, config.kv_lora_rank
    H, r, V = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    heads = ("heads", "head_dim")
    tensors: dict[str, TensorSpec] = {
        "kv_down": spec((R + r, D), ("latent", "embed"), num_inputs=1),
        "kv_norm": spec((R,), ("latent",), None),
        "k_up": replace(spec((N, H, R), (*heads, "latent")), is_matrix=True),
        "v_up": replace(spec((N, R, V), ("heads", "latent", "head_dim")), is_matrix=True),
        "o": spec((D, N * V), ("embed", "heads"), num_inputs=1, num_together=V),
    }
    if Q is None:
        tensors |= {"q": spec((N, H + r, D), (*heads, "embed"), num_inputs=1)}
    else:
        tensors |= {
            "q_down": spec((Q, D), ("latent", "embed"), num_inputs=1),
            "q_norm": spec((Q,), ("latent",), None),
            "q_up": spec((N, H + r, Q), (*heads, "latent"), num_inputs=1),
        }
    if config.has_bias:
        tensors |= {"kv_down_bias": spec((R + r,), ("latent",)), "o_bias": spec((D,), ("embed",))}
        if Q is not None:
            tensors |= {"q_down_bias": spec((Q,), ("latent",))}
    return LatentAttentionParams(**tensors)


def abstract_latents_of(config: LatentAttention, size: PoolSize) -> LatentPages:
    """Returns the pool of latents as `jax.ShapeDtypeStruct`s."""
    numbers = config.kv_lora_rank, config.qk_rope_head_dim
    return abstract_latents(
        size.num_pages, size.page_size, *numbers, size.dtype, size.layout, has_scales=size.dtype == "int8"
    )


def plan_latents_of(config: LatentAttention, pages: LatentPages, inputs: MixerInputs) -> Any:
    """Returns the plan of a step for `inputs.plan` of each layer like this one."""
    call, num_tokens = inputs.call(scale=config.score_scale), len(inputs.step.batch.tokens)
    return plan_latent_attention(pages, call, num_tokens=num_tokens, num_heads=config.num_heads)


def attend_to_latents(
    params: LatentAttentionParams,
    pages: LatentPages,
    x: jax.Array,
    inputs: MixerInputs,
    *,
    config: LatentAttention,
    norm: Norm,
) -> tuple[jax.Array, LatentPages]:
    """Returns the layer's output [T, D] for x [T, D], and the pages with the tokens' latents appended.

    `norm` is that of the layer; latents have one of their own.

    Queries meet latents, not keys, in every step: q · (K c) = (Kᵀ q) · c for the query q
    and matrix K of a head and a latent c. So a token's sums have the same order in prefill, decoding and verification.
    """
    refuse_if_exact("latent attention")
    k_up, v_up = params.k_up, params.v_up
    is_computed = isinstance(k_up, QuantizedArray)
    if isinstance(k_up, QuantizedArray):
        k_up = _widened(k_up, config.kv_lora_rank, x.dtype)
    if isinstance(v_up, QuantizedArray):
        v_up = _widened(v_up, config.kv_lora_rank, x.dtype).swapaxes(1, 2)
    R, angles, is_interleaved = config.kv_lora_rank, inputs.step.angles_of(config.rope), config.rope.is_interleaved
    q = _queries(params, x, inputs.tokens, config=config)
    q_rotated = rotary_embedding(q[..., config.qk_nope_head_dim :], *angles, is_interleaved=is_interleaved)
    q = jnp.concatenate([_by_heads(q[..., : config.qk_nope_head_dim], k_up, is_computed), q_rotated], axis=-1)
    down = linear(x, params.kv_down, params.kv_down_bias, inputs.tokens)
    latents = rms_norm(down[:, :R], params.kv_norm, config.norm)
    keys = rotary_embedding(down[:, None, R:], *angles, is_interleaved=is_interleaved)[:, 0]
    latents = jnp.concatenate([latents, keys], axis=-1)
    scale = config.score_scale

    def run(q: Any, latents: Any, _: None, pages: LatentPages, call: AttentionCall) -> tuple[jax.Array, LatentPages]:
        return latent_attention(q, latents, pages, call)

    def plain(q: jax.Array, latents: jax.Array, _: None) -> jax.Array:
        return plain_attention(q, latents[:, None], latents[:, None, :R], None, scale=scale)

    attended, pages = inputs.run(run, plain, (q, latents), None, pages, inputs.call(scale=scale))
    values = _by_heads(attended, v_up, is_computed).reshape(x.shape[0], -1)
    return linear(values, params.o, params.o_bias, inputs.tokens, input_units=config.num_heads), pages


def _widened(w: QuantizedArray, num_inputs: int, dtype: Any) -> jax.Array:
    """Returns packed matrices [N, out, in] in floating point."""
    N, F = w.shape[:2]
    return widened(w.alone().with_wide_scales().flat(), num_inputs).astype(dtype).reshape(N, F, num_inputs)


def _queries(params: LatentAttentionParams, x: jax.Array, tokens: StepTokens, *, config: LatentAttention) -> jax.Array:
    """Returns the queries [T, N, H + r] of x [T, D], not yet rotated."""
    if config.q_lora_rank is None:
        return linear(x, params.q, None, tokens)
    latents = rms_norm(linear(x, params.q_down, params.q_down_bias, tokens), params.q_norm, config.norm)
    return linear(latents, params.q_up, None, tokens)


def _by_heads(x: jax.Array, matrices: jax.Array, is_computed: bool) -> jax.Array:
    """Returns x [T, N, A] times the matrix [N, A, B] of each head, [T, N, B]."""
    # Left to itself, the compiler may turn the operand of a product in one step and not in another.
    rows = jax.lax.optimization_barrier(x.swapaxes(0, 1))
    return rows_by_matrices(rows[None], matrices[None], is_computed=is_computed)[0].swapaxes(0, 1).astype(x.dtype)
