"""vLLM's `LLM`."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, Self

from jaxinfer.checkpoint import open_checkpoint
from jaxinfer.compat.vllm.engine_args import (
    MAX_LOG_PROBS,
    dtype_of,
    engine_config,
    model_place,
    refuse,
    require_one_of,
    require_packing,
    reserve_memory,
    speculation_of,
)
from jaxinfer.compat.vllm.lora.request import LoRARequest
from jaxinfer.compat.vllm.outputs import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    request_output,
)
from jaxinfer.compat.vllm.pooling_params import PoolingParams
from jaxinfer.compat.vllm.sampling_params import SamplingParams
from jaxinfer.compat.vllm.tokenizers import get_tokenizer
from jaxinfer.engine import llm as ours
from jaxinfer.engine.frontend.admission import ONE_TOKEN, as_prompts
from jaxinfer.engine.frontend.chats import as_conversations
from jaxinfer.engine.request.completion import Completion
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.validation import require, shown

# Parameters of its calls.
CALL = frozenset(("prompts", "sampling_params", "use_tqdm", "lora_request", "messages", "tools", "pooling_params"))
# Methods of vLLM's LLM that are missing, with the way out.
MISSING: Mapping[str, str] = MappingProxyType(
    {
        "apply_model": "the model is a function of its parameters: see jaxinfer.load_checkpoint and prefill_step",
        "beam_search": "write llm.native.beam_search(prompt, num_beams=…)",
        "classify": "write llm.native.classify(prompts)",
        "collective_rpc": "one process drives all devices; LLM.native.update_params replaces weights",
        "encode": "write llm.embed(prompts)",
        "get_metrics": "write llm.native.metrics()",
        "reset_prefix_cache": "give EngineConfig.prefix_cache=False, or cache_salt to LLM.native.generate",
        "reward": "write llm.native.classify(prompts, activate=False)",
        "score": "write llm.native.score(queries, documents)",
        "sleep": "write llm.close() and make a new LLM, whose compiled steps are on disk",
        "start_profile": "write `with llm.native.timeline() as timeline:`",
        "stop_profile": "write `with llm.native.timeline() as timeline:`",
        "wake_up": "write llm.close() and make a new LLM, whose compiled steps are on disk",
    }
)


@dataclass
class _Job:
    """One prompt of a call, and its parameters in the names of both packages."""

    request_id: str
    prompt: Any
    params: SamplingParams
    native: ours.SamplingParams
    lora: LoRARequest | None
    completions: Sequence[Completion] = ()


class LLM:
    """vLLM's `LLM`: a model, text in, text out. Its parameters and methods are those of vLLM.

    Raises TypeError or ValueError for what cannot be honoured, with the way out.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        tokenizer: str | None = None,
        dtype: Any = "auto",
        quantization: str | None = None,
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        seed: int | None = 0,
        tensor_parallel_size: int = 1,
        data_parallel_size: int = 1,
        gpu_memory_utilization: float | None = None,
        kv_cache_dtype: str = "auto",
        max_logprobs: int = MAX_LOG_PROBS,
        enable_lora: bool = False,
        max_loras: int = 1,
        max_lora_rank: int = 16,
        speculative_config: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> None:
        """Loads a model; None takes the small one of the package.

        `seed` is that of the engine: requests without a seed of their own get one from it, and from their number.
        """
        place = model_place(model, revision, tokenizer, tokenizer_revision)
        speculation, num_drafts = speculation_of(speculative_config)
        config = engine_config(
            tensor_parallel_size=tensor_parallel_size,
            data_parallel_size=data_parallel_size,
            kv_cache_dtype=kv_cache_dtype,
            max_logprobs=max_logprobs,
            max_adapters=max_loras if enable_lora else 0,
            max_lora_rank=max_lora_rank,
            num_speculative_tokens=num_drafts,
            others=others,
            named=inspect.signature(LLM).parameters,
        )
        if quantization is not None:
            require_packing(place, quantization)
        if gpu_memory_utilization is not None:
            reserve_memory(gpu_memory_utilization)
        self.native = ours.LLM(place, config=config, dtype=dtype_of(dtype), speculation=speculation)
        self._place, self._seed = place, seed
        with self.native.engine() as engine:
            self._eos_token_ids, self._max_model_len = engine.eos_token_ids, engine.max_model_len
        self._numbers = itertools.count()  # of requests
        self._adapters: dict[str, str] = {}  # the paths of the loaded ones by name, in the order of their loading

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        if name in MISSING:
            raise AttributeError(f"this LLM has no {name}: {MISSING[name]}")
        raise AttributeError(f"this LLM has no {name}; that of the package is LLM.native")

    def close(self) -> None:
        """Frees the memory of the model."""
        self.native.close()

    @property
    def llm_engine(self) -> SimpleNamespace:
        """The facts of vLLM's engine that scripts read: `model_config.max_model_len` and `model_config.model`."""
        facts = SimpleNamespace(model=self.native.model_names[-1], max_model_len=self._max_model_len)
        return SimpleNamespace(model_config=facts)

    def get_tokenizer(self) -> Any:
        """Returns the tokenizer of `transformers`, as vLLM does; that of this package is `LLM.native.tokenizer`."""
        if self._place is None:
            raise ValueError("the model of the package has no tokenizer of transformers; use LLM.native.tokenizer")
        return get_tokenizer(open_checkpoint(self._place).path)

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the parameters that the checkpoint's generation_config.json recommends."""
        defaults = self.native.default_sampling_params
        names = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty"]
        if defaults.max_tokens != ours.SamplingParams.max_tokens:
            names.append("max_tokens")
        return SamplingParams(**{name: getattr(defaults, name) for name in names})

    def generate(
        self,
        prompts: Any = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        prompt_token_ids: Any = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Completes prompts: text, token ids, mappings with either, or several of these; one output for each.

        `sampling_params` and `lora_request` are one for all prompts, or a list. `prompt_token_ids` is the older way to
        give token ids.
        """
        refuse("generate", others, CALL, {"SamplingParams": SamplingParams.__annotations__})
        if prompt_token_ids is not None:
            if prompts is not None:
                raise ValueError("prompts and prompt_token_ids are both given; leave one out")
            prompts = prompt_token_ids
        items = as_prompts(prompts)
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        params = _for_each("sampling_params", sampling_params, SamplingParams, len(items))
        loras = _for_each("lora_request", lora_request, LoRARequest | None, len(items))
        jobs = [self._job(*each) for each in zip(items, params, loras, strict=True)]
        self._run(jobs, use_tqdm)
        return [
            request_output(
                job.request_id,
                job.prompt,
                job.params,
                job.lora,
                job.completions,
                tokenizer=self.native.tokenizer,
                eos_token_ids=self._eos_token_ids,
            )
            for job in jobs
        ]

    def chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Completes one conversation or several, rendered by the chat template, as `generate` does their texts."""
        refuse("chat", others, CALL, {"SamplingParams": SamplingParams.__annotations__})
        require_one_of("chat_template_content_format", chat_template_content_format, ("auto", "string", "openai"))
        tokenizer = self._tokenizer("chat")
        texts = [
            tokenizer.render_chat(
                conversation,
                tools=tools,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                variables=chat_template_kwargs or {},
            )
            for conversation in as_conversations(messages)
        ]
        ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        outputs = self.generate(ids, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request)
        return [replace(output, prompt=text) for output, text in zip(outputs, texts, strict=True)]

    def embed(
        self,
        prompts: Any,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        **others: Any,
    ) -> list[EmbeddingRequestOutput]:
        """Returns the vector of each prompt: the state of its last token, scaled to length 1 unless told otherwise."""
        refuse("embed", others, CALL)
        given = as_prompts(prompts)
        with self.native.engine() as engine:
            admitted = engine.admit_all(given, [ONE_TOKEN] * len(given))
        items = [samples.requests[0].token_ids for samples in admitted]
        of_each = _for_each("pooling_params", pooling_params or PoolingParams(), PoolingParams, len(items))
        if len({pooling.normalize for pooling in of_each}) > 1:
            raise ValueError("pooling_params differ in normalize; embed the prompts in two calls")
        normalize = all(pooling.normalize for pooling in of_each)
        vectors = self.native.embed(items, normalize=normalize, show_progress=bool(use_tqdm)) if items else ()
        return [
            EmbeddingRequestOutput(str(next(self._numbers)), EmbeddingOutput(vector.tolist()), list(ids))
            for ids, vector in zip(items, vectors, strict=True)
        ]

    def _job(self, prompt: Any, params: SamplingParams, lora: LoRARequest | None) -> _Job:
        """Returns the next request; ValueError for parameters that cannot be honoured."""
        number, tokenizer = next(self._numbers), self.native.tokenizer
        if params.bad_words and tokenizer is None:
            raise ValueError(f"bad_words={shown(params.bad_words)} needs a tokenizer, which the checkpoint has not")
        return _Job(str(number), prompt, params, params.native(tokenizer, self._seed_of(number)), lora)

    def _run(self, jobs: Sequence[_Job], use_tqdm: bool | Callable[..., Any]) -> None:
        """Gives each job its completions. The jobs of each adapter run together."""
        by_adapter: dict[tuple[str, str] | None, list[_Job]] = {}
        for job in jobs:
            by_adapter.setdefault(job.lora and (job.lora.lora_name, str(job.lora.lora_path)), []).append(job)
        if len(by_adapter) > 1:
            with self.native.engine() as engine:  # refuses what cannot be honoured before the first of them runs
                engine.admit_all([job.prompt for job in jobs], [job.native for job in jobs])
        for adapter, own in by_adapter.items():
            if adapter is not None:
                self._load(*adapter)
            options: dict[str, Any] = {"show_progress": bool(use_tqdm), "adapter": adapter and adapter[0]}
            prompts, params = [job.prompt for job in own], [job.native for job in own]
            completions = iter(self.native.generate(prompts, params, **options))
            for job in own:
                job.completions = list(itertools.islice(completions, job.native.n))

    def _load(self, name: str, path: str) -> None:
        """Loads an adapter unless it is loaded; if there is no slot, in place of the one that was loaded first."""
        slots = self.native.engine_config.max_adapters
        if not slots:
            raise ValueError(f"adapter {shown(name)} needs an LLM with enable_lora=True")
        if self._adapters.get(name) == path:
            return
        if name in self._adapters or len(self._adapters) == slots:
            replaced = name if name in self._adapters else next(iter(self._adapters))
            self.native.unload_adapter(replaced)
            del self._adapters[replaced]
        self.native.load_adapter(name, path)
        self._adapters[name] = path

    def _seed_of(self, number: int) -> int | None:
        """Returns the seed of a request by its number, None to let the engine choose one."""
        if self._seed is None:
            return None
        return int.from_bytes(blake2b(f"{self._seed} {number}".encode(), digest_size=8).digest())

    def _tokenizer(self, place: str) -> Tokenizer:
        if self.native.tokenizer is None:
            raise ValueError(f"{place} needs a tokenizer, which the checkpoint has not; give token ids to generate")
        return self.native.tokenizer


def _for_each(name: str, given: Any, kind: Any, count: int) -> list[Any]:
    """Returns one for each prompt; ValueError for another number of them, or of another kind."""
    items = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given] * count
    if len(items) != count:
        raise ValueError(f"{name} has {len(items)} items for {count} prompts; give one for each, or one for all")
    for item in items:
        require(isinstance(item, kind), name, item, "of the class that jaxinfer.compat.vllm has for it")
    return items
