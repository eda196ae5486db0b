"""Rotary position embedding: its description, angles and rotation."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.validation import (
    as_tuple,
    is_int,
    require,
    require_bool,
    require_int,
    require_name,
    require_positive,
    require_real,
)
from kernels_pallas.exact_sums import sums_are_exact
from kernels_pallas.row_products import rounded

COUNTS_PER_TURN = 2**32


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Scaling of rotary frequencies beyond the trained length, by `kind`.

    * `linear` divides positions by `factor` (Chen et al. 2023).
    * `llama3` divides only long wavelengths, and blends between `low_freq_factor` and `high_freq_factor` (Llama 3.1).
    * `longrope` divides each frequency by its own one of `factors` and scales queries and keys by `attention_factor`
      (Ding et al. 2024). A model of more tokens than `original_max_position` has `long_factors`, see
      `ModelConfig.for_length`.
    * `yarn` blends by the number of rotations, between `beta_slow` and `beta_fast`. It scales queries and keys by
      `attention_factor` (Peng et al. 2023).
    """

    kind: Literal["linear", "llama3", "longrope", "yarn"]
    factor: float
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    factors: tuple[float, ...] = ()  # one per pair
    long_factors: tuple[float, ...] = ()
    long_max_position: int = 0  # tokens of the model with long_factors

    def __post_init__(self) -> None:
        require_name("RopeScaling.kind", self.kind, ("linear", "llama3", "longrope", "yarn"))
        require_real("RopeScaling.factor", self.factor, 1.0)
        if self.kind != "linear":
            require_int("RopeScaling.original_max_position", self.original_max_position, 1)
        for name in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor"):
            require_positive(f"RopeScaling.{name}", getattr(self, name))
        # The blend of `llama3` divides by the difference of its bounds. Those of `yarn` may be equal, as in Kimi-K2.
        is_ramp = self.high_freq_factor > self.low_freq_factor
        above = f"more than low_freq_factor={self.low_freq_factor}"
        require(is_ramp, "RopeScaling.high_freq_factor", self.high_freq_factor, above)
        at_least = f"at least beta_slow={self.beta_slow}"
        require(self.beta_fast >= self.beta_slow, "RopeScaling.beta_fast", self.beta_fast, at_least)
        require_bool("RopeScaling.truncate", self.truncate)
        for name in ("factors", "long_factors"):
            factors = as_tuple(f"RopeScaling.{name}", getattr(self, name), "several numbers greater than 0")
            object.__setattr__(self, name, factors)
            for factor in factors:
                require_positive(f"RopeScaling.{name}", factor)
        require_int("RopeScaling.long_max_position", self.long_max_position, 0)


@dataclass(frozen=True, kw_only=True)
class Rope:
    """The rotary embedding of a kind of layer."""

    dim: int  # of each head, from its first on; the others are not rotated
    num_turned: int | None = None  # pairs that turn, the first of those of `dim`; None: all
    max_position: int  # the model's length in tokens
    theta: float = 10_000.0
    scaling: RopeScaling | None = None
    is_interleaved: bool = False  # a pair is two neighbours, not half of `dim` apart

    def __post_init__(self) -> None:
        require_pairs("rope dim", self.dim)
        if self.num_turned is not None:
            require_int("num_turned", self.num_turned, 1, self.dim // 2)
        require_int("max_position", self.max_position, 1)
        require_real("rope_theta", self.theta, 1.0)
        is_scaling = self.scaling is None or isinstance(self.scaling, RopeScaling)
        require(is_scaling, "rope_scaling", self.scaling, "a RopeScaling or None")
        if self.scaling is not None and self.scaling.kind == "longrope":
            for name in ("factors", "long_factors") if self.scaling.long_factors else ("factors",):
                factors = getattr(self.scaling, name)
                are_all = len(factors) == self.dim // 2
                require(are_all, f"RopeScaling.{name}", factors, f"{self.dim // 2} numbers, one per pair")
        require_bool("is_interleaved", self.is_interleaved)


def lengthened(rope: Rope) -> Rope:
    """Returns the rope of a model with `long_factors`; the rope itself if it has none."""
    scaling = rope.scaling
    if scaling is None or not scaling.long_factors:
        return rope
    longer = replace(scaling, factors=scaling.long_factors, long_factors=())
    return replace(rope, max_position=scaling.long_max_position, scaling=longer)


def require_pairs(name: str, value: Any) -> None:
    is_even = is_int(value) and value > 0 and value % 2 == 0
    require(is_even, name, value, "a positive even integer (rotary embedding turns pairs)")


def rotary_frequencies(rope: Rope) -> tuple[np.ndarray, float]:
    """Returns the angle per position of each pair, f32[R/2], and the factor on cosine and sine.

    Computed by NumPy, so that every step has the same bits of them, whatever its compiler folds.
    """
    H = rope.dim
    frequencies = np.float32(rope.theta) ** (-np.arange(0, H, 2, dtype=np.float32) / np.float32(H))
    frequencies, factor = _scaled(frequencies, rope)
    if rope.num_turned is not None:
        frequencies[rope.num_turned :] = 0.0
    return frequencies, factor


def _scaled(frequencies: np.ndarray, rope: Rope) -> tuple[np.ndarray, float]:
    """Returns the frequencies f32[R/2] as the rope's scaling changes them, and the factor on cosine and sine."""
    scaling = rope.scaling
    if scaling is None:
        return frequencies, 1.0
    if scaling.kind == "linear":
        return frequencies / np.float32(scaling.factor), 1.0
    if scaling.kind == "longrope":
        return frequencies / np.asarray(scaling.factors, np.float32), scaling.attention_factor
    blend = _llama3_blend if scaling.kind == "llama3" else _yarn_blend
    keep = blend(frequencies, scaling, rope)
    factor = scaling.attention_factor if scaling.kind == "yarn" else 1.0
    return (frequencies * keep + frequencies / scaling.factor * (1.0 - keep)).astype(np.float32), factor


def _llama3_blend(frequencies: np.ndarray, scaling: RopeScaling, rope: Rope) -> np.ndarray:
    """Returns the part of each frequency that stays: 1 for short waves, 0 for long ones, linear between (Llama 3.1)."""
    rotations = scaling.original_max_position * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    return np.clip((rotations - low) / (high - low), 0.0, 1.0)


def _yarn_blend(frequencies: np.ndarray, scaling: RopeScaling, rope: Rope) -> np.ndarray:
    """Returns the part of each frequency that stays: a ramp over pairs, between two rotation counts (YaRN)."""
    H = rope.dim

    def pair_with(rotations: float) -> float:
        ratio = scaling.original_max_position / (rotations * 2 * math.pi)
        return H * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, H - 1)
    high += 0.001 if low == high else 0.0  # a ramp of no width would divide by zero
    return 1.0 - np.clip((np.arange(H // 2, dtype=np.float32) - low) / (high - low), 0.0, 1.0)


def rotary_angles(positions: jax.Array, rope: Rope) -> tuple[jax.Array, jax.Array]:
    """Returns cosine and sine [T, 1, H/2] in float32 for positions i32[T]."""
    _, factor = rotary_frequencies(rope)
    cos, sin = turning_angles(positions, rope)
    return cos * factor, sin * factor


def turning_angles(positions: jax.Array, rope: Rope) -> tuple[jax.Array, jax.Array]:
    """Returns cosine and sine as `rotary_angles`, without the factor: they move a key by this number of positions.

    Beyond the model's length, which only endless requests reach, the error of a float32 product would grow. There,
    angles are integers in units of 2^-32 of a turn, which wrap around, so that the angle between two tokens depends
    only on their distance.
    """
    frequencies, _ = rotary_frequencies(rope)
    angles = positions.astype(jnp.float32)[:, None] * frequencies[None]
    counts_per_position = np.round(frequencies * (COUNTS_PER_TURN / (2 * math.pi))).astype(np.uint32)
    counts = jax.lax.bitcast_convert_type(positions.astype(jnp.uint32)[:, None] * counts_per_position[None], jnp.int32)
    wrapped = counts.astype(jnp.float32) * (2 * math.pi / COUNTS_PER_TURN)
    angles = jnp.where((positions < rope.max_position)[:, None], angles, wrapped)[:, None]
    return jnp.cos(angles), jnp.sin(angles)


def rotary_embedding(x: jax.Array, cos: jax.Array, sin: jax.Array, *, is_interleaved: bool = False) -> jax.Array:
    """Rotates the first dimensions of each head of x [T, heads, H] by position (RoPE, Su et al. 2021).

    Cosine and sine [T, 1, R/2] rotate R dimensions; the further ones stay. A pair is i and i + R/2, as in most Hugging
    Face checkpoints, or 2 i and 2 i + 1 if `is_interleaved`.
    """
    R = 2 * cos.shape[-1]
    turned, rest = x[..., :R].astype(jnp.float32), x[..., R:]
    if is_interleaved:
        x1, x2 = turned[..., 0::2], turned[..., 1::2]
    else:
        x1, x2 = jnp.split(turned, 2, axis=-1)
    cos, sin = jnp.broadcast_to(cos, x1.shape), jnp.broadcast_to(sin, x1.shape)
    # The compiler may add to a product before it is rounded, in one program and not in another.
    keep = rounded if sums_are_exact() else lambda product: product
    y1, y2 = keep(x1 * cos) - keep(x2 * sin), keep(x2 * cos) + keep(x1 * sin)
    turned = jnp.stack([y1, y2], axis=-1).reshape(turned.shape) if is_interleaved else jnp.concatenate([y1, y2], -1)
    turned = turned.astype(x.dtype)
    return turned if rest.shape[-1] == 0 else jnp.concatenate([turned, rest], axis=-1)
