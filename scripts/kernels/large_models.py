"""Compiles whole steps of large models for the devices that they need, without these devices, and prints a table.

    python scripts/kernels/large_models.py [--models GPT-OSS-120B] [--devices v6e-8x2 H200-2] [--json]

Needs the extra `aot`. Each step of a model compiles over a mesh: "v6e-4" splits heads and MLPs over 4 chips, "v6e-8x2"
whole experts over 8 of 16 and the rest over pairs, "v6e-2x1x4" layers over two stages of 4. Everything is bfloat16. The
table has for each model and mesh:

* the bytes of arguments, which are parameters and cache, and of temporaries, on each device,
* the seconds of processor time to lower and compile,
* on GPU the registers of the kernel that has most, and the bytes that any spills.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scripts.kernels import compile_gpu, compile_matrix
from scripts.kernels.collectives import collectives
from scripts.kernels.compilers import Case, axes_of, compile_in_process, lower_case, print_figures, step_case
from scripts.kernels.figures import compile_on_gpu, copied_weights, gpu_mesh, memory_figures

# By model, the devices of a kind that hold it.
MESHES = {
    "Llama-3-8B": ("v6e-8", "v5e-4x1x1", "v6e-2x1x2", "H200-2x1x1"),
    "Llama-3-70B": ("v6e-8",),
    "Qwen3-30B-A3B": ("v6e-4", "v6e-8", "v5p", "H200"),
    "Gemma-3-27B": ("v6e-4", "v5p", "H200"),
    "GPT-OSS-120B": ("v6e-8x2", "v5p-4", "H200-2"),
    "Qwen3-Next-80B-A3B": ("v6e-8x2", "v5p-2", "H200-2"),
    "DeepSeek-V3": ("v6e-8x8", "v5p-4x4", "H200-2x8"),
}
# Bytes that programs may use of a device's memory.
MEMORY = {"v5e": 15.75 * 2**30, "v5p": 95.74 * 2**30, "v6e": 31.25 * 2**30, "H200": 141e9}
STEPS = ("decode", "prefill")
# A decode step that gives 20 alternatives to each token, over several chips: it must gather no logits.
LOG_PROBS = {"form": "full", "max_log_probs": 20}
NUM_PAGES, PAGE_SIZE, MAX_CONTEXT = 512, 128, 8192


class Sizes(NamedTuple):
    """Rows of a step, and tokens of one that prefills."""

    num_rows: int
    num_tokens: int


SIZES = {"tpu": Sizes(32, 512), "gpu": Sizes(64, 2048)}


def cases_of(model: str, device: str) -> list[str]:
    """Returns the names of the cases of a model on devices."""
    is_mesh = not is_gpu(device) and math.prod(axes_of(device)[1].values()) > 1
    return [f"{model} {step} step" for step in (*STEPS, *["decode-log-probs"] * is_mesh)]


def num_bounded_pages(model: str, layout: str) -> tuple[int, ...]:
    """Returns the pages of the bounded kinds of a model, as the engine plans them."""
    from jaxinfer.checkpoint.published import published_config
    from jaxinfer.config import EngineConfig
    from jaxinfer.plan.cache import MemoryQuestion, bounded_pages

    num_rows, num_tokens = SIZES[layout]
    config = EngineConfig(
        max_num_seqs=num_rows,
        max_num_batched_tokens=num_tokens,
        max_model_len=MAX_CONTEXT,
        page_size=PAGE_SIZE,
    )
    return bounded_pages(MemoryQuestion(model=published_config(model), config=config, dtype="bfloat16"))


def make_case(name: str, layout: str, mesh: Any) -> Case:
    """Returns the case of a name, over pages as the engine plans them."""
    model, step, _ = name.split()
    options = LOG_PROBS if step == "decode-log-probs" else {}
    step = step.partition("-")[0]
    num_rows, num_tokens = SIZES[layout]
    return step_case(
        mesh,
        model=model,
        step=f"{step}_step",
        layout=layout,
        num_tokens=num_rows if step == "decode" else num_tokens,
        num_rows=num_rows,
        num_pages=NUM_PAGES,
        num_bounded_pages=num_bounded_pages(model, layout),
        page_size=PAGE_SIZE,
        max_context=MAX_CONTEXT,
        kernels=(*compile_gpu.KERNELS, "grouped_matmul") if layout == "gpu" else (),
        **options,
    )


def is_gpu(device: str) -> bool:
    return axes_of(device)[0] in compile_gpu.DEVICES


def compile_named(device: str, name: str) -> dict[str, Any]:
    """Returns what a case needs on a device, on TPUs with its `collectives`."""
    import jax

    if is_gpu(device):
        return compile_on_gpu(device, functools.partial(make_case, name, "gpu"))
    mesh = compile_matrix.mesh_of(device)
    start, used = time.perf_counter(), sum(os.times()[:4])
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        case = make_case(name, "tpu", mesh)
        compiled = case.function.lower(**case.arguments).compile()
    hlo = compiled.as_text()
    return {
        **memory_figures(compiled, case.cache),
        "copied_weights": copied_weights(hlo, case.arguments["params"]),
        **collectives(hlo),
        "seconds": round(time.perf_counter() - start, 1),
        "processor_seconds": round(sum(os.times()[:4]) - used, 1),
    }


def lower_named(device: str, dump: str, name: str) -> dict[str, Any]:
    """Returns `lower_case` of a case on a device."""
    if is_gpu(device):
        return lower_case(gpu_mesh(device), functools.partial(make_case, name, "gpu"))
    return compile_matrix.lower_on_tpu(compile_matrix.mesh_of(device), dump, functools.partial(make_case, name, "tpu"))


def compile_for(device: str, cases: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Compiles cases for a device in a process of their own; returns each one's figures, or {"error": …}."""
    if is_gpu(device):
        return compile_in_process(__file__, [device, ""], cases, {})
    return compile_matrix.compile_for(device, cases, __file__)


def lower_for(device: str, cases: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Lowers cases for a device; returns each one's `lower_case`, or {"error": …}."""
    if is_gpu(device):
        return compile_in_process(__file__, [device, "", "--lower"], cases, {})
    return compile_matrix.lower_for(device, cases, __file__)


def cells(figures: list[dict[str, Any]]) -> list[str]:
    """Returns the cells of a table for the figures of a model's steps."""
    errors = [case["error"] for case in figures if "error" in case]
    if errors:
        return errors
    launches = [launch for case in figures for launch in case.get("kernels", ())]
    registers = max((launch["registers"] for launch in launches), default=0)
    spilled = sum(launch["spill_bytes"] for launch in launches)
    return [
        f"{max(case['argument_bytes'] for case in figures) / 1e9:.1f}",
        *(f"{case['temporary_bytes'] / 1e6:,.0f}" for case in figures),
        *(f"{case['processor_seconds']:.0f}" for case in figures),
        "yes" if all(case["in_place"] for case in figures) else "no",
        f"{registers} / {spilled}" if launches else "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    devices = sorted({device for meshes in MESHES.values() for device in meshes})
    parser.add_argument("--models", nargs="+", choices=MESHES, default=list(MESHES))
    parser.add_argument("--devices", nargs="+", choices=devices, default=devices)
    parser.add_argument("--json", action="store_true", help="one JSON object per line instead of a table")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--lower", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--cases", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        device, dump = arguments.worker
        look = functools.partial(*(lower_named, device, dump) if arguments.lower else (compile_named, device))
        return print_figures(arguments.cases, look)
    if not (compile_gpu.can_compile() and compile_matrix.can_compile()):
        sys.exit('the compilers are not installed: pip install "jaxinfer[aot]"')
    if not arguments.json:
        steps = [*(f"{step}, MB" for step in STEPS), *(f"{step}, s" for step in STEPS)]
        header = ["model", "mesh", "arguments, GB", *steps, "in place", "registers / spills"]
        print("|", " | ".join(header), "|")
        print("|" + "--|" * len(header))
    for model in arguments.models:
        for device in MESHES[model]:
            if device not in arguments.devices:
                continue
            figures = compile_for(device, cases_of(model, device))
            if arguments.json:
                for name, case in figures.items():
                    print(json.dumps({"device": device, "case": name, **case}), flush=True)
            else:
                print("|", " | ".join([model, device, *cells(list(figures.values()))]), "|", flush=True)


if __name__ == "__main__":
    main()
