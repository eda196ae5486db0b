"""The further kinds of pages of a model: a window of a request's tokens, or its last recurrent state.

Beside layers that keep all tokens of a request, others keep fewer. Each kind has its own pool and a block table per
request, and page i of every kind is for the same tokens.

tokens             |  page 0  |  page 1  |  page 2  |  page 3  | num_computed
all tokens         |    12    |     4    |    31    |     7    |
window of a page   |  freed   |  freed   |     2    |     9    |
state              |  freed   |  freed   |  freed   |     5    |   a full page may be shared

A pool has pages for every running request, so no request is ever preempted for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxinfer.engine.kv_cache.page_allocator import PageAllocator
from jaxinfer.engine.kv_cache.page_transfers import PageTransfers, SwapOut
from jaxinfer.engine.kv_cache.tiers import PageTiers
from jaxinfer.engine.request.page_keys import PageKeys, key_of_kind
from jaxinfer.engine.request.request import Request


@dataclass(frozen=True)
class BoundedKind:
    """A kind of pages of which a request keeps the page of its last token and `num_kept` pages before it."""

    num_kept: int
    num_pages: int  # in the pool
    is_state: bool = False  # a page holds the state after its last computed token


class BoundedPages:
    """The pages of one further kind; `kind` is its index in `ModelConfig.page_kinds`."""

    def __init__(
        self, kind: int, plan: BoundedKind, page_size: int, copies: PageTransfers, tiers: PageTiers | None
    ) -> None:
        self.kind = kind
        self._num_kept = plan.num_kept
        self.is_state = plan.is_state
        self._page_size = page_size
        self._copies = copies
        self._tiers = tiers
        self.pages = PageAllocator(plan.num_pages, self._let_go)

    def first_needed(self, num_tokens: int) -> int:
        """Returns the first page that a request of `num_tokens` computed tokens needs to go on."""
        return max(min(num_tokens // self._page_size - self._num_kept, (num_tokens - 1) // self._page_size), 0)

    def owned(self, request: Request) -> range:
        """Returns the indices of the pages that the request owns."""
        table = request.bounded[self.kind - 1]
        return range(table.first, len(table.pages))

    def page(self, request: Request, index: int) -> int:
        return request.bounded[self.kind - 1].pages[index]

    def extend(self, request: Request, num_tokens: int) -> None:
        """Gives the request the pages that it lacks to compute its next `num_tokens` tokens."""
        table = request.bounded[self.kind - 1]
        num_missing = -(-(request.num_computed + num_tokens) // self._page_size) - len(table.pages)
        if num_missing > 0:
            table.pages += tuple(self.pages.allocate(num_missing))

    def put(self, request: Request, pages: dict[int, int]) -> None:
        """Gives a request without pages these, which it owns already, by index without a gap."""
        table = request.bounded[self.kind - 1]
        table.first = min(pages)
        table.pages = (0,) * table.first + tuple(pages[index] for index in sorted(pages))

    def register(self, request: Request, keys: PageKeys, index: int) -> None:
        """Gives a full page its key, by which other requests find it."""
        table = request.bounded[self.kind - 1]
        page = self.pages.register(table.pages[index], key_of_kind(keys.key(index, request.token_ids), self.kind))
        if page != table.pages[index]:
            table.pages = (*table.pages[:index], page, *table.pages[index + 1 :])

    def free_behind(self, request: Request, position: int) -> None:
        """Frees the pages that no token from `position` on needs."""
        table = request.bounded[self.kind - 1]
        first = position // self._page_size - self._num_kept
        if first > table.first:
            self.pages.release(table.pages[table.first : first])
            table.first = first

    def release(self, request: Request) -> None:
        table = request.bounded[self.kind - 1]
        self.pages.release(table.pages[table.first :])
        table.pages, table.first = (), 0

    def swap_out_last(self, request: Request, key: bytes, num_tokens: int) -> None:
        """Queues the swap-out of a request's partly filled last page, of `num_tokens` tokens."""
        key, index = key_of_kind(key, self.kind), request.num_computed // self._page_size
        if self._tiers is not None and index in self.owned(request) and self._tiers.wants(key, num_tokens):
            self._copies.append(SwapOut(self.page(request, index), key, self.kind))

    def _let_go(self, page: int, key: bytes) -> None:
        if self._tiers is not None and self._tiers.wants(key, self._page_size):
            self._copies.append(SwapOut(page, key, self.kind))


@dataclass(frozen=True)
class Found:
    """Where a page of a kind can be taken from. One of the fields is given."""

    shared: int | None = None  # a page of the pool with a key, or a page that the request owns already
    copied: int | None = None  # a page of the pool to be copied
    content: object = None  # from a saved request's file
    key: bytes | None = None  # of a content in the tiers


# The pages with which a request goes on from some token, by index; one dictionary per kind.
Pages = list[dict[int, Found]]


class ContextFinder:
    """Finds the most tokens of a request of which every kind has the pages that the next token needs."""

    def __init__(
        self, first: PageAllocator, further: list[BoundedPages], page_size: int, tiers: PageTiers | None
    ) -> None:
        self._allocators = [first, *(bounded.pages for bounded in further)]
        self._further = further
        self._page_size = page_size
        self._tiers = tiers

    def find(self, request: Request, lost: set[bytes] | None = None) -> tuple[int, Pages]:
        """Returns the number of tokens and the pages, those that the request keeps included.

        The number is `num_computed` and the pages are none if no later token is possible. `lost`: keys of contents that
        the tiers did not give.
        """
        S, limit, start = self._page_size, request.max_skipped, request.num_computed
        find = self._finder(request, lost or set())
        last = first = start // S
        while (last + 1) * S <= limit and find(0, last, (last + 1) * S) is not None:
            last += 1
        ends = {(index + 1) * S for index in range(first, last)}
        # A partly filled page is right at one token only: the one up to which it was filled.
        ends |= {end for end in _partial_ends(request) if end // S <= last}
        for end in sorted((end for end in ends if start < end <= limit), reverse=True):
            firsts = first, *(bounded.first_needed(end) for bounded in self._further)
            pages = self._all(find, firsts, end)
            if pages is not None:
                return end, pages
        return start, []

    def _all(self, find: Callable[[int, int, int], Found | None], firsts: tuple[int, ...], end: int) -> Pages | None:
        pages: Pages = []
        for kind, first in enumerate(firsts):
            found: dict[int, Found] = {}
            for index in reversed(range(first, -(-end // self._page_size))):
                one = find(kind, index, min((index + 1) * self._page_size, end))
                if one is None:
                    return None
                found[index] = one
            pages.append(found)
        return pages

    def _finder(self, request: Request, lost: set[bytes]) -> Callable[[int, int, int], Found | None]:
        """Returns a function (kind, index, end) that finds page `index` of a kind, filled up to token `end`."""
        S, keys, origin, tiers = self._page_size, request.keys, request.origin, self._tiers
        num_common = _num_common(request)

        def find(kind: int, index: int, end: int) -> Found | None:
            is_full = end == (index + 1) * S
            if kind and end <= request.num_computed and index in self._further[kind - 1].owned(request):
                return Found(shared=self._further[kind - 1].page(request, index))
            key = None
            if keys is not None and is_full:
                key = key_of_kind(keys.key(index, request.token_ids), kind)
                if (page := self._allocators[kind].find(key)) is not None:
                    return Found(shared=page)
            elif keys is not None and end == request.num_swapped_tokens:
                key = key_of_kind(keys.partial_key(end, request.token_ids), kind)
            saved = request.saved if kind == 0 else request.bounded_saved[kind - 1] if request.bounded_saved else {}
            if index in saved and (end == request.num_saved or (is_full and end < request.num_saved)):
                return Found(content=saved[index])
            if origin is not None and (end == num_common or (is_full and end < num_common)):
                owned = range(len(origin.pages)) if kind == 0 else self._further[kind - 1].owned(origin)
                if index in owned:
                    return Found(
                        copied=origin.pages[index] if kind == 0 else self._further[kind - 1].page(origin, index)
                    )
            if tiers is not None and key is not None and key not in lost and tiers.has(key):
                return Found(key=key)
            return None

        return find


def _partial_ends(request: Request) -> list[int]:
    return [request.num_saved, request.num_swapped_tokens, _num_common(request)]


def _num_common(request: Request) -> int:
    """Returns the tokens that the request's origin has computed, if the request begins with them, else 0."""
    origin = request.origin
    if origin is None or not origin.bounded:
        return 0
    count = origin.num_computed
    is_common = count <= len(request.token_ids) and origin.token_ids[:count] == request.token_ids[:count]
    return count if is_common else 0
