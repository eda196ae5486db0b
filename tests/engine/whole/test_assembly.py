"""What cannot be planned is refused before any weight is loaded."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from jax.sharding import AbstractMesh

from jaxinfer.config import EngineConfig
from jaxinfer.engine import device_choice
from jaxinfer.engine.assembly import plan_tiers, plan_window
from jaxinfer.engine.device_choice import refuse_exact
from jaxinfer.engine.kv_cache.attention_window import AttentionWindow
from jaxinfer.model.components.attention import Attention
from jaxinfer.model.config import LayerGroup, uniform_decoder
from jaxinfer.parallel.placement import Placement
from jaxinfer.plan.cache import MemoryQuestion, plan_cache
from kernels_pallas.device import Device
from tests.replay import SMALL_MODEL, SMALL_SIZES  # of 64 positions

CONFIGS = {
    "host_cache_bytes": EngineConfig(host_cache_bytes=99),
    "disk_cache_bytes": EngineConfig(disk_cache_bytes=99, disk_cache_path="not made"),
}


@pytest.mark.parametrize(("name", "config"), CONFIGS.items(), ids=CONFIGS)
def test_a_tier_that_cannot_hold_a_page_is_refused(name, config):
    with pytest.raises(ValueError, match=f"{name}=99 is less than one page of 100 bytes; raise EngineConfig.{name}"):
        plan_tiers(config, 100)


def test_tiers_are_those_that_are_configured_the_host_first(tmp_path):
    both = plan_tiers(EngineConfig(host_cache_bytes=9, disk_cache_bytes=9, disk_cache_path=str(tmp_path)), 9)

    assert plan_tiers(EngineConfig(), 9) is None
    assert both is not None
    assert [tier.name for tier in both.metrics()] == ["host", "disk"]


EXACT = EngineConfig(exact=True)
H200, V6E = Device("NVIDIA H200", "gpu", 132, 9.0), Device("TPU v6 lite", "tpu", None, None)
NOT_EXACT: dict[str, tuple[Device, EngineConfig, str]] = {
    "device 'Tesla T4'": (Device("Tesla T4", "gpu", 40, 7.5), EXACT, "float16"),
    "device 'NVIDIA B200'": (Device("NVIDIA B200", "gpu", 148, 10.0), EXACT, "bfloat16"),
    "device 'TPU v6 lite'": (V6E, EXACT, "bfloat16"),
    "dtype=float32": (H200, EXACT, "float32"),
    "cache_dtype='int4'": (H200, replace(EXACT, cache_dtype="int4"), "bfloat16"),
    "attention='reference'": (H200, replace(EXACT, attention="reference"), "bfloat16"),
    "max_adapters=2": (H200, replace(EXACT, max_adapters=2), "bfloat16"),
    "draft_trees=True": (H200, replace(EXACT, draft_trees=True), "bfloat16"),
}


@pytest.mark.parametrize("what", NOT_EXACT)
def test_exact_sums_are_refused_where_they_are_not_built(monkeypatch, what):
    device, config, dtype = NOT_EXACT[what]
    monkeypatch.setattr(device_choice, "device_at_hand", lambda: device)

    with pytest.raises(ValueError, match=re.escape(f"exact=True is not built for {what}; ")):
        refuse_exact(config, dtype, Placement())
    refuse_exact(replace(config, exact=False), dtype, Placement())


def test_exact_sums_are_taken_by_gpus_since_ampere_and_by_a_cpu_with_any_option(monkeypatch):
    refuse_exact(replace(EXACT, quantization="int8", draft_trees=True), "float32", Placement())
    monkeypatch.setattr(device_choice, "device_at_hand", lambda: H200)
    refuse_exact(replace(EXACT, quantization="int8"), "bfloat16", Placement())
    two: Any = AbstractMesh((2,), ("model",))
    with pytest.raises(ValueError, match="exact=True is not built for 2 devices; give"):
        refuse_exact(EXACT, "bfloat16", Placement(two))


SINKS: dict[str, Any] = {"num_sink_tokens": 16, "page_size": 16, "max_num_seqs": 3}
REFUSED = {
    "no whole pages of sinks": (
        {"num_sink_tokens": 8},
        {},
        "=8 and max_model_len=64 must be multiples of page_size=16",
    ),
    "no whole pages": ({"max_model_len": 40}, {}, "=16 and max_model_len=40 must be multiples of page_size=16"),
    "only sinks": (
        {"num_sink_tokens": 48},
        {},
        "=48 leave 16 of max_model_len=64 tokens .* two pages of 16 are the least",
    ),
    "a window of its own": (
        {},
        {"sliding_window": 20},
        "=16 is not for this model, whose own window of 20 tokens hides",
    ),
}


def question_of(model=SMALL_MODEL, *, drafter=None, **limits):
    return MemoryQuestion(model=model, config=EngineConfig(**{**SINKS, **limits}), dtype="float32", drafter=drafter)


@pytest.mark.parametrize(("limits", "model", "message"), REFUSED.values(), ids=REFUSED)
def test_endless_requests_are_refused_where_they_cannot_be(limits, model, message):
    with pytest.raises(ValueError, match=message):
        plan_cache(question_of(uniform_decoder(**SMALL_SIZES, **model), **limits))


def test_endless_requests_are_refused_if_keys_get_a_norm_after_their_rotation():
    layer = SMALL_MODEL.layers[0]
    assert isinstance(layer.mixer, Attention)
    mixer = replace(layer.mixer, qk_norm="head", has_rotated_norm=True)
    model = replace(SMALL_MODEL, groups=(LayerGroup((replace(layer, mixer=mixer),), 2),))
    with pytest.raises(ValueError, match="=16 turns the keys .* a norm after their rotation; leave .*num_sink_tokens"):
        plan_cache(question_of(model))


def test_endless_requests_are_refused_beside_a_draft_model():
    drafter: Any = SimpleNamespace(page_bytes=lambda _: 100)
    with pytest.raises(
        ValueError, match="leaves no place for a draft model.*or speculate by n-grams, suffixes or what"
    ):
        plan_cache(question_of(drafter=drafter))


def test_each_row_of_endless_requests_has_pages_for_its_sinks_as_they_are_and_turned():
    question = question_of(num_sink_tokens=32)

    assert plan_window(question) == AttentionWindow(num_kept=1, most=6, num_sinks=2)
    assert plan_cache(question).num_pages == 3 * 6
