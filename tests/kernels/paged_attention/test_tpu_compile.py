"""The TPU kernels under the real TPU compiler, which runs without a TPU: in place, in little memory, fast enough."""

from __future__ import annotations

import functools

import pytest

from scripts.compile_matrix import KERNEL_CASES, can_compile, compile_in_process

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(not can_compile(), reason='libtpu is not installed; pip install "jaxinfer[aot]"'),
]

# Cycles in which the device can read a block of 512 tokens of 8 heads of 128, 2 bytes each, keys and values: the least
# that one turn of the loop can take. v5e: 2 MiB at 819 GB/s and 1.5 GHz; v6e: at 1,640 GB/s and 1.75 GHz.
READ_CYCLES = {"v5e": 3840, "v6e": 2238}
# One turn of the decode kernel's loop over rows, with one block of 512 tokens in it.
MAX_BUNDLES = {
    ("v5e", "decode"): 1300,
    ("v6e", "decode"): 1300,
    ("v5e", "decode int8"): 1.1 * READ_CYCLES["v5e"] / 2,
    ("v6e", "decode int8"): 1.1 * READ_CYCLES["v6e"] / 2,
    ("v5e", "decode fp8"): 1.1 * READ_CYCLES["v5e"] / 2,
}
# What is compiled here; `scripts/compile_matrix.py` has every case for every device, which takes longer.
KERNELS = {
    "v5e": (*(name for name in KERNEL_CASES if name.startswith("decode")), "prefill", "prefill head_dim 64", "verify"),
    "v5p": ("decode",),
    "v6e": ("decode", "decode int8", "decode fp8", "prefill", "verify a tree"),
    "tpu7x": ("decode",),
}
MODEL = ("forward decode", "forward prefill")


@functools.cache
def compiled(device):
    return compile_in_process(device, KERNELS.get(device, MODEL))


@pytest.mark.parametrize(("device", "name"), [(device, name) for device, names in KERNELS.items() for name in names])
def test_a_kernel_compiles_and_updates_the_cache_in_place_in_little_memory(device, name):
    figures = compiled(device)[name]

    assert "error" not in figures, figures["error"]
    assert figures["in_place"]
    assert figures["temp_bytes"] < 2**25


@pytest.mark.parametrize("device", KERNELS)
def test_decoding_keeps_everything_in_registers(device):
    assert compiled(device)["decode"]["spills"] == 0


@pytest.mark.parametrize("name", MODEL)
def test_a_whole_model_over_eight_chips_updates_the_cache_in_place_in_little_memory(name):
    figures = compiled("v5e-8")[name]

    assert "error" not in figures, figures["error"]
    assert figures["in_place"]
    assert figures["temp_bytes"] < 200e6


@pytest.mark.parametrize(("device", "name"), MAX_BUNDLES)
def test_a_decode_block_is_computed_in_the_time_it_takes_to_read(device, name):
    assert compiled(device)[name]["bundles"] <= MAX_BUNDLES[device, name]
