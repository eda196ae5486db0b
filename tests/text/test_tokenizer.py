"""Tokenizer and Detokenizer against the tokenizers library's own decode of all tokens at once."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from jaxinfer.text.detokenizer import Detokenizer
from jaxinfer.text.tokenizer import MAX_LOCKED_LEN, Tokenizer
from tests.pauses import longest_pause

TEXT = "Grüße from the café, naïve 日本語 и 中文文文 😀👩‍👩‍👧😀 the cat, the  hat. ¿Qué? 0 1 22 333\n\n\tend "


@cache
def byte_level() -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<s>"], show_progress=False)
    trainer.initial_alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator([TEXT] * 3, trainer)
    backend.add_tokens([AddedToken("<a b>"), AddedToken("né中"), AddedToken("Ã")])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return Tokenizer(backend)


@cache
def byte_fallback() -> Tokenizer:
    """As of Llama 2: spaces are ▁, unseen characters are byte tokens, one leading space is stripped."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    ascii_text = TEXT.encode("ascii", "ignore").decode()
    trained.train_from_iterator([ascii_text] * 3, trainers.BpeTrainer(show_progress=False))
    learned = json.loads(trained.to_str())["model"]
    pieces = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *learned["vocab"]]
    merges = [tuple(merge) for merge in learned["merges"]]
    vocab = {piece: token_id for token_id, piece in enumerate(pieces)}
    model = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    backend.add_special_tokens(["<unk>", "<s>"])
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    return Tokenizer(backend)


def without_byte_tokens(decoder: decoders.Decoder | None) -> Tokenizer:
    words = ["<unk>", "the", "▁the", "▁", "▁cat", ",", "##s", "�", "é", "hat</w>", "s</w>"]
    vocab = {word: token_id for token_id, word in enumerate(words)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.add_special_tokens(["<unk>"])
    if decoder is not None:
        backend.decoder = decoder
    return Tokenizer(backend)


@cache
def byte_token(byte: int) -> int:
    """The id of the byte-level tokenizer's token of this byte alone."""
    tokenizer = byte_level()
    return next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == bytes([byte]))


def shown(tokenizer: Tokenizer, chunks: list[list[int]], **options: Any) -> str:
    detokenizer = Detokenizer(tokenizer, **options)
    return "".join([*map(detokenizer.push, flat(chunks)), detokenizer.flush()])


def pushed_text(detokenizer: Detokenizer, text: str) -> str:
    return "".join(map(detokenizer.push, byte_level().encode(text)))


def chunks_of(ids: st.SearchStrategy[int]) -> st.SearchStrategy[list[list[int]]]:
    return st.lists(st.lists(ids, max_size=5), max_size=20)


def flat(chunks: Iterable[list[int]]) -> list[int]:
    return [token_id for chunk in chunks for token_id in chunk]


# Id 900 has no token, as the padding rows of a model's vocabulary.
def test_a_token_alone_reads_as_its_text_or_as_its_name():
    tokenizer = byte_level()
    ids = [*tokenizer.encode(" the"), 900]

    assert "".join(map(tokenizer.text_of, ids)) == "<s> the"


SKIPPING = [pytest.param({"skip_special_tokens": skips}, id=f"skip={skips}") for skips in (True, False)]


@pytest.mark.parametrize("options", SKIPPING)
@given(chunks=chunks_of(st.integers(0, 420) | st.just(900)))
def test_byte_level_text_in_pieces_is_the_text_of_all_tokens(options, chunks):
    assert shown(byte_level(), chunks, **options) == byte_level().decode(flat(chunks), **options)


@given(content=st.lists(st.integers(0, 255), max_size=24))
def test_byte_level_text_in_pieces_is_right_for_any_bytes(content):
    ids = [byte_token(byte) for byte in content]
    assert shown(byte_level(), [[token_id] for token_id in ids]) == byte_level().decode(ids)


@pytest.mark.parametrize("options", SKIPPING)
@given(chunks=chunks_of(st.integers(0, 420)))
def test_a_token_that_need_not_be_pushed_has_the_text_that_a_push_gives(options, chunks):
    pushed, looked_up = Detokenizer(byte_level(), **options), Detokenizer(byte_level(), **options)
    for token_id in flat(chunks):
        expected = pushed.push(token_id)
        text = looked_up.texts.get(token_id)
        assert (looked_up.push(token_id) if text is None else text) == expected


def test_each_token_of_a_byte_level_tokenizer_has_the_bytes_of_its_text():
    tokenizer = byte_level()
    for token_id in range(tokenizer.vocab_size + 1):
        for skips in (True, False):
            spelled = tokenizer.token_bytes(token_id, skip_special_tokens=skips)
            assert spelled.decode(errors="replace") == tokenizer.decode([token_id], skip_special_tokens=skips)


@pytest.mark.parametrize("options", SKIPPING)
@pytest.mark.parametrize("decoder", [decoders.Metaspace(), decoders.WordPiece(), decoders.BPEDecoder(), None])
@given(chunks=chunks_of(st.integers(0, 12)))
def test_text_in_pieces_without_byte_tokens_is_the_text_of_all_tokens(decoder, options, chunks):
    tokenizer = without_byte_tokens(decoder)
    assert shown(tokenizer, chunks, **options) == tokenizer.decode(flat(chunks), **options)


def ids_with_whole_characters() -> st.SearchStrategy[list[int]]:
    """Ids in which each run of byte tokens is UTF-8; a run at the very end may break off in a character."""
    characters = st.characters(exclude_categories=["Cs"]).map(lambda c: [2 + byte for byte in c.encode()])
    others = st.sampled_from([0, 1, *range(258, byte_fallback().vocab_size)]).map(lambda token_id: [token_id])
    broken = st.sampled_from([[], [258, 2 + 0xE2], [258, 2 + 0xF0, 2 + 0x9F, 2 + 0x98]])
    return st.tuples(st.lists(characters | others, max_size=30).map(flat), broken).map(flat)


@pytest.mark.parametrize("options", SKIPPING)
@given(ids=ids_with_whole_characters(), size=st.integers(1, 5))
@example(ids=[2 + byte for byte in "\ufffd\x80".encode()], size=1)
@example(ids=[2 + byte for byte in "a\ufffd\ufffd\ufffdé".encode()], size=1)
def test_byte_fallback_text_in_pieces_is_the_text_of_all_tokens_when_the_bytes_are_utf8(options, ids, size):
    chunks = [ids[start : start + size] for start in range(0, len(ids), size)]
    assert shown(byte_fallback(), chunks, **options) == byte_fallback().decode(ids, **options)


@given(ids=st.lists(st.integers(130, byte_fallback().vocab_size - 1), max_size=40))
def test_invalid_byte_tokens_lose_no_text_of_other_tokens(ids):
    # The bytes drawn are all above 0x7F and every other token is ASCII.
    in_pieces = shown(byte_fallback(), [[token_id] for token_id in ids])
    assert in_pieces.encode("ascii", "ignore") == byte_fallback().decode(ids).encode("ascii", "ignore")


@pytest.mark.parametrize("tokenizer", [byte_level(), byte_fallback()], ids=["byte_level", "byte_fallback"])
@given(text=st.text(st.sampled_from(TEXT), max_size=40))
def test_shown_text_is_never_taken_back_and_never_half_a_character(tokenizer, text):
    ids = tokenizer.encode(text)
    detokenizer = Detokenizer(tokenizer)
    so_far = ""
    for count, token_id in enumerate(ids, 1):
        so_far += detokenizer.push(token_id)
        assert text.startswith(so_far)
        whole = [so for end in range(count + 1) if not (so := tokenizer.decode(ids[:end])).endswith("�")]
        assert len(so_far) >= max(map(len, whole))
    assert so_far == text


def test_a_character_is_shown_with_the_token_that_completes_it():
    detokenizer = Detokenizer(byte_level())
    pushed = [detokenizer.push(byte_token(byte)) for byte in "é😀".encode()]
    assert pushed == ["", "é", "", "", "", "😀"]


def test_an_incomplete_character_shows_as_replacement_at_the_end():
    tokenizer = byte_fallback()
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push(2 + byte) for byte in (0xF0, 0x9F)] == ["", ""]
    assert detokenizer.flush() == "��"
    assert detokenizer.flush() == ""


def test_cost_per_token_does_not_grow_with_the_text(monkeypatch):
    tokenizer, decoded = byte_fallback(), []
    original = Tokenizer.decode

    def counted_decode(_, ids, **options):
        decoded.append(len(ids))
        return original(tokenizer, ids, **options)

    monkeypatch.setattr(Tokenizer, "decode", counted_decode)
    shown(tokenizer, [[token_id] for token_id in [2 + 0xFF] * 500 + tokenizer.encode(TEXT * 20)])
    assert max(decoded) <= 8


STOPS = st.lists(st.text("ab😀", min_size=1, max_size=4), max_size=3).map(tuple)


def first_completed(text: str, stops: tuple[str, ...]) -> str | None:
    """The text before the stop string that a reader completes first; None when there is none."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return None


@given(text=st.text("ab😀", max_size=20), stops=STOPS)
def test_text_ends_before_the_first_stop_string(text, stops):
    ids = byte_level().encode(text)
    detokenizer = Detokenizer(byte_level(), stops)
    seen = "".join(map(detokenizer.push, ids))
    expected = first_completed(text, stops)
    assert detokenizer.is_stopped == (expected is not None)
    assert seen + detokenizer.flush() == (text if expected is None else expected)


def test_text_that_may_begin_a_stop_string_is_held_until_it_does_not():
    detokenizer = Detokenizer(byte_level(), ("aab",))
    pushed = [pushed_text(detokenizer, piece) for piece in "aaac"]
    assert pushed == ["", "", "a", "aac"]


def test_text_held_for_a_stop_string_is_flushed_when_it_never_comes():
    detokenizer = Detokenizer(byte_level(), ("the hat",))
    assert pushed_text(detokenizer, "in the") == "in "
    assert detokenizer.flush() == "the"


def test_nothing_is_shown_after_a_stop_string():
    detokenizer = Detokenizer(byte_level(), (",",))
    assert pushed_text(detokenizer, "cat, hat") == "cat"
    assert detokenizer.is_stopped
    assert pushed_text(detokenizer, "hat") + detokenizer.flush() == ""


def test_encode_adds_the_special_tokens_and_decode_skips_or_shows_them():
    ids = byte_level().encode("the café")
    assert ids[0] == 0
    assert byte_level().decode(ids) == "the café"
    assert byte_level().decode(ids, skip_special_tokens=False) == "<s>the café"


def test_requests_that_skip_and_that_show_special_tokens_share_no_text():
    skipping, showing, again = (Detokenizer(byte_level(), skip_special_tokens=skips) for skips in (True, False, True))
    texts = [detokenizer.push(0) for detokenizer in (skipping, showing, again)]
    assert texts == [detokenizer.texts[0] for detokenizer in (skipping, showing, again)] == ["", "<s>", ""]


def test_a_stop_string_is_found_in_special_tokens_if_they_are_shown_and_if_not():
    ids = byte_level().encode("the") + byte_level().encode("cat")
    ends = []
    for skips in (True, False):
        detokenizer = Detokenizer(byte_level(), ("e<s>",), skip_special_tokens=skips)
        ends.append("".join([*map(detokenizer.push, ids), detokenizer.flush()]))
    assert ends == ["th", "<s>th"]


def test_a_token_has_the_id_and_an_id_the_token_of_the_file():
    tokenizer = byte_level()
    vocabulary = tokenizer._backend.get_vocab()
    assert all(tokenizer.token_to_id(token) == token_id for token, token_id in vocabulary.items())
    assert all(tokenizer.id_to_token(token_id) == token for token, token_id in vocabulary.items())
    assert tokenizer.token_to_id("no such token") is None
    assert [tokenizer.id_to_token(token_id) for token_id in (-1, 400, 2**40)] == [None] * 3


def test_truncation_in_the_file_does_not_shorten_prompts(tmp_path: Path):
    backend = tokenizers.Tokenizer.from_str(byte_level()._backend.to_str())
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_path(tmp_path)
    assert tokenizer is not None
    assert [tokenizer.encode(text) for text in (TEXT, "a")] == [byte_level().encode(text) for text in (TEXT, "a")]


def test_a_folder_without_tokenizer_gives_none(tmp_path: Path):
    assert Tokenizer.from_path(tmp_path) is None


@pytest.mark.parametrize("name", ["tiktoken.model", "qwen.tiktoken"])
def test_a_file_of_tiktoken_alone_is_named_with_the_way_out(tmp_path: Path, caplog, name):
    (tmp_path / name).write_bytes(b"IQ== 0")

    assert Tokenizer.from_path(tmp_path) is None

    (record,) = caplog.records
    assert str(tmp_path) in record.getMessage()
    assert name in record.getMessage()
    assert "prompts have to be token ids, or put a tokenizer.json" in record.getMessage()


def test_a_damaged_file_is_named(tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer"):
        Tokenizer.from_path(str(tmp_path))


LONG = st.lists(st.sampled_from([TEXT, "<a b>", "<s>", "né中", "Ã", "a", " ", "\n", "0"]), min_size=200, max_size=300)


@settings(max_examples=20)
@given(pieces=LONG, add_special_tokens=st.booleans(), splits_special_tokens=st.booleans())
@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_a_long_text_has_the_ids_and_long_ids_the_text_of_the_library(
    make, pieces: list[str], add_special_tokens: bool, splits_special_tokens: bool
):
    text = "".join(pieces) + TEXT * 20
    backend = tokenizers.Tokenizer.from_str(make()._backend.to_str())
    backend.encode_special_tokens = splits_special_tokens
    tokenizer = Tokenizer(backend)

    ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)

    assert len(text) > MAX_LOCKED_LEN
    assert ids == backend.encode(text, add_special_tokens=add_special_tokens).ids
    for skips in (True, False):
        assert tokenizer.decode(ids, skip_special_tokens=skips) == backend.decode(ids, skip_special_tokens=skips)


def longest_share(work: Callable[[], object]) -> float:
    """Returns the longest time between two turns of another thread during some work, as a share of the whole time."""
    began = time.perf_counter()
    return longest_pause(work) / (time.perf_counter() - began)


def encoded(tokenizer: Tokenizer, text: str, _: list[int]) -> None:
    tokenizer.encode(text)


def decoded(tokenizer: Tokenizer, _: str, ids: list[int]) -> None:
    tokenizer.decode(ids)


@pytest.mark.parametrize("work", [encoded, decoded])
def test_other_threads_run_while_a_long_text_is_encoded_or_decoded(work):
    tokenizer, text = byte_fallback(), TEXT * 10_000
    ids = (tokenizer.encode(TEXT) * 10_000)[: 2**20]

    # The library's work of seconds without the interpreter's lock; the best of three, for other work may delay a turn.
    assert min(longest_share(lambda: work(tokenizer, text, ids)) for _ in range(3)) < 0.25


def test_half_a_surrogate_pair_is_refused():
    with pytest.raises(ValueError, match="half a surrogate pair"):
        byte_level().encode("a\ud800")
