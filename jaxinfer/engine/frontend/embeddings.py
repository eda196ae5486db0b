"""Embeddings of prompts: their pooled hidden states, from the steps that serve requests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxinfer.engine.frontend.sample_group import SampleGroup
from jaxinfer.engine.request.completion import Completion, FinishReason
from jaxinfer.engine.request.state_pooling import StatePooling


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


def embeddings_of(
    completions: Sequence[Completion], poolings: Sequence[StatePooling], hidden_size: int, *, normalize: bool
) -> np.ndarray:
    """Returns the pooled states f32[n, hidden_size], of length 1 if `normalize`.

    Raises NoEmbeddingError for a prompt that ended before its states were there, or with bad logits.
    """
    embeddings = np.zeros((len(poolings), hidden_size), np.float32)
    for i, (completion, pooling) in enumerate(zip(completions, poolings, strict=True)):
        if completion.error is not None or pooling.pooled is None:
            cause = completion.error or f"its request ended with finish reason {completion.finish_reason!r}"
            raise NoEmbeddingError(f"prompt {i} has no embedding: {cause}", completion.finish_reason)
        vector = pooling.pooled
        if normalize:
            vector = vector / max(np.sqrt(np.square(vector).sum()), np.finfo(np.float32).tiny)
        embeddings[i] = vector
    return embeddings
