"""Token ids to text piece by piece, while a request runs; free of jax."""

from __future__ import annotations

import codecs
import functools
from collections.abc import Collection, Iterable, Sequence

from jaxinfer.text.tokenizer import Tokenizer

# A character has at most 4 bytes: after 4 tokens that all end inside one, the bytes are not UTF-8.
MAX_CHARACTER_BYTES = 4
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
FIRST_MARK, MAX_MARKS = 0xD800, 2_048  # of special tokens in stop strings


class _ByteText:
    """Text of a byte-level tokenizer: the bytes of its tokens, as far as their characters are complete."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool, shown: Collection[int]) -> None:
        self._token_bytes = functools.partial(tokenizer.token_bytes, skip_special_tokens=skip_special_tokens)
        self._ascii_texts = {} if shown else tokenizer.ascii_texts[skip_special_tokens]
        if shown:
            self._token_bytes = lambda token_id: tokenizer.token_bytes(
                token_id, skip_special_tokens=skip_special_tokens and token_id not in shown
            )
        self.texts = self._ascii_texts  # of tokens that need not be pushed: most, unless one ends in a character
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        text = self._decoder.decode(self._token_bytes(token_id))
        self.texts = {} if self._decoder.getstate()[0] else self._ascii_texts
        return text

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowText:
    """Text of any other tokenizer, whose tokens may read differently beside others (a leading space stripped,
    bytes joined to a character): decodes pending tokens after the last ones shown and takes what they add.

        token ids   1 2 3 4 5 6 7        decode(4 5 6 7) = "lo wor"
        shown       └───────┘            decode(4 5)     = "lo"
        context           └─┘            new text        = " wor"
        pending               └─┘
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool, shown: Collection[int]) -> None:
        self._has_text = lambda token_id: tokenizer.has_text(
            token_id, skip_special_tokens=skip_special_tokens and token_id not in shown
        )
        self._decode = functools.partial(tokenizer.decode, skip_special_tokens=False)  # of tokens with text alone
        self.texts: dict[int, str] = {}
        self._context: list[int] = []
        self._context_len = 0  # characters
        self._pending: list[int] = []
        self._num_incomplete = 0  # latest tokens that all left the text inside a character
        self._incomplete_len = 0  # characters of the text that they left

    def push(self, token_id: int) -> str:
        # Tokens without text must not become the context: the text after them would then look like the first.
        if not self._has_text(token_id):
            return ""
        self._pending.append(token_id)
        text = self._pending_text()
        # Every byte of an incomplete character reads as one U+FFFD, so the byte that completes one makes the text
        # shorter: also where that character is U+FFFD itself.
        is_incomplete = text.endswith(REPLACEMENT) and len(text) > self._incomplete_len
        self._num_incomplete = self._num_incomplete + 1 if is_incomplete else 0
        self._incomplete_len = len(text) if is_incomplete else 0
        if not text or 0 < self._num_incomplete < MAX_CHARACTER_BYTES:
            return ""
        self._context, self._pending = self._pending, []
        self._num_incomplete = self._incomplete_len = 0
        self._context_len = len(self._decode(self._context))
        return text

    def flush(self) -> str:
        text, self._pending = self._pending_text(), []
        return text

    def _pending_text(self) -> str:
        return self._decode(self._context + self._pending)[self._context_len :]


class Detokenizer:
    """The text of one request while its tokens arrive, ended before the first of the `stop` strings.

    Stop strings are not looked for in the text of the first `min_tokens` tokens. The special tokens `shown` have text
    even if the others are skipped. The name of a special token in a stop string stands for that token too, although the
    text leaves it out.

    Without `stop` and `shown`, the pushed texts and the flushed one joined are `tokenizer.decode` of all tokens with
    the same `skip_special_tokens`: for byte-level tokenizers always, for those that fall back to byte tokens when every
    run of those is UTF-8, as in all encoded text. In other runs `decode` discards the good characters too; here those
    shown stay.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        shown: Collection[int] = (),
    ) -> None:
        new_text = _ByteText if tokenizer.is_byte_level else _WindowText
        self._text = new_text(tokenizer, skip_special_tokens=skip_special_tokens, shown=frozenset(shown))
        self._marks = _marks_in(stop, tokenizer, shown) if skip_special_tokens else {}
        marked = [_marked(text, self._marks.values()) for text in stop]
        self._stop = tuple(dict.fromkeys([*stop, *marked]))
        self.texts = {} if stop else self._text.texts  # of tokens that need not be pushed if they come next
        self._min_tokens = min_tokens
        self._held = ""
        self._num_tokens = 0  # counted where there are stop strings
        self.is_stopped = False  # by a stop string

    def push(self, token_id: int) -> str:
        """Takes the next token; returns the new text that no later token can change."""
        if not self._stop:
            text = self._text.push(token_id)
            self.texts = self._text.texts
            return text
        if self.is_stopped:
            return ""
        self._num_tokens += 1
        mark, _ = self._marks.get(token_id, ("", ""))
        return self._before_stop(self._text.push(token_id) + mark)

    def flush(self) -> str:
        """Returns the text held back when no more tokens come; an incomplete character shows as U+FFFD."""
        if self.is_stopped:
            return ""
        text = self._before_stop(self._text.flush())
        held, self._held = self._held, ""
        return text + self._without_marks(held)

    def _before_stop(self, text: str) -> str:
        if not self._stop or self._num_tokens <= self._min_tokens:
            return self._without_marks(text)
        text = self._held + text
        # The first one completed, not the first one begun, so that it does not matter how the text was cut.
        matches = [(start + len(stop), start) for stop in self._stop if (start := text.find(stop)) >= 0]
        if matches:
            self._held, self.is_stopped = "", True
            _, end = min(matches)
        else:
            end = len(text) - max(_overlap(text, stop) for stop in self._stop)
            self._held = text[end:]
        return self._without_marks(text[:end])

    def _without_marks(self, text: str) -> str:
        return text.translate({ord(mark): None for mark, _ in self._marks.values()}) if self._marks else text


def _marks_in(stop: Sequence[str], tokenizer: Tokenizer, shown: Collection[int]) -> dict[int, tuple[str, str]]:
    """Returns a mark and the name of each special token in stop strings, by its id.

    A mark is half a surrogate pair, which no text has.
    """
    marks: dict[int, tuple[str, str]] = {}
    for name, token_id in tokenizer.special_tokens.items() if any(stop) else ():
        if token_id not in shown and len(marks) < MAX_MARKS and any(name in text for text in stop):
            marks[token_id] = chr(FIRST_MARK + len(marks)), name
    return marks


def _marked(text: str, marks: Iterable[tuple[str, str]]) -> str:
    """Returns a stop string with marks in place of the names of special tokens, the longest first."""
    for mark, name in sorted(marks, key=lambda pair: -len(pair[1])):
        text = text.replace(name, mark)
    return text


def _overlap(text: str, stop: str) -> int:
    """Counts the characters at the end of `text` that may be the beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
