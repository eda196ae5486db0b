"""Independent references: small random checkpoints and what `transformers` computes from them in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

# One thread adds in one order, and leaves the other cores to tests that run beside this one.
torch.set_num_threads(1)
transformers.utils.logging.disable_progress_bar()

CONFIGS = {
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
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
# Qwen3 states its head_dim, so it is one that hidden_size // num_attention_heads would not give.
FAMILY_SIZES = {"llama": {}, "mistral": {}, "qwen2": {}, "qwen3": {"head_dim": 12}}


def random_config(family: str, **overrides: Any) -> transformers.PreTrainedConfig:
    """Returns the configuration of a small model of one of the families."""
    return CONFIGS[family](**{**SIZES, **FAMILY_SIZES[family], **overrides})


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
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.3 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            else:
                # Keeps activations of order 1, so that attention is neither uniform nor saturated.
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
    model.save_pretrained(path, max_shard_size="5GB" if shard_size is None else shard_size)
    return Path(path)


def load_reference(path: str | Path) -> transformers.PreTrainedModel:
    """Returns the checkpoint as a transformers model, float32, in evaluation mode."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def reference_logits(model: transformers.PreTrainedModel, token_ids: Any) -> np.ndarray:
    """Returns the logits f32[T, V] of one sequence of T token ids, computed in one pass without a cache."""
    with torch.no_grad():
        return model(torch.tensor([list(token_ids)]), use_cache=False).logits[0].numpy()
