"""Who may import whom (design.md, section 2), read from the source without running it."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = ("jaxinfer", "kernels_pallas")
FILES = sorted(path for package in OURS for path in (ROOT / package).rglob("*.py"))


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in FILES}


def is_type_checking(node):
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def executed_nodes(node):
    """All nodes below, but for what only a type checker sees."""
    for child in ast.iter_child_nodes(node):
        if not is_type_checking(child):
            yield child
            yield from executed_nodes(child)


@cache
def imports_of(module):
    """The modules that a module of ours names in its imports, in functions as well."""
    names = set()
    for node in executed_nodes(ast.parse(MODULES[module].read_text())):
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
    """Top-level packages from outside, the standard library apart."""
    tops = {name.split(".")[0] for name in imports_of(module)}
    return tops - set(OURS) - sys.stdlib_module_names


def reachable(module):
    """The modules of ours that importing this one runs; a package's `__init__` runs for itself only."""
    seen, todo = set(), {module}
    while todo:
        name = todo.pop()
        seen.add(name)
        todo |= imports_of_ours(name) - seen
    return seen


def within(prefix):
    return [name for name in MODULES if name == prefix or name.startswith(prefix + ".")]


def below(*prefixes):
    return {name for prefix in prefixes for name in within(f"jaxinfer.{prefix}")}


CORE = (
    "config",
    "sampling_params",
    "validation",
    "params",
    "quantization",
    "layers",
    "decoder",
    "cache",
    "batch",
    "sampling_batch",
    "processors",
    "sampling",
    "speculative",
    "draft_trees",
    "decode_loop",
    "draft_heads",
    "eagle_head",
    "prompt_log_probs",
    "steps",
)
# What a module may import of ours; modules that are not named here are free.
ALLOWED = {
    "validation": set(),
    "sampling_params": below("validation"),
    "config": below("validation", "sampling_params"),
    "device": below("validation"),
    "tokenizer": below("validation"),
    "schema_check": below("validation"),
    "structure_trial": below("schema_check"),
    "grammar": below("sampling_params", "schema_check", "structure_trial", "tokenizer", "validation"),
    "params": below("config"),
    "batch": below("validation"),
    "sampling_batch": below("config", "batch", "validation"),
    "processors": below("batch", "sampling_batch"),
    "quantization": below("config", "params", "quantization") | {"kernels_pallas.quantized_matmul"},
    "layers": below("config", "quantization") | set(within("kernels_pallas")),
    "cache": below("config", "batch", "layers", "validation") | set(within("kernels_pallas")),
    "decoder": below("config", "params", "layers", "cache", "batch") | set(within("kernels_pallas")),
    "sampling": below("batch", "sampling_batch", "sampling_params", "processors") | set(within("kernels_pallas")),
    "speculative": below("batch", "sampling_batch") | set(within("kernels_pallas")),
    "draft_trees": below("batch", "cache", "config", "processors", "speculative"),
    "decode_loop": below("batch", "cache", "sampling_params"),
    "draft_heads": below("decoder", "layers", "params", "sampling", "sampling_batch"),
    "eagle_head": below("config", "decoder", "draft_heads", "layers", "params", "sampling", "sampling_batch")
    | set(within("kernels_pallas")),
    "prompt_log_probs": below("batch", "decoder", "params", "sampling"),
    "steps": below(*CORE),
    "checkpoint": below("config", "params", "device", "quantization", "validation", "checkpoint"),
    "engine.pages": set(),
    "engine.prefix": set(),
    "engine.metrics": set(),
    "engine.completion": below("engine.metrics"),
    "engine.page_copies": set(),
    "engine.page_window": below("sampling_params"),
    "engine.page_finder": below(
        *(f"engine.{name}" for name in ("page_copies", "page_window", "pages", "prefix", "request", "tiers"))
    ),
    "engine.page_sight": below(*(f"engine.{name}" for name in ("page_copies", "page_window", "pages", "request"))),
    "engine.family": set(),
    "engine.request": below(
        *("sampling_params", "engine.completion", "engine.family", "engine.metrics", "engine.page_copies"),
        *("engine.prefix", "engine.readers"),
    ),
    "engine.readers": set(),
    "engine.sealed_file": set(),
    "engine.tiers": below("engine.metrics", "engine.page_copies"),
    "engine.host_tier": below("engine.metrics", "engine.page_copies"),
    "engine.disk_tier": below("engine.metrics", "engine.page_copies", "engine.prefix", "engine.sealed_file"),
    "engine.step": below("engine.page_copies", "engine.request"),
    "engine.emission": below("engine.request", "engine.step"),
    "engine.pipeline": below("engine.request", "engine.step"),
    "engine.looping": below("engine.block_tables", "engine.step"),
    "engine.draft_tree": set(),
    "engine.drafters": below("engine.draft_tree", "engine.request", "validation"),
    "engine.cost_fit": set(),
    "engine.draft_choice": set(),
    "engine.draft_ledger": set(),
    "engine.draft_estimates": below("engine.cost_fit"),
    "engine.draft_source": below(
        *("engine.cost_fit", "engine.device_drafter", "engine.draft_estimates", "engine.draft_tree", "engine.drafters"),
        *("engine.request", "engine.step", "validation"),
    ),
    "engine.block_tables": below(
        *(f"engine.{name}" for name in ("page_copies", "page_finder", "page_sight", "page_window", "pages", "prefix")),
        *("engine.request", "engine.tiers"),
    ),
    "engine.policy": below("engine.request"),
    "engine.waiting": below("engine.policy", "engine.request"),
    "engine.observer": below("engine.metrics", "engine.request", "engine.step"),
    "engine.running": below(
        *(f"engine.{name}" for name in ("block_tables", "metrics", "observer", "policy", "request", "step", "waiting"))
    ),
    "engine.scheduler": below(
        *(f"engine.{name}" for name in ("block_tables", "emission", "looping", "metrics", "observer", "request")),
        *(f"engine.{name}" for name in ("page_window", "running", "step", "tiers", "waiting")),
        "config",
    ),
    "engine.executables": below("engine.sealed_file"),
    "engine.compile_watch": set(),
    "plan": set(within("kernels_pallas")),
    "engine.buckets": below("config", "device", "engine.step"),
    "engine.batching": below(
        *("batch", "decode_loop", "prompt_log_probs", "sampling_batch", "config", "engine.buckets", "engine.step"),
        "engine.draft_tree",
        "engine.request",
    ),
}
ALLOWED_PAIRS = [(module, allowed) for name, allowed in ALLOWED.items() for module in within(f"jaxinfer.{name}")]


@pytest.mark.parametrize("module", within("kernels_pallas"))
def test_kernels_import_jax_numpy_and_each_other_only(module):
    assert foreign(module) <= {"jax", "numpy"}
    assert imports_of_ours(module) <= set(within("kernels_pallas"))


@pytest.mark.parametrize(("module", "allowed"), ALLOWED_PAIRS, ids=[module for module, _ in ALLOWED_PAIRS])
def test_a_module_imports_only_what_lies_below_it(module, allowed):
    assert imports_of_ours(module) <= allowed


@pytest.mark.parametrize("module", [name for name in MODULES if ".engine" not in name])
def test_the_engine_is_imported_by_its_users_only(module):
    users = {"jaxinfer", *below("cli", "cli_load", "doctor", "serve", "batch_job", "simulation")}

    assert module in users or not imports_of_ours(module) & set(within("jaxinfer.engine"))


@pytest.mark.parametrize(
    "name",
    ["config", "engine.pages", "engine.request", "engine.scheduler", "engine.disk_tier", "tokenizer", "grammar"],
)
def test_no_jax_is_reached_from_what_runs_without_a_device(name):
    modules = reachable(f"jaxinfer.{name}")

    assert {module: foreign(module) & {"jax", "jaxlib", "flax", "chex", "orbax"} for module in modules} == {
        module: set() for module in modules
    }


def test_the_scheduler_runs_in_a_process_without_jax():
    program = "import sys, jaxinfer.engine.scheduler; sys.exit('jax' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize("name", CORE)
def test_the_core_is_free_of_the_shell(name):
    shell = below("engine", "checkpoint", "cli", "batch_job", "tokenizer", "device")

    assert not reachable(f"jaxinfer.{name}") & shell


def test_only_layers_cache_and_the_decoder_call_paged_attention():
    users = {name for name in MODULES if "kernels_pallas.paged_attention" in imports_of(name)}

    assert users - set(within("kernels_pallas")) == {"jaxinfer.cache", "jaxinfer.decoder"}


def test_only_the_runner_its_compiler_and_models_that_draft_know_steps_and_own_a_cache():
    runners = {name for name in MODULES if imports_of(name) & {"jaxinfer.steps", "jaxinfer.cache.init_cache"}}

    # The package's `__init__` may hand the functional names to the user.
    assert runners - {"jaxinfer"} == {
        f"jaxinfer.engine.{name}" for name in ("compiling", "runner", "draft_model", "draft_steps")
    }


@pytest.mark.parametrize("module", MODULES)
def test_oracles_and_training_frameworks_are_not_imported(module):
    assert not foreign(module) & {"torch", "transformers", "tensorflow", "pytest", "hypothesis"}


# What is kept on disk of a compiler's work depends on the compiler's own flags.
@pytest.mark.parametrize("module", sorted(set(MODULES) - {"jaxinfer.engine.executables"}))
def test_no_environment_variable_is_read_or_set(module):
    names = {node.attr for node in ast.walk(ast.parse(MODULES[module].read_text())) if isinstance(node, ast.Attribute)}
    names |= {name.split(".")[-1] for name in imports_of(module)}

    assert not names & {"environ", "environb", "getenv", "getenvb", "putenv"}


def test_the_package_has_at_most_fifteen_public_names_and_all_of_them_exist():
    import jaxinfer

    assert len(jaxinfer.__all__) <= 15
    assert all(hasattr(jaxinfer, name) for name in jaxinfer.__all__)
    assert dir(jaxinfer) == sorted(jaxinfer.__all__)  # for completion in notebooks


@pytest.mark.parametrize("module", MODULES)
def test_no_module_imports_itself_by_way_of_others(module):
    assert module not in {name for other in imports_of_ours(module) for name in reachable(other)}
