"""What a model, a cache, an engine and a request are told: frozen, validated, hashable, free of jax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from jaxinfer.sampling_params import MAX_SEED as MAX_SEED
from jaxinfer.sampling_params import SamplingParams as SamplingParams
from jaxinfer.validation import (
    MAX_INT,
    as_tuple,
    is_int,
    require,
    require_bool,
    require_int,
    require_name,
    require_positive,
    require_real,
)

CACHE_DTYPES = ("float32", "bfloat16", "float16")
QUANTIZATIONS = ("int8", "int4")
ATTENTIONS = ("reference",)


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
        require_name("RopeScaling.kind", self.kind, ("linear", "llama3", "yarn"))
        require_real("RopeScaling.factor", self.factor, 1.0)
        if self.kind != "linear":
            require_int("RopeScaling.original_max_position", self.original_max_position, 1)
        for name in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor"):
            require_positive(f"RopeScaling.{name}", getattr(self, name))
        # The blends divide by the distance between the two.
        for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            bound = f"more than {low}={getattr(self, low)}"
            require(getattr(self, high) > getattr(self, low), f"RopeScaling.{high}", getattr(self, high), bound)
        require_bool("RopeScaling.truncate", self.truncate)


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
    sliding_window: int | None = None  # a token sees so many, itself included; None: all before it
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
            require_int(name, getattr(self, name), 1)
        require_int("max_position", self.max_position, 1)
        require(
            is_int(self.head_dim) and self.head_dim > 0 and self.head_dim % 2 == 0,
            "head_dim",
            self.head_dim,
            "a positive even integer (rotary embedding turns pairs)",
        )
        require(
            self.num_heads % self.num_kv_heads == 0,
            "num_heads",
            self.num_heads,
            f"a multiple of num_kv_heads={self.num_kv_heads}",
        )
        if self.sliding_window is not None:
            require_int("sliding_window", self.sliding_window, 1)
        is_scaling = self.rope_scaling is None or isinstance(self.rope_scaling, RopeScaling)
        require(is_scaling, "rope_scaling", self.rope_scaling, "a RopeScaling or None")
        require_real("rope_theta", self.rope_theta, 1.0)
        require_real("norm_epsilon", self.norm_epsilon, 0.0)
        for name in ("has_tied_embeddings", "has_qkv_bias", "has_output_bias", "has_mlp_bias", "has_qk_norm"):
            require_bool(name, getattr(self, name))
        are_right = f"positive and sum to num_layers={self.num_layers}"
        groups = as_tuple("layer_groups", self.layer_groups, are_right) or (self.num_layers,)
        object.__setattr__(self, "layer_groups", groups)
        are_positive = all(is_int(n) and n > 0 for n in groups)
        require(are_positive and sum(groups) == self.num_layers, "layer_groups", groups, are_right)


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The page pool: `num_pages` pages of `page_size` token slots for every layer, in `dtype` (a numpy dtype name)."""

    num_pages: int
    page_size: int = 128
    dtype: str = "float32"

    def __post_init__(self) -> None:
        require_int("num_pages", self.num_pages, 1)
        require(
            is_int(self.page_size) and self.page_size in (16, 32, 64, 128),
            "page_size",
            self.page_size,
            "16, 32, 64 or 128",
        )
        require_name("dtype", self.dtype, CACHE_DTYPES)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Limits of the engine; together with the model they determine every compiled shape.

    `max_num_seqs`: requests computed in one step. `max_num_batched_tokens`: tokens computed in one step, `None` for
    128 on CPU and 512 elsewhere, and for no less than max_num_seqs or max_mixed_tokens. `max_model_len`: prompt plus
    output of a request, `None` for the model's own limit. `num_sink_tokens`: with it a request may be longer, and then
    sees no more than max_model_len tokens, so many of its first and the last ones (StreamingLLM, Xiao et al. 2023); a
    multiple of page_size, `None` for no such requests. `num_pages`: pages in the pool, `None` for as many as all
    rows at full length can use, as far as there is memory for them. `memory_bytes`: what parameters, pages and steps
    may take on the device together, `None` for what it has, and on CPU for any. `cache_bytes`: what the pages may take,
    `None` for what is left; on CPU, where nothing sets a limit, for 1 GiB.
    `max_samples`: the most samples of a prompt (`n`, `best_of`) and the most beams that a request may ask for.
    `max_log_probs`: the most alternatives per token that a request may ask for. `max_prompt_log_probs`: the same for
    the tokens of prompts; None lets no request ask for `prompt_log_probs`, and compiles nothing for them.
    `max_listed_tokens`: the most token ids that a request may name in `logit_bias`, in `allowed_token_ids`, in all its
    `bad_words` together, and as stop tokens under `min_tokens`.
    `prefix_cache`: whether requests share the pages of equal beginnings, those of finished requests included.
    `decode_loop_steps`: decode steps that one dispatch may run while all requests decode. More take less time; their
    tokens come all at once, and abort and deadline act between dispatches. Not beside speculation.
    `max_mixed_tokens`: tokens computed in a step in which somebody decodes, `None` for max_num_batched_tokens; fewer
    make prompts slower and the time between tokens more even. `max_waiting`: requests queued beyond those that can
    run, `None` for any number.
    `host_cache_bytes`: memory of the host for pages that the pool has no room for, `None` for none of it.
    `disk_cache_path`: a folder for those that the host has no room for, within `disk_cache_bytes`; it outlasts the
    process.
    `max_drafts`: drafts per request and step, where the LLM speculates. `adaptive_drafts`: whether each step verifies
    as many of them as bring the most tokens per second, or all.
    `draft_trees`: whether drafters may guess several tokens for one place, as trees; those with heads then do.
    `ttft_target`, `tpot_target`: seconds to the first token, and per token after it, within which a request counts for
    the goodput; `None` for any. They change nothing else.
    `quantization`: "int8" rounds the weights of products to 8 bits with a scale per output channel while they are
    loaded, "int4" to 4 bits with a scale per 128 inputs; None leaves them in the LLM's dtype.
    `attention`: "reference" computes attention in plain JAX, on a GPU or TPU many times slower, for what the kernels
    there refuse; None takes these kernels. It changes nothing on a CPU, nor on a GPU that is too old for kernels.
    """

    max_num_seqs: int = 32
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    num_sink_tokens: int | None = None
    page_size: int = 128
    num_pages: int | None = None
    memory_bytes: int | None = None
    cache_bytes: int | None = None
    max_samples: int = 128
    max_log_probs: int = 20
    max_prompt_log_probs: int | None = None
    max_listed_tokens: int = 128
    prefix_cache: bool = True
    decode_loop_steps: int = 1
    max_mixed_tokens: int | None = None
    max_waiting: int | None = None
    host_cache_bytes: int | None = None
    disk_cache_bytes: int | None = None
    disk_cache_path: str | None = None
    max_drafts: int = 7
    adaptive_drafts: bool = True
    draft_trees: bool = False
    ttft_target: float | None = None
    tpot_target: float | None = None
    quantization: str | None = None
    attention: str | None = None

    def __post_init__(self) -> None:
        require_int("max_num_seqs", self.max_num_seqs, 1)
        if self.max_num_batched_tokens is not None:
            require(
                is_int(self.max_num_batched_tokens) and self.max_num_batched_tokens >= self.max_num_seqs,
                "max_num_batched_tokens",
                self.max_num_batched_tokens,
                f"an integer of at least max_num_seqs={self.max_num_seqs}, so that every running request can advance",
            )
        if self.max_model_len is not None:
            require_int("max_model_len", self.max_model_len, 2)
        if self.num_sink_tokens is not None:
            require_int("num_sink_tokens", self.num_sink_tokens, 1)
        if self.num_pages is not None:
            require_int("num_pages", self.num_pages, 1)
        for name in ("memory_bytes", "cache_bytes"):
            if getattr(self, name) is not None:
                require_int(name, getattr(self, name), 1, 2**62)
        require_int("max_samples", self.max_samples, 1)
        require_int("max_log_probs", self.max_log_probs, 0)
        if self.max_prompt_log_probs is not None:
            require_int("max_prompt_log_probs", self.max_prompt_log_probs, 0)
        require_int("max_listed_tokens", self.max_listed_tokens, 1)
        require_bool("prefix_cache", self.prefix_cache)
        require_int("decode_loop_steps", self.decode_loop_steps, 1)
        if self.max_mixed_tokens is not None:
            # So many that a prompt advances beside all others decoding.
            most = self.max_num_batched_tokens or MAX_INT
            require_int("max_mixed_tokens", self.max_mixed_tokens, self.max_num_seqs, most)
        if self.max_waiting is not None:
            require_int("max_waiting", self.max_waiting, 0)
        # Fewer than a page has slots, so that drafts never take more than one page.
        require_int("max_drafts", self.max_drafts, 1, 15)
        require_bool("adaptive_drafts", self.adaptive_drafts)
        require_bool("draft_trees", self.draft_trees)
        for name in ("ttft_target", "tpot_target"):
            if getattr(self, name) is not None:
                require_real(name, getattr(self, name), 0.0)
        require_quantization(self.quantization)
        names = ", ".join(map(repr, ATTENTIONS))
        is_known = isinstance(self.attention, str) and self.attention in ATTENTIONS
        require(self.attention is None or is_known, "attention", self.attention, f"{names} or None")
        CacheConfig(num_pages=1, page_size=self.page_size)
        self._check_tiers()

    @property
    def has_tiers(self) -> bool:
        """Whether pages that the pool has no room for are kept somewhere."""
        return self.host_cache_bytes is not None or self.disk_cache_bytes is not None

    def _check_tiers(self) -> None:
        for name in ("host_cache_bytes", "disk_cache_bytes"):
            if getattr(self, name) is not None:
                require_int(name, getattr(self, name), 1, 2**62)
                require(self.prefix_cache, name, getattr(self, name), "None without prefix_cache, whose pages it keeps")
        path, limit = self.disk_cache_path, self.disk_cache_bytes
        is_whole = path is None if limit is None else isinstance(path, str) and bool(path)
        require(is_whole, "disk_cache_path", path, f"a folder if and only if disk_cache_bytes={limit} is given")


def require_quantization(value: Any) -> None:
    names = ", ".join(map(repr, QUANTIZATIONS))
    is_known = isinstance(value, str) and value in QUANTIZATIONS
    require(value is None or is_known, "quantization", value, f"{names} or None")
