"""Tokenizers published as a SentencePiece tokenizer.model alone: the same tokenizer, as one of `tokenizers`.

The `sentencepiece` library (Kudo & Richardson 2018) reads the file; the extra `sentencepiece` installs it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from jaxinfer.text.added_tokens import StatedTokens, read_stated_tokens
from jaxinfer.text.files import read_object

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # stands for a space in pieces
# Kinds of pieces, and of models, in sentencepiece_model.proto.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
UNIGRAM, BPE = 1, 2
# No text is worth a piece of this score: those of bytes and control symbols stand for no text.
NO_TEXT = -1000.0


def load_sentencepiece(path: Path) -> tuple[tokenizers.Tokenizer, StatedTokens]:
    """Returns the tokenizer of a tokenizer.model, with the tokens that the files beside it state, and these tokens.

    It begins a text with the token for that, and does not end it, unless tokenizer_config.json says otherwise. Raises
    ValueError without the library, for a damaged file, and for a model that is neither Unigram nor BPE.
    """
    try:
        messages: Any = importlib.import_module("sentencepiece.sentencepiece_model_pb2")
    except ImportError as error:
        raise ValueError(
            f"{path} needs a library that is missing ({error}); pip install 'jaxinfer[sentencepiece]', or convert it to"
            " tokenizer.json with transformers"
        ) from error
    proto = messages.ModelProto()
    try:
        proto.ParseFromString(path.read_bytes())
    except Exception as error:  # of a type that depends on protobuf's implementation
        raise ValueError(f"{path} is not a SentencePiece model ({error}); download it again") from error
    if not proto.pieces or proto.trainer_spec.model_type not in (UNIGRAM, BPE):
        raise ValueError(f"{path} is not a SentencePiece model of type Unigram or BPE; use another checkpoint")
    if proto.trainer_spec.treat_whitespace_as_suffix:
        raise ValueError(f"{path} has treat_whitespace_as_suffix=true, which is not supported; use another checkpoint")
    tokenizer = tokenizers.Tokenizer(_unigram(proto) if proto.trainer_spec.model_type == UNIGRAM else _bpe(proto))
    tokenizer.normalizer = _normalizer(proto.normalizer_spec)
    own = [piece.piece for piece in proto.pieces if piece.type == USER_DEFINED]
    if own and proto.trainer_spec.model_type == BPE:
        longest_first = "|".join(map(_escaped, sorted(own, key=len, reverse=True)))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(longest_first), "isolated")
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if proto.normalizer_spec.add_dummy_prefix:
        parts.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(parts)
    special = [piece.piece for piece in proto.pieces if piece.type in (UNKNOWN, CONTROL)]
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in special])
    stated = read_stated_tokens(path.parent, tokenizer.get_added_tokens_decoder())
    # The normalizer would put a space before the token's own text.
    tokenizer.add_tokens([AddedToken(**{**token.__getstate__(), "normalized": False}) for token in stated.tokens])
    if misplaced := stated.misplaced(tokenizer.token_to_id):
        raise ValueError(
            f"added tokens in {path.parent} cannot have the ids that its files state ({misplaced}); use a checkpoint"
            " with tokenizer.json"
        )
    _add_ends(tokenizer, proto, read_object(path.parent / "tokenizer_config.json"))
    return tokenizer, stated


def _unigram(proto: Any) -> models.Unigram:
    scores = [piece.score for piece in proto.pieces if piece.type == NORMAL]
    largest = max(scores, default=0.0)

    def score(piece: Any) -> float:
        if piece.type == USER_DEFINED:  # better than any other cut of its characters
            return len(piece.piece) * largest - 0.1
        return piece.score if piece.type == NORMAL else NO_TEXT

    vocabulary = [(piece.piece, score(piece)) for piece in proto.pieces]
    unknown = next((i for i, piece in enumerate(proto.pieces) if piece.type == UNKNOWN), None)
    return models.Unigram(vocabulary, unknown, byte_fallback=proto.trainer_spec.byte_fallback)


def _bpe(proto: Any) -> models.BPE:
    """Returns the model whose merges are all pairs of pieces that make a piece, the best piece first."""
    ids = {piece.piece: i for i, piece in enumerate(proto.pieces)}
    merges = merges_of({piece.piece: piece.score for piece in proto.pieces if piece.type == NORMAL}, ids)
    unknown = next((piece.piece for piece in proto.pieces if piece.type == UNKNOWN), None)
    return models.BPE(
        ids,
        merges,
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=proto.trainer_spec.byte_fallback,
        # A user-defined symbol, which is cut out before, is a word of the vocabulary that no merges make.
        ignore_merges=any(piece.type == USER_DEFINED for piece in proto.pieces),
    )


def merges_of(scores: Mapping[str, float], ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Returns all pairs of pieces that make a piece, those of the piece with the highest score first."""
    merges = []
    for piece in sorted(scores, key=lambda piece: (-scores[piece], ids[piece])):
        pairs = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        merges += [pair for pair in pairs if pair[0] in scores and pair[1] in scores]
    return merges


def _normalizer(spec: Any) -> normalizers.Normalizer:
    parts: list[Any] = [normalizers.Precompiled(spec.precompiled_charsmap)] if spec.precompiled_charsmap else []
    if spec.remove_extra_whitespaces:
        ends, runs = Regex(rf"\A +|[ {SPACE}]+\z"), Regex(" {2,}")
        parts += [normalizers.Replace(ends, ""), normalizers.Replace(runs, " ")]
    if spec.add_dummy_prefix:
        parts.append(normalizers.Prepend(SPACE))
    if spec.escape_whitespaces:
        parts.append(normalizers.Replace(" ", SPACE))
    return normalizers.Sequence(parts)


def _escaped(text: str) -> str:
    return "".join(f"\\x{{{ord(character):x}}}" for character in text)


def _add_ends(tokenizer: tokenizers.Tokenizer, proto: Any, settings: Mapping[str, Any]) -> None:
    ends = {}
    for key, token_id, default in (
        ("add_bos_token", proto.trainer_spec.bos_id, True),
        ("add_eos_token", proto.trainer_spec.eos_id, False),
    ):
        if settings.get(key, default) and 0 <= token_id < len(proto.pieces):
            ends[key] = (proto.pieces[token_id].piece, token_id)
    first, last = ends.get("add_bos_token"), ends.get("add_eos_token")
    single = [*([first[0]] if first else []), "$A", *([last[0]] if last else [])]
    if ends:
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=[*ends.values()])
