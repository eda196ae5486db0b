"""The key of a full page: a digest of all tokens up to its end and of whatever else its content depends on.

Keys and values of a token depend on the tokens before it and on nothing after it, so two requests with equal keys may
share a page. A layer that sees only a window, or keeps a state, depends on no more than that.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from struct import pack

# As many bits as leave no collision to be found, for a collision would be another user's tokens.
DIGEST_BYTES = 32


def root_key(*, model: str, params_version: int, adapter: str, cache_salt: str) -> bytes:
    """Returns the key before the first page. Requests share pages only where all of this is equal."""
    return _digest(repr((model, params_version, adapter, cache_salt)).encode())


class PageKeys:
    """The keys of one sequence's full pages, each computed once: O(1) per token over the life of a request."""

    def __init__(self, root: bytes, page_size: int):
        self._chain = [root]
        self._page_size = page_size

    def begin_again(self, num_tokens: int) -> PageKeys:
        """Returns the keys of a sequence that has the first `num_tokens` tokens of this one and may go on otherwise."""
        keys = PageKeys(self._chain[0], self._page_size)
        keys._chain = self._chain[: num_tokens // self._page_size + 1]
        return keys

    def partial_key(self, num_tokens: int, token_ids: Sequence[int]) -> bytes:
        """Returns the key of the last page of `num_tokens` tokens, which it does not fill."""
        index, rest = divmod(num_tokens, self._page_size)
        parent = self.parent_key(index, token_ids)
        # Fewer tokens than a page has are other bytes than any page's, so no key of a full page is the same.
        return _digest(parent + _bytes_of(token_ids[num_tokens - rest : num_tokens]))

    def parent_key(self, index: int, token_ids: Sequence[int]) -> bytes:
        """Returns the key of all tokens before page `index`."""
        return self.key(index - 1, token_ids) if index else self._chain[0]

    def key(self, index: int, token_ids: Sequence[int]) -> bytes:
        """Returns the key of page `index` of a sequence, of which `token_ids` covers at least that page."""
        S = self._page_size
        while len(self._chain) <= index + 1:
            start = (len(self._chain) - 1) * S
            page = token_ids[start : start + S]
            if len(page) != S:
                raise RuntimeError(f"page {index} is not full: {len(token_ids)} tokens in pages of {S}")
            # The parent has a fixed length, so that no two pairs of parent and tokens are the same bytes.
            self._chain.append(_digest(self._chain[-1] + _bytes_of(page)))
        return self._chain[index + 1]


def num_equal(first: Sequence[int], second: Sequence[int]) -> int:
    """Returns how many items two sequences have in common from the first on."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def _bytes_of(token_ids: Sequence[int]) -> bytes:
    return pack(f"{len(token_ids)}i", *token_ids)


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=DIGEST_BYTES).digest()
