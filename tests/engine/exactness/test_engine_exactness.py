"""What a request yields is a function of the request: not of its neighbours, chunks or pages.

On CPU that holds for every bit of every log-probability, so nothing here has a tolerance.
"""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import numpy as np
import pytest

from jaxinfer.config import SamplingParams
from jaxinfer.engine.scheduling.step import Rows
from jaxinfer.plan.products import product_shapes
from tests.engine.engines import (
    are_tpu_kernels_interpreted,
    content_of,
    forget_prefixes,
    num_preemptions,
    plain_steps,
    poison_cache,
    random_prompts,
    run_with_arrivals,
    small_engine,
)
from tests.engine.probe import admission_of, runner_of, scheduler_of, warm_up_of

pytestmark = pytest.mark.bits

# Engines of other buckets, chunks and batches than those of the shared one (4 requests, 32 tokens, all pages).
# The page size is the same: it is a constant of an engine, and may change the order in which attention adds up.
ENGINES = {"larger steps": "roomy_llm", "tiny chunks, few pages": "crowded_llm"}
KINDS = [
    {"temperature": 0},
    {"temperature": 0, "log_probs": 3},
    {"temperature": 0.8},
    {"temperature": 1.5, "top_k": 20, "log_probs": 1},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.2, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
]
PROMPTS = random_prompts(18, max_len=50, seed=1)
PARAMS = [
    SamplingParams(**{"max_tokens": 3 + 2 * i, "seed": 1000 + i, "ignore_eos": i % 2 == 0, **KINDS[i % 6]})
    for i in range(18)
]


@pytest.fixture(scope="module")
def alone(shared_llm):
    """What each request yields when nothing else is computed and nothing was before."""
    with plain_steps(shared_llm, overlap=False):
        return [content_of(generate_alone(shared_llm, *pair)) for pair in zip(PROMPTS, PARAMS, strict=True)]


def generate_alone(llm, prompt, params):
    forget_prefixes(llm)
    completion = llm.generate(prompt, params, show_progress=False)[0]
    assert completion.num_cached_tokens == 0
    return completion


@pytest.fixture(scope="module")
def roomy_llm(checkpoint):
    return small_engine(checkpoint, max_num_seqs=8, max_num_batched_tokens=80)


@pytest.fixture(scope="module", params=list(ENGINES))
def other_llm(request):
    return request.getfixturevalue(ENGINES[request.param])


@pytest.mark.parametrize("arrivals_seed", [0, 1, 2])
def test_no_arrival_order_changes_a_bit(llm, alone, arrivals_seed):
    completions = run_with_arrivals(llm, PROMPTS, PARAMS, seed=arrivals_seed, mean_arrivals=0.7 + arrivals_seed)

    assert [content_of(c) for c in completions] == alone


def test_no_chunk_size_or_batch_size_changes_a_bit(other_llm, alone):
    poison_cache(other_llm)
    forget_prefixes(other_llm)

    completions = run_with_arrivals(other_llm, PROMPTS, PARAMS, mean_arrivals=2.0)

    assert [content_of(c) for c in completions] == alone


def test_no_chunk_size_changes_a_bit_of_a_request_alone(other_llm, alone):
    completions = [
        other_llm.generate(prompt, params, show_progress=False)[0]
        for prompt, params in zip(PROMPTS, PARAMS, strict=True)
    ]

    assert [content_of(c) for c in completions] == alone


@pytest.mark.parametrize("other_llm", ["tiny chunks, few pages"], indirect=True)
def test_no_preemption_changes_a_bit(other_llm, alone):
    before = num_preemptions(other_llm)

    completions = run_with_arrivals(other_llm, PROMPTS, PARAMS, mean_arrivals=9.0)

    assert num_preemptions(other_llm) > before
    assert [content_of(c) for c in completions] == alone


def test_no_prefix_found_in_the_cache_changes_a_bit(llm, alone):
    completions = []
    for prompt, params in zip(PROMPTS, PARAMS, strict=True):
        generate_alone(llm, prompt, params)
        completions += llm.generate(prompt, params, show_progress=False)

    assert [content_of(c) for c in completions] == alone
    assert [c.num_cached_tokens for c in completions] == [num_findable(c) for c in completions]


def num_findable(completion) -> int:
    """Tokens in full pages, and those in the last page of the prompt if the output filled it before."""
    num_before = len(completion.prompt_token_ids) - 1
    whole, rest = divmod(num_before, 16)
    was_filled = (num_before + len(completion.token_ids)) // 16 > whole
    return num_before if was_filled and rest >= 2 else whole * 16


def test_no_output_found_in_the_cache_changes_a_bit_of_the_next_turn(llm):
    params = SamplingParams(max_tokens=20, seed=3, ignore_eos=True)
    turn = llm.generate(PROMPTS[0], params, show_progress=False)[0]
    prompt = [*turn.prompt_token_ids, *turn.token_ids, 5, 6]

    found = llm.generate(prompt, params, show_progress=False)[0]

    assert found.num_cached_tokens > len(PROMPTS[0])
    assert content_of(found) == content_of(generate_alone(llm, prompt, params))


def test_no_shared_beginning_of_requests_side_by_side_changes_a_bit(other_llm, llm):
    prompts = [[*PROMPTS[3][:33], 40 + i] for i in range(6)]
    expected = [content_of(generate_alone(llm, *pair)) for pair in zip(prompts, PARAMS[:6], strict=True)]
    poison_cache(other_llm)
    forget_prefixes(other_llm)

    completions = run_with_arrivals(other_llm, prompts, PARAMS[:6], mean_arrivals=2.0)

    assert [content_of(c) for c in completions] == expected
    assert sum(c.num_cached_tokens for c in completions) > 0


def test_no_companion_in_the_same_step_changes_a_bit(llm, alone):
    rng = np.random.default_rng(7)
    pairs = [rng.choice(18, size=rng.integers(2, 6), replace=False).tolist() for _ in range(5)]

    for members in pairs:
        completions = llm.generate([PROMPTS[i] for i in members], [PARAMS[i] for i in members], show_progress=False)
        assert [content_of(c) for c in completions] == [alone[i] for i in members]


def test_the_seed_alone_tells_two_equal_requests_apart(llm):
    params = [SamplingParams(max_tokens=12, seed=seed, temperature=1.5) for seed in (4, 4, 5)]

    first, same, other = llm.generate([PROMPTS[0]] * 3, params, show_progress=False)

    assert content_of(first) == content_of(same)
    assert first.token_ids != other.token_ids


def test_a_longer_output_begins_with_the_shorter_one(llm):
    params = [SamplingParams(max_tokens=n, seed=4, ignore_eos=True) for n in (5, 20)]

    short, long = llm.generate([PROMPTS[0]] * 2, params, show_progress=False)

    assert long.token_ids[:5] == short.token_ids


def test_asking_for_alternatives_changes_no_token(llm):
    params = [SamplingParams(max_tokens=9, seed=4, log_probs=n) for n in (0, 1, 4)]

    completions = llm.generate([PROMPTS[0]] * 3, params, show_progress=False)

    assert len({(c.token_ids, c.log_probs) for c in completions}) == 1


# ---- the gate itself: a fault in one step of many shows


def read_pages_in_the_wrong_order(requests):
    requests[0].table.first.pages = requests[0].table.pages[::-1]


def write_to_a_page_of_another(requests):
    requests[1].table.first.pages = (*requests[1].table.pages[:-1], requests[0].table.pages[-1])


@pytest.mark.parametrize("fault", [None, read_pages_in_the_wrong_order, write_to_a_page_of_another])
def test_one_wrong_page_id_in_one_step_shows(llm, alone, monkeypatch, fault):
    launch, calls = runner_of(llm).launch, itertools.count()

    def launch_with_fault(step):
        requests = [chunk.request for chunk in step.chunks]
        kept = [request.table.pages for request in requests]
        if next(calls) == 5 and fault is not None:
            assert len(requests) == 2
            fault(requests)
        output = launch(step)
        for request, pages in zip(requests, kept, strict=True):
            request.table.first.pages = pages
        return output

    forget_prefixes(llm)
    with monkeypatch.context() as patch:
        patch.setattr(runner_of(llm), "launch", launch_with_fault)
        completions = llm.generate([PROMPTS[8], PROMPTS[15]], [PARAMS[8], PARAMS[15]], show_progress=False)
    forget_prefixes(llm)  # what a fault wrote is found by nobody

    assert ([content_of(c) for c in completions] == [alone[8], alone[15]]) == (fault is None)


def swap_rows(runner):
    runner._before = Rows(runner._before.requests[::-1])


def keep_the_tokens_of_the_step_before_last(runner):
    runner._drawn = runner.drawn_before


@pytest.mark.parametrize("fault", [None, swap_rows, keep_the_tokens_of_the_step_before_last])
def test_one_wrong_token_from_the_step_before_shows(llm, alone, monkeypatch, fault):
    launch, calls = runner_of(llm).launch, itertools.count()

    def launch_with_fault(step):
        if next(calls) == 5 and fault is not None:
            fault(runner_of(llm))
        runner_of(llm).drawn_before = runner_of(llm)._drawn
        return launch(step)

    forget_prefixes(llm)
    with monkeypatch.context() as patch:
        patch.setattr(runner_of(llm), "launch", launch_with_fault)
        completions = llm.generate([PROMPTS[8], PROMPTS[15]], [PARAMS[8], PARAMS[15]], show_progress=False)
    forget_prefixes(llm)  # what a fault wrote is found by nobody

    assert ([content_of(c) for c in completions] == [alone[8], alone[15]]) == (fault is None)


def test_one_wrong_page_found_in_the_cache_shows(llm, alone, monkeypatch):
    pages = scheduler_of(llm).replicas[0].tables.pages
    for i in (3, 8):
        llm.generate(PROMPTS[i], PARAMS[i], show_progress=False)
    other = pages.find(llm_keys(llm, PROMPTS[8]).key(0, PROMPTS[8]))
    right = pages.find(llm_keys(llm, PROMPTS[3]).key(0, PROMPTS[3]))
    assert None not in (other, right)
    find = pages.find

    with monkeypatch.context() as patch:
        patch.setattr(pages, "find", lambda key: other if find(key) == right else find(key))
        completion = llm.generate(PROMPTS[3], PARAMS[3], show_progress=False)[0]
    forget_prefixes(llm)

    assert content_of(completion) != alone[3]


def llm_keys(llm, prompt) -> Any:
    return admission_of(llm).admit(iter([0]), prompt, None)[0].keys


def compiled_products(text):
    """The products in the text of a compiled function: numbers in a sum, then rows of either operand, fewer first."""
    arrays = re.findall(r"%(\S+) = \w+\[([\d,]*)\]", text)
    shapes = {name: [int(n) for n in dims.split(",") if n] for name, dims in arrays}
    dots = re.findall(r" dot\(%?([\w.-]+), %?([\w.-]+)\), (.*)", text)
    assert dots

    def axes(which, rest):
        found = re.search(rf"{which}_dims={{([\d,]*)}}", rest)
        return [] if found is None else [int(n) for n in found[1].split(",") if n]

    products = set()
    for *names, rest in dots:
        free = []
        for side, name in zip(("lhs", "rhs"), names, strict=True):
            used = [*axes(f"{side}_contracting", rest), *axes(f"{side}_batch", rest)]
            free.append(math.prod(size for axis, size in enumerate(shapes[name]) if axis not in used))
        summed = math.prod(shapes[names[0]][axis] for axis in axes("lhs_contracting", rest))
        products.add((summed, *sorted(free)))
    return products


@pytest.mark.parametrize("engine", ["shared_llm", "crowded_llm"])
def test_the_compiler_neither_merges_nor_splits_a_product(engine, request):
    if are_tpu_kernels_interpreted():
        pytest.skip("the products of TPU kernels are not those of the reference")
    llm = request.getfixturevalue(engine)
    llm.warm_up()

    steps = runner_of(llm).compiled_steps.compiled
    for bucket, compiled in steps.items():
        if bucket.is_draw:  # from logits
            assert " dot(" not in compiled.as_text()
            continue
        traced = product_shapes(warm_up_of(llm).compiler.trace(warm_up_of(llm).cache_config, bucket))
        shapes = {(shape.num_inputs, *sorted((shape.num_rows, shape.num_outputs))) for shape in traced}
        assert compiled_products(compiled.as_text()) == shapes, bucket.name
