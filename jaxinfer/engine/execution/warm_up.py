"""Compiles steps from parameters, and sets the number of pages by the memory that the steps leave."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.config import CacheConfig, EngineConfig
from jaxinfer.engine.execution.compiled_steps import CompiledSteps, enough_buckets
from jaxinfer.engine.execution.engine_model import EngineModel, PreparesDrafts, abstract
from jaxinfer.engine.execution.page_copier import PageCopier
from jaxinfer.engine.execution.step_compiler import StepCompiler
from jaxinfer.model.cache import abstract_cache
from jaxinfer.model.params import Params
from jaxinfer.plan.cache import MemoryQuestion, addressable_pages, guess_memory, plan_cache
from jaxinfer.plan.memory import MemoryPlan, fit_pages, usable_pages
from jaxinfer.plan.step_shapes import Bucket, plan_buckets
from jaxinfer.sampling.processors import LogitsProcessor
from jaxinfer.validation import shown
from kernels_pallas.paged_attention.api import default_implementation

logger = logging.getLogger(__name__)

# Pages per copy, without tiers and with them: one page if it is evicted while others decode, or many pages.
COPY_WIDTHS = ((1,), (1, 8))
HAND_OVER_WIDTHS = (1, 4, 16)  # pages per bundle of a hand-over


@dataclass(frozen=True, kw_only=True)
class Ready:
    """The state of compilation."""

    num_executables: int  # compiled or loaded from disk so far
    seconds: float  # spent on them, summed over all threads
    memory: MemoryPlan
    replicas: tuple[MemoryPlan, ...] = ()  # the plans of all replicas, of which `memory` is the first; () for one

    @classmethod
    def of_all(cls, states: Sequence[Ready]) -> Ready:
        """Returns the state of all replicas together."""
        if len(states) == 1:
            return states[0]
        return cls(
            num_executables=sum(state.num_executables for state in states),
            seconds=sum(state.seconds for state in states),
            memory=states[0].memory,
            replicas=tuple(state.memory for state in states),
        )

    def __str__(self) -> str:
        plans = [f"replica {index}: {plan}" for index, plan in enumerate(self.replicas)] or [str(self.memory)]
        return "; ".join([self.compiled, *plans])

    def _repr_html_(self) -> str:
        plans = self.replicas or (self.memory,)
        return f"<div>{self.compiled}</div>{''.join(plan._repr_html_() for plan in plans)}"

    @property
    def compiled(self) -> str:
        """The number of executables and their seconds, for people."""
        return f"{self.num_executables} executables ready in {self.seconds:.1f} s"


def plan_target(params: Params, question: MemoryQuestion, custom: Mapping[str, LogitsProcessor]) -> EngineModel:
    """Returns the model and its engine's limits, with the largest useful number of pages.

    Raises ValueError if a logits processor of `custom` cannot be a part of a step, or if it needs logits that the model
    does not have.
    """
    model, config = question.model, question.config
    if not model.has_logits:
        _refuse_logits(config, custom)
    _require_traceable(custom, model.vocab_size, question.max_model_len)
    cache_config = plan_cache(question)
    if model.is_recurrent and question.speculates:
        num_ends = max(bucket.num_sampled for bucket in plan_buckets(config, config.max_drafts) if bucket.is_verify)
        cache_config = replace(cache_config, num_draft_states=num_ends)
    return EngineModel(
        params=params,
        model_config=model,
        engine_config=config,
        cache_config=cache_config,
        table_width=-(-question.max_model_len // config.page_size),
        custom=custom,
        placement=question.placement,
    )


def _refuse_logits(config: EngineConfig, custom: Mapping[str, LogitsProcessor]) -> None:
    """Raises ValueError for what needs the logits that an embedding model does not have."""
    given = {"logits_processors": list(custom), "EngineConfig.max_prompt_log_probs": config.max_prompt_log_probs}
    for name, value in given.items():
        if value not in ([], None):
            raise ValueError(
                f"{name}={shown(value)} needs logits, and this checkpoint is an embedding model without an unembedding"
                " (lm_head); leave it out, or load the checkpoint of a language model"
            )


def _require_traceable(custom: Mapping[str, LogitsProcessor], vocab_size: int, num_tokens: int) -> None:
    """Raises ValueError, naming the processor, if one cannot be traced or does not return f32[V]."""
    shapes = {"logits": (vocab_size,), "tokens": (num_tokens,), "length": (), "argument": ()}
    dtypes = {"tokens": np.int32, "length": np.int32}
    arguments = [jax.ShapeDtypeStruct(shape, dtypes.get(name, np.float32)) for name, shape in shapes.items()]
    for name, processor in custom.items():
        try:
            result: Any = jax.eval_shape(processor, *arguments)
        except Exception as error:
            raise ValueError(
                f"logits_processors[{shown(name)}] raised {type(error).__name__} when JAX traced it with"
                f" logits f32[{vocab_size}], tokens i32[{num_tokens}], length i32[] and argument f32[]; length and"
                " argument have no values then, so use jnp.where instead of slices and branches"
            ) from error
        shape, dtype = getattr(result, "shape", None), getattr(result, "dtype", np.bool_)
        if shape != (vocab_size,) or not jnp.issubdtype(dtype, np.floating):
            raise ValueError(
                f"logits_processors[{shown(name)}] returned {shown(result)}; return the logits, f32[{vocab_size}]"
            )


class WarmUp:
    """Compiles the shape that holds any step, and fits the number of pages. Others are compiled when steps want them.

    The pages are at most those of the target's cache. With a memory limit, the largest shape of each kind compiles
    first, to measure the memory that steps need. Raises ValueError if the device, or EngineConfig.memory_bytes, has no
    room for a page.
    """

    def __init__(
        self,
        target: EngineModel,
        speculation: PreparesDrafts | None,
        *,
        limit_bytes: int | None,
        show_progress: bool,
    ) -> None:
        """`limit_bytes`: what `plan_limit` returns."""
        self._show_progress = show_progress
        self.model, self._speculation = target, speculation
        max_drafts = 0 if speculation is None else target.engine_config.max_drafts
        self._drafter = drafter = None if speculation is None else speculation.device_drafter
        kept_layers = () if drafter is None else drafter.kept_layers
        compiled = replace(target, params=abstract(target.params))
        self.compiler = compiler = StepCompiler(compiled, max_drafts, kept_layers)
        question = target.question(drafter)
        guess = guess_memory(question, target.cache_config, compiler.buckets, limit_bytes)
        self._waits_for = enough_buckets(compiler.buckets) if guess.limit_bytes is None else compiler.largest
        is_fixed = target.engine_config.num_pages is not None
        (known, self.copiers), self._memory = fit_pages(
            self._compile_for, guess, is_fixed=is_fixed, allowed=self._addressable
        )
        fitting = usable_pages(self._memory, guess.num_pages)
        if not is_fixed and (addressable := self._addressable(fitting)) < fitting:
            logger.warning(
                "%d of the %d pages that fit are used: in 4 or 8 bits, GPU kernels read no keys between 2 and 4 GiB",
                *(addressable, fitting),
            )
        self.cache_config = self._cache_config(self._memory.num_pages)
        self.steps = CompiledSteps(compiler.buckets, partial(compiler.compile, self.cache_config), known)
        self.steps.wait_for_enough(show_progress=show_progress)
        self.model = replace(target, params=abstract(target.params))  # the runner owns the parameters

    def ready(self) -> Ready:
        """Returns the executables compiled so far, their seconds and the memory plan."""
        executables, drafting = len(self.steps.compiled) + sum(copier.num_executables for copier in self.copiers), 0
        if self._drafter is not None:
            executables, drafting = executables + self._drafter.num_executables, self._drafter.step_bytes
        needed = max(self.compiler.step_bytes(self.steps.compiled) + _copier_bytes(self.copiers), drafting)
        return Ready(
            num_executables=executables,
            seconds=sum(self.compiler.seconds.values()),
            memory=replace(self._memory, step_bytes=needed),
        )

    def _addressable(self, num_pages: int) -> int:
        """Returns the most pages, up to a number of them, that the attention of this device can use."""
        target = self.model
        if default_implementation() != "gpu" or target.engine_config.attention is not None:
            return num_pages
        return addressable_pages(target.question(), target.cache_config, num_pages)

    def _compile_for(self, num_pages: int) -> tuple[tuple[Mapping[Bucket, jax.stages.Compiled], list[PageCopier]], int]:
        cache_config = self._cache_config(num_pages)
        cache = abstract_cache(self.compiler.model_config, cache_config)
        with ThreadPoolExecutor(1) as pool:
            num_sinks = (self.model.engine_config.num_sink_tokens or 0) // cache_config.page_size
            model_config = self.compiler.model_config
            sinks = [num_sinks, *[0] * (len(model_config.page_kinds) - 1)]
            hands_over = self.model.engine_config.num_prefill_replicas > 0
            options = {"hand_over_widths": HAND_OVER_WIDTHS} if hands_over else {}
            make = partial(
                PageCopier, cache, model_config, self._copy_widths, placement=self.model.placement, **options
            )
            copiers = pool.map(make, sinks, count())
            steps = CompiledSteps(self._waits_for, partial(self.compiler.compile, cache_config))
            steps.wait(show_progress=self._show_progress)
        copiers = list(copiers)
        needed = self.compiler.step_bytes(steps.compiled) + _copier_bytes(copiers)
        if self._speculation is not None:
            self._speculation.prepare(replace(self.model, cache_config=cache_config))
        # No step runs while drafts are made, so the larger of the two needs counts.
        needed = max(needed, 0 if self._drafter is None else self._drafter.step_bytes)
        return (steps.compiled, copiers), needed

    @property
    def _copy_widths(self) -> tuple[int, ...]:
        return COPY_WIDTHS[self.model.engine_config.has_tiers]

    def _cache_config(self, num_pages: int) -> CacheConfig:
        return replace(self.model.cache_config, num_pages=num_pages)


def _copier_bytes(copiers: Sequence[PageCopier]) -> int:
    return max(copier.step_bytes for copier in copiers)
