"""Attention over a paged KV cache."""

from kernels_pallas.paged_attention.api import append_products, can_append_products, paged_attention, plan_attention
from kernels_pallas.paged_attention.call import AttentionCall, HeadOptions
from kernels_pallas.paged_attention.gpu.sum_order import SumOrder
from kernels_pallas.paged_attention.layout import (
    Pages,
    abstract_pages,
    gather_tokens,
    head_specs,
    init_pages,
    map_keys,
    move_slots,
    put_pages,
    take_pages,
    write_kv,
)
from kernels_pallas.paged_attention.rounded import RoundedPages, abstract_rounded_pages, pieces_of, rounded_attention

__all__ = [
    "AttentionCall",
    "HeadOptions",
    "Pages",
    "RoundedPages",
    "SumOrder",
    "abstract_pages",
    "abstract_rounded_pages",
    "append_products",
    "can_append_products",
    "gather_tokens",
    "head_specs",
    "init_pages",
    "map_keys",
    "move_slots",
    "paged_attention",
    "pieces_of",
    "plan_attention",
    "put_pages",
    "rounded_attention",
    "take_pages",
    "write_kv",
]
