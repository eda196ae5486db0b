"""What a step drew, one token or several per request, and how a request takes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from jaxinfer.engine.request import Delta, Request
from jaxinfer.engine.step import Step

Emitted = tuple[int, float, dict[int, float]]  # a token, its log-probability, and those of the alternatives


def emitted_tokens(step: Step, output: Any) -> Sequence[Sequence[Emitted]]:
    """Returns what a step's output of host arrays, `StepOutput` or `VerifyOutput`, has for each chunk."""
    count = len(step.chunks)
    if output.tokens.ndim == 1 and step.is_plain:
        pairs = zip(output.tokens[:count].tolist(), output.log_probs[:count].tolist(), strict=True)
        return [((token, log_prob, {}),) for token, log_prob in pairs]
    tokens, log_probs = (array[:count].reshape(count, -1).tolist() for array in (output.tokens, output.log_probs))
    counts = [1] * count if output.tokens.ndim == 1 else output.num_emitted.tolist()
    emitted = []
    for row, chunk in enumerate(step.chunks):
        num_log_probs = chunk.request.sampling.log_probs
        tops = _alternatives(output, row, num_log_probs) if num_log_probs else [{}] * counts[row]
        emitted.append(list(zip(tokens[row][: counts[row]], log_probs[row], tops, strict=False)))
    return emitted


def _alternatives(output: Any, row: int | slice, count: int) -> list[dict[int, float]]:
    tokens, log_probs = (
        np.asarray(array[row]).reshape(-1, array.shape[-1])[:, :count].tolist()
        for array in (output.top_tokens, output.top_log_probs)
    )
    return [dict(zip(*pair, strict=True)) for pair in zip(tokens, log_probs, strict=True)]


def enter_prompts(step: Step, output: Any) -> None:
    """Enters the log-probabilities of prompt tokens that a step's output has."""
    first = 0
    for chunk, _, count in step.described:
        family, rows = chunk.request.family, slice(first, first + count)
        first += count
        # What was computed before, by another sample or before a preemption, is known.
        num_known = len(family.prompt_log_probs) - (chunk.start + 1)
        num_log_probs = chunk.request.sampling.prompt_log_probs
        tops = _alternatives(output.prompt, rows, num_log_probs) if num_log_probs else [{}] * count
        family.prompt_log_probs += np.asarray(output.prompt.log_probs)[rows].tolist()[num_known:]
        family.prompt_top_log_probs += tops[num_known:]


def take_tokens(request: Request, emitted: Sequence[Emitted], now: float) -> Delta:
    """Gives a request what a step that ended just now drew for it."""
    request.num_pending = 0
    if len(emitted) == 1:
        ((token_id, log_prob, top_log_probs),) = emitted
        request.token_times.append(now)
        return request.append(token_id, log_prob, top_log_probs)
    request.token_times += [now] * len(emitted)
    return extend_request(request, emitted)


def extend_request(request: Request, emitted: Sequence[Emitted]) -> Delta:
    """Adds the tokens, at least one, that one step drew for a request, up to one that ends it."""
    deltas: list[Delta] = []
    for token in emitted:
        deltas.append(request.append(*token))
        if request.finish_reason is not None:
            break
    return replace(
        deltas[-1],
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(chain.from_iterable(delta.token_ids for delta in deltas)),
        log_probs=tuple(chain.from_iterable(delta.log_probs for delta in deltas)),
    )
