"""An LLM, a completion, metrics and a timeline show themselves in a notebook."""

from __future__ import annotations

import dataclasses

from tests.display.test_html import Page
from tests.engine.engines import GREEDY, generate


def test_objects_of_an_engine_show_themselves(llm):
    with llm.timeline() as timeline:
        (completion,) = generate(llm, [[5, 6, 7]], dataclasses.replace(GREEDY, log_probs=2))
    metrics, view, memory = llm.metrics(), llm.show(completion), llm.warm_up().memory

    assert Page(llm._repr_html_()).text.startswith(repr(llm))
    assert f"parameters {memory.resident_bytes / 1e6:,.1f} MB" in Page(llm._repr_html_()).text
    assert Page(llm.warm_up()._repr_html_()).text.endswith(Page(memory._repr_html_()).text)
    shown = Page(metrics._repr_html_()).text
    assert all(f"{field.name}{getattr(metrics, field.name)}" in shown for field in dataclasses.fields(metrics))
    for phase in ("queue", "prefill", "decode"):
        assert f"request {completion.request_id}: {phase}, " in Page(timeline._repr_html_()).text
    assert view.tokens == tuple(llm.tokenizer.text_of(token_id) for token_id in completion.token_ids)
    assert view.log_probs == completion.log_probs
    assert [title.count("\n") for title in Page(view._repr_html_()).titles()] == [2] * len(completion.token_ids)
