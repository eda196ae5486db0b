"""Attention over a paged KV cache."""

from kernels_pallas.paged_attention.api import paged_attention
from kernels_pallas.paged_attention.layout import Pages, abstract_pages, copy_pages, gather_tokens, init_pages, write_kv

__all__ = ["Pages", "abstract_pages", "copy_pages", "gather_tokens", "init_pages", "paged_attention", "write_kv"]
