"""The same layers in other groups are the same model: in which order they run, and which of them are stacked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jaxinfer.model.components.attention import Attention
from jaxinfer.model.components.mlp import MLP
from jaxinfer.model.components.recurrent.state_space import StateSpace
from jaxinfer.model.config import Branch, Layer, LayerGroup, ModelConfig, PageKind, PagePlace, scan_sizes


def layer_of(window: int | None) -> Layer:
    mixer = Attention(num_heads=2, num_kv_heads=1, head_dim=4, window=window)
    return Layer(mixer=mixer, feed_forward=MLP(intermediate_size=8))


# Of three kinds: a attends to a window, b to all, c to a narrower window.
STATE_SPACE = StateSpace(num_heads=2, head_dim=4, num_groups=1, state_size=4, conv_size=4)
KINDS = {"a": layer_of(8), "b": layer_of(None), "c": layer_of(3)}


def layers_of(kinds: str) -> tuple[Layer, ...]:
    """One layer per letter; spaces only separate."""
    return tuple(KINDS[kind] for kind in kinds.replace(" ", ""))


def model_of(*groups: tuple[str, int]) -> ModelConfig:
    """A model of groups, each a pattern of kinds and the number of its repeats."""
    parts = tuple(LayerGroup(layers_of(kinds), repeats) for kinds, repeats in groups)
    return ModelConfig(vocab_size=16, hidden_size=8, max_position=32, groups=parts)


def patterns_of(config: ModelConfig) -> list[tuple[str, int]]:
    names = {layer: kind for kind, layer in KINDS.items()}
    return [("".join(names[layer] for layer in group.layers), group.repeats) for group in config.groups]


def test_layers_run_group_by_group_and_pattern_by_pattern():
    config = model_of(("ab", 2), ("c", 3))

    assert config.layers == layers_of("abab ccc")
    assert (config.num_layers, config.layer_groups) == (7, (4, 3))


def test_a_stack_has_the_layers_of_one_place_in_a_pattern():
    config = model_of(("ab", 2), ("a", 1))

    assert config.layers_of_stacks == ((0, 2), (1, 3), (4,))
    assert [tuple(stack) for stack in config.stacks] == [(KINDS["a"], 2), (KINDS["b"], 2), (KINDS["a"], 1)]


@pytest.mark.parametrize("groups", [[("aab", 3), ("c", 2)], [("c", 1), ("ab", 4), ("ba", 1)], [("a", 5)]], ids=str)
def test_the_layers_of_stacks_are_all_layers_and_equal_within_a_stack(groups):
    config = model_of(*groups)

    assert sorted(i for indices in config.layers_of_stacks for i in indices) == list(range(config.num_layers))
    for stack, indices in zip(config.stacks, config.layers_of_stacks, strict=True):
        assert [config.layers[i] for i in indices] == [stack.layer] * stack.num_layers


@pytest.mark.parametrize(
    ("sizes", "patterns"),
    [
        ((6,), [("ab", 3)]),
        ((4, 2), [("ab", 2), ("ab", 1)]),
        ((3, 3), [("aba", 1), ("bab", 1)]),
        ((1,) * 6, [("a", 1), ("b", 1)] * 3),
        ([2, 4], [("ab", 1), ("ab", 2)]),
    ],
    ids=str,
)
def test_other_groups_have_the_shortest_patterns_of_the_same_layers(sizes, patterns):
    config = model_of(("ab", 3))

    regrouped = config.regrouped(sizes)

    assert patterns_of(regrouped) == patterns
    assert regrouped.layers == config.layers
    assert regrouped.layer_groups == tuple(sizes)


def test_other_groups_and_back_again_are_the_same_config():
    config = model_of(("ab", 2), ("c", 3))
    config = replace(config, has_tied_embeddings=True, logit_softcap=30.0)

    assert config.regrouped((1,) * 7).regrouped(config.layer_groups) == config


WRONG_SIZES: list[Any] = [(), (3,), (4, 2), (6, -1), (5, 0), (5.0,), (True, 4), 5, "5", None]


@pytest.mark.parametrize("sizes", WRONG_SIZES, ids=repr)
def test_groups_that_do_not_add_up_to_the_layers_are_refused(sizes):
    with pytest.raises(ValueError, match="layer_groups=.* is not allowed: .*positive and sum to num_layers=5"):
        model_of(("a", 5)).regrouped(sizes)


@pytest.mark.parametrize(
    ("kinds", "sizes"),
    [
        ("aaaa", (4,)),
        ("abab", (4,)),
        ("a", (1,)),
        ("abc", (1, 1, 1)),
        ("aaab aaab aaab", (12,)),
        ("aaab aaab aa", (8, 2)),  # as in Gemma 3, whose last pattern is cut off
        ("c aaaa", (1, 4)),
        ("bb aaaaaa", (2, 6)),
    ],
)
def test_few_scans_run_all_layers(kinds, sizes):
    assert scan_sizes(layers_of(kinds)) == sizes


@pytest.mark.parametrize(
    ("kinds", "cuts", "sizes"),
    [
        ("aaaaaa", (2,), (2, 4)),
        ("aaaaaa", (), (6,)),
        ("aaaaaa", (6,), (6,)),
        ("aaaaaa", (9, 0), (6,)),
        ("ababab", (2,), (1, 1, 4)),
        ("ababab", (4,), (4, 1, 1)),
        ("aaaaaa", (3, 2, 5, 3), (2, 1, 2, 1)),
    ],
)
def test_a_group_ends_after_the_layers_that_are_wanted_by_themselves(kinds, cuts, sizes):
    assert scan_sizes(layers_of(kinds), cuts) == sizes


@pytest.mark.parametrize(
    ("kinds", "widest", "narrowest"),
    [("aa", 8, 8), ("ac", 8, 3), ("ab", None, 8), ("bb", None, None), ("bca", None, 3)],
)
def test_the_window_of_a_model_is_that_of_its_layers(kinds, widest, narrowest):
    config = model_of((kinds, 2))

    assert (config.sliding_window, config.smallest_window) == (widest, narrowest)


def test_branches_of_a_layer_have_a_pool_of_their_kind_each():
    (attention,) = KINDS["c"].mixers
    layer = Layer(mixer=(Branch(mixer=attention), Branch(mixer=STATE_SPACE, output_scale=0.5)), feed_forward=None)
    config = replace(model_of(("a", 1)), groups=(LayerGroup((layer, KINDS["b"]), 2),))

    assert layer.mixers == (attention, STATE_SPACE)
    assert config.page_kinds == (PageKind(), PageKind(window=3), PageKind(is_state=True))
    assert [(*stack,) for stack in config.mixer_stacks] == [
        (attention, 2, 1, None),
        (STATE_SPACE, 2, 2, None),
        (KINDS["b"].mixer, 2, 0, None),
    ]
    assert config.is_recurrent
    assert (config.sliding_window, config.smallest_window) == (None, 3)


def test_a_layer_that_reads_another_has_no_pages_of_its_own():
    def reader(kind: str, source: int) -> Layer:
        return replace(KINDS[kind], mixer=replace(KINDS[kind].mixer, source=source))  # type: ignore[type-var]

    config = model_of(("ab", 2))
    readers = LayerGroup((reader("b", 3), reader("a", 0)), 3)
    config = replace(config, groups=(*config.groups, readers))

    assert config.mixer_stacks == model_of(("ab", 2)).mixer_stacks
    assert config.page_kinds == (PageKind(), PageKind(window=8))
    places = (PagePlace(0), PagePlace(1), PagePlace(1, 1), PagePlace(0, 0))
    assert config.page_places == tuple(place._replace(is_shared=True) for place in places)
    assert model_of(("ab", 2), ("c", 1)).page_places == (PagePlace(0), PagePlace(1), PagePlace(2))
    for kind, source in (("a", 3), ("b", 4), ("b", 9), ("c", 0)):
        with pytest.raises(ValueError, match=f"source={source} is not allowed: source must be a layer before layer 4"):
            replace(config, groups=(*config.groups[:1], LayerGroup((reader(kind, source),))))


@pytest.mark.parametrize("mixer", [(), (Branch(mixer=STATE_SPACE),), (STATE_SPACE, STATE_SPACE), [STATE_SPACE], "x"])
def test_what_is_no_mixer_and_no_two_branches_is_refused(mixer):
    with pytest.raises(ValueError, match="mixer=.* is not allowed: .* a tuple of two Branches or more"):
        Layer(mixer=mixer, feed_forward=None)


def test_a_layer_without_a_mixer_keeps_nothing_and_sees_no_token():
    config = model_of(("aca", 2))  # windows of 8 and of 3
    half = replace(KINDS["a"], mixer=None)

    beside = replace(config, groups=(*config.groups, LayerGroup((half,), 3)))

    assert beside.mixer_stacks == config.mixer_stacks
    assert (beside.sliding_window, beside.page_kinds) == (8, (PageKind(), PageKind(window=3), PageKind(window=8)))


@pytest.mark.parametrize("repeats", [0, -1, 1.0, True, None])
def test_a_group_that_repeats_no_number_of_times_is_refused(repeats):
    with pytest.raises(ValueError, match="groups=.* is not allowed: groups must be several LayerGroups with layers"):
        model_of(("a", 2), ("b", repeats))
