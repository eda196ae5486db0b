"""Attention over a paged KV cache."""

from kernels_pallas.paged_attention.api import paged_attention
from kernels_pallas.paged_attention.layout import copy_pages, page_size, pages_shape, write_tokens

__all__ = ["copy_pages", "page_size", "paged_attention", "pages_shape", "write_tokens"]
