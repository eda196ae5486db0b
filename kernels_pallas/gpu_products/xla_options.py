"""How XLA multiplies on a GPU what no kernel does: few rows in a tile of ours, many by cuBLASLt; nothing is measured.

By default XLA compiles 25 candidates for each product and measures them on the device. On an H200 that took most of a
start, and programs differed from start to start. With these options of a compilation a program depends on the kind of
GPU alone, so one that is compiled elsewhere, or while the device serves, is the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from kernels_pallas.device import HOPPER, device_at_hand
from kernels_pallas.gpu_products.tiles import shared_bytes

# Rows up to which a product waits for its weights. More rows are left to cuBLASLt: on an H200 a plain product of 2,048
# rows reached 840 TFLOP/s by it, and those of a step in Triton's tiles 558 (jax 0.11.2).
MAX_TILED_ROWS = 256
TILE_ROWS = (16, 64, MAX_TILED_ROWS)  # by which there is a tile: the most rows of a product
# XLA joins up to three products of the same rows whose weights lie apart, such as those of draft heads. Then it holds a
# block of each one's operands.
JOINED = 3
NUM_STAGES = 4
PASSES = "xla_disable_hlo_passes"
# On any GPU nothing is measured, nor computed again to save memory: XLA counts pages as memory that steps need. If they
# take more than 80 % of the device, it would compute a decode step by a third more kernels.
UNTUNED: Mapping[str, Any] = {
    "xla_gpu_autotune_level": 0,
    "xla_gpu_experimental_enable_fusion_autotuner": False,
    PASSES: "rematerialization",
}


class XlaTile(NamedTuple):
    """A tile of XLA's Triton products, by XLA's names; it decides itself whether m or n counts the rows."""

    block_m: int
    block_n: int
    block_k: int
    num_stages: int  # blocks of operands under way, the one in use included
    num_warps: int


def xla_tile(capability: float, num_rows: int, itemsize: int) -> XlaTile:
    """Returns the tile for products of up to `num_rows` rows, at most MAX_TILED_ROWS, on a GPU since Ampere.

    It has the longest block of inputs of which three fit into shared memory. `itemsize`: bytes of an element of the
    weights.
    """
    rows = min(rows for rows in TILE_ROWS if num_rows <= rows)
    block_m, block_n = 128 if rows == MAX_TILED_ROWS else 64, min(rows, 64)
    block_k = 128
    while block_k > 16 and fitting_stages(capability, block_m, block_n, block_k, itemsize) < 3:
        block_k //= 2
    stages = fitting_stages(capability, block_m, block_n, block_k, itemsize)
    return XlaTile(block_m, block_n, block_k, max(min(stages, NUM_STAGES), 1), 4)


def fitting_stages(capability: float, block_m: int, block_n: int, block_k: int, itemsize: int) -> int:
    """Returns the most stages of a tile for which shared memory has room, with JOINED products in one program."""
    stages = shared_bytes(capability) // (JOINED * (block_m + block_n) * block_k * itemsize)
    return stages if capability >= HOPPER else stages + 1  # before, the block in use has left shared memory


def compiler_options(num_rows: int, itemsize: int) -> Mapping[str, Any]:
    """Returns the options of XLA to compile a function with, {} unless it is for a GPU.

    Args:
      num_rows: most rows of the function's products.
      itemsize: bytes of an element of most of its weights, 1 if they are packed.
    """
    device = device_at_hand()
    if device.platform != "gpu":
        return {}
    if device.capability is None or device.is_before_ampere:  # XLA compiles no products by Triton there
        return UNTUNED
    # cuBLASLt reads weights as they are, neither packed nor joined: XLA would write a copy of 1 GB of Llama 3 8B's int8
    # unembedding for it.
    if num_rows > MAX_TILED_ROWS and itemsize > 1:
        passes = f"{UNTUNED[PASSES]},dot-merger"
        return {**UNTUNED, "xla_gpu_enable_triton_gemm": False, PASSES: passes}
    rows = min(num_rows, MAX_TILED_ROWS)
    return tiled_options(xla_tile(device.capability, rows, max(itemsize, 2)))


def weight_itemsize(weights: Any) -> int:
    """Returns the bytes of an element of the type that most bytes of a tree of weights have, for `compiler_options`."""
    sizes = Counter[Any]()
    for leaf in jax.tree.leaves(weights):
        sizes[leaf.dtype] += leaf.dtype.itemsize * leaf.size
    return max(sizes, key=lambda dtype: sizes[dtype]).itemsize if sizes else 4


def tiled_options(tile: XlaTile) -> Mapping[str, Any]:
    """Returns the options by which XLA computes every product of a function in this tile."""
    text = " ".join(f"{name}:{value}" for name, value in (*tile._asdict().items(), ("num_ctas", 1)))
    return {**UNTUNED, "xla_gpu_override_gemm_autotuner": text, "xla_gpu_cublas_fallback": False}
