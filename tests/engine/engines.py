"""What the tests of the engine share: a small checkpoint, small engines, and ways to drive them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxinfer.config import EngineConfig, SamplingParams
from jaxinfer.engine.async_llm import AsyncLLM
from jaxinfer.engine.drafters.drafters import Drafter
from jaxinfer.engine.llm import LLM
from jaxinfer.engine.request.completion import Completion, Delta
from jaxinfer.engine.scheduling.drafts import DraftTree
from jaxinfer.engine.scheduling.step import Step
from jaxinfer.engine.speculation.speculation import Speculation
from kernels_pallas.latent_attention import api as latent_api
from kernels_pallas.latent_attention import layout as latent_layout
from kernels_pallas.paged_attention import AttentionCall, api, layout
from kernels_pallas.paged_attention.tpu.block_sizes import Blocks
from tests.engine.probe import clear_outputs, is_idle, runner_of, scheduler_of
from tests.on_demand import KeptProcessor, kept_processors, steps_on_demand
from tests.oracles import save_random_checkpoint
from tests.replay import poisoned

WAIT = 300.0  # seconds; only a test that fails waits for as long
# Few buckets, so that an engine is compiled in seconds: decode 1 and 4, prefill 32.
SMALL: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "max_model_len": 96,
    "page_size": 16,
    "max_log_probs": 4,
    "max_listed_tokens": 80,
}
# Sizes that are no powers of two: how a sum is split up must not show in any bit.
SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 144,
    "intermediate_size": 272,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
EOS = 0
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def save_small_checkpoint(path: Path, *, family: str = "llama", with_tokenizer: bool = True, **overrides: Any) -> Path:
    """A model of two layers over 96 tokens: the end token 0, the space 1, then printable ASCII."""
    save_random_checkpoint(path, family, eos_token_id=EOS, **{**SIZES, **overrides})
    if with_tokenizer:
        characters = ["<end>", "Ġ", *map(chr, range(33, 127))]
        tokenizer = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(characters)}, []))
        tokenizer.add_special_tokens(["<end>"])
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.save(str(path / "tokenizer.json"))
    return path


def spelled(token_ids: Iterable[int]) -> str:
    """The text of token ids under the tokenizer above, by its definition."""
    return "".join("" if i == EOS else " " if i == 1 else chr(i + 31) for i in token_ids)


@KeptProcessor
def favour_turns(logits: jax.Array, tokens: jax.Array, length: jax.Array, bonus: jax.Array) -> jax.Array:
    """Adds `bonus` to tokens that follow the last one by an odd distance."""
    distance = jnp.arange(logits.shape[0]) - tokens[length - 1]
    return jnp.where(distance % 2 == 1, logits + bonus, logits)


def small_engine(path: Path, **overrides: Any) -> LLM:
    """Compiles steps of a shape when the first such step comes."""
    with steps_on_demand():
        return _engine(path, **overrides)


def ready_engine(path: Path, **overrides: Any) -> LLM:
    """A small engine that has compiled all its steps, like one of a user after `warm_up`."""
    with kept_processors():
        llm = _engine(path, **overrides)
        llm.warm_up()
    return llm


def _engine(path: Path, *, make: Any = LLM, speculation: Any = None, **overrides: Any) -> Any:
    options = {"max_unread_tokens": overrides.pop("max_unread_tokens")} if "max_unread_tokens" in overrides else {}
    config = EngineConfig(**{**SMALL, **overrides})
    return make(path, config=config, logits_processors={"turns": favour_turns}, speculation=speculation, **options)


def crowded_engine(path: Path, *, max_drafts: int = 3, speculation: str | Drafter | None = None, **more: Any) -> LLM:
    """Chunks of 5 tokens, fewer pages than its requests want, all poisoned, and drafts where a test has some."""
    limits = {"max_num_seqs": 3, "max_num_batched_tokens": 5, "num_pages": 6, "max_prompt_log_probs": 3}
    drafting = {"max_drafts": max_drafts, "adaptive_drafts": False, "speculation": speculation or ScriptedDrafter(0)}
    llm = small_engine(path, **limits, **drafting, **more)
    poison_cache(llm)
    return llm


def small_async_engine(path: Path, **overrides: Any) -> AsyncLLM:
    """An engine for asyncio, with the steps of `small_engine`."""
    with steps_on_demand():
        return _engine(path, make=AsyncLLM, **overrides)


def interpret_tpu_kernels(patch: pytest.MonkeyPatch) -> None:
    """Makes this machine a TPU to whoever asks for default pages and the best kernel; 0.2 s per step and layer.

    `pytest tests/engine --tpu-kernels` runs the tests of the engine so, for hours.
    """

    def kernels(attend: Any, *operands: Any, **of_heads: Any) -> Any:
        return attend(*operands, blocks=blocks_for(operands[-1].tree_mask), **of_heads)

    def blocks_for(tree_mask: jax.Array | None) -> Blocks:
        # Tiles of 8 rows in both kernels, so that a token's sums have the same order in both; a tree is not split.
        return Blocks(pages=2, buffers=2, queries=4 if tree_mask is None else 8)

    def planner(plan: Any, pool: Any, call: AttentionCall, **sizes: int) -> Any:
        return plan(pool, call, tiling=blocks_for(call.tree_mask), **sizes)

    for module in (layout, latent_layout):
        patch.setattr(module, "default_layout", lambda: "tpu")
    patch.setattr(api, "default_implementation", lambda: "tpu")
    patch.setitem(api.IMPLEMENTATIONS, "tpu", functools.partial(kernels, api.paged_attention_tpu_interpreted))
    of_latents = latent_api.IMPLEMENTATIONS
    patch.setitem(of_latents, "tpu", functools.partial(kernels, of_latents["tpu_interpret"]))
    for planners in (api.PLANNERS, latent_api.PLANNERS):
        patch.setitem(planners, "tpu", functools.partial(planner, planners["tpu_interpret"]))


def are_tpu_kernels_interpreted() -> bool:
    return layout.default_layout() == "tpu"


class ScriptedDrafter:
    """Guesses each token of known answers rightly with a given probability, wrongly else; other requests not at all."""

    def __init__(self, acceptance: float, completions: Iterable[Completion] = ()):
        self.acceptance = acceptance
        self.answers = {(c.prompt_token_ids, c.sample_index): c.token_ids for c in completions}
        self._random = random.Random(0)

    def draft(self, requests, counts):
        return [self._draft(*pair) for pair in zip(requests, counts, strict=True)]

    def forget(self, request):
        pass

    def _draft(self, request, count):
        prompt = tuple(request.token_ids[: request.num_prompt_tokens])
        answer = self.answers.get((prompt, request.sample_index), ())[request.num_output_tokens :][:count]
        return [token if self._random.random() < self.acceptance else (token + 1) % 96 for token in answer]


class ScriptedTrees(ScriptedDrafter):
    """Trees of random shape, in which some path follows the known answers as far as each guess for it is right."""

    def _draft(self, request, count):
        answer = super()._draft(request, count)
        prompt = tuple(request.token_ids[: request.num_prompt_tokens])
        known = self.answers.get((prompt, request.sample_index), ())[request.num_output_tokens :]
        paths: list[tuple[int, ...]] = [()]
        tokens, parents = [], []
        for _ in answer:
            parent = max(self._random.randrange(len(paths)) for _ in range(2))  # rather deep than wide
            depth = len(paths[parent])
            right = known[depth] if depth < len(known) else EOS
            guess = right if self._random.random() < self.acceptance else (right + 1 + self._random.randrange(2)) % 96
            paths.append((*paths[parent], guess))
            tokens.append(guess)
            parents.append(parent - 1)
        return DraftTree(tuple(tokens), tuple(parents))


@contextlib.contextmanager
def drafts_from(llm: LLM, drafter: Drafter) -> Iterator[None]:
    """Gives an engine that speculates another drafter for a while."""
    speculation = scheduler_of(llm)._speculation
    assert isinstance(speculation, Speculation)
    speculation.proposer.drafter, kept = drafter, speculation.proposer.drafter
    yield
    speculation.proposer.drafter = kept


@contextlib.contextmanager
def plain_steps(llm: LLM, *, overlap: bool) -> Iterator[None]:
    """Takes steps without drafts for a while, each launched before the last is read, or none so."""
    scheduler = scheduler_of(llm)
    kept, scheduler._speculation, scheduler._overlap = scheduler._speculation, None, overlap
    yield
    scheduler._speculation, scheduler._overlap = kept, kept is None


@contextlib.contextmanager
def counted_overlaps(llm: LLM) -> Iterator[list[int]]:
    """For each step that is launched meanwhile, of how many requests a token was still to be drawn."""
    launch, counts = runner_of(llm).launch, []

    def counting_launch(step: Step) -> Any:
        counts.append(sum(chunk.start + chunk.num_tokens > len(chunk.request.token_ids) for chunk in step.chunks))
        return launch(step)

    runner_of(llm).launch = counting_launch
    yield counts
    runner_of(llm).launch = launch


def poison_cache(llm: LLM) -> None:
    """Poisons every slot of the cache: whatever reads a slot that was not written shows it. No prefix is left."""
    forget_prefixes(llm)
    runner = runner_of(llm)
    runner._cache = jax.tree.map(lambda pool: jax.device_put(poisoned(pool), pool.sharding), runner._cache)


def num_preemptions(llm: LLM) -> int:
    return llm.metrics().num_preemptions


def num_owned_pages(llm: LLM) -> int:
    """Pages that some request uses; those that are only cached are not among them."""
    return llm.metrics().num_owned_pages


def require_idle(llm: LLM) -> None:
    """Asserts that no request is left and no page is taken."""
    leftover = (llm.has_unfinished, num_owned_pages(llm), is_idle(llm))
    for request_id in list(scheduler_of(llm)._requests):
        llm.abort(request_id)  # or one failure would make those after it fail
    clear_outputs(llm)
    assert leftover == (False, 0, True)


def forget_prefixes(llm: LLM) -> None:
    """Evicts all cached pages, so that the next request computes everything."""
    tables = scheduler_of(llm).replicas[0].tables
    for pages in [pool.pages for pool in tables.pools]:
        pages.evict(pages.num_cached)


def drain(llm: LLM) -> list[Delta]:
    """Steps until nothing is left to do."""
    deltas = []
    while llm.has_unfinished:
        deltas += llm.step()
    return deltas


def generate(llm, prompts, params: Any = GREEDY):
    return llm.generate(prompts, params, show_progress=False)


def token_ids_of(completions):
    return [completion.token_ids for completion in completions]


def completions_of(deltas: Iterable[Delta]) -> dict[int, Completion]:
    return {delta.request_id: delta.completion for delta in deltas if delta.completion is not None}


def content_of(completion: Completion) -> dict:
    """Everything but the id and what it took.

    Floats are equal only if all bits are: no log-probability here is 0 or NaN.
    """
    return {**dataclasses.asdict(completion), "request_id": None, "num_cached_tokens": None, "timings": None}


@contextlib.contextmanager
def recorded_steps(llm: LLM) -> Iterator[list[Step]]:
    """The steps that the engine takes meanwhile."""
    steps: list[Step] = []
    llm.on_step = lambda step, _: steps.append(step)
    try:
        yield steps
    finally:
        llm.on_step = None


def run_with_arrivals(
    llm: LLM,
    prompts: list[list[int]],
    params: list[SamplingParams],
    *,
    seed: int = 0,
    mean_arrivals: float = 1.0,
) -> list[Completion]:
    """Adds prompts in random order, a Poisson number before each step; returns the given order."""
    rng = np.random.default_rng(seed)
    waiting = rng.permutation(len(prompts)).tolist()
    index_of: dict[int, int] = {}
    deltas: list[Delta] = []
    while waiting or llm.has_unfinished:
        for _ in range(min(rng.poisson(mean_arrivals), len(waiting))):
            index = waiting.pop()
            index_of[llm.add(prompts[index], params[index])] = index
        deltas += llm.step()
    done = completions_of(deltas)
    return [done[request_id] for request_id in sorted(index_of, key=lambda request_id: index_of[request_id])]


def random_prompts(count: int, *, max_len: int, seed: int = 0, vocab_size: int = 96) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(1, vocab_size, rng.integers(1, max_len + 1)).tolist() for _ in range(count)]


def run(work: Callable[[], Awaitable[Any]]) -> Any:
    """Returns the result of an asynchronous function, on an event loop of its own."""

    async def within_limit() -> Any:
        return await asyncio.wait_for(work(), WAIT)

    return asyncio.run(within_limit())
