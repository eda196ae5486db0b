"""Kernels and engines of other projects, where they are installed, and their published figures."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Lens = list[tuple[int, int]]


class Published(NamedTuple):
    """A figure that another project has published."""

    job: str
    engine: str
    device: str
    figure: str
    source: str


# What to hold the lines of whole models against if no peer is installed.
PUBLISHED = (
    Published(
        "Qwen3-0.6B, 500 prompts of 512 tokens and 128 of output, all at once",
        "vLLM 0.19",
        "H100 80 GB",
        "94.9 requests/s",
        "https://github.com/ovg-project/kvcached/pull/331",
    ),
    Published(
        "Qwen3-0.6B, the same prompts, 16 requests/s",
        "vLLM 0.19",
        "H100 80 GB",
        "2.39 ms per token",
        "https://github.com/ovg-project/kvcached/pull/331",
    ),
    Published(
        "Llama 3.1 8B, one request of 1,024 tokens and 128 of output",
        "vLLM 0.23",
        "A100 40 GB",
        "75 tokens/s",
        "https://johnmusgrave.com/p/vllm-throughput-latency-sweep-on",
    ),
)


def of_attention(family: str, lens: Lens) -> Mapping[str, Mapping[str, Callable[..., Any]]]:
    """Returns by platform and name the peers that can compute a call; each makes its calls of lens, N, K and H."""
    new, kv_len = lens[0]
    if family == "decode" and len(set(lens)) == 1:
        return {"gpu": {"jax": jax_gpu_decode, "cudnn, no pages": cudnn_decode}, "tpu": {"jax": jax_tpu_decode}}
    # cuDNN aligns its causal mask to the first key, so it can compute whole prompts alone.
    return {"gpu": {"cudnn, no pages": cudnn_prefill}} if family == "prefill" and new == kv_len else {}


def _pages(lens: Lens, K: int, H: int, page_size: int = 64) -> tuple[jax.Array, ...]:
    B, width = len(lens), -(-lens[0][1] // page_size)
    tables = jnp.asarray(np.random.default_rng(0).permutation(B * width).reshape(B, width), jnp.int32)
    # Two arrays: a cache would answer half of the reads of one.
    k, v = (jnp.full((K, B * width, page_size, H), x, jnp.bfloat16) for x in (1, 2))
    return k, v, tables, jnp.asarray([n for _, n in lens], jnp.int32)


def jax_gpu_decode(lens: Lens, N: int, K: int, H: int) -> tuple[Callable, list]:
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention as attend

    k, v, tables, kv_lens = _pages(lens, K, H)
    splits = next(n for n in (16, 8, 4, 2, 1) if tables.shape[1] % n == 0)
    # More than 256 keys do not fit the shared memory of an H200.
    blocks = min(256 // k.shape[2], tables.shape[1] // splits)
    attend = functools.partial(attend, k_splits=splits, pages_per_compute_block=blocks)
    return attend, [(jnp.ones((len(lens), N, H), jnp.bfloat16), k, v, tables, kv_lens)]


def jax_tpu_decode(lens: Lens, N: int, K: int, H: int) -> tuple[Callable, list]:
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention as attend

    k, v, tables, kv_lens = _pages(lens, K, H)
    attend = functools.partial(attend, pages_per_compute_block=min(8, tables.shape[1]))
    return attend, [(jnp.ones((len(lens), N, H), jnp.bfloat16), k, v, kv_lens, tables)]


def cudnn_decode(lens: Lens, N: int, K: int, H: int) -> tuple[Callable, list]:
    B, context = len(lens), lens[0][1]
    k, v = (jnp.full((B, context, K, H), x, jnp.bfloat16) for x in (1, 2))
    attend = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    return attend, [(jnp.ones((B, 1, N, H), jnp.bfloat16), k, v)]


def cudnn_prefill(lens: Lens, N: int, K: int, H: int) -> tuple[Callable, list]:
    q, k, v = (jnp.ones((1, lens[0][0], heads, H), jnp.bfloat16) for heads in (N, K, K))
    return functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn"), [(q, k, v)]
