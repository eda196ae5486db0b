"""A model of step times: seconds as a linear function of a step's features, fitted to measured steps."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from operator import add
from pathlib import Path

import numpy as np

from jaxinfer.config import EngineConfig
from jaxinfer.engine.execution.compiled_steps import choose_bucket
from jaxinfer.engine.llm import LLM
from jaxinfer.engine.scheduling.step import Step
from jaxinfer.plan.step_shapes import Bucket, loop_steps, plan_buckets
from jaxinfer.validation import shown

MIN_STEPS = 8
MAX_BYTES = 2**20  # of a file of step times; a real one has some hundred bytes
# The seconds of a step grow with each of these, so no weight is negative.
# "longest context": the device computes rows side by side, so the longest row decides the time of a step.
# "not ahead": the host's work for a step is hidden only if the previous step was still running.
FEATURES = (
    "step",
    "padded tokens",
    "tokens",
    "tokens in sixteens",
    "rows",
    "context tokens",
    "attended tokens",
    "longest context",
    "not ahead",
)
# The fit leaves out steps that took this many times the expected seconds: something else interrupted them.
OUTLIER = 1.5
FIT_ROUNDS = 5


def step_features(step: Step, bucket: Bucket) -> tuple[float, ...]:
    """Returns the FEATURES of a step in its compiled shape."""
    ends = list(map(add, step.chunks.starts, step.chunks.lens))
    attended = sum(
        count * (2 * start + count) // 2 for start, count in zip(step.chunks.starts, step.chunks.lens, strict=True)
    )
    tokens = step.num_tokens
    sixteens = -(-tokens // 16)
    return (1, bucket.num_tokens, tokens, sixteens, len(ends), sum(ends), attended, max(ends), not step.is_ahead)


@dataclass(frozen=True)
class MeasuredStep:
    """The features of a step (`step_features`) and its seconds, host work included."""

    is_decode: bool
    features: tuple[float, ...]
    seconds: float


@dataclass(frozen=True)
class StepTimes:
    """Seconds per unit of each of the FEATURES, for decode steps and for all other steps."""

    decode: tuple[float, ...]
    prefill: tuple[float, ...]

    def __post_init__(self) -> None:
        for name, weights in vars(self).items():
            if len(weights) != len(FEATURES):
                raise ValueError(f"{name} has {len(weights)} weights; give one for each of {', '.join(FEATURES)}")
            if not all(0 <= weight < math.inf for weight in weights):
                raise ValueError(f"{name} has the weights {weights}; give finite ones of at least 0")

    def seconds(self, step: Step, bucket: Bucket) -> float:
        """Returns the predicted seconds of the step in this compiled shape."""
        weights = self.decode if bucket.is_decode else self.prefill
        return sum(weight * feature for weight, feature in zip(weights, step_features(step, bucket), strict=True))

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps({"features": FEATURES, **asdict(self)}, indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> StepTimes:
        """Reads a file of `save`; ValueError if it cannot be read or has other features than this version."""
        name = f"step_times={shown(str(path))}"
        try:
            with Path(path).open("rb") as file:
                fields = json.loads(file.read(MAX_BYTES).decode())
            if tuple(fields["features"]) != FEATURES:
                raise ValueError(f"features are {shown(fields['features'])}, not {list(FEATURES)}")
            return cls(tuple(map(float, fields["decode"])), tuple(map(float, fields["prefill"])))
        except OSError as error:
            raise ValueError(
                f"{name} cannot be read ({error.strerror}); give what `jaxinfer replay` has saved"
            ) from None
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise ValueError(f"{name} holds no step times: {error}; measure them anew with `jaxinfer replay`") from None


def require_known_steps(config: EngineConfig) -> None:
    """Raises ValueError for options with step times or page counts unknown to the simulation."""
    if loop_steps(config) > 1:
        raise ValueError(
            f"decode_loop_steps={config.decode_loop_steps} is not simulated: what a decode loop takes is not fitted;"
            " set EngineConfig.decode_loop_steps to 1"
        )
    if config.memory_bytes is not None and config.num_pages is None:
        raise ValueError(
            f"memory_bytes={config.memory_bytes} is not simulated: how many pages that leaves is known when the steps"
            " are compiled; set EngineConfig.num_pages"
        )
    if config.has_tiers:
        raise ValueError(
            f"host_cache_bytes={config.host_cache_bytes} and disk_cache_bytes={config.disk_cache_bytes} are not"
            " simulated: what copies of pages take is not fitted, and no page holds anything; leave them out"
        )


def measured_steps(llm: LLM) -> list[MeasuredStep]:
    """Returns a list to which the LLM appends each later step. Replaces `llm.on_step`."""
    require_known_steps(llm.engine_config)
    buckets, steps = plan_buckets(llm.engine_config), []

    def measure(step: Step, seconds: float) -> None:
        steps.append(MeasuredStep(step.is_decode, step_features(step, choose_bucket(buckets, step)), seconds))

    llm.on_step = measure
    return steps


def fit_step_times(steps: Iterable[MeasuredStep]) -> StepTimes:
    """Fits non-negative least squares of the relative error, without steps that took far longer than similar ones.

    Disturbances of those steps will recur, so the weights are scaled: predicted seconds sum to the measured total.

    Raises ValueError for fewer than MIN_STEPS measured steps of a kind.
    """
    steps = list(steps)
    kinds = {}
    for name, is_decode in (("decode", True), ("prefill", False)):
        chosen = [step for step in steps if step.is_decode == is_decode]
        if len(chosen) < MIN_STEPS:
            raise ValueError(
                f"the trace is too short to fit step times, {len(chosen)} {name} steps of it were measured and"
                f" {MIN_STEPS} are the least; replay one with more requests, spread over time"
            )
        features, seconds = np.array([step.features for step in chosen]), np.array([step.seconds for step in chosen])
        weights = np.array(fit_weights(features, seconds))
        kinds[name] = tuple((weights * seconds.sum() / (features @ weights).sum()).tolist())
    return StepTimes(**kinds)


def fit_weights(features: np.ndarray, seconds: np.ndarray) -> tuple[float, ...]:
    """Returns seconds per unit of each feature, for features f64[steps, FEATURES] and seconds f64[steps].

    Fits non-negative least squares of the relative error, without outliers.
    """
    from scipy.optimize import nnls  # takes a sixth of the time to import this package, and few users need it

    kept = np.ones(len(seconds), bool)
    scale = features.max(0).clip(1)
    weights = np.zeros(features.shape[1])
    for _ in range(FIT_ROUNDS):
        rows = features[kept] / scale / seconds[kept, None]
        weights = nnls(rows, np.ones(kept.sum()))[0] / scale
        ratio = seconds / np.maximum(features @ weights, 1e-12)
        kept = ratio < OUTLIER * np.median(ratio)
    return tuple(weights.tolist())
