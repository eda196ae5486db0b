"""Plans engines of random shapes within random limits, and holds what each really takes against its plan. Linux, CPU.

python scripts/measure/fuzz_memory.py --count 200

The memory of an engine is the most that the process holds while it serves a load, less what is left of that when the
engine is gone.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import math
import random
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from jaxinfer import LLM, EngineConfig, SamplingParams
from jaxinfer.plan.memory import MemoryPlan
from jaxinfer.plan.step_shapes import max_rows

TOLERANCE = 0.05
MOST_PAGES = 400 * 10**6
# Of smaller engines the tolerance is less than what comes and goes with threads: two steps that hardly overlap, say.
LEAST = 100 * 10**6
STEPS = 40 * 10**6  # about the most that steps of these shapes need
# The compiler's passes over code, which take most of its time, allot no memory.
QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}
M_MMAP_THRESHOLD, MMAP_THRESHOLD = -3, 128 * 1024
libc = ctypes.CDLL("libc.so.6")


@dataclass(frozen=True)
class Figures:
    """Bytes: as planned, as the compiled steps say, as the process held; and compilations while it served."""

    planned: int
    compiled: int
    measured: int
    limit: int
    num_late_compiles: int

    @property
    def worst(self) -> float:
        """By which part of it the plan is off."""
        return max(abs(self.planned / self.compiled - 1), abs(self.planned / self.measured - 1))

    @property
    def is_right(self) -> bool:
        return self.worst <= TOLERANCE and self.planned <= self.limit and not self.num_late_compiles


def random_model(draw: random.Random) -> dict[str, Any]:
    num_kv_heads = draw.choice([2, 4, 8])
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": draw.randrange(1_000, 32_000),
        "hidden_size": 32 * draw.randrange(4, 25),
        "intermediate_size": 32 * draw.randrange(4, 65),
        "num_hidden_layers": draw.choice([1, 1, 1, 2]),
        "num_attention_heads": num_kv_heads * draw.choice([1, 2, 3]),
        "num_key_value_heads": num_kv_heads,
        "head_dim": draw.choice([32, 64]),
        "tie_word_embeddings": draw.random() < 0.5,
        "max_position_embeddings": 16_384,
        "rope_theta": 10_000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "eos_token_id": 0,
    }


def random_limits(draw: random.Random, model: dict[str, Any]) -> dict[str, Any]:
    """Limits of which memory is, nearly always, the one that bounds the number of pages."""
    max_num_seqs, max_model_len = draw.choice([2, 3, 5, 8, 16]), draw.choice([4096, 8192, 16_384])
    parameters = sum(4 * math.prod(shape) for shape in tensor_shapes(model).values())
    slot = 8 * model["num_hidden_layers"] * model["num_key_value_heads"] * model["head_dim"]
    pages = min(max_num_seqs * max_model_len * slot, MOST_PAGES)
    limits = {
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max(max_num_seqs, draw.choice([16, 48, 128, 200, 512])),
        "max_model_len": max_model_len,
        "page_size": draw.choice([16, 32, 64, 128]),
        "memory_bytes": parameters + STEPS + int(pages * draw.uniform(0.3, 1.0)),
        "decode_loop_steps": draw.choice([1, 1, 1, 4]),
        "max_log_probs": draw.choice([0, 20]),
    }
    if draw.random() < 0.2:
        limits["host_cache_bytes"] = 10**7
    return limits


def random_engine(draw: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns a model and limits that take LEAST bytes or more."""
    while True:
        model = random_model(draw)
        limits = random_limits(draw, model)
        if limits["memory_bytes"] - STEPS >= LEAST:
            return model, limits


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns the tensors of a Llama checkpoint."""
    D, F, V = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    N, K, H = (config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (V, D)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.{name}.weight": (D,) for name in ("input_layernorm", "post_attention_layernorm")}
        attention = {"q": (N * H, D), "k": (K * H, D), "v": (K * H, D), "o": (D, N * H)}
        shapes |= {f"{layer}.self_attn.{name}_proj.weight": shape for name, shape in attention.items()}
        mlp = {"gate": (F, D), "up": (F, D), "down": (D, F)}
        shapes |= {f"{layer}.mlp.{name}_proj.weight": shape for name, shape in mlp.items()}
    return shapes


def write_checkpoint(folder: Path, config: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    tensors = {
        name: rng.standard_normal(shape, np.float32) / np.float32(shape[-1] ** 0.5)
        for name, shape in tensor_shapes(config).items()
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def compile_quickly() -> None:
    """Has everything compiled without the compiler's passes over code from now on."""
    compile_with: Any = jax.stages.Lowered.compile
    setattr(jax.stages.Lowered, "compile", lambda lowered: compile_with(lowered, QUICK))  # noqa: B010


def serve(llm: LLM, draw: random.Random) -> None:
    """Fills every row, prompts in full steps, decoding in all rows. Pages take what they take before they are used."""
    config, vocab_size = llm.engine_config, llm.model_config.vocab_size
    slots = llm.metrics().num_pages * config.page_size
    assert config.max_model_len is not None
    assert config.max_num_batched_tokens is not None
    full_steps = 2 * config.max_num_batched_tokens // max_rows(config)
    length = min(config.max_model_len, slots, 100 + full_steps) - 12
    prompts = [draw.choices(range(1, vocab_size), k=length) for _ in range(max_rows(config) + 2)]
    params = [
        SamplingParams(max_tokens=12, ignore_eos=True, seed=i, top_k=5 * (i % 2), repetition_penalty=1 + i % 3)
        for i in range(len(prompts))
    ]
    llm.generate(prompts, params, show_progress=False)


def process_bytes(name: str) -> int:
    """Returns VmRSS, what the process holds, or VmHWM, the most that it held."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))


def give_back() -> None:
    """Gives unused memory back to the system."""
    gc.collect()
    libc.malloc_trim(0)


def compiled_bytes(llm: LLM) -> int:
    """Returns what the hungriest step needs by itself, arguments and results included."""
    needed = []
    for step in llm._engine._runners[0].compiled_steps.compiled.values():
        analysis = step.memory_analysis()
        assert analysis is not None
        results = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
        needed.append(analysis.argument_size_in_bytes + results + analysis.temp_size_in_bytes)
    return max(needed)


def measure(folder: Path, limits: dict[str, Any], draw: random.Random) -> tuple[Figures, MemoryPlan]:
    """Returns the figures of one engine; its executables outlive it, for they are no part of the plan."""
    llm = LLM(folder, config=EngineConfig(**limits))
    plan, compiled, kept = (
        llm.warm_up().memory,
        compiled_bytes(llm),
        dict(llm._engine._runners[0].compiled_steps.compiled),
    )
    serve(llm, draw)  # what threads and Python keep from then on is no part of the plan either
    give_back()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again
    serve(llm, draw)
    most, num_late_compiles = process_bytes("VmHWM"), llm.metrics().num_late_compiles
    del llm
    give_back()
    measured = most - process_bytes("VmRSS")
    kept.clear()
    figures = Figures(plan.total_bytes, compiled, measured, limits["memory_bytes"], num_late_compiles)
    return figures, plan


def try_engine(seed: int, is_quick: bool) -> tuple[Figures, str]:
    """Returns the figures of the engine of a seed, and a line that says them."""
    if is_quick:
        compile_quickly()
    libc.mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD)  # or what is freed may stay
    jax.config.update("jax_enable_compilation_cache", False)
    draw = random.Random(seed)
    model, limits = random_engine(draw)
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), model)
        figures, plan = measure(Path(folder), limits, draw)
    against = (
        f"{figures.planned / figures.compiled - 1:+.2%} of compiled, {figures.planned / figures.measured - 1:+.2%}"
    )
    return figures, f"{seed}: {plan}; plan {against} of measured{'' if figures.is_right else f'  WRONG {limits}'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="engines")
    parser.add_argument("--seed", type=int, default=0, help="of the first")
    parser.add_argument("--jobs", type=int, default=1, help="engines at a time")
    parser.add_argument("--quick", action="store_true", help="leave out the compiler's passes over code")
    arguments = parser.parse_args()
    began, worst, num_wrong = time.monotonic(), 0.0, 0
    seeds = range(arguments.seed, arguments.seed + arguments.count)
    # A process for each: what the one before leaves behind is some megabytes, and given back at any time.
    with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        for figures, line in pool.map(try_engine, seeds, [arguments.quick] * len(seeds)):
            num_wrong, worst = num_wrong + (not figures.is_right), max(worst, figures.worst)
            print(line, flush=True)
    print(
        f"{len(seeds)} engines, {num_wrong} wrong, no plan further off than {worst:.2%},"
        f" {time.monotonic() - began:.0f} s"
    )
    return num_wrong > 0


if __name__ == "__main__":
    sys.exit(main())
