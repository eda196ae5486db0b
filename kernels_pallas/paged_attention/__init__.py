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

__all__ = [
    "AttentionCall",
    "HeadOptions",
    "Pages",
    "SumOrder",
    "abstract_pages",
    "append_products",
    "can_append_products",
    "gather_tokens",
    "head_specs",
    "init_pages",
    "map_keys",
    "move_slots",
    "paged_attention",
    "plan_attention",
    "put_pages",
    "take_pages",
    "write_kv",
]
