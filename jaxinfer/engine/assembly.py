"""Builds the parts of an engine from a checkpoint and a configuration."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxinfer._version import __version__
from jaxinfer.checkpoint import Checkpoint, read_sampling_defaults
from jaxinfer.checkpoint.adapters import read_adapter
from jaxinfer.config import CacheConfig, EngineConfig, SamplingParams
from jaxinfer.device import idle_accelerators
from jaxinfer.display.progress import write_line
from jaxinfer.engine.device_choice import chosen_parallelism, memory_question, refuse_exact
from jaxinfer.engine.drafters.drafters import DRAFTERS, Drafter, NgramDrafter
from jaxinfer.engine.execution.compiled_steps import COMPILING
from jaxinfer.engine.execution.engine_model import DeviceDrafter, EngineModel
from jaxinfer.engine.execution.runner import Runner
from jaxinfer.engine.execution.warm_up import WarmUp, plan_target
from jaxinfer.engine.frontend.adapters import AdapterSlots
from jaxinfer.engine.frontend.admission import Admission
from jaxinfer.engine.frontend.page_identity import TEXT_FILES, page_identity
from jaxinfer.engine.kv_cache.attention_window import AttentionWindow, endless_window, sliding_attention_window
from jaxinfer.engine.kv_cache.disk_tier import DiskTier
from jaxinfer.engine.kv_cache.page_pool import BoundedKind
from jaxinfer.engine.kv_cache.tiers import HostTier, PageTiers, Tier
from jaxinfer.engine.page_mover import DevicePageMover
from jaxinfer.engine.scheduling.metrics import Targets
from jaxinfer.engine.scheduling.replica import ReadySteps
from jaxinfer.engine.scheduling.scheduler import Scheduler
from jaxinfer.engine.speculation.load import load_target, plan_speculation
from jaxinfer.engine.speculation.speculation import Speculation
from jaxinfer.model.cache import page_bytes
from jaxinfer.model.config import ModelConfig
from jaxinfer.model.params import Params
from jaxinfer.parallel.hosts import Hosts
from jaxinfer.parallel.placement import DEFAULT_DEVICE, Placement, copied, identity_of
from jaxinfer.plan.cache import MemoryQuestion, check_open_pages, model_of_engine, plan_cache
from jaxinfer.plan.limits import MAX_LOOP_SECONDS, describe_limits, fit_limits, plan_limit
from jaxinfer.plan.memory import num_bytes
from jaxinfer.plan.step_shapes import loop_steps, max_batched_tokens, max_mixed_tokens, max_rows
from jaxinfer.sampling.processors import LogitsProcessor
from jaxinfer.sampling_params import Form
from jaxinfer.text.grammar import GrammarCompiler
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.validation import shown
from jaxinfer.xla_options import FUSED_PRODUCTS
from kernels_pallas.row_products import fuses_products

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineParts:
    """The parts of an `LLM`. The steps that can compute any request are compiled; others are when they are wanted."""

    engine_config: EngineConfig  # with a number for each limit that was left to the device
    model_config: ModelConfig
    tokenizer: Tokenizer | None
    admission: Admission
    scheduler: Scheduler
    warm_ups: tuple[WarmUp, ...]  # of each replica
    runners: tuple[Runner, ...]  # of each replica
    speculation: Speculation | None


def build_engine(
    checkpoint: Checkpoint,
    config: EngineConfig,
    dtype: str,
    *,
    custom: Mapping[str, LogitsProcessor],
    speculation: str | Path | Drafter | None,
    devices: Sequence[Any] | None = None,
    on_failure: Callable[[BaseException], None],
    show_progress: bool,
) -> EngineParts:
    """Loads the weights, compiles the steps and connects the parts.

    If a step fails on the device, the runner calls `on_failure` with the exception. Raises ValueError for an unusable
    checkpoint or unusable limits.
    """
    if jax.default_backend() == "cpu" and dtype == "float32" and fuses_products():
        logger.warning(FUSED_PRODUCTS)
    for line in idle_accelerators():
        logger.warning(line)
    speculates = speculation is not None
    config = replace(config, parallelism=chosen_parallelism(checkpoint, config, dtype, devices, speculates=speculates))
    placements = Placement.of_replicas(checkpoint.config, config.parallelism, devices)
    refuse_exact(config, dtype, placements[0])
    if len(placements) > 1 and speculation is not None:
        raise ValueError(
            f"speculation={shown(speculation)} drafts for one replica, and EngineConfig.parallelism has"
            f" replicas={len(placements)}; leave out one of the two"
        )
    options = {"custom": custom, "speculation": speculation, "show_progress": show_progress}
    connect = partial(_connect_parts, checkpoint, config, dtype, placements, **options)
    if not placements[0].spans_processes:
        return connect(on_failure=on_failure, hosts=None)
    refuse_over_processes(config, speculation)
    hosts = Hosts.join()
    with hosts.failing_together():
        hosts.agree(given_facts(checkpoint, config, dtype, custom, speculation, placements[0]))
        return connect(on_failure=hosts.also_failing(on_failure), hosts=hosts)


def _connect_parts(
    checkpoint: Checkpoint,
    config: EngineConfig,
    dtype: str,
    placements: Sequence[Placement],
    *,
    custom: Mapping[str, LogitsProcessor],
    speculation: str | Path | Drafter | None,
    on_failure: Callable[[BaseException], None],
    hosts: Hosts | None,
    show_progress: bool,
) -> EngineParts:
    """Returns the parts of an engine on these placements; in a process that follows another one it does not return."""
    placement = placements[0]
    max_loop_seconds = MAX_LOOP_SECONDS if config.decode_loop_steps is None else math.inf
    question, abstract = memory_question(checkpoint, config, dtype, placement, speculates=speculation is not None)
    model_config, config = question.model, fit_limits(question)
    question = replace(question, config=config)
    limits = describe_limits(config, placement)
    logger.info(limits)
    if show_progress:
        write_line(limits)
    defaults = _sampling_defaults(checkpoint, question)
    planned = plan_speculation(speculation, config, dtype, target=checkpoint)
    check_open_pages(replace(question, drafter=None if planned is None else planned.device_drafter))
    if planned is None:
        checkpoint.plan(model_config)  # else an error would come after seconds of compilation
        models = [
            plan_target(one.params(model_config, abstract), replace(question, placement=one), custom)
            for one in placements
        ]
        params, warm_ups = load_and_compile(checkpoint, models, dtype, defaults.form, show_progress=show_progress)
    else:  # a drafter may compute with the parameters while it is prepared
        loading = {"mesh": placement.mesh, "show_progress": show_progress}
        target, model_config = load_target(checkpoint, config, dtype, planned, **loading)
        model_config = model_of_engine(model_config, config)
        of_target = {"model": model_config, "param_bytes": num_bytes(target), "drafter": planned.device_drafter}
        question = replace(question, **of_target)
        model, limit = plan_target(target, question, custom), plan_limit(question, question.loaded_bytes)
        params = [model.params]
        warm_ups = [WarmUp(model, planned, limit_bytes=limit, show_progress=show_progress)]
    tokenizer = Tokenizer.from_path(checkpoint.path)
    # The smallest pool: devices may have less free memory than others. On the host a page has each KV head once.
    cache_config = min((warm_up.cache_config for warm_up in warm_ups), key=lambda cache: cache.num_pages)
    tiers = plan_tiers(config, page_bytes(model_config.for_devices(1), cache_config))
    admission, scheduler = plan_host(
        checkpoint,
        question,
        tokenizer,
        custom=tuple(custom),
        speculation=planned,
        tiers=tiers,
        cache_config=cache_config,
        placements=placements,
        max_loop_seconds=max_loop_seconds,
        defaults=defaults,
        steps=[warm_up.steps for warm_up in warm_ups],
    )
    runners = [Runner(own, warm_up, tiers, on_failure, hosts) for own, warm_up in zip(params, warm_ups, strict=True)]
    checkpoint.forget()  # headers of a large model take hundreds of MB; an adapter reads them again
    if hosts is not None:
        hosts.agree({"model": repr(model_config), "EngineConfig, with the limits of the devices": repr(config)})
        if hosts.index > 0:
            own = warm_ups[0].model.adapter_options
            runners[0].follow(partial(read_adapter, checkpoint=checkpoint, config=model_config, **own))
            hosts.wait_for_end()
            raise SystemExit(0)
    if config.num_prefill_replicas:
        scheduler.mover = DevicePageMover(runners, [warm_up.copiers for warm_up in warm_ups])
    if planned is not None:  # speculation measures the time of every step, so every step must be compiled
        (warm_up,), (runner,), (replica,) = warm_ups, runners, scheduler.replicas
        warm_up.steps.wait(show_progress=show_progress)
        planned.attach(partial(runner.lend_cache, replica.tables.copies))
        planned.rehearse(runner, warm_up.cache_config)
    return EngineParts(config, model_config, tokenizer, admission, scheduler, tuple(warm_ups), tuple(runners), planned)


def refuse_over_processes(config: EngineConfig, speculation: Any) -> None:
    """Raises ValueError for options of an engine that need all devices in one process."""
    refused = {
        "host_cache_bytes": (config.host_cache_bytes, "no process has whole pages"),
        "disk_cache_path": (config.disk_cache_path, "no process has whole pages"),
    }
    for name, (value, reason) in refused.items():
        if value is not None:
            raise ValueError(
                f"EngineConfig.{name}={shown(value)} is not for an engine over several processes: {reason}; leave it"
                " out, or take no more devices than one process has"
            )
    makes_drafts_on_device = isinstance(speculation, str | Path) and speculation not in DRAFTERS
    if makes_drafts_on_device or isinstance(speculation, DeviceDrafter):
        raise ValueError(
            f"speculation={shown(speculation)} drafts on the devices of one process, and this engine has those of"
            f" several; use one of {', '.join(DRAFTERS)}, which draft on the host, or leave it out"
        )


def given_facts(
    checkpoint: Checkpoint,
    config: EngineConfig,
    dtype: str,
    custom: Iterable[str],
    speculation: str | Path | Drafter | None,
    placement: Placement,
) -> dict[str, str]:
    """Returns the given properties that all processes of an engine must share, by name."""
    drafter = str(speculation) if isinstance(speculation, str | Path) else type(speculation).__name__
    return {
        "version of jaxinfer or JAX": f"{__version__}, {jax.__version__}",
        "checkpoint (names and sizes of files)": repr(checkpoint.file_sizes(TEXT_FILES)),
        "EngineConfig": repr(config),
        "dtype": dtype,
        "logits_processors or speculation": f"{sorted(custom)}, {drafter}",
        "mesh": placement.identity(),
    }


def load_and_compile(
    checkpoint: Checkpoint, models: Sequence[EngineModel], dtype: str, form: Form, *, show_progress: bool
) -> tuple[list[Params], list[WarmUp]]:
    """Loads the weights while the first steps of each replica compile, which depend on their shapes alone.

    Reads the checkpoint once; each replica but the first gets its parameters from the first one's devices. `form`: that
    in which most requests will draw.
    """
    config, (first, *others) = models[0].engine_config, models
    limits = [plan_limit(model.question()) for model in models]
    pool = ThreadPoolExecutor(len(models), thread_name_prefix=COMPILING)
    try:
        warm_ups = [
            pool.submit(
                *(WarmUp, model, None),
                limit_bytes=limit,
                show_progress=show_progress and model is first,
                expected_form=form,
            )
            for model, limit in zip(models, limits, strict=True)
        ]
        loading = {"quantization": config.quantization, "mesh": first.placement.mesh, "show_progress": show_progress}
        params, _ = checkpoint.load(dtype, **loading)
        copies = [copied(params, model.params) for model in others]
        return [params, *copies], [future.result() for future in warm_ups]
    finally:
        pool.shutdown(wait=False)


def plan_host(
    checkpoint: Checkpoint,
    question: MemoryQuestion,
    tokenizer: Tokenizer | None,
    *,
    custom: tuple[str, ...] = (),
    speculation: Speculation | None = None,
    tiers: PageTiers | None = None,
    cache_config: CacheConfig | None = None,
    placements: Sequence[Placement] = (DEFAULT_DEVICE,),
    max_loop_seconds: float = math.inf,
    defaults: SamplingParams | None = None,
    steps: Sequence[ReadySteps] = (),
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Admission, Scheduler]:
    """Returns the parts that need no weights; the simulation uses only these.

    `cache_config` describes the page pool; None takes the result of `plan_cache`. `defaults` are the parameters of
    requests that give none; None reads those that the checkpoint states.
    """
    model_config, config, dtype = question.model, question.config, question.dtype
    cache_config = cache_config or plan_cache(question)
    window = plan_window(question)
    bounded = zip(model_config.page_kinds[1:], cache_config.num_bounded_pages, strict=True)
    model = f"{checkpoint.path} {dtype} {model_config}"
    if config.disk_cache_path is not None:  # the disk cache outlasts this process; its files may change
        devices = identity_of(placements)
        model = repr(page_identity(checkpoint, dtype, model_config, cache_config, config, window, devices=devices))
    defaults = _sampling_defaults(checkpoint, question) if defaults is None else defaults
    end_tokens = _end_tokens(checkpoint, tokenizer, model_config.vocab_size)
    admission = Admission(
        dtype=dtype,
        model_config=model_config,
        engine_config=config,
        cache_config=cache_config,
        tokenizer=tokenizer,
        eos_token_ids=end_tokens,
        default_sampling_params=defaults if tokenizer is None else _with_special_stops(defaults, tokenizer),
        max_model_len=question.max_model_len,
        window=window,
        model=model,
        custom=custom,
        adapters=AdapterSlots(config.max_adapters),
        devices=identity_of(placements),
        takes_predictions=speculation is not None and isinstance(speculation.proposer.drafter, NgramDrafter),
        grammars=GrammarCompiler(tokenizer, model_config.vocab_size, end_tokens),
    )
    scheduler = Scheduler(
        max_num_seqs=max_rows(config),
        max_num_batched_tokens=max_batched_tokens(config),
        num_pages=cache_config.num_pages,
        page_size=cache_config.page_size,
        num_replicas=len(placements),
        num_prefill_replicas=config.num_prefill_replicas,
        max_mixed_tokens=max_mixed_tokens(config),
        max_waiting=config.max_waiting,
        decode_loop_steps=loop_steps(config),
        max_loop_seconds=max_loop_seconds,
        tiers=tiers,
        window=window,
        bounded=tuple(
            BoundedKind(kind.num_kept(config.page_size), num_pages, kind.is_state, kind.num_exact is not None)
            for kind, num_pages in bounded
        ),
        speculation=speculation,
        steps=steps,
        targets=plan_targets(config),
        clock=clock,
    )
    return admission, scheduler


def _sampling_defaults(checkpoint: Checkpoint, question: MemoryQuestion) -> SamplingParams:
    """Returns the sampling that a checkpoint states, within the limits of its engine; may log a warning."""
    bounds = {"vocab_size": question.model.vocab_size, "max_listed_tokens": question.config.max_listed_tokens}
    return read_sampling_defaults(checkpoint, **bounds)


def plan_window(question: MemoryQuestion) -> AttentionWindow | None:
    """Returns the window of pages that a request keeps; None if a request keeps the pages of all its tokens."""
    config, window = question.config, question.model.page_kinds[0].window
    if config.num_sink_tokens is not None:
        return endless_window(question.max_model_len, config.num_sink_tokens, config.page_size)
    if window is None or question.has_keys_of_drafter:
        return None
    return sliding_attention_window(window, config.page_size, max_batched_tokens(config))


def _end_tokens(checkpoint: Checkpoint, tokenizer: Tokenizer | None, vocab_size: int) -> tuple[int, ...]:
    """Returns the tokens that end a text: those that the checkpoint states, and the tokenizer's own.

    Fine-tunes teach the model another one, and may state it among the tokenizer's files alone.
    """
    own = None if tokenizer is None else tokenizer.eos_token_id
    stated = checkpoint.eos_token_ids
    return stated if own is None or own in stated or own >= vocab_size else (*stated, own)


def _with_special_stops(sampling: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """Returns parameters that end a request at special tokens among the stop strings too: no text shows these."""
    token_ids = map(tokenizer.token_to_id, sampling.stop)
    special = [token_id for token_id in token_ids if token_id is not None and not tokenizer.has_text(token_id)]
    return replace(sampling, stop_token_ids=special) if special else sampling


def plan_targets(config: EngineConfig) -> Targets:
    """Returns the latency targets that a request must meet to count as goodput."""
    ttft, tpot = (math.inf if target is None else target for target in (config.ttft_target, config.tpot_target))
    return Targets(ttft=ttft, tpot=tpot)


def plan_tiers(config: EngineConfig, bytes_per_page: int) -> PageTiers | None:
    """Returns the tiers for pages that the pool evicts, None without tiers; ValueError if a tier is below one page."""
    for name in ("host_cache_bytes", "disk_cache_bytes"):
        limit = getattr(config, name)
        if limit is not None and limit < bytes_per_page:
            raise ValueError(
                f"{name}={limit} is less than one page of {bytes_per_page} bytes; raise EngineConfig.{name} or leave it"
                " out"
            )
    tiers: list[Tier] = []
    if config.host_cache_bytes is not None:
        tiers.append(HostTier(config.host_cache_bytes))
    if config.disk_cache_path is not None and config.disk_cache_bytes is not None:
        tiers.append(DiskTier(Path(config.disk_cache_path).expanduser(), config.disk_cache_bytes))
    return PageTiers(tiers) if tiers else None
