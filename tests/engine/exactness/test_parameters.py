"""Every sampling parameter changes what a request yields, as `transformers` would, and equally under every schedule.

This file also makes the table of docs/sampling.md, and a test fails if that page has another one. To write the table:
`python -m tests.engine.exactness.test_parameters`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from jaxinfer.config import SamplingParams
from jaxinfer.sampling_params import STRUCTURES, AnswerParams, AnswerShape
from tests.engine.engines import (
    EOS,
    ScriptedDrafter,
    content_of,
    counted_overlaps,
    drafts_from,
    forget_prefixes,
    num_preemptions,
    plain_steps,
    random_prompts,
    recorded_steps,
)
from tests.oracles import load_reference

PAGE = Path(__file__).parents[3] / "docs" / "sampling.md"
PROMPTS = [*random_prompts(3, max_len=40, seed=4), [40, 41, 42] * 8]
LONG_PROMPTS = [[5 + i] * 40 for i in range(4)]  # of requests that want all pages, beside those that are looked at
BASE_FIELDS: dict[str, Any] = {"max_tokens": 16, "seed": 5, "ignore_eos": True}
BASE = SamplingParams(**BASE_FIELDS)
GREEDY = dataclasses.replace(BASE, temperature=0)
# Of an answer whose reasoning the prompt has begun; two tokens end it.
SHAPE = AnswerShape(end_thinking=["}~"], end_token_ids=[94, 95], is_thinking=True)

# What each parameter is set to, beside what it is compared with. Greedy where a draw would hide what is meant.
PARAMETERS: dict[str, tuple[SamplingParams, dict[str, Any]]] = {
    "n": (BASE, {"n": 2}),
    "sample_index": (BASE, {"sample_index": 3}),
    "best_of": (BASE, {"best_of": 3}),
    "max_tokens": (BASE, {"max_tokens": 7}),
    "min_tokens": (dataclasses.replace(BASE, stop_token_ids=range(1, 60)), {"min_tokens": 9}),
    "temperature": (BASE, {"temperature": 0.3}),
    "top_k": (BASE, {"top_k": 3}),
    "top_p": (BASE, {"top_p": 0.3}),
    "min_p": (BASE, {"min_p": 0.4}),
    "typical_p": (BASE, {"typical_p": 0.3}),
    "repetition_penalty": (GREEDY, {"repetition_penalty": 1.8}),
    "presence_penalty": (GREEDY, {"presence_penalty": 1.9}),
    "frequency_penalty": (GREEDY, {"frequency_penalty": 1.9}),
    "no_repeat_ngram_size": (GREEDY, {"no_repeat_ngram_size": 1}),
    "logit_bias": (BASE, {"logit_bias": {30: 5.0, 31: 4.0}}),
    "bad_words": (GREEDY, {"bad_words": [[i] for i in range(2, 40)] + [[i, j] for i in (60, 61) for j in (62, 63)]}),
    "allowed_token_ids": (BASE, {"allowed_token_ids": range(20, 40)}),
    "logits_processors": (BASE, {"logits_processors": {"turns": 30.0}}),
    "json_schema": (BASE, {"json_schema": {"type": "object", "additionalProperties": {"type": "boolean"}}}),
    "regex": (BASE, {"regex": "[a-c]{5,20}"}),
    "choices": (BASE, {"choices": ["yes, it is", "no, it is not"]}),
    "grammar": (BASE, {"grammar": 'start: "(" start ")" | "[x]"'}),
    "seed": (BASE, {"seed": 2**63}),
    "log_probs": (BASE, {"log_probs": 2}),
    "prompt_log_probs": (BASE, {"prompt_log_probs": 2}),
    "stop": (BASE, {"stop": ["a", "b", "c", "1", "2", "3", "<", "P", "Q", "R", "S"]}),
    "stop_token_ids": (BASE, {"stop_token_ids": range(1, 40)}),
    "ignore_eos": (dataclasses.replace(BASE, ignore_eos=False, logit_bias={EOS: 5.0}), {"ignore_eos": True}),
    "thinking_token_budget": (AnswerParams(shape=SHAPE, **BASE_FIELDS), {"thinking_token_budget": 5}),
    "skip_special_tokens": (
        dataclasses.replace(BASE, ignore_eos=False, logit_bias={EOS: 3.0}),
        {"skip_special_tokens": False},
    ),
}


HAS_LLGUIDANCE = importlib.util.find_spec("llguidance") is not None
TESTED = [name for name in PARAMETERS if HAS_LLGUIDANCE or name not in STRUCTURES]


NUMBERS = itertools.count(step=len(PROMPTS))


@functools.cache
def requests_of(name):
    """Every prompt with the parameter."""
    base, fields = PARAMETERS[name]
    return [dataclasses.replace(base, **fields)] * len(PROMPTS)


def contents(completions) -> list[dict]:
    return [content_of(completion) for completion in completions]


def contents_under(llm, prompts, params):
    """What each request yields when nothing else is computed and nothing of it was before, a list of its samples."""
    pairs = zip(prompts, params, strict=True)
    salts = (f"alone {i}" for i in itertools.count(next(NUMBERS)))
    return [llm.generate(*pair, cache_salt=next(salts), show_progress=False) for pair in pairs]


def together(llm, params):
    """What the requests yield when they come in a crowd."""
    prompts, all_params = [*LONG_PROMPTS, *PROMPTS], [*[BASE] * len(LONG_PROMPTS), *params]
    completions = iter(contents(llm.generate(prompts, all_params, show_progress=False))[len(LONG_PROMPTS) :])
    return [list(itertools.islice(completions, p.n)) for p in params]


@pytest.fixture(scope="module")
def answers(shared_llm):
    @functools.cache
    def answers(name):
        with plain_steps(shared_llm, overlap=False):
            return contents_under(shared_llm, PROMPTS, requests_of(name))

    return answers


@pytest.fixture(scope="module")
def alone(answers):
    """The contents of the answers."""
    return lambda name: [contents(samples) for samples in answers(name)]


def test_every_parameter_is_tested():
    assert set(PARAMETERS) == {field.name for field in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize("name", TESTED)
def test_the_parameter_changes_what_a_request_yields(llm, alone, name):
    without = contents_under(llm, PROMPTS[-2:], [PARAMETERS[name][0]] * 2)

    assert alone(name)[-2:] != [contents(samples) for samples in without]


@pytest.mark.parametrize("name", TESTED)
def test_the_parameter_is_honoured_in_chunks_and_after_preemption_to_the_bit(crowded_llm, alone, name):
    before = num_preemptions(crowded_llm)

    forget_prefixes(crowded_llm)
    completions = together(crowded_llm, requests_of(name))

    assert completions == alone(name)
    # Requests that end after a few tokens may have gone before anybody wants their pages.
    are_long = max(len(c["token_ids"]) for samples in completions for c in samples) == BASE.max_tokens
    assert num_preemptions(crowded_llm) > before or not are_long


@pytest.mark.parametrize("name", TESTED)
def test_the_parameter_is_honoured_beside_requests_with_others(llm, alone, name):
    start = TESTED.index(name)
    mixed = [TESTED[(start + i) % len(TESTED)] for i in range(len(PROMPTS))]
    params = [requests_of(other)[i] for i, other in enumerate(mixed)]

    completions = together(llm, params)

    assert completions == [alone(other)[i] for i, other in enumerate(mixed)]


@pytest.mark.parametrize("name", TESTED)
def test_the_parameter_is_honoured_after_a_prefix_from_the_cache(llm, alone, name):
    params = requests_of(name)[-1]

    first, second = (llm.generate(PROMPTS[-1], params, cache_salt=name, show_progress=False) for _ in range(2))

    # Later samples find the prompt of the first.
    assert first[0].num_cached_tokens == 0 or params.num_samples > 1
    # Of 24; more where the output had filled the last page, and none where all of the prompt has to be computed.
    assert second[0].num_cached_tokens in ((0,) if name == "prompt_log_probs" else (16, 23))
    assert contents(first) == contents(second) == alone(name)[-1]


@pytest.mark.parametrize("name", TESTED)
def test_the_parameter_is_honoured_where_drafts_are_verified_to_the_bit(crowded_llm, answers, alone, name):
    before = crowded_llm.metrics()
    forget_prefixes(crowded_llm)

    with drafts_from(crowded_llm, ScriptedDrafter(0.7, itertools.chain(*answers(name)))):
        completions = together(crowded_llm, requests_of(name))

    assert completions == alone(name)
    after = crowded_llm.metrics()
    num_drafted = after.num_drafted_tokens - before.num_drafted_tokens
    num_accepted = after.num_accepted_tokens - before.num_accepted_tokens
    assert num_accepted > 0
    assert num_accepted < num_drafted or name in STRUCTURES  # which verify no draft that they rule out


@pytest.mark.parametrize("name", TESTED)
def test_the_parameter_is_honoured_in_a_decode_loop_to_the_bit(looping_llm, alone, name):
    forget_prefixes(looping_llm)

    with recorded_steps(looping_llm) as steps:
        completions = together(looping_llm, requests_of(name))

    assert completions == alone(name)
    assert any(chunk.max_new_tokens > 1 for step in steps for chunk in step.chunks)


@pytest.mark.parametrize("name", TESTED)
def test_the_parameter_is_honoured_where_steps_overlap_to_the_bit(crowded_llm, alone, name):
    before = num_preemptions(crowded_llm)
    forget_prefixes(crowded_llm)

    with plain_steps(crowded_llm, overlap=True), counted_overlaps(crowded_llm) as counts:
        completions = together(crowded_llm, requests_of(name))

    assert completions == alone(name)
    assert max(counts) > 0
    assert num_preemptions(crowded_llm) > before or name in STRUCTURES


BY_TRANSFORMERS = {
    "repetition_penalty": {"repetition_penalty": 1.8},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "bad_words": {"bad_words_ids": [list(word) for word in PARAMETERS["bad_words"][1]["bad_words"]]},
}


@pytest.mark.parametrize("name", BY_TRANSFORMERS)
def test_greedy_tokens_are_those_of_transformers(checkpoint, alone, name):
    reference: Any = load_reference(checkpoint)
    reference.generation_config.eos_token_id = None
    for prompt, (completion,) in zip(PROMPTS, alone(name), strict=True):
        with torch.no_grad():
            output = reference.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones((1, len(prompt)), dtype=torch.long),
                max_new_tokens=16,
                do_sample=False,
                pad_token_id=EOS,
                **BY_TRANSFORMERS[name],
            )
        assert list(completion["token_ids"]) == output[0, len(prompt) :].tolist()


def test_a_repeated_ngram_is_never_drawn(llm):
    params = SamplingParams(temperature=0, no_repeat_ngram_size=2, max_tokens=60, ignore_eos=True)

    completion = llm.generate([5, 6] * 3, params, show_progress=False)[0]

    output = [6, *completion.token_ids]
    pairs = list(itertools.pairwise(output))
    assert len(set(pairs)) == len(pairs)


def test_a_processor_of_the_user_acts_on_the_tokens_so_far_with_its_argument(llm):
    params = dataclasses.replace(BASE, logits_processors={"turns": 100.0})

    output = [40, *llm.generate([40], params, show_progress=False)[0].token_ids]

    assert all((after - before) % 2 == 1 for before, after in itertools.pairwise(output))


def test_a_request_that_is_left_no_token_ends_exhausted(llm):
    params = SamplingParams(max_tokens=9, seed=0, allowed_token_ids=[5, 6, 7], no_repeat_ngram_size=1)

    completion = llm.generate([40], params, show_progress=False)[0]

    assert (sorted(completion.token_ids), completion.finish_reason) == ([5, 6, 7], "exhausted")


def test_a_stop_string_is_looked_for_after_min_tokens(llm):
    params = SamplingParams(max_tokens=9, seed=0, allowed_token_ids=[66], stop="a", min_tokens=4)

    completion = llm.generate([40], params, show_progress=False)[0]

    assert (completion.text, completion.finish_reason) == ("aaaa", "stop")


REFUSED = {
    "biased token outside": ({"logit_bias": {5: 1, 96: 1}}, r"logit_bias\[1\] is 96.*from 0 to 95"),
    "bad word outside": ({"bad_words": [[5], [6, 96]]}, r"bad_words\[2\] is 96.*from 0 to 95"),
    "allowed token outside": ({"allowed_token_ids": [96]}, r"allowed_token_ids\[0\] is 96.*from 0 to 95"),
    "biases": (
        {"logit_bias": dict.fromkeys(range(96), 1)},
        r"logit_bias lists 96 token ids.*max_listed_tokens=80.*raise",
    ),
    "bad words": ({"bad_words": [[1, 2, 3]] * 27}, r"bad_words lists 81 token ids.*max_listed_tokens=80.*raise"),
    "allowed": ({"allowed_token_ids": range(81)}, r"allowed_token_ids lists 81 token ids.*max_listed_tokens=80.*raise"),
    "stop tokens": (
        {"stop_token_ids": range(81), "min_tokens": 1},
        r"stop_token_ids lists 81 token ids.*max_listed_tokens=80.*raise",
    ),
    "unknown processor": ({"logits_processors": {"x": 1}}, r"logits_processors has 'x'.*\['turns'\]; give"),
    "nothing left by bad words": ({"allowed_token_ids": [5], "bad_words": [[5]]}, r"allowed_token_ids=\(5,\) leave no"),
    "nothing left by min_tokens": (
        {"allowed_token_ids": [EOS], "min_tokens": 2},
        r"leave no.*min_tokens=2.*allow more",
    ),
}


@pytest.mark.parametrize(("fields", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_honoured_is_refused_and_the_engine_goes_on(llm, fields, message):
    with pytest.raises(ValueError, match=message):
        llm.add([5], SamplingParams(**fields))

    assert not llm.has_unfinished
    assert len(llm.generate([5], GREEDY, show_progress=False)[0].token_ids) == 16


COLUMNS = (
    *("alone", "in any batch", "in chunks", "after preemption", "after a prefix hit"),
    *("speculation", "decode loop", "overlap", "in a structure"),
)
TABLE = re.compile(r"(?<=<!-- parameters -->\n).*?(?=<!-- /parameters -->)", re.DOTALL)


def table() -> str:
    """What the tests above, and those in structures, have shown; what fails must not be in it as honoured."""

    def cells(name: str) -> list[str]:
        return ["honoured"] * (len(COLUMNS) - 1) + ["refused: there is one" if name in STRUCTURES else "honoured"]

    rows = [f"| `{name}` | " + " | ".join(cells(name)) + " |" for name in PARAMETERS]
    head = ["| parameter | " + " | ".join(COLUMNS) + " |", "|---|" + "---|" * len(COLUMNS)]
    return "\n".join([*head, *rows]) + "\n"


def test_the_table_in_the_documentation_is_the_one_made_here():
    found = TABLE.search(PAGE.read_text(encoding="utf-8"))

    assert found is not None
    assert found.group() == table()


if __name__ == "__main__":
    PAGE.write_text(TABLE.sub(lambda _: table(), PAGE.read_text(encoding="utf-8")), encoding="utf-8")
