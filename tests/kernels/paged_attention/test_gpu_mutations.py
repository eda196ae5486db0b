"""The tests of the GPU kernels notice a wrong line: each mutation is caught by the definition of attention.

Nobody detects races in Triton kernels on CPU. Here programs share nothing but what they read before any of them, and
each writes tokens, or parts of the context, of its own; what can go wrong is who writes and combines what.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest

from kernels_pallas.paged_attention.gpu import append, attend, chunks, combine, entry, parts
from kernels_pallas.paged_attention.gpu.block_sizes import GpuBlockSizes
from scripts.kernels.named_calls import by_name
from tests.kernels.paged_attention.mutants import mutant
from tests.kernels.paged_attention.oracle import check_pages, expected_output, make_call

FILES = (chunks, append, parts, combine, attend, entry)
MUTATIONS = {
    "queries that see what follows them": (
        "is_visible = slots[None] <= tile.positions[:, None]",
        "is_visible = slots[None] <= tile.positions[:, None] + 1",
    ),
    "a block without a mask that some queries see in part": (
        "whole, end = first + 1, jnp.minimum(",
        "whole, end = chunk.kv_len, jnp.minimum(",
    ),
    "slots that are read though nobody sees them": ("is_seen = None if is_whole else ", "is_seen = None and "),
    "keys for values": ("load(arrays.v_pages,", "load(arrays.k_pages,"),
    "sums that are not rescaled": ("rescale = jnp.exp2(maximum - new_maximum)", "rescale = jnp.ones_like(maximum)"),
    "parts that are not combined": ("rescale[:, None] + (values * weights[:, :, None]).sum(0)", "rescale[:, None]"),
    "parts that are not weighed": ("(triton.load(totals, at, mask) * weights)", "triton.load(totals, at, mask)"),
    "parts that overlap": ("jnp.minimum(lo + share, hi)", "jnp.minimum(lo + 2 * share, hi)"),
    "parts that share their slots": ("part.first_slot + part.index * ", "part.first_slot + 0 * "),
    "rows that share their slots": ("rows.slots * rows.q_lens, 0)", "rows.slots, 0)"),
    "the pages of the block before": ("_pages_of(arrays, tile, i + 1,", "_pages_of(arrays, tile, i,"),
    "a sink in every part": ("part.index == 0,", "part.index >= 0,"),
    "tiles of one row that start alike": ("tile * cut.block_q)", "tile * 0)"),
    "tokens of the next row appended to this one": ("is_real = is_token & ", "is_real = "),
    "a token appended one slot too late": (
        "positions, is_token = chunk.context + queries, ",
        "positions, is_token = chunk.context + queries + 1, ",
    ),
}


def run(kernels: Any) -> None:
    """Runs rows of up to 6 tokens in tiles of 4, in two parts of the context, and checks the result and the pages."""
    sizes: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 16, "layout": "gpu"}
    call = make_call([(6, 34), (2, 2), (6, 0), (5, 23)], **sizes)
    sinks = np.array([-1, 0, 1, 2, 0, -2, 1, 0], np.float32)
    blocks = GpuBlockSizes(
        block_m=16, block_k=16, num_splits=2, split_keys=2048, added_parts=64, num_warps=4, num_stages=2
    )
    options = {"scale": 0.25, "q_len": 6, "block_sizes": blocks, "interpret": True}
    attention = jax.jit(functools.partial(by_name(kernels.paged_attention_gpu), **options))

    out, pages = attention(**call.with_options(sinks=sinks).arguments)

    expected = expected_output(call, 0.25, sinks=sinks)
    is_real = ~np.isnan(expected)
    actual = np.asarray(out)[: call.num_tokens].astype(np.float32)
    np.testing.assert_allclose(actual[is_real], expected[is_real], rtol=2e-5, atol=2e-5)
    check_pages(call, call.arguments["pages"], pages)


def test_the_kernels_as_they_are_pass():
    run(entry)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_of_the_gpu_kernels_is_caught(name):
    kernels = mutant(FILES, *MUTATIONS[name])

    with pytest.raises(AssertionError):
        run(kernels)
