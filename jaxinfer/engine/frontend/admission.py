"""Turns a user's prompt and parameters into requests, or refuses them with the reason."""

from __future__ import annotations

import math
import secrets
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from numbers import Integral
from typing import Any, TypedDict, cast, get_args

from jaxinfer.config import MAX_SEED, CacheConfig, EngineConfig, SamplingParams
from jaxinfer.engine.frontend.adapters import AdapterSlots
from jaxinfer.engine.kv_cache.attention_window import AttentionWindow, window_for
from jaxinfer.engine.request.page_keys import PageKeys, root_key
from jaxinfer.engine.request.request import LoadedAdapter, Priority, Request, SharedPrompt
from jaxinfer.model.config import ModelConfig
from jaxinfer.names import way_out
from jaxinfer.parallel.placement import ONE_DEVICE
from jaxinfer.plain_values import is_missing
from jaxinfer.text.answers.structure import compile_structure
from jaxinfer.text.detokenizer import Detokenizer
from jaxinfer.text.grammar import GrammarCompiler
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.validation import (
    MAX_FLOAT,
    MAX_INT,
    MAX_ITEMS,
    as_float,
    as_plain,
    as_tuple,
    is_real,
    shown,
)

MAX_NAME_CHARACTERS = 4096  # of a tenant or a cache_salt


# Text or token ids, or a mapping that has one of them under its key, as vLLM takes them.
Prompt = str | Sequence[int] | Mapping[str, Any]
PROMPT_KEYS = {"prompt", "prompt_token_ids"}


class PromptTooLongError(ValueError):
    """A prompt has more tokens than the engine takes: shorten it, or raise `EngineConfig.max_model_len`."""


@contextmanager
def refusals_of(place: str) -> Iterator[None]:
    """Has the message of a ValueError begin with its place, such as the number of a prompt."""
    try:
        yield
    except ValueError as error:
        kind = PromptTooLongError if isinstance(error, PromptTooLongError) else ValueError
        raise kind(f"{place}: {error}") from None


class RequestOptions(TypedDict, total=False):
    """Scheduling and caching options of a request, and its adapter, which alone changes tokens.

    * `priority`: "interactive" (default) goes before "batch", and preempts batch requests if the engine is full.
    * `tenant`: the customer or user of the request. Tenants take turns, so none waits for all requests of another.
    * `deadline`: seconds until the request ends with its tokens so far and finish reason "deadline". Close deadlines
      go first.
    * `cache_salt`: only requests with the same salt share cached prefixes.
    * `prediction`: text or token ids that the output may resemble, such as the file to change. Drafts come from it, so
      the engine must draft by n-grams: `speculation="ngram"` or "suffix".
    * `adapter`: the name of an adapter that `load_adapter` has loaded. None takes the model as it is.
    """

    priority: Priority
    tenant: str
    deadline: float | None
    cache_salt: str | None
    prediction: Prompt | None
    adapter: str | None


def check_names(options: Mapping[str, Any]) -> None:
    """Raises TypeError for an argument that is no field of `RequestOptions`."""
    unknown = sorted(options.keys() - RequestOptions.__annotations__.keys())
    if unknown:
        known = (*RequestOptions.__annotations__, "show_progress")
        answer = way_out(unknown[0], known, {"SamplingParams": SamplingParams.__annotations__}) or (
            f"the terms of a request are {', '.join(RequestOptions.__annotations__)}, and how its tokens are chosen is"
            " said by SamplingParams"
        )
        raise TypeError(f"unknown argument {unknown[0]}={shown(options[unknown[0]])}; {answer}")


def checked_priority(priority: Any) -> Priority:
    name = as_plain("priority", priority)
    if not isinstance(name, str) or name not in get_args(Priority):
        raise ValueError(f"priority={shown(priority)} is not allowed: give one of {', '.join(get_args(Priority))}")
    return cast(Priority, name)


def checked_tenant(tenant: Any) -> str:
    return _checked_text("tenant", tenant, "give a name as text, or leave it out", least=0)


def checked_adapter_name(name: Any) -> str:
    """Returns the name of an adapter; ValueError if it is no text, empty or too long."""
    return _checked_text("name", name, "give the adapter a name as text")


def checked_time_limit(deadline: Any) -> float:
    seconds = as_plain("deadline", deadline)
    if seconds is None:
        return math.inf
    if not is_real(seconds) or not 0 < as_float(seconds) < MAX_FLOAT:
        raise ValueError(
            f"deadline={shown(deadline)} is not allowed: give seconds from now, above 0, or None for no end"
        )
    return float(seconds)


def _checked_salt(cache_salt: Any) -> str | None:
    way_out = (
        "give a string that only those know who may share cached prefixes, or None to share with all who give none"
    )
    return None if as_plain("cache_salt", cache_salt) is None else _checked_text("cache_salt", cache_salt, way_out)


def _checked_text(name: str, value: Any, way_out: str, *, least: int = 1) -> str:
    """Returns a text of at least `least` characters, and not too long."""
    text = as_plain(name, value)
    if not isinstance(text, str) or len(text) < least:
        raise ValueError(f"{name}={shown(value)} is not allowed: {way_out}")
    if len(text) > MAX_NAME_CHARACTERS:
        raise ValueError(
            f"{name} has {len(text):,} characters, more than {MAX_NAME_CHARACTERS:,}; give a shorter one, such as a"
            " digest of it"
        )
    return text


# The parameters of a prompt to embed. A step that computes the end of a prompt samples a token after it; an embedding
# ignores this token, and a model without logits samples none.
ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1)


@dataclass(frozen=True, kw_only=True)
class Admission:
    """Checks requests against the engine's limits. It trusts no input; the code behind it checks nothing again."""

    dtype: str  # of the weights
    model_config: ModelConfig
    engine_config: EngineConfig
    cache_config: CacheConfig
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]
    default_sampling_params: SamplingParams
    max_model_len: int
    window: AttentionWindow | None
    model: str
    grammars: GrammarCompiler
    custom: tuple[str, ...]  # names of the LLM's logits processors
    adapters: AdapterSlots
    takes_predictions: bool = False
    devices: str = ONE_DEVICE  # the identity of the placement
    params_version: str = ""  # of the parameters that replaced the checkpoint's, "" for the checkpoint's

    def admit(
        self,
        ids: Iterator[int],
        prompt: Prompt,
        sampling: SamplingParams | None,
        *,
        priority: Priority = "interactive",
        tenant: str = "",
        deadline: float | None = None,
        cache_salt: str | None = None,
        prediction: Prompt | None = None,
        adapter: str | None = None,
    ) -> list[Request]:
        """Returns one request per sample; ValueError with the reason, the value and the way out."""
        sampling = self.default_sampling_params if sampling is None else sampling
        if not isinstance(sampling, SamplingParams):
            raise ValueError(
                f"sampling_params={shown(sampling)} is not a SamplingParams; give SamplingParams(...) or None for the"
                " default"
            )
        if not self.model_config.has_logits and sampling is not ONE_TOKEN:
            raise ValueError(
                "this checkpoint is an embedding model: it has no unembedding (lm_head), and so no logits to sample"
                " tokens from; call LLM.embed, classify or score, or load the checkpoint of a language model"
            )
        token_ids = self.encode(prompt)
        sampling = sampling.after(len(token_ids), self._longest(len(token_ids), sampling))
        self._check_lengths(len(token_ids), sampling)
        self.check_samples("n" if sampling.best_of is None else "best_of", sampling.num_samples)
        self._check_alternatives("log_probs", sampling.log_probs, self.engine_config.max_log_probs)
        if sampling.prompt_log_probs is not None:
            limit = self.engine_config.max_prompt_log_probs
            self._check_alternatives("prompt_log_probs", sampling.prompt_log_probs, limit)
        if sampling.stop and self.tokenizer is None:
            raise ValueError(f"stop={shown(sampling.stop)} needs a tokenizer, which this checkpoint does not have")
        eos = () if sampling.ignore_eos else self.eos_token_ids
        stop_token_ids = {*sampling.stop_token_ids, *eos}
        self._check_listed_tokens(sampling, stop_token_ids)
        for name, _ in sampling.logits_processors:
            if name not in self.custom:
                raise ValueError(
                    f"logits_processors has {shown(name)}, which is none of the LLM's {list(self.custom)}; give the"
                    " function to LLM(logits_processors={name: function})"
                )
        cache_salt = _checked_salt(cache_salt)
        loaded = self._loaded_adapter(adapter)
        make_sample = partial(
            Request,
            prompt_token_ids=token_ids,
            sampling=sampling,
            seed=secrets.randbelow(MAX_SEED + 1) if sampling.seed is None else sampling.seed,
            max_tokens=min(sampling.max_tokens, self._max_len - len(token_ids)),
            stop_token_ids=stop_token_ids,
            cache_salt=cache_salt,
            adapter=loaded,
            prediction=self._checked_prediction(prediction),
            priority=checked_priority(priority),
            tenant=checked_tenant(tenant),
            time_limit=checked_time_limit(deadline),
            shared_prompt=SharedPrompt(sampling.sample_index + sampling.num_samples),
        )
        return [
            make_sample(
                next(ids),
                sample_index=sample_index,
                detokenizer=self.detokenizer(sampling),
                keys=self.page_keys(cache_salt, loaded),
                grammar=compile_structure(self.grammars, self.tokenizer, sampling),
            )
            for sample_index in range(sampling.sample_index, sampling.sample_index + sampling.num_samples)
        ]

    def detokenizer(self, sampling: SamplingParams) -> Detokenizer | None:
        if self.tokenizer is None:
            return None
        options = {"min_tokens": sampling.min_tokens, "skip_special_tokens": sampling.skip_special_tokens}
        return Detokenizer(self.tokenizer, sampling.stop, **options)

    def check_samples(self, name: str, count: int) -> None:
        """Raises ValueError if `count`, the value of parameter `name`, exceeds `EngineConfig.max_samples`."""
        limit = self.engine_config.max_samples
        if count > limit:
            raise ValueError(
                f"{name}={count} is more than max_samples={limit}; ask for fewer or raise EngineConfig.max_samples"
            )

    def _loaded_adapter(self, adapter: Any) -> LoadedAdapter | None:
        name = as_plain("adapter", adapter)
        if name is None:
            return None
        if not isinstance(name, str):
            raise ValueError(f"adapter={shown(adapter)} is not allowed: give the name of a loaded adapter, or None")
        return self.adapters.find(name)

    def _checked_prediction(self, prediction: Prompt | None) -> list[int]:
        if prediction is None:
            return []
        if not self.takes_predictions:
            raise ValueError(
                "prediction cannot be honoured: this engine drafts from no text; load the model with"
                " speculation='ngram' or 'suffix', or leave it out"
            )
        return self.encode(prediction, "prediction", add_special_tokens=False)

    def _check_alternatives(self, name: str, count: int, limit: int | None) -> None:
        vocab_size = self.model_config.vocab_size
        if limit is not None and count > vocab_size:
            raise ValueError(f"{name}={count} is more than the vocabulary of {vocab_size}; ask for fewer")
        if limit is None or count > limit:
            raise ValueError(
                f"{name}={count} is more than max_{name}={limit}; ask for fewer or raise EngineConfig.max_{name}, up to"
                f" the vocabulary of {vocab_size}"
            )

    def _check_listed_tokens(self, sampling: SamplingParams, stop_token_ids: Collection[int]) -> None:
        allowed = sampling.allowed_token_ids
        listed = {
            "stop_token_ids": sampling.stop_token_ids,
            "logit_bias": list(dict(sampling.logit_bias)),
            "bad_words": list(chain.from_iterable(sampling.bad_words)),
            "allowed_token_ids": allowed or (),
        }
        for name, token_ids in listed.items():
            self._check_token_ids(name, token_ids)
        if sampling.min_tokens > 0:
            listed["stop_token_ids"] = stop_token_ids
        else:
            del listed["stop_token_ids"]
        for name, token_ids in listed.items():
            limit = self.engine_config.max_listed_tokens
            if len(token_ids) > limit:
                raise ValueError(
                    f"{name} lists {len(token_ids)} token ids, more than max_listed_tokens={limit}; list fewer or raise"
                    " EngineConfig.max_listed_tokens"
                )
        ruled_out = {word[0] for word in sampling.bad_words if len(word) == 1}
        if sampling.min_tokens > 0:
            ruled_out |= set(stop_token_ids)
        if allowed is not None and ruled_out.issuperset(allowed):
            raise ValueError(
                f"allowed_token_ids={shown(allowed)} leave no first token: bad_words or"
                f" min_tokens={sampling.min_tokens} rule out all of them; allow more"
            )

    def page_keys(self, cache_salt: str | None, adapter: LoadedAdapter | None) -> PageKeys | None:
        """Returns the keys of a new request's pages, or None without a prefix cache."""
        if not self.engine_config.prefix_cache:
            return None
        digest = "" if adapter is None else adapter.digest
        versions = {"model": self.model, "params_version": self.params_version, "adapter": digest}
        return PageKeys(root_key(**versions, cache_salt=cache_salt or ""), self.cache_config.page_size)

    def renewed_keys(self, request: Request) -> PageKeys | None:
        """Returns keys for the pages of a request under the present parameters, None if it has none."""
        return request.keys and self.page_keys(request.cache_salt, request.adapter)

    def encode(self, prompt: Prompt, name: str = "prompt", *, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of a text, or of token ids; ValueError names the parameter `name`."""
        prompt = as_plain(name, prompt)
        require_value(name, prompt)
        if isinstance(prompt, Mapping) and prompt.keys() <= PROMPT_KEYS:
            given = [value for value in prompt.values() if value is not None]
            if len(given) != 1:
                raise ValueError(f"{name} {shown(prompt)} has {len(given)} of prompt and prompt_token_ids; give one")
            prompt = as_plain(name, given[0])
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError(
                    "this checkpoint has no tokenizer.json or tokenizer.model; give token ids, or put its"
                    " tokenizer.json into its folder"
                )
            self.check_characters(name, prompt)
            try:
                token_ids = self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
            except ValueError as error:
                raise ValueError(f"the {name} cannot be encoded: {error}") from error
        else:
            if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray | memoryview):
                way_out = ""
                if isinstance(prompt, Mapping):
                    further = ", ".join(sorted(map(str, prompt.keys() - PROMPT_KEYS)))
                    is_prompt = bool(prompt.keys() & PROMPT_KEYS)
                    way_out = f"; leave out {further:.100}, or" if is_prompt else ";"
                    way_out += " give one column of a table"
                raise ValueError(f"{name} {shown(prompt)} is neither text nor a sequence of token ids{way_out}")
            try:
                num_tokens = len(prompt)
            except OverflowError:  # of a range
                num_tokens = sys.maxsize
            self._check_prompt_len(num_tokens, name)
            token_ids = list(prompt)
            if set(map(type, token_ids)) != {int}:
                token_ids = [as_plain(name, token_id) for token_id in token_ids]
        if not token_ids:
            raise ValueError(f"{name} {shown(prompt)} is empty; give at least one token")
        self._check_token_ids(name, token_ids)
        return [int(token_id) for token_id in token_ids]

    def _check_token_ids(self, name: str, token_ids: Sequence[int]) -> None:
        # Nearly always true, and twenty times faster than a check of each token.
        if set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) < self.model_config.vocab_size:
            return
        for i, token_id in enumerate(token_ids):
            is_int = isinstance(token_id, Integral) and not isinstance(token_id, bool)
            if not is_int or not 0 <= token_id < self.model_config.vocab_size:
                raise ValueError(
                    f"{name}[{i}] is {shown(token_id)}; token ids of this model are integers from 0 to"
                    f" {self.model_config.vocab_size - 1}"
                )

    @property
    def _is_endless(self) -> bool:
        return self.engine_config.num_sink_tokens is not None

    @property
    def _max_len(self) -> int:
        """The most tokens of a request, evicted ones included."""
        return MAX_INT if self._is_endless else self.max_model_len

    @property
    def _num_slots(self) -> int:
        return self.cache_config.num_pages * self.cache_config.page_size

    def _longest(self, num_prompt_tokens: int, sampling: SamplingParams) -> int:
        """Returns the most tokens that the pool can hold of a request, at least one more than its prompt."""
        if window_for(self.window, sampling) is not None:
            return MAX_INT
        return max(self._num_slots, num_prompt_tokens) + 1  # the last token needs no slot

    def check_characters(self, name: str, text: str) -> None:
        """Raises ValueError for a text too long for the token limit; to encode it would take seconds and gigabytes."""
        assert self.tokenizer is not None
        if len(text) < self._max_len or len(text) < self._max_len * self.tokenizer.max_token_len:
            return
        raise PromptTooLongError(
            f"{name} has {len(text):,} characters, and fewer than max_model_len={self.max_model_len} tokens of at most"
            f" {self.tokenizer.max_token_len} characters cannot spell it; shorten it or raise"
            f" EngineConfig.max_model_len up to the model's {self.model_config.longest}"
        )

    def _check_prompt_len(self, num_prompt_tokens: int, name: str = "prompt") -> None:
        if num_prompt_tokens >= self._max_len:
            raise PromptTooLongError(
                f"{name} has {num_prompt_tokens} tokens but max_model_len is {self.max_model_len}, of which at least"
                " one must be left for the output; shorten it or raise EngineConfig.max_model_len up to the model's"
                f" {self.model_config.longest}"
            )

    def _check_lengths(self, num_prompt_tokens: int, sampling: SamplingParams) -> None:
        self._check_prompt_len(num_prompt_tokens)
        if sampling.min_tokens > self._max_len - num_prompt_tokens:
            raise ValueError(
                f"min_tokens={sampling.min_tokens} after a prompt of {num_prompt_tokens} tokens is more than"
                f" max_model_len={self.max_model_len} leaves; lower it, shorten the prompt, or raise"
                f" EngineConfig.max_model_len up to the model's {self.model_config.longest}"
            )
        num_tokens = min(num_prompt_tokens + sampling.max_tokens, self._max_len)
        # The last token is sampled but never computed, so it needs no slot.
        num_slots = num_tokens - 1
        window = window_for(self.window, sampling)
        if num_tokens > self.max_model_len and window is None:
            raise ValueError(
                f"prompt of {num_prompt_tokens} tokens with max_tokens={sampling.max_tokens} may see less than all of"
                f" its tokens, more than max_model_len={self.max_model_len}, but penalties, no_repeat_ngram_size,"
                " bad_words and logits_processors read them all; leave these out or lower max_tokens"
            )
        if window is not None:
            num_most = window.most * self.cache_config.page_size
            num_slots = num_most if num_tokens > self.max_model_len else min(num_slots, num_most)
        if num_slots > self._num_slots:
            raise ValueError(
                f"prompt of {num_prompt_tokens} tokens with max_tokens={sampling.max_tokens} may need {num_slots} slots"
                f" of the cache, which has {self._num_slots}; lower max_tokens, or raise EngineConfig.num_pages,"
                " cache_bytes or memory_bytes"
            )


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Returns one prompt or several as a list of prompts; ValueError for more than MAX_ITEMS of them."""
    items = as_plain("prompts", prompts)
    require_value("prompts", items)
    is_prompt = isinstance(items, Mapping) and (not items or items.keys() & PROMPT_KEYS)
    if isinstance(items, str) or is_prompt:  # a mapping with further keys is refused by their names
        return [items]
    if not isinstance(items, Iterable) or isinstance(items, Mapping | Set | bytes | bytearray | memoryview):
        raise ValueError(f"prompts {shown(prompts)} are neither text, nor token ids, nor several of these")
    if isinstance(items, Sequence) and _are_token_ids(items):
        return [items]  # of any length: the model's limit decides
    items = list(as_tuple("prompts", items, "several"))
    return [items] if _are_token_ids(items) else items


def _are_token_ids(items: Sequence[Any]) -> bool:
    """True if the items are one prompt. Looks at no more than MAX_ITEMS: a range may have 2**60."""
    return bool(items) and all(isinstance(item, Integral) for item in islice(items, MAX_ITEMS))


def as_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams | None]:
    """Returns one SamplingParams (or None) per prompt, from one for all prompts or one per prompt."""
    params = as_plain("sampling_params", params)
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or isinstance(params, str):
        raise ValueError(
            f"sampling_params={shown(params)} is neither a SamplingParams nor a list of them; give one for all"
            " prompts or one per prompt"
        )
    if len(params) != count:
        raise ValueError(
            f"sampling_params has {len(params)} SamplingParams for {count} prompts; give one for all or one per prompt"
        )
    return params


def require_value(name: str, value: Any) -> None:
    """Raises ValueError for a value that a table has for none."""
    if is_missing(value):
        raise ValueError(f"{name} {shown(value)} is a missing value; drop its row or fill it")
