"""What the tests of the recurrent mixers share: random layers, a step of one layer, and states after any split."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.config import CacheConfig
from jaxinfer.model.batch import Row, StepTokens, make_batch
from jaxinfer.model.components.mlp import MLP
from jaxinfer.model.components.recurrent.states import States
from jaxinfer.model.config import Layer, LayerGroup, ModelConfig
from jaxinfer.model.decoder import forward
from jaxinfer.model.layer_parts import Mixer
from tests.replay import deal_pages, lively_params, nan_cache

S, T = 16, 55  # tokens of a page, and of the longest sequence
NUM_SEQUENCES = 5


def model_of(mixer: Mixer, hidden_size: int) -> ModelConfig:
    """Returns a model whose recurrent layers have a stack of one and a stack of two."""
    alone, beside = Layer(mixer=mixer, feed_forward=None), Layer(mixer=mixer, feed_forward=MLP(intermediate_size=44))
    groups = (LayerGroup((alone,), 1), LayerGroup((beside,), 2))
    return ModelConfig(vocab_size=61, hidden_size=hidden_size, max_position=256, groups=groups)


@functools.partial(jax.jit, static_argnames=("config", "q_len"), donate_argnames="cache")
def _step(params, cache, batch, *, config, q_len):
    return forward(params, cache, batch, config=config, q_len=q_len)


class Replay:
    """Sequences of random tokens, and what is left of them after any steps: hidden states and stored states."""

    def __init__(self, config: ModelConfig, length: int = T) -> None:
        self.config, self.params = config, lively_params(config)
        generator = np.random.default_rng(1)
        self.sequences = generator.integers(0, config.vocab_size, (NUM_SEQUENCES, length), dtype=np.int32)
        self.pages = deal_pages(NUM_SEQUENCES, -(-length // S))

    def run(
        self, steps: Sequence[Sequence[tuple[int, int]]], shape: tuple[int, int], q_len: int | None = None
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """Returns the first sequence's hidden states, and its states of all layers in each of its pages.

        Each step has (sequence, tokens) for each row, in a batch of `shape` tokens and rows.
        """
        cache = nan_cache(self.config, CacheConfig(num_pages=self.pages.size + 1, page_size=S))
        starts, hidden = [0] * NUM_SEQUENCES, []
        for chunks in steps:
            rows = []
            for i, length in chunks:
                end = starts[i] + length
                pages = self.pages[i, : -(-end // S)].tolist()
                rows.append(Row(self.sequences[i, starts[i] : end].tolist(), starts[i], pages))
                starts[i] = end
            sizes = {"num_tokens": shape[0], "num_rows": shape[1], "table_width": self.pages.shape[1]}
            batch = make_batch(rows, page_size=S, **sizes)
            states, cache = _step(self.params, cache, batch, config=self.config, q_len=q_len)
            parts = np.split(np.asarray(states), np.cumsum([length for _, length in chunks]))
            hidden += [part for (i, _), part in zip(chunks, parts, strict=False) if i == 0]
        return np.concatenate(hidden), self.states_of(cache, -(-starts[0] // S))

    def states_of(self, cache: Any, num_pages: int) -> list[np.ndarray]:
        """Returns the leaves [layers, pages, ...] of each pool, for the pages of the first sequence."""
        own = self.pages[0, :num_pages]
        leaves = []
        for pool, stack in zip(cache.pools, self.config.mixer_stacks, strict=True):
            assert isinstance(pool, States)
            leaves += [
                np.asarray(leaf).reshape(stack.num_layers, -1, *leaf.shape[1:])[:, own]
                for leaf in (pool.conv, pool.recurrent)
            ]
        return leaves


def chunks_of(size: int, length: int = T) -> list[int]:
    return [min(size, length - first) for first in range(0, length, size)]


def splits(length: int = T) -> dict[str, tuple[list[list[tuple[int, int]]], tuple[int, int], int | None]]:
    """Returns ways to compute the first sequence: steps, their shape and q_len. Ways that can share a shape do."""
    draw = np.random.default_rng(7)
    lengths = draw.integers(1, 6, (2, length))
    return {
        "chunks of 1": ([[(0, 1)]] * length, (1, 1), None),
        **{f"chunks of {n}": ([[(0, size)] for size in chunks_of(n, length)], (5, 1), None) for n in (3, 5)},
        "more padding": ([[(0, length)]], (length + 25, 5), None),
        "token by token": ([[(0, 1)]] * length, (1, 1), 1),
        "token by token, padding rows": ([[(0, 1)]] * length, (5, 5), 1),
        "token by token beside others": ([[(i, 1) for i in (3, 0, 1, 4, 2)]] * length, (5, 5), 1),
        "four tokens a row, verified": ([[(1, 4), (0, size)] for size in chunks_of(4, length)[:13]], (8, 2), 4),
        "beside others": ([[(2, 9), (0, length), (1, 3)]], (length + 25, 5), None),
        "among rows of random lengths": (
            [[(1, int(a)), (0, n), (2, int(b))] for n, (a, b) in zip(chunks_of(6, length), lengths.T, strict=False)],
            (24, 3),
            None,
        ),
        "a prompt, then decoding": ([[(0, 10)], *[[(0, 1)]] * (length - 10)], (24, 3), None),
    }


def naive_conv(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | float) -> np.ndarray:
    """Returns silu of the causal convolution of each channel of x [T, C] with weight [C, W]."""
    W = weight.shape[1]
    padded = np.concatenate([np.zeros((W - 1, x.shape[1])), x])
    y = np.stack([(padded[t : t + W] * weight.T).sum(0) for t in range(len(x))]) + bias
    return y * sigmoid(y)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def softplus(x: np.ndarray) -> np.ndarray:
    return np.log1p(np.exp(x))


def wide_params(params: Any) -> Any:
    """Returns the tensors of the first layer of a stack in float64, by name."""
    return {name: np.asarray(tensor[0], np.float64) for name, tensor in vars(params).items() if tensor is not None}


def run_layer_alone(function: Any, params: Any, mixer: Mixer, x: np.ndarray, norm: Any) -> np.ndarray:
    """Returns the output of a mixer's function for one row x [T, D] from the beginning."""
    from jaxinfer.model.components.mixer_inputs import MixerInputs, StepContext
    from jaxinfer.model.components.recurrent.states import state_slots

    config = model_of(mixer, x.shape[1])
    batch = make_batch([Row([0] * len(x), 0, [2, 0, 3])], page_size=16, num_tokens=len(x), num_rows=1, table_width=3)
    pool: Any = nan_cache(config, CacheConfig(num_pages=4, page_size=16)).pools[0]

    @jax.jit
    def run(params, pool, x, batch):
        inputs = MixerInputs(StepContext(batch, slots=state_slots(batch, 16, 0)), StepTokens(jnp.asarray(len(x))))
        return function(jax.tree.map(lambda w: w[0], params), pool, x, inputs, config=mixer, norm=norm)[0]

    return np.asarray(run(params, pool, jnp.asarray(x, jnp.float32), batch))
