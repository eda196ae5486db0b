"""Every implementation of latent attention against the definition of attention, kernels interpreted on CPU."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh

from kernels_pallas.latent_attention import abstract_latents, api, latent_attention, move_latents
from kernels_pallas.latent_attention.api import IMPLEMENTATIONS
from kernels_pallas.latent_attention.gpu import latent_attention_gpu, latent_block_sizes
from kernels_pallas.latent_attention.layout import read_slots
from kernels_pallas.latent_attention.reference import latent_attention_reference
from kernels_pallas.latent_attention.tpu import latent_attention_tpu
from kernels_pallas.paged_attention.gpu.block_sizes import GpuBlockSizes
from kernels_pallas.paged_attention.tpu.block_sizes import Blocks
from kernels_pallas.triton import Target
from scripts.kernels.named_calls import by_name
from tests.kernels.latent_attention.oracle import as_keys, make_latent_call
from tests.kernels.paged_attention.blocks import IN_BLOCKS
from tests.kernels.paged_attention.oracle import check_pages, expected_output, tree_of, tree_words

LAYOUTS = {"reference": "cpu", "gpu_interpret": "gpu", "tpu_interpret": "tpu"}
RAGGED = [(7, 23), (0, 0), (1, 17), (37, 64), (1, 1), (5, 5), (1, 0)]
DECODE = [(1, 1), (1, 15), (1, 16), (1, 17), (1, 0), (1, 64)]
# A page of 16 slots; the latent of the second fills whole rows of lanes, as DeepSeek's does.
SIZES = {"4 heads, 28 + 6": (4, 28, 6), "18 heads, 128 + 16": (18, 128, 16)}


def check(call, attend, *, trees=None, tolerance=2e-5, **options):
    pages = call.arguments["pages"]
    attend = jax.jit(functools.partial(attend, scale=0.25, **options))

    out, new = attend(**call.arguments)

    expected = expected_output(call, 0.25, trees=trees)[..., : pages.latent_size]
    is_real = ~np.isnan(expected)
    actual = np.asarray(out)[: call.num_tokens].astype(np.float32)
    np.testing.assert_allclose(actual[is_real], expected[is_real], rtol=tolerance, atol=tolerance)
    check_pages(call, as_keys(pages), as_keys(new))


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("lens", "q_len"), [(RAGGED, None), (DECODE, 1), ([(5, 40), (5, 5), (2, 33)], 5)])
@pytest.mark.parametrize("implementation", LAYOUTS)
def test_a_batch_is_the_attention_of_each_row_alone(implementation, lens, q_len, sizes):
    num_heads, latent_size, rotary_size = SIZES[sizes]
    widths: dict[str, Any] = {"num_heads": num_heads, "latent_size": latent_size, "rotary_size": rotary_size}
    call = make_latent_call(lens, LAYOUTS[implementation], **widths, num_padding=0 if q_len else 3)

    check(call, functools.partial(by_name(latent_attention), implementation=implementation), q_len=q_len)


@pytest.mark.parametrize("implementation", LAYOUTS)
def test_a_draft_sees_the_context_and_its_own_ancestors(implementation):
    trees = [tree_of([-1, 0, 0, 1, 2, 2]), tree_of([-1, 0, 1, 1])]
    call = make_latent_call([(6, 40), (4, 20)], LAYOUTS[implementation])
    call = call.with_options(tree_mask=tree_words(trees, 10))

    check(call, functools.partial(by_name(latent_attention), implementation=implementation), trees=trees, q_len=6)


@pytest.mark.parametrize(("lens", "q_len"), [(RAGGED, None), (DECODE, 1)])
@pytest.mark.parametrize(
    ("implementation", "layout", "dtype"),
    [
        *(("reference", layout, "int4") for layout in LAYOUTS.values()),
        ("reference", "cpu", "int8"),
        ("gpu_interpret", "gpu", "int8"),
        ("gpu_interpret", "gpu", "int4"),
    ],
)
def test_latents_and_rotated_keys_of_integers_have_scales_of_their_own(implementation, layout, dtype, lens, q_len):
    # 28 and 7 numbers make an odd number of halves of bytes.
    call = make_latent_call(lens, layout, rotary_size=7, scaled_dtype=dtype)

    check(call, functools.partial(by_name(latent_attention), implementation=implementation), q_len=q_len)


def test_drafts_of_a_tree_read_latents_by_their_own_scales():
    trees = [tree_of([-1, 0, 0, 1, 2, 2]), tree_of([-1, 0, 1, 1])]
    call = make_latent_call([(6, 40), (4, 20)], "cpu", scaled_dtype="int4").with_options(
        tree_mask=tree_words(trees, 10)
    )

    check(call, functools.partial(by_name(latent_attention), implementation="reference"), trees=trees, q_len=6)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_latents_of_integers_move_with_their_scales(dtype):
    call = make_latent_call([(1, 3), (1, 2)], "cpu", scaled_dtype=dtype)
    (first, second), pages = call.slots, call.arguments["pages"]

    moved = move_latents(pages, jnp.asarray(first[:1]), jnp.asarray(second[1:]))

    old, new = (np.asarray(read_slots(pool, jnp.arange(pool.num_pages * pool.page_size))[0]) for pool in (pages, moved))
    np.testing.assert_array_equal(new[second[1]], old[first[0]])
    np.testing.assert_array_equal(np.delete(new, second[1], axis=0), np.delete(old, second[1], axis=0))


@pytest.mark.parametrize("blocks", IN_BLOCKS)
@pytest.mark.parametrize(("lens", "q_len"), [(RAGGED, None), (DECODE, 1)])
def test_a_gpu_without_kernels_attends_to_each_row_in_blocks(lens, q_len, blocks):
    call = make_latent_call(lens, "gpu", num_heads=18)

    check(call, functools.partial(by_name(latent_attention_reference), attend=IN_BLOCKS[blocks]), q_len=q_len)


@pytest.mark.parametrize("implementation", ["gpu_interpret", "tpu_interpret"])
def test_a_page_offset_selects_the_layer_and_bfloat16_is_added_up_in_float32(implementation):
    call = make_latent_call([(1, 40), (3, 20)], LAYOUTS[implementation], dtype=jnp.bfloat16, page_dtype=jnp.bfloat16)
    call = call.with_options(block_tables=call.arguments["block_tables"] - 3, page_offset=3)

    check(call, functools.partial(by_name(latent_attention), implementation=implementation), tolerance=0.03)


@pytest.mark.parametrize(("block_m", "block_k", "num_splits"), [(16, 16, 3), (32, 64, 1), (64, 16, 2)])
def test_gpu_tiles_of_any_size_and_splits_give_the_same(block_m, block_k, num_splits):
    blocks = GpuBlockSizes(
        block_m=block_m,
        block_k=block_k,
        num_splits=num_splits,
        split_keys=2048,
        added_parts=64,
        num_warps=4,
        num_stages=2,
    )
    attend = functools.partial(by_name(latent_attention_gpu), block_sizes=blocks, interpret=True)

    check(make_latent_call(RAGGED, "gpu", num_heads=20), attend)


def test_tpu_blocks_of_several_pages_give_the_same():
    attend = functools.partial(
        by_name(latent_attention_tpu), blocks=Blocks(pages=2, buffers=3, queries=8), interpret=pltpu.InterpretParams()
    )

    check(make_latent_call(RAGGED, "tpu", num_heads=20), attend)


def abstract_call(dtype="bfloat16", *, layout, latent_size=512, page_dtype=None, page_size=64):
    shape = jax.ShapeDtypeStruct
    return {
        "q": shape((2, 16, latent_size + 64), dtype),
        "latents": shape((2, latent_size + 64), dtype),
        "pages": abstract_latents(
            4, page_size, latent_size, 64, page_dtype or dtype, layout, has_scales=page_dtype == "int8"
        ),
        "block_tables": shape((2, 2), jnp.int32),
        "kv_lens": shape((2,), jnp.int32),
        "cu_q_lens": shape((3,), jnp.int32),
    }


def traced_for(kind, layout, *, called="gpu", **options):
    mesh = AbstractMesh((), (), abstract_device=AbstractDevice(kind, 100, called))
    with jax.sharding.use_abstract_mesh(mesh):
        attend = functools.partial(by_name(latent_attention), scale=1.0, q_len=1)
        return jax.eval_shape(attend, **abstract_call(layout=layout, **options))


@pytest.mark.parametrize(
    ("platform", "kind", "name"),
    [("gpu", "NVIDIA H200", "gpu"), ("gpu", "Tesla T4", "reference"), ("tpu", "TPU v6 lite", "tpu")],
)
def test_an_unnamed_implementation_is_the_one_of_the_device(platform, kind, name, monkeypatch):
    def refusing(*args, **kwargs):
        raise NotImplementedError("it may not be asked")

    others = dict.fromkeys(IMPLEMENTATIONS, refusing) | {name: IMPLEMENTATIONS[name]}
    monkeypatch.setattr(api, "IMPLEMENTATIONS", others)

    out, pages = traced_for(kind, platform, called=platform)

    assert out.shape == (2, 16, 512)
    assert pages.width == 576


@pytest.mark.parametrize(
    ("kind", "layout", "options", "reason"),
    [
        ("NVIDIA H200", "gpu", {"latent_size": 513}, "latent_size=513 is not supported"),
        ("NVIDIA H200", "gpu", {"dtype": "float32"}, "q.dtype=float32 is not supported"),
        ("NVIDIA H200", "gpu", {"page_dtype": "float16"}, "pages.dtype=float16 is not supported"),
        (
            "NVIDIA A100-SXM4-80GB",
            "gpu",
            {"page_dtype": "float8_e4m3fn"},
            "8.0.*use int8 or int4 or bfloat16",
        ),
        ("TPU v6 lite", "cpu", {}, "pages of layout 'tpu', not of 576 numbers per token"),
        ("TPU v6 lite", "tpu", {"page_dtype": "float8_e4m3fn"}, "pages of float8_e4m3fn have no TPU kernel"),
        ("TPU v6 lite", "tpu", {"page_dtype": "int8"}, "pages of int8 have no TPU kernel"),
        ("TPU v4", "tpu", {}, "TPU v4 has too little vector memory"),
    ],
)
def test_what_a_kernel_cannot_do_is_refused_by_name_with_a_way_out(kind, layout, options, reason):
    called = "tpu" if kind.startswith("TPU") else "gpu"

    with pytest.raises(NotImplementedError, match=f'of latent attention .*{reason}.*implementation="reference"'):
        traced_for(kind, layout, called=called, **options)


def test_a_gpu_splits_the_context_of_few_rows_over_many_programs():
    target = Target("NVIDIA H200", 132, 9.0)
    sizes = functools.partial(latent_block_sizes, queries=1, has_scales=False, target=target)

    # 128 heads are two tiles of 64.
    assert sizes(num_rows=1, num_heads=128, max_context=8192).num_splits == 32
    assert sizes(num_rows=4, num_heads=128, max_context=8192).num_splits == 16
    assert sizes(num_rows=64, num_heads=128, max_context=8192).num_splits == 1
    assert sizes(num_rows=512, num_heads=16, max_context=8192).num_splits == 1
