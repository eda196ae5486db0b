"""The devices that an engine takes by itself: the fewest that hold the model, and its replicas."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from jaxinfer.checkpoint import Checkpoint
from jaxinfer.config import AUTO, EngineConfig, Parallelism
from jaxinfer.device import free_bytes
from jaxinfer.model.params import Params
from jaxinfer.parallel.placement import DEFAULT_DEVICE, Placement, name_idle_devices, possible_splits
from jaxinfer.plan.cache import MemoryQuestion, check_open_pages, model_of_engine
from jaxinfer.plan.limits import pages_of_row, plan_limit, plan_memory
from jaxinfer.plan.memory import num_bytes
from kernels_pallas.device import AMPERE, BLACKWELL, device_at_hand

logger = logging.getLogger(__name__)


def fewest_devices(checkpoint: Checkpoint, config: EngineConfig, dtype: str, *, speculates: bool) -> Parallelism | None:
    """Returns the split of a checkpoint over the fewest devices of this process that hold it; None is one device.

    They hold it if, beside parameters and steps, each has room for the pages of a request of TOKENS_PER_ROW tokens. If
    one device holds it, if none do, if devices report no limit, like CPUs, or if there are other processes, it is None.
    The devices that stay idle are logged unless replicas take them, and the reason if none hold it. A drafter does not
    count.
    """
    if jax.process_count() > 1 or jax.local_device_count() == 1 or free_bytes(jax.local_devices()) is None:
        return None
    find_refusal = functools.partial(_refusal, checkpoint, config, dtype, speculates=speculates)
    splits, refusal = [*possible_splits(checkpoint.config)], None
    for split in splits:
        refusal = find_refusal(split)
        if refusal is None:
            if config.parallelism is None:
                # The last ones have most devices; of one number the first has the fewest groups of experts.
                wider = sorted(splits[splits.index(split) :], key=lambda other: -other.devices_per_replica)
                best = next(other for other in wider if other == split or find_refusal(other) is None)
                name_idle_devices(split, best)
            return None if split == Parallelism() else split
    logger.warning("no split over the devices of this process holds the model; of %s: %s", splits[-1], refusal)
    return None


def refuse_exact(config: EngineConfig, dtype: str, placement: Placement) -> None:
    """Raises ValueError if `EngineConfig.exact` is wanted of a device, or beside an option, for which it is not built.

    What a model is made of refuses when its steps are traced, see `refuse_if_exact`.
    """
    device = device_at_hand()
    if not config.exact or device.platform == "cpu":
        return
    is_built = device.platform == "gpu" and AMPERE <= (device.capability or 0.0) < BLACKWELL
    plain, one = "leave out that or EngineConfig.exact", "give EngineConfig.parallelism one device"
    refused = {
        f"device {device.kind!r}": (not is_built, "use an NVIDIA GPU from Ampere to Hopper, or a CPU"),
        f"{placement.num_devices} devices": (placement.num_devices > 1, one),
        f"dtype={dtype}": (dtype == "float32", "use bfloat16 or float16"),
        f"cache_dtype={config.cache_dtype!r}": (
            config.cache_dtype in ("int4", "int2"),
            "use int8 or fp8, or leave it out",
        ),
        f"attention={config.attention!r}": (config.attention is not None, plain),
        f"max_adapters={config.max_adapters}": (config.max_adapters > 0, plain),
        f"draft_trees={config.draft_trees}": (config.draft_trees, plain),
    }
    for what, (is_refused, way_out) in refused.items():
        if is_refused:
            raise ValueError(f"exact=True is not built for {what}; {way_out}")


def chosen_parallelism(
    checkpoint: Checkpoint,
    config: EngineConfig,
    dtype: str,
    devices: Sequence[Any] | None,
    *,
    speculates: bool,
) -> Parallelism | None:
    """Returns the parallelism of an engine, with a number of replicas; None is one device.

    If the configuration has none, it is that of `fewest_devices`. `devices` are those that the user has given, None for
    all of this process. Raises ValueError if replicas="auto" cannot share given devices evenly.
    """
    given = config.parallelism
    if given is None:
        return fewest_devices(checkpoint, config, dtype, speculates=speculates) if devices is None else None
    if given.replicas != AUTO:
        return given
    split = given
    if devices is None and given.devices_per_replica == 1:
        split = fewest_devices(checkpoint, config, dtype, speculates=speculates) or Parallelism()
    each, num_devices = split.devices_per_replica, jax.local_device_count() if devices is None else len(devices)
    if num_left := num_devices % each:
        if devices is not None:
            raise ValueError(f"replicas={AUTO!r} of {each} devices each cannot share {num_devices}; give a multiple")
        logger.warning("%d of the %d devices stay idle: each replica has %d", num_left, num_devices, each)
    return replace(split, replicas=max(num_devices // each, 1), prefill=given.prefill)


def _refusal(
    checkpoint: Checkpoint, config: EngineConfig, dtype: str, split: Parallelism, *, speculates: bool
) -> str | None:
    """Returns why devices do not hold a model that is split so, with the fewest pages of an engine; None if they do."""
    try:
        placement = Placement.of(checkpoint.config, split)
        question, _ = memory_question(checkpoint, config, dtype, placement, speculates=speculates)
        question, cache, memory = plan_memory(question, plan_limit(question))
    except ValueError as error:
        return str(error)
    needed = min(pages_of_row(question), cache.num_pages) if config.num_pages is None else config.num_pages
    memory = replace(memory, num_pages=needed)
    return None if memory.num_fitting >= needed else f"its memory is short: {memory}"


def memory_question(
    checkpoint: Checkpoint,
    config: EngineConfig,
    dtype: str,
    placement: Placement = DEFAULT_DEVICE,
    *,
    speculates: bool = False,
) -> tuple[MemoryQuestion, Params]:
    """Returns the question of the memory that a checkpoint takes on devices, and its abstract parameters there."""
    params, model = checkpoint.abstract(dtype, quantization=config.quantization, mesh=placement.mesh)
    model = model_of_engine(model, config)
    params = placement.params(model, params)
    options: dict[str, Any] = {"param_bytes": num_bytes(params), "speculates": speculates, "placement": placement}
    question = MemoryQuestion(model=model, config=config, dtype=dtype, **options)
    check_open_pages(question)
    return question, params
