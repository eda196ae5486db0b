"""The limits that a configuration leaves to the device: by its memory, its bandwidth and the size of the model."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.checkpoint.published import published_config
from jaxinfer.config import EngineConfig
from jaxinfer.model.params import abstract_params
from jaxinfer.plan.cache import MemoryQuestion
from jaxinfer.plan.limits import describe_limits, fit_limits, fitting_loop_steps
from jaxinfer.plan.memory import num_bytes
from jaxinfer.plan.step_shapes import plan_buckets, plan_draws

SMALL, LARGE = published_config("Qwen3-0.6B"), published_config("Llama-3-8B")


@pytest.fixture
def on(monkeypatch):
    """Makes the default device one of a kind and platform, with some free bytes."""

    def set_device(kind, platform, free_bytes):
        stats = {"bytes_limit": free_bytes, "bytes_in_use": 0}
        device = SimpleNamespace(device_kind=kind, platform=platform, memory_stats=lambda: stats)
        monkeypatch.setattr(jax, "default_backend", lambda: platform)
        for name in ("devices", "local_devices"):
            monkeypatch.setattr(jax, name, lambda *_: [device])

    return set_device


def fitted(model=SMALL, *, speculates=False, **limits):
    params = abstract_params(model, jnp.bfloat16)
    options = {"param_bytes": num_bytes(params), "speculates": speculates}
    return fit_limits(MemoryQuestion(model=model, config=EngineConfig(**limits), dtype="bfloat16", **options))


def numbers(config):
    return config.max_num_seqs, config.max_num_batched_tokens, config.max_mixed_tokens, config.decode_loop_steps


def test_a_cpu_keeps_small_steps():
    assert numbers(fitted()) == (32, 512, 128, 1)


@pytest.mark.parametrize(
    ("kind", "platform", "free_bytes", "model", "expected"),
    [
        ("NVIDIA H200", "gpu", 140e9, SMALL, (256, 2048, 2048, 4)),
        ("NVIDIA H200", "gpu", 140e9, LARGE, (256, 2048, 2048, 1)),  # a step takes as long as its launch
        ("NVIDIA L4", "gpu", 22e9, LARGE, (32, 2048, 2048, 1)),  # room for no more pages
        ("NVIDIA L4", "gpu", 22e9, SMALL, (128, 2048, 2048, 1)),
        ("TPU v6 lite", "tpu", 31e9, SMALL, (128, 2048, 2048, 4)),
        ("TPU v5 lite", "tpu", 15e9, SMALL, (64, 2048, 2048, 2)),
        ("a new GPU", "gpu", 80e9, SMALL, (256, 2048, 2048, 2)),
    ],
    ids=str,
)
def test_an_accelerator_takes_the_rows_that_fit_and_loops_over_short_steps(
    on, kind, platform, free_bytes, model, expected
):
    on(kind, platform, int(free_bytes))

    assert numbers(fitted(model)) == expected


def test_what_is_given_is_kept(on):
    on("NVIDIA H200", "gpu", 140 * 10**9)

    assert numbers(fitted(max_num_seqs=7, decode_loop_steps=3)) == (7, 2048, 2048, 3)
    assert numbers(fitted(max_num_batched_tokens=40)) == (40, 40, 40, 4)
    assert numbers(fitted(cache_bytes=10**9))[0] == 32
    assert numbers(fitted(num_pages=100 * 8))[0] == 64  # eight pages have 1,024 tokens
    assert numbers(fitted(speculates=True))[::3] == (32, 1)


def test_a_loop_takes_five_milliseconds_at_most():
    assert [fitting_loop_steps(ms / 1e3) for ms in (0.1, 0.6, 1.2, 2.4, 2.6, 40)] == [8, 8, 4, 2, 1, 1]


def test_the_limits_are_told_in_a_line(on):
    on("NVIDIA H200", "gpu", 140 * 10**9)

    told = describe_limits(fitted())

    assert (
        told
        == "NVIDIA H200 with 130.4 GiB for JAX: up to 256 requests and 2048 tokens in a step, decode loops of 4 steps"
    )
    assert describe_limits(fitted(cache_dtype="fp8")) == f"{told}, keys and values in fp8"


def test_a_cache_in_few_bits_has_room_for_more_rows(on):
    on("NVIDIA L4", "gpu", int(22e9))

    rows = [numbers(fitted(cache_dtype=dtype))[0] for dtype in (None, "int8", "fp8")]

    assert rows == [128, 256, 256]


def test_start_up_compiles_few_shapes(on):
    def count():
        buckets = plan_buckets(fitted())
        return len(buckets) + len(plan_draws(buckets))

    assert count() == 8
    on("NVIDIA H200", "gpu", 140 * 10**9)
    assert count() == 17  # loops, and filtered draws
