"""Prefix-cache keys of full pages: digests of the model, the cache salt and all tokens up to the page's end.

The cached keys and values of a token depend only on that token and those before it. Two requests may therefore share
a page if their keys for it are equal. This also holds for sliding-window layers and layers with a state.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from struct import pack

# 256 bits make a collision infeasible to find; a collision would serve one user the pages of another.
DIGEST_BYTES = 32


def root_key(*, model: str, params_version: str, adapter: str, cache_salt: str) -> bytes:
    """Returns the parent key of the first page. Requests share pages only if all four arguments are equal."""
    return _digest(repr((model, params_version, adapter, cache_salt)).encode())


def key_of_kind(key: bytes, kind: int) -> bytes:
    """Returns the key of a page's content of a bounded kind of pages; `key` is that of the first kind."""
    return _digest(key + bytes([kind])) if kind else key


class PageKeys:
    """The keys of one sequence's full pages, each computed once: O(1) per token over the life of a request."""

    def __init__(self, root: bytes, page_size: int):
        self._chain = [root]
        self._page_size = page_size

    def begin_again(self, num_tokens: int) -> PageKeys:
        """Returns the keys of a sequence that shares only the first `num_tokens` tokens with this one."""
        keys = PageKeys(self._chain[0], self._page_size)
        keys._chain = self._chain[: num_tokens // self._page_size + 1]
        return keys

    def partial_key(self, num_tokens: int, token_ids: Sequence[int]) -> bytes:
        """Returns the key of the partly filled last page of the first `num_tokens` tokens."""
        index, rest = divmod(num_tokens, self._page_size)
        parent = self.parent_key(index, token_ids)
        # A partial page hashes fewer bytes than a full one, so its key differs from the key of every full page.
        return _digest(parent + _bytes_of(token_ids[num_tokens - rest : num_tokens]))

    def parent_key(self, index: int, token_ids: Sequence[int]) -> bytes:
        """Returns the key of all tokens before page `index`."""
        return self.key(index - 1, token_ids) if index else self._chain[0]

    def key(self, index: int, token_ids: Sequence[int]) -> bytes:
        """Returns the key of page `index`; RuntimeError if `token_ids` does not fill that page."""
        S = self._page_size
        while len(self._chain) <= index + 1:
            start = (len(self._chain) - 1) * S
            page = token_ids[start : start + S]
            if len(page) != S:
                raise RuntimeError(f"page {index} is not full: {len(token_ids)} tokens in pages of {S}")
            # The parent has a fixed length, so different pairs of parent and tokens are different bytes.
            self._chain.append(_digest(self._chain[-1] + _bytes_of(page)))
        return self._chain[index + 1]


def num_equal(first: Sequence[int], second: Sequence[int]) -> int:
    """Returns the length of the common prefix of two sequences."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def _bytes_of(token_ids: Sequence[int]) -> bytes:
    return pack(f"{len(token_ids)}i", *token_ids)


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=DIGEST_BYTES).digest()
