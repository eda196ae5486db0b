"""What `paged_attention` refuses, and whom it asks."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from kernels_pallas.paged_attention import abstract_pages, api, paged_attention
from kernels_pallas.paged_attention.api import IMPLEMENTATIONS
from scripts.kernels.named_calls import by_name
from tests.kernels.paged_attention.oracle import expected_output, make_call

SMALL: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}


def test_an_unknown_implementation_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="implementation='cuda' is unknown; choose from .*'reference'"):
        by_name(paged_attention)(**make_call([(1, 1)], **SMALL).arguments, scale=1.0, implementation="cuda")


def test_an_unknown_implementation_of_a_long_name_is_cut_in_the_error():
    with pytest.raises(ValueError, match="implementation='a{79} is unknown"):
        by_name(paged_attention)(**make_call([(1, 1)], **SMALL).arguments, scale=1.0, implementation="a" * 10_000)


def test_a_call_that_the_named_implementation_cannot_do_says_why(monkeypatch):
    def refuse(*args, **kwargs):
        raise NotImplementedError("head_dim=16 is not a multiple of 128")

    monkeypatch.setitem(IMPLEMENTATIONS, "picky", refuse)
    with pytest.raises(NotImplementedError, match="head_dim=16"):
        by_name(paged_attention)(**make_call([(1, 1)], **SMALL).arguments, scale=1.0, implementation="picky")


def refusing(*args, **kwargs):
    raise NotImplementedError("it may not be asked")


def traced_for(platform, kind, *, dtype="bfloat16", table_shape=(1, 4), **options):
    """Traces a call of one token for a device that need not be here, over pages of its layout."""
    B, M = table_shape
    shape = jax.ShapeDtypeStruct
    arguments = {
        "q": shape((B, 4, 64), dtype),
        "k": shape((B, 2, 64), dtype),
        "v": shape((B, 2, 64), dtype),
        "pages": abstract_pages(4, 16, 2, 64, dtype, platform),
        "block_tables": shape((B, M), jnp.int32),
        "kv_lens": shape((B,), jnp.int32),
        "cu_q_lens": shape((B + 1,), jnp.int32),
    }
    mesh = AbstractMesh((), (), abstract_device=AbstractDevice(kind, 1, platform))
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.eval_shape(functools.partial(by_name(paged_attention), scale=1.0, q_len=1, **options), **arguments)


@pytest.mark.parametrize(
    ("platform", "kind", "name"),
    [
        ("gpu", "NVIDIA H200", "gpu"),
        ("gpu", "Tesla T4", "reference"),
        ("tpu", "TPU v6 lite", "tpu"),
        ("cpu", "some other CPU", "reference"),
    ],
)
def test_an_unnamed_implementation_is_the_one_of_the_device(platform, kind, name, monkeypatch):
    one = {name: IMPLEMENTATIONS[name]}
    monkeypatch.setattr(api, "IMPLEMENTATIONS", dict.fromkeys(IMPLEMENTATIONS, refusing) | one)

    out, _ = traced_for(platform, kind)

    assert out.shape == (1, 4, 64)


WAY_OUT = r'.*many times slower, by implementation="reference" \(of an engine EngineConfig\.attention\)'


@pytest.mark.parametrize(
    ("platform", "kind", "options", "reason"),
    [
        ("gpu", "NVIDIA H200", {"dtype": "float32"}, "the gpu kernels .* q.dtype=float32 is not supported"),
        ("gpu", "Radeon", {}, "the gpu kernels .* device='Radeon'"),
        ("tpu", "TPU v4", {}, "TPU v4 has too little vector memory for the TPU kernels; use a v5e or later"),
        (
            "tpu",
            "TPU v6 lite",
            {"table_shape": (64, 2049)},
            r"block_tables \(64, 2049\) .* take 524544 bytes .* there are 524288; lower .*max_num_seqs.*max_model_len"
            ".*page_size",
        ),
    ],
)
def test_what_the_kernels_of_an_accelerator_cannot_do_is_no_business_of_the_reference(platform, kind, options, reason):
    with pytest.raises(NotImplementedError, match=reason + WAY_OUT):
        traced_for(platform, kind, **options)

    out, _ = traced_for(platform, kind, **options, implementation="reference")
    assert out.shape[1:] == (4, 64)


@pytest.mark.parametrize("layout", ["cpu", "gpu", "tpu"])
def test_on_a_cpu_the_reference_reads_pages_of_every_layout(layout):
    call = make_call([(1, 33), (1, 1)], **SMALL, layout=layout)

    out, _ = jax.jit(functools.partial(by_name(paged_attention), scale=0.25, q_len=1))(**call.arguments)

    np.testing.assert_allclose(out, expected_output(call, 0.25), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("k", (2, 4, 16)),
        ("v", (1, 2, 16)),
        ("q", (2, 4, 24)),
        ("q", (2, 3, 16)),
        ("block_tables", (3, 4)),
        ("kv_lens", (3,)),
        ("cu_q_lens", (2,)),
        ("sinks", (2,)),
        ("k_scale", (4,)),
        ("v_scale", ()),
        ("tree_mask", (3, 1)),
    ],
    ids=str,
)
def test_shapes_that_do_not_fit_together_are_refused_with_all_of_them(name, shape):
    arguments = make_call([(1, 1), (1, 2)], **SMALL).arguments

    with pytest.raises(ValueError, match=f"shapes do not fit together: .*{name}"):
        by_name(paged_attention)(**{**arguments, name: np.zeros(shape, np.float32)}, scale=1.0)


@pytest.mark.parametrize("name", ["k", "v"])
def test_keys_without_values_and_the_reverse_are_refused(name):
    arguments = make_call([(1, 1)], **SMALL).arguments

    with pytest.raises(ValueError, match="k and v must both be given"):
        by_name(paged_attention)(**{**arguments, name: None}, scale=1.0)


def test_integer_pages_without_scales_are_refused():
    arguments = make_call([(1, 1)], **SMALL, page_dtype=jnp.int8, scales=(np.ones(2), np.ones(2))).arguments

    with pytest.raises(ValueError, match="pages of int8 hold multiples of k_scale and v_scale; give both"):
        by_name(paged_attention)(**{**arguments, "v_scale": None}, scale=1.0)


def test_scales_of_heads_are_refused_for_pages_with_scales_of_tokens():
    arguments = make_call([(1, 1)], **SMALL, page_dtype=jnp.int8, has_scales=True).arguments

    with pytest.raises(ValueError, match="have a scale for each token; leave out k_scale and v_scale"):
        by_name(paged_attention)(**arguments, k_scale=jnp.ones(2), scale=1.0)


def test_pages_of_int4_have_no_tpu_kernel_and_the_refusal_says_what_has():
    arguments = make_call([(1, 1)], **SMALL, page_size=32, page_dtype=jnp.int4, has_scales=True, layout="tpu").arguments

    with pytest.raises(NotImplementedError, match="pages of int4 have no TPU kernel; .*cache_dtype='int8' or 'fp8'"):
        by_name(paged_attention)(**arguments, scale=1.0, implementation="tpu_interpret")


def test_a_mesh_of_explicit_axes_is_refused():
    mesh = jax.make_mesh((1,), ("model",), axis_types=(AxisType.Explicit,))

    with pytest.raises(ValueError, match=r"mesh has axes of types .*Explicit.*; use automatic ones: Mesh"):
        by_name(paged_attention)(**make_call([(1, 1)], **SMALL).arguments, scale=1.0, mesh=mesh)


def test_a_window_of_nothing_is_refused():
    with pytest.raises(ValueError, match="window=0 is not allowed"):
        by_name(paged_attention)(**make_call([(1, 1)], **SMALL).arguments, scale=1.0, window=0)
