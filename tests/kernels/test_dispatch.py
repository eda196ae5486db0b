"""The choice among implementations: what a kernel refuses on a GPU is computed with a warning, elsewhere silently."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from kernels_pallas.grouped_matmul import grouped_matmul
from kernels_pallas.quantized_matmul import quantized_matmul


def trace(kind: str, platform: str, function: Any, *shapes: tuple[tuple[int, ...], str]) -> Any:
    """Traces a call for a device that need not be here; returns the shape of its result."""
    device = AbstractDevice(kind, 100, platform)
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        return jax.eval_shape(function, *(jax.ShapeDtypeStruct(*shape) for shape in shapes)).shape


def experts(dtype: str = "bfloat16", rows: int = 8) -> tuple:
    return (grouped_matmul, ((rows, 64), dtype), ((3, 32, 64), dtype), ((3,), "int32"))


def quantized(dtype: str = "bfloat16", groups: int = 2) -> tuple:
    return (quantized_matmul, ((8, 256), dtype), ((32, 256), "int8"), ((32, groups), "float32"))


@pytest.mark.parametrize(
    ("kind", "call", "reason"),
    [
        ("Tesla T4", experts(), "grouped_matmul_gpu: compute capability 7.5 of 'Tesla T4' is not supported"),
        ("NVIDIA H200", experts("float64"), "grouped_matmul_gpu: rows.dtype=float64 is not supported.*bfloat16"),
        ("NVIDIA H200", quantized("float32"), "quantized_matmul_gpu: x.dtype=float32 is not supported.*bfloat16"),
        ("NVIDIA H200", quantized(groups=16), "quantized_matmul_gpu: group size=16 is not supported.*32"),
        ("Radeon", quantized(), "quantized_matmul_gpu: device='Radeon' of platform 'gpu' is not supported"),
    ],
)
def test_on_a_gpu_plain_jax_takes_the_place_of_a_kernel_with_a_warning(kind, call, reason):
    with jax.enable_x64(True), pytest.warns(RuntimeWarning, match=f"plain JAX takes the place of {reason}"):
        assert trace(kind, "gpu", *call) == (8, 32)


@pytest.mark.parametrize(
    ("kind", "platform", "call"),
    [
        ("cpu", "cpu", experts()),
        ("TPU v6 lite", "tpu", experts()),
        ("TPU v6 lite", "tpu", quantized("float32")),
        ("NVIDIA H200", "gpu", quantized(groups=1)),
        ("Tesla T4", "gpu", quantized()),
        ("NVIDIA H200", "gpu", experts(rows=0)),
    ],
)
def test_where_plain_jax_is_as_good_or_alone_it_serves_without_a_word(kind, platform, call):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert trace(kind, platform, *call)[1] == 32


def test_a_text_is_shown_once_by_python_s_default_filter():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for _ in range(3):
            # A partial is a new function, which jax traces anew.
            trace("Tesla T4", "gpu", functools.partial(grouped_matmul), *experts(rows=24)[1:])

    assert len(seen) == 1


def test_a_named_kernel_still_refuses_what_it_cannot_do():
    with pytest.raises(NotImplementedError, match="capability 7.5"):
        trace("Tesla T4", "gpu", functools.partial(grouped_matmul, implementation="gpu"), *experts()[1:])


def test_float32_experts_have_a_kernel():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert trace("NVIDIA H200", "gpu", *experts("float32")) == (8, 32)
