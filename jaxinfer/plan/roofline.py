"""The least time of a step on a device: bytes and FLOPs that it cannot do without, over the data sheet's rates."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.model.components.dense_and_experts import DenseAndExperts, DenseAndExpertsParams
from jaxinfer.model.components.mlp import MLP
from jaxinfer.model.components.moe import MoE
from jaxinfer.model.config import Layer, ModelConfig
from jaxinfer.model.layer_parts import functions_of
from jaxinfer.model.params import Params
from jaxinfer.plan.cache import MemoryQuestion
from jaxinfer.plan.devices import Chip
from jaxinfer.plan.memory import num_bytes, num_elements
from jaxinfer.quantization import QuantizedArray


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    """What a step of `num_tokens` does on each device at least.

    * `bytes_read`: of weights and of the pages of its rows. Of experts those that random routing reaches.
    * `flops`: of products, attention included.
    * `num_collectives`, `link_bytes`: sums over devices, and what a device sends for them.
    * `seconds`: the longer of reading and multiplying, and then sending. No launch and no latency is in it.
    """

    num_tokens: int
    bytes_read: float
    flops: float
    num_collectives: int
    link_bytes: float
    seconds: float
    is_memory_bound: bool

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


@dataclass(frozen=True, kw_only=True)
class Split:
    """A model split over a mesh.

    `params`: abstract parameters with shardings, as they are stored; `numbers` has the same in floating point, before
    quantization.
    """

    memory: MemoryQuestion
    params: Params
    numbers: Params
    tensor: int
    experts: int

    @property
    def config(self) -> ModelConfig:
        return self.memory.model

    @cached_property
    def page_bytes(self) -> tuple[int, ...]:
        """The bytes of a page of each kind on a device."""
        return tuple(self.memory.page_bytes(self.memory.page, kind) for kind in range(len(self.config.page_kinds)))

    @property
    def num_devices(self) -> int:
        return self.tensor * self.experts

    @cached_property
    def weights(self) -> tuple[_Weight, ...]:
        return tuple(_weights(self))

    def num_parts(self, size: int) -> int:
        """Returns the number of devices that share heads or hidden units, see `TENSOR_PARALLEL_RULES`."""
        return self.num_devices if size % self.num_devices == 0 else self.tensor


def prompt_seconds(split: Split, chip: Chip, *, num_tokens: int, max_step_tokens: int) -> float:
    """Returns the seconds of the steps that compute a prompt, the last of which draws its first token."""
    ends = [*range(max_step_tokens, num_tokens, max_step_tokens), num_tokens]
    starts = [0, *ends[:-1]]
    return sum(
        step_figures(split, chip, num_rows=1, tokens_per_row=end - start, context=end).seconds
        for start, end in zip(starts, ends, strict=True)
    )


def step_figures(split: Split, chip: Chip, *, num_rows: int, tokens_per_row: int, context: int) -> StepFigures:
    """Returns the figures of a step in which each of B rows computes some tokens and ends at `context` tokens."""
    num_tokens = num_rows * tokens_per_row
    weights = split.weights
    read = sum(w.num_bytes * w.part_read(num_tokens) for w in weights)
    read += num_rows * _bytes_of_row(split, context)
    flops = sum(2 * w.size * w.part * (num_rows if w.is_of_samples else num_tokens) for w in weights)
    mean_keys = context - (tokens_per_row - 1) / 2
    flops += num_tokens * sum(_attention_flops(split, mixer, mean_keys) for mixer in split.config.mixers)
    groups = list(_collectives(split))
    width = num_tokens * split.config.hidden_size * jnp.dtype(split.memory.dtype).itemsize
    link_bytes = sum(2 * (n - 1) / n * width for n in groups)
    reading, multiplying = read / chip.sheet.bandwidth, flops / chip.sheet.flops
    return StepFigures(
        num_tokens=num_tokens,
        bytes_read=read,
        flops=flops,
        num_collectives=len(groups),
        link_bytes=link_bytes,
        seconds=max(reading, multiplying) + link_bytes / (chip.link_bytes or math.inf),
        is_memory_bound=reading >= multiplying,
    )


@dataclass(frozen=True)
class _Weight:
    """A tensor of a device. A token multiplies by `part` of it: of experts those that the router chooses."""

    size: int
    num_bytes: int
    part: float = 1.0
    is_of_samples: bool = False  # multiplied by the last token of each row only

    def part_read(self, num_tokens: int) -> float:
        return 1 - (1 - self.part) ** num_tokens


def _weights(split: Split) -> Iterator[_Weight]:
    """Yields the tensors that a step multiplies by; of an embedding it reads a few rows, which do not count."""
    params, numbers = split.params, split.numbers
    if split.config.has_logits:
        ends = [tree.embedding if tree.unembedding is None else tree.unembedding for tree in (numbers, params)]
        yield _weight(*ends, is_of_samples=True)
    for stack, *layers in zip(split.config.stacks, numbers.layers, params.layers, strict=True):
        moe = experts_of(stack.layer)
        if moe is None:
            yield _weight(*layers)
            continue
        chosen = [_expert_tensors(layer.feed_forward) for layer in layers]
        experts = _weight(*chosen, part=moe.router.num_chosen / moe.num_experts)
        whole = _weight(*layers)
        yield experts
        yield _Weight(whole.size - experts.size, whole.num_bytes - experts.num_bytes)


def _weight(numbers: Any, stored: Any, **options: Any) -> _Weight:
    return _Weight(num_elements(numbers), num_bytes(stored), **options)


def _expert_tensors(feed_forward: Any) -> Any:
    """Returns the tensors of the chosen experts, of a `MoEParams` or of one beside a dense network."""
    moe = feed_forward.experts if isinstance(feed_forward, DenseAndExpertsParams) else feed_forward
    return moe.experts


def experts_of(layer: Layer) -> MoE | None:
    """Returns the experts of a layer's network, None if it has none."""
    part = layer.feed_forward
    part = part.experts if isinstance(part, DenseAndExperts) else part
    return part if isinstance(part, MoE) else None


def _bytes_of_row(split: Split, context: int) -> float:
    """Returns the bytes of keys and values, latents and states that a row reads at a context."""
    total = 0.0
    for kind, of_page in zip(split.config.page_kinds, split.page_bytes, strict=True):
        if kind.is_state:
            total += 2 * of_page  # read, and written again
        else:
            seen = context if kind.window is None else min(context, kind.window)
            if kind.num_exact is not None:
                seen = min(context, (kind.num_exact + 1) * split.memory.config.page_size)
            total += seen / split.memory.config.page_size * of_page
    return total


def _attention_flops(split: Split, mixer: Any, num_keys: float) -> float:
    """Returns a device's FLOPs of a token over its keys and values.

    Those of a recurrent layer, which do not grow, do not count.
    """
    keys = num_keys if mixer.window is None else min(num_keys, mixer.window)
    flops_per_key = functions_of(mixer).flops_per_key
    return 0.0 if flops_per_key is None else flops_per_key(mixer) * keys / split.num_parts(mixer.num_heads)


def _collectives(split: Split) -> Iterator[int]:
    """Yields for each sum over devices how many take part: after the embedding, each mixer and each network."""
    # Experts and a shared one have one sum, but for a shared one of integers.
    leaves = jax.tree.leaves(split.params, is_leaf=lambda node: isinstance(node, QuantizedArray))
    adds_shared = any(isinstance(leaf, QuantizedArray) for leaf in leaves)
    groups = [split.num_devices]
    for layer in split.config.layers:
        with_keys: list[Any] = [mixer for mixer in layer.mixers if functions_of(mixer).flops_per_key is not None]
        groups += [split.num_parts(mixer.num_heads) for mixer in with_keys[:1]]  # branches have one sum
        of_experts = experts_of(layer)
        if of_experts is not None:
            groups.append(split.num_devices)
        dense = getattr(layer.feed_forward, "dense", layer.feed_forward)
        shared = of_experts.shared if adds_shared and of_experts is not None else None
        networks = [network for network in (dense, shared) if isinstance(network, MLP)]
        groups += [split.num_parts(network.intermediate_size) for network in networks[:1]]
    yield from (number for number in groups if number > 1)
