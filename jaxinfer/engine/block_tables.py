"""The pages of each request: shared where their content is in the cache already, its own where it is to come.

tokens      |---- num_computed ----|-- chunk --|
pages       |  full   |  full   | partly |      |      one more as the chunk needs it
key         | known   | known   |               a full page never changes: it may be shared and found again
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from jaxinfer.engine.pages import PageAllocator
from jaxinfer.engine.request import Request


class BlockTables:
    """Gives pages to requests and takes them back. Only full pages are shared, so nobody ever writes a shared one."""

    def __init__(self, num_pages: int, page_size: int):
        self._page_size = page_size
        self.pages = PageAllocator(num_pages)

    def num_missing(self, request: Request, num_tokens: int) -> int:
        """Returns how many pages the request lacks to compute its next `num_tokens` tokens."""
        wanted = -(-(request.num_computed + num_tokens) // self._page_size)
        return max(wanted - len(request.pages), 0)

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
        """Moves a request forward over the pages that others have computed, were it from the middle of one.

        Returns by how many tokens.
        """
        start = request.num_computed
        if request.num_uncomputed <= 1:
            return 0
        for page in self._find(request):
            index = request.num_computed // self._page_size
            self.pages.acquire(page)
            self.pages.release(request.pages[index : index + 1])  # a page it had begun itself
            request.pages[index : index + 1] = [page]
            request.skip((index + 1) * self._page_size)
        return request.num_computed - start

    def extend(self, request: Request, count: int) -> None:
        """Gives the request the pages that `num_missing` said it lacks."""
        request.pages += self.pages.allocate(count)

    def advance(self, request: Request, num_tokens: int) -> None:
        """Enters that the next `num_tokens` tokens are in the cache, and makes pages known that are full now."""
        first = request.num_computed // self._page_size
        request.advance(num_tokens)
        if request.keys is None:
            return
        for index in range(first, request.num_computed // self._page_size):
            key = request.keys.key(index, request.token_ids)
            request.pages[index] = self.pages.register(request.pages[index], key)

    def release(self, request: Request) -> None:
        self.pages.release(request.pages)
        request.pages = []
        request.num_computed = 0

    def _find(self, request: Request) -> list[int]:
        """Returns the cached pages from the first that the request has not computed whole, as far as they go on.

        The page of the last token is left out: that token has to be computed, for its logits are wanted.
        """
        found: list[int] = []
        if request.keys is None:
            return found
        first, last = request.num_computed // self._page_size, (len(request.token_ids) - 1) // self._page_size
        for index in range(first, last):
            page = self.pages.find(request.keys.key(index, request.token_ids))
            if page is None:
                break
            found.append(page)
        return found
