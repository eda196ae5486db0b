"""Tokenizers and chat templates of `transformers`, as vLLM's functions return them."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def get_tokenizer(name: str | Path, *_: Any, **options: Any) -> Any:
    """Returns the tokenizer of `transformers` for a checkpoint, as vLLM's function of this name does."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ValueError("vLLM's tokenizers are those of transformers; pip install transformers") from None
    options.pop("tokenizer_mode", None)
    return AutoTokenizer.from_pretrained(name, **options)


def resolve_chat_template(tokenizer: Any, chat_template: str | None = None, *_: Any, **__: Any) -> str | None:
    """Returns the template that a tokenizer of `transformers` would use."""
    return chat_template or tokenizer.chat_template
