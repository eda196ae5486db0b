"""The scheduler's output for the runner: a step, that is, the chunks of requests to compute in one launch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import overload

from jaxinfer.engine.kv_cache.page_transfers import PageTransfers
from jaxinfer.engine.request.page_table import KindTable
from jaxinfer.engine.request.request import Request
from jaxinfer.sampling_params import Form, widest_form


@dataclass(slots=True, eq=False)
class Chunk:
    """The tokens of one request that a step computes."""

    request: Request
    start: int  # position of the first token
    num_tokens: int  # without the drafts; none of them is in the cache yet
    epoch: int = 0  # the request's epoch when the step was scheduled
    drafts: Sequence[int] = ()
    max_new_tokens: int = 1  # tokens that a decode loop samples; the request has pages for them

    @property
    def is_last(self) -> bool:
        """True if the chunk ends at the request's last token, so that the step samples its next token.

        Valid only after all earlier steps are committed.
        """
        return self.start + self.num_tokens == len(self.request.token_ids)

    @property
    def is_stale(self) -> bool:
        """True if the request has ended or was rewound since scheduling; the step's tokens for it are discarded."""
        return self.request.epoch != self.epoch


class Rows:
    """The requests of a step, one per row, with cached properties of the group.

    Consecutive decode steps over the same requests share one `Rows` object. Compare by identity to reuse arrays built
    for the last step. `epochs`: the requests' epochs when the object was made.
    """

    def __init__(self, requests: Sequence[Request], epochs: Sequence[int] | None = None) -> None:
        self.requests = requests
        self.epochs = [request.epoch for request in requests] if epochs is None else epochs

    @cached_property
    def is_plain(self) -> bool:
        """True if no request has a grammar, pools states or wants log-probabilities of alternatives or the prompt."""
        return all(request.is_plain for request in self.requests)

    @cached_property
    def form(self) -> Form:
        """Returns the least form in which a step can draw the next token of every request."""
        return widest_form(request.sampling for request in self.requests)

    @cached_property
    def has_structures(self) -> bool:
        """True if any request has a grammar, which constrains its next token by all tokens before it."""
        return any(request.grammar is not None for request in self.requests)

    @cached_property
    def pool_states(self) -> bool:
        """True if any request pools its hidden states."""
        return any(request.pooling is not None for request in self.requests)

    @cached_property
    def max_len(self) -> int:
        """Returns the largest `max_len` (tokens of prompt and output) of the requests."""
        return max((request.max_len for request in self.requests), default=0)

    @cached_property
    def adapter_slots(self) -> Sequence[int]:
        """Returns the slot of each request's adapter, 0 without one."""
        return [0 if request.adapter is None else request.adapter.slot for request in self.requests]

    @cached_property
    def tables(self) -> Sequence[Sequence[KindTable]]:
        """Returns the requests' tables of each kind of pages, which they keep while they run."""
        return list(zip(*[request.table.kinds for request in self.requests], strict=True))

    @cached_property
    def tenants(self) -> Mapping[str, int]:
        """Returns the number of requests of each tenant."""
        return Counter(request.tenant for request in self.requests)


NO_ROWS = Rows(())


@dataclass(eq=False)
class Chunks(Sequence[Chunk]):
    """The chunks of a step as columns; iterating or indexing makes the `Chunk` objects.

    Few of hundreds of rows need individual treatment, and a column takes a tenth of the time of a list of objects.
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
        """Returns the columns of individually made chunks."""
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
        """True if every chunk is the last token of its request, known or pending, so that every request decodes."""
        if sum(self.lens) != len(self):
            return False
        return list(self.starts) == [len(request.token_ids) + request.num_pending - 1 for request in self.requests]


@dataclass(eq=False)
class Step:
    """The chunks to compute in one launch, and the page transfers to make before it."""

    chunks: Chunks  # decoding requests first
    copies: PageTransfers = field(default_factory=PageTransfers)
    began: float = 0.0  # time of scheduling
    is_ahead: bool = False  # scheduled before the tokens of the previous step were known
    replica: int = 0  # that computes it
    number: int = 0  # of the step among those of its replica, from 1
    # The device may have idled this long after the step, because the host read the result late. The step ended at an
    # unknown time within these seconds.
    idle_seconds: float = 0.0
    num_tokens: int = field(init=False)  # drafts included
    is_verify: bool = field(init=False)  # some row has drafts
    is_mixed: bool = field(init=False)  # some row has more tokens than one and its drafts
    is_plain: bool = field(init=False)  # no row has a grammar or wants more log-probabilities than its tokens'
    is_loop: bool = field(init=False)  # some row gets several tokens, in a decode loop
    is_decode: bool = field(init=False)  # one token per row, no drafts, no prompt log-probabilities, no pooled states
    needs_masks: bool = field(init=False)  # some row's next token needs a mask of its grammar
    form: Form = field(init=False)  # in which its tokens are drawn; a step but a verify step itself draws plainly

    def __post_init__(self) -> None:
        chunks = self.chunks
        num_drafts = sum(map(len, chunks.drafts)) if any(chunks.drafts) else 0
        self.num_tokens = sum(chunks.lens) + num_drafts
        self.is_verify = num_drafts > 0
        self.is_loop = max(chunks.max_new_tokens, default=1) > 1
        self.is_mixed = self.num_tokens > len(chunks) + num_drafts
        self.is_plain = chunks.rows.is_plain
        has_one_token_rows = not self.is_verify and self.num_tokens == len(chunks)
        self.is_decode = has_one_token_rows and not self.prompt_log_prob_chunks and not self.pooled_chunks
        self.needs_masks = chunks.rows.has_structures and any(r.grammar for r in self._sampling())
        self.form = "plain"
        if chunks.rows.form != "plain":
            self.form = widest_form(request.sampling for request in self._sampling())

    def _sampling(self) -> Iterator[Request]:
        """Yields the requests whose next token the step samples."""
        for request, start, count in zip(self.chunks.requests, self.chunks.starts, self.chunks.lens, strict=True):
            if start + count == len(request.token_ids) + request.num_pending:
                yield request

    @property
    def draws_apart(self) -> bool:
        """True if another launch draws its tokens."""
        return self.form != "plain" and not self.is_verify and not self.is_loop

    @property
    def prompt_log_prob_chunks(self) -> Sequence[tuple[Chunk, int, int]]:
        """Returns (chunk, place of its first token in the step, number of tokens) for each chunk that yields
        log-probabilities of prompt tokens.
        """
        prompt_log_prob_chunks, place = [], 0
        if self.is_plain:
            return prompt_log_prob_chunks
        for chunk in self.chunks:
            request = chunk.request
            if request.sampling.prompt_log_probs is not None:
                # The log-probability of a token comes from the hidden state of the token before it.
                count = min(chunk.num_tokens, request.num_prompt_tokens - 1 - chunk.start)
                prompt_log_prob_chunks += [(chunk, place, count)] if count > 0 else []
            place += chunk.num_tokens + len(chunk.drafts)
        return prompt_log_prob_chunks

    @property
    def pooled_chunks(self) -> Sequence[tuple[Chunk, int]]:
        """Returns (chunk, place of its first token in the step) for each chunk of a request that pools its states."""
        if self.is_plain:
            return []
        sizes = [chunk.num_tokens + len(chunk.drafts) for chunk in self.chunks]
        places = accumulate(sizes, initial=0)  # one more than chunks: the end of the last
        return [(chunk, place) for chunk, place in zip(self.chunks, places, strict=False) if chunk.request.pooling]

    @property
    def kind(self) -> str:
        return "verify" if self.is_verify else "decode" if self.is_decode else "prefill"
