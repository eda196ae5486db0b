"""What is the GPU kernel's own: splits and tiles of any size, and what it refuses. Interpreted on CPU."""

from __future__ import annotations

import dataclasses
import functools
import json
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from kernels_pallas.paged_attention import abstract_pages, paged_attention
from kernels_pallas.paged_attention.gpu.block_sizes import GpuBlockSizes, gpu_block_sizes
from kernels_pallas.paged_attention.gpu.entry import paged_attention_gpu
from kernels_pallas.triton import Target
from scripts.kernels.named_calls import by_name
from tests.kernels.paged_attention import test_paged_attention as common
from tests.kernels.paged_attention.oracle import check_pages, expected_output, make_call
from tests.on_devices import run_on_devices

SMALL: dict[str, Any] = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 20, "layout": "gpu"}
DECODE = [(1, 1), (1, 15), (1, 16), (1, 17), (1, 64), (1, 33), (1, 0)]
BLOCKS = GpuBlockSizes(block_m=16, block_k=16, num_splits=1, split_keys=2048, added_parts=64, num_warps=4, num_stages=2)
H200 = Target("NVIDIA H200", num_cores=132, capability=9.0)
LLAMA_DECODE = {
    "queries": 1,
    "group": 4,
    "num_kv_heads": 8,
    "head_dim": 128,
    "page_dtype": "bfloat16",
    "has_tree": False,
}

TARGET = ("gpu_interpret", functools.partial(make_call, layout="gpu"))
# The tests of every implementation, in as many cases as the kernel has paths.
COMMON = [
    (common.test_a_ragged_batch_is_the_attention_of_each_row_alone, "single tokens between long rows"),
    (common.test_a_ragged_batch_is_the_attention_of_each_row_alone, "long rows between single tokens"),
    (common.test_a_ragged_batch_is_the_attention_of_each_row_alone, "empty rows between"),
    (common.test_a_ragged_batch_is_the_attention_of_each_row_alone, "nothing but padding"),
    (common.test_a_uniform_batch_is_the_attention_of_each_row_alone, 5),
    (common.test_rows_may_have_fewer_tokens_than_the_bound,),
    (common.test_query_heads_share_the_key_value_head_of_their_group, 8, 2, 80),
    (common.test_query_heads_share_the_key_value_head_of_their_group, 7, 1, 128),
    (common.test_query_heads_share_the_key_value_head_of_their_group, 8, 1, 512),
    (common.test_lengths_around_the_page_size_are_exact, 64, None),
    (common.test_scores_far_apart_neither_overflow_nor_vanish,),
    (common.test_a_window_hides_what_lies_behind_it, 17, None),
    (common.test_a_window_hides_what_lies_behind_it, 1, 1),
    (common.test_sinks_take_their_share_of_the_weights, 20.0, None),
    (common.test_a_draft_sees_the_context_and_its_own_ancestors, "two rows", None),
    (common.test_a_draft_sees_the_context_and_its_own_ancestors, "more drafts than a word has bits", 14),
    (common.test_narrow_pages_are_accumulated_in_float32, "bfloat16", None),
    (common.test_narrow_pages_are_accumulated_in_float32, "int8 under bfloat16", 1),
    (common.test_narrow_pages_are_accumulated_in_float32, "int8 under float32", None),
    (common.test_narrow_pages_are_accumulated_in_float32, "float8 under bfloat16", None),
    (common.test_each_token_of_integer_pages_has_its_own_scale, 1, {}),
    (common.test_each_token_of_integer_pages_has_its_own_scale, None, {"window": 17, "softcap": 2.0}),
    (common.test_drafts_of_a_tree_read_their_ancestors_by_their_own_scales,),
    (common.test_layers_that_share_keys_and_values_write_nothing, None),
    (common.test_a_page_offset_selects_the_layer, 1),
    (common.test_values_at_padding_positions_are_finite, [(5, 21), (0, 0)]),
    (common.test_a_result_is_the_same_bits_whatever_the_neighbours, 1),
]


@pytest.mark.parametrize("case", COMMON, ids=lambda case: " ".join([case[0].__name__, *map(str, case[1:])]))
def test_the_kernel_passes_the_tests_of_every_implementation(case):
    test, *arguments = case

    test(*arguments, TARGET)


def check(call, *, q_len=None, trees=None, block_sizes, **options):
    attend = functools.partial(
        by_name(paged_attention_gpu), q_len=q_len, block_sizes=block_sizes, interpret=True, scale=0.25
    )
    arrays = {name: options.pop(name) for name in ("sinks",) if name in options}
    attend = jax.jit(functools.partial(attend, **options))
    out, pages = attend(**call.arguments, **arrays)
    expected = expected_output(call, 0.25, trees=trees, **options, **arrays)
    is_real = ~np.isnan(expected)
    # float32 sums of at most 64 weighted values of order 1.
    np.testing.assert_allclose(np.asarray(out)[: call.num_tokens][is_real], expected[is_real], rtol=1e-5, atol=1e-5)
    assert np.isfinite(out).all()
    check_pages(call, call.arguments["pages"], pages)


def test_devices_of_a_mesh_append_their_own_heads():
    written = run_on_devices(2, "-m", "tests.kernels.paged_attention.append_program").splitlines()[-1]

    # Tokens 14 to 16 of a row in pages 3 and 1, and 20 and 21 of one in pages 0 and 2.
    assert json.loads(written) == sorted([3 * 16 + 14, 3 * 16 + 15, 16, 2 * 16 + 4, 2 * 16 + 5])


# The two integers of a byte are half a head apart, and a head of 21 fills no byte.
@pytest.mark.parametrize(("head_dim", "q_len"), [(64, None), (21, 1)])
def test_integers_of_4_bits_are_read_two_from_a_byte(head_dim, q_len):
    lens = [(q_len or 4, 60), (1, 33), (q_len or 20, 20), (1, 1)]
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": head_dim, "page_size": 32}
    call = make_call(lens, **sizes, page_dtype=jnp.int4, has_scales=True, layout="gpu")

    check(call, q_len=q_len, block_sizes=None)


@pytest.mark.parametrize("num_splits", [2, 3, 8])
def test_a_context_split_over_programs_is_attended_to_once(num_splits):
    # Of 8 splits of at most 4 blocks, some have nothing to do.
    check(make_call(DECODE, **SMALL), q_len=1, block_sizes=dataclasses.replace(BLOCKS, num_splits=num_splits))


def test_splits_share_window_soft_cap_and_sinks():
    sinks = np.array([3.0, -20.0, 0.5, 20.0, 1.0, 0.0], np.float32)
    splits = dataclasses.replace(BLOCKS, num_splits=3)

    check(make_call(DECODE, **SMALL), q_len=1, block_sizes=splits, window=37, softcap=2.0, sinks=sinks)


def test_a_draft_tree_may_be_split():
    tree = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], bool)
    call = make_call([(4, 50), (4, 4), (4, 0)], **SMALL)
    words = np.tile((tree * (1 << np.arange(4))).sum(-1).astype(np.uint32), 3)[:, None]

    splits = dataclasses.replace(BLOCKS, num_splits=2)
    check(call.with_options(tree_mask=words), q_len=4, trees=[tree] * 3, block_sizes=splits)


@pytest.mark.parametrize(("block_m", "block_k"), [(16, 32), (32, 16), (64, 64)])
def test_tiles_of_any_size_cover_a_ragged_batch(block_m, block_k):
    lens = [(7, 23), (0, 0), (1, 17), (37, 64), (1, 1), (5, 5), (0, 0)]
    block_sizes = dataclasses.replace(BLOCKS, block_m=block_m, block_k=block_k, num_splits=2)

    check(make_call(lens, **SMALL, num_padding=13), block_sizes=block_sizes)


@pytest.mark.parametrize("q_len", [1, None])
def test_long_contexts_are_split_and_short_ones_beside_them_are_not(q_len):
    lens = [(1, 3), (1, 64), (1, 16), (1, 0)] if q_len else [(2, 3), (3, 64), (0, 0), (2, 16), (1, 55)]

    check(make_call(lens, **SMALL), q_len=q_len, block_sizes=dataclasses.replace(BLOCKS, split_keys=16))


def test_a_batch_with_room_for_few_parts_has_longer_ones():
    # 4 parts are wanted of each of two rows, and there is room for two more than tiles.
    few = dataclasses.replace(BLOCKS, split_keys=16, added_parts=2)

    check(make_call([(1, 64), (1, 61), (1, 5)], **SMALL), q_len=1, block_sizes=few)


def test_splits_are_for_few_tiles_over_long_contexts():
    sizes = functools.partial(gpu_block_sizes, **LLAMA_DECODE, target=H200)

    assert sizes(num_rows=1, max_context=32768).num_splits == 32
    assert sizes(num_rows=1, max_context=1024).num_splits == 4
    assert sizes(num_rows=8, max_context=32768).num_splits == 4
    assert sizes(num_rows=16, max_context=32768).num_splits == 2
    assert sizes(num_rows=64, max_context=32768).num_splits == 1
    # 512 queries of 4 heads are 32 tiles for each KV head, which fill the device.
    assert sizes(num_rows=1, queries=512, max_context=32768).num_splits == 1


@pytest.mark.parametrize(("queries", "group", "block_m"), [(1, 1, 16), (1, 71, 128), (5, 8, 64), (128, 4, 64)])
def test_a_tile_holds_at_least_one_query_of_every_head(queries, group, block_m):
    call = LLAMA_DECODE | {"queries": queries, "group": group}
    sizes = gpu_block_sizes(**call, num_rows=1, max_context=4096, target=H200)

    assert sizes.block_m == block_m


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("block_m", 8, "power of two of at least 16"),
        ("block_k", 48, "power of two"),
        ("num_splits", 0, "at least 1"),
        ("split_keys", 0, "1"),
    ],
)
def test_block_sizes_that_no_kernel_has_are_refused(name, value, reason):
    with pytest.raises(ValueError, match=f"{name}={value} must be .*{reason}"):
        dataclasses.replace(BLOCKS, **{name: value})


@pytest.mark.parametrize("num_heads", [17, 48])
def test_query_heads_that_a_tile_has_no_room_for_go_in_several(num_heads):
    sizes: dict[str, Any] = {"num_heads": num_heads, "num_kv_heads": 1, "head_dim": 16, "layout": "gpu"}

    check(make_call([(1, 20), (5, 33), (0, 0)], **sizes), block_sizes=BLOCKS)


def abstract_call(*, dtype="bfloat16", page_dtype="bfloat16", head_dim=64, page_size=16, num_pages=4, layout="gpu"):
    """The arguments of a call of one token, as shapes."""
    shape = jax.ShapeDtypeStruct
    scales = {name: shape((2,), jnp.float32) for name in ("k_scale", "v_scale")}
    return {
        "q": shape((1, 4, head_dim), dtype),
        "k": shape((1, 2, head_dim), dtype),
        "v": shape((1, 2, head_dim), dtype),
        "pages": abstract_pages(num_pages, page_size, 2, head_dim, page_dtype, layout),
        "block_tables": shape((1, 2), jnp.int32),
        "kv_lens": shape((1,), jnp.int32),
        "cu_q_lens": shape((2,), jnp.int32),
        **(scales if jnp.dtype(page_dtype).itemsize == 1 else {}),
    }


def lower(kind, **options):
    """Traces a call for a device that need not be here."""
    device = AbstractDevice(kind, 100, "gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        attend = functools.partial(by_name(paged_attention), scale=1.0, q_len=1, implementation="gpu")
        return jax.eval_shape(attend, **abstract_call(**options))


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("NVIDIA H200", {"layout": "cpu"}, "pages.layout=cpu is not supported.*'gpu'"),
        ("NVIDIA H200", {"dtype": "float32"}, "q.dtype=float32 is not supported.*bfloat16"),
        ("NVIDIA H200", {"page_dtype": "float16"}, "pages.dtype=float16 is not supported.*bfloat16.*int8"),
        ("NVIDIA H200", {"head_dim": 513}, "head_dim=513 is not supported.*513"),
        ("NVIDIA H200", {"page_size": 8}, r"page_size=8 is not supported.*\(16, 32"),
        ("NVIDIA H200", {"page_dtype": "int8", "num_pages": 2**20 + 1}, r"between 2\*\*31 and 2\*\*32"),
        ("NVIDIA A100-SXM4-80GB", {"page_dtype": "float8_e4m3fn"}, "float8_e4m3fn .*capability 8.0.*use int8"),
        ("Tesla T4", {}, "capability 7.5 of 'Tesla T4' is not supported.*8.0 and up"),
        ("Radeon", {}, "device='Radeon' of platform 'gpu' is not supported.*'H200'"),
    ],
)
def test_what_the_kernel_cannot_do_is_refused_by_name(kind, options, reason):
    with pytest.raises(NotImplementedError, match=reason):
        lower(kind, **options)


@pytest.mark.parametrize("page_dtype", ["bfloat16", "int8", "float8_e4m3fn"])
def test_a_call_for_a_gpu_that_is_not_here_is_traced(page_dtype):
    out, pages = lower("NVIDIA L4", page_dtype=page_dtype)

    assert (out.shape, pages.dtype) == ((1, 4, 64), page_dtype)


def test_on_cpu_the_kernel_is_refused_and_the_reference_reads_its_pages():
    call = make_call(DECODE, **SMALL, dtype=jnp.bfloat16)

    with pytest.raises(NotImplementedError, match="device='cpu'"):
        by_name(paged_attention)(**call.arguments, scale=0.25, implementation="gpu")
    out, _ = jax.jit(functools.partial(by_name(paged_attention), scale=0.25))(**call.arguments)
    assert np.isfinite(out.astype(jnp.float32)).all()


def test_a_warning_that_triton_will_go_fails_no_test():
    # What jax says from 0.11 on when it lowers a Triton kernel, which it does not do for a CPU.
    warnings.warn("The Pallas Triton backend is deprecated and will be removed.", DeprecationWarning, stacklevel=1)
