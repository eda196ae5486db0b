"""What `paged_attention` refuses, and whom it asks."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.paged_attention import paged_attention
from kernels_pallas.paged_attention.api import IMPLEMENTATIONS
from tests.kernels.paged_attention.oracle import make_call

SMALL: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}


def test_an_unknown_implementation_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="implementation='cuda' is unknown; choose from .*'reference'"):
        paged_attention(**make_call([(1, 1)], **SMALL).arguments, scale=1.0, implementation="cuda")


def test_a_call_that_the_named_implementation_cannot_do_says_why(monkeypatch):
    def refuse(*args, **kwargs):
        raise NotImplementedError("head_dim=16 is not a multiple of 128")

    monkeypatch.setitem(IMPLEMENTATIONS, "picky", refuse)
    with pytest.raises(NotImplementedError, match="head_dim=16"):
        paged_attention(**make_call([(1, 1)], **SMALL).arguments, scale=1.0, implementation="picky")


def test_an_unnamed_implementation_is_the_first_that_can(monkeypatch):
    def refuse(*args, **kwargs):
        raise NotImplementedError("not here")

    order = {"picky": refuse, "able": lambda *args, **kwargs: "able was asked"}
    monkeypatch.setattr("kernels_pallas.paged_attention.api.IMPLEMENTATIONS", order)

    assert paged_attention(**make_call([(1, 1)], **SMALL).arguments, scale=1.0) == "able was asked"


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
        paged_attention(**{**arguments, name: np.zeros(shape, np.float32)}, scale=1.0)


@pytest.mark.parametrize("name", ["k", "v"])
def test_keys_without_values_and_the_reverse_are_refused(name):
    arguments = make_call([(1, 1)], **SMALL).arguments

    with pytest.raises(ValueError, match="k and v must both be given"):
        paged_attention(**{**arguments, name: None}, scale=1.0)


def test_integer_pages_without_scales_are_refused():
    arguments = make_call([(1, 1)], **SMALL, page_dtype=jnp.int8, scales=(np.ones(2), np.ones(2))).arguments

    with pytest.raises(ValueError, match="pages of int8 hold multiples of k_scale and v_scale; give both"):
        paged_attention(**{**arguments, "v_scale": None}, scale=1.0)


def test_a_window_of_nothing_is_refused():
    with pytest.raises(ValueError, match="window=0 is not allowed"):
        paged_attention(**make_call([(1, 1)], **SMALL).arguments, scale=1.0, window=0)
