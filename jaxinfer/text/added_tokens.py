"""The added tokens that the files beside a tokenizer state: their ids, which are special, and their names.

    tokenizer_config.json      added_tokens_decoder, bos_token and the like, extra_special_tokens
    special_tokens_map.json    the same names  ┐ read without added_tokens_decoder,
    added_tokens.json          tokens and ids  ┘ which files have since transformers 4.34

The result is that of `transformers` 5. Where files contradict each other, a token of the tokenizer keeps its id, and a
token with the flag "special" in one of them is special.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from jaxinfer.text.files import read_object
from jaxinfer.validation import MAX_INT, is_int, require_bool, shown

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
# With these the library takes 15 s to prepare its search for added tokens; the time grows faster than their number.
MAX_TOKENS, MAX_CHARACTERS = 2**18, 2**22
MAX_LISTED = 5  # tokens in a message
HALF_PAIR = re.compile("[\ud800-\udfff]")  # of surrogates, which no token has


@dataclass(frozen=True)
class StatedTokens:
    """The tokens, ids and names that the files beside a tokenizer state."""

    tokens: Sequence[AddedToken]  # to be added to it in this order: new ones, and its own with other flags
    ids: Mapping[str, int]  # from token to stated id
    names: Mapping[str, str]  # the special tokens with names, such as "eos_token": "</s>"
    splits_special_tokens: bool  # special tokens that stand in a text are split like other text

    def misplaced(self, token_to_id: Callable[[str], int | None]) -> str:
        """Lists the tokens that have other ids than stated; "" if there are none."""
        ids = [(token, token_to_id(token), stated) for token, stated in self.ids.items()]
        wrong = [f"{shown(token)} is {actual}, not {stated}" for token, actual, stated in ids if actual != stated]
        return ", ".join(wrong[:MAX_LISTED] + [f"and {len(wrong) - MAX_LISTED:,} more"] * (len(wrong) > MAX_LISTED))


def read_stated_tokens(folder: Path, known: Mapping[int, AddedToken]) -> StatedTokens:
    """Reads the files in `folder`; `known` are the added tokens that the tokenizer has.

    Raises ValueError with the file and the value for a damaged file, and for too many tokens.
    """
    file, old_file = folder / "tokenizer_config.json", folder / "special_tokens_map.json"
    config = read_object(file)
    named, listed = _special_tokens(config, file)
    if config.get("added_tokens_decoder") is not None:
        added = _added_tokens_decoder(config["added_tokens_decoder"], file)
    else:
        old_named, old_listed = _special_tokens(read_object(old_file), old_file)
        # The old file counts for NAMES, tokenizer_config.json for further names.
        named = {**old_named, **named, **{name: token for name, token in old_named.items() if name in NAMES}}
        added = _added_tokens(folder / "added_tokens.json", {token.content for token in (*named.values(), *listed)})
        added |= known
        listed = listed or old_listed
    named = {name: named[name] for name in (*NAMES, *named) if name in named}  # new tokens get their ids in this order
    splits = config.get("split_special_tokens") or False
    require_bool(f"split_special_tokens in {file}", splits)
    tokens = _tokens_to_add(added, known, list(named.values()), listed)
    count = sum(len(token.content) for token in tokens)
    if len(tokens) > MAX_TOKENS or count > MAX_CHARACTERS:
        raise ValueError(
            f"the files in {folder} add {len(tokens):,} tokens of {count:,} characters to the tokenizer; give at most"
            f" {MAX_TOKENS:,} of {MAX_CHARACTERS:,} characters"
        )
    return StatedTokens(
        tokens=tokens,
        ids={token.content: token_id for token_id, token in added.items() if token.content},
        names={name: token.content for name, token in named.items()},
        splits_special_tokens=splits,
    )


def _tokens_to_add(
    added: Mapping[int, AddedToken],
    known: Mapping[int, AddedToken],
    named: Sequence[AddedToken],
    listed: Sequence[AddedToken],
) -> list[AddedToken]:
    """Returns the tokens in the order in which new ones get their ids: by stated id, by name, then those only listed.

    A list makes a token special only if the token stands nowhere else.
    """
    before = {_state(token) for token in known.values()}
    tokens = {token.content: token for _, token in sorted(added.items())}
    stated = {token.content for token in (*known.values(), *added.values())}
    tokens |= {token.content: token for token in (*named, *listed) if token.content not in stated}
    special = {token.content for token in (*known.values(), *added.values(), *tokens.values()) if token.special}
    special |= {token.content for token in named}
    for token in tokens.values():
        token.special = token.content in special
    return [token for token in tokens.values() if token.content and _state(token) not in before]


def _state(token: AddedToken) -> tuple[Any, ...]:
    return (token.content, *(getattr(token, flag) for flag in FLAGS))


def _special_tokens(stated: Mapping[str, Any], file: Path) -> tuple[dict[str, AddedToken], list[AddedToken]]:
    """Returns the special tokens that have names, and those that are only listed."""
    named = {name: value for name, value in stated.items() if name in NAMES or _is_named_token(name, value)}
    named |= _object(stated.get("model_specific_special_tokens") or {}, "model_specific_special_tokens", file)
    listed = stated.get("extra_special_tokens")
    if isinstance(listed, dict):
        named, listed = named | listed, []
    listed = listed or stated.get("additional_special_tokens") or []
    if not isinstance(listed, list):
        raise ValueError(f"extra_special_tokens={shown(listed)} in {file} is neither a list nor an object; correct it")
    _check_count(len(named) + len(listed), file)
    return (
        {name: _token(value, name, file, special=True) for name, value in named.items() if value is not None},
        [_token(value, "a token of extra_special_tokens", file, special=True) for value in listed],
    )


def _is_named_token(name: str, value: Any) -> bool:
    """True for tokens such as image_token, False for switches such as add_bos_token."""
    return name.endswith("_token") and (isinstance(value, str) or (isinstance(value, dict) and "content" in value))


def _added_tokens_decoder(stated: Any, file: Path) -> dict[int, AddedToken]:
    stated = _object(stated, "added_tokens_decoder", file)
    _check_count(len(stated), file)
    added = {}
    for key, value in stated.items():
        name = f"added_tokens_decoder[{shown(key)}]"
        token_id = int(key) if re.fullmatch("[0-9]{1,10}", key) else -1
        _check_id(token_id, name, file)
        added[token_id] = _token(value, name, file, special=False)
    return added


def _added_tokens(file: Path, special: Collection[str]) -> dict[int, AddedToken]:
    stated = read_object(file)
    _check_count(len(stated), file)
    added = {}
    for content, token_id in stated.items():
        _check_id(token_id, f"the id {shown(token_id)} of {shown(content)}", file)
        is_special = content in special
        added[token_id] = _token(
            {"content": content, "normalized": not is_special}, "a token", file, special=is_special
        )
    return added


def _object(value: Any, name: str, file: Path) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name}={shown(value)} in {file} is not an object; correct it")
    return value


def _check_count(count: int, file: Path) -> None:
    if count > MAX_TOKENS:
        raise ValueError(f"{file} states {count:,} tokens; give at most {MAX_TOKENS:,}")


def _check_id(token_id: Any, name: str, file: Path) -> None:
    if not is_int(token_id) or not 0 <= token_id <= MAX_INT:
        raise ValueError(f"{name} in {file} is no token id from 0 to {MAX_INT}; correct it")


def _token(stated: Any, name: str, file: Path, *, special: bool) -> AddedToken:
    """Returns a token that is stated as text, or as an object with its text and flags."""
    values = stated if isinstance(stated, dict) else {"content": stated}
    content = values.get("content")
    flags = {flag: values[flag] for flag in FLAGS if values.get(flag) is not None}
    is_text = isinstance(content, str) and not HALF_PAIR.search(content)
    if not is_text or not all(isinstance(value, bool) for value in flags.values()):
        raise ValueError(
            f"{name}={shown(stated)} in {file} is neither text nor an object with a text as content and true or false"
            " as flags; correct it"
        )
    return AddedToken(content, **{"special": special, **flags})
