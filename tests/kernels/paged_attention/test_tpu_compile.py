"""The TPU kernels under the real TPU compiler, which runs without a TPU: in place, in little memory, fast enough."""

from __future__ import annotations

import functools

import pytest

from scripts.compile_matrix import KERNEL_CASES, KERNEL_DEVICES, MODEL_DEVICES, can_compile, compile_in_process

pytestmark = pytest.mark.skipif(not can_compile(), reason='libtpu is not installed; pip install "jaxinfer[aot]"')

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
MODEL_CASES = ("forward decode", "forward prefill")


@functools.cache
def compiled(device):
    return compile_in_process(device, MODEL_CASES if device in MODEL_DEVICES[1:] else KERNEL_CASES)


@pytest.mark.parametrize("name", KERNEL_CASES)
@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_a_kernel_compiles_and_updates_the_cache_in_place_in_little_memory(device, name):
    figures = compiled(device)[name]

    assert "error" not in figures, figures["error"]
    assert figures["in_place"]
    assert figures["temp_bytes"] < 2**25


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_decoding_keeps_everything_in_registers(device):
    assert compiled(device)["decode"]["spills"] == 0


@pytest.mark.parametrize("name", MODEL_CASES)
@pytest.mark.parametrize("device", MODEL_DEVICES[1:])
def test_a_whole_model_over_eight_chips_updates_the_cache_in_place_in_little_memory(device, name):
    figures = compiled(device)[name]

    assert "error" not in figures, figures["error"]
    assert figures["in_place"]
    assert figures["temp_bytes"] < 200e6


@pytest.mark.parametrize(("device", "name"), MAX_BUNDLES)
def test_a_decode_block_is_computed_in_the_time_it_takes_to_read(device, name):
    assert compiled(device)[name]["bundles"] <= MAX_BUNDLES[device, name]
