"""The most probable continuations of a prompt, by beam search; deterministic."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from jaxinfer.config import SamplingParams
from jaxinfer.engine.request.completion import Completion
from jaxinfer.engine.request.request import Request
from jaxinfer.text.tokenizer import Tokenizer

# A length of a million tokens to this power is still a finite float.
MAX_LENGTH_PENALTY = 50.0


@dataclass(frozen=True)
class Beam:
    """A continuation with its tokens' log-probabilities; finished at a stop token or at max_tokens."""

    token_ids: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()

    def score(self, length_penalty: float) -> float:
        """Returns the sum of log-probabilities over length ** length_penalty; 0 without tokens."""
        return sum(self.log_probs) / max(len(self.token_ids), 1) ** length_penalty

    def extended(self, token_id: int, log_prob: float) -> Beam:
        return Beam((*self.token_ids, token_id), (*self.log_probs, log_prob))


def num_candidates(num_beams: int, num_stop_tokens: int) -> int:
    """Returns the candidates per step: enough that `num_beams` remain even if every beam meets every stop token."""
    return max(2, 1 + num_stop_tokens) * num_beams


class CutShortError(Exception):
    """Raised by `extend` to end the search with the present beams."""

    def __init__(self, completion: Completion) -> None:
        self.finish_reason, self.error = completion.finish_reason, completion.error


def search(
    extend: Callable[[Sequence[Beam]], Sequence[dict[int, float]]],
    *,
    num_beams: int,
    max_tokens: int,
    stop_token_ids: Collection[int],
    length_penalty: float,
) -> list[Beam]:
    """Returns the `num_beams` best finished beams, best first, as `transformers` does with early_stopping=False.

    `extend` returns the log-probabilities of the `num_candidates` most probable next tokens of each beam. A greater
    length_penalty favours longer beams. The search ends if `num_beams` beams have finished and no running beam has a
    better score at its present length. It also ends if `extend` raises CutShortError; then running beams count too.
    """
    running, finished = [Beam()], []
    for length in range(1, max_tokens + 1):
        try:
            tokens_of_beams = extend(running)
        except CutShortError:
            return heapq.nlargest(num_beams, finished + running, key=lambda beam: beam.score(length_penalty))
        extended = [
            beam.extended(*token)
            for beam, tokens in zip(running, tokens_of_beams, strict=True)
            for token in tokens.items()
        ]
        best = heapq.nlargest(num_candidates(num_beams, len(stop_token_ids)), extended, key=lambda b: sum(b.log_probs))
        has_ended = [length == max_tokens or beam.token_ids[-1] in stop_token_ids for beam in best]
        # Candidates beyond the first num_beams may go on, but may not finish.
        finished += [beam for beam, ended in zip(best[:num_beams], has_ended, strict=False) if ended]
        finished = heapq.nlargest(num_beams, finished, key=lambda beam: beam.score(length_penalty))
        running = [beam for beam, ended in zip(best, has_ended, strict=True) if not ended][:num_beams]
        is_full = len(finished) == num_beams
        if not running or (is_full and running[0].score(length_penalty) <= finished[-1].score(length_penalty)):
            break
    return finished


def complete(
    request: Request,
    generate: Callable[..., Sequence[Completion]],
    *,
    num_beams: int,
    length_penalty: float,
    vocab_size: int,
    max_log_probs: int,
    tokenizer: Tokenizer | None,
) -> list[Completion]:
    """Returns the completions that `search` finds for a request.

    `generate` computes a token for each beam: it gets prompts, their parameters, and the `deadline` of all of them.
    """
    end = time.monotonic() + request.time_limit
    count = min(num_candidates(num_beams, len(request.stop_token_ids)), vocab_size)
    if count > max_log_probs:
        raise ValueError(
            f"num_beams={num_beams} needs log_probs={count}, which is more than max_log_probs={max_log_probs}; ask for"
            " fewer beams or raise EngineConfig.max_log_probs"
        )
    params = SamplingParams(max_tokens=1, temperature=0, log_probs=count, ignore_eos=True)

    cut: list[CutShortError] = []

    def extend(beams: Sequence[Beam]) -> list[dict[int, float]]:
        left = max(end - time.monotonic(), 1e-9)
        prompts = [[*request.token_ids, *beam.token_ids] for beam in beams]
        completions = generate(prompts, params, deadline=left if math.isfinite(left) else None)
        for completion in completions:
            if not completion.token_ids:
                cut.append(CutShortError(completion))
                raise cut[0]
        return [completion.top_log_probs[0] for completion in completions]

    beams = search(
        extend,
        num_beams=num_beams,
        max_tokens=request.max_tokens,
        stop_token_ids=request.stop_token_ids,
        length_penalty=length_penalty,
    )
    return as_completions(beams, request, tokenizer, *cut)


def as_completions(
    beams: Sequence[Beam], request: Request, tokenizer: Tokenizer | None, cut: CutShortError | None = None
) -> list[Completion]:
    """Returns beams as completions of `request`; unfinished beams get the finish reason and error of `cut`."""

    def ending(beam: Beam) -> dict[str, Any]:
        if beam.token_ids and beam.token_ids[-1] in request.stop_token_ids:
            return {"finish_reason": "stop"}
        if cut is None or len(beam.token_ids) == request.max_tokens:
            return {"finish_reason": "length"}
        return {"finish_reason": cut.finish_reason, "error": cut.error}

    skips = request.sampling.skip_special_tokens
    return [
        Completion(
            request_id=request.request_id,
            prompt_token_ids=tuple(request.token_ids),
            text="" if tokenizer is None else tokenizer.decode(beam.token_ids, skip_special_tokens=skips),
            token_ids=beam.token_ids,
            log_probs=beam.log_probs,
            top_log_probs=(),
            seed=request.seed,
            sample_index=rank,
            **ending(beam),
        )
        for rank, beam in enumerate(beams)
    ]
