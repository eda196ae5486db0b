"""The pages of each request: shared pages for content already in the cache, its own pages for new tokens.

tokens      |---- num_computed ----|-- chunk --|
pages       |  full   |  full   | partly |      |      one more as the chunk needs it
key         | known   | known   |               a full page never changes: it may be shared and found again
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import chain

from jaxinfer.engine.kv_cache.attention_window import AttentionWindow
from jaxinfer.engine.kv_cache.page_allocator import PageAllocator
from jaxinfer.engine.kv_cache.page_pool import BoundedKind, Copied, PagePool
from jaxinfer.engine.kv_cache.page_transfers import Content, CopyPage, PageTransfers, SwapOut
from jaxinfer.engine.kv_cache.prefix_finder import PrefixFinder
from jaxinfer.engine.kv_cache.tiers import PageTiers
from jaxinfer.engine.request.page_keys import PageKeys, key_of_kind
from jaxinfer.engine.request.page_table import KindTable
from jaxinfer.engine.request.request import Request


class BlockTables:
    """Gives pages to requests and takes them back. Only full pages are shared, so no request writes a shared page.

    The runner makes the queued `copies` before the next step. Evicted pages go to the `tiers`, if there are any. A
    running request's pages behind the `window` are freed, unless its parameters read its whole context.

    Requests wait for pages of the first kind, and are preempted for them. Those of the `bounded` kinds follow: a
    request goes on from a token only if it has what that token needs of every kind.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        tiers: PageTiers | None = None,
        window: AttentionWindow | None = None,
        bounded: Sequence[BoundedKind] = (),
    ):
        self.page_size = page_size
        self._tiers = tiers
        self.copies = PageTransfers()
        plans = [(num_pages, window, False, False)]
        plans += [(kind.num_pages, kind.window, kind.is_state, kind.is_open) for kind in bounded]
        self.pools: list[PagePool] = []
        for kind, (count, kept, is_state, is_open) in enumerate(plans):
            pages = PageAllocator(count, partial(self._let_go, kind))
            self.pools.append(PagePool(kind, pages, page_size, self.copies, kept, is_state, is_open))
        self._first, *self._bounded = self.pools
        self.pages = self._first.pages
        self._finder = PrefixFinder(self.pools, page_size)

    @property
    def has_states(self) -> bool:
        """True if a kind of pages holds recurrent states."""
        return any(pool.is_state for pool in self.pools)

    @property
    def frees_pages(self) -> bool:
        """True if a running request frees pages that its next token does not need."""
        return any(pool.window is not None for pool in self.pools)

    def num_wanted(self, request: Request) -> int:
        """Returns the pages of the first kind that the request still needs until all of its tokens are computed."""
        table = request.table.kinds[0]
        return self._num_wanted(request, len(table.pages), 0 if self._first.window is None else table.num_owned)

    def can_hold(self, request: Request, num_reserved: int, victims: Sequence[Request]) -> bool:
        """True if a request without pages here could get pages for all of its tokens.

        `num_reserved` pages are kept for running requests; the pages of the victims count as given back. A request that
        has pages elsewhere needs the same number here.
        """
        given_up = Counter(chain.from_iterable(victim.table.first.owned_pages for victim in victims))

        def is_idle(page: int) -> bool:
            return self.pages.num_users(page) == given_up[page]

        if request.table.pages:
            num_wanted = request.table.first.num_owned + self.num_wanted(request)
        else:
            shared = self._sharable_pages(request)
            # Reusing a found page without users takes it from the available ones, just like a new page.
            num_idle = sum(map(is_idle, shared.values()))
            num_wanted = self._num_wanted(request, max(shared, default=-1) + 1, len(shared)) + num_idle
        return num_wanted + num_reserved <= self.pages.num_available + sum(map(is_idle, list(given_up)))

    def begin(self, request: Request) -> int:
        """Gives an admitted request the pages for all of its tokens, and skips the tokens that some cache holds.

        Returns the number of tokens skipped. The request that it was forked from and its saved contents serve here
        alone: afterwards its own pages hold all that it could take from them.
        """
        table = request.table
        table.kinds += tuple(KindTable() for _ in self.pools[len(table.kinds) :])
        num_skipped = self.share(request)
        self._first.extend(request, self.num_wanted(request))
        num_skipped += self.share(request)  # now it has a page to which one that begins alike is copied
        table.forget_sources()
        return num_skipped

    def share(self, request: Request) -> int:
        """Skips the tokens that some cache holds already, starting in the middle of a page if necessary.

        Pages in the pools are shared; content from elsewhere is copied. Returns the number of tokens skipped.
        """
        start, keys = request.num_computed, request.keys
        end, found = self._finder.find(request, self._fetch)
        if not found:
            return 0
        held: list[tuple[PagePool, int]] = []  # sources of copies
        for pool, pages in zip(self.pools, found, strict=True):  # first, so that new pages evict none of these
            for source in pages.values():
                if isinstance(source, int):
                    pool.pages.acquire(source)
                elif source.page is not None:
                    pool.pages.acquire(source.page)
                    held.append((pool, source.page))
        for pool, pages in zip(self.pools, found, strict=True):
            pool.put(request, pages, end)
        for pool, page in held:
            pool.pages.release([page])
        request.skip(end)
        if keys is not None:
            copied = {i for pages in found for i, source in pages.items() if isinstance(source, Copied)}
            for index in sorted(index for index in copied if (index + 1) * self.page_size <= end):
                self._make_known(request, keys, index)
        return end - start

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """Gives the request the pages that it lacks to compute its next `num_tokens` tokens.

        Returns False, and gives none, if too few are available.
        """
        first, is_endless = self._first, self._first.is_endless
        if is_endless:  # its next token does not attend to all pages of the tokens before
            first.free_behind(request, request.num_computed)
        if num_missing := first.num_missing(request, num_tokens):  # a decoding request seldom lacks a page
            if num_missing > self.pages.num_available:
                return False
            first.extend(request, num_missing)
        for pool in self._bounded:
            pool.extend(request, pool.num_missing(request, num_tokens))
        if is_endless:
            first.rotate_sinks(request)
        return True

    def reserve_ahead(self, request: Request, num_tokens: int) -> int:
        """Gives the request available pages for its next token and up to `num_tokens` speculative tokens after it.

        Returns the number of tokens after the next one that fit. It is less than the number of tokens the request may
        still sample, for the last one needs no slot. Speculative tokens never preempt another request.
        """
        num_to_come = request.max_len - len(request.token_ids) - request.num_pending
        num_tokens = min(num_tokens, num_to_come - 1, self.max_chunk(request) - 1)
        num_missing = self._first.num_missing(request, 1 + num_tokens)
        self._first.extend(request, min(num_missing, self.pages.num_available))
        room = len(request.table.pages) * self.page_size - request.num_computed - 1
        num_tokens = min(room, num_tokens)
        for pool in self._bounded:
            pool.extend(request, pool.num_missing(request, 1 + num_tokens))
        return num_tokens

    def max_chunk(self, request: Request) -> int:
        """Returns the most tokens of the request that one step may compute."""
        return self._first.max_uniform_chunk(request)

    def record(self, request: Request, start: int, end: int) -> None:
        """Records that launched steps put the tokens from `start` to `end`, which are known, into the cache.

        Registers pages that are full now, and frees pages behind the windows. Later steps may overwrite freed pages,
        because the device runs steps in order: the launched step has read them by then. A request that has lost its
        pages since the launch has nothing to record.
        """
        if not request.table.pages:
            return
        if (keys := request.keys) is not None:
            freed = request.table.first.freed
            for index in range(start // self.page_size, end // self.page_size):
                if index not in freed:
                    self._make_known(request, keys, index)
        for pool in self.pools:
            pool.free_behind(request, end - 1)

    def release(self, request: Request) -> None:
        """Frees all pages of a request, if it has any here."""
        for pool in self.pools[: len(request.table.kinds)]:
            pool.release(request)
        request.give_up(0)

    def swap_out(self, request: Request) -> None:
        """Takes the pages of a preempted request; prefix lookup and tiers can return their content when it resumes."""
        table, keys, num_known = request.table, request.keys, request.num_known
        table.num_swapped_tokens = num_known
        index, num_tokens = divmod(num_known, self.page_size)
        if self._tiers is not None and keys is not None and num_tokens:
            key = keys.partial_key(num_known, request.token_ids)
            for pool, own in zip(self.pools, table.kinds, strict=True):
                # A state that has seen tokens of a launched loop is that of no known token.
                is_right = num_known == request.num_computed or not pool.is_state
                if is_right and own.owns(index):
                    self._swap_out(pool.kind, own.pages[index], key_of_kind(key, pool.kind), num_tokens)
        self.release(request)

    def forget_contents(self) -> None:
        """Frees all pages, whose contents are void, and drops the queued copies. No request may own a page."""
        self.copies.clear()
        self._finder.forget_all()
        for pool in self.pools:
            pool.pages.forget_contents()

    def rewind(self, request: Request) -> bool:
        """Frees the pages past a request's tokens after a rewind removed some of them.

        If other requests may read the last page, the request gets a copy to write. Returns False, and the caller must
        preempt, if no page is available for the copy, if no page remains, or if pages of the window are freed already.

        A request with pages of bounded kinds is always preempted, because a state cannot go back.
        """
        table = request.table.first
        if not table.pages:
            return True
        request.give_up(min(request.num_computed, len(request.token_ids) - 1))
        if self._bounded or self._first.has_lost(request):
            self.release(request)
            return False
        kept = -(-request.num_computed // self.page_size)
        self.pages.release(table.pages[kept:])
        table.pages = table.pages[:kept]
        if not table.pages:
            return False
        last = table.pages[-1]
        if request.num_computed % self.page_size == 0 or not self.pages.is_known(last):
            return True
        if self.pages.num_available == 0:
            return False
        table.pages = (*table.pages[:-1], *self.pages.allocate(1))
        self.copies.append(CopyPage(last, table.pages[-1]))
        self.pages.release([last])
        return True

    def allocate_like(self, request: Request) -> list[list[int]]:
        """Returns new pages for a request of another replica: a page of each kind for each that it owns there."""
        pairs = zip(self.pools, request.table.kinds, strict=True)
        return [pool.pages.allocate(table.num_owned) for pool, table in pairs]

    def give_back(self, pages: Sequence[Sequence[int]]) -> None:
        """Frees the pages of `allocate_like`."""
        for pool, own in zip(self.pools, pages, strict=True):
            pool.pages.release(own)

    def move_to(self, request: Request, pages: Sequence[Sequence[int]]) -> None:
        """Frees the pages of a request, which goes on with those of another replica's `allocate_like`."""
        self.give_back(request.table.owned_pages)
        for table, own in zip(request.table.kinds, pages, strict=True):
            table.move_to(own)

    def _num_wanted(self, request: Request, num_pages: int, num_owned: int) -> int:
        """Returns the further pages needed if the table has `num_pages` entries and the request owns `num_owned`."""
        count = -(-(len(request.token_ids) + request.num_pending) // self.page_size) - num_pages
        if self._first.window is not None:
            count += self._first.num_missing_sinks(request)
            if (window := self._first.window_of(request)) is not None:
                count = min(count, window.most - num_owned)
        return max(count, 0)

    def _sharable_pages(self, request: Request) -> dict[int, int]:
        """Returns the pages of the first kind, by index, that a request without pages is sure to share."""
        keeps_all = len(self.pools) == 1 and self._first.window_of(request) is None
        _, found = self._finder.find(request, None if keeps_all else self._peek)
        pages = found[0] if found else {}
        # If a content to be copied is gone by then, a request with a window or a state may share none of these pages.
        is_sure = all(isinstance(source, int) for some in found for source in some.values())
        return {index: page for index, page in pages.items() if isinstance(page, int)} if is_sure else {}

    def _make_known(self, request: Request, keys: PageKeys, index: int) -> None:
        """Registers a full page of each kind under its key, for the request and for prefix lookup."""
        key = keys.key(index, request.token_ids)
        for pool in self.pools:
            pool.register(request, index, key)
        token_ids = request.token_ids[index * self.page_size : (index + 1) * self.page_size]
        self._finder.enter(key, keys.parent_key(index, request.token_ids), token_ids)

    def _let_go(self, kind: int, page: int, key: bytes) -> None:
        """Removes an evicted page from prefix lookup and queues its swap-out if the tiers want it."""
        if kind == 0:
            self._finder.forget(key)
        if self.pools[kind].needs_full_pages:
            self._swap_out(kind, page, key, self.page_size)

    def _swap_out(self, kind: int, page: int, key: bytes, num_tokens: int) -> None:
        if self._tiers is not None and self._tiers.wants(key, num_tokens):
            self.copies.append(SwapOut(page, key, kind))

    def _fetch(self, key: bytes, num_tokens: int) -> Content | None:
        """Returns a content of the tiers if they have it and the copy pays."""
        return None if self._tiers is None else self._tiers.get(key, num_tokens)

    def _peek(self, key: bytes, num_tokens: int) -> Content | None:
        """Returns True in place of a content that the tiers have."""
        return True if self._tiers is not None and self._tiers.has(key) else None
