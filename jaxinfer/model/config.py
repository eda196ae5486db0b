"""The description of a decoder: groups of layers, each made of components."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, islice, pairwise
from typing import Any, NamedTuple

from jaxinfer.model.components.attention import Attention
from jaxinfer.model.components.layer_embedding import LayerEmbedding
from jaxinfer.model.components.layers import Norm
from jaxinfer.model.components.mlp import MLP
from jaxinfer.model.components.rope import Rope, RopeScaling, lengthened, require_pairs
from jaxinfer.model.layer_parts import FEED_FORWARDS, MIXERS, FeedForward, Mixer, can_read, functions_of, source_of
from jaxinfer.model.page_kinds import MixerStack, PageKind, PagePlace, has_open_pages, page_kind_of
from jaxinfer.validation import as_tuple, is_int, require, require_bool, require_int, require_positive

RMS_NORM = Norm()
ARE_MIXERS = "an attention or a recurrent layer"


@dataclass(frozen=True, kw_only=True)
class Branch:
    """One of several mixers of a layer that stand side by side."""

    mixer: Mixer
    input_scale: float = 1.0  # multiplies its input
    output_scale: float = 1.0  # multiplies its output

    def __post_init__(self) -> None:
        require(_is_mixer(self.mixer), "mixer", self.mixer, ARE_MIXERS)
        for name in ("input_scale", "output_scale"):
            require_positive(name, getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer: x + mixer(norm(x)), then x + feed_forward(norm(x)), with the norms that the family has.

    Branches in the place of the mixer all get its input, and their outputs are added. One of the two halves may be
    None, and is left out. An `embedding` adds a third part after them.
    """

    mixer: Mixer | tuple[Branch, ...] | None
    feed_forward: FeedForward | None
    embedding: LayerEmbedding | None = None  # the layer's own of each token; all layers of a model have one, or none
    norm: Norm = RMS_NORM
    has_pre_norms: bool = True  # of the inputs of mixer and feed_forward
    has_post_norms: bool = False  # of their outputs
    residual_scale: float = 1.0  # multiplies their outputs
    has_scale: bool = False  # a number that multiplies the layer's result

    def __post_init__(self) -> None:
        are_branches = isinstance(self.mixer, tuple) and len(self.mixer) > 1
        are_branches = are_branches and all(isinstance(branch, Branch) for branch in self.branches)
        is_mixer = self.mixer is None or _is_mixer(self.mixer) or are_branches
        require(is_mixer, "mixer", self.mixer, f"{ARE_MIXERS}, a tuple of two Branches or more, or None")
        is_feed_forward = type(self.feed_forward) in FEED_FORWARDS
        is_right = is_feed_forward or (self.feed_forward is None and self.mixer is not None)
        require(is_right, "feed_forward", self.feed_forward, "an MLP, MoE or both, or None beside a mixer")
        is_embedding = self.embedding is None or isinstance(self.embedding, LayerEmbedding)
        require(is_embedding, "embedding", self.embedding, "a LayerEmbedding or None")
        require(isinstance(self.norm, Norm), "norm", self.norm, "a Norm")
        for name in ("has_pre_norms", "has_post_norms", "has_scale"):
            require_bool(name, getattr(self, name))
        require_positive("residual_scale", self.residual_scale)

    @property
    def branches(self) -> tuple[Branch, ...]:
        """The branches of the layer, of which a mixer by itself is one; () if it has none."""
        if self.mixer is None:
            return ()
        return self.mixer if isinstance(self.mixer, tuple) else (Branch(mixer=self.mixer),)

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """The mixers of the layer, each of which has its own pages; () if it has none."""
        return tuple(branch.mixer for branch in self.branches)

    def map_mixers(self, change: Callable[[Mixer], Mixer]) -> Layer:
        """Returns the layer with `change(mixer)` in the place of each mixer."""
        if self.mixer is None:
            return self
        if not isinstance(self.mixer, tuple):
            return replace(self, mixer=change(self.mixer))
        return replace(self, mixer=tuple(replace(branch, mixer=change(branch.mixer)) for branch in self.mixer))

    @property
    def width(self) -> int:
        """The most numbers per token between two products, where queries, keys and values do not count."""
        parts = (*self.mixers, self.feed_forward, self.embedding)
        return max(part.width for part in parts if part is not None)


@dataclass(frozen=True)
class LayerGroup:
    """A short pattern of layers, repeated, and run by one scan: 5 local layers and a global one, 10 times."""

    layers: tuple[Layer, ...]
    repeats: int = 1

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """The mixers of the pattern, in order."""
        return tuple(mixer for layer in self.layers for mixer in layer.mixers)


class LayerStack(NamedTuple):
    """The layers at one place of a group's pattern. They are equal, so their tensors are stacked."""

    layer: Layer
    num_layers: int


class PlacedGroup(NamedTuple):
    """A group of layers with the pages of its mixers among the pools that it uses. Equal groups are traced once."""

    layers: tuple[Layer, ...]
    repeats: int
    places: tuple[PagePlace, ...]  # of each mixer, in these pools
    stacks: tuple[MixerStack, ...]  # of these pools


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only language model.

    Few groups compile fast; groups of one layer run fastest on CPU. `regrouped` changes them, and no result.
    """

    vocab_size: int
    hidden_size: int
    max_position: int  # tokens of a request
    groups: tuple[LayerGroup, ...]
    norm: Norm = RMS_NORM  # before the unembedding
    has_tied_embeddings: bool = False
    embedding_scale: float = 1.0  # multiplies embeddings
    logit_scale: float = 1.0  # multiplies logits
    logit_softcap: float | None = None  # bounds logits by softcap * tanh(logit / softcap)
    has_logits: bool = True  # False: no unembedding, as in embedding models, which end with the states of tokens
    # Rows of embedding and unembedding after those of the vocabulary, so that devices can split them. Their logits are
    # -inf.
    vocab_padding: int = 0
    # The pages before a token's own of which it reads exact keys and values; it reads those of earlier pages rounded.
    # None: it reads all as the cache holds them. See `with_open_pages`.
    num_exact: int | None = None

    def __post_init__(self) -> None:
        require_int("vocab_padding", self.vocab_padding, 0)
        if self.num_exact is not None:
            require_int("num_exact", self.num_exact, 0)
        for name in ("vocab_size", "hidden_size", "max_position"):
            require_int(name, getattr(self, name), 1)
        groups = as_tuple("groups", self.groups, "several LayerGroups with layers")
        object.__setattr__(self, "groups", groups)
        are_groups = bool(groups) and all(
            isinstance(group, LayerGroup) and _are_layers(group.layers) and is_int(group.repeats) and group.repeats > 0
            for group in groups
        )
        require(are_groups, "groups", groups, "several LayerGroups with layers")
        require(isinstance(self.norm, Norm), "norm", self.norm, "a Norm")
        for name in ("has_tied_embeddings", "has_logits"):
            require_bool(name, getattr(self, name))
        for name in ("embedding_scale", "logit_scale"):
            require_positive(name, getattr(self, name))
        if self.logit_softcap is not None:
            require_positive("logit_softcap", self.logit_softcap)
        embedding = self.layers[0].embedding
        are_same = all(layer.embedding == embedding for layer in self.layers)
        require(are_same, "embedding", [layer.embedding for layer in self.layers], "the same in all layers")
        has_rows = embedding is None or embedding.vocab_size >= self.vocab_size
        require(has_rows, "embedding", embedding, f"one of at least vocab_size={self.vocab_size} rows")
        for index, layer in enumerate(self.layers):
            for mixer in layer.mixers:
                self._require_source(index, mixer)

    def _require_source(self, index: int, mixer: Mixer) -> None:
        source = source_of(mixer)
        if source is not None:
            earlier = self.layers[source].mixers if source < index else ()
            fits = any(can_read(mixer, other) for other in earlier)
            is_right = (
                f"a layer before layer {index} with keys and values of its own, of the same heads, rope and window"
            )
            require(fits, "source", source, is_right)

    @cached_property
    def stacks(self) -> tuple[LayerStack, ...]:
        """The stacks of layers, group by group. Each has its own tensors."""
        return tuple(LayerStack(layer, group.repeats) for group in self.groups for layer in group.layers)

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """All layers in the order in which a token passes them."""
        return tuple(layer for group in self.groups for _ in range(group.repeats) for layer in group.layers)

    @cached_property
    def mixers(self) -> tuple[Mixer, ...]:
        """The mixers of all layers."""
        return tuple(mixer for layer in self.layers for mixer in layer.mixers)

    @cached_property
    def is_recurrent(self) -> bool:
        """True if some mixer keeps a state instead of keys and values."""
        return any(functions_of(mixer).is_recurrent for mixer in self.mixers)

    def for_length(self, num_tokens: int | None) -> ModelConfig:
        """Returns the model for requests of up to `num_tokens`, None being `max_position`.

        With LongRoPE, a model of more tokens than `max_position` has other frequencies, for all its requests.
        """
        is_long = num_tokens is not None and num_tokens > self.max_position
        return self._lengthened if is_long else self

    @property
    def longest(self) -> int:
        """The most tokens of a request that `for_length` allows."""
        return self._lengthened.max_position

    @cached_property
    def _lengthened(self) -> ModelConfig:
        ropes = {mixer.rope: lengthened(mixer.rope) for mixer in self.mixers if mixer.rope is not None}
        longer = [new.max_position for old, new in ropes.items() if new != old]
        if not longer:
            return self

        def change(mixer: Any) -> Mixer:
            return mixer if mixer.rope is None else replace(mixer, rope=ropes[mixer.rope])

        groups = tuple(
            replace(group, layers=tuple(layer.map_mixers(change) for layer in group.layers)) for group in self.groups
        )
        return replace(self, groups=groups, max_position=max(longer))

    def for_devices(self, *numbers: int) -> ModelConfig:
        """Returns the same model with KV heads and a vocabulary that devices can split.

        The first of `numbers` shares the vocabulary, which gets rows of padding after its own. For KV heads, which get
        copies, the later numbers count too: see `Attention.for_devices`. For one device the model has neither.
        """
        num_devices = numbers[0]

        def change(mixer: Mixer) -> Mixer:
            return mixer.for_devices(*numbers) if isinstance(mixer, Attention) else mixer

        def fitted(layer: Layer) -> Layer:
            table = layer.embedding
            if table is not None:
                table = replace(table, num_padding=-table.vocab_size % num_devices)
            return replace(layer.map_mixers(change), embedding=table)

        groups = tuple(replace(group, layers=tuple(map(fitted, group.layers))) for group in self.groups)
        return replace(self, groups=groups, vocab_padding=-self.vocab_size % num_devices)

    @property
    def padded_vocab_size(self) -> int:
        """The rows of the unembedding, and the logits of a token."""
        return self.vocab_size + self.vocab_padding

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @cached_property
    def layer_groups(self) -> tuple[int, ...]:
        """The number of layers of each group."""
        return tuple(group.repeats * len(group.layers) for group in self.groups)

    @cached_property
    def ends_of_groups(self) -> tuple[int, ...]:
        """The number of layers before the first group, which is 0, and up to the end of each group."""
        return tuple(accumulate(self.layer_groups, initial=0))

    @cached_property
    def layers_of_stacks(self) -> tuple[tuple[int, ...], ...]:
        """The indices of each stack's layers: patterns a b, twice, then a -> 0 2, 1 3, 4."""
        indices, first = [], 0
        for group, num_layers in zip(self.groups, self.layer_groups, strict=True):
            length = len(group.layers)
            indices += [tuple(range(first + place, first + num_layers, length)) for place in range(length)]
            first += num_layers
        return tuple(indices)

    @cached_property
    def page_kinds(self) -> tuple[PageKind, ...]:
        """The kinds of pages of the mixers. If there are several, the first keeps all tokens, the others fewer."""
        kinds = set(map(page_kind_of, self.mixers))
        if self.num_exact is not None:
            kinds.add(PageKind(num_exact=self.num_exact))
        if len(kinds) == 1 and not self.is_recurrent:
            return tuple(kinds)
        return PageKind(), *sorted(kinds - {PageKind()}, key=PageKind.order)

    @cached_property
    def mixer_stacks(self) -> tuple[MixerStack, ...]:
        """The stacks of mixers with pages of their own, in the order of `stacks`. Each has a pool.

        After them come the stacks of their open pages, if there are any.
        """
        own = [
            MixerStack(mixer, len(layers), self.page_kinds.index(page_kind_of(mixer)))
            for mixer, layers in self._stacks_of_mixers
            if source_of(mixer) is None
        ]
        if self.num_exact is None:
            return tuple(own)
        kind = self.page_kinds.index(PageKind(num_exact=self.num_exact))
        opened = [stack._replace(kind=kind, num_exact=self.num_exact) for stack in own if has_open_pages(stack.mixer)]
        return (*own, *opened)

    @cached_property
    def page_places(self) -> tuple[PagePlace, ...]:
        """The pages of all stacks of mixers, in the order of `stacks`."""
        places: list[PagePlace] = []
        pools: list[tuple[Mixer, tuple[int, ...]]] = []
        for mixer, layers in self._stacks_of_mixers:
            source = source_of(mixer)
            if source is None:
                places.append(PagePlace(len(pools)))
                pools.append((mixer, layers))
            else:
                fits = (source in own and can_read(mixer, other) for other, own in pools)
                pool = next(pool for pool, is_source in enumerate(fits) if is_source)
                places.append(PagePlace(pool, pools[pool][1].index(source)))
        shared = {place.pool for place in places if place.layer is not None}
        places = [place._replace(is_shared=place.pool in shared) for place in places]
        if self.num_exact is None:
            return tuple(places)
        with_open = [pool for pool, (mixer, _) in enumerate(pools) if has_open_pages(mixer)]
        opened = {pool: len(pools) + i for i, pool in enumerate(with_open)}
        return tuple(place._replace(open_pool=opened.get(place.pool)) for place in places)

    @cached_property
    def stacks_of_groups(self) -> tuple[slice, ...]:
        """Where the stacks of each group are among `stacks`."""
        ends = accumulate((len(group.layers) for group in self.groups), initial=0)
        return tuple(slice(*pair) for pair in pairwise(ends))

    @cached_property
    def placed_groups(self) -> tuple[tuple[tuple[int, ...], PlacedGroup], ...]:
        """For each group, the indices in `mixer_stacks` of the pools that it uses, and the group with its places."""
        groups, left = [], iter(self.page_places)
        for group in self.groups:
            own = list(islice(left, len(group.mixers)))
            opened = {place.open_pool for place in own if place.open_pool is not None}
            pools = tuple(sorted({place.pool for place in own} | opened))
            at: dict[int | None, int] = {pool: i for i, pool in enumerate(pools)}
            places = tuple(place._replace(pool=at[place.pool], open_pool=at.get(place.open_pool)) for place in own)
            stacks = tuple(self.mixer_stacks[pool] for pool in pools)
            groups.append((pools, PlacedGroup(group.layers, group.repeats, places, stacks)))
        return tuple(groups)

    @property
    def _stacks_of_mixers(self) -> Iterator[tuple[Mixer, tuple[int, ...]]]:
        """Yields the mixers of each stack of layers, and the indices of these layers."""
        for stack, layers in zip(self.stacks, self.layers_of_stacks, strict=True):
            for mixer in stack.layer.mixers:
                yield mixer, layers

    @cached_property
    def state_kind(self) -> int:
        """The index in `page_kinds` of recurrent states, of a model that has them."""
        return self.page_kinds.index(PageKind(is_state=True))

    @cached_property
    def sliding_window(self) -> int | None:
        """The most tokens that a token attends to in any layer, itself included; None if some layer sees all."""
        windows = {mixer.window for mixer in self.mixers} or {None}
        return None if None in windows else max(window for window in windows if window is not None)

    @cached_property
    def smallest_window(self) -> int | None:
        """The fewest tokens that a token attends to in any layer, itself included; None if every layer sees all."""
        return min((mixer.window for mixer in self.mixers if mixer.window is not None), default=None)

    def regrouped(self, layer_groups: Sequence[int]) -> ModelConfig:
        """Returns the same model with groups of these numbers of layers.

        Raises ValueError if they do not add up to the number of layers.
        """
        are_right = f"positive and sum to num_layers={self.num_layers}"
        counts = as_tuple("layer_groups", layer_groups, are_right)
        are_positive = all(is_int(n) and n > 0 for n in counts)
        require(are_positive and sum(counts) == self.num_layers, "layer_groups", counts, are_right)
        groups, first = [], 0
        for count in counts:
            groups.append(_as_group(self.layers[first : first + count]))
            first += count
        return replace(self, groups=tuple(groups))


def _is_mixer(value: Any) -> bool:
    return type(value) in MIXERS


def _are_layers(layers: tuple[Layer, ...]) -> bool:
    is_filled = isinstance(layers, tuple) and len(layers) > 0
    return is_filled and all(isinstance(layer, Layer) for layer in layers)


def _as_group(layers: Sequence[Layer]) -> LayerGroup:
    """Returns the layers as a group with the shortest pattern that they repeat."""
    n = len(layers)
    lengths = (length for length in range(1, n) if n % length == 0)
    length = next((length for length in lengths if layers[length:] == layers[:-length]), n)
    return LayerGroup(tuple(layers[:length]), n // length)


def scan_sizes(layers: Sequence[Layer], cuts: Collection[int] = ()) -> tuple[int, ...]:
    """Returns sizes of few groups: the longest runs of layers that repeat a pattern.

    A group ends after each of the numbers of layers in `cuts`.
    """
    sizes, first = [], 0
    for end in sorted({*cuts, len(layers)}):
        while first < min(end, len(layers)):
            sizes.append(_longest_run(layers[first:end]))
            first += sizes[-1]
    return tuple(sizes)


def _longest_run(layers: Sequence[Layer]) -> int:
    """Returns how many of the first layers repeat a pattern at least twice, for the best pattern; 1 if none does."""
    best = 1
    for length in range(1, len(layers) // 2 + 1):
        end = length
        while end < len(layers) and layers[end] == layers[end - length]:
            end += 1
        whole = end - end % length
        if whole >= 2 * length:
            best = max(best, whole)
    return best


def uniform_decoder(
    *,
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    max_position: int,
    rope_theta: float = 10_000.0,
    rope_scaling: RopeScaling | None = None,
    norm_epsilon: float = 1e-5,
    has_tied_embeddings: bool = False,
    has_qkv_bias: bool = False,
    has_output_bias: bool = False,
    has_mlp_bias: bool = False,
    has_qk_norm: bool = False,
    sliding_window: int | None = None,
    layer_groups: Sequence[int] = (),
) -> ModelConfig:
    """Returns the description of a decoder of equal layers: Llama and its sisters.

    `layer_groups` are the numbers of layers of each group; () makes one group.
    """
    require_int("num_layers", num_layers, 1)
    require_pairs("head_dim", head_dim)
    require_bool("has_qk_norm", has_qk_norm)
    norm = Norm(epsilon=norm_epsilon)
    attention = Attention(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope=Rope(dim=head_dim, max_position=max_position, theta=rope_theta, scaling=rope_scaling),
        window=sliding_window,
        has_qkv_bias=has_qkv_bias,
        has_output_bias=has_output_bias,
        qk_norm="head" if has_qk_norm else None,
    )
    mlp = MLP(intermediate_size=intermediate_size, has_bias=has_mlp_bias)
    config = ModelConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        max_position=max_position,
        groups=(LayerGroup((Layer(mixer=attention, feed_forward=mlp, norm=norm),), num_layers),),
        norm=norm,
        has_tied_embeddings=has_tied_embeddings,
    )
    counts = as_tuple("layer_groups", layer_groups, f"positive and sum to num_layers={num_layers}")
    return config.regrouped(counts) if counts else config
