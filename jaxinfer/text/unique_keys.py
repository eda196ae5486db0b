"""Keeps the keys of a JSON object apart while the object is written, token by token; free of jax.

`llguidance` writes each of a schema's `properties` once at most. Other keys it may write again, and it does not see
that `"\\u0061"` is `"a"`. So documents that may have such keys are followed a second time, as far as their keys.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

OUTSIDE, CONTENT = re.compile(rb'["{}\[\],]'), re.compile(rb'(?:[^"\\]|\\.)*', re.DOTALL)


class OpenKeys(NamedTuple):
    """The state of an unfinished JSON document: the keys of its open objects, and its open string."""

    objects: tuple[frozenset[str] | None, ...] = ()  # from the outermost on; None for an array
    wants_key: bool = False  # the next string, or the open one, is a key
    string: bytes | None = None  # the open string as it is spelled; of a value only the escape that it ends in

    def after(self, text: bytes) -> OpenKeys | None:
        """Returns where the document stands after more of its text, None if that gives an object a key again."""
        objects, wants_key, string = self
        if string is not None and _has_open_escape(string):
            string, text = string[:-1], b"\\" + text
        at = 0
        while at < len(text):
            if string is None:
                mark = OUTSIDE.search(text, at)
                if mark is None:
                    break
                at = mark.end()
                if mark[0] == b'"':
                    string = b""
                elif mark[0] == b",":
                    wants_key = objects[-1:] not in ((), (None,))
                elif mark[0] in b"}]":
                    objects, wants_key = objects[:-1], False
                else:
                    objects, wants_key = (*objects, frozenset() if mark[0] == b"{" else None), mark[0] == b"{"
                continue
            content = CONTENT.match(text, at)
            assert content is not None
            at = content.end() + 1
            string += content[0]
            if text[at - 1 : at] != b'"':  # its end, or that of an escape, is to come
                string += text[at - 1 : at]
            elif not wants_key:
                string = None
            else:
                # Only white space of the schema's own choice can be no JSON.
                key, keys = _characters(string) or "", objects[-1] or frozenset()
                if key in keys:
                    return None
                objects, wants_key, string = (*objects[:-1], keys | {key}), False, None
        if string is not None and not wants_key:
            string = b"\\" if _has_open_escape(string) else b""
        return OpenKeys(objects, wants_key, string)


class KeyTokens:
    """Knows which tokens would give an object a key again. `texts` has the bytes of each token."""

    def __init__(self, texts: Sequence[bytes]) -> None:
        self._texts = texts
        num_quotes = np.array([text.count(b'"') for text in texts])
        self._with_quotes = {least: np.flatnonzero(num_quotes >= least) for least in (1, 2, 3)}
        # By the characters that they add to a string that is open: those before its end, or all.
        self._by_characters: dict[str, list[int]] = {}
        for token_id, text in enumerate(texts):
            content = CONTENT.match(text)
            assert content is not None
            is_whole = text[content.end() :][:1] in (b"", b'"')
            characters = _characters(content[0]) if is_whole else None
            if characters is not None:
                self._by_characters.setdefault(characters, []).append(token_id)

    def after(self, keys: OpenKeys, token_id: int) -> OpenKeys | None:
        """Returns where the document stands after a token, None if that gives an object a key again."""
        return keys.after(self._texts[token_id])

    def repeating(self, keys: OpenKeys, mask: np.ndarray) -> list[int]:
        """Returns the tokens of a mask, u32[ceil(V / 32)], that would give an object a key again."""
        if keys.string is None:
            tokens = self._with_quotes[2]  # a key begins and ends in the token
        elif not keys.wants_key:
            tokens = self._with_quotes[3]  # and the value before it ends there
        elif (begun := _characters(keys.string)) is None:
            tokens = self._with_quotes[1]  # in the middle of a character: what follows is not indexed
        else:
            tokens = np.concatenate([self._that_spell(_rests(keys, begun)), self._with_quotes[3]])
        return [token_id for token_id in _allowed(tokens, mask) if self.after(keys, token_id) is None]

    def spelling(self, keys: OpenKeys, mask: np.ndarray) -> list[int]:
        """Returns the tokens of a mask after which the open key is one that its object has, but has not ended."""
        if keys.string is None:
            tokens = self._with_quotes[1]
        elif not keys.wants_key:
            tokens = self._with_quotes[2]
        elif (begun := _characters(keys.string)) is None:
            tokens = np.arange(len(self._texts))
        else:
            tokens = self._that_spell(_rests(keys, begun))
        return [token_id for token_id in _allowed(tokens, mask) if _is_again(self.after(keys, token_id))]

    def _that_spell(self, texts: Iterable[str]) -> np.ndarray:
        return np.fromiter(chain.from_iterable(self._by_characters.get(text, ()) for text in texts), np.int64)


def _allowed(tokens: np.ndarray, mask: np.ndarray) -> list[int]:
    return tokens[(mask[tokens >> 5] >> (tokens & 31).astype(np.uint32)) & 1 == 1].tolist()


def _rests(keys: OpenKeys, begun: str) -> Iterator[str]:
    """Returns what would make of an open key, which begins so, those that its object has."""
    return (key[len(begun) :] for key in keys.objects[-1] or () if key.startswith(begun))


def _is_again(keys: OpenKeys | None) -> bool:
    """True if a key is open and has the characters of one that its object has."""
    if keys is None or keys.string is None or not keys.wants_key:
        return False
    return _characters(keys.string) in (keys.objects[-1] or ())


def _has_open_escape(string: bytes) -> bool:
    return (len(string) - len(string.rstrip(b"\\"))) % 2 == 1


def _characters(spelled: bytes) -> str | None:
    """Returns the characters of a JSON string that is spelled so, None if it ends in the middle of one."""
    try:
        characters = json.loads(f'"{spelled.decode()}"')
    except ValueError:
        return None
    return None if "\ud800" <= characters[-1:] < "\udc00" else characters  # half of a pair of escapes
