"""Text to token ids and back; free of jax."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders

from jaxinfer.gguf.file import is_gguf
from jaxinfer.text.added_tokens import read_stated_tokens
from jaxinfer.text.backends.gguf_vocabulary import load_gguf_vocabulary
from jaxinfer.text.backends.sentencepiece_model import load_sentencepiece
from jaxinfer.text.backends.vocabulary_and_merges import load_vocabulary_and_merges
from jaxinfer.text.chat_template import ChatTemplates
from jaxinfer.text.files import check_size
from jaxinfer.validation import MAX_INT, as_bool, as_plain, as_tuple, is_int, require, shown

logger = logging.getLogger(__name__)

FILES = ("tokenizer.json", "tokenizer.model")
MAX_TOKENIZER_BYTES = 2**27  # of tokenizer.json and tokenizer.model; the largest published ones have 33 MB
# Of a text to encode and of ids to decode. The library releases the interpreter's lock for batches alone, and computes
# them on its own threads, for which a short text would wait behind long ones of other callers.
MAX_LOCKED_LEN = 1_024
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
    """A checkpoint's tokenizer, and its chat templates."""

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
        """Reads tokenizer.json in `checkpoint_dir`, and the files beside it.

        Without it tokenizer.model of SentencePiece is read, or else vocab.json with merges.txt. Of a GGUF file it reads
        the vocabulary in its metadata. None without any of these, with a warning beside a file of tiktoken, and
        ValueError for a damaged file.
        """
        require(isinstance(checkpoint_dir, str | Path), "checkpoint_dir", checkpoint_dir, "text or a Path")
        folder = Path(checkpoint_dir)
        if is_gguf(folder) and folder.is_file():
            vocabulary = load_gguf_vocabulary(folder)
            return None if vocabulary is None else cls(*vocabulary)
        path = next((folder / name for name in FILES if (folder / name).exists()), None)
        if path is not None:
            check_size(path, MAX_TOKENIZER_BYTES)
        if path is not None and path.suffix == ".model":
            backend, stated = load_sentencepiece(path)
        else:
            backend = load_vocabulary_and_merges(folder) if path is None else _load_json(path)
            if backend is None:
                _warn_of_tiktoken(folder)
                return None
            stated = read_stated_tokens(folder, backend.get_added_tokens_decoder())
            backend.add_tokens(list(stated.tokens))
            if misplaced := stated.misplaced(backend.token_to_id):
                logger.warning(
                    "%s: the id of an added token is not the one that its files state: %s. transformers has the same"
                    " ids; if the model was trained with other ones, correct tokenizer.json",
                    folder,
                    misplaced,
                )
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

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text by the files beside the tokenizer; None if they name none."""
        name = self.chat_templates.special_tokens.get("eos_token")
        return None if name is None else self.token_to_id(name)

    @functools.cached_property
    def ordinary_tokens(self) -> Mapping[str, int]:
        """The ids of all tokens as they are spelled in tokenizer.json, but added ones."""
        return self._backend.get_vocab(with_added_tokens=False)

    @functools.cached_property
    def special_tokens(self) -> Mapping[str, int]:
        """The ids of special tokens by their names."""
        added = self._backend.get_added_tokens_decoder()
        return {added[token_id].content: token_id for token_id in sorted(self._special_ids) if added[token_id].content}

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
        if len(text) <= MAX_LOCKED_LEN:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

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
            variables=variables,
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def render_chat(self, conversation: Sequence[Mapping[str, Any]], **arguments: Any) -> str:
        """Returns the text of a conversation that a client sends, to be encoded without special tokens.

        The arguments are those of `ChatTemplates.render_chat`, with the same errors.
        """
        return self.chat_templates.render_chat(conversation, **arguments)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Decodes without unknown ids, by default without special tokens; bytes that are not UTF-8 become U+FFFD."""
        ids = as_tuple("token_ids", token_ids, "several token ids")
        require(all(map(is_int, ids)), "token_ids", token_ids, "several integers")
        skip_special_tokens = as_bool("skip_special_tokens", skip_special_tokens)
        ids = [i for i in ids if 0 <= i <= MAX_INT]
        if len(ids) <= MAX_LOCKED_LEN:
            return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]

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


def _warn_of_tiktoken(folder: Path) -> None:
    """Warns of a vocabulary that has no rules for cutting a text, which only the publisher's own code has."""
    if files := sorted(file.name for pattern in ("*.tiktoken", "tiktoken.model") for file in folder.glob(pattern)):
        logger.warning(
            "%s has %s, which only code of its publisher reads, and no tokenizer.json: prompts have to be token ids, or"
            " put a tokenizer.json that gives the same ids beside it",
            folder,
            ", ".join(files),
        )


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
