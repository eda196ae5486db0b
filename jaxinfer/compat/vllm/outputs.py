"""The results of a call in vLLM's form."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxinfer.compat.vllm.lora.request import LoRARequest
from jaxinfer.compat.vllm.sampling_params import SamplingParams
from jaxinfer.engine.request.completion import Completion
from jaxinfer.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Logprob:
    """The log-probability of a token, and its place among all tokens by it.

    The most probable one has rank 1. The rank is None for a token that is not among those that were asked for.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One sample of a request."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: LoRARequest | None = None

    def finished(self) -> bool:
        """True: `LLM` returns whole outputs."""
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """The samples of one prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool = True
    metrics: None = None  # as in vLLM, whose LLM keeps none by default
    lora_request: LoRARequest | None = None
    num_cached_tokens: int = 0


@dataclass
class EmbeddingOutput:
    """A vector of floats."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """The length of the vector."""
        return len(self.embedding)


@dataclass
class EmbeddingRequestOutput:
    """The vector of one prompt."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    finished: bool = True


def request_output(
    request_id: str,
    prompt: Any,
    params: SamplingParams,
    lora: LoRARequest | None,
    completions: Sequence[Completion],
    *,
    tokenizer: Tokenizer | None,
    eos_token_ids: Collection[int],
) -> RequestOutput:
    """Returns the completions of one prompt in vLLM's form; RuntimeError for one that has ended in an error."""
    for completion in completions:
        if completion.finish_reason == "error":
            raise RuntimeError(f"request {request_id} has failed: {completion.error}")
    first = completions[0]
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    listing = tokenizer if params.detokenize else None
    prompt_logprobs = None
    if params.prompt_logprobs is not None:
        listed = _listed(first.prompt_token_ids, first.prompt_log_probs, first.prompt_top_log_probs, listing)
        prompt_logprobs = [None, *listed[1:]]
    outputs = []
    for completion in completions:
        logprobs = None
        if params.logprobs is not None:
            logprobs = _listed(completion.token_ids, completion.log_probs, completion.top_log_probs, listing)
        stop_reason = _stop_reason(params, completion, tokenizer, eos_token_ids)
        stop = stop_reason if params.include_stop_str_in_output and isinstance(stop_reason, str) else ""
        outputs.append(
            CompletionOutput(
                index=completion.sample_index,
                text=completion.text + stop if params.detokenize else "",
                token_ids=list(completion.token_ids),
                cumulative_logprob=None if logprobs is None else sum(completion.log_probs),
                logprobs=logprobs,
                finish_reason=completion.finish_reason,
                stop_reason=stop_reason,
                lora_request=lora,
            )
        )
    return RequestOutput(
        request_id=request_id,
        prompt=text if isinstance(text, str) else None,
        prompt_token_ids=list(first.prompt_token_ids),
        prompt_logprobs=prompt_logprobs,
        outputs=outputs,
        lora_request=lora,
        num_cached_tokens=first.num_cached_tokens,
    )


def _listed(
    token_ids: Sequence[int],
    log_probs: Sequence[float | None],
    alternatives: Sequence[Mapping[int, float]],
    tokenizer: Tokenizer | None,
) -> list[dict[int, Logprob]]:
    """Returns for each token its own log-probability, then those of the most probable ones."""
    listed = []
    for token_id, value, others in zip(token_ids, log_probs, alternatives or [{}] * len(token_ids), strict=True):
        ranks = {other: rank for rank, other in enumerate(others, 1)}
        own = {} if value is None else {token_id: value}
        listed.append(
            {
                i: Logprob(log_prob, ranks.get(i), None if tokenizer is None else tokenizer.text_of(i))
                for i, log_prob in {**own, **others}.items()
            }
        )
    return listed


def _stop_reason(
    params: SamplingParams, completion: Completion, tokenizer: Tokenizer | None, eos_token_ids: Collection[int]
) -> int | str | None:
    """Returns the stop string or token that ended the text; None for the model's end token and any other end."""
    if completion.finish_reason != "stop" or not completion.token_ids:
        return None
    if params.stop and tokenizer is not None:
        stops = [params.stop] if isinstance(params.stop, str) else params.stop
        # A stop string may be a special token, which the text leaves out.
        for skips in (params.skip_special_tokens, False):
            text = tokenizer.decode(completion.token_ids, skip_special_tokens=skips)
            if found := [stop for stop in stops if text.startswith(stop, len(completion.text))]:
                return found[0]
    last = completion.token_ids[-1]
    is_end = last in eos_token_ids and not params.ignore_eos
    return last if last in (params.stop_token_ids or ()) and not is_end else None
