"""The layers of a decoder: functions of arrays, each with its formula.

On CPU the bits of a token's result do not depend on the tokens computed beside it; `kernels_pallas.row_products` has
the rules that keep this so.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from jaxinfer.config import ModelConfig, RopeScaling
from jaxinfer.quantization import QuantizedArray
from kernels_pallas.quantized_matmul import dequantize, quantized_matmul
from kernels_pallas.row_products import rows_by_weights
from kernels_pallas.row_sum import row_sum

COUNTS_PER_TURN = 2**32


def linear(
    x: jax.Array, w: jax.Array | QuantizedArray, bias: jax.Array | None = None, num_rows: jax.Array | None = None
) -> jax.Array:
    """Returns x wᵀ + bias [T, out...] in x's dtype; x, w and `num_rows` are as in `product`."""
    y = product(x, w, num_rows).astype(x.dtype)
    return y if bias is None else y + bias[None]


def product(x: jax.Array, w: jax.Array | QuantizedArray, num_rows: jax.Array | None = None) -> jax.Array:
    """Returns x wᵀ f32[T, out...] for x [T, in...] and w [out..., in...], added up in float32.

    If num_rows i32[] is given, later rows of x are padding, and a CPU skips blocks of padding.
    """
    outputs = w.shape[: len(w.shape) - x.ndim + 1]
    F = math.prod(outputs)
    x = x.reshape(x.shape[0], -1)
    if isinstance(w, QuantizedArray):
        y = _quantized_product(x, w.values.reshape(F, -1), w.scales.reshape(F, -1), num_rows)
    else:
        y = rows_by_weights(x, w.reshape(F, -1), num_rows)
    return y.reshape(x.shape[0], *outputs)


def _quantized_product(x: jax.Array, values: jax.Array, scales: jax.Array, num_rows: jax.Array | None) -> jax.Array:
    """x wᵀ f32[T, F] for x [T, D], values i8[F, D], of 4 bits i4[F, D] or i8[F, D / 2], scales f32[F, groups]."""
    if scales.shape[1] == 1 and values.shape[1] == x.shape[1]:  # compilers fuse the conversion into the product
        return rows_by_weights(x, values.astype(x.dtype), num_rows, is_computed=True) * scales.T
    return jax.lax.platform_dependent(
        x,
        values,
        scales,
        num_rows,
        cpu=_product_dequantized,
        default=lambda x, v, s, _: quantized_matmul(x, v, s).astype(jnp.float32),
    )


def _product_dequantized(x: jax.Array, values: jax.Array, scales: jax.Array, num_rows: jax.Array | None) -> jax.Array:
    w = dequantize(values, scales, None, x.shape[1]).astype(x.dtype)
    return rows_by_weights(x, w, num_rows, is_computed=True)


def rms_norm(x: jax.Array, weight: jax.Array, *, epsilon: float) -> jax.Array:
    """Returns x / sqrt(mean(x²) + epsilon) * weight over the last axis, in float32 (Zhang & Sennrich 2019)."""
    wide = x.astype(jnp.float32)
    mean_square = row_sum(wide * wide) / x.shape[-1]
    normed = (wide * jax.lax.rsqrt(mean_square + epsilon)[..., None]).astype(x.dtype)
    return normed * jnp.broadcast_to(weight, normed.shape)


def rotary_frequencies(config: ModelConfig) -> tuple[jax.Array, float]:
    """Returns the angle per position of each pair, f32[H/2], and the factor on cosine and sine."""
    H = config.head_dim
    frequencies = config.rope_theta ** (-jnp.arange(0, H, 2, dtype=jnp.float32) / H)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies, 1.0
    if scaling.kind == "linear":
        return frequencies / scaling.factor, 1.0
    blend = _llama3_blend if scaling.kind == "llama3" else _yarn_blend
    keep = blend(frequencies, scaling, config)
    factor = scaling.attention_factor if scaling.kind == "yarn" else 1.0
    return frequencies * keep + frequencies / scaling.factor * (1.0 - keep), factor


def _llama3_blend(frequencies: jax.Array, scaling: RopeScaling, config: ModelConfig) -> jax.Array:
    """Returns the part of each frequency that stays: 1 for short waves, 0 for long ones, linear between (Llama 3.1)."""
    rotations = scaling.original_max_position * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    return jnp.clip((rotations - low) / (high - low), 0.0, 1.0)


def _yarn_blend(frequencies: jax.Array, scaling: RopeScaling, config: ModelConfig) -> jax.Array:
    """Returns the part of each frequency that stays: a ramp over pairs, between two rotation counts (YaRN)."""
    H = config.head_dim

    def pair_with(rotations: float) -> float:
        ratio = scaling.original_max_position / (rotations * 2 * math.pi)
        return H * math.log(ratio) / (2 * math.log(config.rope_theta))

    low, high = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, H - 1)
    high += 0.001 if low == high else 0.0  # a ramp of no width would divide by zero
    return 1.0 - jnp.clip((jnp.arange(H // 2, dtype=jnp.float32) - low) / (high - low), 0.0, 1.0)


def rotary_angles(positions: jax.Array, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """Returns cosine and sine [T, 1, H/2] in float32 for positions i32[T]."""
    _, factor = rotary_frequencies(config)
    cos, sin = turning_angles(positions, config)
    return cos * factor, sin * factor


def turning_angles(positions: jax.Array, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """Returns cosine and sine as `rotary_angles`, without the factor: they move a key by this number of positions.

    Beyond the model's length, which only endless requests reach, the error of a float32 product would grow. There,
    angles are integers in units of 2^-32 of a turn, which wrap around, so that the angle between two tokens depends
    only on their distance.
    """
    frequencies, _ = rotary_frequencies(config)
    angles = positions.astype(jnp.float32)[:, None] * frequencies[None]
    counts_per_position = jnp.round(frequencies * (COUNTS_PER_TURN / (2 * math.pi))).astype(jnp.uint32)
    counts = jax.lax.bitcast_convert_type(positions.astype(jnp.uint32)[:, None] * counts_per_position[None], jnp.int32)
    wrapped = counts.astype(jnp.float32) * (2 * math.pi / COUNTS_PER_TURN)
    angles = jnp.where((positions < config.max_position)[:, None], angles, wrapped)[:, None]
    return jnp.cos(angles), jnp.sin(angles)


def rotary_embedding(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the two halves of the head dimension of x [T, heads, H] by position (RoPE, Su et al. 2021).

    Half-split layout as in Hugging Face checkpoints, not interleaved.
    """
    x1, x2 = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.broadcast_to(cos, x1.shape), jnp.broadcast_to(sin, x1.shape)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(x.dtype)


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Returns silu(gate) * up (Shazeer 2020)."""
    return jax.nn.silu(gate) * up
