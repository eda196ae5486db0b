"""Reinforcement learning in one process: sample groups, reward them, train, and give the engine the new weights (GRPO).

    python docs/examples/grpo.py

The bundled model learns to write short lines. `scripts/notebooks/6_grpo.ipynb` explains each piece, with Adam and a
curve.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer import LLM, Completion, SamplingParams, load_checkpoint, log_probs
from jaxinfer.engine.engine import BUNDLED_MODEL

PROMPTS = ("def area(width, height):\n", "def is_prime(n):\n")
GROUP, LENGTH, NUM_TOKENS = 4, 32, 12  # completions of a prompt; tokens of a text and of an output
RATE, CLIP = 1e-2, 0.2


def reward(completion: Completion) -> float:
    return -float(len(completion.text.partition("\n")[0]))


def batch_of(group: list[Completion]) -> tuple[np.ndarray, ...]:
    """Returns tokens i32[B, LENGTH], their old log-probabilities f32[B, LENGTH - 1], and the mask of sampled ones."""
    tokens = np.zeros((len(group), LENGTH), np.int32)
    old, mask = np.zeros((2, len(group), LENGTH - 1), np.float32)
    for row, each in enumerate(group):
        text = each.prompt_token_ids + each.token_ids
        sampled = slice(len(each.prompt_token_ids) - 1, len(text) - 1)
        tokens[row, : len(text)], old[row, sampled], mask[row, sampled] = text, each.sampling_log_probs, 1
    return tokens, old, mask


def advantages_of(rewards: list[float]) -> np.ndarray:
    """Returns f32[B]: each reward less the mean of its group, over its standard deviation."""
    groups = np.reshape(rewards, (-1, GROUP))
    return ((groups - groups.mean(1, keepdims=True)) / (groups.std(1, keepdims=True) + 1e-3)).ravel().astype(np.float32)


def main(num_rounds: int = 3) -> list[float]:
    params, config = load_checkpoint(BUNDLED_MODEL, dtype="float32")
    limits: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 128, "sampling_log_probs": True}
    llm = LLM(BUNDLED_MODEL, dtype="float32", **limits)

    def loss_of(params, tokens, old, mask, advantages):
        ratio = jnp.exp(log_probs(params, tokens, config=config) - old)
        gain = jnp.minimum(ratio * advantages[:, None], jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantages[:, None])
        return -(gain * mask).sum() / mask.sum()

    gradient_of = jax.jit(jax.grad(loss_of))
    means = []
    for round_index in range(num_rounds):
        draws = [
            SamplingParams(n=GROUP, seed=100 * round_index + i, max_tokens=NUM_TOKENS) for i in range(len(PROMPTS))
        ]
        group = llm.generate(list(PROMPTS), draws, show_progress=False)
        rewards = [reward(each) for each in group]
        gradient = gradient_of(params, *batch_of(group), advantages_of(rewards))
        params = jax.tree.map(lambda p, g: p - RATE * g, params, gradient)
        llm.update_params(params)
        means.append(float(np.mean(rewards)))
        print(f"round {round_index}: mean reward {means[-1]:.2f}")
    return means


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
