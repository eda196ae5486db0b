"""The vocabulary of a GGUF gives the ids of the tokenizer that it was converted from."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import sentencepiece
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from jaxinfer.engine.engine import BUNDLED_MODEL
from jaxinfer.text.backends.gguf_vocabulary import CUTS
from jaxinfer.text.tokenizer import Tokenizer

README = Path(__file__).parents[2] / "README.md"
NASTY = (
    "<|endoftext|>Hello  world!\n\n\tI'LL don't we'Re 12345 3.14 — naïve café e\u0301 ﬁ ①\r\n  中文テスト 😀👩\u200d👩"
    " x²  <think> CamelCaseHTTPServer iPhone's a_b/c//d <|endoftext|> <tool>\u00a0 \u2028 ÀÉÎ ßtraße İstanbul ١٢٣ हिन्दी"
    " [PAD9] ?!...  \n \n   end   "
)
# As the tokenizer.json of published models states them: Llama 3, Qwen2, GPT-2, GPT-4o (Phi-4-mini), Mistral Nemo,
# Qwen3.5, SmolLM2 and Granite.
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)"
    r"|\s+"
)
QWEN_2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_3_5 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
GPT_4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split(pattern: str) -> list[Any]:
    return [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]


GPT_2_STEPS = [pre_tokenizers.ByteLevel(False)]
DIGIT_STEPS = [pre_tokenizers.Digits(individual_digits=True), *GPT_2_STEPS]
# By the name in the metadata: steps before merges, form NFC, tokens without merges.
PUBLISHED = {
    **{name: (split(LLAMA_3), False, True) for name in ("llama-bpe", "llama3", "llama-v3")},
    **{name: (split(LLAMA_3), False, False) for name in ("smaug-bpe", "dbrx")},
    "qwen2": (split(QWEN_2), True, False),
    "deepseek-r1-qwen": (split(QWEN_2), False, False),
    "qwen35": (split(QWEN_3_5), True, False),
    "gpt-2": (GPT_2_STEPS, False, False),
    "olmo": (GPT_2_STEPS, True, False),
    "gpt-4o": (split(GPT_4O), False, False),
    "tekken": (split(TEKKEN), False, True),
    **dict.fromkeys(("smollm", "starcoder", "refact"), (DIGIT_STEPS, False, False)),
}
TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{% endfor %}"


def write(path: Path, **metadata: Any) -> Path:
    """Writes a file without tensors; keys lack "tokenizer.ggml." unless they have a dot."""
    writer = gguf.GGUFWriter(str(path), "llama")
    for name, value in metadata.items():
        key = name.replace("__", ".") if "__" in name else f"tokenizer.ggml.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def required(tokenizer: Tokenizer | None) -> Tokenizer:
    assert tokenizer is not None
    return tokenizer


def bundled() -> tuple[dict[str, int], list[list[str]]]:
    model = json.loads((BUNDLED_MODEL / "tokenizer.json").read_text())["model"]
    return model["vocab"], [m if isinstance(m, list) else m.split(" ") for m in model["merges"]]


def byte_level(path: Path, pre: str, **metadata: Any) -> Path:
    """Writes the bundled vocabulary with a word that no merges make, a tag, a control token and padding."""
    vocab, merges = bundled()
    tokens = [token for token, _ in sorted(vocab.items(), key=lambda pair: pair[1])]
    kinds = [3 if token == "<|endoftext|>" else 1 for token in tokens]
    more = [("CamelCaseHTTPServer", 1), ("<think>", 4), ("<tool>", 3), ("[PAD9]", 5)]
    return write(
        path,
        model="gpt2",
        pre=pre,
        tokens=[*tokens, *(token for token, _ in more)],
        token_type=[*kinds, *(kind for _, kind in more)],
        merges=[" ".join(pair) for pair in merges],
        **{"bos_token_id": 0, "eos_token_id": 0, **metadata},
    )


@pytest.mark.parametrize("pre", CUTS)
def test_ids_are_those_of_the_published_byte_level_tokenizers(tmp_path, pre):
    steps, is_composed, ignores_merges = PUBLISHED[pre]
    vocab, merges = bundled()
    expected = tokenizers.Tokenizer(
        models.BPE(
            {**vocab, "CamelCaseHTTPServer": len(vocab)}, [(m[0], m[1]) for m in merges], ignore_merges=ignores_merges
        )
    )
    expected.pre_tokenizer, expected.decoder = pre_tokenizers.Sequence(steps), decoders.ByteLevel()
    if is_composed:
        expected.normalizer = normalizers.NFC()
    expected.add_special_tokens(["<|endoftext|>"])
    expected.add_tokens([AddedToken("<think>", normalized=False)])
    expected.add_special_tokens(["<tool>"])

    found = Tokenizer.from_path(byte_level(tmp_path / "model.gguf", pre, add_bos_token=False))

    assert found is not None
    ids = found.encode(NASTY)
    assert ids == expected.encode(NASTY).ids
    assert found.decode(ids) == expected.decode(ids)
    assert found.decode(ids, skip_special_tokens=False) == expected.decode(ids, skip_special_tokens=False)
    assert found.is_byte_level


@pytest.mark.parametrize(
    ("metadata", "first", "last"),
    [
        ({}, [0], []),
        ({"add_bos_token": False}, [], []),
        ({"add_bos_token": True, "add_eos_token": True}, [0], [0]),
        ({"pre": "qwen2"}, [], []),
    ],
)
def test_a_text_begins_and_ends_as_the_metadata_says(tmp_path, metadata, first, last):
    pre = metadata.pop("pre", "llama-bpe")
    tokenizer = required(Tokenizer.from_path(byte_level(tmp_path / "model.gguf", pre, **metadata)))
    bare = tokenizer.encode("abc", add_special_tokens=False)

    assert tokenizer.encode("abc") == [*first, *bare, *last]


@pytest.mark.parametrize("kind", [1, 4, 5])  # normal, user-defined, unused
@pytest.mark.parametrize("end", ["<|im_end|>", "<end_of_turn>", "</s>"])
def test_a_token_that_ends_a_text_is_one_id_and_no_part_of_the_text_whatever_the_file_calls_it(tmp_path, end, kind):
    tokens, kinds = ["a", "b", "ab", end, "b<"], [1, 1, 1, kind, 1]
    path = write(tmp_path / "m.gguf", model="gpt2", pre="qwen2", tokens=tokens, token_type=kinds, merges=["a b"])

    tokenizer = required(Tokenizer.from_path(path))

    assert tokenizer.encode(f"ab{end}a") == [2, 3, 0]
    assert tokenizer.decode([2, 3, 0]) == "aba"
    assert tokenizer.decode([2, 3, 0], skip_special_tokens=False) == f"ab{end}a"


def test_a_token_that_ends_a_text_is_none_of_the_pieces_of_a_vocabulary_with_scores(tmp_path):
    tokens, kinds = ["<unk>", "a", "<", "/s>", "</s>"], [2, 1, 1, 1, 1]
    scores = [0.0, -1.0, -2.0, -3.0, -4.0]
    path = write(tmp_path / "m.gguf", model="llama", tokens=tokens, token_type=kinds, scores=scores)

    tokenizer = required(Tokenizer.from_path(path))

    assert tokenizer.encode("a</s>", add_special_tokens=False)[-1] == 4
    assert tokenizer.decode([1, 4]) == "a"


@pytest.mark.parametrize(
    ("tokens", "kinds"),
    [
        (["a", "<unk>", "b", "ab"], [1, 2, 1, 1]),
        (["<unk>", "a", "b", "ab"], [2, 1, 1, 1]),
        (["a", "[UNK]", "<unk>", "b", "ab"], [1, 2, 2, 1, 1]),  # two of the kind
    ],
)
def test_a_token_for_unknown_text_keeps_its_id_in_a_byte_level_vocabulary(tmp_path, tokens, kinds):
    path = write(tmp_path / "m.gguf", model="gpt2", pre="qwen2", tokens=tokens, token_type=kinds, merges=["a b"])

    tokenizer = required(Tokenizer.from_path(path))

    assert [tokenizer.encode(token) for token in tokens] == [[i] for i in range(len(tokens))]
    assert tokenizer.vocab_size == len(tokens)


def test_chat_templates_and_the_names_of_tokens_come_from_the_metadata(tmp_path):
    templates = {"tokenizer__chat_template": TEMPLATE, "tokenizer__chat_template__tool_use": "tools"}
    tokenizer = required(Tokenizer.from_path(byte_level(tmp_path / "model.gguf", "llama-bpe", **templates)))
    conversation = [{"role": "user", "content": "Hi"}]

    assert tokenizer.apply_chat_template(conversation, tokenize=False) == "<|endoftext|>[user] Hi"
    assert tokenizer.apply_chat_template(conversation, tools=[{"type": "function"}], tokenize=False) == "tools"


def test_a_file_without_vocabulary_has_no_tokenizer(tmp_path):
    assert Tokenizer.from_path(write(tmp_path / "model.gguf")) is None


def trained(add_dummy_prefix: bool) -> sentencepiece.SentencePieceProcessor:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(README.read_text().splitlines()),
        model_writer=model,
        vocab_size=700,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=add_dummy_prefix,
        control_symbols=["<ctl>"],
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


@pytest.mark.parametrize("has_prefix", [True, False])
def test_ids_are_those_of_the_sentencepiece_library(tmp_path, has_prefix):
    expected = trained(has_prefix)
    ids = range(expected.vocab_size())
    kinds = {expected.is_unknown: 2, expected.is_control: 3, expected.is_unused: 5, expected.is_byte: 6}
    path = write(
        tmp_path / "model.gguf",
        model="llama",
        pre="default",
        tokens=[expected.id_to_piece(i) for i in ids],
        scores=[expected.get_score(i) for i in ids],
        token_type=[next((kind for test, kind in kinds.items() if test(i)), 1) for i in ids],
        bos_token_id=1,
        eos_token_id=2,
        unknown_token_id=0,
        add_space_prefix=has_prefix,
    )
    # The library has no control symbols in texts.
    text = NASTY.replace("<|endoftext|>", "")

    tokenizer = required(Tokenizer.from_path(path))

    assert tokenizer.encode(text) == [1, *expected.encode(text)]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("<ctl>", add_special_tokens=False) == [expected.piece_to_id("<ctl>")]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"pre": "klingon"}, "tokenizer.ggml.pre='klingon' is not supported"),
        (
            {"pre": "default"},
            "tokenizer.ggml.pre='default' does not name the rules .* gguf-new-metadata --pre",
        ),
        ({"pre": None}, "tokenizer.ggml.pre=None does not name the rules .* gguf-new-metadata --pre"),
        ({"tokens": ["a", "b", "ab", "a"]}, "tokens has 'a' twice, with the ids 0 and 3"),
        ({"tokens": ["a", "b", "ab", "[PAD]", "[PAD]"]}, "tokens has '\\[PAD\\]' twice, with the ids 3 and 4"),
        ({"model": "bert"}, "tokenizer.ggml.model='bert' is not supported"),
        ({"merges": ["a"]}, "tokenizer.ggml.merges is no list of pairs"),
        ({"merges": ["zz qq"]}, "tokenizer.ggml.merges is no list of pairs"),
        ({"remove_extra_whitespaces": True}, "tokenizer.ggml.remove_extra_whitespaces=True is not supported"),
        ({"precompiled_charsmap": [1, 2]}, "tokenizer.ggml.precompiled_charsmap=.* is not supported"),
        ({"token_type": [1]}, "has no number for each of"),
        ({"bos_token_id": 10**6}, "tokenizer.ggml.bos_token_id=1000000 is no token"),
        ({"add_bos_token": 1}, "tokenizer.ggml.add_bos_token=1 is neither true nor false"),
        ({"tokenizer__chat_template": 3}, "the chat template 'default' is 3, not text"),
        ({"model": "llama"}, "tokenizer.ggml.scores has no number for each token"),
    ],
)
def test_a_vocabulary_that_cannot_be_read_is_refused_by_name(tmp_path, metadata, message):
    path = tmp_path / "model.gguf"
    values = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b", "ab"], "merges": ["a b"], **metadata}

    with pytest.raises(ValueError, match=message) as error:
        Tokenizer.from_path(write(path, **{name: value for name, value in values.items() if value is not None}))

    assert str(path) in str(error.value)


def test_every_name_of_a_cut_has_its_published_pattern_here():
    assert PUBLISHED.keys() == CUTS.keys()
