"""The host lacks memory now and then before it dispatches: no request is lost, and every one has its own tokens."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest

from jaxinfer.config import SamplingParams
from jaxinfer.engine.execution import batch_builder, runner
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
)
from tests.engine.probe import runner_of

PROMPTS = random_prompts(6, max_len=30, seed=4)
PARAMS = [
    GREEDY,
    SamplingParams(temperature=1.0, seed=3, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=4, max_tokens=9, log_probs=2, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=5, max_tokens=12, regex="[a-z]{4,8}"),
]
LAYOUT = ("lay_out_batch", "lay_out_sampling", "make_block_tables", "make_decode_batch")
CROWDED: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 9, "num_pages": 5, "host_cache_bytes": 10**7}


@contextlib.contextmanager
def short_of_memory(llm: Any, where: str) -> Any:
    """Raises MemoryError in half of the calls of these functions; yields the list of the errors."""
    draw, errors = random.Random(0), []
    copier = runner_of(llm)._copiers[0]
    targets = {
        "layout": [(batch_builder, name) for name in LAYOUT],
        "masks": [(runner, "add_masks")],
        "swap out": [(copier, "read")],
        "swap in": [(copier, "_bundle")],
    }

    def failing(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if draw.random() < 0.5:
                errors.append(MemoryError(where))
                raise errors[-1]
            return function(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in targets[where]:
            patch.setattr(owner, name, failing(getattr(owner, name)))
        yield errors


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    return save_small_checkpoint(tmp_path_factory.mktemp("hybrid"), family="granitemoehybrid", num_hidden_layers=3)


@pytest.mark.parametrize(
    ("family", "where"),
    [*(("llama", where) for where in ("layout", "masks", "swap out", "swap in")), ("hybrid", "layout")],
)
def test_a_host_short_of_memory_loses_no_request_and_changes_no_token(checkpoint, request, family, where):
    path = checkpoint if family == "llama" else request.getfixturevalue(family)
    calm, crowded = small_engine(path), small_engine(path, **CROWDED)
    runner_of(crowded)._tiers.seconds_per_copy = 0.0
    pairs = [(prompt, params) for prompt in PROMPTS for params in PARAMS]
    expected = [(c.token_ids, c.log_probs) for pair in pairs for c in generate(calm, *pair)]
    deltas = []

    with short_of_memory(crowded, where) as errors:
        ids = [crowded.add(prompt, params) for prompt, params in pairs]
        while crowded.has_unfinished:
            with contextlib.suppress(MemoryError):
                deltas += crowded.step()
    completions = completions_of(deltas)

    assert len(errors) > 2
    assert num_preemptions(crowded) > 0
    assert [(c.token_ids, c.log_probs) for c in map(completions.__getitem__, ids)] == expected
    assert (drain(crowded), num_owned_pages(crowded)) == ([], 0)
