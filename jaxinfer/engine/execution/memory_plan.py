"""Plans pages and attention windows from the configurations of model and engine, before any weight is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from jaxinfer.config import NARROW_CACHE_DTYPES, CacheConfig, EngineConfig
from jaxinfer.device import CPU_CACHE_BYTES
from jaxinfer.engine.execution.engine_model import DeviceDrafter
from jaxinfer.engine.kv_cache.attention_window import AttentionWindow, endless_window, sliding_attention_window
from jaxinfer.engine.kv_cache.bounded_pages import BoundedKind
from jaxinfer.model.cache import page_arrays, page_bytes
from jaxinfer.model.components.experts import MLP_AXIS
from jaxinfer.model.config import ModelConfig, PageKind
from jaxinfer.parallel.placement import DEFAULT_DEVICE, Placement
from jaxinfer.plan.memory import MemoryPlan
from jaxinfer.plan.step_shapes import Bucket, loop_steps, max_batched_tokens, max_rows
from kernels_pallas.paged_attention.layout import default_layout
from kernels_pallas.triton import MISADDRESSED

# The part of a device's memory that stays free, for the gaps between arrays of different sizes.
SPARE = 0.02
# States of a token that a step holds at once in float32: by XLA for CPU's allocation, and by that of the steps of large
# models that are compiled for TPU v6e, which fuses more.
NUM_STATES = {"cpu": 16, "tpu": 4}


def plan_window(
    model_config: ModelConfig, config: EngineConfig, drafter: DeviceDrafter | None
) -> AttentionWindow | None:
    """Returns the window of pages that a request keeps; None if a request keeps the pages of all its tokens.

    Raises ValueError if num_sink_tokens asks for endless requests (StreamingLLM) that model, limits or drafter forbid.
    """
    page = CacheConfig(num_pages=1, page_size=config.page_size)
    has_own_keys = drafter is not None and drafter.page_bytes(page) > 0  # the drafter's keys, in the same pages
    if config.num_sink_tokens is not None:
        max_model_len = resolve_max_model_len(model_config, config)
        _check_sinks(config, model_config, max_model_len, has_own_keys)
        return endless_window(max_model_len, config.num_sink_tokens, config.page_size)
    is_windowed = model_config.page_kinds[0].window is not None
    if not is_windowed or has_own_keys:  # a drafter may read its keys from the first token on
        return None
    assert model_config.sliding_window is not None
    return sliding_attention_window(model_config.sliding_window, config.page_size, max_batched_tokens(config))


def _check_sinks(config: EngineConfig, model: ModelConfig, max_model_len: int, has_own_keys: bool) -> None:
    num_tokens, page_size = config.num_sink_tokens, config.page_size
    assert num_tokens is not None
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
    if config.cache_dtype is not None:
        raise ValueError(
            f"{name} turns the keys of these tokens again and again, and cache_dtype={config.cache_dtype!r} would round"
            " them each time; leave out one of the two in EngineConfig"
        )
    if has_own_keys:
        raise ValueError(
            f"{name} leaves no place for a draft model, whose keys lie in the same pages but are not turned; leave out"
            " EngineConfig.num_sink_tokens, or speculate by n-grams, suffixes or what was trained on the target"
        )


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
    dtype = dtype if config.cache_dtype is None else NARROW_CACHE_DTYPES[config.cache_dtype]
    return CacheConfig(num_pages=1, page_size=config.page_size, dtype=dtype)


def plan_cache(
    model_config: ModelConfig,
    config: EngineConfig,
    dtype: str,
    max_model_len: int,
    drafter: DeviceDrafter | None = None,
    placement: Placement = DEFAULT_DEVICE,
) -> CacheConfig:
    """Returns the largest useful number of pages: `num_pages` if set, else the pages of all rows at full length.

    Without `num_pages`, the pages stay within `cache_bytes`, or within CPU_CACHE_BYTES if neither the configuration nor
    the device sets a limit. Raises ValueError if `cache_bytes` is less than one page.
    """
    window = plan_window(model_config, config, drafter)
    num_bounded = tuple(kind.num_pages for kind in plan_further_kinds(model_config, config, max_model_len))
    page = replace(one_page(config, dtype), num_bounded_pages=num_bounded)
    num_pages = max_rows(config) * (-(-max_model_len // config.page_size) + (window.num_sinks if window else 0))
    if config.num_pages is not None:
        return replace(page, num_pages=config.num_pages)
    limit = config.cache_bytes
    if limit is None and config.memory_bytes is None and placement.free_bytes() is None:
        limit = CPU_CACHE_BYTES
    if limit is not None:
        bytes_per_page = bytes_of_page(model_config, page, drafter, placement)
        bounded_bytes = bytes_of_bounded(model_config, page, placement)
        num_pages = min(num_pages, (limit - bounded_bytes) // bytes_per_page)
        if num_pages < 1:
            further = f" beside {bounded_bytes} bytes for windows and states" if bounded_bytes else ""
            raise ValueError(
                f"cache_bytes={limit} is less than one page of {bytes_per_page} bytes{further}; raise"
                f" EngineConfig.cache_bytes or lower page_size{' or max_num_seqs' if bounded_bytes else ''}"
            )
    return replace(page, num_pages=num_pages)


def plan_further_kinds(model_config: ModelConfig, config: EngineConfig, max_model_len: int) -> tuple[BoundedKind, ...]:
    """Returns the further kinds of the model's pages, each with pages for `max_num_seqs` running requests."""
    page_size = config.page_size
    # Tokens of a decoding request in the steps under way: two loops, or one step that verifies drafts.
    num_ahead = max(2 * loop_steps(config), 1 + config.max_drafts)
    most = -(-max_model_len // page_size)

    def plan(kind: PageKind) -> BoundedKind:
        num_kept = 0 if kind.window is None else -(-(kind.window - 1) // page_size)
        # The page of the last token, the tokens ahead, and one more, for tokens begin anywhere in a page.
        per_row = min(num_kept + 2 + -(-num_ahead // page_size), most)
        chunks = -(-max_batched_tokens(config) // page_size)
        num_pages = min(max_rows(config) * per_row + chunks, max_rows(config) * most)
        return BoundedKind(num_kept, num_pages, kind.is_state)

    return tuple(map(plan, model_config.page_kinds[1:]))


def bytes_of_bounded(
    model_config: ModelConfig,
    cache_config: CacheConfig,
    placement: Placement = DEFAULT_DEVICE,
    layout: str | None = None,
) -> int:
    """Returns the bytes of the pools of the further kinds of pages on each device; `layout` as in `abstract_cache`."""
    size = partial(page_bytes, model_config, cache_config, layout, mesh=placement.mesh)
    counts = list(cache_config.num_bounded_pages)
    if model_config.is_recurrent:
        counts[model_config.state_kind - 1] += cache_config.num_draft_states
    return sum(count * size(kind=kind) for kind, count in enumerate(counts, 1))


def addressable_pages(
    model_config: ModelConfig,
    cache_config: CacheConfig,
    num_pages: int,
    placement: Placement = DEFAULT_DEVICE,
    layout: str | None = None,
) -> int:
    """Returns the most pages, up to a number of them, whose pools the kernels of a GPU address rightly.

    `layout`: as in `abstract_cache`.
    """
    arrays = page_arrays(model_config, cache_config, layout, kind=0, mesh=placement.mesh)
    sizes = {array.size for array in arrays if array.dtype.itemsize == 1}
    while wrong := [size for size in sizes if size * num_pages in MISADDRESSED]:
        num_pages = (MISADDRESSED.start - 1) // max(wrong)
    return num_pages


def bytes_of_page(
    model_config: ModelConfig,
    cache_config: CacheConfig,
    drafter: DeviceDrafter | None,
    placement: Placement = DEFAULT_DEVICE,
    layout: str | None = None,
) -> int:
    """Returns the bytes of a page of the first kind on each device, the drafter's part included.

    `layout`: as in `abstract_cache`.
    """
    of_drafter = 0 if drafter is None else drafter.page_bytes(cache_config)
    return page_bytes(model_config, cache_config, layout, kind=0, mesh=placement.mesh) + of_drafter


def guess_memory(
    model_config: ModelConfig,
    cache_config: CacheConfig,
    buckets: Iterable[Bucket],
    *,
    resident_bytes: int,
    limit_bytes: int | None,
    drafter: DeviceDrafter | None = None,
    placement: Placement = DEFAULT_DEVICE,
    layout: str | None = None,
) -> MemoryPlan:
    """Returns the plan of each device before a step is compiled, with all pages of the cache, be there room or not.

    `resident_bytes`: of parameters, on a device. `layout`: as in `abstract_cache`; None takes this platform's.
    """
    return MemoryPlan(
        resident_bytes=resident_bytes,
        step_bytes=guess_step_bytes(model_config, buckets, placement, layout or default_layout()),
        page_bytes=bytes_of_page(model_config, cache_config, drafter, placement, layout),
        num_pages=cache_config.num_pages,
        bounded_bytes=bytes_of_bounded(model_config, cache_config, placement, layout),
        limit_bytes=limit_bytes,
        num_devices=placement.num_devices,
    )


def guess_step_bytes(model_config: ModelConfig, buckets: Iterable[Bucket], placement: Placement, platform: str) -> int:
    """Returns an estimate of `step_bytes`: logits in float32, and for each token some states and hidden units.

    Devices of a mesh share the hidden units, and accelerators the logits. Copies of the states of recurrent layers are
    not in it.
    """
    D, V = model_config.hidden_size, model_config.padded_vocab_size * model_config.has_logits
    F = max(layer.width for layer, _ in model_config.stacks)
    if placement.mesh is not None:
        F //= placement.mesh.shape.get(MLP_AXIS, 1)
        V //= 1 if platform == "cpu" else placement.num_devices
    states = NUM_STATES.get(platform, NUM_STATES["tpu"])
    return max(4 * 9 * V * bucket.num_sampled + 4 * bucket.num_tokens * (3 * F + states * D) for bucket in buckets)


def plan_limit(config: EngineConfig, present_bytes: int, placement: Placement = DEFAULT_DEVICE) -> int | None:
    """Returns the limit in bytes for parameters, pages and steps together on each device; None for no limit.

    `present_bytes`: those parameters that are on the device already. Raises ValueError if `memory_bytes` is more than
    the device has.
    """
    free = placement.free_bytes()
    has = None if free is None else free + present_bytes
    if config.memory_bytes is None:
        return None if has is None else has - int(SPARE * has)
    if has is not None and config.memory_bytes > has:
        raise ValueError(
            f"memory_bytes={config.memory_bytes} is more than the {has} bytes that the device has; lower it or leave it"
            " out"
        )
    return config.memory_bytes
