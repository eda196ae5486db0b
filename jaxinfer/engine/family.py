"""What the samples of one prompt have in common."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Family:
    """The requests of one prompt, and the forks of them and of theirs; each draws as another sample.

    `prompt_log_probs`, where they are wanted, and those of alternatives: of the prompt's first tokens, as far as known.
    One sample computes them for all.
    """

    num_samples: int
    prompt_log_probs: list[float | None] = field(default_factory=lambda: [None])  # the first follows nothing
    prompt_top_log_probs: list[dict[int, float]] = field(default_factory=lambda: [{}])
