"""Pages belong to engines on one kind of CPU."""

from __future__ import annotations

import jax
import pytest

from jaxinfer.checkpoint import load_checkpoint
from jaxinfer.config import CacheConfig
from jaxinfer.engine import identity
from jaxinfer.engine.llm import BUNDLED_MODEL

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="other devices are named by their kind")


def test_a_page_is_of_no_use_on_another_cpu(monkeypatch):
    _, config = load_checkpoint(BUNDLED_MODEL)
    cache_config = CacheConfig(num_pages=1, page_size=16)
    here, again = (identity.page_identity(BUNDLED_MODEL, config, cache_config, None) for _ in range(2))
    monkeypatch.setattr(identity, "describe_cpu", lambda: "another CPU, avx2")
    elsewhere = identity.page_identity(BUNDLED_MODEL, config, cache_config, None)

    assert here == again
    assert {aspect for aspect in here if here[aspect] != elsewhere[aspect]} == {"platform"}
