"""How many drafts of which requests a step verifies: as many as bring the most tokens per second, and often none.

A draft costs time whether it is right or not. What a step takes with so many tokens more is known from the engine's own
steps (`step_costs`); how often a request's drafts are right, from what its drafts have met so far, verified or not
(`draft_source`). And whatever is believed of drafts, what they have cost and brought is booked (`draft_ledger`): a
drafter that loses is left alone until the loss is small beside the time that has passed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer.checkpoint import load_checkpoint
from jaxinfer.checkpoint.draft_heads import has_draft_heads, load_draft_heads
from jaxinfer.config import CacheConfig, EngineConfig
from jaxinfer.engine.admission import Admission
from jaxinfer.engine.batching import max_verified_tokens, plan_buckets
from jaxinfer.engine.block_tables import BlockTables
from jaxinfer.engine.device_drafter import DeviceDrafter, Target
from jaxinfer.engine.draft_choice import choose_count, choose_drafts, share_out
from jaxinfer.engine.draft_ledger import Ledger
from jaxinfer.engine.draft_model import DraftModel
from jaxinfer.engine.draft_source import DraftSource
from jaxinfer.engine.drafters import Drafter, make_drafter
from jaxinfer.engine.emission import Emitted
from jaxinfer.engine.head_drafter import HeadDrafter
from jaxinfer.engine.request import Request
from jaxinfer.engine.step import Chunk, Step, all_decode
from jaxinfer.engine.step_costs import StepCosts
from jaxinfer.params import Params
from jaxinfer.processors import LogitsProcessor

# A drafter that takes less than this part of a step is asked before anything is worked out.
CHEAP = 0.01
# Steps with drafts after which one goes without, so that what that takes stays known.
MAX_DRAFTING = 128


@dataclass
class Attempt:
    """What was done about drafts for the step at hand."""

    seconds: float = 0.0  # that it took
    is_measured: bool = False  # whether what the step takes is worth the time to enter it
    plain: float = 0.0  # what the step should take without drafts, and with them
    expected: float = 0.0
    invested: float = 0.0  # of `seconds`, what is paid once for many steps
    has_drafts: bool = False  # whether some were made, verified or not


class Speculation:
    """Asks a drafter for up to `max_drafts` per request and decides which are verified, in `max_tokens` at most.

    Without `costs` it verifies all that it can get.
    """

    def __init__(
        self,
        drafter: Drafter,
        *,
        max_drafts: int,
        max_tokens: int,
        costs: StepCosts | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._max_drafts = max_drafts
        self._max_tokens = max_tokens
        self._costs = costs
        self._clock = clock
        self._ledger = Ledger()
        self._attempt = Attempt()
        self._plain = 0.0  # what a step takes without drafts, as far as known
        self._num_drafting = 0  # steps with drafts since the last one without
        self.source = DraftSource(drafter, clock)
        self.num_drafts: tuple[int, ...] = ()  # of each request in the last step in which all decoded

    def add_drafts(self, chunks: list[Chunk], tables: BlockTables) -> list[Chunk]:
        """Returns the chunks with drafts, and takes pages for them where some are free; none unless all decode."""
        attempt = self._attempt = Attempt()
        if not chunks or not all_decode(chunks):
            return chunks
        self.num_drafts = (0,) * len(chunks)
        if self._costs is not None and self._ledger.takes_rest():
            return chunks
        if self._costs is not None and self._num_drafting >= MAX_DRAFTING:
            self._num_drafting, attempt.is_measured = 0, True
            return chunks
        began = self._clock()
        drafts = self._propose(chunks, [tables.extend_ahead(chunk.request, self._max_drafts) for chunk in chunks])
        attempt.seconds = self._clock() - began
        self.num_drafts = tuple(map(len, drafts))
        self._num_drafting = self._num_drafting + 1 if any(drafts) else 0
        if self._plain > 0:
            self._ledger.enter_choice(any(drafts), attempt.seconds - attempt.invested, self._plain)
        return [replace(chunk, drafts=tokens) for chunk, tokens in zip(chunks, drafts, strict=True)]

    def lets_pass(self, step: Step) -> bool:
        """Whether the step after this one is to have no drafts, without a look, and so may be launched before this one
        has ended. Drafts begin with tokens that are known.
        """
        is_plain = step.is_decode and not self._attempt.is_measured and not self._attempt.has_drafts
        return is_plain and self._costs is not None and self._ledger.takes_rest()

    def observe(self, step: Step, emitted: Sequence[Sequence[Emitted]], seconds: float, hidden: Any = None) -> None:
        """Learns from a step: what it took, drafting included, and which drafts were right.

        `hidden` are the states of its tokens, for drafters that begin with them.
        """
        if isinstance(self.source.drafter, DeviceDrafter):
            self.source.drafter.observe(step, emitted, hidden)
        if self._costs is None:
            return
        attempt = self._attempt
        if attempt.is_measured:
            self._costs.enter(step, seconds - attempt.seconds)
        if step.is_decode or step.is_verify:
            self._ledger.enter_step(seconds)
            if attempt.has_drafts:
                plain = attempt.plain * sum(map(len, emitted)) / len(emitted)
                self._ledger.enter_drafts(seconds - attempt.invested, attempt.expected, plain)
        for chunk, tokens in zip(step.chunks, emitted, strict=True):
            if chunk.is_last and chunk.request.finish_reason is None:
                self.source.compare(chunk.request, [token_id for token_id, _, _ in tokens])

    def step_seconds(self, chunks: Sequence[Chunk], most: int) -> np.ndarray:
        """Returns what a step takes with 0, 1, … `most` drafts, f64[most + 1], as far as known."""
        if self._costs is None:
            raise ValueError("step times are learned with adaptive drafts only: set EngineConfig.adaptive_drafts")
        return self._costs.seconds(chunks, most)

    def page_bytes(self, cache_config: CacheConfig) -> int:
        """Returns what drafting needs for each page of the cache."""
        drafter = self.source.drafter
        return drafter.page_bytes(cache_config) if isinstance(drafter, DeviceDrafter) else 0

    def prepare(
        self,
        run: Callable[[Step], Any],
        admission: Admission,
        params: Params,
        custom: Mapping[str, LogitsProcessor],
    ) -> None:
        """Does all that must not wait for the first request; `run` computes steps of an engine that has none yet."""
        cache_config = admission.cache_config
        self.source.vocab_size = admission.model_config.vocab_size
        if isinstance(self.source.drafter, DeviceDrafter):
            target = Target(
                params=params,
                model_config=admission.model_config,
                engine_config=admission.engine_config,
                cache_config=cache_config,
                table_width=-(-admission.max_model_len // cache_config.page_size),
                custom=custom,
            )
            self._max_drafts = min(self._max_drafts, self.source.drafter.prepare(target))
        if self._costs is not None:
            self._costs.rehearse(run, cache_config.num_pages, cache_config.page_size)
            if isinstance(self.source.drafter, DeviceDrafter):
                for requests in self._costs.made_up_requests(cache_config.num_pages, cache_config.page_size):
                    self.source.rehearse(requests, self._max_drafts)

    def forget(self, request: Request) -> None:
        """Is told that a request has ended."""
        self.source.forget(request)

    def _propose(self, chunks: Sequence[Chunk], limits: Sequence[int]) -> list[list[int]]:
        nothing: list[list[int]] = [[] for _ in chunks]
        room = min(self._max_tokens - len(chunks), sum(limits))
        if room == 0:
            return nothing
        requests = [chunk.request for chunk in chunks]
        if self._costs is None:
            drafts = self.source.draft(requests, limits)
            return _first_of(drafts, share_out([len(tokens) for tokens in drafts], room))
        drafting, unseen = self.source.seconds(requests, max(limits))
        if drafting[-1] + unseen < CHEAP * self._plain:
            drafts = self.source.draft(requests, limits)
            if not any(drafts):
                return nothing
            costs = self._step_seconds(chunks, room)
        else:
            costs = self._step_seconds(chunks, room)
            count = self._affordable(requests, costs, drafting, unseen)
            if count == 0:
                return nothing
            drafts = self.source.draft(requests, [min(limit, count) for limit in limits])
        counts = choose_drafts(self.source.rates(requests), [len(tokens) for tokens in drafts], costs)
        self._attempt.has_drafts = True
        self._attempt.expected = float(costs[sum(counts)]) + drafting[max(counts)]
        return _first_of(drafts, counts)

    def _step_seconds(self, chunks: Sequence[Chunk], room: int) -> np.ndarray:
        """Returns what the step takes with 0, 1, … `room` drafts, f64[room + 1]."""
        costs = self.step_seconds(chunks, room)
        self._attempt.is_measured = True
        self._attempt.plain = self._plain = float(costs[0])
        return costs

    def _affordable(self, requests: Sequence[Request], costs: np.ndarray, drafting: np.ndarray, unseen: float) -> int:
        """Returns how many drafts of each request to make: they have to be paid before they are seen.

        What is paid once is shared out over all tokens that are to come. Without a promise of gain one draft is tried
        where that loss is allowed.
        """
        seconds = costs[:: len(requests)][: len(drafting)]
        if len(seconds) == 1:  # not even one draft each has room
            return 0
        num_to_come = max(request.max_tokens - request.num_output_tokens for request in requests)
        seconds = seconds + drafting[: len(seconds)]
        seconds[1:] += unseen / num_to_come
        count = choose_count(self.source.rates(requests), seconds) if drafting[-1] > 0 else 1
        if count == 0 and self._ledger.credit >= seconds[1] + unseen - seconds[0]:
            count = 1
        if count > 0 and unseen > CHEAP * seconds[0]:
            if self._ledger.credit < 0:
                return 0
            self._ledger.invest(unseen)
            self._attempt.invested = unseen
        return count


def plan_speculation(speculation: str | Path | Drafter | None, config: EngineConfig, dtype: str) -> Speculation | None:
    """Returns what adds drafts to the steps of an engine; ValueError for a drafter that does not exist."""
    if speculation is None:
        return None
    if config.decode_loop_steps > 1:
        raise ValueError(
            f"decode_loop_steps={config.decode_loop_steps} leaves no place for speculation={speculation!r}, which"
            " chooses drafts after every step; set EngineConfig.decode_loop_steps to 1 or leave out speculation"
        )
    if isinstance(speculation, Path) or (isinstance(speculation, str) and "/" in speculation):
        drafter = _load_drafter(speculation, dtype)
    else:
        drafter = make_drafter(speculation)
    buckets = plan_buckets(config, config.max_drafts)
    return Speculation(
        drafter,
        max_drafts=config.max_drafts,
        max_tokens=max_verified_tokens(config),
        costs=StepCosts(buckets) if config.adaptive_drafts else None,
    )


def _load_drafter(path: str | Path, dtype: str) -> Drafter:
    if has_draft_heads(path):
        return HeadDrafter(load_draft_heads(path, dtype))
    return DraftModel(*load_checkpoint(path, dtype))


def _first_of(drafts: Sequence[list[int]], counts: Sequence[int]) -> list[list[int]]:
    return [tokens[:count] for tokens, count in zip(drafts, counts, strict=True)]
