"""What heads on the last states draft, by NumPy; and which files hold heads."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import jaxinfer
from jaxinfer.checkpoint import read_config
from jaxinfer.checkpoint.draft_heads import has_draft_heads, load_draft_heads
from jaxinfer.config import SamplingParams
from jaxinfer.engine.drafters.draft_heads import HeadDrafter
from jaxinfer.engine.drafters.early_exit import ExitDrafter
from jaxinfer.engine.speculation.load import drafter_of
from jaxinfer.sampling.batch import make_sampling
from jaxinfer.sampling.sample import best_tokens, perturb, sample
from jaxinfer.steps.eagle import EAGLE_TREE
from jaxinfer.steps.medusa import MEDUSA_TREE, MedusaHeads, chain_of, draft_from_states, parents_of_paths
from tests.replay import SMALL_MODEL, lively_params

CONFIG = SMALL_MODEL
ASSETS = Path(jaxinfer.__file__).parent / "assets"
K = 3


def head_logits(params, weights, hidden, tokens):
    """The formula of the heads, f64[B, K, V]."""
    embedding = np.asarray(params.embedding, np.float64)
    table = embedding if params.unembedding is None else np.asarray(params.unembedding, np.float64)
    steered = np.concatenate([hidden, embedding[tokens]], -1) @ weights.transpose(0, 2, 1)  # [K, B, D]
    states = hidden + steered / (1 + np.exp(-steered))
    return (states @ table.T).transpose(1, 0, 2)


@pytest.fixture(scope="module")
def case():
    random = np.random.default_rng(0)
    weights = random.standard_normal((K, 32, 64)).astype(np.float32)
    hidden = random.standard_normal((4, 32)).astype(np.float32)
    return lively_params(CONFIG), weights, hidden, np.array([3, 60, 0, 17], np.int32)


CHAIN = chain_of(K)
run = jax.jit(draft_from_states, static_argnames="paths")


def draft(case, sampling, positions, paths=CHAIN):
    """What heads draft from states [B, D] that lie in other rows, backwards."""
    params, weights, hidden, tokens = case
    rows, windows = np.arange(4, dtype=np.int32)[::-1], hidden[::-1, None]
    inputs = (rows, tokens[:, None], np.ones(4, np.int32))
    return run(params, MedusaHeads(weights), windows, *inputs, sampling, positions, paths=paths)


def test_greedy_heads_draft_the_most_probable_token_of_their_formula(case):
    sampling = make_sampling([SamplingParams(temperature=0)] * 4, num_rows=4)

    drafts = draft(case, sampling, np.arange(4, dtype=np.int32))

    np.testing.assert_array_equal(drafts, head_logits(*case).argmax(-1))


TREE = ((0,), (1,), (0, 0), (1, 0), (2,), (0, 1))


def test_the_tree_of_greedy_heads_has_the_most_probable_tokens_of_their_formula_in_order(case):
    sampling = make_sampling([SamplingParams(temperature=0)] * 4, num_rows=4)

    drafts = draft(case, sampling, np.arange(4, dtype=np.int32), TREE)

    best = np.argsort(-head_logits(*case), axis=-1)
    for i, path in enumerate(TREE):
        np.testing.assert_array_equal(drafts[:, i], best[:, len(path) - 1, path[-1]])


@jax.jit
def rank(logits, sampling, positions):
    best = best_tokens(logits, sampling, positions, 2)
    return best, sample(logits, sampling, positions), perturb(logits, sampling, positions)


def test_a_second_guess_is_what_would_be_drawn_without_the_first():
    params = [SamplingParams(temperature=t, top_k=20, seed=i) for i, t in enumerate((0.0, 0.7, 1.3))]
    sampling, positions = make_sampling(params, num_rows=3), jnp.array([5, 9, 2])
    logits = jnp.asarray(np.random.default_rng(2).standard_normal((3, 61)), jnp.float32)

    best, drawn, perturbed = rank(logits, sampling, positions)

    np.testing.assert_array_equal(best[:, 0], drawn)
    # Without noise and filters the second is the second largest; with them the one next to the drawn one.
    assert best[0, 1] == np.argsort(-np.asarray(logits[0]))[1]
    scores = np.array(perturbed)
    scores[np.arange(3), best[:, 0]] = -np.inf
    np.testing.assert_array_equal(best[1:, 1], scores[1:].argmax(-1))


@pytest.mark.parametrize("tree", [MEDUSA_TREE, EAGLE_TREE, TREE])
def test_every_path_of_a_tree_goes_on_from_one_before_it(tree):
    parents = parents_of_paths(tree)

    assert len(set(tree)) == len(tree)
    assert all(
        parent < i and path[:-1] == ((), *tree)[1 + parent]
        for i, (path, parent) in enumerate(zip(tree, parents, strict=True))
    )


def test_heads_make_no_drafts_for_places_that_they_have_no_head_for(case):
    assert MedusaHeads(case[1][:1]).tree == tuple((rank,) for rank in range(5))


def test_each_head_draws_with_the_noise_of_its_position(case):
    params = [SamplingParams(temperature=1.1, top_k=20, seed=i) for i in range(4)]
    sampling, positions = make_sampling(params, num_rows=4), np.array([5, 9, 2, 40], np.int32)

    drafts = draft(case, sampling, positions)

    for k in range(K):
        logits = jnp.asarray(head_logits(*case)[:, k], jnp.float32)
        np.testing.assert_array_equal(drafts[:, k], sample(logits, sampling, jnp.asarray(positions + k)))


def save_heads(folder, weights, **changes):
    description = {"drafter": "medusa", "num_heads": K, "hidden_size": 32, **changes}
    (folder / "draft_heads.json").write_text(json.dumps(description))
    save_file({"weights": weights}, folder / "draft_heads.safetensors")


def test_heads_are_loaded_from_their_folder(case, tmp_path):
    assert not has_draft_heads(tmp_path)
    save_heads(tmp_path, case[1])

    assert has_draft_heads(tmp_path)
    np.testing.assert_array_equal(load_draft_heads(tmp_path, "float32").tensors["weights"], case[1])


def test_an_early_exit_is_loaded_from_its_folder(tmp_path):
    tensors = {"norm": np.ones(8, np.float32), "lens": np.eye(8, dtype=np.float32)}
    description = {"drafter": "exit", "num_layers": 2, "hidden_size": 8}
    (tmp_path / "draft_heads.json").write_text(json.dumps(description))
    save_file(tensors, tmp_path / "draft_heads.safetensors")

    found = load_draft_heads(tmp_path, "float32")

    assert (found.kind, found.numbers) == ("exit", {"num_layers": 2, "hidden_size": 8})
    np.testing.assert_array_equal(found.tensors["lens"], tensors["lens"])


@pytest.mark.parametrize(("kind", "drafter"), [("medusa", HeadDrafter), ("eagle", HeadDrafter), ("exit", ExitDrafter)])
def test_the_drafters_that_come_with_the_package_are_for_its_model(kind, drafter):
    heads = load_draft_heads(ASSETS / f"tiny-{kind}", "float32")

    assert heads.kind == kind
    assert heads.numbers["hidden_size"] == read_config(ASSETS / "tiny").hidden_size
    assert isinstance(drafter_of(heads), drafter)


def test_what_comes_with_the_package_stays_small():
    sizes = {path: path.stat().st_size for path in ASSETS.rglob("*") if path.is_file()}

    assert sum(sizes.values()) < 16e6
    assert sum(size for path, size in sizes.items() if path.name.startswith("draft_heads")) < 4e6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"drafter": "owl"}, "of kind 'owl'"),
        ({"drafter": "exit"}, "num_layers=None is not allowed"),
        ({"num_heads": 4}, "says .*4, 32, 64."),
        ({"hidden_size": None}, "hidden_size=None is not allowed"),
    ],
)
def test_a_folder_of_anything_else_is_refused(case, tmp_path, changes, message):
    save_heads(tmp_path, case[1], **changes)

    with pytest.raises(ValueError, match=message):
        load_draft_heads(tmp_path, "float32")


@pytest.mark.parametrize("name", ["draft_heads.json", "draft_heads.safetensors"])
def test_a_file_that_is_cut_off_is_refused_with_its_folder(case, tmp_path, name):
    save_heads(tmp_path, case[1])
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole[: len(whole) // 2])

    with pytest.raises(ValueError, match=f"{tmp_path} holds no draft heads that can be read"):
        load_draft_heads(tmp_path, "float32")
