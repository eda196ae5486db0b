"""Configurations of model, cache and engine: frozen, validated, hashable, free of jax."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jaxinfer.names import explains_names, refuse
from jaxinfer.sampling_params import MAX_SEED as MAX_SEED
from jaxinfer.sampling_params import SamplingParams as SamplingParams
from jaxinfer.validation import (
    MAX_INT,
    as_ints,
    is_int,
    make_scalars_plain,
    require,
    require_bool,
    require_int,
    require_name,
    require_real,
)

# Types of keys and values that `EngineConfig.cache_dtype` names, by their numpy names.
NARROW_CACHE_DTYPES = {"fp8": "float8_e4m3fn", "int8": "int8", "int4": "int4", "int2": "int2"}
WIDE_CACHE_DTYPES = ("float32", "bfloat16", "float16")
CACHE_DTYPES = (*WIDE_CACHE_DTYPES, *NARROW_CACHE_DTYPES.values())
QUANTIZATIONS = ("int8", "int4")
# Names of other engines for checkpoints that are packed already.
PACKED = ("awq", "awq_marlin", "gptq", "gptq_marlin", "fp8", "mxfp4", "nvfp4", "modelopt", "compressed-tensors", "gguf")
MAX_ADAPTERS, MAX_ADAPTER_RANK = 1024, 512
ATTENTIONS = ("reference",)
# The fields of EngineConfig that a deployment plan counts.
PLANNED_FIELDS = (
    *("max_num_seqs", "max_num_batched_tokens", "max_model_len"),
    *("page_size", "memory_bytes", "cache_dtype", "quantization"),
)
MAX_DEVICES = 2**16  # of a mesh axis
AUTO: Literal["auto"] = "auto"


@explains_names
@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The page pools: `num_pages` pages of `page_size` token slots for every layer, in `dtype` (a numpy dtype name).

    Keys, values and latents are rounded as they are written. In float8_e4m3fn they saturate at 448. In int8 and int4
    each token has a float32 scale per head, and for a latent and its rotated key. States of recurrent layers stay
    float32. In int2 a page is rounded once, when it is full, for a model from `with_open_pages`. Its pages that are not
    full are in `open_dtype`; other caches have none.

    `num_bounded_pages`: pages of each of `ModelConfig.page_kinds` but the first. Without them every kind has
    `num_pages`, and a request has pages of the same ids in all kinds. `num_draft_states`: further states of each
    recurrent layer, for the tokens of a step that verifies drafts.
    """

    num_pages: int
    page_size: int = 128
    dtype: str = "float32"
    open_dtype: str = "float32"
    num_bounded_pages: tuple[int, ...] = ()
    num_draft_states: int = 0

    def __post_init__(self) -> None:
        make_scalars_plain(self)
        require_int("num_pages", self.num_pages, 1)
        require(
            is_int(self.page_size) and self.page_size in (16, 32, 64, 128),
            "page_size",
            self.page_size,
            "16, 32, 64 or 128",
        )
        require_name("dtype", self.dtype, CACHE_DTYPES)
        require_name("open_dtype", self.open_dtype, WIDE_CACHE_DTYPES)
        object.__setattr__(self, "num_bounded_pages", as_ints("num_bounded_pages", self.num_bounded_pages, 1))
        require_int("num_draft_states", self.num_draft_states, 0)


@explains_names
@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """The devices of an engine: `replicas` copies of the model, each on `tensor` x `experts` x `stages` devices.

    `tensor` devices split each layer's heads and hidden units, and the vocabulary. `experts` groups of them split the
    experts of a mixture, and all devices together what is no expert, as far as they divide it. `stages` groups of all
    these share the layers, and pass parts of a step's tokens on: for several hosts, where a sum over devices in each
    layer takes longer than to read all weights once more.

    Each replica computes requests of its own, from one queue. replicas="auto" takes every device of this process, or of
    `devices` that are given to an LLM. Each replica then has the number of devices that the other fields say, or
    without these the fewest that hold the model.

    The first `prefill` replicas only prefill: each request goes on from its first token at one of the other replicas,
    which only decode. 0: every replica does both.
    """

    tensor: int = 1
    experts: int = 1
    replicas: int | Literal["auto"] = 1
    prefill: int = 0
    stages: int = 1

    def __post_init__(self) -> None:
        make_scalars_plain(self)
        for name in ("tensor", "experts", "replicas", "stages"):
            value = getattr(self, name)
            if name == "replicas" and isinstance(value, str):
                require(value == AUTO, name, value, f"a number or {AUTO!r}")
            else:
                require_int(name, value, 1, MAX_DEVICES)
        require_int("prefill", self.prefill, 0)
        if self.replicas != AUTO and self.prefill >= self.replicas:
            raise ValueError(
                f"prefill={self.prefill} of replicas={self.replicas} leaves no replica to decode; prefill with fewer,"
                " or raise replicas"
            )

    @property
    def devices_per_replica(self) -> int:
        return self.tensor * self.experts * self.stages

    @property
    def num_replicas(self) -> int:
        """The number of replicas; ValueError for "auto", which an engine replaces by a number."""
        if self.replicas == AUTO:
            raise ValueError(f"replicas={AUTO!r} depends on the devices of an engine; give a number here")
        return self.replicas


@explains_names
@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Limits and options of the engine; together with the model they determine every compiled shape.

    Requests and steps:

    * `max_num_seqs`: requests in one step. None takes 32 on CPU and with speculation, else up to 256, for each of which
      memory has pages for 1,024 tokens. It takes no more than a step may have tokens.
    * `max_num_batched_tokens`: tokens in one step. None takes 512 on CPU and 2,048 elsewhere, and at least max_num_seqs
      and max_mixed_tokens.
    * `max_model_len`: prompt and output tokens of a request. None takes the model's own limit, with LongRoPE the
      original one.
    * `num_sink_tokens`: allows longer requests with attention sinks (StreamingLLM, Xiao et al. 2023). They attend to at
      most max_model_len tokens: this number of first tokens, and the last ones. A multiple of page_size; None is off.
    * `max_mixed_tokens`: tokens in a step with a decoding request. None takes 128 on CPU, or twice max_num_seqs if that
      is more, but no more than max_num_batched_tokens, which it takes elsewhere. A lower limit slows prompts down and
      makes the time between tokens more even.
    * `decode_loop_steps`: decode steps per dispatch while all requests decode. More steps save time, but tokens come in
      bursts, and aborts and deadlines act between dispatches. None takes 1 on CPU; elsewhere it takes up to 8, which
      run in 5 ms. More than 1 excludes speculation.
    * `max_waiting`: waiting requests beyond the running ones. None sets no limit. If others fill the queue, a tenant
      with fewer than its fair share may still queue; at most twice the number waits then.
    * `exact`: a GPU adds up in one order, so that the bits of a token's result do not depend on the requests, chunks
      and drafts that are computed beside it. It costs time. A CPU does so always. Refused where it is not built: on
      TPU, on GPUs before Ampere, over several devices, and for what docs/kernels.md lists.
    * `attention`: "reference" computes attention in plain JAX, for cases that the GPU and TPU kernels refuse. It is
      many times slower there, and changes nothing on a CPU or a GPU too old for the kernels. None takes the kernels.
    * `parallelism`: the devices that compute the model, as a `Parallelism`: of this process, or all devices of all
      processes of `jax.distributed`. None takes the fewest of this process that hold it, on CPU one.
      Limits of steps, rows and device memory are those of each replica.

    Memory:

    * `page_size`: token slots of a page: 16, 32, 64 or 128.
    * `num_pages`: pages in the pool. None takes the pages of all rows at full length, if they fit in memory.
    * `memory_bytes`: device bytes for parameters, pages and steps together. None takes all of the device; on CPU it
      sets no limit.
    * `cache_bytes`: device bytes for pages. None takes the rest; on CPU, if memory_bytes is None too, 1 GiB.
    * `cache_dtype`: keeps keys and values in fewer bits: "fp8" as float8_e4m3fn, with the checkpoint's scales if it has
      some, "int8" and "int4" with a scale per token and head. "int2" rounds each page once, when it is full; a token
      reads its own page as it was computed. None keeps the LLM's dtype.
    * `quantization`: "int8" rounds the weights of products to 8 bits, with a scale per output channel, during loading.
      "int4" rounds to 4 bits, with a scale per 128 inputs. None keeps the LLM's dtype.

    Adapters:

    * `max_adapters`: adapters (LoRA) that may be loaded at once, see `LLM.load_adapter`. 0 compiles nothing for them.
    * `max_adapter_rank`: the largest rank of an adapter. The device keeps this rank for each of max_adapters.

    Prefix cache:

    * `prefix_cache`: requests with equal prefixes share pages, also after one of them has finished.
    * `host_cache_bytes`: host memory for pages that the pool evicts. None is off.
    * `disk_cache_path`, `disk_cache_bytes`: a folder for pages that the host evicts, and its limit. The folder outlasts
      the process. None is off.

    Limits on one request:

    * `max_samples`: samples of a prompt (`n`, `best_of`) or beams.
    * `max_log_probs`: alternatives per token.
    * `max_prompt_log_probs`: alternatives per token of the prompt. None refuses `prompt_log_probs`, and compiles
      nothing for it.
    * `sampling_log_probs`: completions also have each token's log-probability in the distribution that it was drawn
      from, after penalties, structure, temperature and filters.
    * `max_listed_tokens`: token ids each in `logit_bias`, `allowed_token_ids`, all `bad_words` together, and the stop
      tokens under `min_tokens`.

    Speculation:

    * `max_drafts`: drafts per request and step, from 1 to 15.
    * `adaptive_drafts`: each step verifies the number of drafts with the most tokens per second; False verifies all.
    * `draft_trees`: drafters may guess several tokens for one position, as a tree. Draft heads then do.

    Goodput: a request counts if it meets both targets. They change nothing else.

    * `ttft_target`: seconds to the first token. None sets no target.
    * `tpot_target`: seconds per token after the first. None sets no target.
    """

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    num_sink_tokens: int | None = None
    page_size: int = 128
    num_pages: int | None = None
    memory_bytes: int | None = None
    cache_bytes: int | None = None
    cache_dtype: str | None = None
    max_samples: int = 128
    max_log_probs: int = 20
    max_prompt_log_probs: int | None = None
    sampling_log_probs: bool = False
    max_listed_tokens: int = 128
    prefix_cache: bool = True
    decode_loop_steps: int | None = None
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
    exact: bool = False
    attention: str | None = None
    max_adapters: int = 0
    max_adapter_rank: int = 16
    parallelism: Parallelism | None = None

    def __post_init__(self) -> None:
        make_scalars_plain(self)
        least_tokens = self.max_num_seqs or 1
        if self.max_num_seqs is not None:
            require_int("max_num_seqs", self.max_num_seqs, 1)
        if self.max_num_batched_tokens is not None:
            require(
                is_int(self.max_num_batched_tokens) and self.max_num_batched_tokens >= least_tokens,
                "max_num_batched_tokens",
                self.max_num_batched_tokens,
                f"an integer of at least max_num_seqs={least_tokens}, so that every running request can advance",
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
        require_bool("sampling_log_probs", self.sampling_log_probs)
        require_int("max_listed_tokens", self.max_listed_tokens, 1)
        require_bool("prefix_cache", self.prefix_cache)
        if self.decode_loop_steps is not None:
            require_int("decode_loop_steps", self.decode_loop_steps, 1)
        if self.max_mixed_tokens is not None:
            # The minimum leaves a token for a prompt while all other rows decode.
            most = self.max_num_batched_tokens or MAX_INT
            require_int("max_mixed_tokens", self.max_mixed_tokens, least_tokens, most)
        if self.max_waiting is not None:
            require_int("max_waiting", self.max_waiting, 0)
        # Fewer than the slots of the smallest page, so that drafts need at most one more page.
        require_int("max_drafts", self.max_drafts, 1, 15)
        require_bool("adaptive_drafts", self.adaptive_drafts)
        require_bool("draft_trees", self.draft_trees)
        require_bool("exact", self.exact)
        for name in ("ttft_target", "tpot_target"):
            if getattr(self, name) is not None:
                require_real(name, getattr(self, name), 0.0)
        require_int("max_adapters", self.max_adapters, 0, MAX_ADAPTERS)
        require_int("max_adapter_rank", self.max_adapter_rank, 1, MAX_ADAPTER_RANK)
        require_quantization(self.quantization)
        is_parallelism = self.parallelism is None or isinstance(self.parallelism, Parallelism)
        require(is_parallelism, "parallelism", self.parallelism, "a Parallelism or None")
        _require_name_or_none("attention", self.attention, ATTENTIONS)
        _require_name_or_none("cache_dtype", self.cache_dtype, NARROW_CACHE_DTYPES)
        CacheConfig(num_pages=1, page_size=self.page_size)
        self._check_tiers()

    @property
    def has_tiers(self) -> bool:
        """True if a host or disk tier keeps the pages that the pool evicts."""
        return self.host_cache_bytes is not None or self.disk_cache_bytes is not None

    @property
    def num_replicas(self) -> int:
        """The copies of the model, each with the limits of this configuration on rows, steps and memory."""
        return 1 if self.parallelism is None else self.parallelism.num_replicas

    @property
    def num_prefill_replicas(self) -> int:
        """The first copies of the model, which only prefill; with 0 every copy also decodes."""
        return 0 if self.parallelism is None else self.parallelism.prefill

    def _check_tiers(self) -> None:
        for name in ("host_cache_bytes", "disk_cache_bytes"):
            if getattr(self, name) is not None:
                require_int(name, getattr(self, name), 1, 2**62)
                require(self.prefix_cache, name, getattr(self, name), "None without prefix_cache, whose pages it keeps")
        path, limit = self.disk_cache_path, self.disk_cache_bytes
        is_whole = path is None if limit is None else isinstance(path, str) and bool(path)
        require(is_whole, "disk_cache_path", path, f"a folder if and only if disk_cache_bytes={limit} is given")


def with_fields(place: type, config: EngineConfig | None, fields: Mapping[str, Any]) -> EngineConfig | None:
    """Returns a configuration with other values of some fields; TypeError for a field that is unknown.

    `place` is the class whose constructor was given the fields, beside parameters of its own.
    """
    if not fields:
        return config
    names = {field.name for field in dataclasses.fields(EngineConfig)}
    if not names.issuperset(fields):
        others = {"SamplingParams": {field.name for field in dataclasses.fields(SamplingParams)}}
        own = inspect.signature(place).parameters.keys() - {"fields"}
        refuse(place.__name__, fields.keys() - names, {*names, *own}, others)
    config = EngineConfig() if config is None else config
    require(isinstance(config, EngineConfig), "config", config, "an EngineConfig, or None for the default")
    return dataclasses.replace(config, **fields)


def require_quantization(value: Any) -> None:
    """Raises ValueError for anything but None and the names of what weights are rounded to while they load."""
    if isinstance(value, str) and value.lower() in PACKED:
        raise ValueError(
            f"quantization={value!r} is not allowed: a checkpoint that is packed so loads as it is, so leave it out"
        )
    _require_name_or_none("quantization", value, QUANTIZATIONS)


def _require_name_or_none(name: str, value: Any, allowed: Collection[str]) -> None:
    is_known = value is None or (isinstance(value, str) and value in allowed)
    require(is_known, name, value, f"{', '.join(map(repr, allowed))} or None")
