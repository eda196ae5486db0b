"""What a step costs, as a function of what is computed in it, fitted from measured steps."""

from __future__ import annotations

from jaxinfer.engine.buckets import Bucket
from jaxinfer.engine.step import Step

# What a step costs grows with each of these, so no coefficient is negative.
FEATURES = ("step", "padded tokens", "tokens", "tokens in sixteens", "rows", "context tokens", "attended tokens")


def step_features(step: Step, bucket: Bucket) -> tuple[float, ...]:
    """Returns the FEATURES of a step in its compiled shape."""
    context = attended = 0
    for start, count, drafts in zip(step.chunks.starts, step.chunks.lens, step.chunks.drafts, strict=True):
        count += len(drafts)
        context += start + count
        attended += count * (2 * start + count) // 2
    tokens = step.num_tokens
    return (1, bucket.num_tokens, tokens, -(-tokens // 16), len(step.chunks), context, attended)
