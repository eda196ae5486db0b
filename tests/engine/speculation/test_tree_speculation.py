"""Trees of drafts change how many tokens a step brings and nothing else; what they are worth is known beforehand."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.checkpoint import Checkpoint
from jaxinfer.config import EngineConfig, SamplingParams
from jaxinfer.engine.drafters.draft_heads import HeadDrafter
from jaxinfer.engine.drafters.early_exit import ExitDrafter
from jaxinfer.engine.engine import BUNDLED_MODEL
from jaxinfer.engine.scheduling.drafts import DraftTree, first_of, parents_of, rest_of, some_of
from jaxinfer.engine.speculation.draft_choice import choose_drafts
from jaxinfer.engine.speculation.load import plan_speculation
from jaxinfer.engine.speculation.proposer import DraftProposer
from jaxinfer.engine.speculation.speculation import Speculation
from jaxinfer.model.components.mlp import MLP
from jaxinfer.model.config import LayerGroup
from jaxinfer.steps.medusa import MedusaHeads, parents_of_paths
from tests.engine.engines import (
    ScriptedTrees,
    are_tpu_kernels_interpreted,
    crowded_engine,
    drafts_from,
    forget_prefixes,
    recorded_steps,
    run_with_arrivals,
)
from tests.engine.fake_device import make_request
from tests.engine.probe import scheduler_of
from tests.engine.speculation.test_speculation import PARAMS, PROMPTS, FixedTimes, answers, contents, target_of
from tests.steps.test_eagle import eagle_head

__all__ = ["answers"]  # a fixture


@pytest.fixture(scope="module")
def branching_llm(checkpoint):
    """As `crowded_llm`, whose other steps are its own as well, with trees of up to 4 drafts."""
    return crowded_engine(checkpoint, max_drafts=4, draft_trees=True, speculation=ScriptedTrees(0))


def are_alike(found, expected):
    """Whether all bits are the same; up to rounding by the TPU kernels, which do not read a path as one run."""
    if not are_tpu_kernels_interpreted():
        return contents(found) == contents(expected)
    pairs = zip(found, expected, strict=True)
    return all(a.token_ids == b.token_ids and np.allclose(a.log_probs, b.log_probs, atol=1e-4) for a, b in pairs)


@pytest.mark.parametrize("acceptance", [0.5, 0.95])
def test_trees_of_any_shape_leave_every_bit_as_it_is(branching_llm, answers, acceptance):
    forget_prefixes(branching_llm)
    before = branching_llm.metrics()

    with drafts_from(branching_llm, ScriptedTrees(acceptance, answers)), recorded_steps(branching_llm) as steps:
        first = run_with_arrivals(branching_llm, PROMPTS, PARAMS, mean_arrivals=9.0)
        again = run_with_arrivals(branching_llm, PROMPTS, PARAMS, seed=1, mean_arrivals=0.3)

    assert are_alike(first, answers)
    assert are_alike(again, answers)
    after = branching_llm.metrics()
    assert after.num_accepted_tokens > before.num_accepted_tokens + 50
    assert after.num_preemptions > before.num_preemptions
    num_trees = sum(list(parents_of(d)) != list(range(-1, len(d) - 1)) for step in steps for d in step.chunks.drafts)
    assert num_trees > (10 if are_tpu_kernels_interpreted() else 20)  # of another model, which draws other tokens


@pytest.mark.parametrize(
    "changes", [{"repetition_penalty": 1.4, "no_repeat_ngram_size": 3}, {"logits_processors": {"turns": 2.0}}]
)
def test_what_reads_the_text_so_far_reads_the_path_alone(branching_llm, shared_llm, changes):
    params = SamplingParams(max_tokens=30, seed=9, ignore_eos=True, **changes)
    plain = shared_llm.generate(PROMPTS[:3], params, show_progress=False)
    before = branching_llm.metrics().num_accepted_tokens

    with drafts_from(branching_llm, ScriptedTrees(0.6, plain)):
        assert are_alike(branching_llm.generate(PROMPTS[:3], params, show_progress=False), plain)

    assert branching_llm.metrics().num_accepted_tokens > before


def test_a_structure_holds_in_every_branch(branching_llm, shared_llm):
    pytest.importorskip("llguidance")
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 3}
    params = [SamplingParams(json_schema=schema, seed=i, max_tokens=40, temperature=1.5) for i in range(4)]
    plain = shared_llm.generate(PROMPTS[:4], params, show_progress=False)
    before = branching_llm.metrics().num_accepted_tokens

    with drafts_from(branching_llm, ScriptedTrees(0.7, plain)):
        completions = branching_llm.generate(PROMPTS[:4], params, show_progress=False)

    assert are_alike(completions, plain)
    assert all(isinstance(json.loads(c.text), list) for c in completions if c.finish_reason == "stop")
    assert branching_llm.metrics().num_accepted_tokens > before


PATHS = ((0,), (0, 0), (1,), (0, 0, 0))


def medusa(config):
    weights = np.random.default_rng(0).standard_normal((3, config.hidden_size, 2 * config.hidden_size)) / 40
    return MedusaHeads(jnp.asarray(weights, jnp.float32))


def eagle(config):
    layer = replace(config.layers[0], feed_forward=MLP(intermediate_size=48))
    return eagle_head(replace(config, groups=(LayerGroup((layer,)),)))


@pytest.mark.parametrize("heads", [medusa, eagle])
def test_trees_of_heads_leave_every_bit_as_it_is(branching_llm, answers, heads):
    drafter = HeadDrafter(heads(branching_llm.model_config), PATHS)
    assert drafter.prepare(target_of(branching_llm)) == len(PATHS)
    forget_prefixes(branching_llm)

    with drafts_from(branching_llm, drafter), recorded_steps(branching_llm) as steps:
        assert are_alike(run_with_arrivals(branching_llm, PROMPTS, PARAMS, mean_arrivals=0.5), answers)

    trees = [drafts for step in steps for drafts in step.chunks.drafts if drafts]
    assert {tuple(parents_of(tree)) for tree in trees} <= {parents_of_paths(PATHS)[:n] for n in range(5)}
    assert sum(map(len, trees)) > 50


def test_trees_that_pay_are_waited_for_and_no_bit_changes(branching_llm, answers, monkeypatch):
    times: Any = FixedTimes(0.2)
    speculation = Speculation(ScriptedTrees(0.6, answers), max_drafts=4, max_tokens=5, times=times, clock=lambda: 0.0)
    speculation.proposer.takes_trees = True
    # However slow this machine is, and whatever was lost.
    monkeypatch.setattr(speculation._policy, "_budget", 1e9)
    monkeypatch.setattr(speculation._policy, "_num_plain", 0)
    monkeypatch.setattr(scheduler_of(branching_llm), "_speculation", speculation)
    forget_prefixes(branching_llm)

    with recorded_steps(branching_llm) as steps:
        completions = run_with_arrivals(branching_llm, PROMPTS, PARAMS, mean_arrivals=0.3)

    assert are_alike(completions, answers)
    sizes = {len(drafts) for step in steps if step.is_verify for drafts in step.chunks.drafts}
    assert len(sizes) > 2  # as many as are worth it, and not all
    assert not all(step.is_verify for step in steps if step.is_verify or step.is_decode)


# ---- trees, and what they are worth

TREE = DraftTree((5, 6, 7, 8, 5, 9), (-1, -1, 0, 0, 1, 2))


def test_the_drafts_after_a_token_are_those_of_its_branch():
    assert list(first_of(TREE)) == [5, 6]
    assert rest_of(TREE, 5) == DraftTree((7, 8, 9), (-1, -1, 0))
    assert rest_of(TREE, 6) == DraftTree((5,), (-1,))
    assert not rest_of(TREE, 7)
    assert (rest_of([5, 6], 5), rest_of([5, 6], 6), list(first_of([5, 6]))) == ([6], [], [5])


def test_the_first_drafts_of_a_tree_are_a_tree():
    assert TREE[:4] == DraftTree((5, 6, 7, 8), (-1, -1, 0, 0))
    assert some_of(TREE, {0, 3, 2, 5}) == DraftTree((5, 7, 8, 9), (-1, 0, 0, 1))
    with pytest.raises(IndexError, match=r"tree\[:count\]"):
        TREE[1:3]


@pytest.mark.parametrize(("token_ids", "parents"), [((5, 6), (-1, 1)), ((5,), (-2,)), ((5, 6), (-1,)), ((5,), (0,))])
def test_what_is_no_tree_is_refused(token_ids, parents):
    with pytest.raises(ValueError, match=r"DraftTree of token_ids=.* and parents=.* is no tree"):
        DraftTree(token_ids, parents)


class Guesses:
    """Drafts the same tree for everybody."""

    def __init__(self, tree):
        self.tree = tree

    def draft(self, requests, counts):
        return [self.tree for _ in requests]

    def forget(self, request):
        pass


def test_what_a_draft_is_worth_is_how_often_it_comes():
    proposer, request, random = DraftProposer(Guesses(TREE)), make_request(0, 4, 1000), np.random.default_rng(0)
    proposer.takes_trees = True
    children = {-1: (5, 6), 0: (7, 8), 1: (5,), 2: (9,)}
    emitted = np.zeros(len(TREE))
    for _ in range(1500):
        (tree,), place, came = proposer.draft([request], [len(TREE)]), -1, []
        while place in children:  # the first guess comes with 0.4, else the second with 0.5
            is_first = random.random() < 0.4
            is_second = not is_first and random.random() < 0.5
            rank = 0 if is_first else 1 if is_second else None
            token = children[place][rank] if rank is not None and rank < len(children[place]) else 99
            came.append(token)
            found = [i for i, pair in enumerate(zip(tree, parents_of(tree), strict=True)) if pair == (token, place)]
            if not found:
                break
            place = found[0]
            emitted[place] += 1
        proposer.rates.compare(request, came)

    rates = proposer.rates
    likelihoods = rates.likelihoods(request, TREE.parents)

    # The last 20 tries of a request count most, so its own rate is known to a tenth.
    np.testing.assert_allclose(likelihoods, emitted / 1500, atol=0.12)
    np.testing.assert_allclose(likelihoods[:2], [0.4, 0.3], atol=0.12)
    np.testing.assert_allclose(proposer.expected_likelihoods([request], 8)[0], [*likelihoods, 0, 0])
    assert rates.likelihoods(request, [-1, 0, 1]) == pytest.approx([likelihoods[0] ** i for i in (1, 2, 3)])
    assert rates.likelihoods(request, range(-1, 2)) == pytest.approx(rates.likelihoods(request, [-1, 0, 1]))


def test_the_likeliest_drafts_of_all_trees_are_verified_and_each_after_those_before_it():
    seconds = [1.0, *(1.0 + 0.01 * i for i in range(1, 5))]  # four are worth their time

    assert choose_drafts([[0.5, 0.3, 0.25, 0.2], [0.9, 0.1, 0.8]], seconds) == [3, 1]
    assert choose_drafts([[0.5, 0.1], [0.05, 0.9]], seconds) == [2, 2]


# ---- who is refused


def test_a_tree_is_refused_where_lists_are_verified():
    with pytest.raises(ValueError, match=r"Guesses drafted a tree for request 0, .* set EngineConfig.draft_trees"):
        DraftProposer(Guesses(TREE)).draft([make_request(0, 4, 9)], [6])


def test_no_more_drafts_are_taken_than_were_asked_for():
    proposer = DraftProposer(Guesses(TREE))
    proposer.takes_trees = True

    assert proposer.draft([make_request(0, 4, 9), make_request(1, 4, 9)], [2, 0]) == [TREE[:2], TREE[:0]]


CHAINS: dict[str, Any] = {"ngram": "ngram", "exit": ExitDrafter(1, jnp.ones(8), jnp.zeros((8, 8))), "none": None}


@pytest.mark.parametrize("name", CHAINS)
def test_trees_are_refused_of_who_makes_none(name):
    with pytest.raises(ValueError, match=r"draft_trees=True"):
        plan_speculation(CHAINS[name], EngineConfig(draft_trees=True), "float32", target=Checkpoint(BUNDLED_MODEL))


def speculation_of(drafter):
    speculation = plan_speculation(drafter, EngineConfig(draft_trees=True), "float32", target=Checkpoint(BUNDLED_MODEL))
    assert speculation is not None
    return speculation


def test_a_window_narrower_than_a_tree_is_refused(branching_llm):
    target = target_of(branching_llm)
    mixers: list[Any] = [layer.mixer for layer in target.model_config.layers]
    layers = tuple(
        replace(layer, mixer=replace(mixer, window=4))
        for layer, mixer in zip(target.model_config.layers, mixers, strict=True)
    )
    narrow = replace(target, model_config=replace(target.model_config, groups=(LayerGroup(layers),)))

    with pytest.raises(ValueError, match=r"sliding_window=4 is less than max_drafts=4 and a token"):
        speculation_of(Guesses(TREE)).prepare(narrow)
