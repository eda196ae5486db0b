"""StreamingLLM (Xiao et al. 2023) in NumPy, one token at a time: keys are stored as they are, and turned when used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def streaming_logits(model: Any, token_ids: Sequence[int], seen: Sequence[Sequence[int]]) -> np.ndarray:
    """Returns the logits f64[T, V] of a Llama of `transformers`, all turned by their places in `seen`."""
    weights = {name: tensor.numpy().astype(np.float64) for name, tensor in model.state_dict().items()}
    layers = range(model.config.num_hidden_layers)
    cached: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in layers]
    logits = []
    for token, visible in zip(token_ids, seen, strict=True):
        x = weights["model.embed_tokens.weight"][token]
        for layer in layers:
            own = {n.split(".", 3)[3]: w for n, w in weights.items() if n.startswith(f"model.layers.{layer}.")}
            x = x + _attend(own, _norm(x, own["input_layernorm.weight"], model), cached[layer], visible, model.config)
            h = _norm(x, own["post_attention_layernorm.weight"], model)
            gate = own["mlp.gate_proj.weight"] @ h
            x = x + own["mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * (own["mlp.up_proj.weight"] @ h))
        logits.append(weights["lm_head.weight"] @ _norm(x, weights["model.norm.weight"], model))
    return np.array(logits)


def _norm(x: np.ndarray, weight: np.ndarray, model: Any) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x) + model.config.rms_norm_eps) * weight


def _attend(own: dict[str, np.ndarray], x: np.ndarray, cached: list, visible: Sequence[int], config: Any) -> np.ndarray:
    N, K, H = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    q, k, v = (own[f"self_attn.{name}_proj.weight"] @ x for name in "qkv")
    cached.append((k.reshape(K, H), v.reshape(K, H)))
    places = np.arange(len(visible))
    keys = _turned(np.array([cached[i][0] for i in visible]), places, config)
    values = np.array([cached[i][1] for i in visible])
    queries = _turned(q.reshape(1, N, H), places[-1:], config)[0].reshape(K, N // K, H)
    scores = np.einsum("kgh,tkh->kgt", queries, keys) / np.sqrt(H)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    attended = np.einsum("kgt,tkh->kgh", weights / weights.sum(-1, keepdims=True), values)
    return own["self_attn.o_proj.weight"] @ attended.reshape(-1)


def _turned(x: np.ndarray, places: np.ndarray, config: Any) -> np.ndarray:
    """Turns the pairs of x [T, heads, H] by their places in the cache."""
    H = x.shape[-1]
    angles = places[:, None, None] * config.rope_parameters["rope_theta"] ** (-np.arange(0, H, 2) / H)
    pairs = (x[..., : H // 2] + 1j * x[..., H // 2 :]) * np.exp(1j * angles)
    return np.concatenate([pairs.real, pairs.imag], axis=-1)
