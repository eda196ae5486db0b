"""Several samples of one prompt: several requests for the scheduler, one request for the user."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from jaxinfer.engine.request.completion import Completion, Delta
from jaxinfer.engine.request.request import Request
from jaxinfer.sampling_params import SamplingParams


class SampleGroup:
    """The requests of one prompt. Their deltas go out under the id of the first request.

    With `best_of` the group holds all deltas back until every sample has ended. It then yields the `n` most probable
    samples as one whole delta each, best first. `params_version`: the engine's parameters that their page keys name.
    `ids`: the counter of the engine that has admitted the prompt, by which it knows its own.
    """

    def __init__(self, requests: Sequence[Request], params_version: str = "", ids: object = None) -> None:
        sampling = requests[0].sampling
        self.requests = tuple(requests)
        self.params_version = params_version
        self.ids = ids
        self.is_submitted = False
        self.request_id = requests[0].request_id
        self.num_completions = sampling.n  # completions that the user gets
        self.sampling = sampling
        self.while_held_back: Callable[[], None] = lambda: None  # called for each delta that waits; may raise
        self._is_best_of = sampling.best_of is not None
        self._completions: list[Completion] = []

    def hand_out(self, delta: Delta) -> list[Delta]:
        """Takes one sample's delta of a step and returns the deltas for the user."""
        completion = delta.completion and replace(delta.completion, request_id=self.request_id)
        if completion is not None:
            self._completions.append(completion)
        if not self._is_best_of:
            return [delta._replace(request_id=self.request_id, completion=completion)]
        if len(self._completions) < len(self.requests):
            self.while_held_back()
            return []
        return [_whole(completion) for completion in self._best()]

    def _best(self) -> list[Completion]:
        # Samples with an error rank last. The sample index breaks ties, so the order of ending does not matter.
        ranked = sorted(
            self._completions, key=lambda c: (c.finish_reason == "error", -sum(c.log_probs), c.sample_index)
        )
        return ranked[: self.num_completions]


def in_order(completions: Sequence[Completion], sampling: SamplingParams) -> list[Completion]:
    """Returns the completions of one prompt by sample_index; with `best_of`, in the given order, best first."""
    is_best_of = sampling.best_of is not None  # the group already yields these best first
    return list(completions) if is_best_of else sorted(completions, key=lambda c: c.sample_index)


def _whole(completion: Completion) -> Delta:
    return Delta(
        request_id=completion.request_id,
        sample_index=completion.sample_index,
        text=completion.text,
        token_ids=completion.token_ids,
        log_probs=completion.log_probs,
        completion=completion,
        top_log_probs=completion.top_log_probs,
        sampling_log_probs=completion.sampling_log_probs,
    )
