"""Several samples of one prompt: several requests for the scheduler, one request for the user."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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


class CompletionCollector:
    """The completions of several prompts, from deltas that come in any order.

    `prompts` has the parameters of each by its request id. `num_missing` counts the completions to come.
    """

    def __init__(self, prompts: Mapping[int, SamplingParams]) -> None:
        self._prompts = prompts
        self.by_request: dict[int, list[Completion]] = {request_id: [] for request_id in prompts}  # as they came
        self.num_missing = sum(sampling.n for sampling in prompts.values())
        self.num_tokens = 0

    @classmethod
    def of_groups(cls, groups: Sequence[SampleGroup]) -> CompletionCollector:
        return cls({samples.request_id: samples.sampling for samples in groups})

    def add(self, delta: Delta) -> None:
        """Takes a delta of one of the prompts; a sink."""
        self.num_tokens += len(delta.token_ids)
        if delta.completion is not None:
            self.by_request[delta.request_id].append(delta.completion)
            self.num_missing -= 1

    def completions(self) -> list[Completion]:
        """Returns the completions in the prompts' order; those of one by sample_index, or best first with `best_of`."""
        return [c for request_id, sampling in self._prompts.items() for c in self._in_order(request_id, sampling)]

    def _in_order(self, request_id: int, sampling: SamplingParams) -> list[Completion]:
        completions = self.by_request[request_id]
        # The group already yields those of `best_of` best first.
        return completions if sampling.best_of is not None else sorted(completions, key=lambda c: c.sample_index)


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
