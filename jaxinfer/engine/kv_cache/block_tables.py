"""The pages of each request: shared pages for content already in the cache, its own pages for new tokens.

tokens      |---- num_computed ----|-- chunk --|
pages       |  full   |  full   | partly |      |      one more as the chunk needs it
key         | known   | known   |               a full page never changes: it may be shared and found again
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain

from jaxinfer.engine.kv_cache.attention_window import AttentionWindow, WindowedPages
from jaxinfer.engine.kv_cache.bounded_pages import BoundedKind, BoundedPages, ContextFinder, Found, Pages
from jaxinfer.engine.kv_cache.page_allocator import PageAllocator
from jaxinfer.engine.kv_cache.page_transfers import Content, CopyPage, PageTransfers, SwapIn, SwapOut
from jaxinfer.engine.kv_cache.prefix_lookup import PrefixLookup, Source
from jaxinfer.engine.kv_cache.tiers import PageTiers
from jaxinfer.engine.request.page_keys import PageKeys
from jaxinfer.engine.request.request import BoundedTable, Request


class BlockTables:
    """Gives pages to requests and takes them back. Only full pages are shared, so no request writes a shared page.

    The runner makes the queued `copies` before the next step. Evicted pages go to the `tiers`, if there are any. A
    running request's pages behind the `window` are freed, unless its parameters read its whole context.

    This is about the first kind of pages, for which requests wait and are preempted. Those of the `further` kinds
    follow it: a request goes on from a token only if it has what that token needs of every kind.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        tiers: PageTiers | None = None,
        window: AttentionWindow | None = None,
        further: Sequence[BoundedKind] = (),
    ):
        self.page_size = page_size
        self._tiers = tiers
        self.copies = PageTransfers()
        self.pages = PageAllocator(num_pages, self._let_go)
        self.windowed = WindowedPages(window, self.pages, self.copies, page_size)
        self._finder = PrefixLookup(self.pages, page_size, tiers)
        kinds = enumerate(further, 1)
        self.further = [BoundedPages(kind, plan, page_size, self.copies, tiers) for kind, plan in kinds]
        self._contexts = ContextFinder(self.pages, self.further, page_size, tiers)

    @property
    def has_states(self) -> bool:
        """True if a further kind of pages holds recurrent states."""
        return any(bounded.is_state for bounded in self.further)

    @property
    def frees_pages(self) -> bool:
        """True if a running request frees pages that its next token does not need."""
        return self.windowed.has_window or bool(self.further)

    def num_missing(self, request: Request, num_tokens: int) -> int:
        """Returns the number of pages the request lacks to compute its next `num_tokens` tokens."""
        num_missing = -(-(request.num_computed + num_tokens) // self.page_size) - len(request.pages)
        if self.windowed.is_endless:
            num_missing = max(num_missing, 0) + self.windowed.num_missing_sinks(request)
        return num_missing if num_missing > 0 else 0

    def num_wanted(self, request: Request) -> int:
        """Returns the number of further pages the request needs until all of its tokens are computed."""
        num_owned = len(request.pages) - len(request.evicted) + len(request.rotated_sinks)
        return self._num_wanted(request, len(request.pages), num_owned)

    def can_hold(self, request: Request, num_reserved: int, victims: Sequence[Request]) -> bool:
        """True if a request without pages here could get pages for all of its tokens.

        `num_reserved` pages are kept for running requests; the pages of the victims count as given back. A request that
        has pages elsewhere needs the same number here.
        """
        pages = {} if request.pages else self._reusable_pages(request)
        found = [page for page in pages.values() if page is not None]
        given_up = Counter(chain.from_iterable(victim.owned_pages for victim in victims))

        def is_idle(page: int) -> bool:
            return self.pages.num_users(page) == given_up[page]

        # Reusing a found page without users takes it from the available ones, just like a new page.
        num_new = self._num_wanted(request, max(pages, default=-1) + 1, len(pages)) + len(pages) - len(found)
        if request.pages:
            num_new = len(request.owned_pages) + self.num_wanted(request)
        num_wanted = num_new + sum(map(is_idle, found))
        if len(found) < len(pages):  # a tier may lose the others: then the request computes all of its tokens
            num_wanted = max(num_wanted, self._num_wanted(request, 0, 0))
        return num_wanted + num_reserved <= self.pages.num_available + sum(map(is_idle, list(given_up)))

    def begin(self, request: Request) -> int:
        """Gives an admitted request the pages for all of its tokens, and skips the tokens that some cache holds.

        Returns the number of tokens skipped. The request that it was forked from and its saved contents serve here
        alone: afterwards its own pages hold all that it could take from them.
        """
        num_skipped = self.share_prefix(request)
        self.extend(request, self.num_wanted(request))
        num_skipped += self.share_prefix(request)  # now it has pages to copy contents to
        request.forget_sources()
        return num_skipped

    def allocate_like(self, request: Request) -> list[list[int]]:
        """Returns new pages for a request of another replica: a page of each kind for each that it owns there."""
        owned = [bounded.owned(request) for bounded in self.further]
        further = [bounded.pages.allocate(len(own)) for bounded, own in zip(self.further, owned, strict=True)]
        return [self.pages.allocate(len(request.owned_pages)), *further]

    def give_back(self, pages: Sequence[Sequence[int]]) -> None:
        """Frees the pages of `allocate_like`."""
        for allocator, own in zip([self.pages, *(bounded.pages for bounded in self.further)], pages, strict=True):
            allocator.release(own)

    def pages_of(self, request: Request) -> list[list[int]]:
        """Returns the pages that a request owns here, of each kind, in the order of `allocate_like`."""
        further = [[bounded.page(request, index) for index in bounded.owned(request)] for bounded in self.further]
        return [list(request.owned_pages), *further]

    def move_to(self, request: Request, pages: Sequence[Sequence[int]]) -> None:
        """Frees the pages of a request, which goes on with those of another replica's `allocate_like`."""
        first, *further = pages
        new = dict(zip(request.owned_pages, first, strict=True))
        self.pages.release(request.owned_pages)
        request.pages = tuple(new.get(page, 0) for page in request.pages)
        request.rotated_sinks = tuple(new[page] for page in request.rotated_sinks)
        for bounded, own in zip(self.further, further, strict=True):
            indices = bounded.owned(request)
            bounded.release(request)
            if own:
                bounded.put(request, dict(zip(indices, own, strict=True)))

    def share_prefix(self, request: Request) -> int:
        """Skips the tokens that some cache holds already, starting in the middle of a page if necessary.

        Pages in the pool are shared; content from elsewhere is copied onto pages that the request owns. Returns the
        number of tokens skipped.
        """
        start, window = request.num_computed, self.windowed.window_of(request)
        if self.further:
            self._share_context(request)
            return request.num_computed - start
        if window is not None and not request.pages:
            self._share_window(request, window)
        while request.num_uncomputed > 1 and (self._share_page(request) or self._fill_page(request)):
            self.windowed.free_behind(request, request.num_computed - 1)
        return request.num_computed - start

    def extend(self, request: Request, count: int) -> None:
        """Gives the request the pages that `num_missing` said it lacks."""
        pages = self.pages.allocate(count)
        if self.windowed.is_endless and (num_missing_sinks := self.windowed.num_missing_sinks(request)):
            request.rotated_sinks, pages = tuple(pages[:num_missing_sinks]), pages[num_missing_sinks:]
        request.pages += tuple(pages)

    def extend_further(self, request: Request, num_tokens: int) -> None:
        """Gives the request pages of the further kinds for its next `num_tokens` tokens."""
        for bounded in self.further:
            bounded.extend(request, num_tokens)

    def extend_ahead(self, request: Request, num_tokens: int) -> int:
        """Gives the request available pages for its next token and up to `num_tokens` speculative tokens after it.

        Returns the number of tokens after the next one that fit. It is less than the number of tokens the request may
        still sample, for the last one needs no slot. Speculative tokens never preempt another request.
        """
        num_to_come = request.max_len - len(request.token_ids) - request.num_pending
        num_tokens = min(num_tokens, num_to_come - 1, self.windowed.max_uniform_chunk(request) - 1)
        num_missing = self.num_missing(request, 1 + num_tokens)
        self.extend(request, min(num_missing, self.pages.num_available))
        room = len(request.pages) * self.page_size - request.num_computed - 1
        num_tokens = min(room, num_tokens)
        self.extend_further(request, 1 + num_tokens)
        return num_tokens

    def record(self, request: Request, start: int, end: int) -> None:
        """Records that launched steps put the tokens from `start` to `end`, which are known, into the cache.

        Registers pages that are full now, and frees pages behind the window. Later steps may overwrite freed pages,
        because the device runs steps in order: the launched step has read them by then. A request that has lost its
        pages since the launch has nothing to record.
        """
        if not request.pages:
            return
        if (keys := request.keys) is not None:
            for index in range(start // self.page_size, end // self.page_size):
                if index not in request.evicted:
                    self._make_known(request, keys, index)
        self.windowed.free_behind(request, end - 1)
        for bounded in self.further:
            bounded.free_behind(request, end - 1)

    def release(self, request: Request) -> None:
        for bounded in self.further if request.bounded else ():
            bounded.release(request)
        self.pages.release(request.owned_pages)
        request.pages, request.evicted = (), range(0)
        request.rotated_sinks, request.num_evicted_tokens = (), 0
        request.give_up(0)

    def swap_out(self, request: Request) -> None:
        """Takes the pages of a preempted request; prefix lookup and tiers can return their content when it resumes."""
        num_known, num_tokens = request.num_known, request.num_known % self.page_size
        request.num_swapped_tokens = num_known
        is_state_known = num_known == request.num_computed
        if self._tiers is not None and request.keys is not None and num_tokens:
            key = request.keys.partial_key(num_known, request.token_ids)
            if self._tiers.wants(key, num_tokens):
                self.copies.append(SwapOut(request.pages[num_known // self.page_size], key))
            for bounded in self.further if is_state_known else ():
                bounded.swap_out_last(request, key, num_tokens)
        self.release(request)

    def forget_contents(self) -> None:
        """Frees all pages, whose contents are void, and drops the queued copies. No request may own a page."""
        self.copies.clear()
        self.pages.forget_contents()
        self._finder.forget_all()
        for bounded in self.further:
            bounded.pages.forget_contents()

    def rewind(self, request: Request) -> bool:
        """Frees the pages past a request's tokens after a rewind removed some of them.

        If other requests may read the last page, the request gets a copy to write. Returns False, and the caller must
        preempt, if no page is available for the copy, if no page remains, or if pages of the window are freed already.

        A request with pages of further kinds is always preempted, because a state cannot go back.
        """
        if not request.pages:
            return True
        request.give_up(min(request.num_computed, len(request.token_ids) - 1))
        if self.further or self.windowed.has_lost(request):
            self.release(request)
            return False
        kept = -(-request.num_computed // self.page_size)
        self.pages.release(request.pages[kept:])
        request.pages = request.pages[:kept]
        if not request.pages:
            return False
        last = request.pages[-1]
        if request.num_computed % self.page_size == 0 or not self.pages.is_known(last):
            return True
        if self.pages.num_available == 0:
            return False
        request.pages = (*request.pages[:-1], *self.pages.allocate(1))
        self.copies.append(CopyPage(last, request.pages[-1]))
        self.pages.release([last])
        return True

    def _share_window(self, request: Request, window: AttentionWindow) -> None:
        """Starts a windowed request without pages after the last window of pages found in the pool or elsewhere."""
        found = self._finder.reusable_pages(request, window)
        copied = {i: self._finder.copy_source(request, i) for i, page in found.items() if page is None}
        if any(copy is None or copy[0] != (i + 1) * self.page_size for i, copy in copied.items()):
            return  # a tier has lost the page, or computing it is cheaper than copying it
        for page in found.values():
            if page is not None:  # first, so that allocating new pages evicts none of these
                self.pages.acquire(page)
        new, num_pages = self.pages.allocate(len(copied)), max(found, default=-1) + 1
        found |= dict(zip(copied, new, strict=True))
        request.pages = tuple(found.get(index) or 0 for index in range(num_pages))
        missing = [index for index in range(num_pages) if index not in found]
        request.evicted = range(missing[0], missing[-1] + 1) if missing else range(0)
        for index, copy in copied.items():
            assert copy is not None
            self._fill(request, index, *copy)
        request.skip(num_pages * self.page_size)

    def _num_wanted(self, request: Request, num_pages: int, num_owned: int) -> int:
        """Returns the further pages needed if the table has `num_pages` entries and the request owns `num_owned`."""
        num_tokens = request.num_computed + request.num_uncomputed
        count = -(-num_tokens // self.page_size) - num_pages + self.windowed.num_missing_sinks(request)
        window = self.windowed.window_of(request)
        if window is not None:
            count = min(count, window.most - num_owned)
        return max(count, 0)

    def _make_known(self, request: Request, keys: PageKeys, index: int) -> None:
        """Registers a full page under its key, for the request and for prefix lookup."""
        key = keys.key(index, request.token_ids)
        request.put_page(index, self.pages.register(request.pages[index], key))
        for bounded in self.further:
            if index in bounded.owned(request):
                bounded.register(request, keys, index)
        token_ids = request.token_ids[index * self.page_size : (index + 1) * self.page_size]
        self._finder.enter(key, keys.parent_key(index, request.token_ids), token_ids)

    def _let_go(self, page: int, key: bytes) -> None:
        """Removes an evicted page from prefix lookup and queues its swap-out if the tiers want it."""
        self._finder.forget(key)
        if self._tiers is not None and self._tiers.wants(key, self.page_size):
            self.copies.append(SwapOut(page, key))

    def _reusable_pages(self, request: Request) -> dict[int, int | None]:
        """Returns the pages of the first kind, by index, that a request without pages need not compute."""
        if not self.further:
            return self._finder.reusable_pages(request, self.windowed.window_of(request))
        _, pages = self._contexts.find(request)
        return {index: found.shared for index, found in pages[0].items()} if pages else {}

    def _share_context(self, request: Request) -> None:
        """Goes on from the last token of which every kind of pages has in some cache what the next token needs."""
        if not request.bounded:
            request.bounded = tuple(BoundedTable() for _ in self.further)
        if request.num_computed and self._finder.cached_page(request, request.num_computed // self.page_size) is None:
            return  # the usual case of a request that computes its prompt, and cheap
        found = self._find_context(request)
        if found is None:
            return
        end, pages, contents = found
        allocators = [self.pages, *(bounded.pages for bounded in self.further)]
        for kind, allocator in enumerate(allocators):  # first, so that allocating new pages evicts none of these
            for page in [one.shared for one in pages[kind].values() if one.shared is not None]:
                allocator.acquire(page)
        for index, one in sorted(pages[0].items()):
            if one.shared is not None:
                self.pages.release(request.pages[index : index + 1])
                request.put_page(index, one.shared)
                continue
            if index == len(request.pages):
                self.extend(request, 1)
            self._copy(one, contents.get((0, index)), request.pages[index], 0)
        for bounded in self.further:
            bounded.release(request)
            ids = {}
            for index, one in sorted(pages[bounded.kind].items()):
                ids[index] = bounded.pages.allocate(1)[0] if one.shared is None else one.shared
                self._copy(one, contents.get((bounded.kind, index)), ids[index], bounded.kind)
            bounded.put(request, ids)
        request.skip(end)
        if request.keys is not None:
            for index in range(min(pages[0]), end // self.page_size):  # earlier pages were known before
                self._make_known(request, request.keys, index)

    def _copy(self, found: Found, content: Content, page: int, kind: int) -> None:
        """Queues the copy of what was found onto a page, if it is not that page itself."""
        if found.copied is not None:
            self.copies.append(CopyPage(found.copied, page, kind))
        elif found.shared is None:
            self.copies.append(SwapIn(page, content, kind))

    def _find_context(self, request: Request) -> tuple[int, Pages, dict[tuple[int, int], Content]] | None:
        """Returns the end of the tokens found, their pages, and the contents that come from files or tiers."""
        lost: set[bytes] = set()
        while True:
            end, pages = self._contexts.find(request, lost)
            contents: dict[tuple[int, int], Content] = {}
            for kind, index, one in [(k, i, one) for k, found in enumerate(pages) for i, one in found.items()]:
                if one.key is not None and self._tiers is not None:
                    contents[kind, index] = self._tiers.get(one.key, self.page_size)
                    if contents[kind, index] is None:
                        lost.add(one.key)
                elif one.content is not None:
                    contents[kind, index] = one.content
            if all(content is not None for content in contents.values()):
                return (end, pages, contents) if pages else None

    def _share_page(self, request: Request) -> bool:
        """Skips the request's next page by sharing it from the pool; False if the pool does not have it."""
        index = request.num_computed // self.page_size
        page = self._finder.cached_page(request, index)
        if page is None:
            return False
        self.pages.acquire(page)
        self.pages.release(request.pages[index : index + 1])  # a page that it owned and had filled in part, if any
        request.put_page(index, page)
        request.skip((index + 1) * self.page_size)
        return True

    def _fill_page(self, request: Request) -> bool:
        """Skips the request's next page, or part of it, by copying its content; False if there is no source."""
        index = request.num_computed // self.page_size
        if index >= len(request.pages) or (found := self._finder.copy_source(request, index)) is None:
            return False
        self._fill(request, index, *found)
        request.skip(found[0])
        return True

    def _fill(self, request: Request, index: int, end: int, source: Source) -> None:
        """Queues a copy of `source`, valid up to token `end`, onto a page of the request."""
        page = request.pages[index]
        self.copies.append(CopyPage(source, page) if isinstance(source, int) else SwapIn(page, source))
        if request.keys is not None and end == (index + 1) * self.page_size:
            self._make_known(request, request.keys, index)
