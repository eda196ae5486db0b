"""`text_offset` is the place of each token in the text of its choice."""

from __future__ import annotations

from typing import Any

import pytest

from jaxinfer.engine.request.completion import Completion
from jaxinfer.openai.answers import completion_choice
from jaxinfer.openai.bodies import CompletionBody
from jaxinfer.text.tokenizer import Tokenizer

BEGIN = "<|endoftext|>"


@pytest.fixture(scope="module")
def tokenizer():
    found = Tokenizer.from_path("jaxinfer/assets/tiny")
    assert found is not None
    return found


def choice_of(tokenizer: Tokenizer, prompt: Any, output: str, **fields: Any) -> tuple[str, list[tuple[str, int]]]:
    """Returns the text of an echo, and its tokens with their offsets."""
    body = CompletionBody.model_validate({"model": "m", "prompt": prompt, "echo": True, "logprobs": 1, **fields})
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    output_ids = tokenizer.encode(output, add_special_tokens=False)
    skips = fields.get("skip_special_tokens", True)
    completion = Completion(
        request_id=0,
        prompt_token_ids=tuple(ids),
        text=tokenizer.decode(output_ids, skip_special_tokens=skips),
        token_ids=tuple(output_ids),
        log_probs=(-1.0,) * len(output_ids),
        top_log_probs=({},) * len(output_ids),
        prompt_log_probs=(None, *[-1.0] * (len(ids) - 1)),
        prompt_top_log_probs=({},) * len(ids),
        finish_reason="length",
        seed=0,
    )
    choice = completion_choice(completion, 0, body, tokenizer)
    return choice["text"], list(zip(choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True))


@pytest.mark.parametrize(
    ("prompt", "output", "fields"),
    [
        ("def add(a, b):", "\n    return a", {}),
        ("import os\n", "import sys", {}),
        ("a" + BEGIN + "b", " = 1", {}),
        (BEGIN + BEGIN, "x", {}),
        ("x = ", "1" + BEGIN + "2", {}),
        ("x = ", "1" + BEGIN + "2", {"skip_special_tokens": False}),
    ],
)
def test_the_text_goes_on_with_a_token_from_its_offset_on(tokenizer, prompt, output, fields):
    text, offsets = choice_of(tokenizer, prompt, output, **fields)

    for token, offset in offsets:
        assert text.startswith(token, offset) or token == BEGIN
    assert [offset for _, offset in offsets] == sorted(offset for _, offset in offsets)
    assert text.startswith(prompt)


def test_the_output_begins_behind_the_prompt(tokenizer):
    text, offsets = choice_of(tokenizer, tokenizer.encode("a = "), "é 😀 1")

    assert text == "a = é 😀 1"
    num_prompt = len(tokenizer.encode("a = "))
    assert offsets[num_prompt][1] == 4
    # Each token that goes on with a character has that character's place.
    assert {text[offset] for token, offset in offsets if "\N{REPLACEMENT CHARACTER}" in token} <= {"é", "😀"}
