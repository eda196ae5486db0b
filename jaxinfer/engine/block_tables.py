"""The pages of each request: shared where their content is in the cache already, its own where it is to come.

tokens      |---- num_computed ----|-- chunk --|
pages       |  full   |  full   | partly |      |      one more as the chunk needs it
key         | known   | known   |               a full page never changes: it may be shared and found again
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from jaxinfer.engine.page_copies import Content, CopyIn, CopyOut, CopyWithin, PageCopies
from jaxinfer.engine.pages import PageAllocator
from jaxinfer.engine.prefix import PageKeys, num_equal
from jaxinfer.engine.request import Request
from jaxinfer.engine.tiers import PageTiers

# A copy reads and writes a whole page, so it has to save an eighth of one or more.
MIN_COPIED = 8


class BlockTables:
    """Gives pages to requests and takes them back. Only full pages are shared, so nobody ever writes a shared one.

    `copies` are to be made before the next step. What is evicted goes to the `tiers`, if there are any.
    """

    def __init__(self, num_pages: int, page_size: int, tiers: PageTiers | None = None):
        self.page_size = page_size
        self._tiers = tiers
        self.copies = PageCopies()
        self.pages = PageAllocator(num_pages, self._let_go)
        # The last page that was full after those of a key, with its tokens: others may begin with some of them.
        self._successors: dict[bytes, tuple[bytes, Sequence[int]]] = {}
        self._parents: dict[bytes, bytes] = {}  # of all pages that are known

    def num_missing(self, request: Request, num_tokens: int) -> int:
        """Returns how many pages the request lacks to compute its next `num_tokens` tokens."""
        num_missing = -(-(request.num_computed + num_tokens) // self.page_size) - len(request.pages)
        return num_missing if num_missing > 0 else 0

    def can_hold(self, request: Request, num_reserved: int, victims: Sequence[Request]) -> bool:
        """Whether a request without pages could have them for all of its tokens.

        That is beside `num_reserved` pages for others, and if the victims gave up theirs.
        """
        found = self._find(request)
        given_up = Counter(page for victim in victims for page in victim.pages)

        def is_idle(page: int) -> bool:
            return self.pages.num_users(page) == given_up[page]

        # An idle page that is found is one that nobody else can have any more.
        num_new = self.num_missing(request, request.num_uncomputed) - len(found)
        num_wanted = num_new + sum(map(is_idle, found)) + num_reserved
        return num_wanted <= self.pages.num_available + sum(map(is_idle, list(given_up)))

    def share_prefix(self, request: Request) -> int:
        """Moves a request forward over pages that are computed already, were it from the middle of one.

        They are shared where they are in the pool; from elsewhere they are copied onto pages that the request has.
        Returns by how many tokens.
        """
        start = request.num_computed
        while request.num_uncomputed > 1 and (self._share_page(request) or self._fill_page(request)):
            pass
        return request.num_computed - start

    def extend(self, request: Request, count: int) -> None:
        """Gives the request the pages that `num_missing` said it lacks."""
        request.pages += self.pages.allocate(count)

    def extend_ahead(self, request: Request, num_tokens: int) -> int:
        """Gives the request the pages for its next token and that many after it, if there are some that nobody uses.

        Returns for how many after it there is room; never for more than it may still draw but the last, which needs no
        slot. What may never come is worth no page of another request.
        """
        num_tokens = min(num_tokens, request.max_tokens - request.num_output_tokens - 1)
        num_missing = self.num_missing(request, 1 + num_tokens)
        self.extend(request, min(num_missing, self.pages.num_available))
        room = len(request.pages) * self.page_size - request.num_computed - 1
        return min(room, num_tokens)

    def advance(self, request: Request, num_tokens: int) -> None:
        """Enters that the next `num_tokens` tokens are in the cache, and makes pages known that are full now."""
        first = request.num_computed // self.page_size
        request.num_computed += num_tokens
        last = request.num_computed // self.page_size
        if first == last or request.keys is None:
            return
        for index in range(first, last):
            self._make_known(request, request.keys, index)

    def release(self, request: Request) -> None:
        self.pages.release(request.pages)
        request.pages = []
        request.give_up(0)

    def park(self, request: Request) -> None:
        """Takes the pages of a request that gives way; what it has computed can be found when it comes back."""
        request.num_parked = request.num_computed
        num_tokens = request.num_computed % self.page_size
        if self._tiers is not None and request.keys is not None and num_tokens:
            key = request.keys.partial_key(request.num_computed, request.token_ids)
            if self._tiers.wants(key, num_tokens):
                self.copies.append(CopyOut(request.pages[request.num_computed // self.page_size], key))
        self.release(request)

    def rewind(self, request: Request) -> bool:
        """Gives back the pages past the tokens of a request, which have become fewer.

        A page that others may read is not written: it is copied. False if there is no page for that, or none left.
        """
        if not request.pages:
            return True
        request.give_up(min(request.num_computed, len(request.token_ids) - 1))
        kept = -(-request.num_computed // self.page_size)
        self.pages.release(request.pages[kept:])
        del request.pages[kept:]
        if not request.pages:
            return False
        last = request.pages[-1]
        if request.num_computed % self.page_size == 0 or not self.pages.is_known(last):
            return True
        if self.pages.num_available == 0:
            return False
        request.pages[-1:] = self.pages.allocate(1)
        self.copies.append(CopyWithin(last, request.pages[-1]))
        self.pages.release([last])
        return True

    def _make_known(self, request: Request, keys: PageKeys, index: int) -> None:
        """Gives a full page its key."""
        parent, key = keys.parent_key(index, request.token_ids), keys.key(index, request.token_ids)
        request.pages[index] = self.pages.register(request.pages[index], key)
        self._successors[parent] = (key, request.token_ids[index * self.page_size : (index + 1) * self.page_size])
        self._parents[key] = parent

    def _let_go(self, page: int, key: bytes) -> None:
        """Is told that a page is evicted."""
        parent = self._parents.pop(key)
        if parent in self._successors and self._successors[parent][0] == key:
            del self._successors[parent]
        if self._tiers is not None and self._tiers.wants(key, self.page_size):
            self.copies.append(CopyOut(page, key))

    def _share_page(self, request: Request) -> bool:
        """Moves the request over its next page if that is in the pool."""
        index = request.num_computed // self.page_size
        if request.keys is None or index >= self._num_shareable(request):
            return False
        page = self.pages.find(request.keys.key(index, request.token_ids))
        if page is None:
            return False
        self.pages.acquire(page)
        self.pages.release(request.pages[index : index + 1])  # a page it had begun itself
        request.pages[index : index + 1] = [page]
        request.skip((index + 1) * self.page_size)
        return True

    def _fill_page(self, request: Request) -> bool:
        """Moves the request over its next page, or into it, if the content is somewhere else."""
        index = request.num_computed // self.page_size
        if index >= len(request.pages):
            return False
        page, limit = request.pages[index], min((index + 1) * self.page_size, request.max_skipped)
        found = self._in_file(request, index, limit)
        found = found or self._in_origin(request, index, limit) or self._in_tiers(request, index, limit)
        found = found or self._in_successor(request, index, limit)
        if found is None:
            return False
        end, source = found
        self.copies.append(CopyWithin(source, page) if isinstance(source, int) else CopyIn(page, source))
        if request.keys is not None and end == (index + 1) * self.page_size:
            self._make_known(request, request.keys, index)
        request.skip(end)
        return True

    def _in_file(self, request: Request, index: int, limit: int) -> tuple[int, Content] | None:
        """Returns page `index` as the request was saved with it, and up to which token it is to be had."""
        end = min(limit, request.num_saved)
        if end > request.num_computed:
            return end, request.saved[index]
        request.saved, request.num_saved = (), 0
        return None

    def _in_origin(self, request: Request, index: int, limit: int) -> tuple[int, int] | None:
        """Returns the page of the request that it was forked from, and up to which token they are the same."""
        origin = request.origin
        end = 0 if origin is None else min(limit, origin.num_computed)
        if origin is not None and end > request.num_computed and origin.token_ids[:end] == request.token_ids[:end]:
            return end, origin.pages[index]
        request.origin = None
        return None

    def _in_tiers(self, request: Request, index: int, limit: int) -> tuple[int, Content] | None:
        """Returns page `index` from the tiers, whole or as it was when the request gave way, and its last token."""
        if self._tiers is None or request.keys is None:
            return None
        keys, num_parked = request.keys, request.num_parked
        if limit == (index + 1) * self.page_size:
            content = self._tiers.get(keys.key(index, request.token_ids), limit - request.num_computed)
            if content is not None:
                return limit, content
        if request.num_computed < num_parked <= limit and num_parked % self.page_size:
            key = keys.partial_key(num_parked, request.token_ids)
            content = self._tiers.get(key, num_parked - request.num_computed)
            return None if content is None else (num_parked, content)
        return None

    def _in_successor(self, request: Request, index: int, limit: int) -> tuple[int, int] | None:
        """Returns a page of the pool that begins like page `index`, and up to which token it does."""
        if request.keys is None:
            return None
        key, tokens = self._successors.get(request.keys.parent_key(index, request.token_ids), (b"", ()))
        start = index * self.page_size
        count = num_equal(request.token_ids[start:limit], tokens)
        page = self.pages.find(key)
        if page is None or start + count < request.num_computed + max(self.page_size // MIN_COPIED, 1):
            return None
        return start + count, page

    def _num_shareable(self, request: Request) -> int:
        """Returns how many pages of the request can be full without a token that has to be computed."""
        return request.max_skipped // self.page_size

    def _find(self, request: Request) -> list[int]:
        """Returns the cached pages from the first that the request has not computed whole, as far as they go on.

        The page of the last token is left out: that token has to be computed, for its logits are wanted.
        """
        found: list[int] = []
        if request.keys is None:
            return found
        for index in range(request.num_computed // self.page_size, self._num_shareable(request)):
            page = self.pages.find(request.keys.key(index, request.token_ids))
            if page is None:
                break
            found.append(page)
        return found
