"""Bodies and answers of labels and scores: /classify and /score as vLLM has them, /rerank as Jina and Cohere do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, BeforeValidator, Field

from jaxinfer.openai.answers import Usage
from jaxinfer.openai.bodies import MAX_PROMPTS, Integer, Prompts, ReadingBody, Text, TokenIds
from jaxinfer.validation import cut

Several = Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]


class ClassifyBody(ReadingBody):
    """The body of /classify."""

    input: Text | TokenIds | Prompts
    activate: bool = True


class ScoringBody(ReadingBody):
    """What the bodies of scores have in common: see `LLM.score`."""

    instruction: Text | None = None
    chat_template: Text | None = None
    answer_tokens: Annotated[list[Text], Field(min_length=1, max_length=2)] | None = None
    activate: bool = True

    def options(self) -> dict[str, Any]:
        """Returns the arguments of `AsyncLLM.score` beside texts and template."""
        return {name: getattr(self, name) for name in ("instruction", "answer_tokens", "activate")}


class ScoreBody(ScoringBody):
    """The body of /score: a text and others, or pairs of texts."""

    text_1: Text | Several
    text_2: Text | Several

    @property
    def documents(self) -> list[str]:
        return [self.text_2] if isinstance(self.text_2, str) else self.text_2


def _text_of(document: Any) -> Any:
    """Returns the text of a document: itself, or that of an object with a text alone."""
    if not isinstance(document, dict):
        return document
    if document.keys() != {"text"}:
        names = ", ".join(sorted(cut(str(name)) for name in document))
        raise ValueError(f"a document has {names}, and only a text is read; give its text")
    return document["text"]


class RerankBody(ScoringBody):
    """The body of /rerank."""

    query: Text
    documents: Annotated[
        list[Annotated[Text, BeforeValidator(_text_of)]], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)
    ]
    top_n: Annotated[Integer, Field(ge=0)] | None = None  # 0: all
    return_documents: bool = True


class Label(BaseModel):
    """The most probable label of one input, with the numbers of all."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyAnswer(BaseModel):
    """The answer of /classify."""

    object: Literal["list"]
    model: str
    data: list[Label]
    usage: Usage


class Score(BaseModel):
    """The score of one pair."""

    index: int
    object: Literal["score"]
    score: float


class ScoreAnswer(BaseModel):
    """The answer of /score."""

    object: Literal["list"]
    model: str
    data: list[Score]
    usage: Usage


class Document(BaseModel):
    """A document with its text."""

    text: str


class Ranked(BaseModel):
    """A document with its place in the request."""

    index: int
    relevance_score: float
    document: Document | None = None


class RerankAnswer(BaseModel):
    """The answer of /rerank, the best document first."""

    model: str
    results: list[Ranked]
    usage: Usage


def usage_of_prompts(num_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": num_tokens, "completion_tokens": 0, "total_tokens": num_tokens}


def labelled(numbers: np.ndarray, labels: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the `Label` of each row of numbers f32[n, labels]."""
    return [
        {"index": index, "label": labels[int(row.argmax())], "probs": row.tolist(), "num_classes": len(labels)}
        for index, row in enumerate(numbers)
    ]


def scored(scores: np.ndarray) -> list[Mapping[str, Any]]:
    return [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores.tolist())]


def ranked(scores: np.ndarray, body: RerankBody) -> list[dict[str, Any]]:
    """Returns the `top_n` best documents, the first of equal ones first."""
    order = np.argsort(-scores, kind="stable")[: body.top_n or len(scores)]
    texts = body.documents if body.return_documents else None
    return [
        {"index": i, "relevance_score": float(scores[i])} | ({} if texts is None else {"document": {"text": texts[i]}})
        for i in order.tolist()
    ]
