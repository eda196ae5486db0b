"""Who guesses the next tokens of a request, for the target to verify. A guess changes no token, only the time it takes.

A drafter of one's own is an object with the two methods of `Drafter`, given to `LLM(speculation=…)`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from jaxinfer.engine.request.request import Request
from jaxinfer.engine.scheduling.drafts import Drafts
from jaxinfer.validation import shown

# Tokens that must agree before what follows them is a guess: the more, the better the guess.
NGRAM_SIZES = (4, 3, 2)
# Tokens of finished outputs that are kept to draft from, some 100 bytes each.
MAX_REMEMBERED_TOKENS = 200_000


@runtime_checkable
class Drafter(Protocol):
    """What speculation needs. The tokens of a request so far are its `token_ids`, a list that only ever grows; one
    that is set back has another list from then on.
    """

    def draft(self, requests: Sequence[Request], counts: Sequence[int]) -> Sequence[Drafts]:
        """Returns up to `counts[i]` tokens, none if need be, that may follow those of `requests[i]`: a list of them one
        after another, or with `EngineConfig.draft_trees` a `DraftTree`.
        """
        ...

    def forget(self, request: Request) -> None:
        """Is told that a request has ended, whether it was drafted for or not."""
        ...


Place = tuple[list[int], int]  # a text and where in it


class NgramIndex:
    """Where in some texts each run of a few tokens occurred last with something after it.

    Runs and places are integers, for tuples of them would have the garbage collector at work for longer than it takes
    to enter them: prompts of thousands of tokens are entered between two steps.
    """

    def __init__(self) -> None:
        self._places: dict[int, int] = {}  # by run: the text's number and the place in it, 32 bits each
        self._texts: dict[int, list[int]] = {}
        self._number = -1  # of the last text

    def enter(self, text: list[int], start: int = 1) -> None:
        """Enters what stands before each token of the text from `start` on."""
        if self._texts.get(self._number) is not text:
            self._number += 1
            self._texts[self._number] = text
        for place in range(max(start, 1), len(text)):
            value = self._number << 32 | place
            for run in _runs_before(text, place):
                self._places[run] = value

    def remove_oldest(self) -> None:
        """Forgets the text that was entered first, and the places in it."""
        number = self._number + 1 - len(self._texts)
        text = self._texts.pop(number)
        for place in range(1, len(text)):
            for run in _runs_before(text, place):
                if self._places.get(run, -1) >> 32 == number:
                    del self._places[run]

    @property
    def is_empty(self) -> bool:
        return not self._texts

    def find(self, run: int) -> Place | None:
        """Returns where something follows these tokens."""
        place = self._places.get(run)
        return None if place is None else (self._texts[place >> 32], place & 0xFFFFFFFF)


def _runs_before(text: list[int], place: int) -> list[int]:
    """Returns the tokens before a place in each number of NGRAM_SIZES that there are, the least first, as an integer
    each.
    """
    runs, run = [], 1  # so that runs of unlike length are unlike
    for size in range(1, min(place, NGRAM_SIZES[0]) + 1):
        run = run << 32 | text[place - size]
        if size in NGRAM_SIZES:
            runs.append(run)
    return runs


class NgramDrafter:
    """Drafts what followed the last tokens where the request had them before (prompt lookup, Saxena 2023)."""

    def __init__(self) -> None:
        self._own: dict[int, tuple[NgramIndex, int]] = {}  # by request, with how many of its tokens are entered

    def draft(self, requests: Sequence[Request], counts: Sequence[int]) -> list[list[int]]:
        return [self._draft(*pair) for pair in zip(requests, counts, strict=True)]

    def forget(self, request: Request) -> None:
        self._own.pop(request.request_id, None)

    def _draft(self, request: Request, count: int) -> list[int]:
        tokens = request.token_ids
        own, num_entered = self._own.get(request.request_id) or (NgramIndex(), 0)
        own.enter(tokens, num_entered)
        self._own[request.request_id] = (own, len(tokens))
        for run in reversed(_runs_before(tokens, len(tokens))):
            for index in (own, *self._others(request)):
                place = index.find(run)
                if place is not None:
                    return continuation(*place, count)
        return []

    def _others(self, request: Request) -> Sequence[NgramIndex]:
        """Further texts to draft from."""
        return ()


class SuffixDrafter(NgramDrafter):
    """Drafts from the request itself and from the outputs of finished ones (after SuffixDecoding, Oliaro et al. 2024).

    A request with a `cache_salt` is drafted for from outputs of that salt only: from the time that its tokens took, a
    user could tell what others were answered.
    """

    def __init__(self, max_tokens: int = MAX_REMEMBERED_TOKENS) -> None:
        super().__init__()
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._outputs: deque[tuple[str | None, list[int]]] = deque()  # by salt, oldest first
        self._indices: dict[str | None, NgramIndex] = {}

    def forget(self, request: Request) -> None:
        super().forget(request)
        # With the end of its prompt, so that its first tokens have something before them.
        text = request.token_ids[max(request.num_prompt_tokens - max(NGRAM_SIZES), 0) :]
        self._indices.setdefault(request.cache_salt, NgramIndex()).enter(text)
        self._outputs.append((request.cache_salt, text))
        self._num_tokens += len(text)
        while self._num_tokens > self._max_tokens:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        salt, text = self._outputs.popleft()
        self._num_tokens -= len(text)
        self._indices[salt].remove_oldest()
        if self._indices[salt].is_empty:
            del self._indices[salt]

    def _others(self, request: Request) -> Sequence[NgramIndex]:
        index = self._indices.get(request.cache_salt)
        return () if index is None else (index,)


def continuation(text: list[int], start: int, count: int) -> list[int]:
    """Returns what stands from `start` on; past the end, what would if the text went on repeating itself from there.

    text 1 2 3 2 3, start 3 -> 2 3 2 3 2 3 …
    """
    drafts = text[start : start + count]
    for i in range(len(drafts), count):
        drafts.append(drafts[i - (len(text) - start)])
    return drafts


DRAFTERS = {"ngram": NgramDrafter, "suffix": SuffixDrafter}


def make_drafter(speculation: str | Drafter) -> Drafter:
    """Returns the drafter that was asked for by its name; ValueError where there is none of that name."""
    if isinstance(speculation, str):
        if speculation in DRAFTERS:
            return DRAFTERS[speculation]()
    elif isinstance(speculation, Drafter) and not isinstance(speculation, type):
        return speculation
    raise ValueError(
        f"speculation={shown(speculation)} is not allowed: give one of {', '.join(map(repr, DRAFTERS))}, a folder that"
        " exists, the Hub id of a draft model, an object with the methods of jaxinfer.Drafter or None"
    )
