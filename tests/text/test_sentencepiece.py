"""A tokenizer.model alone gives the ids and the text of the sentencepiece library."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from jaxinfer.text.detokenizer import Detokenizer
from jaxinfer.text.tokenizer import Tokenizer

README = Path(__file__).parents[2] / "README.md"
KINDS = [
    (model_type, rule, keeps_spaces)
    for model_type in ("unigram", "bpe")
    for rule, keeps_spaces in (("identity", True), ("identity", False), ("nmt_nfkc", False))
]
ALPHABET = [
    *"abcdefghijklmnopqrst.,|`-",
    *" " * 6,
    "  ",
    "\n",
    "\n\n",
    "\t",
    "é",
    "ß",
    "中",
    "文",
    "😀",
    "ﬁ",
    "①",
    "<sep>",
]


def train(**options) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(README.read_text().splitlines()),
        model_writer=model,
        **{
            "vocab_size": 700,
            "byte_fallback": True,
            "minloglevel": 2,
            "control_symbols": ["<ctl>"],
            "user_defined_symbols": ["<sep>"],
            **options,
        },
    )
    return model.getvalue()


@pytest.fixture(scope="module", params=KINDS, ids=repr)
def pair(request, tmp_path_factory):
    """Returns our tokenizer and the library's, of one model."""
    model_type, rule, keeps_spaces = request.param
    proto = train(model_type=model_type, normalization_rule_name=rule, remove_extra_whitespaces=not keeps_spaces)
    folder = tmp_path_factory.mktemp(model_type)
    (folder / "tokenizer.model").write_bytes(proto)
    tokenizer = Tokenizer.from_path(folder)
    assert tokenizer is not None
    return tokenizer, sentencepiece.SentencePieceProcessor(model_proto=proto)


def random_texts(count: int) -> list[str]:
    generator = np.random.default_rng(0)
    words = README.read_text().split()
    texts = []
    for _ in range(count):
        parts = [
            generator.choice(words) if generator.random() < 0.4 else generator.choice(ALPHABET)
            for _ in range(generator.integers(0, 25))
        ]
        texts.append("".join(part + " " * int(generator.random() < 0.3) for part in map(str, parts)))
    return texts


def test_ids_and_text_equal_those_of_the_library(pair):
    tokenizer, library = pair
    wrong = []
    for text in random_texts(200):
        expected = library.EncodeAsIds(text)
        ids = tokenizer.encode(text, add_special_tokens=False)
        # Of two cuts into the same pieces, whose scores are equal, either may be taken.
        if sorted(ids) != sorted(expected) or tokenizer.decode(ids) != library.DecodeIds(expected):
            wrong.append((text, [tokenizer.id_to_token(i) for i in ids], library.EncodeAsPieces(text)))
    assert wrong == []


def test_every_id_has_the_name_of_the_library(pair):
    tokenizer, library = pair
    assert tokenizer.vocab_size == library.GetPieceSize()
    for token_id in range(library.GetPieceSize()):
        assert tokenizer.id_to_token(token_id) == library.IdToPiece(token_id)
        assert tokenizer.token_to_id(library.IdToPiece(token_id)) == token_id


def test_pieces_pushed_one_by_one_give_the_whole_text(pair):
    tokenizer, library = pair
    for text in random_texts(50):
        ids = library.EncodeAsIds(text)
        detokenizer = Detokenizer(tokenizer)
        assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == tokenizer.decode(ids)


def test_control_symbols_are_special(pair):
    tokenizer, library = pair
    ids = [library.PieceToId("<ctl>"), *library.EncodeAsIds("abc"), library.eos_id()]
    assert tokenizer.decode(ids) == "abc"
    assert tokenizer.encode("<ctl>", add_special_tokens=False) == [library.PieceToId("<ctl>")]


@pytest.mark.parametrize(
    ("settings", "first", "last"),
    [({}, [1], []), ({"add_bos_token": False, "add_eos_token": True}, [], [2]), ({"add_bos_token": True}, [1], [])],
)
def test_ends_are_those_of_tokenizer_config_json(tmp_path, settings, first, last):
    (tmp_path / "tokenizer.model").write_bytes(train())
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({**settings, "added_tokens_decoder": {"700": {"content": "<more>", "special": True}}})
    )
    tokenizer = Tokenizer.from_path(tmp_path)

    assert tokenizer is not None
    assert tokenizer.encode("ab<more>") == [*first, *tokenizer.encode("ab", add_special_tokens=False), 700, *last]


def test_without_the_library_the_error_names_the_extra(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.model").write_bytes(b"")
    for name in ("sentencepiece", "sentencepiece.sentencepiece_model_pb2"):
        monkeypatch.setitem(sys.modules, name, None)

    with pytest.raises(ValueError, match=r"tokenizer\.model needs .*pip install 'jaxinfer\[sentencepiece\]'"):
        Tokenizer.from_path(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\xff" * 50, b"{}"])
def test_a_damaged_file_is_refused(tmp_path, content):
    (tmp_path / "tokenizer.model").write_bytes(content)

    with pytest.raises(ValueError, match=r"tokenizer\.model .*; (download it again|use another checkpoint)"):
        Tokenizer.from_path(tmp_path)


def test_a_model_of_words_is_refused(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(train(model_type="char", vocab_size=400))

    with pytest.raises(ValueError, match="not a SentencePiece model of type Unigram or BPE"):
        Tokenizer.from_path(tmp_path)
