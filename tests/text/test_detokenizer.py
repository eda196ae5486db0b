"""A special token in a stop string counts as that token, also where the text leaves special tokens out."""

from __future__ import annotations

import pytest
import tokenizers
from tokenizers import decoders, models

from jaxinfer.text.detokenizer import Detokenizer
from jaxinfer.text.tokenizer import Tokenizer

END, BEGIN = "<|im_end|>", "<|im_start|>"
WORDS = ["a", "b", "\u010a", "<", "|im_end|", ">", "\u2581a", "\u2581b"]
IDS = {word: token_id for token_id, word in enumerate([*WORDS, END, BEGIN])}


@pytest.fixture(params=["bytes", "words"])
def tokenizer(request):
    backend = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="a"))
    metaspace = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Replace("\u010a", "\n"), decoders.Fuse()])
    backend.decoder = decoders.ByteLevel() if request.param == "bytes" else metaspace
    backend.add_special_tokens([END, BEGIN])
    return Tokenizer(backend)


def text_before(tokenizer, words, stop, **options):
    """Returns the text and how many tokens it took to its end, None if it did not stop."""
    detokenizer, text = Detokenizer(tokenizer, stop, **options), ""
    for num_tokens, word in enumerate(words, 1):
        text += detokenizer.push(IDS[word])
        if detokenizer.is_stopped:
            return text, num_tokens
    return text + detokenizer.flush(), None


CASES = {
    "alone": (["a", END, "b"], [END], ("a", 2)),
    "at the beginning": ([END, "b"], [END], ("", 1)),
    "before text": (["a", END, "b"], [END + "b"], ("a", 3)),
    "before other text": (["a", END, "a", "b"], [END + "b"], ("aab", None)),
    "behind text": (["a", "\u010a", BEGIN, "b"], ["\n" + BEGIN], ("a", 3)),
    "behind other text": (["a", "b", BEGIN, "b"], ["\n" + BEGIN], ("abb", None)),
    "within text": (["a", "b", END, "\u010a", BEGIN, "a"], ["b" + END + "\n" + BEGIN], ("a", 5)),
    "one of several": (["a", BEGIN, "b", END], ["x", END, "y"], ("ab", 4)),
    "spelled by others": (["a", "<", "|im_end|", ">", "b"], [END], ("a", 4)),
    "not there": (["a", BEGIN, "b"], [END], ("ab", None)),
    "held to the end": (["a", "b", BEGIN], ["b" + BEGIN + "a"], ("ab", None)),
}


@pytest.mark.parametrize(("words", "stop", "expected"), CASES.values(), ids=CASES)
def test_text_ends_before_a_special_token_of_a_stop_string(tokenizer, words, stop, expected):
    assert text_before(tokenizer, words, stop) == expected


@pytest.mark.parametrize(("words", "stop", "expected"), CASES.values(), ids=CASES)
def test_text_with_special_tokens_ends_at_the_same_token(tokenizer, words, stop, expected):
    _, num_tokens = text_before(tokenizer, words, stop, skip_special_tokens=False)

    assert num_tokens == expected[1]


def test_no_stop_string_is_looked_for_among_the_first_tokens(tokenizer):
    assert text_before(tokenizer, ["a", END, "b", END, "a"], [END], min_tokens=2) == ("ab", 4)


def test_a_special_token_that_is_shown_is_text(tokenizer):
    shown = [IDS[BEGIN]]

    assert text_before(tokenizer, ["a", BEGIN, "b", END], [END], shown=shown) == (f"a{BEGIN}b", 4)
    assert text_before(tokenizer, ["a", BEGIN, "b"], [f"{BEGIN}b"], shown=shown) == ("a", 3)
