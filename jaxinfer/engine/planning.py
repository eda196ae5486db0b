"""What follows from a model and an engine's configuration before any weight is loaded."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from jaxinfer.cache import page_bytes
from jaxinfer.checkpoint import read_eos_token_ids
from jaxinfer.config import CacheConfig, EngineConfig, ModelConfig
from jaxinfer.device import CPU_CACHE_BYTES, free_bytes
from jaxinfer.engine.admission import Admission
from jaxinfer.engine.buckets import max_batched_tokens
from jaxinfer.engine.disk_tier import DiskTier
from jaxinfer.engine.host_tier import HostTier
from jaxinfer.engine.identity import page_identity
from jaxinfer.engine.metrics import Targets
from jaxinfer.engine.page_window import PageWindow, endless_window, page_window
from jaxinfer.engine.scheduler import Scheduler
from jaxinfer.engine.speculation import Speculation
from jaxinfer.engine.tiers import PageTiers, Tier
from jaxinfer.grammar import GrammarCompiler
from jaxinfer.tokenizer import Tokenizer


def plan_host(
    path: Path,
    model_config: ModelConfig,
    config: EngineConfig,
    dtype: str,
    tokenizer: Tokenizer | None,
    *,
    custom: tuple[str, ...] = (),
    speculation: Speculation | None = None,
    tiers: PageTiers | None = None,
    cache_config: CacheConfig | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Admission, Scheduler]:
    """Returns what decides which requests are taken and when they are computed; no weights are needed for it.

    `cache_config` is the cache that there is, None for the one that `plan_cache` allows.
    """
    max_model_len = resolve_max_model_len(model_config, config)
    cache_config = cache_config or plan_cache(model_config, config, dtype, max_model_len, speculation)
    window = plan_window(model_config, config, speculation)
    eos_token_ids = read_eos_token_ids(path)
    model = f"{path} {dtype} {model_config}"
    if config.disk_cache_path is not None:  # which outlasts this process, and perhaps what the path leads to
        model = repr(page_identity(path, model_config, cache_config, config, window))
    admission = Admission(
        model_config=model_config,
        engine_config=config,
        cache_config=cache_config,
        tokenizer=tokenizer,
        eos_token_ids=eos_token_ids,
        max_model_len=max_model_len,
        window=window,
        model=model,
        custom=custom,
        grammars=GrammarCompiler(tokenizer, model_config.vocab_size, eos_token_ids),
    )
    scheduler = Scheduler(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=max_batched_tokens(config),
        num_pages=cache_config.num_pages,
        page_size=cache_config.page_size,
        max_mixed_tokens=config.max_mixed_tokens,
        max_waiting=config.max_waiting,
        decode_loop_steps=config.decode_loop_steps,
        tiers=tiers,
        window=window,
        speculation=speculation,
        targets=plan_targets(config),
        clock=clock,
    )
    return admission, scheduler


def plan_window(model_config: ModelConfig, config: EngineConfig, speculation: Speculation | None) -> PageWindow | None:
    """Returns how many pages a request needs, None for those of all of its tokens.

    Raises ValueError where requests cannot be endless, though they are to be.
    """
    drafter = None if speculation is None else speculation.source.device_drafter
    one_page = CacheConfig(num_pages=1, page_size=config.page_size)
    has_own_keys = drafter is not None and drafter.page_bytes(one_page) > 0  # in the same pages
    if config.num_sink_tokens is not None:
        max_model_len = resolve_max_model_len(model_config, config)
        _check_sinks(config.num_sink_tokens, model_config, config.page_size, max_model_len, has_own_keys)
        return endless_window(max_model_len, config.num_sink_tokens, config.page_size)
    if model_config.sliding_window is None or has_own_keys:  # which it reads from the first when it likes
        return None
    return page_window(model_config.sliding_window, config.page_size, max_batched_tokens(config))


def _check_sinks(num_tokens: int, model: ModelConfig, page_size: int, max_model_len: int, has_own_keys: bool) -> None:
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
    if model.sliding_window is not None:
        raise ValueError(
            f"{name} is not for this model, whose own window of {model.sliding_window} tokens hides the first ones;"
            " leave EngineConfig.num_sink_tokens out"
        )
    if has_own_keys:
        raise ValueError(
            f"{name} leaves no place for a draft model, whose keys lie in the same pages but are not turned; leave out"
            " EngineConfig.num_sink_tokens, or speculate by n-grams, suffixes or what was trained on the target"
        )


def plan_targets(config: EngineConfig) -> Targets:
    """Returns what the goodput counts by."""
    ttft, tpot = (math.inf if target is None else target for target in (config.ttft_target, config.tpot_target))
    return Targets(ttft=ttft, tpot=tpot)


def resolve_max_model_len(model_config: ModelConfig, config: EngineConfig) -> int:
    """Returns the most tokens a request can have; ValueError where the engine asks for more than the model has."""
    if config.max_model_len is None:
        return model_config.max_position
    if config.max_model_len > model_config.max_position:
        raise ValueError(
            f"max_model_len={config.max_model_len} is more than the model's {model_config.max_position} positions;"
            " lower it or leave it out"
        )
    return config.max_model_len


def plan_cache(
    model_config: ModelConfig,
    config: EngineConfig,
    dtype: str,
    max_model_len: int,
    speculation: Speculation | None = None,
) -> CacheConfig:
    """Returns the most pages that are of use: `num_pages` if set, else what all rows at full length use.

    That is within `cache_bytes`, or within CPU_CACHE_BYTES where nothing sets a limit.
    """
    one_page = CacheConfig(num_pages=1, page_size=config.page_size, dtype=dtype)
    window = plan_window(model_config, config, speculation)
    if config.num_pages is not None:
        return replace(one_page, num_pages=config.num_pages)
    num_pages = config.max_num_seqs * (-(-max_model_len // config.page_size) + (window.num_sinks if window else 0))
    limit = config.cache_bytes
    if limit is None and config.memory_bytes is None and free_bytes() is None:
        limit = CPU_CACHE_BYTES
    if limit is not None:
        bytes_per_page = bytes_of_page(model_config, one_page, speculation)
        num_pages = min(num_pages, limit // bytes_per_page)
        if num_pages < 1:
            raise ValueError(
                f"cache_bytes={limit} is less than one page of {bytes_per_page} bytes; raise"
                " EngineConfig.cache_bytes or lower page_size"
            )
    return replace(one_page, num_pages=num_pages)


def bytes_of_page(model_config: ModelConfig, cache_config: CacheConfig, speculation: Speculation | None) -> int:
    """Returns what a page takes, a draft model's with it."""
    drafter = None if speculation is None else speculation.source.device_drafter
    return page_bytes(model_config, cache_config) + (0 if drafter is None else drafter.page_bytes(cache_config))


def plan_limit(config: EngineConfig, resident_bytes: int) -> int | None:
    """Returns what parameters, pages and steps may take together, the first of which are on the device already.

    None for no limit; ValueError for one that the device does not have.
    """
    free = free_bytes()
    has = None if free is None else free + resident_bytes
    if config.memory_bytes is not None and has is not None and config.memory_bytes > has:
        raise ValueError(
            f"memory_bytes={config.memory_bytes} is more than the {has} bytes that the device has; lower it or leave it"
            " out"
        )
    return has if config.memory_bytes is None else config.memory_bytes


def plan_tiers(config: EngineConfig, bytes_per_page: int) -> PageTiers | None:
    """Returns where pages go that the pool has no room for, None for nowhere; ValueError if that holds no page."""
    for name in ("host_cache_bytes", "disk_cache_bytes"):
        limit = getattr(config, name)
        if limit is not None and limit < bytes_per_page:
            raise ValueError(
                f"{name}={limit} is less than one page of {bytes_per_page} bytes; raise EngineConfig.{name} or leave it"
                " out"
            )
    tiers: list[Tier] = []
    if config.host_cache_bytes is not None:
        tiers.append(HostTier(config.host_cache_bytes, bytes_per_page))
    if config.disk_cache_path is not None and config.disk_cache_bytes is not None:
        tiers.append(DiskTier(Path(config.disk_cache_path).expanduser(), config.disk_cache_bytes))
    return PageTiers(tiers) if tiers else None
