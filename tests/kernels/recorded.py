"""Figures of the compilers for TPU and GPU, kept in a file until a program or a compiler changes.

The compilers take twenty minutes for all cases, and lowering all takes two. Each file under `recorded/` has the figures
of one device and a digest of everything that they depend on: the sources without comments and docstrings, and the
versions of the compilers. With another digest the cases are lowered. Then a case is compiled anew if its program has
changed; all are, if a compiler has changed or the code that reads figures. The file is written; commit it with the
change. To compile everything, remove the folder.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "recorded"
# The code that compiles a lowered program and reads its figures.
READING = ("kernels_pallas/gpu_compiler.py", "scripts/kernels/figures.py", "scripts/kernels/tpu_schedule.py")
COMPILING = (
    "collectives",
    "compile_gpu",
    "compile_matrix",
    "compilers",
    "figures",
    "large_models",
    "named_calls",
    "tpu_schedule",
)
KERNEL_SOURCES = ("kernels_pallas", *(f"scripts/kernels/{name}.py" for name in COMPILING))
STEP_SOURCES = (
    *KERNEL_SOURCES,
    *(f"jaxinfer/{name}" for name in ("model", "sampling", "steps", "quantization")),
    *(f"jaxinfer/checkpoint/{name}" for name in ("config_json", "families")),
    *("jaxinfer/config.py", "jaxinfer/sampling_params.py", "jaxinfer/plan/cache.py"),
    *("jaxinfer/checkpoint/published", "jaxinfer/plan/compiler.py"),
)
COMPILERS = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda12-pjrt", "nvidia-cuda-nvcc-cu12")


class Script(Protocol):
    """A script of `scripts/kernels`: lowers and compiles cases for a device."""

    def lower_for(self, device: str, cases: Sequence[str]) -> dict[str, dict[str, Any]]: ...

    def compile_for(self, device: str, cases: Sequence[str]) -> dict[str, dict[str, Any]]: ...


def figures_of(
    device: str, cases: Sequence[str], script: Script, reading: Sequence[str] = ()
) -> dict[str, dict[str, Any]]:
    """Returns the figures of these cases, from the file if its digests are those of today.

    `reading`: the sources beside READING that read them from what is compiled. Among the figures are the processor
    seconds to lower each case, always of today's sources.
    """
    has_steps = any("step" in name.split() for name in cases)
    digest = digest_of(STEP_SOURCES if has_steps else KERNEL_SOURCES, repr(list(cases)))
    path = FOLDER / f"{device}-{cases[0].split()[0]}.json"
    recorded = json.loads(path.read_text()) if path.exists() else {"digest": "", "programs": {}}
    if recorded["digest"] == digest:
        return recorded["figures"]
    lowered = script.lower_for(device, cases)
    programs = {
        name: digest_of((*READING, *reading), case["program"]) for name, case in lowered.items() if "error" not in case
    }
    changed = [name for name in cases if name not in programs or recorded["programs"].get(name) != programs[name]]
    compiled = script.compile_for(device, changed) if changed else {}
    figures = {
        name: (compiled[name] if name in compiled else recorded["figures"][name])
        | {key: value for key, value in lowered[name].items() if key != "program"}
        for name in cases
    }
    if not any("error" in case for case in figures.values()):
        FOLDER.mkdir(exist_ok=True)
        content = {"digest": digest, "compilers": compiler_versions(), "programs": programs, "figures": figures}
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


def digest_of(sources: Sequence[str], content: str) -> str:
    """Returns a digest of a text, of the code under `sources`, of tuned tables there and of the compilers."""
    digest = blake2b(repr((content, compiler_versions())).encode(), digest_size=20)
    for source in sources:
        folder = ROOT / source
        files = [folder] if folder.is_file() else sorted([*folder.rglob("*.py"), *folder.rglob("*.json")])
        for file in files:
            text = file.read_text()
            code = ast.dump(_without_docstrings(ast.parse(text))) if file.suffix == ".py" else text
            digest.update(f"{file.relative_to(ROOT)} {code} ".encode())
    return digest.hexdigest()


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node, clean=False):
            del node.body[0]
    return tree
