"""Tokens that a step drew for plain requests are taken as if each request had been given its own, one by one."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.config import SamplingParams
from jaxinfer.engine.engine import BUNDLED_MODEL
from jaxinfer.engine.request.request import Request
from jaxinfer.engine.scheduling.step_results import append_plain
from jaxinfer.sampling_params import NO_TOKEN
from jaxinfer.text.detokenizer import Detokenizer
from jaxinfer.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer(tokenizers.Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json")))
# Letters, parts of a character of three bytes, the end token; "no token" now and then.
TOKENS = [*(TOKENIZER.encode("def é € x")), 0, 70, 71, NO_TOKEN]
STOPS = [(), (70,), (0, 71)]
ends = st.sampled_from(["", "no text", "stop string"])
columns = st.lists(st.lists(st.sampled_from(TOKENS), min_size=4, max_size=4), min_size=1, max_size=12)


def make_requests(kinds) -> list[Request]:
    return [
        Request(
            i,
            [1, 2],
            SamplingParams(),
            seed=0,
            max_tokens=max_tokens,
            stop_token_ids=STOPS[stop],
            detokenizer=None if kind == "no text" else Detokenizer(TOKENIZER, ("f ",) if kind else ()),
        )
        for i, (kind, stop, max_tokens) in enumerate(kinds)
    ]


@settings(max_examples=200)
@given(
    columns=columns,
    kinds=st.lists(st.tuples(ends, st.integers(0, 2), st.integers(1, 9)), min_size=4, max_size=4),
    idle=st.integers(0, 4),
)
def test_plain_tokens_are_taken_together_as_one_by_one(columns, kinds, idle):
    together, alone = make_requests(kinds), make_requests(kinds)
    for now, tokens in enumerate(columns, 1):
        log_probs = [-float(token) / 7 for token in tokens]
        running = [i for i, request in enumerate(alone) if request.finish_reason is None and (now + i) % 5 != idle]
        for i in running:
            together[i].num_pending = 1
        output = SimpleNamespace(tokens=np.array([*tokens, 5]), log_probs=np.array([*log_probs, 0.0]))

        deltas = append_plain(together, output, now)

        for i in running:
            alone[i].record.times.append(now)
        assert deltas == [alone[i].append(tokens[i], log_probs[i]) for i in running]
    finals = [[r.finish("abort").completion for r in rs if r.finish_reason is None] for rs in (together, alone)]
    assert finals[0] == finals[1]
    assert [(r.token_ids, r.outputs, r.record.times) for r in together] == [
        (r.token_ids, r.outputs, r.record.times) for r in alone
    ]


def test_the_text_of_tokens_that_were_taken_together_is_that_of_all_of_them():
    [request] = make_requests([("", 0, 99)])
    token_ids = TOKENIZER.encode("known, then é and €, and known again")

    for token_id in token_ids:
        request.num_pending = 1
        append_plain([request], SimpleNamespace(tokens=np.array([token_id]), log_probs=np.zeros(1)), 0.0)

    completion = request.finish("abort").completion
    assert completion is not None
    assert completion.text == TOKENIZER.decode(token_ids)
