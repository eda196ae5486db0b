"""Figures of the compilers for TPU and GPU, kept in a file until a source or a compiler changes.

The compilers take ten minutes for all cases. Each file under `recorded/` has the figures of one device and a digest of
everything that they depend on: the sources without comments and docstrings, and the versions of the compilers. With
another digest the cases are compiled and the file is written anew; commit it with the change. To compile everything,
remove the folder.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Sequence
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "recorded"
COMPILING = ("compile_gpu", "compile_matrix", "compilers", "large_models", "models", "tpu_schedule")
KERNEL_SOURCES = ("kernels_pallas", *(f"scripts/kernels/{name}.py" for name in COMPILING))
STEP_SOURCES = (
    *KERNEL_SOURCES,
    *(f"jaxinfer/{name}" for name in ("model", "sampling", "steps", "quantization")),
    *(f"jaxinfer/checkpoint/{name}" for name in ("config_json", "families")),
    *("jaxinfer/config.py", "jaxinfer/sampling_params.py", "jaxinfer/engine/execution/memory_plan.py"),
)
COMPILERS = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda12-pjrt", "nvidia-cuda-nvcc-cu12")


def figures_of(
    device: str, cases: Sequence[str], compile_for: Callable[[str, Sequence[str]], dict[str, dict[str, Any]]]
) -> dict[str, dict[str, Any]]:
    """Returns the figures of these cases, from the file if its digest is that of today's sources and compilers."""
    has_steps = any("step" in name.split() for name in cases)
    digest = digest_of(STEP_SOURCES if has_steps else KERNEL_SOURCES, cases)
    path = FOLDER / f"{device}-{cases[0].split()[0]}.json"
    if path.exists() and (known := json.loads(path.read_text()))["digest"] == digest:
        return known["figures"]
    figures = compile_for(device, cases)
    if not any("error" in case for case in figures.values()):
        FOLDER.mkdir(exist_ok=True)
        content = {"digest": digest, "compilers": compiler_versions(), "figures": figures}
        path.write_text(json.dumps(content, indent=1) + "\n")
    return figures


def compiler_versions() -> dict[str, str]:
    """Returns the versions of the packages that compile, "none" for one that is not installed."""
    versions = {}
    for name in COMPILERS:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "none"
    return versions


def digest_of(sources: Sequence[str], cases: Sequence[str], root: Path = ROOT) -> str:
    """Returns a digest of the code under `sources`, of tuned tables, of the cases' names and of the compilers."""
    digest = blake2b(repr((list(cases), compiler_versions())).encode(), digest_size=20)
    for source in sources:
        folder = root / source
        files = [folder] if folder.is_file() else sorted([*folder.rglob("*.py"), *folder.rglob("*.json")])
        for file in files:
            text = file.read_text()
            content = ast.dump(_without_docstrings(ast.parse(text))) if file.suffix == ".py" else text
            digest.update(f"{file.relative_to(root)} {content} ".encode())
    return digest.hexdigest()


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node, clean=False):
            del node.body[0]
    return tree
