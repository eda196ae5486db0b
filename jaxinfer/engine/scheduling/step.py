"""What the scheduler asks of the runner: the chunks of requests that are computed together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import overload

from jaxinfer.engine.kv_cache.page_transfers import PageTransfers
from jaxinfer.engine.request.request import Request


@dataclass(slots=True, eq=False)
class Chunk:
    """The next `num_tokens` tokens of a request that are not in the cache, from position `start`, and its drafts.

    `epoch`: the request's when the step was scheduled. `max_new_tokens`: the most tokens that a multi-step decode may
    sample for it; the request has pages for them.
    """

    request: Request
    start: int
    num_tokens: int
    epoch: int = 0
    drafts: Sequence[int] = ()
    max_new_tokens: int = 1

    @property
    def is_last(self) -> bool:
        """Whether the request has caught up after this chunk, so that its next token is drawn.

        It is known when the steps before are committed.
        """
        return self.start + self.num_tokens == len(self.request.token_ids)

    @property
    def is_stale(self) -> bool:
        """Whether the request has ended or was set back since: nothing that is drawn for it counts."""
        return self.request.epoch != self.epoch


class Rows:
    """Requests that are computed together, one row each, and what stays as it is as long as they are.

    While the same ones decode, step after step has the same `Rows`: who has laid out something for them need not do it
    again. `versions` are those that the requests had at first.
    """

    def __init__(self, requests: Sequence[Request], epochs: Sequence[int] | None = None) -> None:
        self.requests = requests
        self.epochs = [request.epoch for request in requests] if epochs is None else epochs

    @cached_property
    def is_plain(self) -> bool:
        """Whether nobody wants more than tokens, and nothing but they say what comes next."""
        return all(request.is_plain for request in self.requests)

    @cached_property
    def has_structures(self) -> bool:
        """Whether what may come next for any of the requests follows from all that it has so far."""
        return any(request.grammar is not None for request in self.requests)

    @cached_property
    def max_len(self) -> int:
        """The most tokens that any of the requests may come to."""
        return max((request.max_len for request in self.requests), default=0)

    @cached_property
    def tenants(self) -> Mapping[str, int]:
        """How many requests are whose."""
        return Counter(request.tenant for request in self.requests)


NO_ROWS = Rows(())


@dataclass(eq=False)
class Chunks(Sequence[Chunk]):
    """The chunks of a step in columns; a `Chunk` is made where somebody looks at one.

    Of hundreds of rows there are few with which anything is done that is not done with all, and a column takes a tenth
    of the time that as many objects do.
    """

    rows: Rows
    starts: Sequence[int]
    lens: Sequence[int]  # tokens
    drafts: Sequence[Sequence[int]] = ()
    max_new_tokens: Sequence[int] = ()

    def __post_init__(self) -> None:
        self.drafts = self.drafts or [()] * len(self)
        self.max_new_tokens = self.max_new_tokens or [1] * len(self)

    @classmethod
    def of(cls, chunks: Sequence[Chunk]) -> Chunks:
        """Returns chunks that were made one by one."""
        return cls(
            Rows([chunk.request for chunk in chunks], [chunk.epoch for chunk in chunks]),
            [chunk.start for chunk in chunks],
            [chunk.num_tokens for chunk in chunks],
            [chunk.drafts for chunk in chunks],
            [chunk.max_new_tokens for chunk in chunks],
        )

    @property
    def requests(self) -> Sequence[Request]:
        return self.rows.requests

    def __len__(self) -> int:
        return len(self.requests)

    @overload
    def __getitem__(self, index: int) -> Chunk: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Chunk]: ...
    def __getitem__(self, index: int | slice) -> Chunk | Sequence[Chunk]:
        return list(self)[index]

    def __iter__(self) -> Iterator[Chunk]:
        return map(Chunk, self.requests, self.starts, self.lens, self.rows.epochs, self.drafts, self.max_new_tokens)

    @property
    def are_last_tokens(self) -> bool:
        """Whether every chunk is the last token of its request, after which the next is drawn."""
        if sum(self.lens) != len(self):
            return False
        return list(self.starts) == [len(request.token_ids) - 1 for request in self.requests]


@dataclass(eq=False)
class Step:
    """The chunks to compute, decoding requests first, and the page transfers to make before them.

    `stop_at_first_finish`: a multi-step decode ends when its first request ends, because another request waits for the
    row. `began`: time of scheduling. `is_ahead`: it was scheduled before the tokens of the step before were known.
    `idle_seconds`: the device may have idled that long after the step, because nothing read its result; the step ended
    at some time within them.

    `is_decode`: one token per row, no drafts, no prompt log-probabilities. `is_verify`: one token per row, and some row
    has drafts. `is_plain`: no row has a grammar or wants log-probabilities of alternatives. `prompt_log_prob_chunks`:
    (chunk, its first token's place in the step, number of tokens) for chunks that yield log-probabilities of prompt
    tokens. `needs_masks`: some row's next token needs a mask of its grammar.
    """

    chunks: Chunks
    copies: PageTransfers = field(default_factory=PageTransfers)
    stop_at_first_finish: bool = False
    began: float = 0.0
    is_ahead: bool = False
    idle_seconds: float = 0.0
    num_tokens: int = field(init=False)
    is_verify: bool = field(init=False)
    is_plain: bool = field(init=False)
    is_decode: bool = field(init=False)
    needs_masks: bool = field(init=False)

    def __post_init__(self) -> None:
        chunks = self.chunks
        num_drafts = sum(map(len, chunks.drafts)) if any(chunks.drafts) else 0
        self.num_tokens = sum(chunks.lens) + num_drafts
        self.is_verify = num_drafts > 0
        self.is_plain = chunks.rows.is_plain
        self.is_decode = not self.is_verify and self.num_tokens == len(chunks) and not self.prompt_log_prob_chunks
        self.needs_masks = chunks.rows.has_structures and any(
            request.grammar is not None and start + count == len(request.token_ids) + request.num_pending
            for request, start, count in zip(chunks.requests, chunks.starts, chunks.lens, strict=True)
        )

    @property
    def prompt_log_prob_chunks(self) -> Sequence[tuple[Chunk, int, int]]:
        prompt_log_prob_chunks, place = [], 0
        if self.is_plain:
            return prompt_log_prob_chunks
        for chunk in self.chunks:
            request = chunk.request
            if request.sampling.prompt_log_probs is not None:
                # A token is described by the state of the one before it.
                count = min(chunk.num_tokens, request.num_prompt_tokens - 1 - chunk.start)
                prompt_log_prob_chunks += [(chunk, place, count)] if count > 0 else []
            place += chunk.num_tokens + len(chunk.drafts)
        return prompt_log_prob_chunks

    @property
    def kind(self) -> str:
        return "verify" if self.is_verify else "decode" if self.is_decode else "prefill"
