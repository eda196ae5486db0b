"""The built-in shapes of published models: each has the parameters that its publisher counts."""

from __future__ import annotations

import jax
import pytest

from jaxinfer.checkpoint.published import PUBLISHED, published_config
from jaxinfer.model.params import abstract_params

# In millions, as model cards and papers give them; Gemma's and Qwen3-VL's without the image encoder.
COUNTS = {
    "Llama-3.2-1B": 1_236,
    "Llama-3.2-3B": 3_213,
    "Llama-3-8B": 8_030,
    "Llama-3.1-8B": 8_030,
    "Llama-3-70B": 70_554,
    "Llama-3.1-70B": 70_554,
    "Llama-3.1-405B": 405_853,
    "Qwen2.5-7B": 7_616,
    "Qwen2.5-72B": 72_706,
    "Qwen3-0.6B": 596,
    "Qwen3-4B": 4_022,
    "Qwen3-8B": 8_191,
    "Qwen3-14B": 14_768,
    "Qwen3-32B": 32_762,
    "Qwen3-30B-A3B": 30_532,
    "Qwen3-235B-A22B": 235_094,
    "Qwen3-Next-80B-A3B": 79_674,
    "Gemma-3-4B": 3_880,
    "Gemma-3-12B": 11_766,
    "Gemma-3-27B": 27_009,
    "Mistral-7B": 7_248,
    "Mistral-Small-24B": 23_572,
    "Mixtral-8x7B": 46_703,
    "Phi-4": 14_660,
    "GPT-OSS-20B": 20_915,
    "GPT-OSS-120B": 116_829,
    "DeepSeek-V3": 671_026,
    "DeepSeek-R1": 671_026,
    "DeepSeek-V3.1": 671_026,
    "Llama-3.3-70B": 70_554,
    "Qwen3-1.7B": 1_721,
    "Qwen3-30B-A3B-2507": 30_532,
    "Qwen3-Coder-30B-A3B": 30_532,
    "Qwen3-235B-A22B-2507": 235_094,
    "Mistral-Small-3.2-24B": 23_572,
    "Qwen3-VL-8B": 8_191,
    "Qwen3-VL-30B-A3B": 30_532,
}
# Of these, model cards give billions, some with an encoder or with a layer for multi-token prediction.
IN_BILLIONS = {
    "Qwen3-Coder-480B-A35B": 480,
    "Qwen3.5-27B": 27,
    "Qwen3.6-27B": 27,
    "Qwen3.5-35B-A3B": 35,
    "Qwen3.6-35B-A3B": 35,
    "Qwen3.5-397B-A17B": 397,
    "Gemma-4-31B": 30.7,
    "Gemma-4-26B-A4B": 25.2,
    "GLM-4.5": 355,
    "GLM-4.5-Air": 106,
    "GLM-4.7-Flash": 30,
    "Kimi-K2": 1_026,
    "MiniMax-M2": 229,
    "GLM-4.6": 355,
    "OLMoE-1B-7B": 6.9,
    "EXAONE-4.0-1.2B": 1.28,
    "EXAONE-4.0-32B": 32,
    "Seed-OSS-36B": 36,
}
# Of these, the names alone tell, to a digit; their configs are those of test_qwen3_5.py and test_gemma4.py.
NAMED = {"Qwen3.5-0.8B": 0.75, "Gemma-4-E2B": 4.6}
# Of these too; their configs are the defaults of transformers.
NAMED |= {"Ministral-3-8B": 8.5, "ERNIE-4.5-0.3B": 0.36, "ERNIE-4.5-21B-A3B": 21.8}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_built_in_model_has_the_published_number_of_parameters(name):
    params = abstract_params(published_config(name.upper()), "float32")

    count = sum(leaf.size for leaf in jax.tree.leaves(params))

    if name in COUNTS:
        assert round(count / 1e6) == COUNTS[name]
    else:
        assert count / 1e9 == pytest.approx((IN_BILLIONS | NAMED)[name], rel=0.01)


def test_an_unknown_name_is_refused_with_those_that_are_built_in():
    with pytest.raises(ValueError, match="'Llama-9-1B' is not built in; give one of .*DeepSeek-V3"):
        published_config("Llama-9-1B")
