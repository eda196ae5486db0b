"""The text model of a checkpoint that also reads images: its part of config.json and of the tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxinfer.checkpoint.config_json.family import Family, refuse_unsupported
from jaxinfer.model.config import ModelConfig

# The names of published checkpoints and transformers 4, those of transformers 5, and those of the backbone alone.
SPELLINGS: tuple[Mapping[str, str], ...] = (
    {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
    {"model.": "model.language_model."},
    {"model.": "language_model."},
)
TEXT = "text_config"


def text_model_family(
    family: Family,
    *,
    architecture: str,
    model_type: str,
    others: Mapping[str, Family] | None = None,
    sizes: Mapping[str, int] | None = None,
    parts: tuple[str, ...] = ("vision_tower", "multi_modal_projector"),
) -> Family:
    """Returns the family of checkpoints whose text model is of `family`, and is all of them that is loaded.

    `architecture` is the whole model's, `model_type` the text model's. The text model may be of the `others` too, by
    their model types, if its tensors have the same names. `sizes` are those that config.json may leave out. `parts` are
    the names of the other models.
    """
    families = {model_type: family, **(others or {})}

    def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
        refuse_unsupported(hf, architecture)
        text = hf.get(TEXT)
        if not isinstance(text, Mapping):
            raise ValueError(f"text_config={text!r} is not an object; download the checkpoint's config.json again")
        stated = text.get("model_type", model_type)
        if not isinstance(stated, str) or stated not in families:
            raise ValueError(
                f"model_type={stated!r} of text_config is not supported; use a checkpoint with"
                f" {' or '.join(map(repr, families))}"
            )
        # If the whole model states ties, the text model has those.
        ties = {key: hf[key] for key in ("tie_word_embeddings",) if key in hf}
        try:
            return families[stated].config_from_hf({**(sizes or {}), **text, **ties})
        except ValueError as error:
            raise ValueError(f"text_config: {error}") from None

    skipped = tuple(f"{prefix}{part}." for prefix in ("", "model.") for part in parts)
    return replace(family, config_from_hf=config_from_hf, spellings=SPELLINGS, skipped=skipped, text_key=TEXT)
