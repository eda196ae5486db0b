"""Ids, special tokens and names come from all files that state them, as `transformers` reads the same folder."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from jaxinfer.text import added_tokens
from jaxinfer.text.detokenizer import Detokenizer
from jaxinfer.text.tokenizer import Tokenizer
from tests.text.test_sentencepiece import train

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
NEW_ID = len(ALPHABET)  # of the first added token
WORD = "the"  # of the vocabulary; it comes last, so that no added token has its id
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
TEMPLATE = "|".join(
    f"{{{{ {name} }}}}" for name in ("bos_token", "eos_token", "pad_token", "unk_token", "image_token", "sep_token")
)


def token(content: str, *flags: str) -> dict[str, Any]:
    return {"content": content, **{flag: flag in flags for flag in FLAGS}}


def untyped(content: str, *flags: str) -> dict[str, Any]:
    """As special_tokens_map.json has tokens."""
    return {flag: value for flag, value in token(content, *flags).items() if flag != "special"}


def typed(content: str, *flags: str) -> dict[str, Any]:
    """As tokenizer_config.json has named tokens."""
    return {"__type": "AddedToken", **token(content, *flags)}


def decoder(*tokens: dict[str, Any], first: int = NEW_ID) -> dict[str, Any]:
    return {"added_tokens_decoder": {str(first + i): token for i, token in enumerate(tokens)}}


def base_tokenizer() -> dict[str, Any]:
    """Returns a byte-level tokenizer.json without added tokens, whose normalizer changes the text."""
    vocabulary = {character: i for i, character in enumerate(ALPHABET)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return json.loads(backend.to_str())


def save(
    folder: Path,
    *known: dict[str, Any],
    config: dict[str, Any] | None = None,
    special_map: Any = None,
    added: Any = None,
) -> Path:
    """Writes a tokenizer.json with `known` added tokens, and the files beside it."""
    content = base_tokenizer() | {"added_tokens": [{"id": NEW_ID + i, **token} for i, token in enumerate(known)]}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **(config or {})}
    files = {"tokenizer_config": config, "special_tokens_map": special_map, "added_tokens": added}
    for name, content in files.items():
        if content is not None:
            (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def read(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_path(folder)
    assert tokenizer is not None
    return tokenizer


def require_equal(folder: Path, words: list[str]) -> tuple[Tokenizer, Any]:
    """Asserts that both read the same ids and texts from a folder, and returns both; `words` are all added tokens."""
    ours, theirs = read(folder), transformers.AutoTokenizer.from_pretrained(folder)
    text = "".join(f"A{word} B {word}  {word}\n{word}" for word in words)
    assert ours.encode(text) == theirs.encode(text)
    ids = [*ours.encode(text, add_special_tokens=False), *range(NEW_ID + len(words) + 2)]
    for skips in (True, False):
        expected = theirs.decode(ids, skip_special_tokens=skips)
        assert ours.decode(ids, skip_special_tokens=skips) == expected
        detokenizer = Detokenizer(ours, skip_special_tokens=skips)
        assert "".join([*map(detokenizer.push, ids), detokenizer.flush()]) == expected
    return ours, theirs


def rendered(tokenizer: Any, template: str = TEMPLATE) -> str:
    messages = [{"role": "user", "content": "Hi"}]
    return tokenizer.apply_chat_template(messages, tokenize=False, chat_template=template)


QWEN = (
    *(token(name, "special") for name in ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>")),
    *(token(name) for name in ("<tool_call>", "</tool_call>", "<think>", "</think>")),
)
LLAMA = (
    *(token(name, "special") for name in ("<|begin_of_text|>", "<|end_of_text|>")),
    *(token(f"<|reserved_special_token_{i}|>", "special") for i in range(9)),
    *(token(name, "special") for name in ("<|eom_id|>", "<|eot_id|>", "<|python_tag|>")),
)
HARMONY = ("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|channel|>", "<|message|>", "<|start|>", "<|end|>")
GPT_OSS = tuple(token(name, "special") for name in (*HARMONY, "<|call|>"))
MISTRAL = tuple(token(n, "special") for n in ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"))
GEMMA = (
    *(token(name, "special") for name in ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>")),
    *(token(name) for name in ("\n\n", "<table>")),
    token("<image_soft_token>", "special"),
)
PHI = (token("</s>", "rstrip"), token("<|assistant|>", "rstrip", "special"), token("<|end|>", "rstrip", "special"))
DEEPSEEK = (
    *(token(name, "special") for name in ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")),
    *(token(name) for name in ("<｜User｜>", "<｜tool▁calls▁begin｜>")),
    *(token(name) for name in ("<think>", "</think>")),
)
EDITED = tuple(token(each["content"]) for each in QWEN)  # a fine-tune whose tokenizer.json calls no token special

FILES: dict[str, tuple[tuple, dict[str, Any]]] = {
    "Qwen": (
        QWEN,
        {
            "config": {
                **decoder(*QWEN),
                "additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<|vision_start|>"],
                "bos_token": None,
                "eos_token": "<|im_end|>",
                "pad_token": "<|endoftext|>",
                "unk_token": None,
                "add_bos_token": False,
                "split_special_tokens": False,
            }
        },
    ),
    "Qwen, special in tokenizer_config.json alone": (
        EDITED,
        {"config": {**decoder(*QWEN), "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}},
    ),
    "Qwen, special by its name alone": (EDITED, {"config": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}}),
    "Qwen, not special in tokenizer_config.json": (QWEN, {"config": {**decoder(*EDITED)}}),
    "Qwen, of no decoder": (
        EDITED,
        {"config": {"additional_special_tokens": ["<|im_start|>"], "eos_token": "</think>"}},
    ),
    "Llama 3": (
        LLAMA,
        {
            "config": {**decoder(*LLAMA), "bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
            "special_map": {"bos_token": untyped("<|begin_of_text|>"), "eos_token": untyped("<|end_of_text|>")},
        },
    ),
    "Llama 3, a token for padding appended": (
        LLAMA,
        {"config": {**decoder(*LLAMA), "pad_token": "<|finetune_right_pad_id|>", "eos_token": "<|eot_id|>"}},
    ),
    "GPT-OSS": (
        GPT_OSS,
        {"config": {**decoder(*GPT_OSS), "bos_token": "<|startoftext|>", "eos_token": "<|return|>"}},
    ),
    "GPT-OSS, tokens in tokenizer_config.json alone": ((), {"config": {**decoder(*GPT_OSS)}}),
    "Mistral": (
        MISTRAL,
        {
            "config": {
                **decoder(*MISTRAL),
                "add_bos_token": True,
                "add_eos_token": True,
                "add_prefix_space": None,
                "additional_special_tokens": [],
                "bos_token": "<s>",
                "eos_token": "</s>",
            },
            "special_map": {"unk_token": untyped("<unk>")},
        },
    ),
    "Gemma": (
        GEMMA,
        {
            "config": {
                **decoder(*GEMMA),
                "bos_token": "<bos>",
                "eos_token": "<eos>",
                "image_token": "<image_soft_token>",
                "extra_special_tokens": {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>"},
            }
        },
    ),
    "Phi-3": (
        PHI,
        {"config": {**decoder(*PHI, token("<|user|>", "rstrip", "special")), "eos_token": "<|end|>"}},
    ),
    "Phi-3, other flags in tokenizer.json": (
        tuple(token(each["content"], "special") for each in PHI),
        {"config": {**decoder(*PHI), "eos_token": "<|end|>"}},
    ),
    "DeepSeek": (
        DEEPSEEK,
        {
            "config": {
                "add_bos_token": True,
                "bos_token": typed("<｜begin▁of▁sentence｜>", "normalized"),
                "eos_token": typed("<｜end▁of▁sentence｜>", "normalized"),
                "pad_token": typed("<｜end▁of▁sentence｜>", "normalized"),
                "unk_token": None,
            }
        },
    ),
    "added_tokens.json": (
        (),
        {
            "config": {"eos_token": "</s>", "pad_token": None},
            "special_map": {"pad_token": "[PAD]", "eos_token": untyped("<|im_end|>", "lstrip", "rstrip")},
            "added": {"<|im_start|>": NEW_ID, "<|im_end|>": NEW_ID + 1, "[PAD]": NEW_ID + 2, "<Tool>": NEW_ID + 3},
        },
    ),
    "added_tokens.json beside the same tokens": (
        (token("<x>", "special", "rstrip"), token("<y>")),
        {"special_map": {"eos_token": "<y>"}, "added": {"<x>": NEW_ID, "<y>": NEW_ID + 1}},
    ),
    "files of before, beside those of today": (
        (token("<x>"),),
        {
            "config": {**decoder(token("<x>", "special")), "eos_token": "<x>"},
            "special_map": {"eos_token": "<y>", "pad_token": "<z>"},
            "added": {"<z>": NEW_ID + 1},
        },
    ),
    "special_tokens_map.json lists new tokens": (
        (token("<s>", "special"),),
        {"special_map": {"additional_special_tokens": ["<|user|>", "<|bot|>"], "bos_token": "<s>"}},
    ),
    "listed tokens of transformers 5": (
        (token("<s>", "special"),),
        {"config": {"extra_special_tokens": ["<x>", typed("<y>", "lstrip", "special")], "bos_token": "<s>"}},
    ),
    "named tokens as transformers 5 saves them": (
        (token("<s>", "special"),),
        {
            "config": {
                "audio_token": "<snd>",
                "image_token": "<img>",
                "model_specific_special_tokens": {"audio_token": "<snd>", "image_token": "<img>"},
                "bos_token": "<s>",
                "extra_special_tokens": ["<z>"],
            }
        },
    ),
    "named tokens beside a list": (
        (token("<s>", "special"),),
        {"config": {"extra_special_tokens": {"image_token": "<img>"}, "additional_special_tokens": ["<z>"]}},
    ),
    "an empty object beside a list": (
        (),
        {"config": {"extra_special_tokens": {}, "additional_special_tokens": ["<z>", "<s>"]}},
    ),
    "named tokens that are not there": ((), {"config": {"eos_token": "<end>", "pad_token": "<pad>", "bos_token": ""}}),
    "special tokens are split": ((token("<s>", "special"), token("<x>")), {"config": {"split_special_tokens": True}}),
    "a named token of the vocabulary": ((), {"config": {"eos_token": "!", "unk_token": "<unk>"}}),
}
WORDS = (
    *(each["content"] for each in (*QWEN, *LLAMA, *GPT_OSS, *MISTRAL, *GEMMA, *PHI, *DEEPSEEK)),
    *("<|user|>", "<|bot|>", "<x>", "<y>", "<z>", "<img>", "<snd>", "[PAD]", "<Tool>", "<|finetune_right_pad_id|>"),
    *("<start_of_image>", "<end>", "!"),
)


@pytest.mark.parametrize(("known", "files"), FILES.values(), ids=FILES)
def test_ids_texts_and_names_are_those_of_transformers(tmp_path, known, files):
    ours, theirs = require_equal(save(tmp_path, *known, **files), list(dict.fromkeys(WORDS)))

    assert rendered(ours) == rendered(theirs)


def random_files(generator: random.Random) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Returns files that state the same few tokens in random places, and contradict each other in flags."""
    contents = ["<a>", "<b>", "<c>", "</d>", "<é>"]

    def flags() -> list[str]:
        return [flag for flag in FLAGS if generator.random() < 0.3]

    def some() -> list[str]:
        return generator.sample(contents, generator.randrange(4))

    known = [token(content, *flags()) for content in some()]
    config: dict[str, Any] = {}
    for name in generator.sample(["bos_token", "eos_token", "pad_token", "image_token"], generator.randrange(4)):
        config[name] = generator.choice(contents)
    config |= generator.choice([{}, {"extra_special_tokens": some()}, {"additional_special_tokens": some()}])
    if generator.random() < 0.5:
        ids = {each["content"]: NEW_ID + i for i, each in enumerate(known)}
        for content in some():
            ids.setdefault(content, NEW_ID + len(ids))
        config["added_tokens_decoder"] = {str(ids[content]): token(content, *flags()) for content in ids}
    names = generator.sample(["bos_token", "eos_token", "pad_token"], generator.randrange(3))
    special_map: dict[str, Any] = {name: generator.choice(contents) for name in names}
    if not config.keys() & {"extra_special_tokens", "additional_special_tokens"}:
        special_map["additional_special_tokens"] = some()
    files = {"config": config, "special_map": special_map}
    if generator.random() < 0.3:
        files["added"] = {content: NEW_ID + i for i, content in enumerate(some())}
    return known, files


@pytest.mark.parametrize("seed", range(24))
def test_any_statements_are_read_as_transformers_reads_them(tmp_path, seed):
    known, files = random_files(random.Random(seed))

    require_equal(save(tmp_path, *known, **files), ["<a>", "<b>", "<c>", "</d>", "<é>"])


def test_special_tokens_of_the_first_llama_models_are_special_though_the_normalizer_changes_them(tmp_path):
    vocabulary = {piece: i for i, piece in enumerate(["<unk>", "<s>", "</s>", "▁", *"abc"])}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    content = json.loads(backend.to_str())
    names = ("<unk>", "<s>", "</s>")
    content["added_tokens"] = [{"id": i, **token(name, "special", "normalized")} for i, name in enumerate(names)]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    ours, theirs = read(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = [1, 3, 4, 5, 3, 2, 3, 6, 0, 4]

    for skips in (True, False):
        assert ours.decode(ids, skip_special_tokens=skips) == theirs.decode(ids, skip_special_tokens=skips)
    assert ours.encode("ab</s>") == theirs.encode("ab</s>") == [3, 4, 5, 2]


@pytest.mark.parametrize(
    ("config", "special_map", "added"),
    [
        (
            {"eos_token": "</s>"},
            {"pad_token": "[PAD]", "additional_special_tokens": ["<think>"]},
            {"<tool>": 700, "<think>": 701, "[PAD]": 702},
        ),
        (
            {
                **decoder(token("<tool>", "normalized", "rstrip"), token("<think>", "special"), first=700),
                "extra_special_tokens": {"think_token": "<think>"},
                "pad_token": "[PAD]",
                "eos_token": "</s>",
            },
            {"eos_token": "<unk>"},
            {"<other>": 700},
        ),
    ],
    ids=["files of before", "files of today"],
)
def test_text_beside_a_sentencepiece_model_is_that_of_transformers(tmp_path, config, special_map, added):
    proto = train(model_type="bpe", control_symbols=[], user_defined_symbols=[])
    (tmp_path / "tokenizer.model").write_bytes(proto)
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "unk_token": "<unk>", **config}
    files = {"tokenizer_config": config, "special_tokens_map": special_map, "added_tokens": added}
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    ours, theirs = read(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    library = sentencepiece.SentencePieceProcessor(model_proto=proto)
    words = library.EncodeAsIds("the model is a function")

    ids = [*words, 700, *words, 701, 1, *words, 702, *words, 2]

    assert ours.vocab_size == len(theirs) == 703
    for skips in (True, False):
        assert ours.decode(ids, skip_special_tokens=skips) == theirs.decode(ids, skip_special_tokens=skips)
    template = TEMPLATE + "|{{ think_token }}"
    assert rendered(ours, template) == rendered(theirs, template)


def test_a_token_beside_a_sentencepiece_model_that_cannot_have_its_id_is_refused(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(train())
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<x>": 700, "<y>": 702}))

    with pytest.raises(ValueError, match="cannot have the ids that its files state .'<y>' is 701, not 702.; use"):
        Tokenizer.from_path(tmp_path)


def test_a_stated_id_that_transformers_does_not_give_either_is_named_in_a_warning(tmp_path, caplog):
    stated = decoder(token("<x>"), first=NEW_ID) | {"eos_token": "<z>"}
    stated["added_tokens_decoder"] |= decoder(token("<y>"), first=NEW_ID + 9)["added_tokens_decoder"]

    with caplog.at_level(logging.WARNING):
        require_equal(save(tmp_path, config=stated), ["<x>", "<y>", "<z>"])

    assert f"'<y>' is {NEW_ID + 1}, not {NEW_ID + 9}." in caplog.text
    assert "<x>" not in caplog.text


def test_files_that_agree_bring_no_warning(tmp_path, caplog):
    known, files = FILES["Qwen"]

    with caplog.at_level(logging.WARNING):
        read(save(tmp_path, *known, **files))

    assert caplog.text == ""


def config(**fields: Any) -> dict[str, Any]:
    return {"config": fields}


DAMAGED: dict[str, tuple[dict[str, Any], str]] = {
    "decoder, a list": (
        config(added_tokens_decoder=[1]),
        r"added_tokens_decoder=\[1\] in .*_config.json is not an obj",
    ),
    "decoder, no id": (
        config(added_tokens_decoder={"x": token("<x>")}),
        r"added_tokens_decoder\['x'\] in .* no token id",
    ),
    "decoder, below 0": (config(added_tokens_decoder={"-1": token("<x>")}), r"\['-1'\] in .* is no token id from 0 to"),
    "decoder, digits": (config(added_tokens_decoder={"9" * 5_000: token("<x>")}), r"\['99+ … 9+'.* is no token id"),
    "decoder, too large": (config(added_tokens_decoder={"2147483648": token("<x>")}), r"is no token id from 0 to 2147"),
    "decoder, a number": (config(added_tokens_decoder={"256": 5}), r"added_tokens_decoder\['256'\]=5 in .* is neither"),
    "decoder, no content": (
        config(added_tokens_decoder={"256": {"special": True}}),
        r"\['256'\]=.* is neither text nor",
    ),
    "decoder, half a pair": (config(added_tokens_decoder={"256": token("\ud800")}), r"\['256'\]=.*ud800.* is neither"),
    "decoder, a flag": (
        config(added_tokens_decoder={"256": token("<x>") | {"rstrip": "no"}}),
        "or false as flags; corr",
    ),
    "a name, a number": (config(eos_token=5), r"eos_token=5 in .*tokenizer_config.json is neither text nor an object"),
    "a name, a list": (
        config(bos_token=["<s>"]),
        r"bos_token=\['<s>'\] in .* is neither text nor an object with a text",
    ),
    "a name, no content": (config(pad_token={"content": None}), r"pad_token={'content': None} in .* is neither text"),
    "another name": (config(image_token={"content": 3}), r"image_token={'content': 3} in .* is neither text"),
    "listed, a number": (
        config(extra_special_tokens=5),
        r"extra_special_tokens=5 in .* is neither a list nor an object",
    ),
    "listed, text": (config(additional_special_tokens="<x>"), r"extra_special_tokens='<x>' in .* is neither a list"),
    "listed, numbers": (config(extra_special_tokens=[5]), r"a token of extra_special_tokens=5 in .* is neither text"),
    "named, numbers": (config(extra_special_tokens={"a": 5}), r"a=5 in .*tokenizer_config.json is neither text"),
    "named, a list": (
        config(model_specific_special_tokens=[1]),
        r"model_specific_special_tokens=\[1\] in .* not an obj",
    ),
    "a switch": (config(split_special_tokens="yes"), r"split_special_tokens in .*='yes' is not allowed"),
    "a map, a list": ({"special_map": []}, r"special_tokens_map.json holds a list, not an object"),
    "a map, a number": ({"special_map": {"eos_token": 1}}, r"eos_token=1 in .*special_tokens_map.json is neither text"),
    "added, a list": ({"added": []}, r"added_tokens.json holds a list, not an object"),
    "added, text": ({"added": {"<x>": "256"}}, r"the id '256' of '<x>' in .*added_tokens.json is no token id"),
    "added, a fraction": ({"added": {"<x>": 256.0}}, r"the id 256.0 of '<x>' in .* is no token id"),
    "added, a truth value": ({"added": {"<x>": True}}, r"the id True of '<x>' in .* is no token id"),
    "added, below 0": ({"added": {"<x>": -1}}, r"the id -1 of '<x>' in .* is no token id"),
    "added, half a pair": ({"added": {"\udfff": 256}}, r"a token=.*udfff.* is neither text"),
    "too many": ({"added": {f"<{i}>": i for i in range(2**18 + 1)}}, r"added_tokens.json states 262,145 tokens; give"),
    "too many named": (
        config(extra_special_tokens=["<x>"] * (2**18 + 1)),
        r"_config.json states 262,14\d tokens; give",
    ),
    "too long": (config(eos_token="x" * (2**22 + 1)), r"add 1 tokens of 4,194,305 characters to the tokenizer; give"),
}


@pytest.mark.parametrize(("files", "message"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_statement_is_refused_by_its_name_and_file(tmp_path, files, message):
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_path(save(tmp_path, **files))


RAW = {
    "no JSON": (b"{", "is not JSON"),
    "deep": (b'{"a":' * 100_000, "is not JSON"),
    "digits": (b'{"a":' + b"9" * 5_000 + b"}", "is not JSON"),
    "no UTF-8": (b'{"a": "\xff"}', "is not text in UTF-8"),
}


@pytest.mark.parametrize(("content", "message"), RAW.values(), ids=RAW)
@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"])
def test_a_damaged_file_is_refused_by_its_name(tmp_path, name, content, message):
    save(tmp_path)
    (tmp_path / name).write_bytes(content)

    with pytest.raises(ValueError, match=f"{name} {message}"):
        Tokenizer.from_path(tmp_path)


@pytest.mark.parametrize(
    ("name", "bound"),
    [
        *((f"{name}.json", 2**26) for name in ("tokenizer_config", "special_tokens_map", "added_tokens")),
        *((f"tokenizer.{suffix}", 2**27) for suffix in ("json", "model")),
    ],
)
def test_a_huge_file_is_refused_unread(tmp_path, name, bound):
    save(tmp_path)
    if name == "tokenizer.model":
        (tmp_path / "tokenizer.json").unlink()
    with (tmp_path / name).open("wb") as file:
        file.truncate(bound + 1)

    with pytest.raises(ValueError, match=rf"{name} has more than {bound:,} bytes"):
        Tokenizer.from_path(tmp_path)


def test_tens_of_thousands_of_tokens_for_audio_are_read(tmp_path):
    count = 2**15
    tokenizer = read(save(tmp_path, added={f"<|s_{i}|>": NEW_ID + i for i in range(count)}))

    assert tokenizer.encode(f"a<|s_{count - 1}|>")[1:] == [NEW_ID + count - 1]


def test_several_tokens_without_an_end_are_named_in_few_words():
    stated = added_tokens.StatedTokens((), {f"<{i}>": i for i in range(1_000)}, {}, splits_special_tokens=False)

    assert stated.misplaced(lambda token: int(token[1:-1])) == ""
    assert stated.misplaced(lambda _: 7).endswith("'<4>' is 7, not 4, and 994 more")
