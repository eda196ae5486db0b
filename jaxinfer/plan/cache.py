"""The pages of a model's cache, and the bytes that it needs, from the configurations of model and engine alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from jaxinfer.config import NARROW_CACHE_DTYPES, CacheConfig, EngineConfig
from jaxinfer.device import CPU_CACHE_BYTES
from jaxinfer.model.adapted_params import abstract_slots
from jaxinfer.model.cache import page_arrays, page_bytes
from jaxinfer.model.components.experts import MLP_AXIS
from jaxinfer.model.config import ModelConfig
from jaxinfer.model.layer_parts import has_rotated_norms
from jaxinfer.model.page_kinds import NUM_EXACT, PageKind, with_open_pages
from jaxinfer.model.stages import are_shared, num_parts_of
from jaxinfer.parallel.placement import DEFAULT_DEVICE, Placement
from jaxinfer.plan.memory import MemoryPlan, num_bytes
from jaxinfer.plan.step_shapes import Bucket, loop_steps, max_batched_tokens, max_rows
from kernels_pallas.mesh_axes import devices_per_stage, num_stages
from kernels_pallas.paged_attention.layout import default_layout
from kernels_pallas.triton import MISADDRESSED

# States of a token that a step holds at once in float32: by XLA for CPU's allocation, and by that of the steps of large
# models that are compiled for TPU v6e, which fuses more.
NUM_STATES = {"cpu": 16, "tpu": 4}


class PlannedDrafter(Protocol):
    """The part of a drafter that takes memory of its own on the device."""

    def page_bytes(self, cache_config: CacheConfig) -> int:
        """Returns the bytes that the drafter stores per page of the target's cache."""
        return 0

    @property
    def resident_bytes(self) -> int:
        """Returns the bytes of its parameters."""
        ...


@dataclass(frozen=True, kw_only=True)
class MemoryQuestion:
    """A model and its engine's limits on devices, whose memory is asked for before a step is compiled.

    * `dtype`: of the weights. `param_bytes`: theirs on each device.
    * `speculates`: True if steps verify drafts; `drafter` is the one that makes them on the device.
    * `placement`: the devices of one replica; they may be abstract.
    * `platform`: of devices that are not here, whose kernels lay pages out their way; None is that of this process.
    """

    model: ModelConfig
    config: EngineConfig
    dtype: str
    param_bytes: int = 0
    speculates: bool = False
    placement: Placement = DEFAULT_DEVICE
    platform: str | None = None
    drafter: PlannedDrafter | None = None

    @property
    def max_model_len(self) -> int:
        return resolve_max_model_len(self.model, self.config)

    @property
    def page(self) -> CacheConfig:
        """A cache of one page."""
        return one_page(self.config, self.dtype)

    def page_bytes(self, cache: CacheConfig, kind: int) -> int:
        """Returns the bytes of a page of one of the model's kinds on each device."""
        return page_bytes(self.model, cache, self.platform, kind=kind, mesh=self.placement.mesh)

    @property
    def has_keys_of_drafter(self) -> bool:
        """True if the drafter stores keys in the same pages; it may read its keys from the first token on."""
        page = CacheConfig(num_pages=1, page_size=self.config.page_size)
        return self.drafter is not None and self.drafter.page_bytes(page) > 0

    @property
    def loaded_bytes(self) -> int:
        """The bytes of the parameters of model and drafter on each device."""
        return self.param_bytes + (0 if self.drafter is None else self.drafter.resident_bytes)

    @property
    def resident_bytes(self) -> int:
        """The bytes of all parameters: those, and the slots for adapters, which every device has whole."""
        config = self.config
        slots = abstract_slots(self.model, config.max_adapters, config.max_adapter_rank, self.dtype)
        return self.loaded_bytes + num_bytes(slots)


def resolve_max_model_len(model_config: ModelConfig, config: EngineConfig) -> int:
    """Returns the most tokens of a request; raises ValueError if max_model_len exceeds the model's positions."""
    if config.max_model_len is None:
        return model_config.max_position
    if config.max_model_len > model_config.max_position:
        raise ValueError(
            f"max_model_len={config.max_model_len} is more than the model's {model_config.max_position} positions;"
            " lower it or leave it out"
        )
    return config.max_model_len


def one_page(config: EngineConfig, dtype: str) -> CacheConfig:
    """Returns a cache of one page as the configuration describes it; `dtype` is that of the weights."""
    own = dtype if config.cache_dtype is None else NARROW_CACHE_DTYPES[config.cache_dtype]
    page = CacheConfig(num_pages=1, page_size=config.page_size, dtype=own)
    return replace(page, open_dtype=dtype) if config.cache_dtype == "int2" else page


def model_of_engine(model: ModelConfig, config: EngineConfig) -> ModelConfig:
    """Returns the form of a model in which an engine runs it: that for its length, and with open pages for "int2".

    Raises ValueError for a model that cannot have them.
    """
    model = model.for_length(config.max_model_len)
    return with_open_pages(model, NUM_EXACT) if config.cache_dtype == "int2" else model


def check_open_pages(question: MemoryQuestion) -> None:
    """Raises ValueError for keys and values in 2 bits where they are not built."""
    config = question.config
    if config.cache_dtype != "int2":
        return
    platform = question.platform or default_layout()
    narrow = "'int8' or 'fp8'" if platform == "tpu" else "'int4' or 'int8'"  # a TPU refuses int4
    others = f"use cache_dtype={narrow}, or leave it out"
    refused = {
        f"a {platform.upper()}": (platform != "cpu", others),
        f"{question.placement.num_devices} devices": (
            question.placement.num_devices > 1,
            f"give EngineConfig.parallelism one device per replica, or {others}",
        ),
        f"draft_trees={config.draft_trees}": (config.draft_trees, "leave EngineConfig.draft_trees out"),
        "drafts that a device makes": (
            question.drafter is not None,
            f"speculate by n-grams or suffixes, or {others}",
        ),
    }
    for what, (is_refused, way_out) in refused.items():
        if is_refused:
            raise ValueError(f"cache_dtype='int2' is not built for {what}; {way_out}")


def check_sinks(question: MemoryQuestion) -> None:
    """Raises ValueError if num_sink_tokens asks for endless requests that model, limits or drafter forbid."""
    config, model, max_model_len = question.config, question.model, question.max_model_len
    num_tokens, page_size = config.num_sink_tokens, config.page_size
    if num_tokens is None:
        return
    name = f"num_sink_tokens={num_tokens}"
    if num_tokens % page_size or max_model_len % page_size:
        raise ValueError(
            f"{name} and max_model_len={max_model_len} must be multiples of page_size={page_size}, for whole pages"
            " leave a request's sight; choose others in EngineConfig"
        )
    if max_model_len < num_tokens + 2 * page_size:
        raise ValueError(
            f"{name} leave {max_model_len - num_tokens} of max_model_len={max_model_len} tokens for the last ones, two"
            f" pages of {page_size} are the least; lower EngineConfig.num_sink_tokens or raise max_model_len"
        )
    if config.cache_dtype is not None:
        raise ValueError(
            f"{name} turns the keys of these tokens again and again, and cache_dtype={config.cache_dtype!r} would round"
            " them each time; leave out one of the two in EngineConfig"
        )
    if len(model.page_kinds) > 1:
        raise ValueError(
            f"{name} are not for this model, of whose layers some keep a window or a state of their own; leave"
            " EngineConfig.num_sink_tokens out"
        )
    if model.sliding_window is not None:
        raise ValueError(
            f"{name} is not for this model, whose own window of {model.sliding_window} tokens hides the first ones;"
            " leave EngineConfig.num_sink_tokens out"
        )
    if has_rotated_norms(model.mixers):
        raise ValueError(
            f"{name} turns the keys of these tokens, and those of this model get a norm after their rotation; leave"
            " EngineConfig.num_sink_tokens out"
        )
    if question.has_keys_of_drafter:
        raise ValueError(
            f"{name} leaves no place for a draft model, whose keys lie in the same pages but are not turned; leave out"
            " EngineConfig.num_sink_tokens, or speculate by n-grams, suffixes or what was trained on the target"
        )


def plan_cache(question: MemoryQuestion) -> CacheConfig:
    """Returns the largest useful number of pages: `num_pages` if set, else the pages of all rows at full length.

    Without `num_pages`, the pages stay within `cache_bytes`, or within CPU_CACHE_BYTES if neither the configuration nor
    the device sets a limit. Raises ValueError if `cache_bytes` is less than one page, and as `check_sinks` and
    `check_open_pages` do.
    """
    check_sinks(question)
    check_open_pages(question)
    config = question.config
    page = replace(question.page, num_bounded_pages=bounded_pages(question))
    if config.num_pages is not None:
        return replace(page, num_pages=config.num_pages)
    # Each row of endless requests has its sinks as they are, and rotated.
    per_row = -(-question.max_model_len // config.page_size) + (config.num_sink_tokens or 0) // config.page_size
    num_pages, limit = max_rows(config) * per_row, config.cache_bytes
    if limit is None and config.memory_bytes is None and question.placement.free_bytes() is None:
        limit = CPU_CACHE_BYTES
    if limit is not None:
        bytes_per_page, bounded_bytes = bytes_of_page(question, page), bytes_of_bounded(question, page)
        num_pages = min(num_pages, (limit - bounded_bytes) // bytes_per_page)
        if num_pages < 1:
            kinds = "windows, states and open pages" if config.cache_dtype == "int2" else "windows and states"
            further = f" beside {bounded_bytes} bytes for {kinds}" if bounded_bytes else ""
            raise ValueError(
                f"cache_bytes={limit} is less than one page of {bytes_per_page} bytes{further}; raise"
                f" EngineConfig.cache_bytes or lower page_size{' or max_num_seqs' if bounded_bytes else ''}"
            )
    return replace(page, num_pages=num_pages)


def bounded_pages(question: MemoryQuestion) -> tuple[int, ...]:
    """Returns the pages of each bounded kind of the model's pages, for `max_num_seqs` running requests."""
    config, page_size = question.config, question.config.page_size
    # Tokens of a decoding request in the steps under way: two loops, or one step that verifies drafts.
    num_ahead = max(2 * loop_steps(config), 1 + config.max_drafts)
    most = -(-question.max_model_len // page_size)

    def num_pages(kind: PageKind) -> int:
        # The page of the last token, the tokens ahead, and one more, for tokens begin anywhere in a page.
        per_row = min(kind.num_kept(page_size) + 2 + -(-num_ahead // page_size), most)
        chunks = -(-max_batched_tokens(config) // page_size)
        return min(max_rows(config) * per_row + chunks, max_rows(config) * most)

    return tuple(map(num_pages, question.model.page_kinds[1:]))


def bytes_of_bounded(question: MemoryQuestion, cache: CacheConfig) -> int:
    """Returns the bytes of the pools of the bounded kinds of pages on each device."""
    counts = list(cache.num_bounded_pages)
    if question.model.is_recurrent:
        counts[question.model.state_kind - 1] += cache.num_draft_states
    return sum(count * question.page_bytes(cache, kind) for kind, count in enumerate(counts, 1))


def bytes_of_page(question: MemoryQuestion, cache: CacheConfig) -> int:
    """Returns the bytes of a page of the first kind on each device, the drafter's part included."""
    of_drafter = 0 if question.drafter is None else question.drafter.page_bytes(cache)
    return question.page_bytes(cache, 0) + of_drafter


def addressable_pages(question: MemoryQuestion, cache: CacheConfig, num_pages: int) -> int:
    """Returns the most pages, up to a number of them, whose pools the kernels of a GPU address rightly."""
    arrays = page_arrays(question.model, cache, question.platform, kind=0, mesh=question.placement.mesh)
    sizes = {array.size for array in arrays if array.dtype.itemsize == 1}
    while wrong := [size for size in sizes if size * num_pages in MISADDRESSED]:
        num_pages = (MISADDRESSED.start - 1) // max(wrong)
    return num_pages


def guess_memory(
    question: MemoryQuestion, cache: CacheConfig, buckets: Iterable[Bucket], limit_bytes: int | None
) -> MemoryPlan:
    """Returns the plan of each device before a step is compiled, with all pages of the cache, be there room or not."""
    return MemoryPlan(
        resident_bytes=question.resident_bytes,
        step_bytes=guess_step_bytes(question, buckets),
        page_bytes=bytes_of_page(question, cache),
        num_pages=cache.num_pages,
        bounded_bytes=bytes_of_bounded(question, cache),
        limit_bytes=limit_bytes,
        num_devices=question.placement.num_devices,
    )


def guess_step_bytes(question: MemoryQuestion, buckets: Iterable[Bucket]) -> int:
    """Returns an estimate of `step_bytes`: logits in float32, and for each token some states and hidden units.

    Devices of a mesh share the hidden units, and accelerators the logits. A copy of each row's states of recurrent
    layers counts too.
    """
    model, mesh, platform = question.model, question.placement.mesh, question.platform or default_layout()
    D, V = model.hidden_size, model.padded_vocab_size * model.has_logits
    num_shares = 1
    if mesh is not None:
        num_shares = mesh.shape.get(MLP_AXIS, 1)
        V //= 1 if platform == "cpu" else devices_per_stage(mesh)
    states = NUM_STATES.get(platform, NUM_STATES["tpu"])
    recurrent = question.page_bytes(question.page, model.state_kind) if model.is_recurrent else 0

    def hidden_units(bucket: Bucket) -> int:
        """Returns how many a device holds at once: of a part of the tokens in layers that stages share."""
        T = bucket.num_tokens
        part = T if bucket.is_verify else T // num_parts_of(T, num_stages(mesh))  # trees are not cut
        return max(
            layer.width // num_shares * (part if are_shared(group, mesh) else T)
            for group in model.groups
            for layer in group.layers
        )

    return max(
        4 * 9 * V * bucket.num_sampled
        + 4 * (3 * hidden_units(bucket) + bucket.num_tokens * states * D)
        + bucket.num_rows * recurrent
        for bucket in buckets
    )
