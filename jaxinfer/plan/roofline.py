"""The least time of a step on a device: bytes and FLOPs that it cannot do without, over the data sheet's rates."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
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
from jaxinfer.model.stages import MIN_PART, are_shared, num_parts_of
from jaxinfer.plan.cache import MemoryQuestion
from jaxinfer.plan.devices import Chip, HostLink
from jaxinfer.plan.memory import num_bytes, num_elements
from jaxinfer.quantization import QuantizedArray


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    """What a step of `num_tokens` does on each device at least.

    * `bytes_read`: of weights and of the pages of its rows. Of experts those that random routing reaches.
    * `flops`: of products, attention included.
    * `num_collectives`, `link_bytes`: sums over devices, and what a device sends to others of its host for them.
    * `num_parts`: of its tokens, which pass stages one after another. `num_ticks`: in which they do; all the above is
      of these ticks, in which a stage waits or works.
    * `num_messages`, `host_bytes`, `host_seconds`: that hosts exchange, what one sends for them, and their time.
    * `seconds`: the longer of reading and multiplying, and then sending. No launch is in it, and of latencies those of
      hosts alone.
    """

    num_tokens: int
    bytes_read: float
    flops: float
    num_collectives: int
    link_bytes: float
    num_parts: int
    num_ticks: int
    num_messages: int
    host_bytes: float
    host_seconds: float
    seconds: float
    is_memory_bound: bool

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def idle_part(self) -> float:
        """The part of the ticks in which a stage waits."""
        return 1 - self.num_parts / self.num_ticks


@dataclass(frozen=True, kw_only=True)
class Split:
    """A model split over a mesh, which lies on `num_hosts` that reach each other by `host_link`.

    `params`: abstract parameters with shardings, as they are stored; `numbers` has the same in floating point, before
    quantization.
    """

    memory: MemoryQuestion
    params: Params
    numbers: Params
    tensor: int
    experts: int
    stages: int = 1
    num_hosts: int = 1
    host_link: HostLink | None = None

    @property
    def config(self) -> ModelConfig:
        return self.memory.model

    @cached_property
    def page_bytes(self) -> tuple[int, ...]:
        """The bytes of a page of each kind on a device."""
        return tuple(self.memory.page_bytes(self.memory.page, kind) for kind in range(len(self.config.page_kinds)))

    @property
    def num_devices(self) -> int:
        """The devices that share each layer."""
        return self.tensor * self.experts

    @property
    def per_host(self) -> int:
        """The devices of each host."""
        return self.num_devices * self.stages // self.num_hosts

    def num_hosts_of(self, num_devices: int) -> int:
        """Returns the hosts on which devices that share a layer lie."""
        return max(num_devices // self.per_host, 1)

    @cached_property
    def weights(self) -> tuple[_Weight, ...]:
        return tuple(_weights(self))

    @cached_property
    def layers(self) -> tuple[tuple[Layer, bool], ...]:
        """The layers that a token passes on one device, and whether stages share them."""
        mesh = self.memory.placement.mesh
        own = ((group, are_shared(group, mesh)) for group in self.config.groups)
        return tuple(
            (layer, is_shared)
            for group, is_shared in own
            for _ in range(group.repeats // (self.stages if is_shared else 1))
            for layer in group.layers
        )

    def num_parts(self, size: int) -> int:
        """Returns the number of devices that share heads or hidden units, see `TENSOR_PARALLEL_RULES`."""
        return self.num_devices if size % self.num_devices == 0 else self.tensor


@dataclass(frozen=True)
class _Pass:
    """How a step passes layers: `num_times`, each time with `num_tokens`."""

    num_times: int
    num_tokens: float


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
    T = num_rows * tokens_per_row
    # A step's tokens are padded to sizes that parts divide.
    M = num_parts_of(-(-T // MIN_PART) * MIN_PART, split.stages) if split.stages > 1 else 1
    ticks = M + split.stages - 1
    passes = {False: _Pass(1, T), True: _Pass(ticks, T / M)}  # of layers that stages share
    read = flops = 0.0
    for weight in split.weights:
        one = passes[weight.is_shared]
        num_tokens = num_rows if weight.is_of_samples else one.num_tokens
        read += one.num_times * weight.num_bytes * weight.part_read(one.num_tokens)
        flops += one.num_times * 2 * weight.size * weight.part * num_tokens
    # Each tick reads the pages of a part's rows.
    times = [one.num_times * one.num_tokens / T for one in (passes[is_shared] for _, is_shared in split.layers)]
    read += num_rows * _bytes_of_row(split, context) * sum(times) / len(times)
    mean_keys = context - (tokens_per_row - 1) / 2
    for (layer, _), number in zip(split.layers, times, strict=True):
        flops += T * number * sum(_attention_flops(split, mixer, mean_keys) for mixer in layer.mixers)
    of_token = split.config.hidden_size * jnp.dtype(split.memory.dtype).itemsize
    sums = [(n, passes[is_shared]) for n, is_shared in _collectives(split)]
    link_bytes = sum(one.num_times * 2 * (1 - split.num_hosts_of(n) / n) * one.num_tokens * of_token for n, one in sums)
    messages = [(one.num_times, size) for one, size in _messages(split, sums, passes, of_token)]
    host_bytes, num_messages = sum(n * size for n, size in messages), sum(n for n, _ in messages)
    link, host_seconds = split.host_link, 0.0
    if link is not None:
        host_seconds = num_messages * link.latency_seconds + host_bytes / link.bytes_per_second
    reading, multiplying = read / chip.sheet.bandwidth, flops / chip.sheet.flops
    return StepFigures(
        num_tokens=T,
        bytes_read=read,
        flops=flops,
        num_collectives=sum(one.num_times for _, one in sums),
        link_bytes=link_bytes,
        num_parts=M,
        num_ticks=ticks,
        num_messages=num_messages,
        host_bytes=host_bytes,
        host_seconds=host_seconds,
        seconds=max(reading, multiplying) + link_bytes / (chip.link_bytes or math.inf) + host_seconds,
        is_memory_bound=reading >= multiplying,
    )


def _messages(
    split: Split, sums: Iterable[tuple[int, _Pass]], passes: Mapping[bool, _Pass], of_token: int
) -> Iterator[tuple[_Pass, float]]:
    """Yields how often a host sends something to others in a step, and the bytes each time."""
    for n, one in sums:
        if (hosts := split.num_hosts_of(n)) > 1:
            yield one, 2 * (1 - 1 / hosts) * one.num_tokens * of_token
    if split.stages > 1:
        # Each device hands its copy of a part over, and in the end gets the last states.
        of_device, whole, parts = of_token * min(split.num_devices, split.per_host), passes[False], passes[True]
        yield parts, parts.num_tokens * of_device
        yield whole, 2 * (1 - 1 / split.stages) * whole.num_tokens * of_device


@dataclass(frozen=True)
class _Weight:
    """A tensor of a device. A token multiplies by `part` of it: of experts those that the router chooses."""

    size: int
    num_bytes: int
    part: float = 1.0
    is_of_samples: bool = False  # multiplied by the last token of each row only
    is_shared: bool = False  # a stage's own, of layers that stages share

    def part_read(self, num_tokens: float) -> float:
        return 1 - (1 - self.part) ** num_tokens


def _weights(split: Split) -> Iterator[_Weight]:
    """Yields the tensors that a step multiplies by; of an embedding it reads a few rows, which do not count."""
    params, numbers = split.params, split.numbers
    if split.config.has_logits:
        ends = [tree.embedding if tree.unembedding is None else tree.unembedding for tree in (numbers, params)]
        yield _weight(*ends, is_of_samples=True)
    mesh = split.memory.placement.mesh
    owners = [group for group in split.config.groups for _ in group.layers]
    for group, stack, *layers in zip(owners, split.config.stacks, numbers.layers, params.layers, strict=True):
        moe, options = experts_of(stack.layer), {"is_shared": are_shared(group, mesh)}
        if moe is None:
            yield _weight(*layers, **options)
            continue
        chosen = [_expert_tensors(layer.feed_forward) for layer in layers]
        experts = _weight(*chosen, part=moe.router.num_chosen / moe.num_experts, **options)
        whole = _weight(*layers)
        yield experts
        yield _Weight(whole.size - experts.size, whole.num_bytes - experts.num_bytes, **options)


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


def _collectives(split: Split) -> Iterator[tuple[int, bool]]:
    """Yields for each sum over devices how many take part, and whether it is of layers that stages share.

    There is one after the embedding, each mixer and each network.
    """
    # Experts and a shared one have one sum, but for a shared one of integers.
    leaves = jax.tree.leaves(split.params, is_leaf=lambda node: isinstance(node, QuantizedArray))
    adds_shared = any(isinstance(leaf, QuantizedArray) for leaf in leaves)
    groups = [(split.num_devices, False)]
    for layer, is_shared in split.layers:
        with_keys: list[Any] = [mixer for mixer in layer.mixers if functions_of(mixer).flops_per_key is not None]
        # Branches have one sum.
        groups += [(split.num_parts(mixer.num_heads), is_shared) for mixer in with_keys[:1]]
        of_experts = experts_of(layer)
        if of_experts is not None:
            groups.append((split.num_devices, is_shared))
        dense = getattr(layer.feed_forward, "dense", layer.feed_forward)
        shared = of_experts.shared if adds_shared and of_experts is not None else None
        networks = [network for network in (dense, shared) if isinstance(network, MLP)]
        groups += [(split.num_parts(network.intermediate_size), is_shared) for network in networks[:1]]
    yield from ((number, is_shared) for number, is_shared in groups if number > 1)
