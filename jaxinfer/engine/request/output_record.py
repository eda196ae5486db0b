"""The record of a request's output tokens, beside their ids: texts, log-probabilities and times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# Token id, log-probability, those of alternatives, and the log-probability in the distribution of the draw, if the
# engine's steps give it.
SampledToken = tuple[int, float, dict[int, float], float | None]


@dataclass(slots=True, eq=False)
class OutputRecord:
    """One entry per output token in each list; two lists are empty if nothing asks for their entries.

    Steps that add plain tokens leave their texts out; `catch_up` adds them.
    """

    first_step: float | None = None  # clock time of the first step that computed some of the request's tokens
    times: list[float] = field(default_factory=list)  # clock time at the end of the token's step
    log_probs: list[float] = field(default_factory=list)
    top_log_probs: list[dict[int, float]] = field(default_factory=list)  # of alternatives
    sampling_log_probs: list[float] = field(default_factory=list)  # if the engine's steps give them
    texts: list[str] = field(default_factory=list)

    def tokens(self, token_ids: Sequence[int]) -> list[SampledToken]:
        """Returns the output tokens with their log-probabilities, as `Request.append` takes them."""
        tops = self.top_log_probs or [{}] * len(token_ids)
        sampling = self.sampling_log_probs or [None] * len(token_ids)
        return list(zip(token_ids, self.log_probs, tops, sampling, strict=True))

    def begin_again(self, num_kept: int) -> OutputRecord:
        """Returns a record with the times of the first `num_kept` tokens, which are to be appended again."""
        return OutputRecord(self.first_step, self.times[:num_kept])

    def catch_up(self, token_ids: Sequence[int], start: int, end: int, texts: Mapping[int, str]) -> None:
        """Adds the missing texts of the tokens before `end` of a request whose output begins at `start`."""
        start += len(self.texts)
        if start < end:
            self.texts += map(texts.__getitem__, token_ids[start:end])
