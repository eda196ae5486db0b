"""A random model that can write the marks of every style."""

from __future__ import annotations

from pathlib import Path

import tokenizers

from jaxinfer.text.answers.styles.table import STYLES
from jaxinfer.text.tokenizer import Tokenizer
from tests.oracles import save_random_checkpoint


def save_checkpoint_with_marks(folder: Path) -> Path:
    """Saves a random model with the bundled tokenizer, to which the marks of all styles are added as special tokens."""
    backend = tokenizers.Tokenizer.from_file("jaxinfer/assets/tiny/tokenizer.json")
    backend.add_special_tokens(sorted({mark for style in STYLES.values() for mark in style.marks}))
    save_random_checkpoint(folder, "llama", eos_token_id=0, vocab_size=backend.get_vocab_size())
    backend.save(str(folder / "tokenizer.json"))
    return folder


def bias_to_end(tokenizer: Tokenizer, style: str) -> dict[int, float]:
    """Returns biases with which the marks that end something come when they can, so that no reasoning goes on."""
    ends = [mark for mark in STYLES[style].marks if "/" in mark or "end" in mark or mark.endswith("|>")]
    ids = [tokenizer.token_to_id(mark) for mark in ends]
    return {token_id: 50.0 for token_id in ids if token_id is not None} | {0: 50.0}
