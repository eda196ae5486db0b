"""Steps of a GPU whose sums are exact: all of them by kernels whose order goes by the row, none left to XLA.

Lowered for a described H200; nothing is compiled or executed.
"""

from __future__ import annotations

import re

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from jaxinfer.checkpoint.published import published_config
from jaxinfer.config import CacheConfig
from jaxinfer.plan.compiler import step_call

H200 = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu"))
STEPS = {
    "decode": {"step": "decode_step", "num_tokens": 8, "num_rows": 8, "form": "full", "max_log_probs": 4},
    "loop": {"step": "decode_loop", "num_tokens": 8, "num_rows": 8, "loop_steps": 4, "form": "filtered"},
    "verify": {"step": "verify_step", "num_tokens": 64, "num_rows": 8, "mixed_q_len": 4},
    "prefill": {"step": "prefill_step", "num_tokens": 512, "num_rows": 8, "sampling_log_probs": True},
}
# With biases; with norms of heads; with windows and norms after; plain.
BUILT = ("Qwen2.5-7B", "Qwen3-0.6B", "Gemma-3-4B", "Mistral-7B", "Phi-4")
REFUSED = {
    "Qwen3-30B-A3B": "not built for a mixture of experts on a GPU",
    "GPT-OSS-20B": "not built for a mixture of experts on a GPU",
    "DeepSeek-V3": "not built for latent attention on a GPU",
    "Qwen3-Next-80B-A3B": "not built for recurrent layers on a GPU",
    "Gemma-4-31B": "head_dim=512 is not supported with an order of sums",
}


def lowered(model, step, **options):
    config = published_config(model)
    bounded = (64,) * (len(config.page_kinds) - 1)
    cache = CacheConfig(num_pages=64, page_size=16, dtype="bfloat16", num_bounded_pages=bounded)
    with jax.sharding.use_abstract_mesh(H200):
        function, arguments = step_call(None, config, layout="gpu", cache=cache, **STEPS[step], **options)
        return function.trace(**arguments).lower(lowering_platforms=("cuda",)).as_text()


def sums_of_floats(program):
    """Returns the operations by which a program in StableHLO adds floats up along an axis.

    A reduction of several arrays adds scalars in a function of its own. So does a scatter: of token counts, which are
    whole numbers, and of biases, of which a token has one.
    """
    program = re.sub(r'"stablehlo\.scatter"\(.*?\}\) :', "", program, flags=re.DOTALL)
    lines = [line for line in program.splitlines() if re.search(r"tensor<(\d+x)+(bf16|f16|f32)>", line)]
    products = [line for line in lines if "stablehlo.dot" in line or "stablehlo.convolution" in line]
    scalars = re.findall(r".* = stablehlo\.add .*: tensor<(?:bf16|f16|f32)>", program)
    return products + scalars + [line for line in lines if re.search("applies stablehlo.add|reduce_window", line)]


@pytest.mark.parametrize(("model", "step"), [("Qwen3-0.6B", step) for step in STEPS] + [(m, "decode") for m in BUILT])
def test_no_sum_of_a_step_is_left_to_xla(model, step):
    assert sums_of_floats(lowered(model, step, exact=True)) == []


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_nor_is_one_of_packed_weights(quantization):
    for step in ("decode", "prefill"):
        assert sums_of_floats(lowered("Qwen3-0.6B", step, exact=True, quantization=quantization)) == []


def test_otherwise_there_are_such_sums():
    assert len(sums_of_floats(lowered("Qwen3-0.6B", "decode"))) > 2


@pytest.mark.parametrize("model", REFUSED)
def test_a_model_without_such_kernels_is_refused_by_name(model):
    with pytest.raises(NotImplementedError, match=REFUSED[model]):
        lowered(model, "decode", exact=True)
