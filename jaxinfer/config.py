"""What a model, a cache, an engine and a request are told: frozen, validated, hashable, free of jax."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal

MAX_SEED = 2**64 - 1
# The device computes with 32 bits.
MAX_INT, MAX_FLOAT = 2**31 - 1, 3.4e38
CACHE_DTYPES = ("float32", "bfloat16", "float16")


def _require(condition: bool, name: str, value: Any, requirement: str) -> None:
    if not condition:
        raise ValueError(f"{name}={value!r} is not allowed: {name} must be {requirement}")


def _is_int(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _require_int(name: str, value: Any, minimum: int, maximum: int = MAX_INT) -> None:
    bound = f"an integer from {minimum} to {maximum}"
    _require(_is_int(value) and minimum <= value <= maximum, name, value, bound)


def _require_real(name: str, value: Any, minimum: float, maximum: float = math.inf) -> None:
    # NaN fails every comparison, so it is refused here as well.
    is_real: bool = isinstance(value, Real) and not isinstance(value, bool)
    bound = f"a finite number of at least {minimum}" + ("" if maximum == math.inf else f" and at most {maximum}")
    number: Any = value
    _require(is_real and minimum <= number <= min(maximum, MAX_FLOAT), name, value, bound)


def _require_positive(name: str, value: Any) -> None:
    _require_real(name, value, 0.0)
    _require(value > 0, name, value, "greater than 0")


def _require_bool(name: str, value: Any) -> None:
    _require(isinstance(value, bool), name, value, "True or False")


def _as_tuple(name: str, values: Any, requirement: str) -> tuple[Any, ...]:
    _require(isinstance(values, Iterable) and not isinstance(values, str | bytes | Mapping), name, values, requirement)
    return tuple(values)


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained length.

    `linear` divides positions by `factor` (Chen et al. 2023). `llama3` divides only long wavelengths, blending between
    `low_freq_factor` and `high_freq_factor` (Llama 3.1). `yarn` blends by rotations counted between `beta_slow` and
    `beta_fast`, and scales queries and keys by `attention_factor` (Peng et al. 2023).
    """

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        _require(self.kind in ("linear", "llama3", "yarn"), "RopeScaling.kind", self.kind, "linear, llama3 or yarn")
        _require_real("RopeScaling.factor", self.factor, 1.0)
        if self.kind != "linear":
            _require_int("RopeScaling.original_max_position", self.original_max_position, 1)
        for name in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor"):
            _require_positive(f"RopeScaling.{name}", getattr(self, name))
        # The blends divide by the distance between the two.
        for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            bound = f"more than {low}={getattr(self, low)}"
            _require(getattr(self, high) > getattr(self, low), f"RopeScaling.{high}", getattr(self, high), bound)
        _require_bool("RopeScaling.truncate", self.truncate)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape and switches of a decoder-only transformer (Llama topology)."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_epsilon: float = 1e-5
    has_tied_embeddings: bool = False
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    has_qk_norm: bool = False
    # Layers of one group are stacked and run by one scan: few groups compile fast, groups of 1 run fastest on CPU.
    layer_groups: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
        ):
            _require_int(name, getattr(self, name), 1)
        _require_int("max_position", self.max_position, 1)
        _require(
            _is_int(self.head_dim) and self.head_dim > 0 and self.head_dim % 2 == 0,
            "head_dim",
            self.head_dim,
            "a positive even integer (rotary embedding turns pairs)",
        )
        _require(
            self.num_heads % self.num_kv_heads == 0,
            "num_heads",
            self.num_heads,
            f"a multiple of num_kv_heads={self.num_kv_heads}",
        )
        _require_real("rope_theta", self.rope_theta, 1.0)
        _require_real("norm_epsilon", self.norm_epsilon, 0.0)
        for name in ("has_tied_embeddings", "has_qkv_bias", "has_output_bias", "has_mlp_bias", "has_qk_norm"):
            _require_bool(name, getattr(self, name))
        groups = tuple(self.layer_groups) or (self.num_layers,)
        object.__setattr__(self, "layer_groups", groups)
        _require(
            sum(self.layer_groups) == self.num_layers and min(self.layer_groups) > 0,
            "layer_groups",
            self.layer_groups,
            f"positive and sum to num_layers={self.num_layers}",
        )


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The page pool: `num_pages` pages of `page_size` token slots for every layer, in `dtype` (a numpy dtype name)."""

    num_pages: int
    page_size: int = 128
    dtype: str = "float32"

    def __post_init__(self) -> None:
        _require_int("num_pages", self.num_pages, 1)
        _require(
            _is_int(self.page_size) and self.page_size in (16, 32, 64, 128),
            "page_size",
            self.page_size,
            "16, 32, 64 or 128",
        )
        _require(
            self.dtype in CACHE_DTYPES, "dtype", self.dtype, ", ".join(CACHE_DTYPES[:-1]) + f" or {CACHE_DTYPES[-1]}"
        )


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Limits of the engine; together with the model they determine every compiled shape.

    `max_num_seqs`: requests computed in one step. `max_num_batched_tokens`: tokens computed in one step.
    `max_model_len`: prompt plus output of a request, `None` for the model's own limit. `num_pages`: pages in the
    pool, `None` for as many as all rows at full length can use, bounded by `cache_bytes`.
    `cache_bytes`: bytes the page pool may take, `None` for 1 GiB on CPU and for what the device has left elsewhere.
    `max_log_probs`: the most alternatives per token that a request may ask for.
    """

    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    max_model_len: int | None = None
    page_size: int = 128
    num_pages: int | None = None
    cache_bytes: int | None = None
    max_log_probs: int = 20

    def __post_init__(self) -> None:
        _require_int("max_num_seqs", self.max_num_seqs, 1)
        _require(
            _is_int(self.max_num_batched_tokens) and self.max_num_batched_tokens >= self.max_num_seqs,
            "max_num_batched_tokens",
            self.max_num_batched_tokens,
            f"an integer of at least max_num_seqs={self.max_num_seqs}, so that every running request can advance",
        )
        if self.max_model_len is not None:
            _require_int("max_model_len", self.max_model_len, 2)
        if self.num_pages is not None:
            _require_int("num_pages", self.num_pages, 1)
        if self.cache_bytes is not None:
            _require_int("cache_bytes", self.cache_bytes, 1, 2**62)
        _require_int("max_log_probs", self.max_log_probs, 0)
        CacheConfig(num_pages=1, page_size=self.page_size)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    `temperature` 0 takes the most probable token; the other filters then change nothing. `top_k` 0, `top_p` 1 and
    `min_p` 0 switch those filters off; they apply after the temperature, in that order. `seed` fixes every draw:
    token i of a request depends on (seed, i) and the logits alone; `None` lets the engine draw one and report it.
    `log_probs` is how many alternatives to report per token beside the chosen one. `stop` ends the text before the
    first of these strings; `stop_token_ids` end it at a token, in addition to the model's end tokens, which
    `ignore_eos` switches off.
    """

    max_tokens: int = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    log_probs: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _require_int("max_tokens", self.max_tokens, 1)
        _require_real("temperature", self.temperature, 0.0)
        _require_int("top_k", self.top_k, 0)
        _require_real("top_p", self.top_p, 0.0, 1.0)
        _require(
            self.top_p > 0,
            "top_p",
            self.top_p,
            "greater than 0 (use temperature=0 for the most probable token)",
        )
        _require_real("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _require_int("seed", self.seed, 0, MAX_SEED)
        _require_int("log_probs", self.log_probs, 0)
        _require_bool("ignore_eos", self.ignore_eos)
        stop = (self.stop,) if isinstance(self.stop, str) else _as_tuple("stop", self.stop, "a string or several")
        ids = _as_tuple("stop_token_ids", self.stop_token_ids, "several token ids")
        _require(
            all(isinstance(s, str) and s for s in stop),
            "stop",
            self.stop if isinstance(self.stop, str) else stop,
            "a non-empty string or several",
        )
        _require(all(_is_int(i) and 0 <= i <= MAX_INT for i in ids), "stop_token_ids", ids, "token ids of at least 0")
        # Lists are welcome as input; tuples keep the object hashable.
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(int(i) for i in ids))
