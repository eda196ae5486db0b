"""Attention on GPUs without kernels: the loops that a host follows. Results are checked in test_paged_attention.py."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from kernels_pallas.paged_attention import abstract_pages, paged_attention
from kernels_pallas.paged_attention.in_blocks import attend_in_blocks
from kernels_pallas.paged_attention.reference import paged_attention_reference
from scripts.kernels.named_calls import by_name
from tests.kernels.paged_attention.blocks import SMALL_BLOCKS
from tests.kernels.paged_attention.oracle import expected_output, make_call, tree_of, tree_words

# Tokens, rows, q_len.
STEPS = {"decode": (8, 8, 1), "verify": (32, 8, 4), "prefill": (512, 1, None), "mixed": (64, 8, None)}


def loops(jaxpr: Any) -> Iterator[str]:
    """Yields the names of a program's loops: "scan" with a known number of turns, "while" with an unknown one."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("scan", "while"):
            yield equation.primitive.name
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                yield from loops(getattr(inner, "jaxpr", inner))


def loops_of(step: str, max_context: int, kind: str = "Tesla T4", platform: str = "gpu", **options: Any) -> set[str]:
    T, B, q_len = STEPS[step]
    shape = jax.ShapeDtypeStruct
    arguments = {
        "q": shape((T, 16, 128), jnp.float16),
        "k": shape((T, 8, 128), jnp.float16),
        "v": shape((T, 8, 128), jnp.float16),
        "pages": abstract_pages(1024, 16, 8, 128, jnp.float16, platform),
        "block_tables": shape((B, max_context // 16), jnp.int32),
        "kv_lens": shape((B,), jnp.int32),
        "cu_q_lens": shape((B + 1,), jnp.int32),
    }
    mesh = AbstractMesh((), (), abstract_device=AbstractDevice(kind, 40, platform))
    with jax.sharding.use_abstract_mesh(mesh):
        call = functools.partial(by_name(paged_attention), scale=1.0, q_len=q_len, **options)
        return set(loops(jax.make_jaxpr(lambda arrays: call(**arrays))(arguments).jaxpr))


@pytest.mark.parametrize("step", STEPS)
def test_small_tables_are_read_in_loops_of_a_known_length(step):
    assert loops_of(step, 2048) <= {"scan"}


@pytest.mark.parametrize("step", STEPS)
def test_loops_over_large_tables_end_with_the_contexts(step):
    assert "while" in loops_of(step, 32768)


def test_windows_make_any_table_small():
    assert loops_of("decode", 32768, window=1024) <= {"scan"}


def test_a_kernel_may_be_replaced_on_any_gpu():
    assert loops_of("decode", 2048, "NVIDIA H200", implementation="reference") <= {"scan"}


def test_a_cpu_visits_pages_one_by_one():
    assert loops_of("decode", 2048, "some other CPU", "cpu") >= {"while"}


@pytest.mark.parametrize("layout", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize("q_len", [None, 1])
def test_blocks_of_the_usual_size_are_the_attention_of_each_row_alone(q_len, layout):
    # Several blocks of 2,048 keys, the last of which is cut short.
    lens = [(q_len or 9, 5000), (1, 1), (q_len or 3, 2049), (0 if q_len is None else 1, 0)]
    call = make_call(lens, num_heads=4, num_kv_heads=2, head_dim=16, table_width=320, layout=layout)
    reference = by_name(paged_attention_reference)
    attend = functools.partial(reference, scale=0.25, q_len=q_len, attend=attend_in_blocks)

    out, _ = jax.jit(attend)(**call.arguments)

    expected = expected_output(call, 0.25)
    is_real = ~np.isnan(expected)
    # float32 sums of 5,000 weighted values of order 1.
    np.testing.assert_allclose(np.asarray(out)[: call.num_tokens][is_real], expected[is_real], rtol=1e-4, atol=1e-5)


def test_a_few_drafts_in_a_tile_read_the_ancestors_before_them_within_a_window():
    tree = tree_of([-1, *range(39)])
    call = make_call([(40, 140)], num_heads=4, num_kv_heads=2, head_dim=16, table_width=12, layout="gpu")
    call = call.with_options(tree_mask=tree_words([tree], call.num_tokens))
    # A window of 14 and a tile of 4 tokens alone would fit into one block.
    sizes = SMALL_BLOCKS._replace(most_queries=4, whole_bytes=1 << 30)
    in_blocks = functools.partial(attend_in_blocks, sizes=sizes)
    attend = functools.partial(by_name(paged_attention_reference), attend=in_blocks)

    out, _ = jax.jit(functools.partial(attend, scale=0.25, window=14))(**call.arguments)

    np.testing.assert_allclose(out, expected_output(call, 0.25, window=14, trees=[tree]), rtol=2e-5, atol=2e-5)
