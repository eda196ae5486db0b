"""Drafters guess the next tokens of a request, and the target verifies them. Drafts change the speed, never the output.

A custom drafter is an object with the two methods of `Drafter`, given to `LLM(speculation=…)`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from jaxinfer.engine.request.request import Request
from jaxinfer.engine.scheduling.drafts import Drafts
from jaxinfer.validation import shown

# Lengths of the n-grams to match, best first: drafts after a longer match are accepted more often.
NGRAM_SIZES = (4, 3, 2)
# Tokens of finished outputs kept to draft from, about 100 bytes each.
MAX_REMEMBERED_TOKENS = 200_000


@runtime_checkable
class Drafter(Protocol):
    """The interface of drafters. `Request.token_ids` lists the tokens so far; a rewound request gets a new list.

    Otherwise the list only grows.
    """

    def draft(self, requests: Sequence[Request], counts: Sequence[int]) -> Sequence[Drafts]:
        """Returns up to `counts[i]` drafts, possibly none, for `requests[i]`.

        Drafts are a list of consecutive tokens or, with `EngineConfig.draft_trees`, a `DraftTree`.
        """
        ...

    def forget(self, request: Request) -> None:
        """Drops the state of a request that has ended; called for all requests, even without drafts."""
        ...


Place = tuple[list[int], int]  # a text and an index in it


class NgramIndex:
    """Maps each n-gram of some texts to the place after its last occurrence that is followed by a token.

    N-grams and places are packed into integers, because tuples would keep the garbage collector busy for longer than
    the indexing. Prompts of thousands of tokens are indexed between two steps.
    """

    def __init__(self) -> None:
        self._places: dict[int, int] = {}  # n-gram -> number of the text and place in it, 32 bits each
        self._texts: dict[int, list[int]] = {}
        self._number = -1  # of the newest text

    def enter(self, text: list[int], start: int = 1) -> None:
        """Indexes the n-grams before each token of the text from `start` on."""
        if self._texts.get(self._number) is not text:
            self._number += 1
            self._texts[self._number] = text
        for place in range(max(start, 1), len(text)):
            value = self._number << 32 | place
            for run in _runs_before(text, place):
                self._places[run] = value

    def remove_oldest(self) -> None:
        """Removes the oldest text and the n-grams that point into it."""
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
        """Returns the place after the last occurrence of this n-gram, or None."""
        place = self._places.get(run)
        return None if place is None else (self._texts[place >> 32], place & 0xFFFFFFFF)


def _runs_before(text: list[int], place: int) -> list[int]:
    """Returns the n-grams that end before `place`, shortest first, each packed into an integer."""
    runs, run = [], 1  # the leading 1 makes n-grams of different lengths differ
    for size in range(1, min(place, NGRAM_SIZES[0]) + 1):
        run = run << 32 | text[place - size]
        if size in NGRAM_SIZES:
            runs.append(run)
    return runs


class NgramDrafter:
    """Drafts the tokens after an earlier occurrence of the request's last n-gram (prompt lookup, Saxena 2023).

    It looks in the request's own text and in its prediction.
    """

    def __init__(self) -> None:
        self._own: dict[int, tuple[NgramIndex, int]] = {}  # by request id: its index, number of tokens indexed
        self._predicted: dict[int, NgramIndex] = {}  # by request id: the index of its prediction

    def draft(self, requests: Sequence[Request], counts: Sequence[int]) -> list[list[int]]:
        return [self._draft(*pair) for pair in zip(requests, counts, strict=True)]

    def forget(self, request: Request) -> None:
        self._own.pop(request.request_id, None)
        self._predicted.pop(request.request_id, None)

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
        """Returns indices of further texts to draft from."""
        if not request.prediction:
            return ()
        if (index := self._predicted.get(request.request_id)) is None:
            index = self._predicted[request.request_id] = NgramIndex()
            index.enter(_after_prompt(request, request.prediction))
        return (index,)


Source = tuple[str | None, str]  # the salt and the adapter's digest of a request


class SuffixDrafter(NgramDrafter):
    """Drafts from the request itself and from finished outputs (after SuffixDecoding, Oliaro et al. 2024).

    Drafts for a request come only from outputs with the same `cache_salt` and adapter. Otherwise a user could infer the
    outputs of other users from the latency of tokens.
    """

    def __init__(self, max_tokens: int = MAX_REMEMBERED_TOKENS) -> None:
        super().__init__()
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._outputs: deque[tuple[Source, list[int]]] = deque()  # oldest first
        self._indices: dict[Source, NgramIndex] = {}

    def forget(self, request: Request) -> None:
        super().forget(request)
        text = _after_prompt(request, request.token_ids[request.num_prompt_tokens :])
        source = request.cache_salt, request.adapter_digest
        self._indices.setdefault(source, NgramIndex()).enter(text)
        self._outputs.append((source, text))
        self._num_tokens += len(text)
        while self._num_tokens > self._max_tokens:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        source, text = self._outputs.popleft()
        self._num_tokens -= len(text)
        self._indices[source].remove_oldest()
        if self._indices[source].is_empty:
            del self._indices[source]

    def _others(self, request: Request) -> Sequence[NgramIndex]:
        index = self._indices.get((request.cache_salt, request.adapter_digest))
        return super()._others(request) if index is None else (*super()._others(request), index)


def _after_prompt(request: Request, output: Sequence[int]) -> list[int]:
    """Returns an output after the end of its prompt, so that an n-gram precedes the first tokens."""
    end = request.num_prompt_tokens
    return [*request.token_ids[max(end - max(NGRAM_SIZES), 0) : end], *output]


def continuation(text: list[int], start: int, count: int) -> list[int]:
    """Returns `count` tokens of the text from `start` on; past its end, the text repeats from `start`.

    text 1 2 3 2 3, start 3 -> 2 3 2 3 2 3 …
    """
    drafts = text[start : start + count]
    for i in range(len(drafts), count):
        drafts.append(drafts[i - (len(text) - start)])
    return drafts


DRAFTERS = {"ngram": NgramDrafter, "suffix": SuffixDrafter}


def make_drafter(speculation: str | Drafter) -> Drafter:
    """Returns the drafter with this name, or the given drafter itself; ValueError for anything else."""
    if isinstance(speculation, str):
        if speculation in DRAFTERS:
            return DRAFTERS[speculation]()
    elif isinstance(speculation, Drafter) and not isinstance(speculation, type):
        return speculation
    raise ValueError(
        f"speculation={shown(speculation)} is not allowed: give one of {', '.join(map(repr, DRAFTERS))}, 'mtp', a"
        " folder that exists, the Hub id of a draft model, an object with the methods of jaxinfer.Drafter or None"
    )
