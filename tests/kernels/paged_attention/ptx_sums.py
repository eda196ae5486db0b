"""The sums of a kernel as its PTX has them: which numbers are added to which, in the innermost loops with products.

ex2 %f9, %f8        each number is known by its operation and by those that it is made of
add %f11, %f10, %f9    so two loops that add up the same numbers in another order differ
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

LOWEST = "0fFF7FFFFF"  # of float32: the bound of `rounded`
INSTRUCTION = re.compile(r"(?:@!?%p\d+\s+)?([a-z][\w.:]*)\s+(.*)")
FLOATS = ("f32", "bf16x2", "f16x2")
# Those that move numbers between threads or registers, whatever their type is called.
MOVES = ("shfl", "ld.shared", "mov.b32")


def entries_of(ptx: str) -> dict[str, str]:
    """Returns the kernels of a PTX file by name."""
    return {entry[: entry.index("(")]: entry for entry in ptx.split(".entry ")[1:]}


def product_loops(entry: str) -> list[str]:
    """Returns the innermost loops that have products of matrices."""
    lines = entry.splitlines()
    labels = {found[1]: i for i, line in enumerate(lines) if (found := re.match(r"\s*(\$\w+):", line))}
    branches = [(i, re.search(r"\bbra(?:\.uni)?\s+(\$\w+);", line)) for i, line in enumerate(lines)]
    loops = [(labels[found[1]], i) for i, found in branches if found and labels[found[1]] <= i]
    inner = [(a, b) for a, b in loops if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in loops)]
    return [body for a, b in inner if "mma" in (body := "\n".join(lines[a:b]))]


def sums_of(loop: str) -> Counter[str]:
    """Returns how often each floating-point number of a loop occurs, by a digest of what it is made of.

    Numbers from before the loop are alike, as are integers. A mask that puts a constant in a number's place is left
    out, so that loops with and without one can be equal.
    """
    made: dict[str, str] = {}
    counts: Counter[str] = Counter()

    def of(name: str) -> str:
        return made.get(name, "before") if name.startswith("%") else name

    def digest(*parts: Any) -> str:
        return f"{hash_of(repr(parts)):x}"

    for statement in re.sub(r"\$\w+:|//.*", "", loop).replace("\n", " ").split(";"):
        found = INSTRUCTION.match(statement.lstrip(" {}\t"))
        if found is None:
            continue
        operation, operands = found.groups()
        names = re.findall(r"%\w+|0f[0-9A-F]{8}|-?\d+", operands)
        groups = [re.findall(r"%\w+", group) for group in re.findall(r"\{([^}]*)\}", operands)]
        if "mma.sync" in operation or "mma_async" in operation:
            added = groups[0] if "mma_async" in operation else groups[-1]
            factors = [of(name) for group in groups[1 : 2 if "mma_async" in operation else 3] for name in group]
            results = [digest(operation, factors, i, of(name)) for i, name in enumerate(added)]
            made |= dict(zip(groups[0], results, strict=True))
            counts.update(results)
        elif operation.startswith("ldmatrix"):
            made |= dict.fromkeys(groups[0], "loaded")
        elif not operation.endswith(FLOATS) and not operation.startswith(MOVES):
            made |= dict.fromkeys(names[:1], "integer")
        elif names:
            target, sources = names[0], [of(name) for name in names[1:]]
            if operation.startswith("selp"):
                sources = [source for source in sources[:2] if not source.startswith("0f")]
            sources = [source for source in sources if source != LOWEST]
            is_alike = operation.startswith(("selp", "mov", "max")) and len(sources) == 1
            made[target] = sources[0] if is_alike else digest(operation, sources)
            counts[made[target]] += not is_alike
    return +counts


def hash_of(text: str) -> int:
    from hashlib import blake2b

    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def compiled(device: str, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Compiles a call of attention; returns what its kernels of attention and of combination need, and their sums."""
    import jax

    from kernels_pallas import gpu_compiler
    from scripts.kernels.compile_gpu import attention
    from scripts.kernels.figures import gpu_mesh

    mesh = gpu_mesh(device)
    case = attention(mesh, **options)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), tempfile.TemporaryDirectory() as folder:
        dumped = {"xla_dump_to": folder, "xla_dump_emitter_re": "ptx"}
        program = case.function.lower(**case.arguments).compile(compiler_options=dumped)
        launches = gpu_compiler._launches(Path(folder), gpu_compiler.GPUS[device].arch)
        entries: dict[str, str] = {}
        for path in Path(folder).glob("*.ptx"):
            entries |= entries_of(path.read_text())
    kernels = []
    for launch in launches:
        if not launch.name.startswith(("paged_attention", "combine_parts")):
            continue
        entry = entries[launch.name]
        products = re.findall(r"(wgmma\.mma_async\S+\.m\w+|mma\.sync\S+\.m\w+)\.", entry)
        kernels.append(
            {
                **launch._asdict(),
                "products": sorted(set(products)),
                "sums": [hash_of(repr(sorted(sums_of(loop).items()))) for loop in product_loops(entry)],
                "fused": len(re.findall(r"\bfma\.|\b(?:add|sub|mul)\.f32", entry)),
                "temporary_bytes": program.memory_analysis().temp_size_in_bytes,
            }
        )
    return kernels


def main() -> None:
    from kernels_pallas.paged_attention import SumOrder

    device, *cases = sys.argv[1:]
    for case in cases:
        options = json.loads(case)
        order = SumOrder() if options.pop("is_ordered", True) else None
        print(json.dumps(compiled(device, {"max_context": 32768, "order": order, **options})), flush=True)


if __name__ == "__main__":
    main()
