"""The strictest settings jax has: no silent promotion of types or ranks."""

import gc
import os
from collections import Counter
from importlib.metadata import version

# The compilers of the extra `aot` are plugins that look for their devices; tests run on CPU unless told otherwise.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# One folder of compiled steps for all tests of a run, subprocesses included, unless the caller has chosen one.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.path.join(os.path.dirname(__file__), ".compilation_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
# In subprocesses as well, whose compiled steps are then those of the tests.
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"

import hypothesis
import jax
import pytest

from jaxinfer.config import Parallelism
from jaxinfer.device import describe_cpu
from tests.memory_maps import are_memory_maps_short, resident_bytes, return_free_memory

# Compiled steps are not loaded from a folder that others can write to, which the umask may have it be.
os.makedirs(os.environ["JAX_COMPILATION_CACHE_DIR"], mode=0o700, exist_ok=True)
# Tracing leaves many objects and little garbage; looking for it takes a twentieth of the time.
gc.set_threshold(50_000, 50, 50)
# No example has a deadline: the first may compile, and other processes may take the cores.
hypothesis.settings.register_profile("jaxinfer", deadline=None)
hypothesis.settings.load_profile("jaxinfer")


# Tests without a compiled engine, by folder or by file: together they take less than a minute.
QUICK = (
    *("test_atomic_file.py", "test_config.py", "test_device.py", "test_imports.py", "test_prose.py"),
    *("batch_job/test_job.py", "batch_job/test_records.py", "checkpoint", "text"),
    *("engine/request", "engine/kv_cache", "engine/scheduling"),
    *("engine/execution/test_batch_builder.py", "engine/execution/test_pipeline.py"),
    *("engine/whole/test_assembly.py", "engine/whole/test_timeline.py"),
    *("kernels/test_gpu_compiler.py", "kernels/test_recorded.py", "kernels/paged_attention/test_block_sizes.py"),
    *("kernels/test_device_report.py", "kernels/test_device_timer.py"),
    *("model/test_batch.py", "model/test_model_config.py", "model/test_params.py"),
    *("notebooks/test_notebook_files.py", "plan/test_memory.py", "sampling/test_sampling_batch.py"),
    *("simulation/test_step_times.py", "simulation/test_trace.py"),
)
# Files in these folders that compile whole models.
NOT_QUICK = ("checkpoint/test_logits.py", "checkpoint/test_long_rope.py")
# Files and folders that take 10 to 200 seconds each, most of it to compile: three quarters of the suite's time.
SLOW = (
    *("batch_job/test_kill.py", "checkpoint/test_logits.py", "checkpoint/test_long_rope.py"),
    *("checkpoint/test_packed.py", "hostile/test_errors.py", "parallel", "test_docs.py"),
    *("engine/exactness/test_cache_dtypes.py", "engine/exactness/test_families.py"),
    *("engine/exactness/test_parameters.py", "engine/whole/test_adapters.py"),
    *("engine/exactness/test_slice_on_tpu_kernels.py", "engine/exactness/test_sliding_window.py"),
    *("engine/execution/test_start_up.py", "engine/execution/test_warm_up.py", "engine/frontend/test_guard.py"),
    *("engine/speculation/test_draft_layers.py", "engine/speculation/test_speculation.py"),
    *("engine/speculation/test_draft_vocabularies.py", "engine/whole/test_embedding_models.py"),
    *("engine/speculation/test_tree_speculation.py", "engine/whole/test_bad_logits.py"),
    *("engine/whole/test_embeddings.py", "engine/whole/test_parameters_in_structures.py"),
    *("engine/whole/test_structure.py", "engine/whole/test_update_params.py"),
    *("kernels/latent_attention", "kernels/test_device_check.py"),
    *("kernels/paged_attention/test_exact_bits.py", "kernels/paged_attention/test_gpu.py"),
    *("kernels/paged_attention/test_paged_attention.py", "kernels/paged_attention/test_tpu_interpret.py"),
    *("model/components/test_latent_attention.py", "model/components/recurrent/test_recurrence.py"),
    *("model/test_decoder_kernels.py", "model/test_exactness.py"),
    *("notebooks/test_executed_notebooks.py", "plan/test_library_calls.py", "plan/test_products.py"),
    *("steps/test_draft_distributions.py", "steps/test_log_probs.py", "steps/test_mesh_steps.py"),
)
# Files that take 10 seconds or more of the rest: parallel runs begin with these and the slow ones.
LONG = (
    *("checkpoint/test_every_family.py", "checkpoint/test_wrong_values.py"),
    *("engine/exactness/test_engine_exactness.py", "engine/exactness/test_host_errors.py"),
    *("engine/exactness/test_llm_against_transformers.py",),
    *("engine/exactness/test_quantization.py", "engine/frontend/test_saved_requests.py"),
    *("engine/scheduling/test_freed_requests.py", "engine/test_engine_thread.py", "engine/whole/test_agreement.py"),
    *("engine/whole/test_endless_requests.py", "engine/whole/test_sampling_log_probs_of_requests.py"),
    *("hostile/test_sequences.py", "serve", "steps/test_steps.py", "steps/test_trees.py"),
)
# The bytes that a process may have beside those that were left when it last dropped its compiled functions.
MAX_GROWTH = 2 * 2**30
KEPT_BYTES = pytest.StashKey[int]()


def is_listed(path, listed):
    """True if a file of these tests, or a folder that it lies in, is in the list."""
    name = os.path.relpath(path, os.path.dirname(__file__))
    return name in listed or any(name.startswith(f"{folder}/") for folder in listed)


def pytest_collection_modifyitems(config, items):
    paths = {item.path for item in items}
    quick = {path for path in paths if is_listed(path, QUICK) and not is_listed(path, NOT_QUICK)}
    # Only a run of the whole suite leaves them out: a folder or a file that is named runs with its slow tests.
    is_whole = [os.path.realpath(arg) for arg in config.args] == [os.path.dirname(os.path.realpath(__file__))]
    slow = {path for path in paths if is_whole and is_listed(path, SLOW)}
    for item in items:
        if item.path in slow:
            item.add_marker("slow")
        if item.path in quick and not any("llm" in fixture for fixture in item.fixturenames):
            item.add_marker("quick")
        for marker in item.iter_markers("shows"):
            item.user_properties.append(("shows", marker.args))
    if hasattr(config, "workerinput"):
        # Files come in this order to the workers. A long file at the end would run alone; so the last are short ones.
        long = {path for path in paths if is_listed(path, SLOW + LONG)}
        sizes = Counter(item.path for item in items)
        items.sort(key=lambda item: (item.path not in long, -sizes[item.path]))


def pytest_collection_finish():
    # What the modules of the tests have imported stays, and need not be looked through.
    gc.freeze()


def pytest_sessionstart(session):
    # Also under -q: bits that differ between machines are judged on this one.
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and not hasattr(session.config, "workerinput"):
        reporter.write_line(f"CPU: {describe_cpu()}; jax {version('jax')}, jaxlib {version('jaxlib')}")


def pytest_runtest_teardown(item, nextitem):
    is_last_of_file = nextitem is not None and nextitem.path != item.path
    if not is_last_of_file and not item.get_closest_marker("exhaustive"):
        return
    return_free_memory()
    has_grown = is_last_of_file and resident_bytes() > item.session.stash.setdefault(KEPT_BYTES, 0) + MAX_GROWTH
    if has_grown or are_memory_maps_short():
        from tests.on_demand import clear_compiled

        jax.clear_caches()
        clear_compiled()
        return_free_memory()
        item.session.stash[KEPT_BYTES] = resident_bytes()


def pytest_addoption(parser):
    parser.addoption(
        "--tpu-kernels", action="store_true", help="attention by the TPU kernels in Pallas' interpreter: tests/engine"
    )
    parser.addoption(
        "--mesh", metavar="TENSORxEXPERTS", help="split the models of tests/engine over devices; see on_devices.py"
    )


def pytest_configure(config):
    config.option.loadscopereorder = False  # xdist would begin with the files that have most tests
    if config.getoption("--tpu-kernels"):
        from tests.engine.engines import SIZES, interpret_tpu_kernels

        SIZES.update({"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1})
        interpret_tpu_kernels(pytest.MonkeyPatch())
    if mesh := config.getoption("--mesh"):
        from tests.engine.engines import SMALL

        tensor, experts = map(int, mesh.split("x"))
        SMALL["parallelism"] = Parallelism(tensor=tensor, experts=experts)
