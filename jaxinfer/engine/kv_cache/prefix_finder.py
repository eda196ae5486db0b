"""Prefix lookup: finds the most tokens of a request of which every kind of pages has what the next token needs.

A page comes from the pool, the request's saved file, its origin, the tiers, or a page of the pool that begins alike.

tokens             |  page 0  |  page 1  |  page 2  |  page 3  | end of the last page that is found
all tokens         |   pool   |   pool   |   tier   |  origin  |
window of a page   |          |          |   pool   |  origin  |
state              |          |          |          |  origin  |   right at one token only: its last one
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxinfer.engine.kv_cache.page_pool import Copied, Found, PagePool
from jaxinfer.engine.kv_cache.page_transfers import Content
from jaxinfer.engine.request.page_keys import key_of_kind, num_equal
from jaxinfer.engine.request.request import Request

# A copy reads and writes a whole page, so it must save computing at least 1 / MIN_COPIED of a page's tokens.
MIN_COPIED = 8
# Returns a content of the tiers by its key, or None; the number is that of the page's tokens that it saves computing.
Fetch = Callable[[bytes, int], Content | None]
Pages = list[dict[int, Found]]  # by kind and index


class PrefixFinder:
    """Finds reusable pages without acquiring them."""

    def __init__(self, pools: Sequence[PagePool], page_size: int) -> None:
        self.pools = pools
        self.page_size = page_size
        # By parent key: key and tokens of the last page registered after it. Another request may share some tokens.
        self._successors: dict[bytes, tuple[bytes, Sequence[int]]] = {}
        self._parents: dict[bytes, bytes] = {}  # page key -> parent key, of all registered pages

    def enter(self, key: bytes, parent: bytes, token_ids: Sequence[int]) -> None:
        """Adds a registered page with its tokens and the key of the page before it."""
        self._successors[parent] = (key, token_ids)
        self._parents[key] = parent

    def successor(self, parent: bytes) -> tuple[bytes, Sequence[int]]:
        """Returns the key and the tokens of a page after the one with this key; none if no page is known."""
        return self._successors.get(parent, (b"", ()))

    def forget(self, key: bytes) -> None:
        """Removes an evicted page."""
        parent = self._parents.pop(key)
        if parent in self._successors and self._successors[parent][0] == key:
            del self._successors[parent]

    def forget_all(self) -> None:
        """Removes all pages."""
        self._successors.clear()
        self._parents.clear()

    def find(self, request: Request, fetch: Fetch | None) -> tuple[int, Pages]:
        """Returns the number of tokens, and the pages from that of the first uncomputed token on.

        The number is `num_computed` and there are no pages if no later token is possible. Without `fetch`, only pages
        of the pools count.
        """
        S, start, limit = self.page_size, request.num_computed, request.max_skipped
        first, index = start // S, limit // S if start < limit else -1
        search = _Search(self, request, fetch)
        if start and index > first and search.find_whole(self.pools[0], first) is None:
            index = first  # the usual case of a request that computes its prompt, and cheap
        while index >= first:
            missing = search.first_missing(index)
            if missing is not None:
                index = missing  # so are those behind it that need it
                continue
            for end in search.ends(index):
                if (pages := search.pages(end)) is not None:
                    return end, pages
            index -= 1
        return start, []


class _Search:
    """The search for one request. It looks up a page once, and computes no key behind the first page that is missing.

    That holds for models that keep all pages of a request; with a window, the last pages are looked up first.
    """

    def __init__(self, finder: PrefixFinder, request: Request, fetch: Fetch | None) -> None:
        self._finder, self._request, self._fetch = finder, request, fetch
        self._first = request.num_computed // finder.page_size
        self._whole: dict[tuple[int, int], Found | None] = {}  # by kind and index: pages that are full
        self._num_scanned = self._first  # pages before are there if the first kind keeps all
        self._alike = (0, b"")  # the end of the tokens in common with a page that begins alike, and its key
        origin, token_ids = request.table.origin, request.token_ids
        self._num_common = 0  # tokens that the origin has computed
        if origin is not None and fetch is not None:
            known = origin.token_ids[: origin.num_known]
            count = min(len(known), len(token_ids))
            is_common = known[:count] == token_ids[:count]
            self._num_common = count if is_common else num_equal(known, token_ids)

    def find_whole(self, pool: PagePool, index: int) -> Found | None:
        """Returns the source of page `index` of a kind, filled up to its end."""
        if (pool.kind, index) not in self._whole:
            self._whole[pool.kind, index] = self._find(pool, index, (index + 1) * self._finder.page_size)
        return self._whole[pool.kind, index]

    def first_missing(self, index: int) -> int | None:
        """Returns the first page that is needed by every token of page `index`, lies before it and is not found."""
        for pool in reversed(self._finder.pools):  # those that need the fewest pages come first
            keeps_all = pool.window_of(self._request) is None
            if keeps_all and index <= self._num_scanned:
                continue
            for needed in pool.needed(self._request, index * self._finder.page_size + 1, self._first):
                if keeps_all:
                    self._num_scanned = needed
                if needed < index and self.find_whole(pool, needed) is None:
                    return needed
        return None

    def ends(self, index: int) -> Sequence[int]:
        """Returns the numbers of tokens within page `index`, the largest first, of which it may have a content."""
        S, request, table = self._finder.page_size, self._request, self._request.table
        limit, ends = request.max_skipped, {index * S}
        if self._fetch is not None:
            self._alike = self._find_alike(index, min((index + 1) * S, limit))
            partial = min(table.num_saved, limit), min(self._num_common, limit), table.num_swapped_tokens
            ends = {index * S, *partial, self._alike[0]}
        possible = range(max(request.num_computed + 1, index * S), min((index + 1) * S, limit + 1))
        return sorted((end for end in ends if end in possible), reverse=True)

    def pages(self, end: int) -> Pages | None:
        """Returns the pages with which the request goes on from token `end`; None if one is not found."""
        S, kinds = self._finder.page_size, []
        for pool in reversed(self._finder.pools):  # those that need the fewest pages come first
            found: dict[int, Found] = {}
            for index in pool.needed(self._request, end, self._first):
                is_whole = (index + 1) * S <= end
                one = self.find_whole(pool, index) if is_whole else self._find(pool, index, end)
                if one is None:
                    return None
                found[index] = one
            kinds.append(found)
        return kinds[::-1]

    def _find(self, pool: PagePool, index: int, end: int) -> Found | None:
        """Returns the source of page `index` of a kind, filled up to token `end`."""
        S, request, table, keys = self._finder.page_size, self._request, self._request.table, self._request.keys
        is_whole, key = end == (index + 1) * S, None
        if keys is not None and is_whole:
            key = key_of_kind(keys.key(index, request.token_ids), pool.kind)
            if (page := pool.pages.find(key)) is not None:
                return page
        elif keys is not None and end == table.num_swapped_tokens:
            key = key_of_kind(keys.partial_key(end, request.token_ids), pool.kind)
        if self._fetch is None:
            return None

        def is_right(num_tokens: int) -> bool:
            """True if a page of this kind that was filled up to token `num_tokens` is right up to token `end`."""
            return end == num_tokens or (end < num_tokens and (is_whole or not pool.is_state))

        saved = table.saved[pool.kind] if table.saved else {}
        if index in saved and is_right(table.num_saved):
            return Copied(content=saved[index])
        origin = table.origin
        if origin is not None and end <= self._num_common and is_right(origin.num_computed):
            owner = pool.table_of(origin)
            if owner.owns(index):
                return Copied(owner.pages[index])
        if key is not None:
            content = self._fetch(key, end - max(index * S, request.num_computed))
            if content is not None:
                return Copied(content=content)
        if not is_whole and end == self._alike[0] and not pool.is_state:
            page = pool.pages.find(key_of_kind(self._alike[1], pool.kind))
            # While it is copied it makes room for no new page; of the first kind the request has its page already.
            has_room = pool.kind == 0 or pool.pages.num_available > len(pool.needed(request, end, self._first))
            return Copied(page) if page is not None and has_room else None
        return None

    def _find_alike(self, index: int, limit: int) -> tuple[int, bytes]:
        """Returns the end of the tokens in common with a page that begins like page `index`, and its key.

        The request must own a page for the copy, since a new one could take the place of the page to be copied.
        """
        S, request, keys = self._finder.page_size, self._request, self._request.keys
        if keys is None or index >= len(request.table.pages):
            return 0, b""
        key, token_ids = self._finder.successor(keys.parent_key(index, request.token_ids))
        first = index * S
        end = first + num_equal(request.token_ids[first:limit], token_ids)
        is_worth = end >= max(first, request.num_computed) + max(S // MIN_COPIED, 1)
        return (end, key) if is_worth else (0, b"")
