"""Requests with LoRA adapters: the tokens of each alone and of its merged model, and adapters that come and go."""

from __future__ import annotations

import gc
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import peft
import pytest
import torch

from jaxinfer.config import SamplingParams
from jaxinfer.engine.execution.compiled_steps import CompileCounter
from jaxinfer.engine.llm import LLM
from jaxinfer.model.components.adapted import AdaptedArray
from jaxinfer.plan.memory import num_bytes
from tests.adapters import merge, save_adapter
from tests.compiler import products_joined
from tests.engine.engines import (
    GREEDY,
    completions_of,
    content_of,
    drain,
    forget_prefixes,
    random_prompts,
    require_idle,
    small_engine,
    token_ids_of,
)
from tests.engine.probe import runner_of, warm_up_of
from tests.oracles import load_reference

NAMES = [f"adapter {i}" for i in range(8)]
SLOTS: dict[str, Any] = {"max_adapters": 8, "max_adapter_rank": 8}
CROWDED: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 5, "num_pages": 6}
is_on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="bit-equality is promised on CPU")


@pytest.fixture(scope="module")
def folders(checkpoint, tmp_path_factory) -> list[Path]:
    """Adapters of ranks 1 to 8, two of them with DoRA."""
    folder = tmp_path_factory.mktemp("adapters")
    kinds = [{"use_rslora": i % 2 == 1, "use_dora": i % 4 == 3, "lora_alpha": 4 + i} for i in range(8)]
    return [save_adapter(folder / str(i), checkpoint, seed=i, rank=1 + i, **kinds[i]) for i in range(8)]


def engine_with(checkpoint: Path, folders: list[Path], make: Any = small_engine, **limits: Any) -> LLM:
    llm = make(checkpoint, **{**SLOTS, **limits})
    for name, folder in zip(NAMES, folders, strict=True):
        llm.load_adapter(name, folder)
    return llm


@pytest.fixture(scope="module")
def shared(checkpoint, folders):
    return engine_with(checkpoint, folders, max_prompt_log_probs=3)


@pytest.fixture
def llm(shared):
    yield shared
    require_idle(shared)


def complete(llm: LLM, prompt: Any, params: SamplingParams = GREEDY, **options: Any) -> Any:
    return llm.generate(prompt, params, show_progress=False, **options)[0]


def log_probs_under(path: Path, token_ids: list[int]) -> np.ndarray:
    """The log-probability of each token but the first, by `transformers`."""
    return _log_probs(load_reference(path), token_ids)


def with_adapter(model: Any, folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, about what peft calls
        return peft.PeftModel.from_pretrained(model, folder)


def _log_probs(model: Any, token_ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        logits = model(torch.tensor([token_ids])).logits[0, :-1].double()
    return logits.log_softmax(-1)[range(len(token_ids) - 1), token_ids[1:]].numpy()


@is_on_cpu
@pytest.mark.parametrize(
    "limits",
    [
        {**CROWDED, "quantization": "int8", "decode_loop_steps": 4},
        {"speculation": "suffix", "adaptive_drafts": False, "max_drafts": 3},
    ],
    ids=["crowded, int8, loops", "drafts"],
)
def test_many_adapters_in_a_batch_give_each_request_its_bits_alone(limits, checkpoint, folders):
    llm = engine_with(checkpoint, folders, **limits)
    shared, rng = [7] * 20, np.random.default_rng(0)
    prompts = [[*shared[: 10 * (i % 3)], *prompt] for i, prompt in enumerate(random_prompts(16, max_len=30, seed=1))]
    kinds: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.9, "log_probs": 2}]
    params = [SamplingParams(max_tokens=3 + i, seed=i, ignore_eos=True, **kinds[i % 2]) for i in range(16)]
    adapters = [*NAMES, *NAMES[:5], None, None, None]
    waiting, ids, deltas = rng.permutation(16).tolist(), {}, []
    while waiting or llm.has_unfinished:
        for i in [waiting.pop() for _ in range(min(rng.poisson(1.5), len(waiting)))]:
            ids[i] = llm.add(prompts[i], params[i], adapter=adapters[i])
        deltas += llm.step()
    together = completions_of(deltas)

    contents = set()
    for i in range(16):
        forget_prefixes(llm)
        alone = complete(llm, prompts[i], params[i], adapter=adapters[i])
        assert content_of(alone) == content_of(together[ids[i]]), (i, adapters[i])
        contents.add(complete(llm, prompts[0], adapter=adapters[i]).log_probs)
    assert len(contents) == 9  # each adapter changes the numbers


def test_adapters_change_the_parts_of_joined_tensors(llm, checkpoint, folders):
    with products_joined():
        joined = engine_with(checkpoint, folders)
    assert runner_of(joined).params.layers[0].mixer.q is None
    params = SamplingParams(max_tokens=8, temperature=0, log_probs=1, ignore_eos=True)

    for name in (*NAMES, None):
        found, expected = (complete(engine, [7, 8, 9], params, adapter=name) for engine in (joined, llm))
        assert found.token_ids == expected.token_ids
        np.testing.assert_allclose(found.log_probs, expected.log_probs, atol=1e-5)
    forget_prefixes(llm)


@is_on_cpu
def test_requests_without_an_adapter_have_the_bits_of_an_engine_without_slots(llm, shared_llm):
    prompt = random_prompts(1, max_len=30, seed=5)[0]

    params = SamplingParams(max_tokens=9, seed=5, ignore_eos=True)

    assert content_of(complete(llm, prompt, params)) == content_of(complete(shared_llm, prompt, params))
    forget_prefixes(shared_llm)


def test_log_probs_are_those_of_the_merged_model_and_of_peft(llm, checkpoint, folders, tmp_path):
    prompt = random_prompts(1, max_len=30, seed=3)[0] + list(range(40, 60))
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, prompt_log_probs=0)
    base = log_probs_under(checkpoint, prompt)
    for i in (0, 3, 7):
        completion = complete(llm, prompt, params, adapter=NAMES[i])
        tokens = [*prompt, *completion.token_ids]
        ours = np.array([*completion.prompt_log_probs[1:], *completion.log_probs])

        merged = log_probs_under(merge(checkpoint, folders[i], tmp_path / str(i)), tokens)
        unmerged = _log_probs(with_adapter(load_reference(checkpoint), folders[i]), tokens)

        np.testing.assert_allclose(ours, merged, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(ours, unmerged, rtol=1e-5, atol=1e-5)
        assert abs(ours[: len(base)] - base).max() > 0.1


def test_an_engine_without_adapters_has_the_steps_that_it_had(checkpoint):
    llm = small_engine(checkpoint)

    leaves = jax.tree.leaves(runner_of(llm)._params, is_leaf=lambda node: isinstance(node, AdaptedArray))
    assert not any(isinstance(leaf, AdaptedArray) for leaf in leaves)
    arguments = warm_up_of(llm).compiler._empty.values()
    assert all(batch.adapters is None for batch, *_ in arguments)
    with pytest.raises(ValueError, match="no slots for adapters .*raise EngineConfig.max_adapters"):
        llm.load_adapter("a", checkpoint)


def test_the_memory_plan_counts_the_slots(llm, shared_llm):
    slots = num_bytes(runner_of(llm)._adapters._slots)

    difference = warm_up_of(llm).ready().memory.resident_bytes - warm_up_of(shared_llm).ready().memory.resident_bytes
    assert difference == slots > 9 * 8 * 144 * 4 * 7


def test_200_adapters_come_and_go_under_load_without_a_compilation(checkpoint, folders):
    llm = small_engine(checkpoint, max_adapters=2, max_adapter_rank=8)
    llm.load_adapter("kept", folders[0])
    long = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompts = random_prompts(3, max_len=20, seed=2)
    expected = complete(llm, prompts[0], long, adapter="kept")
    of_others = {}
    for i in (1, 2):  # compiles the steps that the test needs, which other engines may share
        llm.load_adapter("a", folders[i])
        of_others[i] = complete(llm, prompts[1], adapter="a").token_ids
        llm.unload_adapter("a")
    counter, num_bytes_before = CompileCounter(), 0
    request_id = llm.add(prompts[0], long, adapter="kept")
    found: list[Any] = []
    for turn in range(200):
        with counter:
            llm.load_adapter("a", folders[1 + turn % 2])
        if turn % 10 == 0:
            other = llm.add(prompts[1], GREEDY, adapter="a")
            while other not in (done := completions_of(llm.step())):
                found += [done[request_id]] if request_id in done else []
            assert done[other].token_ids == of_others[1 + turn % 2]
        if request_id not in completions_of(deltas := llm.step()) and not llm.has_unfinished:
            request_id = llm.add(prompts[0], long, adapter="kept")
        found += completions_of(deltas).values()
        with counter:
            llm.unload_adapter("a")
        if turn == 50:
            gc.collect()
            num_bytes_before = sum(array.nbytes for array in jax.live_arrays())
    found += completions_of(drain(llm)).values()

    assert counter.count == llm.metrics().num_late_compiles == 0
    assert len(found) > 3
    assert {completion.log_probs for completion in found} == {expected.log_probs}
    gc.collect()
    assert sum(array.nbytes for array in jax.live_arrays()) <= num_bytes_before + 100_000  # of results under way


def test_prefixes_are_shared_by_contents_not_by_names(checkpoint, folders):
    llm = small_engine(checkpoint, max_adapters=2, max_adapter_rank=8)
    prompt = list(range(2, 40))

    def num_cached(name: str | None) -> int:
        return complete(llm, prompt, adapter=name).num_cached_tokens

    llm.load_adapter("a", folders[0])
    assert [num_cached("a"), num_cached(None)] == [0, 0]
    assert [num_cached("a"), num_cached(None)] == [32, 32]
    llm.unload_adapter("a")
    llm.load_adapter("a", folders[1])
    llm.load_adapter("b", folders[0])
    assert [num_cached("a"), num_cached("b")] == [0, 32]


def test_a_fork_and_a_saved_request_keep_their_adapter(llm, checkpoint, folders, tmp_path):
    prompt = list(range(2, 30))
    expected = complete(llm, prompt, adapter=NAMES[2]).token_ids
    request_id = llm.add(prompt, GREEDY, adapter=NAMES[2])
    while len(scheduled := llm.step()) == 0:
        pass
    assert scheduled[0].request_id == request_id
    branch = llm.fork(request_id)
    llm.save(request_id, tmp_path / "request")
    done = completions_of(drain(llm))
    assert [done[i].token_ids for i in (request_id, branch)] == [expected, expected]

    other = small_engine(checkpoint, max_adapters=2, max_adapter_rank=8, max_prompt_log_probs=3)
    other.load_adapter(NAMES[2], folders[3])
    with pytest.raises(ValueError, match="was saved with the adapter 'adapter 2', and none with the same contents"):
        other.restore(tmp_path / "request")
    other.load_adapter("renamed", folders[2])
    restored = other.restore(tmp_path / "request")
    assert completions_of(drain(other))[restored].token_ids == expected


def test_a_completion_names_its_adapter_and_is_not_compared_with_training(llm):
    completion = complete(llm, [5, 6], adapter=NAMES[0])

    assert completion.adapter == NAMES[0]
    assert complete(llm, [5, 6]).adapter is None
    with pytest.raises(
        ValueError, match=r"texts\[0\] is of the adapter 'adapter 0', and training is that of the model"
    ):
        llm.agreement(completion, show_progress=False)


def test_new_parameters_leave_adapters_as_they_are(checkpoint, folders):
    llm = small_engine(checkpoint, max_adapters=1, max_adapter_rank=8)
    llm.load_adapter("a", folders[0])
    expected = [complete(llm, [5, 6, 7], adapter=name).token_ids for name in ("a", None)]

    llm.update_params(jax.tree.map(lambda w: w + 0, runner_of(llm).params))

    assert [complete(llm, [5, 6, 7], adapter=name).token_ids for name in ("a", None)] == expected


def test_verbs_of_lists_take_an_adapter(llm):
    (expected,) = token_ids_of(llm.generate([[5, 6]], GREEDY, show_progress=False, adapter=NAMES[1]))
    chat = {"chat_template": "&%"}

    assert [t for delta in llm.stream([5, 6], GREEDY, adapter=NAMES[1]) for t in delta.token_ids] == [*expected]
    beams = [llm.beam_search([5, 6], num_beams=2, max_tokens=4, adapter=name)[0] for name in (NAMES[1], None)]
    vectors = llm.embed([[5, 6]], adapter=NAMES[1]), llm.embed([[5, 6]])
    messages = [{"role": "user", "content": "a"}]
    chats = [llm.chat(messages, GREEDY, show_progress=False, adapter=name, **chat)[0] for name in (NAMES[1], None)]
    assert beams[0].log_probs != beams[1].log_probs
    assert not np.allclose(*vectors)
    assert chats[0].log_probs != chats[1].log_probs


def test_what_cannot_be_done_is_refused_and_changes_nothing(llm, folders):
    assert llm.adapters == tuple(NAMES)
    with pytest.raises(ValueError, match="adapter='x' is not loaded, loaded are 'adapter 0', .*; load it"):
        llm.add([5], GREEDY, adapter="x")
    with pytest.raises(ValueError, match="adapter='x' is not loaded"):
        llm.unload_adapter("x")
    with pytest.raises(ValueError, match="the name 'adapter 1' is loaded already; unload it"):
        llm.load_adapter(NAMES[1], folders[0])
    with pytest.raises(ValueError, match=r"8 adapters are loaded .* the most that max_adapters=8 allows; unload one"):
        llm.load_adapter("x", folders[0])
    for name in ("", 5, None):
        with pytest.raises(ValueError, match=f"name={name!r} is not allowed"):
            llm.load_adapter(name, folders[0])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="adapter=5 is not allowed: give the name"):
        llm.add([5], GREEDY, adapter=5)  # pyright: ignore[reportArgumentType]
    assert llm.adapters == tuple(NAMES)


def test_an_adapter_in_use_is_not_unloaded_and_a_late_request_is_refused(llm, folders):
    request_id = llm.add([5, 6], GREEDY, adapter=NAMES[7])
    with pytest.raises(ValueError, match=r"'adapter 7' cannot be unloaded: 1 unfinished requests use it"):
        llm.unload_adapter(NAMES[7])
    llm.abort(request_id)
    drain(llm)
    with llm.engine() as engine:
        samples = engine.admit([5, 6], GREEDY, adapter=NAMES[7])
    llm.unload_adapter(NAMES[7])
    llm.load_adapter(NAMES[7], folders[7])

    with llm.engine() as engine, pytest.raises(ValueError, match="was unloaded after the prompt was admitted"):
        engine.submit(samples, print)
