"""What the scheduler asks of the runner: the chunks of requests that are computed together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter

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


@dataclass(eq=False)
class Step:
    """The chunks to compute, decoding requests first, and the copies of pages to make before.

    `ends_early`: a decode loop ends with the first request that does, for somebody waits for its place. `began`: when
    it was scheduled. `is_ahead`: the tokens of the step before were not known then.

    `is_decode`: every chunk is one token, and nobody wants to know more of it. `is_verify`: every chunk is one token
    with any number of drafts. `is_plain`: that of every request. `described`: the chunks that yield log-probabilities
    of tokens of their prompts, where they lie in the step, and of how many tokens.
    """

    chunks: tuple[Chunk, ...]
    copies: PageCopies = field(default_factory=PageCopies)
    ends_early: bool = False
    began: float = 0.0
    is_ahead: bool = False
    num_tokens: int = field(init=False)
    is_verify: bool = field(init=False)
    is_plain: bool = field(init=False)
    is_decode: bool = field(init=False)

    def __post_init__(self) -> None:
        num_drafts = sum(map(len, map(attrgetter("drafts"), self.chunks)))
        self.num_tokens = sum(map(attrgetter("num_tokens"), self.chunks)) + num_drafts
        self.is_verify = num_drafts > 0
        self.is_plain = all(map(attrgetter("request.is_plain"), self.chunks))
        self.is_decode = not self.is_verify and self.num_tokens == len(self.chunks) and not self.described

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


def all_decode(chunks: Sequence[Chunk]) -> bool:
    """Whether every chunk is the last token of its request, after which the next is drawn."""
    return all(chunk.num_tokens == 1 and chunk.is_last for chunk in chunks)
