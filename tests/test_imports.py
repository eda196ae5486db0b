"""Which package may import which, read from the source without running it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = ("jaxinfer", "kernels_pallas")
FILES = sorted(path for package in OURS for path in (ROOT / package).rglob("*.py"))

# Bottom first: a package imports only packages above its own line here, and only those that it names.
ALLOWED = {
    "plain_values": "",
    "names": "",
    "validation": "plain_values",
    "sampling_params": "names plain_values validation",
    "config": "names sampling_params validation",
    "kernels_pallas": "",
    "device": "kernels_pallas validation",
    "json_lines": "validation",
    "atomic_file": "",
    "_version": "",
    "xla_options": "",
    "source_digest": "",
    "display": "validation",
    "gguf": "validation",
    "quantization": "gguf kernels_pallas",
    "model": "config kernels_pallas quantization validation",
    "parallel": "config xla_options device kernels_pallas model quantization validation",
    "sampling": "config kernels_pallas model sampling_params validation",
    "steps": "config kernels_pallas model sampling sampling_params validation",
    "text": "gguf plain_values sampling_params validation",
    "checkpoint": "atomic_file config device gguf display model quantization sampling_params steps validation",
    "plan": "checkpoint config device display kernels_pallas model parallel quantization sampling sampling_params steps"
    " validation xla_options",
    "engine.request": "sampling_params",
    "engine.kv_cache": "atomic_file engine.request sampling_params",
    "engine.scheduling": "display engine.kv_cache engine.request sampling_params validation",
    "engine.execution": "atomic_file config device display engine.kv_cache engine.request engine.scheduling"
    " kernels_pallas model parallel plan quantization sampling sampling_params source_digest steps validation",
    "engine.drafters": "config engine.execution engine.request engine.scheduling model parallel plan steps validation",
    "engine.speculation": "checkpoint config engine.drafters engine.execution engine.kv_cache engine.request"
    " engine.scheduling model plan steps text validation",
    "engine.frontend": "_version atomic_file checkpoint config device engine.execution engine.kv_cache engine.request"
    " engine.scheduling model names parallel plain_values sampling_params text validation",
    "openai": "config engine.frontend engine.request json_lines names sampling_params text validation",
}
# The command line, the server, the simulation, batch jobs, compiling ahead of time, the interfaces of other engines and
# the engine's own few modules may import all of these.
NO_JAX = ("config", "gguf", "text", "engine.request", "engine.kv_cache", "engine.scheduling")


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in FILES}


def package_of(module):
    """Returns the name that a module's package has in ALLOWED; a module beside the packages counts as one."""
    parts = module.split(".")
    if parts[0] == "jaxinfer":
        parts = parts[1:3] if parts[1:2] == ["engine"] else parts[1:2]
        return ".".join(parts)
    return parts[0]


def is_type_checking(node):
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def executed_nodes(node):
    """Yields all nodes below, except those that only a type checker sees."""
    for child in ast.iter_child_nodes(node):
        if not is_type_checking(child):
            yield child
            yield from executed_nodes(child)


@cache
def nodes_of(module):
    return list(executed_nodes(ast.parse(MODULES[module].read_text())))


@cache
def imports_of(module):
    """Returns the modules that a module of ours names in its imports, inside functions too."""
    names = set()
    for node in nodes_of(module):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            # `from package import module` needs the module; `from module import name` needs the module.
            names |= submodules if submodules <= set(MODULES) else {node.module or "", *submodules}
    return names


def imports_of_ours(module):
    return imports_of(module) & set(MODULES)


def foreign(module):
    """Returns the top-level packages from outside, without the standard library."""
    tops = {name.split(".")[0] for name in imports_of(module)}
    return tops - set(OURS) - sys.stdlib_module_names


@cache
def reachable(module):
    """Returns the modules of ours that importing this one runs; a package's `__init__` runs for itself only."""
    seen, todo = set(), {module}
    while todo:
        name = todo.pop()
        seen.add(name)
        todo |= imports_of_ours(name) - seen
    return seen


@pytest.mark.parametrize("package", ALLOWED)
def test_a_package_imports_only_packages_below_it(package):
    allowed, above = set(ALLOWED[package].split()), list(ALLOWED)[: list(ALLOWED).index(package)]
    modules = [module for module in MODULES if package_of(module) == package]
    imported = {package_of(name) for module in modules for name in imports_of_ours(module)}

    assert modules
    assert allowed <= set(above)
    assert imported - {package} == allowed


def test_every_package_below_the_engine_has_a_line_in_the_table():
    assert {package_of(module) for module in MODULES} - set(ALLOWED) == {
        *("", "__main__", "ahead_of_time", "batch_job", "cli", "compat", "serve", "simulation"),
        *("engine", "engine.agreement", "engine.assembly", "engine.async_llm", "engine.device_choice", "engine.engine"),
        *("engine.engine_thread", "engine.fair_threads", "engine.guarded_engine", "engine.llm", "engine.page_mover"),
        *("engine.text_checks", "engine.timeline"),
    }


@pytest.mark.parametrize("package", NO_JAX)
def test_no_jax_is_reached_from_packages_that_run_without_a_device(package):
    modules = {name for module in MODULES if package_of(module) == package for name in reachable(module)}

    assert [module for module in modules if foreign(module) & {"jax", "jaxlib", "flax", "chex", "orbax"}] == []


def test_the_scheduler_runs_in_a_process_without_jax():
    program = "import sys, jaxinfer.engine.scheduling.scheduler; sys.exit('jax' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


def test_kernels_import_jax_and_numpy_only():
    kernels = [module for module in MODULES if package_of(module) == "kernels_pallas"]

    assert kernels
    assert {module: found for module in kernels if (found := foreign(module) - {"jax", "numpy"})} == {}


def test_only_attention_the_table_of_mixers_and_the_cache_use_paged_attention():
    users = {name for name in MODULES if "kernels_pallas.paged_attention" in imports_of(name)}

    assert {name for name in users if package_of(name) != "kernels_pallas"} == {
        "jaxinfer.model.components.attention",
        "jaxinfer.model.cache",
        "jaxinfer.model.layer_parts",
    }


def test_no_module_imports_oracles_or_training_frameworks():
    oracles = {"torch", "transformers", "tensorflow", "pytest", "hypothesis"}

    found = {module: used for module in MODULES if (used := foreign(module) & oracles)}
    assert found == {"jaxinfer.compat.vllm.tokenizers": {"transformers"}}  # vLLM's tokenizers are of transformers


# What is kept on disk of a compiler's work depends on the compiler's own flags, and bits on CPU depend on one of them.
# A compiler in a process of its own gets its settings by variables.
MAY_READ_FLAGS = {
    *("jaxinfer.engine.execution.executable_cache", "jaxinfer.engine.execution.executable_key"),
    *("jaxinfer.xla_options", "jaxinfer.plan.compiler", "jaxinfer.ahead_of_time.start"),
}


def test_no_module_reads_or_sets_an_environment_variable():
    def found(module):
        names = {node.attr for node in nodes_of(module) if isinstance(node, ast.Attribute)}
        names |= {name.split(".")[-1] for name in imports_of(module)}
        return names & {"environ", "environb", "getenv", "getenvb", "putenv"}

    assert {module for module in MODULES if found(module)} == MAY_READ_FLAGS


def test_the_package_has_at_most_twenty_public_names_and_all_of_them_exist():
    import jaxinfer

    assert len(jaxinfer.__all__) <= 20
    assert all(hasattr(jaxinfer, name) for name in jaxinfer.__all__)
    assert dir(jaxinfer) == sorted(jaxinfer.__all__)  # for completion in notebooks


def test_no_module_imports_itself_through_others():
    def is_in_a_circle(module):
        return any(module in reachable(other) for other in imports_of_ours(module))

    assert [module for module in MODULES if is_in_a_circle(module)] == []


def test_no_file_has_more_than_five_hundred_lines():
    lengths = {path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in FILES}

    assert {path: length for path, length in lengths.items() if length > 500} == {}


def test_a_folder_has_at_most_twelve_modules():
    modules = Counter(path.parent.relative_to(ROOT).as_posix() for path in FILES if path.name != "__init__.py")

    assert {folder: number for folder, number in modules.items() if number > 12} == {}
