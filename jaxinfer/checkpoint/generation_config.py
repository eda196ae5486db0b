"""The sampling that a checkpoint recommends in generation_config.json, by the definitions of transformers."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from jaxinfer.checkpoint.checkpoint import GENERATION_FILE, Checkpoint
from jaxinfer.config import EngineConfig, SamplingParams
from jaxinfer.gguf.names import sampling_of
from jaxinfer.sampling_params import MAX_BIAS, TotalLength
from jaxinfer.validation import MAX_INT, is_int, is_real, require, require_bool, require_int, shown

logger = logging.getLogger(__name__)

# Fields of `SamplingParams` by their names in the file.
FIELDS: Mapping[str, str] = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")},
    **{name: name for name in ("presence_penalty", "frequency_penalty", "no_repeat_ngram_size")},
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_strings": "stop",
}
# Fields that change tokens in transformers and that `SamplingParams` cannot express, with the values that change none,
# beside null. Fields that only matter beside one of these, such as length_penalty, are left out; so are those that
# change the speed, the form of the output, or an encoder.
OTHERS: Mapping[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0,),
    "dola_layers": (),
    "constraints": (),
    "force_words_ids": (),
    "guidance_scale": (1,),
    "watermarking_config": (),
    "token_healing": (False,),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "remove_invalid_values": (False,),
    "max_time": (),
    **{"xtc_probability": (0,), "mirostat": (0,), "penalty_last_n": (-1,)},  # of a GGUF
}
# The same of fields without effect on greedy decoding.
FILTERS: Mapping[str, tuple[Any, ...]] = {"top_h": (1,), "epsilon_cutoff": (0, 1), "eta_cutoff": (0, 1)}


def read_sampling_defaults(
    checkpoint: Checkpoint, *, vocab_size: int = MAX_INT, max_listed_tokens: int = EngineConfig.max_listed_tokens
) -> SamplingParams:
    """Returns the sampling that generation_config.json or a GGUF recommends; other fields have their defaults.

    One warning names the stated fields that would change tokens in transformers and cannot be honoured, and lists of
    more than `max_listed_tokens` token ids. Ids beyond the vocabulary have no effect. Raises ValueError for a wrong
    value.
    """
    file, end_tokens = checkpoint.path / GENERATION_FILE, checkpoint.eos_token_ids
    if checkpoint.gguf is not None:
        file, stated = checkpoint.path, sampling_of(checkpoint.gguf)
    else:
        stated = checkpoint.generation_config
    stated = {name: value for name, value in stated.items() if value is not None}
    try:
        fields = {**_single_values(stated), **_lengths(stated)}
        words = _bad_words(stated, end_tokens, vocab_size)
        biases = _biases(stated, vocab_size)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    bad_words: list[list[int]] = []
    ignored = []
    for name, own in words.items():
        if len([*chain(*bad_words, *own)]) > max_listed_tokens:
            ignored.append(name)
        else:
            bad_words += own
    if biases is None or len(biases) > max_listed_tokens:
        ignored.append("sequence_bias")
        biases = {}
    defaults = SamplingParams(**fields, bad_words=bad_words, logit_bias=biases)
    others = OTHERS if defaults.temperature == 0 else {**OTHERS, **FILTERS}
    ignored += [name for name, harmless in others.items() if name in stated and stated[name] not in harmless]
    if defaults.min_tokens and defaults.stop:
        ignored.append("stop_strings")  # transformers looks for them among the first min_tokens tokens too
    if ignored:
        logger.warning(
            "%s: requests without parameters are not sampled as in transformers, because jaxinfer does not honour %s",
            *(file, ", ".join(f"{name}={shown(stated[name])}" for name in ignored)),
        )
    return defaults


def _single_values(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of `SamplingParams` that the file states by a value each."""
    fields = {ours: _checked(name, ours, stated[name]) for name, ours in FIELDS.items() if name in stated}
    if "do_sample" in stated:
        require_bool("do_sample", stated["do_sample"])
        fields |= {} if stated["do_sample"] else {"temperature": 0}
    return fields


def _lengths(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the most and the least tokens of a request; as in transformers, the most count more."""
    for name, least in (("max_length", 1), ("min_length", 0)):
        if name in stated:
            require_int(name, stated[name], least)
    # Numbers of new tokens count more than those with the prompt's.
    most = stated.get("max_new_tokens", TotalLength(stated.get("max_length", 0)) or SamplingParams.max_tokens)
    least = stated.get("min_new_tokens", TotalLength(stated.get("min_length", 0)) or SamplingParams.min_tokens)
    are_alike = isinstance(most, TotalLength) == isinstance(least, TotalLength)
    return {"max_tokens": most, "min_tokens": min(least, most) if are_alike else least}


def _checked(name: str, ours: str, value: Any) -> Any:
    """Returns a field of `SamplingParams`; ValueError under its `name` in the file if its value is wrong."""
    try:
        return getattr(SamplingParams(**{"max_tokens": MAX_INT, ours: value}), ours)
    except ValueError as error:
        raise ValueError(str(error) if name == ours else f"{name}={shown(value)}: {error}") from None


def _bad_words(stated: Mapping[str, Any], end_tokens: Sequence[int], vocab_size: int) -> dict[str, list[list[int]]]:
    """Returns the words that each list of the file rules out, as transformers does."""
    suppressed = stated.get("suppress_tokens", [])
    are_ids = isinstance(suppressed, list) and all(map(is_int, suppressed))
    require(are_ids, "suppress_tokens", suppressed, "a list of token ids")
    words = _checked("bad_words_ids", "bad_words", stated.get("bad_words_ids", []))
    ends = [(token_id,) for token_id in end_tokens]
    return {
        # Numbers that are no ids, such as -1, rule out nothing.
        "suppress_tokens": [[token_id] for token_id in dict.fromkeys(suppressed) if 0 <= token_id < vocab_size],
        "bad_words_ids": [list(word) for word in words if max(word) < vocab_size and word not in ends],
    }


def _biases(stated: Mapping[str, Any], vocab_size: int) -> dict[int, float] | None:
    """Returns the biases of token ids; None if some are of several tokens, or beyond those of `logit_bias`."""
    pairs = stated.get("sequence_bias", [])
    are_pairs = isinstance(pairs, list) and all(map(_is_bias, pairs))
    require(are_pairs, "sequence_bias", pairs, "a list of pairs of token ids and a number")
    if not all(len(token_ids) == 1 and abs(bias) <= MAX_BIAS for token_ids, bias in pairs):
        return None
    return {token_id: bias for (token_id,), bias in pairs if token_id < vocab_size}


def _is_bias(pair: Any) -> bool:
    if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], list):
        return False
    token_ids, bias = pair
    return bool(token_ids) and all(is_int(i) and i >= 0 for i in token_ids) and is_real(bias) and not math.isnan(bias)
