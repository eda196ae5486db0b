"""Forks, rewinds, saves and restores requests.

Tokens, sampling parameters and options determine a request, so a new one with the same values continues like it. Its
pages are shared or copied, or computed again if they are gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

from jaxinfer.checkpoint import Checkpoint
from jaxinfer.engine.execution.runner import Runner
from jaxinfer.engine.frontend.admission import Admission
from jaxinfer.engine.frontend.page_identity import page_identity
from jaxinfer.engine.frontend.saved_request import read_request, write_request
from jaxinfer.engine.kv_cache.page_transfers import Content
from jaxinfer.engine.request.request import Request
from jaxinfer.engine.scheduling.scheduler import Scheduler
from jaxinfer.sampling_params import MAX_SEED
from jaxinfer.validation import is_int, require, require_int, shown


class Branches:
    """Operations on one unfinished request. ValueError if it has finished or has several samples."""

    def __init__(
        self, admission: Admission, scheduler: Scheduler, runners: Sequence[Runner], checkpoint: Checkpoint
    ) -> None:
        self._admission = admission
        self._scheduler = scheduler
        self._runners = runners  # of each replica
        self._checkpoint = checkpoint

    def fork(self, request_id: int, branch_id: int, seed: int | None = None) -> Request:
        """Returns a branch of a request, with the same tokens, parameters and options, to be queued.

        The branch shares the request's full pages and copies the last one. It samples with `seed`, by default the
        request's, as the next sample of the prompt (`sample_index`): above temperature 0 it diverges. Its first delta
        has its first new token; its completion has all tokens. Raises QueueFullError if the queue has no room for it.
        """
        request = self._find(request_id)
        self._scheduler.check_room([request])  # before the branch takes the next index of a sample
        seed = request.seed if seed is None else _checked_seed(seed)
        branch = fork(request, branch_id, self._admission, time_limit=self._scheduler.time_left(request))
        branch.seed = seed
        return branch

    def rewind(self, request_id: int, num_tokens: int, seed: int | None = None) -> None:
        """Drops the last `num_tokens` tokens of a request's output; it continues from the token before them.

        With the same seed it samples the same tokens again, because sampling depends on the position; another `seed`
        gives other tokens. Deltas of the dropped tokens are void: the completion has the new tokens instead.
        """
        request = self._find(request_id)
        require_int("num_tokens", num_tokens, 1)
        if num_tokens > request.num_output_tokens:
            raise ValueError(
                f"num_tokens={num_tokens} is more than the {request.num_output_tokens} tokens of output that request"
                f" {request_id} has; rewind by fewer"
            )
        request.seed = request.seed if seed is None else _checked_seed(seed)
        rewind(request, num_tokens, self._admission)
        self._scheduler.rewind(request)

    def save(self, request_id: int, path: Path) -> None:
        """Writes a request and its pages to a file for `restore`; the request also continues here.

        Raises OSError if the file cannot be written; an older file then stays unchanged.
        """
        request = self._find(request_id)
        self._scheduler.receive(request)
        table = request.table
        if table.num_saved > request.num_computed:  # it was restored and has not run since
            pages, num_saved = table.saved, table.num_saved
        else:
            pages, num_saved = self._read(request, [kind.by_index for kind in table.kinds]), request.num_known
        write_request(path, request, self._scheduler.time_left(request), pages, num_saved, self._identity)

    def restore(self, path: Path, request_id: int) -> Request:
        """Returns the request in a file, to be queued; it yields the same tokens as where it was saved.

        Its first delta has its first new token. On another mesh its pages are computed anew, for another mesh makes
        other bits. Its timings and the rest of its deadline count from now. The file is trusted: requests with the same
        prefix and cache_salt share its pages. Raises ValueError if the file is damaged or comes from another model,
        page size or version; OSError if it cannot be read.
        """
        return read_request(path, request_id, self._admission, self._identity)

    def _read(self, request: Request, pages_of_kinds: Iterable[Mapping[int, int]]) -> list[dict[int, Content]]:
        """Returns the contents of a request's pages of each kind, given and returned by index."""
        replica = request.replica or 0  # a request that has not run has no pages
        runner, copies = self._runners[replica], self._scheduler.replicas[replica].tables.copies
        return [
            dict(zip(pages, runner.read_pages(copies, list(pages.values()), kind), strict=True))
            for kind, pages in enumerate(pages_of_kinds)
        ]

    def _find(self, request_id: int) -> Request:
        require(is_int(request_id), "request_id", request_id, "the id of an unfinished request")
        request = self._scheduler.find(request_id)
        if request is None:
            raise ValueError(
                f"request {shown(request_id)} is unknown or has finished; give the id of an unfinished one"
            )
        count = request.sampling.num_samples
        if count > 1:
            raise ValueError(f"request {request_id} has {count} samples, which belong together; add it with n=1")
        return request

    @cached_property
    def _identity(self) -> dict[str, str]:
        admission = self._admission
        configs = admission.model_config, admission.cache_config, admission.engine_config
        engine = admission.window, admission.params_version, admission.devices
        return page_identity(self._checkpoint, admission.dtype, *configs, *engine)


def fork(request: Request, request_id: int, admission: Admission, *, time_limit: float) -> Request:
    """Returns a request with the same tokens, as the next sample of the same prompt."""
    branch = Request(
        request_id,
        request.token_ids[: request.num_prompt_tokens],
        request.sampling,
        seed=request.seed,
        sample_index=request.shared_prompt.num_samples,
        max_tokens=request.max_tokens,
        stop_token_ids=request.stop_token_ids,
        detokenizer=admission.detokenizer(request.sampling),
        keys=None if request.keys is None else request.keys.begin_again(len(request.token_ids)),
        priority=request.priority,
        tenant=request.tenant,
        time_limit=time_limit,
        grammar=None if request.grammar is None else request.grammar.begin_again(),
        cache_salt=request.cache_salt,
        adapter=request.adapter,
        shared_prompt=request.shared_prompt,
    )
    for output in request.outputs:
        branch.append(*output)
    request.shared_prompt.num_samples += 1
    branch.table.begin_like(request)
    return branch


def rewind(request: Request, num_tokens: int, admission: Admission) -> None:
    """Drops the last `num_tokens` tokens of a request. The caller then calls `Scheduler.rewind`."""
    grammar = None if request.grammar is None else request.grammar.begin_again()
    request.rewind(num_tokens, admission.detokenizer(request.sampling), grammar)


def _checked_seed(seed: int) -> int:
    require_int("seed", seed, 0, MAX_SEED)
    return int(seed)
