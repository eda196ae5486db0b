"""Tokenizers saved as vocab.json and merges.txt alone: the byte-level BPE of the class that the files name.

transformers builds the same from these files; slow tokenizers of earlier versions wrote no others.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from jaxinfer.text.backends.gguf_vocabulary import BY_DIGITS
from jaxinfer.text.files import check_size, read_object
from jaxinfer.validation import shown

logger = logging.getLogger(__name__)

MISTRAL_FILE = "tekken.json"
VOCABULARY, MERGES = "vocab.json", "merges.txt"
UNKNOWN = "<|endoftext|>"  # the default of both classes
GPT_2, QWEN_2 = "GPT2Tokenizer", "Qwen2Tokenizer"
# The class by model_type, if tokenizer_config.json names none.
CLASSES = {"qwen2": QWEN_2, "qwen2_moe": QWEN_2, "qwen3": QWEN_2, "qwen3_moe": QWEN_2, "qwen3_next": QWEN_2}


def load_vocabulary_and_merges(folder: Path) -> tokenizers.Tokenizer | None:
    """Returns the tokenizer of a folder without added tokens; ValueError for damaged files.

    None without the two files, and with a warning for those of another class, and for a folder with tekken.json alone.
    """
    if not all((folder / name).is_file() for name in (VOCABULARY, MERGES)):
        if (folder / MISTRAL_FILE).is_file():
            logger.warning(
                "%s has %s, which is not read; %s writes tokenizer.json", folder, MISTRAL_FILE, _way_out(folder)
            )
        return None
    config = read_object(folder / "tokenizer_config.json")
    name = config.get("tokenizer_class") or CLASSES.get(str(read_object(folder / "config.json").get("model_type")))
    kind = name.removesuffix("Fast") if isinstance(name, str) else name
    if kind not in (GPT_2, QWEN_2):
        logger.warning(
            "%s has %s and %s, which are read for tokenizer_class %s or %s, not %s; %s writes tokenizer.json",
            *(folder, VOCABULARY, MERGES, GPT_2, QWEN_2, shown(name), _way_out(folder)),
        )
        return None
    for file in (folder / VOCABULARY, folder / MERGES):
        check_size(file)
    try:
        model: Any = models.BPE.from_file(str(folder / VOCABULARY), str(folder / MERGES))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises nothing more specific
        raise ValueError(f"{VOCABULARY} and {MERGES} in {folder} are damaged ({error}); download them again") from None
    tokenizer = tokenizers.Tokenizer(model)
    has_prefix = config.get("add_prefix_space") or False
    if not isinstance(has_prefix, bool):
        raise ValueError(f"add_prefix_space={shown(has_prefix)} in {folder} is neither true nor false; correct it")
    tokenizer.decoder = decoders.ByteLevel()
    if tokenizer.token_to_id(UNKNOWN) is not None:
        tokenizer.add_special_tokens([AddedToken(UNKNOWN, normalized=False, special=True)])
    if kind == GPT_2:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=has_prefix)
        return tokenizer
    tokenizer.normalizer = normalizers.NFC()
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=has_prefix, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(BY_DIGITS), "isolated"), spelled])
    return tokenizer


def _way_out(folder: Path) -> str:
    return f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r}) of transformers"
