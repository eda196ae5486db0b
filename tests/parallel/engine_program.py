"""Run by the tests of this folder in a process with several CPU devices: engines on a mesh, and what they give.

Arguments: a name in CASES, and those of the case. Prints the results as JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import math
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import save_file

from jaxinfer.checkpoint import abstract_checkpoint, load_checkpoint, open_checkpoint, read_config
from jaxinfer.config import EngineConfig, Parallelism, SamplingParams
from jaxinfer.engine import device_choice
from jaxinfer.engine.async_llm import AsyncLLM
from jaxinfer.engine.drafters.draft_heads import HeadDrafter
from jaxinfer.engine.drafters.early_exit import ExitDrafter
from jaxinfer.engine.execution.page_copier import PageCopier, SealedBundle
from jaxinfer.engine.execution.step_compiler import StepCompiler
from jaxinfer.engine.execution.warm_up import plan_target
from jaxinfer.engine.llm import LLM
from jaxinfer.engine.request.completion import Completion
from jaxinfer.model import stages
from jaxinfer.model.batch import StepTokens
from jaxinfer.model.components.mlp import MLP
from jaxinfer.model.components.moe import MoE, Router, declare_moe, moe
from jaxinfer.model.config import ModelConfig, uniform_decoder
from jaxinfer.model.params import init_params
from jaxinfer.parallel import placement
from jaxinfer.parallel.placement import Placement
from jaxinfer.plan.cache import MemoryQuestion
from jaxinfer.sampling.sample import split_top_k
from jaxinfer.steps.eagle import EagleHead
from jaxinfer.steps.medusa import MedusaHeads
from jaxinfer.steps.steps import StepOptions
from kernels_pallas import row_products
from tests.compiler import integers_as_on_tpu, products_joined
from tests.engine.probe import runner_of, warm_up_of
from tests.on_demand import clear_compiled, steps_on_demand

SIZES: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "max_mixed_tokens": 32,
    "max_model_len": 64,
    "page_size": 16,
    "num_pages": 16,
    "prefix_cache": False,
}
# The second spans pages, and is cut into chunks beside the others.
PROMPTS = [list(range(3, 8)), [i % 23 + 2 for i in range(37)], list(range(40, 51))]
PARAMS = [
    SamplingParams(temperature=temperature, seed=i, max_tokens=10, log_probs=2, ignore_eos=True, **own)
    # The last one repeats itself, so that n-grams draft for it.
    for i, (temperature, own) in enumerate([(0.0, {}), (1.0, {}), (0.7, {"allowed_token_ids": [40, 41]})])
]
TWO = Parallelism(tensor=2)
# The replicas of an engine, and those of them that only prefill.
ROLES = {"one": (1, 0), "two": (2, 0), "apart": (2, 1)}
ADAPTER = tempfile.TemporaryDirectory()


def engine(checkpoint: str, parallelism: Parallelism | None = None, **options: Any) -> LLM:
    own = {name: options.pop(name) for name in ("speculation", "devices", "logits_processors") if name in options}
    join = products_joined() if options.pop("joined", 0) else contextlib.nullcontext()
    pack = integers_as_on_tpu() if options.pop("as_on_tpu", 0) else contextlib.nullcontext()
    # Adaptive drafts depend on the clock.
    config = EngineConfig(parallelism=parallelism, adaptive_drafts=False, **{**SIZES, **options})
    with join, pack, steps_on_demand():
        return LLM(checkpoint, config=config, **own)


def run(llm: LLM, chosen: list[int]) -> list[Completion]:
    """The completions of some prompts. If the engine takes adapters, all but the first have one."""
    if llm.engine_config.max_adapters and not llm.adapters:
        llm.load_adapter("changed", Path(ADAPTER.name))
    names = ["changed" if i and llm.adapters else None for i in chosen]
    ids = [llm.add(PROMPTS[i], PARAMS[i], adapter=name) for i, name in zip(chosen, names, strict=True)]
    completions = finish(llm)
    return [completions[request_id] for request_id in ids]


def save_adapter(checkpoint: str, folder: Path) -> None:
    """An adapter of PEFT that changes queries and what goes down, with random numbers."""
    numbers, (params, config) = np.random.default_rng(0), load_checkpoint(checkpoint)
    rank, D, tensors = 4, config.hidden_size, {}
    layer: Any
    for i, layer in enumerate(params.layers):
        F = layer.feed_forward.up.shape[1]
        heads = int(np.prod(layer.mixer.q.shape[1:-1]))
        for name, inputs, outputs in (("self_attn.q_proj", D, heads), ("mlp.down_proj", F, D)):
            for half, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                key = f"base_model.model.model.layers.{i}.{name}.lora_{half}.weight"
                tensors[key] = numbers.standard_normal(shape).astype(np.float32) / 4
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def bits(completion: Completion) -> str:
    return repr((completion.token_ids, completion.log_probs, completion.top_log_probs))


def options_of(settings: Iterable[str]) -> dict[str, Any]:
    pairs = [setting.split("=") for setting in settings]
    return {name: int(value) if value.isdigit() else value for name, value in pairs}


def same_engine(checkpoint: str, tensor: str, experts: str, *settings: str) -> dict[str, Any]:
    """The tokens of one device and of a mesh, there with their bits: of requests together, and alone in another order.

    Also the bytes of parameters and pages on each device, as they are and as they were planned.
    """
    options = options_of(settings)
    mesh = Parallelism(tensor=int(tensor), experts=int(experts), stages=options.pop("stages", 1))
    if "max_adapters" in options:
        save_adapter(checkpoint, Path(ADAPTER.name))
    stages.MIN_PART = 8  # or steps as small as these would be one part
    one = run(engine(checkpoint, **options), [0, 1, 2])
    llm = engine(checkpoint, mesh, **options)
    runner, memory = runner_of(llm), warm_up_of(llm).ready().memory
    arrays = jax.tree.leaves((runner._params, runner._cache))
    held, whole = [num_bytes_on(device, arrays) for device in jax.devices()], sum(array.nbytes for array in arrays)
    together = run(llm, [0, 1, 2])
    alone = [run(llm, [i])[0] for i in (2, 1, 0)][::-1]
    return {
        "one": [completion.token_ids for completion in one],
        "bits of one": list(map(bits, one)),
        "tokens": [completion.token_ids for completion in together],
        "bits": list(map(bits, together)),
        "alone": list(map(bits, alone)),
        "drafts": llm.metrics().num_drafted_tokens,
        "planned": memory.resident_bytes + memory.pool_bytes,
        "held": held,
        "whole": whole,
    }


def drafters(checkpoint: str) -> dict[str, Any]:
    """The bits of requests on a mesh without drafts, and with drafts of each kind that computes on devices."""
    params, config = load_checkpoint(checkpoint)
    numbers, D = np.random.default_rng(0), config.hidden_size
    medusa = MedusaHeads(jnp.asarray(numbers.standard_normal((2, D, 2 * D)), jnp.float32) / 8)
    # What the first layer gives, as if it were the last.
    ends = ExitDrafter(1, params.final_norm, jnp.zeros((D, D)))
    kinds = {"none": None, "draft model": checkpoint, "medusa heads": HeadDrafter(medusa), "early exit": ends}
    kinds |= {"eagle heads": HeadDrafter(eagle_head(config))}
    results: dict[str, Any] = {"drafts": {}}
    for kind, speculation in kinds.items():
        llm = engine(checkpoint, TWO, speculation=speculation, max_drafts=2)
        results[kind] = list(map(bits, run(llm, [0, 1, 2])))
        results["drafts"][kind] = llm.metrics().num_drafted_tokens
    return results


def eagle_head(config: ModelConfig) -> EagleHead:
    """A random head for a target of this size, whose one KV head two devices cannot share."""
    numbers, D = np.random.default_rng(0), config.hidden_size
    sizes: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 1, "head_dim": 8, "intermediate_size": 24}
    own = uniform_decoder(num_layers=1, vocab_size=config.vocab_size, hidden_size=D, max_position=16, **sizes)
    (layer,), norm = init_params(jax.random.key(0), own).layers, jnp.ones(D)
    return EagleHead(
        embedding_norm=norm,
        hidden_norm=norm,
        layer=jax.tree.map(lambda tensor: tensor[0], layer),
        final_norm=norm,
        config=own,
        window=6,
        input=jnp.asarray(numbers.standard_normal((D, 2 * D)) / 8, jnp.float32),
    )


def requests(checkpoint: str, changed: str) -> dict[str, Any]:
    """What one device and a mesh give for beams, for all alternatives, and for logits that a user's function replaces.

    Also the tokens after an update to the parameters of another checkpoint, once those of one device and once those of
    the mesh, and the tokens of an engine that has loaded that one.
    """
    V, results = read_config(checkpoint).vocab_size, {}
    results["expected"] = [completion.token_ids for completion in run(engine(changed), [0, 1])]
    every = SamplingParams(log_probs=V, max_tokens=2, temperature=0.0, ignore_eos=True)
    flat = SamplingParams(logits_processors={"flat": 0.0}, seed=1, max_tokens=24, ignore_eos=True)
    for name, parallelism in (("one device", None), ("mesh", Parallelism(tensor=4))):
        llm = engine(checkpoint, parallelism, prefix_cache=True, max_log_probs=V, logits_processors={"flat": flattened})
        beams = llm.beam_search(PROMPTS[0], num_beams=3, max_tokens=4, ignore_eos=True)
        (described,), (drawn,) = (llm.generate(PROMPTS[0], own, show_progress=False) for own in (every, flat))
        results[name] = {
            "beams": [beam.token_ids for beam in beams],
            "alternatives": [sorted(of_token) for of_token in described.top_log_probs],
            "total": [sum(map(math.exp, of_token.values())) for of_token in described.top_log_probs],
            "flat": drawn.token_ids,
        }
    for name, mesh in (("of one device", None), ("of the mesh", Mesh(np.array(jax.devices()), ("model",)))):
        params, _ = load_checkpoint(changed, mesh=mesh)
        llm.update_params(params)
        results[name] = [completion.token_ids for completion in run(llm, [0, 1])]
    return results


def flattened(logits: jax.Array, *_: jax.Array) -> jax.Array:
    return jnp.zeros_like(logits)


def replicas(checkpoint: str, tensor: str) -> dict[str, Any]:
    """The bits of 200 prompts, of which many begin alike, by one engine, by two replicas of it, and by two of which one
    prefills.

    Also the devices of their parameters, the tokens found in caches, and the steps and hand-overs of replicas.
    """
    numbers = np.random.default_rng(0)
    beginnings, ends = (numbers.integers(2, 60, size).tolist() for size in ((8, 32), (200, 7)))
    prompts = [[*beginnings[i % 8][: 16 * (1 + i % 2)], *ends[i][: 1 + i % 7]] for i in range(200)]
    params = [SamplingParams(temperature=i % 3 / 2, seed=i, max_tokens=1 + i % 24, ignore_eos=True) for i in range(200)]
    results: dict[str, Any] = {}
    for name, (count, prefill) in ROLES.items():
        parallelism = Parallelism(tensor=int(tensor), replicas=count, prefill=prefill)
        llm = engine(checkpoint, parallelism, prefix_cache=True, num_pages=8)  # so few that requests are preempted
        completions = llm.generate(prompts, params, show_progress=False)
        metrics = llm.metrics()
        results[name] = {
            "bits": list(map(bits, completions)),
            "handed over": metrics.num_hand_overs,
            "damaged": metrics.num_damaged_hand_overs,
            "owned": metrics.num_owned_pages,
            "found": metrics.num_found_tokens,
            "preemptions": metrics.num_preemptions,
            "steps": [replica.num_steps for replica in metrics.replicas],
            "plans": len(llm.warm_up().replicas),
            "devices": [
                sorted(device.id for device in jax.tree.leaves(runner._params)[0].devices())
                for runner in llm._engine._runners
            ],
        }
    return results


def hand_over(checkpoint: str, *settings: str) -> dict[str, Any]:
    """The bits of 50 prompts by one engine, and by two replicas of which one prefills, with every fifth bundle damaged.

    Also the damaged hand-overs, and the pages in use at the end.
    """
    options = options_of(settings)
    numbers = np.random.default_rng(0)
    prompts = [numbers.integers(2, 60, 1 + i % 40).tolist() for i in range(50)]
    params = [SamplingParams(temperature=i % 3 / 2, seed=i, max_tokens=1 + i % 20, ignore_eos=True) for i in range(50)]
    results: dict[str, Any] = {}
    brought, calls = PageCopier.brought, itertools.count()

    def damaged(copier: PageCopier, sealed: SealedBundle) -> SealedBundle:
        bundle = sealed.bundle
        if next(calls) % 5 == 0:  # in the last array, the last number of the first page
            *arrays, last = jax.tree.leaves(bundle)
            last = last.at[(0, *[-1] * (last.ndim - 1))].add(jnp.ones((), last.dtype))
            bundle = jax.tree.unflatten(jax.tree.structure(bundle), [*arrays, last])
        return brought(copier, sealed._replace(bundle=bundle))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PageCopier, "brought", damaged)
        for name in ("one", "apart"):
            replicas, prefill = ROLES[name]
            llm = engine(checkpoint, Parallelism(replicas=replicas, prefill=prefill), prefix_cache=True, **options)
            results[name] = list(map(bits, llm.generate(prompts, params, show_progress=False)))
    metrics = llm.metrics()
    return results | {"damaged": metrics.num_damaged_hand_overs, "owned": metrics.num_owned_pages}


def replica_verbs(checkpoint: str, folder: str) -> dict[str, Any]:
    """The bits of requests that are forked, rewound and saved on two replicas, and of one engine.

    Then those with an adapter, by beams, embeddings, and with other parameters.
    """
    save_adapter(checkpoint, Path(ADAPTER.name))
    other, _ = load_checkpoint(checkpoint)
    other = jax.tree.map(lambda array: array * 1.25, other)
    results: dict[str, Any] = {}
    for name, (count, prefill) in ROLES.items():
        adapters = {"max_adapters": 1, "max_adapter_rank": 4, "max_log_probs": 8}
        llm = engine(checkpoint, Parallelism(replicas=count, prefill=prefill), prefix_cache=True, **adapters)
        # The short prompts have most tokens to come, so that none has ended when the long one has its third.
        ids = [
            llm.add(prompt, replace(own, max_tokens=64 - len(prompt)))
            for prompt, own in zip(PROMPTS, PARAMS, strict=True)
        ]
        counts = Counter(dict.fromkeys(ids, 0))
        while min(counts.values()) < 3:
            counts.update({delta.request_id: len(delta.token_ids) for delta in llm.step()})
        forks = [llm.fork(request_id) for request_id in ids]
        for request_id in ids:
            llm.save(request_id, Path(folder) / str(request_id))
            llm.rewind(request_id, 2, seed=7)
        restored = [llm.restore(Path(folder) / str(request_id)) for request_id in ids]
        ended = finish(llm)
        results[name] = own = {
            "forks": [ended[i].token_ids[-1:] for i in forks],
            "restored": [ended[i].token_ids for i in restored],
            "rewound": [len(ended[i].token_ids) for i in ids],
            "adapter": list(map(bits, run(llm, [0, 1, 2]))),
            "beams": [beam.token_ids for beam in llm.beam_search(PROMPTS[0], num_beams=3, max_tokens=5)],
            "embeddings": llm.embed(PROMPTS, show_progress=False).tolist(),
        }
        llm.unload_adapter("changed")
        ids = [llm.add(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
        for _ in range(3):
            llm.step()
        llm.update_params(other)
        finish(llm)
        own["new parameters"] = [bits(c) for c in llm.generate(PROMPTS, PARAMS, show_progress=False)]
        with llm.timeline() as timeline:
            llm.generate(PROMPTS, PARAMS, show_progress=False)
        own["tracks"] = sorted({step.replica for step in timeline.steps})
    return results


def failing_replica(checkpoint: str) -> dict[str, Any]:
    """The errors of requests of which one replica fails, and of a request afterwards."""

    async def fail() -> list[Any]:
        config = EngineConfig(parallelism=Parallelism(replicas=2), **SIZES)
        with steps_on_demand():
            llm = AsyncLLM(checkpoint, config=config)
        broken = llm._engine._runners[1]

        def lose(*_: Any) -> Any:
            raise RuntimeError("the device is lost")

        choose = broken.compiled_steps.choose
        broken.compiled_steps.choose = lambda step: choose(step)._replace(compiled=lose)
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        ended = await asyncio.gather(*(llm.generate(prompt, params) for prompt in PROMPTS * 4), return_exceptions=True)
        later = await asyncio.gather(llm.generate(PROMPTS[0], params), return_exceptions=True)
        await llm.close()
        return [str(error) for error in (*ended, *later)]

    return {"errors": asyncio.run(fail())}


def num_bytes_on(device: Any, arrays: list[jax.Array]) -> int:
    shards = [shard for array in arrays for shard in array.addressable_shards]
    return sum(shard.data.nbytes for shard in shards if shard.device == device)


def branches(checkpoint: str, folder: str) -> dict[str, Any]:
    """A request that is forked, saved half-way, and restored on its own mesh, on another one and on one device."""
    llm, path = engine(checkpoint, TWO), Path(folder) / "request"
    undisturbed = run(llm, [1])[0]
    request_id = llm.add(PROMPTS[1], PARAMS[1])
    for _ in range(6):
        llm.step()
    fork = llm.fork(request_id)
    llm.save(request_id, path)
    rest = finish(llm)
    results: dict[str, Any] = {"undisturbed": bits(undisturbed), "here": bits(rest[request_id])}
    others = {
        "the same mesh": llm,
        "another order": engine(checkpoint, TWO, devices=jax.devices()[1::-1]),
        "one device": engine(checkpoint),
    }
    computed = {}
    for name, other in others.items():
        before = other.metrics().num_prefill_tokens
        restored = other.restore(path)
        results[name] = finish(other)[restored].token_ids
        computed[name] = other.metrics().num_prefill_tokens - before
    return results | {"tokens": undisturbed.token_ids, "forked": len(rest[fork].token_ids), "computed": computed}


def finish(llm: LLM) -> dict[int, Completion]:
    completions = {}
    while llm.has_unfinished:
        completions |= {delta.request_id: delta.completion for delta in llm.step() if delta.completion is not None}
    return completions


def warm_start(checkpoint: str, folder: str) -> dict[str, Any]:
    """The number of steps on disk after a first start, after a second, and after one on devices in another order."""
    Path(folder).mkdir(mode=0o700)
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e9)  # JAX keeps none of its own
    results: dict[str, Any] = {"tokens": []}
    for name, devices in (("first", None), ("second", None), ("other order", jax.devices()[1::-1])):
        llm = engine(checkpoint, TWO, devices=devices)
        results["tokens"].append(run(llm, [0])[0].token_ids)
        results[name] = len(list(Path(folder).glob("jaxinfer-*")))
        llm.close()
        clear_compiled()
    return results


def disk_tier(checkpoint: str, folder: str) -> dict[str, Any]:
    """The tokens of a prompt that engines find on disk, after a first one has computed it."""
    tiers = {"prefix_cache": True, "num_pages": 4, "host_cache_bytes": 2**14}
    tiers |= {"disk_cache_bytes": 2**24, "disk_cache_path": folder}
    results: dict[str, Any] = {"tokens": []}
    for name, parallelism, devices in (
        ("first", TWO, None),
        ("the same mesh", TWO, None),
        ("another order", TWO, jax.devices()[1::-1]),
        ("one device", None, None),
    ):
        llm = engine(checkpoint, parallelism, devices=devices, **tiers)
        results["tokens"].append(run(llm, [1])[0].token_ids)
        results[name] = llm.metrics().num_found_tokens
        for first in range(50, 54):  # fills the pool and the host's tier, so that pages go to the disk
            llm.generate([[first, *PROMPTS[1]]], PARAMS[1], show_progress=False)
        llm.close()
    return results


def refusals(dense: str, sparse: str) -> dict[str, str]:
    """The errors for what devices cannot share."""
    devices, config = jax.devices(), read_config(dense)

    def message(make: Callable[[], Any]) -> str:
        try:
            make()
        except ValueError as error:
            return str(error)
        return "none"

    explicit = Mesh(np.array(devices[:2]), ("model",), axis_types=(AxisType.Explicit,))
    unknown = Mesh(np.array(devices), ("data",))
    return {
        "tensor=3": message(lambda: engine(dense, Parallelism(tensor=3))),
        "experts=2": message(lambda: engine(dense, Parallelism(experts=2))),
        "experts=3 of 4": message(lambda: engine(sparse, Parallelism(experts=3))),
        "tensor=8": message(lambda: engine(dense, Parallelism(tensor=8))),
        "groups": message(lambda: engine(dense, TWO, quantization="int4")),
        "devices": message(lambda: engine(dense, TWO, devices=devices[:1] * 2)).partition(": ")[2],
        "replicas=3": message(lambda: engine(dense, Parallelism(tensor=2, replicas=3))),
        "drafts": message(lambda: engine(dense, Parallelism(replicas=2), speculation="ngram")),
        "explicit axes": message(lambda: StepOptions(config=config, mesh=explicit)).partition("; ")[2],
        "unknown axis": message(lambda: load_checkpoint(dense, mesh=unknown)),
    }


def tried_products(checkpoint: str) -> dict[str, int]:
    """How many shapes of products by weights the steps of one device and of a mesh try on this machine."""
    path, config = Path(checkpoint), EngineConfig(**SIZES, max_prompt_log_probs=1)
    abstract, model_config = abstract_checkpoint(path, "float32")
    tried: list[tuple[int, ...]] = []

    def try_none(form: str, counts: tuple[int, ...], A: int, B: int, dtype: Any) -> frozenset[int]:
        tried.extend([(A, B)] if form == row_products.BY_WEIGHTS else [])
        return frozenset()

    results = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_products, "equal_row_counts", try_none)
        patch.setattr(row_products, "MIN_TRIED_WEIGHTS", 0)
        for name, parallelism in (("one device", None), ("mesh", TWO)):
            tried.clear()
            at = Placement.of(model_config, parallelism)
            params = at.params(model_config, abstract)
            question = MemoryQuestion(model=model_config, config=config, dtype="float32", placement=at)
            target = plan_target(params, question, {})
            compiler = StepCompiler(target, config.max_drafts)
            for bucket in compiler.buckets:
                compiler.trace(target.cache_config, bucket)
            results[name] = len(set(tried))
    return results


def shared_expert() -> dict[str, Any]:
    """The sums over devices of a layer with a shared expert, and its difference from that of one device."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("experts", "model"))
    expert, router = MLP(intermediate_size=8, has_bias=True), Router(num_chosen=2)
    config = MoE(num_experts=4, expert=expert, router=router, shared=expert, has_shared_gate=True)
    numbers = np.random.default_rng(0)

    def make(sizes: tuple[int, ...], axes: tuple[str, ...], *_: Any, **__: Any) -> Any:
        at = NamedSharding(mesh, PartitionSpec(*({"experts": "experts", "mlp": "model"}.get(axis) for axis in axes)))
        return jax.device_put(jnp.asarray(numbers.standard_normal(sizes), jnp.float32), at)

    params, x = declare_moe(config, 16, make), jnp.asarray(numbers.standard_normal((8, 16)), jnp.float32)

    def run(params: Any, x: jax.Array, mesh: Mesh | None) -> jax.Array:
        return moe(params, x, StepTokens(jnp.int32(8), is_split=mesh is not None), config=config, mesh=mesh)

    compiled = jax.jit(run, static_argnums=2).lower(params, x, mesh).compile()
    whole = jax.device_put(params, jax.devices()[0])
    error = np.abs(np.asarray(compiled(params, x)) - np.asarray(jax.jit(run, static_argnums=2)(whole, x, None))).max()
    # CPU devices gather the parts of a sum.
    sums = re.findall(r"= .* all-(?:reduce|gather)(?:-start)?\(", str(compiled.as_text()))
    return {"sums": len(sums), "error": float(error)}


def top_k() -> bool:
    """True if devices that share rows find what one device does, with equal numbers in several parts."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("experts", "model"))
    sharding = NamedSharding(mesh, PartitionSpec(None, "model"))
    logits = jnp.asarray(np.random.default_rng(0).integers(0, 5, (3, 12)), jnp.float32)
    take = jax.jit(lambda logits, count: split_top_k(logits, count, sharding), static_argnums=1)
    pairs = [(take(jax.device_put(logits, sharding), count), jax.lax.top_k(logits, count)) for count in (4, 9)]
    return all(np.array_equal(a, b) for found, expected in pairs for a, b in zip(found, expected, strict=True))


def fewest_devices(checkpoint: str) -> dict[str, Any]:
    """The devices that engines take by themselves, if each has some bytes, with the tokens and what is logged.

    Also what is logged if none hold the model, the bytes of a device as planned, and those of the compiled step that
    needs most.
    """
    results: dict[str, Any] = {"tokens": [completion.token_ids for completion in run(engine(checkpoint), [0, 1, 2])]}
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    for module in (device_choice, placement):
        logging.getLogger(module.__name__).addHandler(handler)

    @contextlib.contextmanager
    def devices_of(num_bytes: int) -> Iterator[None]:
        lines.clear()
        with pytest.MonkeyPatch.context() as patch:
            for module in (device_choice, placement):
                patch.setattr(module, "free_bytes", lambda _=None: num_bytes)
            yield

    with devices_of(2_000_000):
        assert (
            device_choice.fewest_devices(
                open_checkpoint(checkpoint), EngineConfig(**SIZES), "float32", speculates=False
            )
            is None
        )
    results["too few"] = list(lines)
    for num_bytes_of_device in (12_000_000, 40_000_000):
        with devices_of(num_bytes_of_device):
            llm = engine(checkpoint)
        tokens = [completion.token_ids for completion in run(llm, [0, 1, 2])]
        warm_up = warm_up_of(llm)
        needs: list[Any] = [compiled.memory_analysis() for compiled in warm_up.steps.compiled.values()]
        results[str(num_bytes_of_device)] = {
            "parallelism": repr(llm.engine_config.parallelism),
            "lines": list(lines),
            "tokens": tokens,
            "planned": warm_up.ready().memory.total_bytes,
            "compiled": max(need.argument_size_in_bytes + need.temp_size_in_bytes for need in needs),
        }
    for name, num_bytes_of_device, given in (
        ("all", 40_000_000, Parallelism(replicas="auto")),
        ("of two", 12_000_000, Parallelism(replicas="auto", prefill=1)),
    ):
        with devices_of(num_bytes_of_device):
            llm = engine(checkpoint, given)
        tokens = [completion.token_ids for completion in run(llm, [0, 1, 2])]
        results[name] = {"parallelism": repr(llm.engine_config.parallelism), "lines": list(lines), "tokens": tokens}
    opened, auto = open_checkpoint(checkpoint), EngineConfig(parallelism=Parallelism(tensor=3, replicas="auto"))
    with devices_of(40_000_000):
        alone = device_choice.chosen_parallelism(opened, auto, "float32", None, speculates=False)
        results["left"] = {"parallelism": repr(alone), "lines": list(lines)}
    with pytest.raises(ValueError, match="replicas='auto' of 3 devices each cannot share 4; give a multiple"):
        device_choice.chosen_parallelism(opened, auto, "float32", jax.devices(), speculates=False)
    return results


CASES: dict[str, Callable[..., Any]] = {
    "fewest devices": fewest_devices,
    "same engine": same_engine,
    "drafters": drafters,
    "requests": requests,
    "branches": branches,
    "warm start": warm_start,
    "disk tier": disk_tier,
    "refusals": refusals,
    "replicas": replicas,
    "hand-over": hand_over,
    "replica verbs": replica_verbs,
    "failing replica": failing_replica,
    "tried products": tried_products,
    "shared expert": shared_expert,
    "top k": top_k,
}

if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    print(json.dumps(CASES[name](*arguments)))
