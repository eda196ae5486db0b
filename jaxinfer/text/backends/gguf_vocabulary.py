"""The tokenizer that a GGUF has in its metadata: byte-level BPE, or the BPE of SentencePiece.

The rules by which byte-level BPE cuts a text before it merges are known to llama.cpp by a name in the metadata. `CUTS`
has those of the models that can be loaded, as their tokenizer.json states them; another name is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from jaxinfer.gguf.file import GGUFFile, read_gguf
from jaxinfer.gguf.names import ENDS
from jaxinfer.text.added_tokens import MAX_CHARACTERS, MAX_TOKENS
from jaxinfer.text.backends.sentencepiece_model import SPACE, merges_of
from jaxinfer.text.chat_template import DEFAULT, ChatTemplates
from jaxinfer.validation import is_int, shown

PREFIX = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # kinds of tokens
MAX_PIECE = 1024  # characters of a token with a score; the time of making its merges grows with their square
# Keys that are read, or have no effect on the ids of a text; of others, the values that have none.
KEYS = (
    *("model", "pre", "tokens", "token_type", "token_type_count", "merges", "scores"),
    *("add_bos_token", "add_eos_token"),
)
HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "add_space_prefix": (False,),  # which a vocabulary with scores reads
    "remove_extra_whitespaces": (False,),
    "add_sep_token": (False,),
}
NAMES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}

_CASELESS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
BY_THREES = rf"{_CASELESS}|{_WORD}|\p{{N}}{{1,3}}{_REST}"
BY_DIGITS = rf"{_CASELESS}|{_WORD}|\p{{N}}{_REST}"
WITH_MARKS = rf"{_CASELESS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
WITH_MARKS += r"|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _by_case(ending: str, digits: str) -> str:
    """Returns the pattern of tokenizers that cut words before a capital; `ending` is what a word takes with it."""
    start = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{start}{_UPPER}*{_LOWER}+{ending}|{start}{_UPPER}+{_LOWER}*{ending}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class Cut:
    """How a text is cut before merges: by each pattern in turn."""

    patterns: tuple[str, ...]
    is_composed: bool = False  # to Unicode's form NFC, first
    ignores_merges: bool = False  # for a piece that is a token as a whole
    begins: bool = False  # with the token for the beginning, unless the metadata says otherwise


_LLAMA_3 = Cut((BY_THREES,), ignores_merges=True, begins=True)
_SINGLE_DIGITS = Cut((r"\p{N}", GPT_2))
CUTS: Mapping[str, Cut] = {
    "llama-bpe": _LLAMA_3,
    "llama3": _LLAMA_3,
    "llama-v3": _LLAMA_3,
    "smaug-bpe": Cut((BY_THREES,)),
    "dbrx": Cut((BY_THREES,)),
    "qwen2": Cut((BY_DIGITS,), is_composed=True),
    "qwen35": Cut((WITH_MARKS,), is_composed=True),
    "deepseek-r1-qwen": Cut((BY_DIGITS,)),
    "gpt-2": Cut((GPT_2,)),
    "gpt-4o": Cut((_by_case(f"{_CASELESS}?", r"\p{N}{1,3}"),)),
    "tekken": Cut((_by_case("", r"\p{N}"),), ignores_merges=True, begins=True),
    "olmo": Cut((GPT_2,), is_composed=True),
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
}


@dataclass(frozen=True)
class _Vocabulary:
    """The tokens of a file by id, and their kinds."""

    tokens: Sequence[str]
    kinds: Sequence[int]

    def of_kind(self, *kinds: int) -> dict[str, int]:
        """Returns the tokens of these kinds with their ids, but for empty ones."""
        pairs = enumerate(zip(self.tokens, self.kinds, strict=True))
        return {token: token_id for token_id, (token, kind) in pairs if kind in kinds and token}


def load_gguf_vocabulary(path: Path) -> tuple[tokenizers.Tokenizer, ChatTemplates] | None:
    """Returns the tokenizer and the chat templates of a GGUF; None for one without vocabulary.

    ValueError for a vocabulary of an unknown kind, and for a damaged one.
    """
    file = read_gguf(path)
    if not any(key.startswith(PREFIX) for key in file.metadata):
        return None
    try:
        return _load(file)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _load(file: GGUFFile) -> tuple[tokenizers.Tokenizer, ChatTemplates]:
    vocabulary, model = _vocabulary(file.metadata), file.metadata.get(f"{PREFIX}model")
    _refuse_unknown(file.metadata, model)
    if model == "gpt2":
        tokenizer, begins = _byte_level(file.metadata, vocabulary)
    elif model == "llama":
        tokenizer, begins = _by_scores(file.metadata, vocabulary), True
    else:
        raise ValueError(f"tokenizer.ggml.model={shown(model)} is not supported; use a model with gpt2 or llama")
    _add_tokens(tokenizer, vocabulary)
    names = _names(file.metadata, vocabulary.tokens)
    _add_ends(tokenizer, file.metadata, vocabulary.tokens, begins=begins)
    return tokenizer, ChatTemplates(_templates(file.metadata), names)


def _refuse_unknown(metadata: Mapping[str, Any], model: Any) -> None:
    stated = {key.removeprefix(PREFIX): value for key, value in metadata.items() if key.startswith(PREFIX)}
    read = (*KEYS, "add_space_prefix") if model == "llama" else KEYS
    for name, value in stated.items():
        if name in read or name.endswith("_token_id"):
            continue
        if isinstance(value, np.ndarray) or value not in HARMLESS.get(name, ()):
            raise ValueError(
                f"tokenizer.ggml.{name}={shown(value)} is not supported; use a model without, or its safetensors"
            )


def _vocabulary(metadata: Mapping[str, Any]) -> _Vocabulary:
    tokens, kinds = (metadata.get(f"{PREFIX}{name}") for name in ("tokens", "token_type"))
    if not isinstance(tokens, tuple) or not tokens:
        raise ValueError(f"tokenizer.ggml.tokens={shown(tokens)} is no list of texts; convert the model again")
    kinds = np.full(len(tokens), NORMAL) if kinds is None else kinds
    if not isinstance(kinds, np.ndarray) or kinds.dtype.kind not in "iu" or len(kinds) != len(tokens):
        raise ValueError(f"tokenizer.ggml.token_type has no number for each of {len(tokens)} tokens; convert it again")
    ids: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        if token and ids.setdefault(token, token_id) != token_id:
            raise ValueError(
                f"tokenizer.ggml.tokens has {shown(token)} twice, with the ids {ids[token]} and {token_id}, so that no"
                " text has the second one; give one of them another text, and convert the model again"
            )
    # Those are no part of a text, whatever the file calls them.
    ends = {ids[token] for token in ENDS if token in ids}
    return _Vocabulary(tokens, [CONTROL if i in ends else kind for i, kind in enumerate(kinds.tolist())])


def _byte_level(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    """Returns a tokenizer like GPT-2's, and True if it begins a text with a token unless told otherwise."""
    name = metadata.get(f"{PREFIX}pre")
    if name in (None, "default"):
        raise ValueError(
            f"tokenizer.ggml.pre={shown(name)} does not name the rules by which its tokenizer cuts a text, and with"
            " other rules the ids differ from those of the training; write the name into a copy by gguf-new-metadata"
            f" --pre-tokenizer NAME (pip install gguf), one of {', '.join(CUTS)}, or convert the model again"
        )
    if not isinstance(name, str) or name not in CUTS:
        raise ValueError(
            f"tokenizer.ggml.pre={shown(name)} is not supported; use a model with one of {', '.join(CUTS)}, or its"
            " safetensors"
        )
    cut, ids = CUTS[name], vocabulary.of_kind(NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE)
    merges = metadata.get(f"{PREFIX}merges")
    pairs = [_pair(merge) for merge in merges] if isinstance(merges, tuple) else None
    if pairs is None or not all(set(pair) | {"".join(pair)} <= ids.keys() for pair in pairs):
        raise ValueError("tokenizer.ggml.merges is no list of pairs of tokens that make a token; convert it again")
    tokenizer = tokenizers.Tokenizer(models.BPE(ids, pairs, ignore_merges=cut.ignores_merges))
    if cut.is_composed:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in cut.patterns]
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, spelled])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, cut.begins


def _pair(merge: str) -> tuple[str, str]:
    # The first character may be a space in itself.
    at = merge.find(" ", 1)
    return merge[:at], merge[at + 1 :]


def _by_scores(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    """Returns the tokenizer of SentencePiece's BPE: merges are the pairs of tokens that make one, by its score."""
    scores = metadata.get(f"{PREFIX}scores")
    if not isinstance(scores, np.ndarray) or len(scores) != len(vocabulary.tokens) or not np.isfinite(scores).all():
        raise ValueError("tokenizer.ggml.scores has no number for each token; convert the model again")
    if any(len(token) > MAX_PIECE for token in vocabulary.tokens):
        raise ValueError(f"a token has more than {MAX_PIECE} characters; use another model")
    ids = vocabulary.of_kind(NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE)
    normal = vocabulary.of_kind(NORMAL)
    merges = merges_of({token: float(scores[token_id]) for token, token_id in normal.items()}, ids)
    unknown = next(iter(vocabulary.of_kind(UNKNOWN)), None)
    falls_back = bool(vocabulary.of_kind(BYTE))
    model = models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=falls_back)
    tokenizer = tokenizers.Tokenizer(model)
    has_prefix = _flag(metadata, "add_space_prefix", True)
    parts = [normalizers.Prepend(SPACE)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*parts, normalizers.Replace(" ", SPACE)])
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if has_prefix else [])])
    return tokenizer


def _add_tokens(tokenizer: tokenizers.Tokenizer, vocabulary: _Vocabulary) -> None:
    """Cuts tokens that no merges make out of a text first; control tokens and that for unknown text are special."""
    special, own = vocabulary.of_kind(CONTROL, UNKNOWN), vocabulary.of_kind(USER_DEFINED)
    count = sum(map(len, (*special, *own)))
    if len(special) + len(own) > MAX_TOKENS or count > MAX_CHARACTERS:
        raise ValueError(
            f"it has {len(special) + len(own):,} tokens of {count:,} characters that no merges make; give at most"
            f" {MAX_TOKENS:,} of {MAX_CHARACTERS:,} characters"
        )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in own])


def _add_ends(
    tokenizer: tokenizers.Tokenizer, metadata: Mapping[str, Any], tokens: Sequence[str], *, begins: bool
) -> None:
    """Lets the tokenizer put the tokens of beginning and end around a text if the metadata says so."""
    ends = {}
    for name, default in (("bos", begins), ("eos", False)):
        token_id = _token_id(metadata, name, tokens)
        if _flag(metadata, f"add_{name}_token", default) and token_id is not None:
            ends[name] = (tokens[token_id], token_id)
    if ends:
        first, last = ([ends[name][0]] if name in ends else [] for name in ("bos", "eos"))
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*first, "$A", *last], special_tokens=[*ends.values()]
        )


def _names(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, str]:
    ids = {ours: _token_id(metadata, name, tokens) for name, ours in NAMES.items()}
    return {name: tokens[token_id] for name, token_id in ids.items() if token_id is not None}


def _token_id(metadata: Mapping[str, Any], name: str, tokens: Sequence[str]) -> int | None:
    token_id = metadata.get(f"{PREFIX}{name}_token_id")
    if token_id is not None and not (is_int(token_id) and 0 <= token_id < len(tokens) and tokens[token_id]):
        raise ValueError(f"tokenizer.ggml.{name}_token_id={shown(token_id)} is no token; convert the model again")
    return token_id


def _flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    value = metadata.get(f"{PREFIX}{name}", default)
    if not isinstance(value, bool):
        raise ValueError(f"tokenizer.ggml.{name}={shown(value)} is neither true nor false; convert the model again")
    return value


def _templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Returns the chat templates by name: the file states a default one, and further ones by name."""
    key = "tokenizer.chat_template"
    stated = {name.removeprefix(f"{key}."): text for name, text in metadata.items() if name.startswith(f"{key}.")}
    stated |= {DEFAULT: metadata[key]} if key in metadata else {}
    for name, text in stated.items():
        if not isinstance(text, str):
            raise ValueError(f"the chat template {name!r} is {shown(text)}, not text; convert the model again")
    return stated
