"""LLM inference in JAX: pure steps under jit, a paged KV cache, and a thin host around them."""

import importlib
from typing import TYPE_CHECKING, Any

from jaxinfer._version import __version__
from jaxinfer.xla_options import set_xla_options

if TYPE_CHECKING:
    from jaxinfer.checkpoint import load_checkpoint
    from jaxinfer.config import CacheConfig, EngineConfig, SamplingParams
    from jaxinfer.engine.async_llm import AsyncLLM
    from jaxinfer.engine.drafters.drafters import Drafter
    from jaxinfer.engine.llm import LLM
    from jaxinfer.engine.request.completion import Completion
    from jaxinfer.engine.request.request import QueueFullError
    from jaxinfer.engine.scheduling.drafts import DraftTree
    from jaxinfer.model.batch import Row, make_batch
    from jaxinfer.model.cache import init_cache
    from jaxinfer.model.config import ModelConfig
    from jaxinfer.sampling.batch import make_sampling
    from jaxinfer.steps.log_probs import log_probs
    from jaxinfer.steps.steps import StepOptions, decode_step, prefill_step

set_xla_options()

# Loaded when first used, so that `jaxinfer --help` does not wait a second for jax.
_MODULES = {
    "LLM": "engine.llm",
    "AsyncLLM": "engine.async_llm",
    "CacheConfig": "config",
    "Completion": "engine.request.completion",
    "DraftTree": "engine.scheduling.drafts",
    "Drafter": "engine.drafters.drafters",
    "EngineConfig": "config",
    "ModelConfig": "model.config",
    "QueueFullError": "engine.request.request",
    "Row": "model.batch",
    "SamplingParams": "config",
    "StepOptions": "steps.steps",
    "decode_step": "steps.steps",
    "init_cache": "model.cache",
    "load_checkpoint": "checkpoint",
    "log_probs": "steps.log_probs",
    "make_batch": "model.batch",
    "make_sampling": "sampling.batch",
    "prefill_step": "steps.steps",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "CacheConfig",
    "Completion",
    "DraftTree",
    "Drafter",
    "EngineConfig",
    "ModelConfig",
    "QueueFullError",
    "Row",
    "SamplingParams",
    "StepOptions",
    "__version__",
    "decode_step",
    "init_cache",
    "load_checkpoint",
    "log_probs",
    "make_batch",
    "make_sampling",
    "prefill_step",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'jaxinfer' has no attribute {name!r}")
    return getattr(importlib.import_module(f"jaxinfer.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
