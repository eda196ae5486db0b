"""Independent references: small random checkpoints and what `transformers` computes from them in float32."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)

# One thread adds in one order, and leaves the other cores to tests that run beside this one.
torch.set_num_threads(1)
transformers.utils.logging.disable_progress_bar()


class KimiK2Config(transformers.DeepseekV3Config):
    """transformers has no class for Kimi-K2, whose layers are DeepSeek-V3's."""

    model_type = "kimi_k2"


class DeepseekV3ForCausalLM(transformers.DeepseekV3ForCausalLM):
    """Kimi-K2, whose config.json has this name of a class beside its own `model_type`."""

    config_class = KimiK2Config


transformers.AutoConfig.register("kimi_k2", KimiK2Config)
transformers.AutoModelForCausalLM.register(KimiK2Config, DeepseekV3ForCausalLM)
register_checkpoint_conversion_mapping("kimi_k2", get_checkpoint_conversion_mapping("deepseek_v3") or [])

CONFIGS = {
    "apertus": transformers.ApertusConfig,
    "arcee": transformers.ArceeConfig,
    "deepseek_v2": transformers.DeepseekV2Config,
    "deepseek_v3": transformers.DeepseekV3Config,
    "dots1": transformers.Dots1Config,
    "ernie4_5": transformers.Ernie4_5Config,
    "ernie4_5_moe": transformers.Ernie4_5_MoeConfig,
    "exaone4": transformers.Exaone4Config,
    "falcon_h1": transformers.FalconH1Config,
    "gemma": transformers.GemmaConfig,
    "gemma2": transformers.Gemma2Config,
    "gemma3_text": transformers.Gemma3TextConfig,
    "gemma4_text": transformers.Gemma4TextConfig,
    "glm4": transformers.Glm4Config,
    "glm4_moe": transformers.Glm4MoeConfig,
    "glm4_moe_lite": transformers.Glm4MoeLiteConfig,
    "gpt_oss": transformers.GptOssConfig,
    "granite": transformers.GraniteConfig,
    "granitemoe": transformers.GraniteMoeConfig,
    "granitemoehybrid": transformers.GraniteMoeHybridConfig,
    "granitemoeshared": transformers.GraniteMoeSharedConfig,
    "hunyuan_v1_dense": transformers.HunYuanDenseV1Config,
    "jamba": transformers.JambaConfig,
    "kimi_k2": KimiK2Config,
    "llama": transformers.LlamaConfig,
    "mamba": transformers.MambaConfig,
    "mamba2": transformers.Mamba2Config,
    "minimax_m2": transformers.MiniMaxM2Config,
    "ministral3": transformers.Ministral3Config,
    "mistral": transformers.MistralConfig,
    "mixtral": transformers.MixtralConfig,
    "nemotron_h": transformers.NemotronHConfig,
    "olmo2": transformers.Olmo2Config,
    "olmo3": transformers.Olmo3Config,
    "olmoe": transformers.OlmoeConfig,
    "phi3": transformers.Phi3Config,
    "qwen2": transformers.Qwen2Config,
    "qwen2_moe": transformers.Qwen2MoeConfig,
    "qwen3": transformers.Qwen3Config,
    "qwen3_5_moe_text": transformers.Qwen3_5MoeTextConfig,
    "qwen3_5_text": transformers.Qwen3_5TextConfig,
    "qwen3_moe": transformers.Qwen3MoeConfig,
    "qwen3_next": transformers.Qwen3NextConfig,
    "qwen3_vl_moe_text": transformers.Qwen3VLMoeTextConfig,
    "qwen3_vl_text": transformers.Qwen3VLTextConfig,
    "seed_oss": transformers.SeedOssConfig,
    "smollm3": transformers.SmolLM3Config,
    "solar_open": transformers.SolarOpenConfig,
}
SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
# Families that state head_dim get one that hidden_size // num_attention_heads would not give. Token ids that the
# family's defaults place outside the small vocabulary are left out.
NO_IDS: dict[str, Any] = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
MOE: dict[str, Any] = {"moe_intermediate_size": 20, "num_experts_per_tok": 2}
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": False}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 28,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
    "n_routed_experts": 8,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}
DELTA_NETS: dict[str, Any] = {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
# Norms of delta nets magnify rounding where outputs are small, up to 1e-4 of logits. A larger epsilon bounds that.
DELTA_NETS_3_5 = {**DELTA_NETS, "rms_norm_eps": 1e-3}
STATE_SPACE: dict[str, Any] = {
    "num_heads": 6,
    "head_dim": 10,
    "hidden_size": 30,
    "n_groups": 2,
    "state_size": 12,
    "chunk_size": 16,
}
FAMILY_SIZES: dict[str, dict[str, Any]] = {
    "apertus": NO_IDS,
    "arcee": NO_IDS,
    "deepseek_v2": {"topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5, **LATENT, **MOE, **NO_IDS},
    "deepseek_v3": {**LATENT, **MOE, **NO_IDS},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1, **MOE, **NO_IDS},
    "ernie4_5": {"head_dim": 12, **NO_IDS},
    "ernie4_5_moe": {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 20, **NO_IDS},
    "exaone4": {"sliding_window": 9, "num_hidden_layers": 4, **NO_IDS},
    "falcon_h1": {
        "head_dim": 12,
        "mamba_d_ssm": 60,
        "mamba_n_heads": 6,
        "mamba_n_groups": 2,
        "mamba_d_state": 12,
        "mamba_chunk_size": 16,
        "embedding_multiplier": 3.0,
        "attention_in_multiplier": 0.8,
        "attention_out_multiplier": 0.9,
        "key_multiplier": 0.6,
        "ssm_in_multiplier": 1.25,
        "ssm_out_multiplier": 0.4,
        "ssm_multipliers": [0.7, 0.5, 0.6, 1.5, 0.9],
        "mlp_multipliers": [0.9, 0.6],
        "lm_head_multiplier": 0.5,
        **NO_IDS,
    },
    "gemma": {"head_dim": 12, **NO_IDS},
    "gemma2": {"head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": 9, **NO_IDS},
    "gemma3_text": {"head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": 9, **NO_IDS},
    # All at once: embeddings for each layer, as in small models, and experts and K = V, as in large ones.
    "gemma4_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "head_dim": 12,
        "global_head_dim": 20,
        "hidden_size_per_layer_input": 18,
        "vocab_size_per_layer_input": 100,
        "attention_k_eq_v": True,
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 20,
        "sliding_window": 9,
        **NO_IDS,
        "pad_token_id": 0,
    },
    "glm4": {"head_dim": 16, **NO_IDS},
    "glm4_moe": {"head_dim": 16, "n_routed_experts": 8, "first_k_dense_replace": 1, **MOE, **NO_IDS},
    "glm4_moe_lite": {**LATENT, "n_group": 1, "topk_group": 1, **MOE, **NO_IDS},
    "gpt_oss": {
        "head_dim": 12,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "sliding_window": 9,
        "rope_parameters": {**YARN, "rope_theta": 1.5e5},
        **NO_IDS,
    },
    "granite": {"attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 4.0, **NO_IDS},
    "granitemoe": {"embedding_multiplier": 3.0, "num_local_experts": 6, "num_experts_per_tok": 3, **NO_IDS},
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "shared_intermediate_size": 28,
        "num_local_experts": 5,
        "attention_multiplier": 0.2,
        "embedding_multiplier": 3.0,
        "mamba_n_heads": 4,
        "mamba_d_state": 12,
        "mamba_chunk_size": 16,
        **NO_IDS,
    },
    "granitemoeshared": {"shared_intermediate_size": 28, "num_local_experts": 4, **NO_IDS},
    "hunyuan_v1_dense": {"head_dim": 12, **NO_IDS},
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "num_experts": 5,
        "mamba_d_state": 12,
        "mamba_dt_rank": 6,
        **NO_IDS,
    },
    # One group of experts, as published.
    "kimi_k2": {**LATENT, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827, **MOE, **NO_IDS},
    "mamba": {"hidden_size": 30, "intermediate_size": 54, "state_size": 12, "time_step_rank": 6, **NO_IDS},
    "mamba2": {**STATE_SPACE, **NO_IDS},
    "minimax_m2": {"head_dim": 16, "rotary_dim": 8, "num_local_experts": 6, "num_experts_per_tok": 2, **NO_IDS},
    # Short enough that queries of small prompts grow.
    "ministral3": {
        "head_dim": 12,
        "rope_parameters": {
            **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 16},
            **{"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4},
        },
        **NO_IDS,
    },
    "mixtral": {"num_local_experts": 5, **NO_IDS},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "moe"],
        "head_dim": 12,
        "mamba_num_heads": 6,
        "mamba_head_dim": 10,
        "n_groups": 2,
        "ssm_state_size": 12,
        "chunk_size": 16,
        "n_routed_experts": 6,
        "moe_shared_expert_intermediate_size": 28,
        **MOE,
        **NO_IDS,
    },
    "olmo2": NO_IDS,
    "olmo3": {"sliding_window": 9, **NO_IDS},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 2, **NO_IDS},
    "phi3": NO_IDS,
    "qwen2_moe": {"num_experts": 6, "shared_expert_intermediate_size": 28, **MOE, **NO_IDS},
    "qwen3": {"head_dim": 12},
    "qwen3_moe": {"head_dim": 12, "num_local_experts": 6, **MOE, **NO_IDS},
    "qwen3_5_moe_text": {"num_experts": 6, "shared_expert_intermediate_size": 28, **DELTA_NETS_3_5, **MOE, **NO_IDS},
    "qwen3_5_text": {**DELTA_NETS_3_5, **NO_IDS},
    "qwen3_next": {"num_experts": 6, "shared_expert_intermediate_size": 28, **DELTA_NETS, **MOE, **NO_IDS},
    "qwen3_vl_moe_text": {"head_dim": 12, "num_local_experts": 6, "tie_word_embeddings": False, **MOE, **NO_IDS},
    "qwen3_vl_text": {"head_dim": 12, "pad_token_id": None},
    "seed_oss": {"head_dim": 12, **NO_IDS},
    "smollm3": NO_IDS,
    "solar_open": {"head_dim": 12, "n_routed_experts": 8, **MOE, **NO_IDS},
}


class Qwen3VLForCausalLM(transformers.Qwen3ForCausalLM):
    """The text model of Qwen3-VL with logits, which transformers has only beside the model for images."""

    config_class = transformers.Qwen3VLTextConfig
    text_model = transformers.Qwen3VLTextModel

    def __init__(self, config: Any) -> None:
        transformers.PreTrainedModel.__init__(self, config)
        self.model = self.text_model(config)
        self.vocab_size = config.vocab_size
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


class Qwen3VLMoeForCausalLM(Qwen3VLForCausalLM):
    """The same for a mixture of experts."""

    config_class = transformers.Qwen3VLMoeTextConfig
    text_model = transformers.Qwen3VLMoeTextModel


# Text models whose class with logits is made here, by `model_type`.
OWN_CLASSES = {"qwen3_vl_moe_text": Qwen3VLMoeForCausalLM, "qwen3_vl_text": Qwen3VLForCausalLM}
for own_class in OWN_CLASSES.values():
    # Of a configuration of transformers itself, a registration counts only so.
    transformers.AutoModelForCausalLM.register(own_class.config_class, own_class, exist_ok=True)


def random_config(family: str, **overrides: Any) -> transformers.PreTrainedConfig:
    """Returns the configuration of a small model of one of the families."""
    # Copied, for some of these classes write to the dictionaries that they are given.
    return CONFIGS[family](**copy.deepcopy({**SIZES, **FAMILY_SIZES.get(family, {}), **overrides}))


def save_random_checkpoint(
    path: str | Path,
    family: str,
    *,
    seed: int = 0,
    shard_size: str | int | None = None,
    **config_overrides: Any,
) -> Path:
    """Writes a float32 safetensors checkpoint of a small random model and returns its directory.

    `shard_size` ("40KB", or bytes) splits it into several files. Norm weights and biases are random too, so
    that dropping one shows in the logits.
    """
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(
        random_config(family, **config_overrides), dtype=torch.float32
    )
    randomize(model)
    model.save_pretrained(path, max_shard_size="5GB" if shard_size is None else shard_size)
    return Path(path)


def randomize(model: transformers.PreTrainedModel) -> None:
    """Gives a model random tensors, so that each of them changes the logits."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            if name.endswith(("norm.weight", "norm_f.weight")):
                # Those of models with gated delta nets are offsets from 1, but not those of the nets themselves.
                is_offset = model.config.model_type.startswith(("qwen3_next", "qwen3_5")) and "linear_attn" not in name
                parameter.copy_((0 if is_offset else 1) + 0.3 * noise)
                if name.endswith("q_norm.weight") and model.config.model_type.startswith("gemma4"):
                    parameter /= parameter.shape[-1] ** 0.5  # scores have no other scale
            elif name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            elif name.endswith(("layernorm_1.weight", "layernorm_2.weight", "per_expert_scale")):
                parameter.copy_(1 + 0.3 * noise)
            elif name.endswith("router.scale"):  # transformers divides it by the root of its size
                parameter.copy_(parameter.shape[-1] ** 0.5 * (1 + 0.3 * noise))
            else:
                # Keeps activations of order 1, so that attention is neither uniform nor saturated.
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn(buffer.shape))
            elif name.endswith("layer_scalar"):
                buffer.copy_(1 + 0.3 * torch.randn(buffer.shape))


def stack_experts(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns a checkpoint's tensors with the experts of a layer in one tensor, as Qwen publishes those of Qwen3.5.

    experts.0.gate_proj.weight, …  ->  experts.gate_up_proj [E, 2 F, D], experts.down_proj [E, D, F]
    """
    own = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for prefix in {name.partition("experts.")[0] for name in tensors.keys() - own.keys()}:
        num_experts = sum(name.startswith(f"{prefix}experts.") and name.endswith("up_proj.weight") for name in tensors)
        gate, up, down = (
            np.stack([tensors[f"{prefix}experts.{i}.{part}_proj.weight"] for i in range(num_experts)])
            for part in ("gate", "up", "down")
        )
        own[f"{prefix}experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        own[f"{prefix}experts.down_proj"] = down
    return own


def load_reference(path: str | Path) -> transformers.PreTrainedModel:
    """Returns the checkpoint as a transformers model, float32, in evaluation mode."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def reference_logits(model: transformers.PreTrainedModel, token_ids: Any) -> np.ndarray:
    """Returns the logits f32[T, V] of one sequence of T token ids, computed in one pass without a cache."""
    with torch.no_grad():
        return model(torch.tensor([list(token_ids)]), use_cache=False).logits[0].numpy()
