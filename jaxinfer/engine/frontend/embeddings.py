"""Embeddings, labels and scores of texts: what is computed from their pooled hidden states."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxinfer.checkpoint import Checkpoint
from jaxinfer.checkpoint.state_head import StateHead, sigmoid
from jaxinfer.engine.frontend.sample_group import SampleGroup
from jaxinfer.engine.request.completion import Completion, FinishReason
from jaxinfer.engine.request.state_pooling import POOLINGS, StatePooling
from jaxinfer.model.components.layers import take_rows
from jaxinfer.model.config import ModelConfig
from jaxinfer.model.params import Params
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.validation import as_bool, as_tuple, require, require_name, shown

ANSWERS = ("yes", "no")  # of rerankers that state no others
# Yang et al. 2025, "Qwen3 Embedding": the prompt of its rerankers.
RERANKER_TEMPLATE = """\
{%- set system = messages | selectattr("role", "equalto", "system") | map(attribute="content") | list -%}
{%- set query = messages | selectattr("role", "equalto", "query") | map(attribute="content") | first -%}
{%- set document = messages | selectattr("role", "equalto", "document") | map(attribute="content") | first -%}
{%- set usual = "Given a web search query, retrieve relevant passages that answer the query" -%}
{{- '<|im_start|>system\\nJudge whether the Document meets the requirements based on the Query and the Instruct' -}}
{{- ' provided. Note that the answer can only be "yes" or "no".<|im_end|>\\n<|im_start|>user\\n<Instruct>: ' -}}
{{- (system[0] if system else usual) + '\\n<Query>: ' + query + '\\n<Document>: ' + document -}}
{{- '<|im_end|>\\n<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' -}}"""
MARK_OF_TEMPLATE = "<|im_start|>"


class NoEmbeddingError(RuntimeError):
    """A prompt has no embedding, because its request ended with this finish reason before its states were there."""

    def __init__(self, message: str, finish_reason: FinishReason) -> None:
        super().__init__(message)
        self.finish_reason = finish_reason


def begin_pooling(samples: SampleGroup, pooling: str) -> StatePooling:
    """Makes a prompt's only request pool its states; returns the pooling, which has the result in the end."""
    (request,) = samples.requests
    request.pooling = StatePooling(request.num_prompt_tokens, pooling)
    request.is_plain = False
    if request.pooling.is_mean:
        request.keys = None  # tokens found in a cache would have no states
    return request.pooling


def states_of(completions: Sequence[Completion], poolings: Sequence[StatePooling]) -> list[np.ndarray]:
    """Returns the pooled state f64[D] of each prompt.

    Raises NoEmbeddingError for a prompt that ended before its states were there, or with bad logits.
    """
    states = []
    for i, (completion, pooling) in enumerate(zip(completions, poolings, strict=True)):
        if completion.error is not None or pooling.pooled is None:
            cause = completion.error or f"its request ended with finish reason {completion.finish_reason!r}"
            raise NoEmbeddingError(f"prompt {i} has no embedding: {cause}", completion.finish_reason)
        states.append(pooling.pooled)
    return states


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What is wanted of texts: their `prompts`, how their states are pooled, and the function of the pooled states."""

    prompts: Any
    pooling: str
    result: Callable[[list[np.ndarray]], np.ndarray]


class StateReader:
    """Makes embeddings, labels and scores of a checkpoint's own kind, for `LLM` and `AsyncLLM`.

    `params` returns the present parameters, of which scores by tokens read two rows.
    """

    def __init__(
        self, checkpoint: Checkpoint, config: ModelConfig, tokenizer: Tokenizer | None, params: Callable[[], Params]
    ) -> None:
        self._checkpoint, self._config, self._tokenizer, self._params = checkpoint, config, tokenizer, params

    @property
    def _head(self) -> StateHead:
        return self._checkpoint.head

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of a classifier's labels; () of another model."""
        return self._head.labels

    @property
    def vector_size(self) -> int:
        """The numbers of an embedding by the checkpoint's own modules."""
        return self._head.dense[-1].weight.shape[0] if self._head.dense else self._config.hidden_size

    def embedding(self, prompts: Any, pooling: str | None, normalize: bool) -> Reading:
        """Returns the reading of vectors f32[n, vector_size], see `LLM.embed`."""
        normalize, D = as_bool("normalize", normalize), self._config.hidden_size
        if pooling is not None:
            require_name("pooling", pooling, POOLINGS)
        head, size = (self._head, self.vector_size) if pooling is None else (StateHead(pooling=pooling), D)
        result = partial(_vectors, head, size=size, normalize=normalize)
        return Reading(prompts=prompts, pooling=head.pooling, result=result)

    def classification(self, prompts: Any, activate: bool) -> Reading:
        """Returns the reading of labels f32[n, labels], see `LLM.classify`."""
        activate, head = as_bool("activate", activate), self._head
        classifier = head.classifier
        if classifier is None:
            raise ValueError(
                "this checkpoint has no classifier; use one whose architecture ends in ForSequenceClassification"
            )

        def result(states: list[np.ndarray]) -> np.ndarray:
            logits = _rows([classifier(state.astype(np.float32)) for state in states], len(head.labels))
            return head.activated(logits) if activate else logits

        return Reading(prompts=prompts, pooling=head.pooling, result=result)

    def scoring(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        instruction: str | None = None,
        chat_template: str | None = None,
        answer_tokens: Sequence[str] | None = None,
        activate: bool = True,
    ) -> Reading:
        """Returns the reading of scores f32[len(documents)], see `LLM.score`."""
        activate, pairs = as_bool("activate", activate), _pairs(queries, documents)
        head = self._head
        if head.classifier is None and not self._config.has_logits:
            given = {"instruction": instruction, "chat_template": chat_template, "answer_tokens": answer_tokens}
            if unused := [name for name, value in given.items() if value is not None]:
                raise ValueError(
                    f"{unused[0]}={shown(given[unused[0]])} cannot be honoured: this checkpoint is an embedding model,"
                    " whose scores are cosines; leave it out"
                )
            return self._similarity(pairs)
        if head.classifier is not None and answer_tokens is not None:
            raise ValueError("answer_tokens cannot be honoured: the classifier of this checkpoint scores; leave it out")
        if head.classifier is not None and len(head.labels) != 1:
            raise ValueError(f"a score is one number, and this classifier has {len(head.labels)} labels; use classify")
        prompts = self._prompts(pairs, instruction, chat_template)
        if head.classifier is not None:
            labels = self.classification(prompts, activate)
            return Reading(prompts=prompts, pooling=labels.pooling, result=lambda states: labels.result(states)[:, 0])
        ids = self._answer_ids(answer_tokens)

        def result(states: list[np.ndarray]) -> np.ndarray:
            logits = self._logits(states, ids)
            scores = logits[:, 0] - (logits[:, 1] if len(ids) > 1 else 0)
            return sigmoid(scores) if activate else scores

        return Reading(prompts=prompts, pooling="last", result=result)

    def _similarity(self, pairs: list[tuple[str, str]]) -> Reading:
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        place = {text: i for i, text in enumerate(texts)}
        vectors = self.embedding(texts, None, normalize=True)

        def result(states: list[np.ndarray]) -> np.ndarray:
            found = vectors.result(states).astype(np.float64)
            cosines = [np.multiply(found[place[query]], found[place[document]]).sum() for query, document in pairs]
            return np.array(cosines, np.float32)

        return Reading(prompts=texts, pooling=vectors.pooling, result=result)

    def _prompts(
        self, pairs: list[tuple[str, str]], instruction: str | None, chat_template: str | None
    ) -> list[list[int]]:
        require(instruction is None or isinstance(instruction, str), "instruction", instruction, "text or None")
        if self._tokenizer is None:
            raise ValueError("this checkpoint has no tokenizer, and scores are of texts; add its tokenizer.json")
        template = self._template(self._tokenizer, chat_template)
        first = [] if instruction is None else [{"role": "system", "content": instruction}]
        prompts = []
        for query, document in pairs:
            messages = [*first, {"role": "query", "content": query}, {"role": "document", "content": document}]
            text = self._tokenizer.chat_templates.render(messages, chat_template=template, add_generation_prompt=True)
            if query.strip() not in text or document.strip() not in text:
                raise ValueError(
                    "the chat template does not show the messages of roles query and document; give chat_template=..."
                    " that does"
                )
            prompts.append(self._tokenizer.encode(text, add_special_tokens=False))
        return prompts

    @staticmethod
    def _template(tokenizer: Tokenizer, chat_template: str | None) -> str:
        templates = tokenizer.chat_templates
        if chat_template is not None:
            return templates.choose(chat_template, has_tools=False)
        own = templates.choose(None, has_tools=False) if templates else ""
        if all(re.search(rf"['\"]{role}['\"]", own) for role in ("query", "document")):
            return own
        if tokenizer.token_to_id(MARK_OF_TEMPLATE) is not None:
            return RERANKER_TEMPLATE
        raise ValueError(
            "this checkpoint says in no chat template how it reads a query and a document; give chat_template=... that"
            " shows the messages of roles query and document"
        )

    def _answer_ids(self, answer_tokens: Sequence[str] | None) -> list[int]:
        """Returns the ids of the tokens whose logits are the score: one that speaks for a document, one against it."""
        if answer_tokens is None and self._head.answer_tokens is not None:
            ids = [token for token in self._head.answer_tokens if token is not None]
        else:
            assert self._tokenizer is not None
            texts = as_tuple("answer_tokens", ANSWERS if answer_tokens is None else answer_tokens, "two texts")
            is_right = len(texts) in (1, 2) and all(isinstance(text, str) and text for text in texts)
            require(is_right, "answer_tokens", answer_tokens, "the texts of one or two tokens")
            tokens = [self._tokenizer.encode(text, add_special_tokens=False) for text in texts]
            if any(len(own) != 1 for own in tokens):
                raise ValueError(
                    f"answer_tokens={texts!r} are not a token each in this vocabulary; give others, such as"
                    " (' yes', ' no')"
                )
            ids = [own[0] for own in tokens]
        if max(ids) >= self._config.vocab_size:
            raise ValueError(f"the answer tokens {ids} are none of the model's {self._config.vocab_size}; give others")
        return ids

    def _logits(self, states: list[np.ndarray], ids: list[int]) -> np.ndarray:
        """Returns the logits f32[n, tokens] of some tokens after each prompt."""
        params = self._params()
        assert params.logits is not None
        table = params.embedding if params.unembedding is None else params.unembedding
        rows = np.asarray(take_rows(table, jnp.array(ids), params.final_norm).astype(jnp.float32))
        logits = np.array([rows @ state.astype(np.float32) for state in states]) * np.float32(params.logits.scale)
        cap = params.logits.softcap
        return logits if cap is None else np.tanh(logits / np.float32(cap)) * np.float32(cap)


def _rows(rows: list[np.ndarray], size: int) -> np.ndarray:
    """Returns rows f32[n, size], of which there may be none."""
    return np.array(rows, np.float32).reshape(-1, size)


def _vectors(head: StateHead, states: list[np.ndarray], *, size: int, normalize: bool) -> np.ndarray:
    vectors = [head.vector(state.astype(np.float32)) if head.dense else state for state in states]
    if normalize:
        tiny = np.finfo(np.float32).tiny
        vectors = [vector / max(np.sqrt(np.square(vector, dtype=np.float64).sum()), tiny) for vector in vectors]
    return _rows(vectors, size)


def _pairs(queries: str | Sequence[str], documents: str | Sequence[str]) -> list[tuple[str, str]]:
    """Returns the pairs of a score: each query with its document, or one query with all documents."""
    texts: list[tuple[str, ...]] = []
    for name, given in (("queries", queries), ("documents", documents)):
        several = (given,) if isinstance(given, str) else as_tuple(name, given, "a text or several")
        require(bool(several) and all(isinstance(text, str) for text in several), name, given, "a text or several")
        texts.append(several)
    of_queries, of_documents = texts
    if len(of_queries) not in (1, len(of_documents)):
        raise ValueError(
            f"{len(of_queries)} queries do not go with {len(of_documents)} documents; give one query, or as many"
        )
    if len(of_queries) == 1:
        of_queries *= len(of_documents)
    return list(zip(of_queries, of_documents, strict=True))
