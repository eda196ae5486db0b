"""The model families whose Hugging Face checkpoints can be read, by their `model_type`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.checkpoint.config_json.family import Family
from jaxinfer.checkpoint.families import (
    deepseek,
    gemma,
    gemma4,
    glm,
    gpt_oss,
    granite,
    llama,
    mistral,
    olmo,
    phi3,
    qwen,
)
from jaxinfer.checkpoint.families.near_llama import apertus, arcee, ernie, hunyuan
from jaxinfer.checkpoint.families.recurrent import falcon_h1, jamba, mamba, nemotron_h

FAMILIES: Mapping[str, Family] = {
    "apertus": apertus.FAMILY,
    "arcee": arcee.FAMILY,
    "deepseek_v2": deepseek.FAMILY_2,
    "deepseek_v3": deepseek.FAMILY_3,
    "dots1": glm.DOTS_FAMILY,
    "ernie4_5": ernie.FAMILY,
    "ernie4_5_moe": ernie.MOE_FAMILY,
    "exaone4": olmo.EXAONE_FAMILY,
    "falcon_h1": falcon_h1.FAMILY,
    "gemma": gemma.FAMILY_1,
    "gemma2": gemma.FAMILY_2,
    "gemma3": gemma.FAMILY_3_WITH_IMAGES,
    "gemma3_text": gemma.FAMILY_3,
    "gemma4": gemma4.FAMILY_WITH_IMAGES,
    "gemma4_text": gemma4.FAMILY,
    "glm4": glm.FAMILY,
    "glm4_moe": glm.MOE_FAMILY,
    "glm4_moe_lite": glm.LITE_FAMILY,
    "gpt_oss": gpt_oss.FAMILY,
    "granite": granite.FAMILY,
    "granitemoe": granite.MOE_FAMILY,
    "granitemoehybrid": granite.HYBRID_FAMILY,
    "granitemoeshared": granite.SHARED_FAMILY,
    "hunyuan_v1_dense": hunyuan.FAMILY,
    "jamba": jamba.FAMILY,
    "kimi_k2": deepseek.KIMI_K2,
    "kimi_k25": deepseek.KIMI_K2_5,
    "llama": llama.FAMILY,
    "mamba": mamba.FAMILY_1,
    "mamba2": mamba.FAMILY_2,
    "minimax_m2": mistral.MINIMAX_M2,
    "ministral3": mistral.FAMILY_3,
    "mistral": mistral.FAMILY,
    "mistral3": mistral.FAMILY_3_WITH_IMAGES,
    "mixtral": mistral.MIXTRAL,
    "nemotron_h": nemotron_h.FAMILY,
    "olmo2": olmo.FAMILY_2,
    "olmo3": olmo.FAMILY_3,
    "olmoe": olmo.MOE_FAMILY,
    "phi3": phi3.FAMILY,
    "qwen2": qwen.FAMILY_2,
    "qwen2_moe": qwen.MOE_FAMILY_2,
    "qwen3": qwen.FAMILY_3,
    "qwen3_5": qwen.FAMILY_3_5,
    "qwen3_5_moe": qwen.MOE_FAMILY_3_5,
    "qwen3_5_moe_text": qwen.MOE_TEXT_FAMILY_3_5,
    "qwen3_5_text": qwen.TEXT_FAMILY_3_5,
    "qwen3_moe": qwen.MOE_FAMILY_3,
    "qwen3_next": qwen.NEXT_FAMILY,
    "qwen3_vl": qwen.VL_FAMILY,
    "qwen3_vl_moe": qwen.VL_MOE_FAMILY,
    "qwen3_vl_moe_text": qwen.VL_MOE_TEXT_FAMILY,
    "qwen3_vl_text": qwen.VL_TEXT_FAMILY,
    "seed_oss": llama.SEED_OSS_FAMILY,
    "smollm3": llama.SMOLLM3_FAMILY,
    "solar_open": glm.SOLAR_FAMILY,
}


def family_of(hf: Mapping[str, Any]) -> Family:
    """Returns the family that config.json names; an unknown one is a ValueError listing the known."""
    model_type = hf.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(
            f"model_type={model_type!r} is not supported; use a checkpoint of one of these families:"
            f" {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[model_type]
