"""What the tests of requests that are forked, set back, saved and restored share."""

from __future__ import annotations

import dataclasses

import pytest

from jaxinfer.config import SamplingParams
from tests.engine.engines import forget_prefixes
from tests.engine.probe import scheduler_of

PROMPT = [7, 30, 31, 45, 9, 60, 61, 62, 63, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59]  # 19 tokens, pages of 16
SEEDED = SamplingParams(max_tokens=40, seed=11, temperature=0.9, log_probs=2, ignore_eos=True)
GREEDY = dataclasses.replace(SEEDED, temperature=0)
KINDS = {"greedy": GREEDY, "seeded": SEEDED}
BY_KIND = pytest.mark.parametrize("params", KINDS.values(), ids=KINDS)


def run_for(llm, request_id: int, num_tokens: int) -> None:
    """Steps until the request has so many tokens of output."""
    while scheduler_of(llm).find(request_id).num_output_tokens < num_tokens:
        llm.step()


def begin(llm, params: SamplingParams, num_tokens: int) -> int:
    request_id = llm.add(PROMPT, params)
    run_for(llm, request_id, num_tokens)
    return request_id


def alone(llm, params: SamplingParams, prompt=PROMPT):
    forget_prefixes(llm)
    completions = llm.generate(prompt, params, show_progress=False, cache_salt="alone")
    forget_prefixes(llm)
    return completions[-1]


def continuation(llm, completion, num_kept: int, params: SamplingParams):
    """What a request draws after the first tokens of a completion, as a prompt of its own."""
    prompt = [*PROMPT, *completion.token_ids[:num_kept]]
    return alone(llm, dataclasses.replace(params, max_tokens=params.max_tokens - num_kept), prompt)
