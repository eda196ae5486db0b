"""The certificate of a trainer: how far the engine's log-probabilities are from those that training differentiates."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxinfer.display.html import table
from jaxinfer.engine.request.completion import Completion
from jaxinfer.model.config import ModelConfig
from jaxinfer.model.params import Params
from jaxinfer.quantization import PACKED
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.steps.log_probs import log_probs

# Reports the log-probabilities of a prompt's tokens; the token that it samples does not count.
DESCRIBE_PROMPT = SamplingParams(temperature=0, max_tokens=1, prompt_log_probs=0)


@dataclass(frozen=True, kw_only=True)
class TextAgreement:
    """The log-probabilities of one text's tokens in the engine and in training, at the token where they differ most."""

    num_tokens: int  # that were compared; the first token of a text has no log-probability
    max_ulps: int  # the largest difference in units in the last place of a float32
    max_difference: float  # the largest absolute difference
    position: int  # of the first token with max_ulps, in the text
    token_id: int  # of that token
    engine_log_prob: float  # of that token
    training_log_prob: float  # of that token


@dataclass(frozen=True, kw_only=True, repr=False)
class Agreement:
    """How far the log-probabilities of texts in the engine are from those of `jaxinfer.log_probs` under `jax.grad`."""

    texts: tuple[TextAgreement, ...]
    device: str  # its kind, as JAX names it
    dtype: str  # of the parameters

    @property
    def num_tokens(self) -> int:
        """The compared tokens of all texts."""
        return sum(text.num_tokens for text in self.texts)

    @property
    def worst(self) -> int:
        """The index of the first text with the largest difference in ulps."""
        return max(range(len(self.texts)), key=lambda i: self.texts[i].max_ulps)

    @property
    def max_ulps(self) -> int:
        """The largest difference in units in the last place of a float32."""
        return self.texts[self.worst].max_ulps

    @property
    def max_difference(self) -> float:
        """The largest absolute difference."""
        return max(text.max_difference for text in self.texts)

    def __repr__(self) -> str:
        return (
            f"<Agreement of {self.num_tokens} log-probabilities in {len(self.texts)} texts: at most"
            f" {self.max_ulps} ulps and {self.max_difference:.3g} apart, {self.dtype} on {self.device}>"
        )

    def _repr_html_(self) -> str:
        text = self.texts[self.worst]
        worst = f"text {self.worst}, position {text.position}, token {text.token_id}"
        rows: dict[str, object] = {
            "largest difference in ulps": self.max_ulps,
            "largest absolute difference": f"{self.max_difference:.3g}",
            "texts": len(self.texts),
            "log-probabilities": self.num_tokens,
        }
        if self.max_ulps:
            rows |= {"at": worst, "in the engine": text.engine_log_prob, "in training": text.training_log_prob}
        return f"<div>{escape(f'{self.dtype} on {self.device}')}</div>{table(rows)}"


def agreement(
    completions: Sequence[Completion],
    params: Params,
    *,
    config: ModelConfig,
    page_size: int,
    dtype: str,
    mesh: Mesh | None = None,
    between_texts: Callable[[], None] = lambda: None,
) -> Agreement:
    """Compares the log-probabilities that completions report with those of training, for prompt and output tokens.

    Each text is computed alone, padded at its end to a power of two, so that few lengths are compiled. Raises
    ValueError that names the text if it has no log-probabilities, or is too long to train on. `mesh`: the one that the
    parameters are split over, if any.
    """
    if any(map(_is_quantized, jax.tree.leaves(params, is_leaf=_is_quantized))):
        raise ValueError(
            "texts cannot be compared with training, for quantized weights have no gradient; load the checkpoint"
            " without quantization"
        )
    if not completions:
        raise ValueError("texts is empty; give at least one")
    reported = [_in_engine(i, completion, config.max_position) for i, completion in enumerate(completions)]
    compared = []
    for tokens, engine, places in reported:
        between_texts()
        size = min(1 << (len(tokens) - 1).bit_length(), config.max_position)
        padded = np.pad(tokens, (0, size - len(tokens)))[None]
        values, _ = _under_grad(params, padded, config=config, page_size=page_size, mesh=mesh)
        training = np.pad(np.asarray(values)[0], (1, 0))
        compared.append(_compare(tokens[places], engine[places], training[places], places))
    return Agreement(texts=tuple(compared), device=jax.devices()[0].device_kind, dtype=dtype)


@functools.partial(jax.jit, static_argnames=("config", "page_size", "mesh"))
def _under_grad(
    params: Params, tokens: jax.Array, *, config: ModelConfig, page_size: int, mesh: Mesh | None
) -> tuple[jax.Array, jax.Array]:
    """Returns the log-probabilities f32[1, T - 1] of tokens i32[1, T], and the squared norm of their gradient.

    The norm keeps the compiler from leaving out the derivative, and with it the program of a training step.
    """

    def loss(params: Params) -> tuple[jax.Array, jax.Array]:
        values = log_probs(params, tokens, config=config, page_size=page_size, mesh=mesh)
        return values.sum(), values

    (_, values), gradient = jax.value_and_grad(loss, has_aux=True)(params)
    return values, jax.tree.reduce(jnp.add, jax.tree.map(lambda g: jnp.square(g.astype(jnp.float32)).sum(), gradient))


def _is_quantized(leaf: Any) -> bool:
    return isinstance(leaf, PACKED)


def _in_engine(index: int, completion: Completion, max_position: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns a text's tokens i32[T], their log-probabilities f32[T] in the engine, and the positions i64[n] of these.

    At other positions the engine has reported none.
    """
    prompt_len, num_described = len(completion.prompt_token_ids), len(completion.prompt_log_probs)
    tokens = np.array(completion.prompt_token_ids + completion.token_ids, np.int32)
    values = np.zeros(len(tokens), np.float32)
    values[1:num_described] = completion.prompt_log_probs[1:]
    values[prompt_len:] = completion.log_probs
    places = np.array([*range(1, num_described), *range(prompt_len, len(tokens))], np.int64)
    if completion.error is not None or not len(places):
        cause = completion.error or "no token of it follows another one; give two tokens or more"
        raise ValueError(f"texts[{index}] has no log-probabilities to compare: {cause}")
    if completion.adapter is not None:
        raise ValueError(
            f"texts[{index}] is of the adapter {completion.adapter!r}, and training is that of the model without"
            " adapters; give a completion without one"
        )
    if len(tokens) > max_position:
        raise ValueError(
            f"texts[{index}] has {len(tokens)} tokens, and training takes at most the model's {max_position}; give a"
            " shorter one"
        )
    return tokens, values, places


def _compare(tokens: np.ndarray, engine: np.ndarray, training: np.ndarray, positions: np.ndarray) -> TextAgreement:
    """Compares two log-probabilities f32[n] of each token i32[n], which lies at its position i64[n] of a text."""
    ulps = np.abs(_ordered(engine) - _ordered(training))
    with np.errstate(invalid="ignore"):  # -inf and -inf are equal
        differences = np.where(ulps == 0, 0.0, np.abs(engine.astype(np.float64) - training))
    worst = int(ulps.argmax())
    return TextAgreement(
        num_tokens=len(tokens),
        max_ulps=int(ulps[worst]),
        max_difference=float(differences.max()),
        position=int(positions[worst]),
        token_id=int(tokens[worst]),
        engine_log_prob=float(engine[worst]),
        training_log_prob=float(training[worst]),
    )


def _ordered(values: np.ndarray) -> np.ndarray:
    """Maps f32 to i64 so that neighbouring floats are neighbouring integers, and both zeros are 0."""
    bits = values.view(np.int32).astype(np.int64)
    return np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
