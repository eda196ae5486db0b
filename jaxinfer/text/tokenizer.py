"""Text to token ids and back, the way back also piece by piece while a request runs; free of jax."""

from __future__ import annotations

import codecs
import functools
import json
import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders

from jaxinfer.gguf.file import is_gguf
from jaxinfer.text.added_tokens import read_stated_tokens
from jaxinfer.text.backends.gguf_vocabulary import load_gguf_vocabulary
from jaxinfer.text.backends.sentencepiece_model import load_sentencepiece
from jaxinfer.text.chat_template import ChatTemplates
from jaxinfer.text.files import check_size
from jaxinfer.validation import MAX_INT, as_bool, as_plain, as_tuple, is_int, require, shown

logger = logging.getLogger(__name__)

# A character has at most 4 bytes: after 4 tokens that all end inside one, the bytes are not UTF-8.
MAX_CHARACTER_BYTES = 4
MAX_TOKENIZER_BYTES = 2**27  # of tokenizer.json and tokenizer.model; the largest published ones have 33 MB
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Arguments of `apply_chat_template` in transformers that ask for something else than ids or text.
NOT_HONOURED = (
    *("padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"),
    *("return_assistant_tokens_mask", "sanitize_control_tokens"),
)


def _spelled_bytes() -> dict[str, int]:
    """Maps the characters in which byte-level BPE spells tokens to bytes (GPT-2, Radford et al. 2019)."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


SPELLED_BYTES = _spelled_bytes()


class Tokenizer:
    """A checkpoint's tokenizer.json or tokenizer.model, and its chat templates."""

    def __init__(self, backend: tokenizers.Tokenizer, chat_templates: ChatTemplates | None = None) -> None:
        """Takes over `backend`, without its truncation and padding: a prompt is encoded whole."""
        self.chat_templates = ChatTemplates({}, {}) if chat_templates is None else chat_templates
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend = _with_special_tokens_as_spelled(backend)
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        # By skip_special_tokens: the bytes of tokens, and the texts of those that are ASCII, which are the same
        # wherever the token stands.
        self._token_bytes: dict[bool, dict[int, bytes]] = {True: {}, False: {}}
        self.ascii_texts: dict[bool, dict[int, str]] = {True: {}, False: {}}
        self._texts: dict[int, str] = {}  # of tokens alone, as far as they were asked for

    @classmethod
    def from_path(cls, checkpoint_dir: str | Path) -> Tokenizer | None:
        """Reads tokenizer.json in `checkpoint_dir`, or else tokenizer.model of SentencePiece, and the files beside it.

        Of a GGUF file it reads the vocabulary in its metadata. None without any of these, ValueError for a damaged
        file.
        """
        require(isinstance(checkpoint_dir, str | Path), "checkpoint_dir", checkpoint_dir, "text or a Path")
        folder = Path(checkpoint_dir)
        if is_gguf(folder) and folder.is_file():
            vocabulary = load_gguf_vocabulary(folder)
            return None if vocabulary is None else cls(*vocabulary)
        path = folder / "tokenizer.json"
        if not path.exists():
            path = folder / "tokenizer.model"
            if not path.exists():
                return None
        check_size(path, MAX_TOKENIZER_BYTES)
        if path.suffix == ".json":
            backend = _load_json(path)
            stated = read_stated_tokens(folder, backend.get_added_tokens_decoder())
            backend.add_tokens(list(stated.tokens))
            if misplaced := stated.misplaced(backend.token_to_id):
                logger.warning(
                    "%s: the id of an added token is not the one that its files state: %s. transformers has the same"
                    " ids; if the model was trained with other ones, correct tokenizer.json",
                    folder,
                    misplaced,
                )
        else:
            backend, stated = load_sentencepiece(path)
        backend.encode_special_tokens = stated.splits_special_tokens
        return cls(backend, ChatTemplates.from_path(folder, stated.names))

    def to_json(self, vocab_size: int) -> str:
        """Returns the tokenizer as tokenizer.json has it, without added tokens from id `vocab_size` on."""
        text = self._backend.to_str()
        if self.vocab_size <= vocab_size:
            return text
        content = json.loads(text)
        content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < vocab_size]
        return json.dumps(content)

    @property
    def vocab_size(self) -> int:
        """Tokens known, added ones included; a model may have more rows than that."""
        return self._backend.get_vocab_size()

    @functools.cached_property
    def ordinary_tokens(self) -> Mapping[str, int]:
        """The ids of all tokens as they are spelled in tokenizer.json, but added ones."""
        return self._backend.get_vocab(with_added_tokens=False)

    @functools.cached_property
    def max_token_len(self) -> int:
        """Characters in the longest token as it is spelled, so no fewer than it stands for."""
        return max(map(len, self._backend.get_vocab()), default=1)

    @functools.cached_property
    def is_byte_level(self) -> bool:
        """True if every token is a fixed string of bytes, whatever stands beside it."""
        return isinstance(self._backend.decoder, decoders.ByteLevel)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encodes `text`, by default with the special tokens that the file's post-processor adds."""
        text = as_plain("text", text)
        require(isinstance(text, str), "text", text, "text")
        add_special_tokens = as_bool("add_special_tokens", add_special_tokens)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"text has half a surrogate pair, {text[error.start]!r}, at character {error.start}; "
                "give text that can be written as UTF-8"
            ) from error
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **variables: Any,
    ) -> list[int] | str:
        """Returns the token ids of a conversation by the checkpoint's chat template, or its text if not `tokenize`.

        The arguments are those of `transformers`:

        * `conversation`: messages, such as {"role": "user", "content": "Hello"}.
        * `tools`: JSON schemas of functions that the model may call. `documents`: mappings with title and text.
        * `chat_template`: a template, or the name of one in the checkpoint; None takes the default one.
        * `add_generation_prompt` appends what begins an answer.
        * `continue_final_message` leaves the last message open, so that the model continues it.
        * `variables`: what else the template reads, such as enable_thinking=False.

        Raises ValueError for messages that are not JSON, and for a template that is missing, fails, takes more than a
        second or writes more than 2**24 characters.
        """
        tokenize = as_bool("tokenize", tokenize)
        for name in NOT_HONOURED:
            value = variables.pop(name, None)
            if value not in (None, False):
                raise ValueError(f"{name}={shown(value)} is not supported: this method returns token ids or text alone")
        text = self.chat_templates.render(
            conversation,
            tools=tools,
            documents=documents,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **variables,
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Decodes without unknown ids, by default without special tokens; bytes that are not UTF-8 become U+FFFD."""
        ids = as_tuple("token_ids", token_ids, "several token ids")
        require(all(map(is_int, ids)), "token_ids", token_ids, "several integers")
        skip_special_tokens = as_bool("skip_special_tokens", skip_special_tokens)
        return self._backend.decode([i for i in ids if 0 <= i <= MAX_INT], skip_special_tokens=skip_special_tokens)

    def text_of(self, token_id: int) -> str:
        """Returns how a token reads alone: the name of a special one, nothing for an unknown one."""
        require(is_int(token_id), "token_id", token_id, "an integer")
        known = self._texts.get(token_id)
        if known is None:
            known = self.decode([token_id], skip_special_tokens=False)
            if known:  # so that ids without a token do not fill the table
                self._texts[token_id] = known
        return known

    def token_to_id(self, token: str) -> int | None:
        """Returns the id of a token as it is spelled in tokenizer.json; None for one that is not there."""
        require(isinstance(token, str), "token", token, "text")
        try:
            return self._backend.token_to_id(token)
        except UnicodeEncodeError:  # no token has half a surrogate pair
            return None

    def id_to_token(self, token_id: int) -> str | None:
        """Returns the token as it is spelled in tokenizer.json; None for an id that is not there."""
        require(is_int(token_id), "token_id", token_id, "an integer")
        return self._backend.id_to_token(token_id) if 0 <= token_id <= MAX_INT else None

    def has_text(self, token_id: int, *, skip_special_tokens: bool = True) -> bool:
        """True if `decode` looks at the token at all: it is known, and not special if special ones are skipped."""
        skip_special_tokens = as_bool("skip_special_tokens", skip_special_tokens)
        is_known = self.id_to_token(token_id) is not None
        return is_known and not (skip_special_tokens and token_id in self._special_ids)

    def token_bytes(self, token_id: int, *, skip_special_tokens: bool = True) -> bytes:
        """The bytes that a token of a byte-level tokenizer stands for, none for one without text."""
        require(is_int(token_id), "token_id", token_id, "an integer")
        skip_special_tokens = as_bool("skip_special_tokens", skip_special_tokens)
        known = self._token_bytes[skip_special_tokens].get(token_id)
        if known is None:
            has_text = self.has_text(token_id, skip_special_tokens=skip_special_tokens)
            token = self.id_to_token(token_id) if has_text else ""
            known = self._token_bytes[skip_special_tokens][token_id] = _unspell(token or "")
            if known.isascii():
                self.ascii_texts[skip_special_tokens][token_id] = known.decode()
        return known


def _load_json(path: Path) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
        backend.encode("")  # a post-processor with unknown tokens fails only here
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # The library raises nothing more specific, and its panics are no Exception.
        raise ValueError(
            f"{path} is not a tokenizer that tokenizers {tokenizers.__version__} can read ({error}); "
            "download it again or upgrade tokenizers"
        ) from error
    return backend


def _with_special_tokens_as_spelled(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Returns a tokenizer in which the normalizer changes no special token, or else its `decode` would not skip it.

    In files of the first Llama models the normalizer puts a space before "</s>".
    """
    special = {token_id: token for token_id, token in backend.get_added_tokens_decoder().items() if token.special}
    if all(backend.id_to_token(token_id) == token.content for token_id, token in special.items()):
        return backend
    content = json.loads(backend.to_str())
    for token in content["added_tokens"]:
        token["normalized"] &= not token["special"]
    changed = tokenizers.Tokenizer.from_str(json.dumps(content))
    changed.encode_special_tokens = backend.encode_special_tokens
    return changed


def _unspell(token: str) -> bytes:
    # Added tokens may be spelled in plain text; the library tells them by a character outside the table.
    if all(character in SPELLED_BYTES for character in token):
        return bytes(SPELLED_BYTES[character] for character in token)
    return token.encode()


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
    even if the others are skipped.

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
        self._stop = tuple(stop)
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
        return self._before_stop(self._text.push(token_id))

    def flush(self) -> str:
        """Returns the text held back when no more tokens come; an incomplete character shows as U+FFFD."""
        if self.is_stopped:
            return ""
        text = self._before_stop(self._text.flush())
        held, self._held = self._held, ""
        return text + held

    def _before_stop(self, text: str) -> str:
        if not self._stop or self._num_tokens <= self._min_tokens:
            return text
        text = self._held + text
        # The first one completed, not the first one begun, so that it does not matter how the text was cut.
        matches = [(start + len(stop), start) for stop in self._stop if (start := text.find(stop)) >= 0]
        if matches:
            self._held, self.is_stopped = "", True
            _, end = min(matches)
        else:
            end = len(text) - max(_overlap(text, stop) for stop in self._stop)
            self._held = text[end:]
        return text[:end]


def _overlap(text: str, stop: str) -> int:
    """Counts the characters at the end of `text` that may be the beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
