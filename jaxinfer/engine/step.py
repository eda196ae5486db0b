"""What the scheduler asks of the runner: the chunks of requests that are computed together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import overload

from jaxinfer.engine.page_copies import PageCopies
from jaxinfer.engine.request import Request


@dataclass(slots=True, eq=False)
class Chunk:
    """The next `num_tokens` tokens of a request that are not in the cache, from position `start`, and drafts after.

    `version`: that of the request. `max_drawn`: the most tokens that a decode loop may draw, for which the request has
    pages.
    """

    request: Request
    start: int
    num_tokens: int
    version: int = 0
    drafts: Sequence[int] = ()
    max_drawn: int = 1

    @property
    def is_last(self) -> bool:
        """Whether the request has caught up after this chunk, so that its next token is drawn.

        It is known when the steps before are committed.
        """
        return self.start + self.num_tokens == len(self.request.token_ids)

    @property
    def is_void(self) -> bool:
        """Whether the request has ended or was set back since: nothing that is drawn for it counts."""
        return self.request.version != self.version


class Rows:
    """Requests that are computed together, one row each, and what stays as it is as long as they are.

    While the same ones decode, step after step has the same `Rows`: who has laid out something for them need not do it
    again. `versions` are those that the requests had at first.
    """

    def __init__(self, requests: Sequence[Request], versions: Sequence[int] | None = None) -> None:
        self.requests = requests
        self.versions = [request.version for request in requests] if versions is None else versions

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
    max_drawn: Sequence[int] = ()

    def __post_init__(self) -> None:
        self.drafts = self.drafts or [()] * len(self)
        self.max_drawn = self.max_drawn or [1] * len(self)

    @classmethod
    def of(cls, chunks: Sequence[Chunk]) -> Chunks:
        """Returns chunks that were made one by one."""
        return cls(
            Rows([chunk.request for chunk in chunks], [chunk.version for chunk in chunks]),
            [chunk.start for chunk in chunks],
            [chunk.num_tokens for chunk in chunks],
            [chunk.drafts for chunk in chunks],
            [chunk.max_drawn for chunk in chunks],
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
        return map(Chunk, self.requests, self.starts, self.lens, self.rows.versions, self.drafts, self.max_drawn)

    @property
    def are_last_tokens(self) -> bool:
        """Whether every chunk is the last token of its request, after which the next is drawn."""
        if sum(self.lens) != len(self):
            return False
        return list(self.starts) == [len(request.token_ids) - 1 for request in self.requests]


@dataclass(eq=False)
class Step:
    """The chunks to compute, decoding requests first, and the copies of pages to make before.

    `ends_early`: a decode loop ends with the first request that does, for somebody waits for its place. `began`: when
    it was scheduled. `is_ahead`: the tokens of the step before were not known then. `idle_seconds`: how long the device
    may have had nothing to do after it, as nobody asked for its result; it ended at some time within them.

    `is_decode`: every chunk is one token, and nobody wants to know more of it. `is_verify`: every chunk is one token
    with any number of drafts. `is_plain`: that of every request. `described`: the chunks that yield log-probabilities
    of tokens of their prompts, where they lie in the step, and of how many tokens. `needs_masks`: what its tokens are
    depends on what structures allow next.
    """

    chunks: Chunks
    copies: PageCopies = field(default_factory=PageCopies)
    ends_early: bool = False
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
        self.is_decode = not self.is_verify and self.num_tokens == len(chunks) and not self.described
        self.needs_masks = chunks.rows.has_structures and any(
            request.grammar is not None and start + count == len(request.token_ids) + request.num_pending
            for request, start, count in zip(chunks.requests, chunks.starts, chunks.lens, strict=True)
        )

    @property
    def described(self) -> Sequence[tuple[Chunk, int, int]]:
        described, place = [], 0
        if self.is_plain:
            return described
        for chunk in self.chunks:
            request = chunk.request
            if request.sampling.prompt_log_probs is not None:
                # A token is described by the state of the one before it.
                count = min(chunk.num_tokens, request.num_prompt_tokens - 1 - chunk.start)
                described += [(chunk, place, count)] if count > 0 else []
            place += chunk.num_tokens + len(chunk.drafts)
        return described

    @property
    def kind(self) -> str:
        return "verify" if self.is_verify else "decode" if self.is_decode else "prefill"
