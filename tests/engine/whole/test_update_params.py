"""Requests go on under parameters that replace those of a running engine, and nothing old is found afterwards."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import SamplingParams, load_checkpoint
from jaxinfer.checkpoint import load_params
from jaxinfer.engine.drafters.draft_heads import HeadDrafter
from jaxinfer.engine.drafters.early_exit import ExitDrafter
from jaxinfer.model.joined_params import Joint
from jaxinfer.quantization import quantize
from jaxinfer.steps.medusa import MedusaHeads
from tests.compiler import layers_apart, products_joined
from tests.engine.engines import (
    GREEDY,
    completions_of,
    drain,
    generate,
    num_owned_pages,
    num_preemptions,
    random_prompts,
    save_small_checkpoint,
    small_engine,
    token_ids_of,
)
from tests.engine.probe import runner_of, scheduler_of

# Requests that are preempted and swapped, and prefixes that are evicted, all the time.
CROWDED: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 5, "num_pages": 6, "host_cache_bytes": 10**7}
PREFIX = [*range(1, 36)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The same model after it has been trained: other weights."""
    return save_small_checkpoint(tmp_path_factory.mktemp("trained"), seed=1)


@pytest.fixture(scope="module")
def params(trained):
    return load_checkpoint(trained)[0]


@pytest.fixture(scope="module")
def trained_llm(trained):
    return small_engine(trained)


def continued(llm, prompt, output, sampling):
    """The output that follows from these weights after the given tokens, with their number of tokens in all."""
    rest = replace(sampling, max_tokens=sampling.max_tokens - len(output))
    (completion,) = generate(llm, [[*prompt, *output]], rest)
    return [*output, *completion.token_ids]


@pytest.mark.parametrize("more", [{}, {"decode_loop_steps": 4}, {"speculation": "ngram", "max_drafts": 3}])
def test_running_requests_go_on_under_the_new_weights(checkpoint, params, trained_llm, more):
    llm = small_engine(checkpoint, **CROWDED, **more)
    tiers = runner_of(llm)._tiers
    assert tiers is not None
    tiers.seconds_per_copy = 0.0
    prompts = random_prompts(20, max_len=40, seed=3)
    sampling = [
        SamplingParams(temperature=i % 2, seed=i, max_tokens=20 + i % 20, ignore_eos=True) for i in range(len(prompts))
    ]
    ids = [llm.add(prompt, own) for prompt, own in zip(prompts, sampling, strict=True)]
    before: dict[int, list[int]] = {request_id: [] for request_id in ids}
    deltas = []
    while num_preemptions(llm) < 1 or sum(map(len, before.values())) < 60:
        for delta in llm.step():
            deltas.append(delta)
            before[delta.request_id] += delta.token_ids
    assert llm.metrics().num_waiting > 0
    assert any(request.table.num_swapped_tokens for request in scheduler_of(llm)._requests.values())

    llm.update_params(params)
    assert num_owned_pages(llm) == llm.metrics().num_cached_pages == 0
    completions = completions_of(deltas + drain(llm))

    expected = [
        continued(trained_llm, prompt, before[request_id], own) if len(before[request_id]) < own.max_tokens else None
        for request_id, prompt, own in zip(ids, prompts, sampling, strict=True)
    ]
    assert sum(tokens is not None and len(tokens) > 0 for tokens in expected) >= 10
    for request_id, tokens in zip(ids, expected, strict=True):
        assert list(completions[request_id].token_ids) == (before[request_id] if tokens is None else tokens)
    assert num_owned_pages(llm) == 0


@pytest.fixture(scope="module")
def tiered_llm(checkpoint, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("d"))
    limits = {"host_cache_bytes": 10**7, "disk_cache_bytes": 10**7, "disk_cache_path": folder}
    llm = small_engine(checkpoint, num_pages=8, **limits)
    tiers = runner_of(llm)._tiers
    assert tiers is not None
    tiers.seconds_per_copy = 0.0
    return llm


@pytest.mark.parametrize("is_evicted", [False, True])
def test_a_cached_prompt_is_computed_again(tiered_llm, checkpoint, params, trained_llm, is_evicted):
    tiered_llm.update_params(load_checkpoint(checkpoint)[0])
    generate(tiered_llm, [PREFIX])
    assert generate(tiered_llm, [PREFIX])[0].num_cached_tokens == 32  # its full pages
    if is_evicted:  # into the tiers
        generate(tiered_llm, random_prompts(8, max_len=60, seed=5))

    tiered_llm.update_params(params)
    completions = [generate(tiered_llm, [PREFIX])[0] for _ in range(2)]

    assert [completion.num_cached_tokens for completion in completions] == [0, 32]
    assert token_ids_of(completions) == token_ids_of(generate(trained_llm, [PREFIX])) * 2


def test_the_old_weights_are_freed_and_come_back(checkpoint, params, trained_llm):
    llm = small_engine(checkpoint)
    old = generate(llm, [PREFIX])
    kept = weakref.ref(runner_of(llm).params.layers[0].mixer.q)

    llm.update_params(params)
    gc.collect()
    new = generate(llm, [PREFIX])
    llm.update_params(jax.tree.map(np.asarray, load_checkpoint(checkpoint)[0]))  # arrays of numpy are copied

    assert kept() is None
    assert token_ids_of(new) == token_ids_of(generate(trained_llm, [PREFIX]))
    assert token_ids_of(generate(llm, [PREFIX])) == token_ids_of(old)


def test_joined_weights_are_replaced_by_parts_and_by_joined_ones(checkpoint, trained, params, trained_llm):
    with products_joined():
        llm = small_engine(checkpoint)
        joined = load_checkpoint(trained)[0]
    old, new = generate(llm, [PREFIX]), token_ids_of(generate(trained_llm, [PREFIX]))
    kept = weakref.ref(runner_of(llm).params.layers[0].mixer.qkv)

    llm.update_params(params)
    gc.collect()
    assert kept() is None
    assert token_ids_of(generate(llm, [PREFIX])) == new

    llm.update_params(jax.tree.map(np.asarray, load_checkpoint(checkpoint)[0]))
    assert token_ids_of(generate(llm, [PREFIX])) == token_ids_of(old)

    llm.update_params(joined)
    assert token_ids_of(generate(llm, [PREFIX])) == new
    pointers = [tree.layers[0].mixer.qkv.unsafe_buffer_pointer() for tree in (runner_of(llm).params, joined)]
    assert pointers[0] == pointers[1]  # no array is copied
    # Of several devices, and of parts of which some lie on the host.
    parts = params.layers[0].mixer
    in_two = Joint((parts.q, parts.k, parts.v), 2).on(parts.q.sharding)
    for own in ({"q": np.asarray(parts.q)}, {"qkv": in_two, "q": None, "k": None, "v": None}):
        llm.update_params(jax.tree.map(np.asarray, load_checkpoint(checkpoint)[0]))
        assert token_ids_of(generate(llm, [PREFIX])) == token_ids_of(old)
        first = replace(params.layers[0], mixer=replace(parts, **own))
        llm.update_params(replace(params, layers=(first, *params.layers[1:])))
        assert token_ids_of(generate(llm, [PREFIX])) == new
    with pytest.raises(
        ValueError, match=r"params.layers\[0\].mixer.q has dtype bfloat16, but the engine's has float32"
    ):
        llm.update_params(changed(params, ".layers[0].mixer.q", lambda t: t.astype("bfloat16")))


def exit_drafter(width):
    return ExitDrafter(1, jnp.ones(width, jnp.float32), jnp.zeros((width, width), jnp.float32))


def head_drafter(width):
    return HeadDrafter(MedusaHeads(jnp.zeros((2, width, 2 * width), jnp.float32)))


@pytest.mark.parametrize("make_drafter", [exit_drafter, head_drafter])
def test_drafters_that_use_the_model_get_the_new_weights(checkpoint, trained, trained_llm, make_drafter):
    drafter: Any = make_drafter(144)
    llm = small_engine(checkpoint, max_num_seqs=2, speculation=drafter, max_drafts=2, adaptive_drafts=False)
    kept = weakref.ref(runner_of(llm).params.layers[0].mixer.q)
    new = load_params(trained, llm.model_config, "float32")
    request_id = llm.add(PREFIX, GREEDY)
    before = [token for _ in range(3) for delta in llm.step() for token in delta.token_ids]

    llm.update_params(new)
    gc.collect()
    completion = completions_of(drain(llm))[request_id]

    assert kept() is None
    assert list(completion.token_ids) == continued(trained_llm, PREFIX, before, GREEDY)
    assert token_ids_of(generate(llm, [[7, 8]])) == token_ids_of(generate(trained_llm, [[7, 8]]))


def test_log_probs_of_a_prompt_are_never_of_two_models(checkpoint, params, trained):
    llm = small_engine(checkpoint, max_num_batched_tokens=8, max_prompt_log_probs=2)
    wanted = replace(GREEDY, prompt_log_probs=1)
    llm.add([*range(1, 60)], wanted)
    for _ in range(3):  # of eight steps
        llm.step()

    llm.update_params(params)
    (completion,) = completions_of(drain(llm)).values()

    fresh = small_engine(trained, max_num_batched_tokens=8, max_prompt_log_probs=2)
    (expected,) = generate(fresh, [[*range(1, 60)]], wanted)
    assert completion.prompt_log_probs == expected.prompt_log_probs
    assert completion.prompt_top_log_probs == expected.prompt_top_log_probs
    assert completion.token_ids == expected.token_ids


def test_a_call_may_update_between_its_steps(checkpoint, params, trained_llm):
    llm = small_engine(checkpoint)
    expected = generate(llm, [PREFIX], replace(GREEDY, max_tokens=3))[0].token_ids

    def update(step, seconds):
        (request,) = scheduler_of(llm)._requests.values()
        if request.num_output_tokens == 3:
            llm.on_step = None
            llm.update_params(params)

    llm.on_step = update
    (completion,) = generate(llm, [PREFIX])
    assert list(completion.token_ids) == continued(trained_llm, PREFIX, expected, GREEDY)


def test_texts_and_files_belong_to_the_weights_they_came_from(checkpoint, params, tmp_path):
    llm = small_engine(checkpoint)
    before = llm.identity()
    request_id = llm.add(PREFIX, GREEDY)
    llm.step()
    llm.save(request_id, tmp_path / "old")
    restored = llm.restore(tmp_path / "old")  # has not run when the weights change

    llm.update_params(params)
    llm.save(request_id, tmp_path / "new")

    assert {name for name in before if before[name] != llm.identity()[name]} == {"model"}
    with pytest.raises(ValueError, match=r"was saved with weights="):
        llm.restore(tmp_path / "old")
    again = llm.restore(tmp_path / "new")
    completions = completions_of(drain(llm))
    assert completions[again].token_ids == completions[request_id].token_ids == completions[restored].token_ids
    with pytest.raises(ValueError, match=r"was saved with weights="):
        small_engine(checkpoint).restore(tmp_path / "new")


def changed(params, path, change):
    return jax.tree_util.tree_map_with_path(
        lambda own, tensor: change(tensor) if jax.tree_util.keystr(own) == path else tensor, params
    )


WRONG = {
    "nothing": (lambda p: None, r"params=None is not allowed: params must be the Params"),
    "shape": (
        lambda p: changed(p, ".final_norm", lambda t: t[:-1]),
        r"params.final_norm has shape \(143,\), but .*144",
    ),
    "dtype": (
        lambda p: changed(p, ".layers[0].mixer.q", lambda t: t.astype("bfloat16")),
        r"params.layers\[0\].mixer.q has dtype bfloat16, but the engine's has float32; give parameters like those",
    ),
    "missing": (lambda p: replace(p, layers=()), r"params has no tensor .layers\[0\].mixer.q"),
    "unknown": (lambda p: replace(p, lens=p.final_norm), r"params has a tensor .lens, which"),
    "number": (
        lambda p: replace(p, final_norm=1.0),
        r"params.final_norm=1.0 is not allowed: .* must be an array",
    ),
    "scale": (lambda p: replace(p, logits=replace(p.logits, scale=2.0)), r"params has logits=.*scale=2.0"),
    "quantized": (
        lambda p: changed(p, ".layers[0].feed_forward.down", quantize),
        r"params.layers\[0\].feed_forward.down is quantized, and the engine's is not; load them without",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_other_parameters_are_refused_by_their_first_difference(llm, params, name):
    change, message = WRONG[name]
    expected, identity = token_ids_of(generate(llm, [PREFIX])), llm.identity()

    with pytest.raises(ValueError, match=message):
        llm.update_params(change(params))

    assert token_ids_of(generate(llm, [PREFIX])) == expected
    assert llm.identity() == identity


def test_donated_parameters_are_refused(llm, params):
    donated = jax.tree.map(jnp.array, params)
    donated.final_norm.delete()

    with pytest.raises(ValueError, match=r"params.final_norm was donated or deleted; give arrays"):
        llm.update_params(donated)


def test_an_engine_of_quantized_weights_takes_weights_quantized_alike(checkpoint, trained):
    llm, fresh = (small_engine(path, quantization="int8") for path in (checkpoint, trained))

    with pytest.raises(ValueError, match=r"params.layers\[0\].feed_forward.down is not quantized, and the engine's is"):
        llm.update_params(load_checkpoint(trained)[0])
    llm.update_params(load_checkpoint(trained, quantization="int8")[0])

    assert token_ids_of(generate(llm, [PREFIX])) == token_ids_of(generate(fresh, [PREFIX]))


def test_new_parameters_from_the_host_need_room_for_one_set_on_the_device(checkpoint, trained, monkeypatch):
    with layers_apart():  # as the exit needs them
        params, _ = load_checkpoint(trained)
    llm = small_engine(checkpoint, speculation=ExitDrafter(1, jnp.ones(144), jnp.eye(144)), max_drafts=2)
    expected = token_ids_of(generate(small_engine(trained), [PREFIX]))
    generate(llm, [PREFIX])
    largest = max(tensor.nbytes for tensor in jax.tree.leaves(params))
    host_params = jax.tree.map(np.asarray, params)
    gc.collect()
    before, peaks, put = num_bytes(), [], jax.device_put

    def watched(*args: Any, **kwargs: Any) -> Any:
        placed = put(*args, **kwargs)
        peaks.append(num_bytes())
        return placed

    with monkeypatch.context() as patch:
        patch.setattr(jax, "device_put", watched)
        llm.update_params(host_params)

    assert len(peaks) >= len(jax.tree.leaves(params))
    assert max(peaks) <= before + largest
    assert token_ids_of(generate(llm, [PREFIX])) == expected


def test_an_engine_without_room_for_new_parameters_has_failed_and_frees_its_memory(checkpoint, params, monkeypatch):
    llm = small_engine(checkpoint)
    cache = weakref.ref(jax.tree.leaves(runner_of(llm)._cache)[0])

    def fail(*_: Any, **__: Any) -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")

    with monkeypatch.context() as patch:
        patch.setattr(jax, "device_put", fail)
        with pytest.raises(jax.errors.JaxRuntimeError):
            llm.update_params(jax.tree.map(np.asarray, params))
    with pytest.raises(RuntimeError, match="has failed .*RESOURCE_EXHAUSTED"):
        llm.add([5])
    llm.close()
    gc.collect()

    assert cache() is None
    with pytest.raises(RuntimeError, match="has failed .*RESOURCE_EXHAUSTED"):
        llm.add([5])


def num_bytes() -> int:
    return sum(array.nbytes for array in jax.live_arrays())


def test_a_stream_that_was_made_before_the_update_shares_no_page_of_the_old_parameters(checkpoint, params, trained_llm):
    llm = small_engine(checkpoint, disk_cache_path=None)
    generate(llm, [PREFIX])  # its pages are cached
    stream = llm.stream(PREFIX, GREEDY)

    llm.update_params(params)

    *_, last = stream
    assert last.completion is not None
    assert last.completion.token_ids == generate(trained_llm, [PREFIX])[0].token_ids
    other = generate(llm, [PREFIX])[0]  # the pages of the stream are those of the new parameters
    assert (other.num_cached_tokens > 0, other.token_ids) == (True, last.completion.token_ids)
