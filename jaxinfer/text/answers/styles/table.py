"""The table of styles, and which of them a chat template has."""

from __future__ import annotations

from jaxinfer.text.answers.style import Style
from jaxinfer.text.answers.styles.deepseek import DEEPSEEK
from jaxinfer.text.answers.styles.gemma import FUNCTION_GEMMA, GEMMA
from jaxinfer.text.answers.styles.harmony import HARMONY
from jaxinfer.text.answers.styles.hermes import HERMES, THINKING
from jaxinfer.text.answers.styles.llama import LLAMA
from jaxinfer.text.answers.styles.mistral import MISTRAL, MISTRAL_LIST
from jaxinfer.text.answers.styles.qwen_coder import QWEN_CODER

# A template has the first style that it may have: some have marks of a later one as well.
STYLES = {
    style.name: style
    for style in (HARMONY, GEMMA, FUNCTION_GEMMA, MISTRAL, MISTRAL_LIST, DEEPSEEK, QWEN_CODER, HERMES, LLAMA, THINKING)
}


def style_of(template: str) -> Style | None:
    """Returns the style of the model that a chat template is for, None for none of those known."""
    return next((style for style in STYLES.values() if style.is_used_by(template)), None)
