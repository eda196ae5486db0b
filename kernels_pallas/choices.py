"""The kernels that the device at hand gets, found by tracing calls, which need neither weights nor compilation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax

from kernels_pallas.device import AMPERE, device_at_hand
from kernels_pallas.latent_attention import latent_attention
from kernels_pallas.latent_attention.layout import abstract_latents
from kernels_pallas.paged_attention import AttentionCall, abstract_pages, paged_attention
from kernels_pallas.paged_attention.layout import LAYOUTS
from kernels_pallas.paged_attention.tpu.block_sizes import chip_at_hand
from kernels_pallas.paged_attention.tuned_tables import table_name, tuned_table

# Rows of the traced calls: those of a decode step.
ROWS = 8
ROWS_OF_ONE_TOKEN = AttentionCall(
    block_tables=jax.ShapeDtypeStruct((ROWS, 1), "int32"),
    kv_lens=jax.ShapeDtypeStruct((ROWS,), "int32"),
    cu_q_lens=jax.ShapeDtypeStruct((ROWS + 1,), "int32"),
    scale=1.0,
    q_len=1,
)


def own_choice(trace: Callable[[str], Any]) -> str:
    """Describes the implementation that a call gets; `trace` traces the call with the implementation of a name."""
    own = device_at_hand().platform
    if own not in ("gpu", "tpu"):
        return f"plain JAX: kernels are for TPUs and for GPUs of compute capability {AMPERE} and up"
    try:
        trace(own)
    except NotImplementedError as error:
        return f"plain JAX: {error}"
    return f"the {own.upper()} kernel"


def trace_attention(N: int, K: int, H: int, page_size: int, dtype: str, page_dtype: str, name: str | None) -> Any:
    """Traces a decode step's attention of N query and K KV heads of H numbers by the implementation of a name."""
    q, kv = (jax.ShapeDtypeStruct((ROWS, heads, H), dtype) for heads in (N, K))
    pages = abstract_pages(ROWS, page_size, K, H, page_dtype, layout_at_hand(), has_scales=page_dtype == "int8")
    return jax.eval_shape(paged_attention, q, kv, kv, pages, replace(ROWS_OF_ONE_TOKEN, implementation=name))


def trace_latent_attention(
    N: int, R: int, r: int, page_size: int, dtype: str, page_dtype: str, name: str | None
) -> Any:
    """Traces that of N heads to latents of R numbers and rotated keys of r."""
    q, latents = (jax.ShapeDtypeStruct((ROWS, *heads, R + r), dtype) for heads in ((N,), ()))
    pages = abstract_latents(ROWS, page_size, R, r, page_dtype, layout_at_hand(), has_scales=page_dtype == "int8")
    return jax.eval_shape(latent_attention, q, latents, pages, replace(ROWS_OF_ONE_TOKEN, implementation=name))


def layout_at_hand() -> str:
    """Returns the layout of pages on the device that is compiled for, which need not be here."""
    own = device_at_hand().platform
    return own if own in LAYOUTS else "cpu"


def has_tuned_table() -> bool:
    """True if block sizes of attention have been measured on the GPU or TPU at hand."""
    device = device_at_hand()
    return bool(tuned_table(table_name(device.kind) if device.platform == "gpu" else f"tpu_{chip_at_hand()}"))
