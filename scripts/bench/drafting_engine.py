"""An engine whose speculation is measured: as it is, switched off, and with a fixed number of drafts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from jaxinfer import LLM, EngineConfig, SamplingParams
from jaxinfer.engine.request.completion import Completion
from jaxinfer.engine.scheduling.step import Step

PROMPT_LEN, OUTPUT_LEN = 192, 128
MAX_DRAFTS = EngineConfig.max_drafts
MIN_PLAIN = 64  # of these in a run say what one takes


class Run(NamedTuple):
    """The output of a run and its speed, measured in the steps in which all rows of the engine decode."""

    tokens_per_second: float
    tokens_per_step: float  # of each row
    # Tokens per second in those of this run's own steps without drafts; None where they are too few to say. It tells
    # what drafts cost better than another run does, where the machine's speed varies.
    against_own_steps: float | None
    completions: list[Completion]


def all_decode(step: Step, batch: int) -> bool:
    """Whether all rows decode, from tokens that were drawn.

    The last token of a prompt whose others are cached is computed like one that was drawn, but with no step to overlap.
    """
    is_decoding = all(chunk.start >= chunk.request.num_prompt_tokens for chunk in step.chunks)
    return is_decoding and len(step.chunks) == batch


class DraftingEngine:
    """One engine, measured in each way: two of a kind differ by up to 6 %."""

    def __init__(self, model: Path, batch: int, speculation: Any, *, processors: Any = None, **limits: Any) -> None:
        config = EngineConfig(max_num_seqs=batch, max_model_len=PROMPT_LEN + OUTPUT_LEN, **limits)
        options: dict[str, Any] = {"speculation": speculation, "logits_processors": processors or {}}
        self.llm = LLM(model, config=config, dtype="float32", **options)
        self.llm.warm_up()
        self.llm.on_step = self._enter
        self._batch = batch
        self._scheduler: Any = self.llm._engine._scheduler
        self._num_accepted = self._num_steps = self._num_tokens = 0
        self._seconds = 0.0
        self._plain_seconds: list[float] = []  # of steps that were launched ahead, so without drafts
        self._plain: tuple[Any, Run] | None = None  # the last run without drafts, and of what

    def _enter(self, step: Step, seconds: float) -> None:
        before, self._num_accepted = self._num_accepted, self._scheduler.metrics().num_accepted_tokens
        if not all_decode(step, self._batch):
            return
        self._seconds += seconds
        self._num_steps += 1
        self._num_tokens += len(step.chunks) + self._num_accepted - before
        if step.is_decode and step.is_ahead:
            self._plain_seconds.append(seconds)

    def run(self, prompts: list[list[int]], *, salt: str | None, **params: Any) -> Run:
        """Has OUTPUT_LEN tokens follow each prompt, greedily if `params` do not say otherwise.

        Nothing is known of prompts and outputs under another salt.
        """
        self._num_steps = self._num_tokens = 0
        self._seconds = 0.0
        self._plain_seconds.clear()
        params = {"max_tokens": OUTPUT_LEN, "temperature": 0, "seed": 0, "ignore_eos": True, **params}
        scripts = [dict.fromkeys(params.get("logits_processors", ()), i) for i in range(len(prompts))]
        each = [SamplingParams(**{**params, "logits_processors": script}) for script in scripts]
        completions = self.llm.generate(prompts, each, show_progress=False, cache_salt=salt)
        rate, own = self._num_tokens / self._seconds, self._plain_seconds
        against_own = rate / self._batch * mean(own) if len(own) >= MIN_PLAIN else None
        return Run(rate, self._num_tokens / self._num_steps / self._batch, against_own, completions)

    def run_plain(self, prompts: list[list[int]], **options: Any) -> Run:
        """The same without drafts."""
        self._scheduler._speculation, speculation = None, self._scheduler._speculation
        run = self.run(prompts, **options)
        self._scheduler._speculation = speculation
        return run

    def run_beside_plain(
        self, prompts: list[list[int]], count: int | None = None, *, salt: str | None, **params: Any
    ) -> tuple[Run, float]:
        """Returns a run with drafts, and tokens per second without drafts before and after.

        `count` is the number of drafts of each row; None leaves it to the engine. Plain decoding after one run is that
        before the next, if both have the same prompts.
        """
        if self._plain is None or self._plain[0] != (prompts, params):
            self._plain = (prompts, params), self.run_plain(prompts, salt=salt, **params)
        before = self._plain[1]
        run = self.run if count is None else partial(self.run_fixed, count)
        result, after = run(prompts, salt=salt, **params), self.run_plain(prompts, salt=salt, **params)
        self._plain = (prompts, params), after
        return result, (before.tokens_per_second + after.tokens_per_second) / 2

    def run_fixed(self, count: int, prompts: list[list[int]], **options: Any) -> Run:
        """The same, but every step verifies `count` drafts per row, or all that the drafter makes."""
        speculation = self._scheduler._speculation
        kept = speculation._policy, speculation._max_drafts
        speculation._policy, speculation._max_drafts = None, count
        run = self.run(prompts, **options)
        speculation._policy, speculation._max_drafts = kept
        return run
