"""LLM inference in JAX: pure steps under jit, a paged KV cache, and a thin host around them."""

from jaxinfer.batch import Row, make_batch, make_sampling
from jaxinfer.cache import init_cache
from jaxinfer.checkpoint import load_checkpoint
from jaxinfer.config import CacheConfig, EngineConfig, ModelConfig, SamplingParams
from jaxinfer.engine.llm import LLM
from jaxinfer.engine.request import Completion, Delta
from jaxinfer.steps import decode_step, prefill_step



__all__ = [
    "LLM",
    "CacheConfig",
    "Completion",
    "Delta",
    "EngineConfig",
    "ModelConfig",
    "Row",
    "SamplingParams",
    "decode_step",
    "init_cache",
    "load_checkpoint",
    "make_batch",
    "make_sampling",
    "prefill_step",
]
