"""What a choice of block sizes of a TPU kernel costs, from the compiler's schedule and the chip's data sheet."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple


class Chip(NamedTuple):
    """What one device of jax can do per second."""

    bandwidth: float  # bytes
    clock: float  # cycles
    flops: float  # of bfloat16, with all matrix units of a core


# A v5p device is two cores, of which a kernel here runs on one; a chip of TPU7x is two devices. The clock of TPU7x is
# not published: it is the one at which its matrix units, built as v6e's, reach their peak.
CHIPS: Mapping[str, Chip] = {
    "v5e": Chip(819e9, 1.5e9, 197e12),
    "v5p": Chip(2765e9, 1.75e9, 459e12 / 2),
    "v6e": Chip(1640e9, 1.75e9, 918e12),
    "tpu7x": Chip(3690e9, 2.2e9, 1155e12),
}
PAGE_SIZE = 128
CONTEXTS = (256, 512, 1024, 2048, 4096, 8192)
# Tokens of a row that a step computes: of one that is mixed with decoding, and of one full of prompts.
CHUNKS = (128, 512)
TOKENS_BEFORE = (0, 1024, 4096)


def token_bytes(shape: Mapping[str, Any]) -> int:
    """Returns the bytes of a token's keys and values in a TPU pool."""
    from kernels_pallas.paged_attention import abstract_pages

    pages = abstract_pages(1, PAGE_SIZE, shape["num_kv_heads"], shape["head_dim"], shape["page_dtype"], "tpu")
    return math.prod(pages.arrays[0].shape) * pages.dtype.itemsize // PAGE_SIZE


def rate_decode(device: str, shape: Mapping[str, Any], choice: Mapping[str, int], bundles: int) -> float:
    """Returns how many times as long as reading it takes to attend to a context, the mean over CONTEXTS.

    A turn of the kernel's loop takes `bundles` cycles, or the time to read its block if that is longer.
    """
    from kernels_pallas.paged_attention.tpu.block_sizes import LATENCY

    chip = CHIPS[device]
    block_bytes = choice["block_tokens"] * token_bytes(shape)
    # Where too little is under way, the memory waits.
    waiting = max(1.0, LATENCY * chip.bandwidth / ((choice["buffers"] - 1) * block_bytes))
    ratios = []
    for context in CONTEXTS:
        least = context * token_bytes(shape) * chip.clock / chip.bandwidth
        turns = math.ceil(context / choice["block_tokens"])
        ratios.append(max(turns * bundles, least * waiting) / least)
    return sum(ratios) / len(ratios)


def bundles_of_turn(shape: Mapping[str, Any], choice: Mapping[str, int], figures: Mapping[str, Any]) -> int:
    """Returns the bundles of a turn of the decode kernel's loop, where the figures count a loop inside once."""
    from kernels_pallas.paged_attention.tpu.attend import heads_together

    num_groups = shape["num_kv_heads"] // heads_together(shape["num_kv_heads"], choice["block_tokens"])
    return figures["bundles"] + (num_groups - 1) * sum(figures["inner_bundles"])


def rate_ragged(
    device: str, shape: Mapping[str, Any], choice: Mapping[str, int], figures: Mapping[str, Any], piece_rows: int
) -> float:
    """Returns how many times as long as the matrix units' work alone it takes to attend with CHUNKS of a row's tokens.

    A block takes one of two branches, with a mask or without; of what is outside their loops each has half.
    """
    K, G, Q, block = shape["num_kv_heads"], shape["num_groups"], choice["queries"], choice["block_tokens"]
    turns = K * math.ceil(Q * G / piece_rows) if figures["inner_bundles"] else 0
    plain, masked = (turns * n for n in sorted(figures["inner_bundles"]) or (0, 0))
    outside = (figures["bundles"] - sum(figures["inner_bundles"])) / 2
    chip, ratios = CHIPS[device], []
    for chunk, before in itertools.product(CHUNKS, TOKENS_BEFORE):
        cycles = 0.0
        for first in range(before, before + chunk, Q):
            num_blocks, num_plain = math.ceil(min(first + Q, before + chunk) / block), first // block
            cycles += num_blocks * outside + num_plain * plain + (num_blocks - num_plain) * masked
        pairs = sum(range(before + 1, before + chunk + 1))
        ratios.append(cycles / (4 * K * G * shape["head_dim"] * pairs * chip.clock / chip.flops))
    return sum(ratios) / len(ratios)
