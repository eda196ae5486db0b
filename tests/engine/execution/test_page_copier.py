"""Pages as bytes: out of the cache and in again nothing changes, whatever the layout, and nothing else does either."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.engine.execution.page_copier import PageCopier
from jaxinfer.model.cache import abstract_cache, init_cache, page_bytes
from tests.model.test_cache import CACHE, CONFIG

P = 12
POOL = dataclasses.replace(CACHE, num_pages=P)
KINDS = [("cpu", "float32"), ("gpu", "bfloat16"), ("tpu", "bfloat16")]


def make(layout="cpu", dtype="float32", widths=(1, 8)):
    pool = dataclasses.replace(POOL, dtype=dtype)
    rng = np.random.default_rng(0)
    cache = jax.tree.map(
        lambda a: jnp.asarray(rng.integers(0, 100, a.shape), a.dtype), init_cache(CONFIG, pool, layout)
    )
    return cache, PageCopier(abstract_cache(CONFIG, pool, layout), CONFIG, widths)


def pages_of(cache) -> list[bytes]:
    """What each page holds in all layers: layer i of n has page p at i * P + p."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(cache)]
    return [b"".join(leaf[i].tobytes() for leaf in leaves for i in range(p, len(leaf), P)) for p in range(P)]


@pytest.mark.parametrize(("layout", "dtype"), KINDS)
def test_a_content_is_what_the_page_holds_in_all_layers(layout, dtype):
    cache, copier = make(layout, dtype)

    contents = copier.read(cache, [11, *range(9)])

    pages = pages_of(cache)
    assert [content.tobytes() for content in contents] == [pages[i] for i in (11, *range(9))]
    num_bytes = page_bytes(CONFIG, dataclasses.replace(POOL, dtype=dtype), layout)
    assert {(content.dtype.name, content.size) for content in contents} == {("uint8", num_bytes)}


@pytest.mark.parametrize(("layout", "dtype"), KINDS)
@pytest.mark.parametrize("targets", [[7], [7, 0, 3]])
def test_contents_go_onto_their_pages_and_nowhere_else(layout, dtype, targets):
    cache, copier = make(layout, dtype)
    before, sources = pages_of(cache), [1, 2, 11][: len(targets)]

    after = pages_of(copier.insertion(targets, copier.read(cache, sources))(cache))

    moved = dict(zip(targets, sources, strict=True))
    assert after == [before[moved.get(page, page)] for page in range(P)]


def test_a_page_is_duplicated_within_the_pool():
    cache, copier = make(widths=(1,))
    before = pages_of(cache)

    after = pages_of(copier.duplicate(cache, 3, 5))

    assert after == [before[3 if page == 5 else page] for page in range(P)]
