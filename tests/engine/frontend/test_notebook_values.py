"""Prompts, conversations, parameters and flags as notebooks have them: arrays, columns, rows and tables."""

from __future__ import annotations

import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

from jaxinfer import SamplingParams
from tests.engine.engines import GREEDY, drain

TEXTS, IDS = ["ab", "c d"], [[5, 6, 7], [8, 9, 10]]
FRAME = pd.DataFrame({"prompt": TEXTS, "n": [1, 2]}, index=[7, 9])
SEVERAL_TEXTS = {
    "numpy": np.array(TEXTS),
    "numpy objects": np.array(TEXTS, dtype=object),
    "pandas": FRAME["prompt"],
    "pandas objects": pd.Series(TEXTS, dtype=object),
    "pandas arrow": pd.Series(TEXTS, dtype="string[pyarrow]"),
    "arrow": pa.array(TEXTS),
    "arrow column": pa.table({"prompt": TEXTS})["prompt"],
    "arrow dictionary": pa.array(TEXTS).dictionary_encode(),
    "scalars": [np.str_(TEXTS[0]), pa.scalar(TEXTS[1])],
    "a generator": (pa.scalar(text) for text in TEXTS),
}
SEVERAL_IDS = {
    "numpy": np.array(IDS),
    "numpy rows": [np.array(ids, np.int32) for ids in IDS],
    "jax": jnp.array(IDS),
    "torch": torch.tensor(IDS),
    "pandas": pd.Series([np.array(ids) for ids in IDS]),
    "pandas objects": pd.Series(IDS).to_numpy(),
    "arrow": pa.array(IDS),
    "arrow rows": [pa.array(ids) for ids in IDS],
    "arrow scalars": list(pa.array(IDS)),
    "scalars": [[np.int64(i) for i in IDS[0]], [pa.scalar(i) for i in IDS[1]]],
}
ONE = {
    "numpy text": (np.str_("ab"), "ab"),
    "an array of one text": (np.array("ab"), "ab"),
    "an arrow text": (pa.scalar("ab"), "ab"),
    "a cell": (FRAME.iloc[0]["prompt"], "ab"),
    "numpy ids": (np.array(IDS[0]), IDS[0]),
    "pandas ids": (pd.Series(IDS[0], dtype="Int64"), IDS[0]),
    "arrow ids": (pa.array(IDS[0]), IDS[0]),
    "an arrow cell": (pa.array(IDS)[0], IDS[0]),
    "arrow scalars": ([pa.scalar(i) for i in IDS[0]], IDS[0]),
    "jax ids": (jnp.array(IDS[0]), IDS[0]),
}


def tokens_of(completions: list[Any]) -> list[Any]:
    return [(completion.prompt_token_ids, completion.token_ids) for completion in completions]


@pytest.mark.parametrize("kind", SEVERAL_TEXTS)
def test_several_texts_are_those_of_a_list(llm, kind):
    completions = llm.generate(SEVERAL_TEXTS[kind], GREEDY, show_progress=np.False_)

    assert tokens_of(completions) == tokens_of(llm.generate(TEXTS, GREEDY, show_progress=False))


@pytest.mark.parametrize("kind", SEVERAL_IDS)
def test_several_lists_of_ids_are_those_of_python(llm, kind):
    completions = llm.generate(SEVERAL_IDS[kind], GREEDY, show_progress=pa.scalar(False))

    assert tokens_of(completions) == tokens_of(llm.generate(IDS, GREEDY, show_progress=False))


@pytest.mark.parametrize("kind", ONE)
def test_one_prompt_is_that_of_python(llm, kind):
    prompt, plain = ONE[kind]
    expected = tokens_of(llm.generate(plain, GREEDY, show_progress=False))

    llm.add(prompt, GREEDY)
    deltas = [*drain(llm), *llm.stream(prompt, GREEDY)]

    assert tokens_of(llm.generate(prompt, GREEDY, show_progress=False)) == expected
    assert tokens_of([delta.completion for delta in deltas if delta.completion]) == expected * 2
    (vector,) = llm.embed(prompt, normalize=pa.scalar(True), show_progress=np.array(False))
    np.testing.assert_array_equal(vector, llm.embed(plain, show_progress=False)[0])


@pytest.mark.parametrize("collect", [lambda p: np.array(p, dtype=object), pd.Series, tuple])
def test_parameters_are_those_of_a_list(llm, collect):
    plain: dict[str, Any] = {"temperature": np.float32(0), "ignore_eos": np.True_}
    params = [SamplingParams(max_tokens=n, **plain) for n in np.array([2, 3])]

    completions = llm.generate(TEXTS, collect(params), show_progress=False)

    assert [len(completion.token_ids) for completion in completions] == [2, 3]
    json.dumps([completion.token_ids for completion in completions])


def test_options_are_those_of_python(llm):
    options = {"priority": np.str_("batch"), "tenant": pa.scalar("a"), "cache_salt": np.array("b")}

    (completion,) = llm.generate("ab", GREEDY, show_progress=False, deadline=np.float32(600), **options)

    assert tokens_of([completion]) == tokens_of(llm.generate("ab", GREEDY, show_progress=False))


def test_a_request_is_branched_by_numbers_of_numpy(llm):
    request_id = llm.add("ab", SamplingParams(max_tokens=6, ignore_eos=True))
    for _ in range(4):
        llm.step()
    branch = llm.fork(np.int64(request_id), seed=np.uint64(5))
    llm.rewind(np.int64(branch), np.int64(1), seed=np.int64(6))
    llm.abort(np.array([request_id])[0])

    (seed,) = [delta.completion.seed for delta in drain(llm) if delta.request_id == branch and delta.completion]

    assert (seed, type(seed)) == (6, int)


USER, ASSISTANT = {"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}
CONVERSATION = [USER, ASSISTANT]
MESSAGES = pd.DataFrame(CONVERSATION)
TEMPLATE = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}{{ tools[0].name }}{{ x }}"
# As pandas and PyArrow read a Parquet file with a column of conversations.
COLUMN = pa.array([CONVERSATION, [USER]])
CELLS = COLUMN.to_pandas()
ONE_CONVERSATION = {
    "numpy": np.array(CONVERSATION, dtype=object),
    "a cell of pandas": CELLS[0],
    "a cell of PyArrow": COLUMN[0],
    "a table of pandas": MESSAGES,
    "a table of PyArrow": pa.Table.from_pandas(MESSAGES),
    "rows of pandas": [row for _, row in MESSAGES.iterrows()],
    "rows of PyArrow": list(pa.array(CONVERSATION)),
    "a column of messages": pd.Series(CONVERSATION),
    "texts of numpy": [{key: np.str_(text) for key, text in message.items()} for message in CONVERSATION],
    "texts of PyArrow": [{key: pa.scalar(text) for key, text in message.items()} for message in CONVERSATION],
}
SEVERAL_CONVERSATIONS = {
    "a column of pandas": CELLS,
    "an array": CELLS.to_numpy(),
    "a column of PyArrow": COLUMN,
    "a chunked column": pa.chunked_array([COLUMN]),
    "cells": list(COLUMN),
    "tables": [MESSAGES, MESSAGES.iloc[:1]],
    "columns": [pd.Series(CONVERSATION), pd.Series([USER])],
}


def chat(llm: Any, messages: Any, **options: Any) -> list[Any]:
    arguments: dict[str, Any] = {"chat_template": TEMPLATE, "show_progress": False, "tools": [{"name": "f"}], **options}
    return tokens_of(llm.chat(messages, GREEDY, **arguments))


@pytest.mark.parametrize("kind", ONE_CONVERSATION)
def test_a_conversation_is_that_of_a_list(llm, kind):
    assert chat(llm, ONE_CONVERSATION[kind]) == chat(llm, CONVERSATION)


@pytest.mark.parametrize("kind", SEVERAL_CONVERSATIONS)
def test_several_conversations_are_those_of_a_list(llm, kind):
    assert chat(llm, SEVERAL_CONVERSATIONS[kind]) == chat(llm, [CONVERSATION, [USER]])


@pytest.mark.parametrize(
    ("options", "plain"),
    [
        ({"tools": np.array([{"name": "g"}], dtype=object)}, {"tools": [{"name": "g"}]}),
        ({"tools": pd.DataFrame([{"name": "g"}])}, {"tools": [{"name": "g"}]}),
        ({"chat_template_kwargs": {"x": np.int64(5)}}, {"chat_template_kwargs": {"x": 5}}),
        ({"chat_template_kwargs": pd.Series({"x": "y"})}, {"chat_template_kwargs": {"x": "y"}}),
        ({"chat_template_kwargs": {"x": pa.array(["y"])}}, {"chat_template_kwargs": {"x": ["y"]}}),
        ({"chat_template": np.str_("{{ messages }}{{ tools }}")}, {"chat_template": "{{ messages }}{{ tools }}"}),
        ({"chat_template": pa.scalar("{{ tools }}")}, {"chat_template": "{{ tools }}"}),
        ({"add_generation_prompt": np.False_}, {"add_generation_prompt": False}),
    ],
)
def test_arguments_of_a_conversation_are_those_of_python(llm, options, plain):
    assert chat(llm, CONVERSATION, **options) == chat(llm, CONVERSATION, **plain)


def test_a_conversation_is_continued_by_a_flag_of_numpy(llm):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    options = {"chat_template": template, "tools": None}
    assert chat(llm, CONVERSATION, continue_final_message=np.True_, **options) == chat(llm, CONVERSATION, **options)


NO_VALUES = [None, np.nan, pd.NA, pd.NaT, pa.scalar(None, pa.string())]


@pytest.mark.parametrize("value", NO_VALUES, ids=repr)
def test_a_prompt_without_a_value_is_refused_by_its_number(llm, value):
    for prompts in (["ab", value], pd.Series(["ab", value], dtype=object)):
        with pytest.raises(ValueError, match="^prompt 1: prompt .* is a missing value; drop its row or fill it$"):
            llm.generate(prompts, GREEDY, show_progress=False)
    with pytest.raises(ValueError, match="^prompt .* is a missing value; drop its row or fill it$"):
        llm.add(value, GREEDY)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (pd.Series([CONVERSATION, None]), "conversation 1: messages .* is a missing value; drop its row or fill it"),
        (pa.array([None, CONVERSATION]), "conversation 0: messages None is a missing value"),
        (pd.DataFrame([USER, {"role": "user"}]), r"conversation 0: messages\[1\].content nan is a missing value; fill"),
        ([CONVERSATION, [{"role": "user", "content": pd.NA}]], r"conversation 1: messages\[0\].content <NA> is a mi"),
        (
            [[{"role": "user", "content": [{"text": np.nan}]}]],
            r"conversation 0: .*\[0\].text nan is a missing",
        ),
        (pd.Series(["ab"]), r"conversation 0: messages='ab' is not allowed: messages must be a list of mappings"),
    ],
    ids=range(6),
)
def test_a_conversation_without_a_value_is_refused_by_its_number(llm, messages, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        chat(llm, messages)


def test_a_prompt_may_be_a_mapping_with_text_or_token_ids(llm):
    ids = llm.tokenizer.encode("def add(")
    prompts = ["def add(", {"prompt": "def add("}, {"prompt_token_ids": ids}, {"prompt_token_ids": np.array(ids)}]

    completions = llm.generate(prompts, GREEDY, show_progress=False)

    assert len({(c.prompt_token_ids, c.token_ids) for c in completions}) == 1
    assert llm.generate(prompts[1], GREEDY, show_progress=False)[0].token_ids == completions[0].token_ids


@pytest.mark.parametrize(
    "prompt",
    [
        *({"prompt": "a", "multi_modal_data": {}}, {"prompt_embeds": [0.5]}, {}, {"prompt": None}),
        *({"prompt_token_ids": []}, {"prompt": "a", "prompt_token_ids": [5]}),
    ],
    ids=repr,
)
def test_a_mapping_of_another_form_is_refused(llm, prompt):
    with pytest.raises(
        ValueError, match="^prompts? .* (is neither text nor|are neither text, nor|has [02] of prompt and|is empty)"
    ):
        llm.generate(prompt, GREEDY, show_progress=False)


@pytest.mark.parametrize("table", [FRAME, pa.Table.from_pandas(FRAME)])
def test_a_table_of_prompts_is_refused_with_the_way_out(llm, table):
    with pytest.raises(
        ValueError, match="^prompt 0: prompt .* is neither text nor .*; leave out .*, or give one column of a table$"
    ):
        llm.generate(table, GREEDY, show_progress=False)


def test_parameters_without_a_value_are_refused_by_their_number(llm):
    with pytest.raises(ValueError, match="^prompt 1: sampling_params=nan is not a SamplingParams"):
        llm.generate(TEXTS, pd.Series([GREEDY, np.nan]), show_progress=False)
