"""What the scripts that run the compilers of accelerators share: a process per device, and whole steps of a model."""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
# What jax would do for the machine at hand is not wanted: it would look for a driver, and what comes from a cache of
# compiled programs leaves no trace of its kernels.
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "JAX_PLATFORMS": "cpu",
    "JAX_ENABLE_COMPILATION_CACHE": "false",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


class Case(NamedTuple):
    """A jitted function, its arguments as shapes, the cache that it must update in place, and kernels to look at."""

    function: Any
    arguments: dict[str, Any]
    cache: Any = None
    kernels: tuple[str, ...] = ()


def llama_3_8b() -> Any:
    """Returns the description of Llama 3 8B, in one group of layers."""
    from jaxinfer.model.config import uniform_decoder

    return uniform_decoder(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_position=8192,
        rope_theta=500000.0,
    )


def qwen3_30b_a3b() -> Any:
    """Returns the description of Qwen3-30B-A3B, in one group of layers."""
    from jaxinfer.checkpoint.families.qwen_moe import config_from_hf_3

    return config_from_hf_3(
        {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "rope_theta": 1000000.0,
            "rms_norm_eps": 1e-6,
        }
    )


MODELS: Mapping[str, Callable[[], Any]] = {"Llama 3 8B": llama_3_8b, "Qwen3-30B-A3B": qwen3_30b_a3b}


def step_case(
    mesh: Any,
    *,
    step: str,
    layout: str,
    model: str = "Llama 3 8B",
    num_tokens: int,
    num_rows: int,
    num_pages: int,
    page_size: int,
    max_context: int = 8192,
    quantization: str | None = None,
    layer_groups: tuple[int, ...] = (),
    kernels: tuple[str, ...] = (),
    tree_q_len: int = 0,
    mixed_q_len: int = 0,
) -> Case:
    """A whole step of a model of `MODELS`, `step` being its name in `jaxinfer.steps.steps`, split over a whole mesh.

    With a `tree_q_len` it verifies trees of that many tokens; with a `mixed_q_len`, drafts beside rows that prefill.
    Everything is bfloat16, except weights that a `quantization` quantizes.
    """
    import jax

    from jaxinfer.config import CacheConfig
    from jaxinfer.model.batch import make_batch
    from jaxinfer.model.cache import abstract_cache, cache_shardings
    from jaxinfer.model.params import abstract_params, shardings
    from jaxinfer.model.quantized_params import quantized_shardings
    from jaxinfer.quantization import quantize_weight
    from jaxinfer.sampling.batch import make_sampling
    from jaxinfer.steps import steps

    config = MODELS[model]()
    config = config.regrouped(layer_groups) if layer_groups else config
    params, placement = abstract_params(config, "bfloat16"), shardings(config, mesh)
    if quantization is not None:
        quantized = functools.partial(quantize_weight, quantization=quantization, is_packed=layout != "tpu")
        by_name = functools.partial(jax.tree_util.tree_map_with_path, lambda path, w: quantized(path[-1].name, w))
        params = jax.eval_shape(by_name, params)
        placement = quantized_shardings(placement)
    cache = abstract_cache(config, CacheConfig(num_pages=num_pages, page_size=page_size, dtype="bfloat16"), layout)
    cache = placed(cache, cache_shardings(cache, mesh))
    sizes = {"num_tokens": num_tokens, "num_rows": num_rows, "table_width": max_context // page_size}
    num_masks = num_tokens if tree_q_len else num_rows * mixed_q_len or None
    host = {
        "batch": make_batch([], page_size=page_size, **sizes),
        "sampling": make_sampling([], num_rows=num_rows, vocab_size=config.vocab_size, num_masks=num_masks),
    }
    statics = {}
    if tree_q_len:
        host["parents"], statics = jax.ShapeDtypeStruct((num_tokens,), "int32"), {"q_len": tree_q_len}
    if mixed_q_len:
        host["num_drafts"], statics = jax.ShapeDtypeStruct((num_rows,), "int32"), {"q_len": mixed_q_len}
    arguments = {"params": placed(params, placement), "cache": cache, **on_mesh(host, mesh)}
    function = functools.partial(getattr(steps, step), config=config, max_log_probs=20, mesh=mesh, **statics)
    return Case(jax.jit(function, donate_argnames="cache"), arguments, cache, kernels)


def placed(tree: Any, shardings: Any) -> Any:
    """Returns shapes with their shardings."""
    import jax

    return jax.tree.map(lambda a, at: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=at), tree, shardings)


def on_mesh(tree: Any, mesh: Any) -> Any:
    """Returns the shapes of a tree's arrays, each whole on every device of a mesh."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=everywhere), tree)


def memory_figures(compiled: Any, cache: Any) -> dict[str, Any]:
    """Returns the bytes that a program takes beside arguments and results, and whether it updates the cache in place.

    All per device.
    """
    import jax

    def size(a: Any) -> int:
        shape = a.shape if a.sharding is None else a.sharding.shard_shape(a.shape)
        return math.prod(shape) * a.dtype.itemsize

    memory = compiled.memory_analysis()
    in_place = memory.alias_size_in_bytes >= sum(map(size, jax.tree.leaves(cache)))
    return {"temporary_bytes": memory.temp_size_in_bytes, "in_place": in_place}


def compile_in_process(
    script: str, arguments: Iterable[str], cases: Iterable[str], environment: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Runs `script --worker arguments --cases cases` alone, for a fatal compiler error ends a process.

    Returns what it printed of each case by `print_figures`, or {"error": …}.
    """
    cases = list(cases)
    worker = subprocess.run(
        [sys.executable, script, "--worker", *arguments, "--cases", *cases],
        env={**os.environ, **ENVIRONMENT, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [json.loads(line) for line in worker.stdout.splitlines() if line.startswith("{")]
    results = {line.pop("case"): line for line in lines}
    missing = {"error": f"the process ended with {worker.returncode}: {worker.stderr[-600:]}"}
    return {name: results.get(name, missing) for name in cases}


def print_figures(cases: Iterable[str], compile_case: Callable[[str], dict[str, Any]]) -> None:
    """Compiles cases and prints a line of JSON for each, with its error if there is one."""
    for name in cases:
        try:
            figures = compile_case(name)
        except Exception as error:  # whatever it is belongs in the table
            figures = {"error": f"{type(error).__name__}: {str(error)[:600]}"}
        print(json.dumps({"case": name, **figures}), flush=True)
