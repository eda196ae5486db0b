"""What the kernels are tuned for, and the block sizes that are tried for it."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import jax

from scripts.kernels import compile_gpu
from scripts.kernels.compile_matrix import decode_case, prefill_case
from scripts.kernels.compilers import Case
from scripts.kernels.ratings import CHIPS, CHUNKS, CONTEXTS, PAGE_SIZE, token_bytes

# Tokens of a block that decoding may fetch, and queries of a tile that prefill may compute together.
BLOCK_TOKENS = (256, 512, 1024)
QUERIES = (32, 64, 128, 256)
# Keys of a block, warps that compute with it, and stages. Triton spends two stages on a block's address, which is in a
# table: below 5 no block is on its way while another is computed.
GPU_CHOICES = {"block_k": (32, 64, 128), "num_warps": (2, 4, 8), "num_stages": (2, 3, 4, 5, 6)}
# What prefills on a GPU; each kernel has rules of its own.
PREFILL_ROWS, PREFILL_TOKENS = 4, 4096
# Query heads, KV heads and head_dim: Llama 3 8B, it and 70B on one of eight chips, Qwen2.5 7B, Llama 3.2 1B.
SHAPES = ((32, 8, 128), (4, 1, 128), (8, 1, 128), (28, 4, 128), (32, 8, 64))
# The dtype of pages hardly matters to prefill, which does not wait for them.
PAGE_DTYPES = {"decode": ("bfloat16", "int8", "float8_e4m3fn"), "ragged": ("bfloat16",)}
TILES = {"block_channels": (16, 32, 64), "block_inputs": (64, 128), "num_stages": (3, 4, 6, 8)}


def shapes(kernel: str = "decode") -> list[dict[str, Any]]:
    """Returns what there is to tune for, by the fields that an entry of a table has for it."""
    if kernel == "product":
        from kernels_pallas.paged_attention.tuned_tables import PRODUCT_KEYS

        return [
            {"kernel": kernel, "rows": rows, **dict(zip(PRODUCT_KEYS, (min(rows, 128), 2, *sizes), strict=True))}
            for sizes in compile_gpu.DENSE_WEIGHTS
            for rows in compile_gpu.DENSE_ROWS
        ]
    return [
        {"kernel": kernel, "page_dtype": dtype, "num_kv_heads": K, "head_dim": H, "num_groups": N // K}
        for N, K, H in SHAPES
        for dtype in PAGE_DTYPES[kernel]
    ]


def candidates(device: str, shape: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    """Yields block sizes for a device, one of CHIPS or a GPU, or for the prefill of a GPU its kernels."""
    if device in CHIPS:
        yield from _tpu_candidates(device, shape)
    elif shape["kernel"] == "ragged":
        from kernels_pallas.paged_attention.gpu.prefill_choice import PREFILL_KERNELS

        yield from ({"prefill": name} for name in PREFILL_KERNELS)
    elif shape["kernel"] == "product":
        yield by_rule(shape)
        for values in itertools.product(*TILES.values()):
            yield dict(zip(TILES, values, strict=True)) | {"num_warps": 4}
    else:
        for values in itertools.product(*GPU_CHOICES.values()):
            yield dict(zip(GPU_CHOICES, values, strict=True))


def by_rule(shape: Mapping[str, Any]) -> dict[str, int]:
    """Returns the tile of a product that the rules give on the GPU at hand."""
    from kernels_pallas import triton
    from kernels_pallas.gpu_products.tiles import product_tile

    gpu = triton.target() if jax.default_backend() == "gpu" else triton.INTERPRETED
    sizes = {name: shape[name] for name in ("rows", "channels", "inputs", "parts", "itemsize")}
    tile = product_tile(gpu, **sizes)._asdict()
    return {name: size for name, size in tile.items() if name not in shape}


def _tpu_candidates(device: str, shape: Mapping[str, Any]) -> Iterable[dict[str, int]]:
    """Yields block sizes, each with the number of buffers that keeps the memory busy."""
    from kernels_pallas.paged_attention.tpu.block_sizes import BLOCK_TOKENS as RULE
    from kernels_pallas.paged_attention.tpu.block_sizes import MAX_HELD_BYTES, MAX_TILE_SIZE, buffers_for
    from kernels_pallas.paged_attention.tpu.items import LANES

    for tokens in BLOCK_TOKENS if shape["kernel"] == "decode" else [RULE]:
        block_bytes = tokens * token_bytes(shape)
        choice = {"block_tokens": tokens, "buffers": buffers_for(block_bytes, CHIPS[device].bandwidth)}
        if choice["buffers"] * block_bytes > MAX_HELD_BYTES:
            continue
        if shape["kernel"] == "decode":
            yield choice
            continue
        for queries in QUERIES:
            if queries * shape["num_groups"] * shape["num_kv_heads"] * LANES <= MAX_TILE_SIZE:
                yield choice | {"queries": queries}


def make_case(name: str, mesh: Any) -> Case:
    """Returns the case that a name, in JSON, describes: a device, a shape and a choice."""
    device, shape, choice = json.loads(name)
    sizes = {key: shape[key] for key in ("page_dtype", "num_kv_heads", "head_dim")}
    sizes["num_heads"] = shape["num_kv_heads"] * shape["num_groups"]
    return _tpu_case(shape, choice, sizes, mesh) if device in CHIPS else _gpu_case(shape, choice, sizes, mesh)


def _tpu_case(shape: dict[str, Any], choice: dict[str, int], sizes: dict[str, Any], mesh: Any) -> Case:
    from kernels_pallas.paged_attention.tpu.block_sizes import Blocks, matrix_unit

    num_pages = choice["block_tokens"] // PAGE_SIZE
    if shape["kernel"] == "decode":
        blocks = Blocks(num_pages, choice["buffers"])
        return decode_case(mesh, **sizes, page_size=PAGE_SIZE, context=max(CONTEXTS), blocks=blocks)
    blocks = Blocks(num_pages, choice["buffers"], choice["queries"], matrix_unit())
    # With a limit on rows' tokens there is no second kernel for single ones.
    return prefill_case(mesh, **sizes, page_size=PAGE_SIZE, q_len=max(CHUNKS), blocks=blocks)


def _gpu_case(shape: dict[str, Any], choice: dict[str, Any], sizes: dict[str, Any], mesh: Any) -> Case:
    """With the tiles and splits that go by rules."""
    if shape["kernel"] == "ragged":
        rows = {"num_rows": PREFILL_ROWS, "num_tokens": PREFILL_TOKENS, "max_context": max(CONTEXTS)}
        return compile_gpu.attention(mesh, q_len=None, **rows, **sizes, page_size=PAGE_SIZE, **choice)
    from kernels_pallas.paged_attention.gpu.block_sizes import gpu_block_sizes
    from kernels_pallas.triton import target

    case = functools.partial(compile_gpu.decode, mesh, **sizes, page_size=PAGE_SIZE, max_context=max(CONTEXTS))
    by_rule = gpu_block_sizes(
        num_rows=compile_gpu.DECODE_ROWS,
        queries=1,
        group=shape["num_groups"],
        num_kv_heads=shape["num_kv_heads"],
        head_dim=shape["head_dim"],
        page_dtype=shape["page_dtype"],
        max_context=max(CONTEXTS),
        has_tree=False,
        target=target(),
    )
    return case(block_sizes=replace(by_rule, **choice))
