"""The kernels that the device at hand gets, found by tracing calls, which need neither weights nor compilation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from kernels_pallas.device import AMPERE, device_at_hand
from kernels_pallas.latent_attention import latent_attention
from kernels_pallas.latent_attention.layout import abstract_latents
from kernels_pallas.paged_attention import abstract_pages, paged_attention
from kernels_pallas.paged_attention.gpu.block_sizes import table_name
from kernels_pallas.paged_attention.layout import LAYOUTS
from kernels_pallas.paged_attention.tpu.block_sizes import chip_at_hand
from kernels_pallas.paged_attention.tuned_tables import tuned_table

# Rows of the traced calls: those of a decode step.
ROWS = 8
ROWS_OF_ONE_TOKEN = {
    "block_tables": jax.ShapeDtypeStruct((ROWS, 1), "int32"),
    "kv_lens": jax.ShapeDtypeStruct((ROWS,), "int32"),
    "cu_q_lens": jax.ShapeDtypeStruct((ROWS + 1,), "int32"),
}


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
    arrays = {
        "q": jax.ShapeDtypeStruct((ROWS, N, H), dtype),
        "k": jax.ShapeDtypeStruct((ROWS, K, H), dtype),
        "v": jax.ShapeDtypeStruct((ROWS, K, H), dtype),
        "pages": abstract_pages(ROWS, page_size, K, H, page_dtype, layout_at_hand(), has_scales=page_dtype == "int8"),
    }
    call = functools.partial(paged_attention, scale=1.0, q_len=1, implementation=name)
    return jax.eval_shape(lambda arrays: call(**arrays), arrays | ROWS_OF_ONE_TOKEN)


def trace_latent_attention(
    N: int, R: int, r: int, page_size: int, dtype: str, page_dtype: str, name: str | None
) -> Any:
    """Traces that of N heads to latents of R numbers and rotated keys of r."""
    arrays = {
        "q": jax.ShapeDtypeStruct((ROWS, N, R + r), dtype),
        "latents": jax.ShapeDtypeStruct((ROWS, R + r), dtype),
        "pages": abstract_latents(ROWS, page_size, R, r, page_dtype, layout_at_hand(), has_scales=page_dtype == "int8"),
    }
    call = functools.partial(latent_attention, scale=1.0, q_len=1, implementation=name)
    return jax.eval_shape(lambda arrays: call(**arrays), arrays | ROWS_OF_ONE_TOKEN)


def layout_at_hand() -> str:
    """Returns the layout of pages on the device that is compiled for, which need not be here."""
    own = device_at_hand().platform
    return own if own in LAYOUTS else "cpu"


def has_tuned_table() -> bool:
    """True if block sizes of attention have been measured on the GPU or TPU at hand."""
    device = device_at_hand()
    return bool(tuned_table(table_name(device.kind) if device.platform == "gpu" else f"tpu_{chip_at_hand()}"))
