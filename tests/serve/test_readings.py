"""Labels and scores over HTTP are those of `LLM`, in the forms of vLLM, Jina and Cohere."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from jaxinfer.engine.async_llm import AsyncLLM
from tests.engine.engines import save_small_checkpoint
from tests.engine.whole.test_scores import (
    ASKED,
    DOCUMENTS,
    PROMPTS,
    QUERY,
    QUIET,
    TEMPLATE,
    save_classifier,
    small_engine,
)
from tests.serve.servers import NAME, serving

ASKING = {"model": NAME, "answer_tokens": ["y", "n"]}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_small_checkpoint(tmp_path_factory.mktemp("reranker"), family="qwen3")


@pytest.fixture(scope="module")
def scores(checkpoint):
    with small_engine(checkpoint) as llm:
        return llm.score(QUERY, DOCUMENTS, **ASKED, **QUIET).tolist()


@pytest.fixture(scope="module")
def http(checkpoint):
    llm = small_engine(checkpoint, make=AsyncLLM)
    with serving(llm, chat_template=TEMPLATE) as (_, address), httpx.Client(base_url=address, timeout=60) as client:
        yield client


def answered(client: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_pairs_are_scored(http, scores, path):
    answer = answered(http, path, **ASKING, text_1=QUERY, text_2=DOCUMENTS)

    assert answer["object"] == "list"
    assert answer["model"] == NAME
    assert [(item["index"], item["object"]) for item in answer["data"]] == [(i, "score") for i in range(5)]
    assert [item["score"] for item in answer["data"]] == scores
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == sum(map(len, PROMPTS))


def test_each_text_may_have_its_own(http, scores):
    answer = answered(http, "/score", **ASKING, text_1=[QUERY] * 2, text_2=DOCUMENTS[1:3])

    assert [item["score"] for item in answer["data"]] == scores[1:3]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_come_in_the_order_of_their_scores(http, scores, path):
    documents = [DOCUMENTS[0], *({"text": text} for text in DOCUMENTS[1:])]
    order = sorted(range(5), key=lambda i: -scores[i])

    whole = answered(http, path, **ASKING, query=QUERY, documents=documents)
    best = answered(http, path, **ASKING, query=QUERY, documents=documents, top_n=2, return_documents=False)

    assert [item["index"] for item in whole["results"]] == order
    assert [item["relevance_score"] for item in whole["results"]] == [scores[i] for i in order]
    assert [item["document"]["text"] for item in whole["results"]] == [DOCUMENTS[i] for i in order]
    assert best["results"] == [{"index": i, "relevance_score": scores[i]} for i in order[:2]]


def test_a_classifier_labels_inputs(tmp_path):
    path = save_classifier(tmp_path, "llama", 3)
    with small_engine(path) as llm:
        expected = llm.classify(PROMPTS, **QUIET)

    server = serving(small_engine(path, make=AsyncLLM))
    with server as (_, address), httpx.Client(base_url=address, timeout=60) as client:
        data = answered(client, "/classify", model=NAME, input=PROMPTS)["data"]
        refused = client.post("/score", json={"model": NAME, "text_1": QUERY, "text_2": "a"})

    assert [item["probs"] for item in data] == expected.tolist()
    assert [item["label"] for item in data] == [f"label {row.argmax()}" for row in expected]
    assert {item["num_classes"] for item in data} == {3}
    assert refused.status_code == 400
    assert "this classifier has 3 labels" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "word"),
    [
        ("/score", {"text_1": QUERY}, "text_2"),
        ("/score", {"text_1": QUERY, "text_2": []}, "text_2"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "2 queries do not go with 3 documents"),
        ("/score", {"text_1": QUERY, "text_2": "a" * 99}, "prompt"),
        ("/score", {"text_1": QUERY, "text_2": "a", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ("/rerank", {"query": QUERY, "documents": ["a"], "top_n": -1}, "top_n"),
        ("/rerank", {"query": QUERY, "documents": [{"text": "a", "title": "b"}]}, "title"),
        ("/rerank", {"query": QUERY, "documents": ["a"], "chat_template": TEMPLATE}, "chat_template"),
        ("/rerank", {"query": QUERY, "documents": ["a"], "answer_tokens": ["yes", "no"]}, "answer_tokens"),
        ("/classify", {"input": "a"}, "no classifier"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(http, path, body, word):
    response = http.post(path, json={**ASKING, **body} if path != "/classify" else {"model": NAME, **body})

    assert response.status_code == 400
    assert word in response.json()["error"]["message"]


def test_a_score_beyond_its_deadline_is_one_too_late(http):
    response = http.post("/score", json={**ASKING, "text_1": QUERY, "text_2": DOCUMENTS, "deadline": 1e-9})

    assert response.status_code == 408
