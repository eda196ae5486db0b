"""Attention over a paged KV cache."""

from kernels_pallas.paged_attention.api import paged_attention
from kernels_pallas.paged_attention.layout import copy_pages, page_size, pool_shapes, write_kv

__all__ = ["copy_pages", "page_size", "paged_attention", "pool_shapes", "write_kv"]
