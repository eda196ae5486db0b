"""The tokens that a step sampled, one or several per request, and their application to the requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, overload

import numpy as np

from jaxinfer.engine.request.completion import Delta
from jaxinfer.engine.request.output_record import SampledToken
from jaxinfer.engine.request.request import Request
from jaxinfer.engine.scheduling.step import Step


class SampledTokens(Sequence[Sequence[SampledToken]]):
    """The tokens of each chunk in a step's output of host arrays (`StepOutput` or `VerifyOutput`).

    Converts the arrays on first access only, since most steps are never read this way.
    """

    def __init__(self, step: Step, output: Any) -> None:
        self._step, self._output = step, output

    @cached_property
    def _tokens(self) -> list[list[SampledToken]]:
        return _emitted_tokens(self._step, self._output)

    def __len__(self) -> int:
        return len(self._step.chunks)

    @overload
    def __getitem__(self, index: int) -> Sequence[SampledToken]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Sequence[SampledToken]]: ...
    def __getitem__(self, index: int | slice) -> Sequence[Any]:
        return self._tokens[index]

    def __iter__(self) -> Iterator[Sequence[SampledToken]]:
        return iter(self._tokens)


def _emitted_tokens(step: Step, output: Any) -> list[list[SampledToken]]:
    count = len(step.chunks)
    tokens, log_probs = (array[:count].reshape(count, -1).tolist() for array in (output.tokens, output.log_probs))
    counts = [1] * count if output.tokens.ndim == 1 else output.num_emitted.tolist()
    sampling: list[list[Any]] = [[None] * most for most in counts]
    if output.sampling_log_probs is not None:
        sampling = output.sampling_log_probs[:count].reshape(count, -1).tolist()
    emitted = []
    for row, request in enumerate(step.chunks.requests):
        num_log_probs = request.sampling.log_probs
        tops = _alternatives(output, row, num_log_probs) if num_log_probs else [{}] * counts[row]
        emitted.append(list(zip(tokens[row][: counts[row]], log_probs[row], tops, sampling[row], strict=False)))
    return emitted


def _alternatives(output: Any, row: int | slice, count: int) -> list[dict[int, float]]:
    tokens, log_probs = (
        np.atleast_2d(array[row])[:, :count].tolist()  # none in a plain step
        for array in (output.top_tokens, output.top_log_probs)
    )
    return [dict(zip(*pair, strict=True)) for pair in zip(tokens, log_probs, strict=True)]


def record_prompt_log_probs(step: Step, output: Any) -> None:
    """Appends the log-probabilities of prompt tokens in a step's output to the requests' shared prompts."""
    first = 0
    for chunk, _, count in step.prompt_log_prob_chunks:
        shared_prompt, rows = chunk.request.shared_prompt, slice(first, first + count)
        first += count
        # Another sample, or this request before a preemption, may have recorded the first ones.
        num_known = len(shared_prompt.prompt_log_probs) - (chunk.start + 1)
        num_log_probs = chunk.request.sampling.prompt_log_probs
        tops = _alternatives(output.prompt, rows, num_log_probs) if num_log_probs else [{}] * count
        shared_prompt.prompt_log_probs += np.asarray(output.prompt.log_probs)[rows].tolist()[num_known:]
        shared_prompt.prompt_top_log_probs += tops[num_known:]


def pool_states(step: Step, output: Any) -> None:
    """Hands the hidden states of a step to the requests that pool them."""
    if chunks := step.pooled_chunks:
        hidden = np.asarray(output.hidden)
        for chunk, place in chunks:
            assert chunk.request.pooling is not None
            if not chunk.is_stale:
                chunk.request.pooling.record(chunk.start, hidden[place : place + chunk.num_tokens].astype(np.float32))


def append_plain(requests: Sequence[Request], output: Any, now: float) -> list[Delta]:
    """Appends the tokens of a step without sampling_log_probs, one per row, to plain requests; `now` is their time.

    Inlines `Request.append` for tokens that have a cached text and end nothing, which is almost all. This is the
    host's hottest loop; inlining saves a quarter of its time.
    """
    deltas: list[Delta] = []
    new_delta = tuple.__new__  # Delta(…) takes twice the time
    drawn = zip(requests, output.tokens.tolist(), output.log_probs.tolist(), strict=False)  # drops padding rows
    for request, token_id, log_prob in drawn:
        if not request.num_pending:
            continue
        request.num_pending = 0
        token_ids, stream, record = request.token_ids, request.detokenizer, request.record
        record.times.append(now)
        text = "" if stream is None else stream.texts.get(token_id)
        if text is None or token_id < 0 or token_id in request.stop_token_ids or len(token_ids) + 1 >= request.max_len:
            deltas.append(request.append(token_id, log_prob))
            continue
        token_ids.append(token_id)
        record.log_probs.append(log_prob)
        delta = (request.request_id, text, (token_id,), (log_prob,), request.sample_index, None, (), ())
        deltas.append(new_delta(Delta, delta))
    return deltas


def append_tokens(request: Request, emitted: Sequence[SampledToken], now: float) -> Delta:
    """Appends a step's tokens, at least one, to a request, up to the token that ends it; `now` is their time."""
    request.num_pending = 0
    request.record.times += [now] * len(emitted)
    deltas: list[Delta] = []
    for token in emitted:
        deltas.append(request.append(*token))
        if request.finish_reason is not None:
            break
    return deltas[-1]._replace(
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(chain.from_iterable(delta.token_ids for delta in deltas)),
        log_probs=tuple(chain.from_iterable(delta.log_probs for delta in deltas)),
        top_log_probs=tuple(chain.from_iterable(delta.top_log_probs for delta in deltas)),
        sampling_log_probs=tuple(chain.from_iterable(delta.sampling_log_probs for delta in deltas)),
    )
