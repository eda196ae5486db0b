"""The shapes of published models by name, as their config.json has them, for plans and tests without any file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxinfer.checkpoint.formats.described import DescribedCheckpoint
from jaxinfer.checkpoint.published import llama_qwen_gemma, others
from jaxinfer.model.config import ModelConfig
from jaxinfer.validation import shown

PUBLISHED: Mapping[str, Mapping[str, Any]] = {**llama_qwen_gemma.MODELS, **others.MODELS}


def published_config(name: str) -> ModelConfig:
    """Returns the description of one of PUBLISHED; upper and lower case are the same. Raises ValueError for others."""
    return published_checkpoint(name).config


def published_checkpoint(name: str) -> DescribedCheckpoint:
    """Returns one of PUBLISHED, packed as its publisher packs it; raises as `published_config` does."""
    by_lower = {known.lower(): known for known in PUBLISHED}
    known = by_lower.get(name.lower())
    if known is None:
        raise ValueError(f"model {shown(name)} is not built in; give one of {', '.join(PUBLISHED)}")
    return DescribedCheckpoint(Path(known), PUBLISHED[known])
