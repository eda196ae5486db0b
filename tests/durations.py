"""The files whose tests are quick, slow or long: which of them a run has, and in which order."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

TESTS = Path(__file__).parent
# Tests without a compiled engine, by folder or by file. Together they take less than a minute, so files that
# take many seconds of processor are not among them.
QUICK = (
    *("test_atomic_file.py", "test_config.py", "test_device.py", "test_imports.py", "test_suite.py"),
    *("batch_job/test_job.py", "batch_job/test_records.py"),
    "checkpoint/test_checkpoint_digest.py",
    *("engine/execution/test_batch_builder.py", "engine/execution/test_pipeline.py"),
    *("engine/kv_cache", "engine/request"),
    *("engine/scheduling/test_looping.py", "engine/scheduling/test_mask_turns.py"),
    *("engine/scheduling/test_metrics.py", "engine/scheduling/test_policy.py"),
    *("engine/scheduling/test_scheduler.py", "engine/scheduling/test_step_results.py"),
    "engine/scheduling/test_waiting.py",
    *("engine/whole/test_assembly.py", "engine/whole/test_timeline.py"),
    *("kernels/test_gpu_compiler.py", "kernels/test_recorded.py"),
    *("kernels/test_device_report.py", "kernels/test_device_timer.py"),
    *("model/test_batch.py", "model/test_model_config.py"),
    *("notebooks/test_notebook_files.py", "plan/test_memory.py", "sampling/test_sampling_batch.py"),
    *("simulation/test_step_times.py", "simulation/test_trace.py"),
    *("text/answers/test_answer_parser.py", "text/answers/test_answer_styles.py"),
    *("text/test_detokenizer.py", "text/test_ecmascript_regex.py", "text/test_gguf_vocabulary.py"),
    *("text/test_json_schema.py", "text/test_unique_keys.py", "text/test_vocabulary_and_merges.py"),
)
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
    *("checkpoint/test_backbones.py", "checkpoint/test_calibrated_copy.py", "checkpoint/test_every_family.py"),
    *("checkpoint/test_format_table.py", "checkpoint/test_gemma4.py", "checkpoint/test_wrong_values.py"),
    *("engine/exactness/test_engine_exactness.py", "engine/exactness/test_host_errors.py"),
    *("engine/exactness/test_llm_against_transformers.py", "engine/exactness/test_endless.py"),
    *("engine/frontend/test_branches.py", "engine/frontend/test_chat_answers.py"),
    *("engine/frontend/test_generation_defaults.py", "kernels/grouped_matmul"),
    *("kernels/paged_attention/test_block_sizes.py", "kernels/paged_attention/test_gpu_mutations.py"),
    *("kernels/paged_attention/test_gpu_schedule.py", "kernels/paged_attention/test_in_blocks.py"),
    *("kernels/paged_attention/test_layout.py",),
    *("engine/exactness/test_quantization.py", "engine/frontend/test_saved_requests.py"),
    *("engine/scheduling/test_freed_requests.py", "engine/test_engine_thread.py", "engine/whole/test_agreement.py"),
    *("engine/whole/test_endless_requests.py", "engine/whole/test_sampling_log_probs_of_requests.py"),
    *("hostile/test_sequences.py", "serve", "steps/test_steps.py", "steps/test_trees.py"),
)


def is_listed(path: Path, listed: Sequence[str]) -> bool:
    """True if a file of these tests, or a folder that it lies in, is in the list."""
    name = _name(path)
    return name in listed or any(name.startswith(f"{folder}/") for folder in listed)


def is_quick(path: Path) -> bool:
    """True if the tests of a file are quick, but for those with the fixture of an engine."""
    return is_listed(path, QUICK) and not is_listed(path, SLOW + LONG)


def may_have(path: Path, expression: str) -> bool:
    """True for a file with tests that marks choose, or a folder with such a file, without importing any of them.

    It knows expressions that begin with the marks `quick`, `bits` and `aot`; it says True of all others.
    """
    chosen = {
        "quick": is_quick,
        "bits": lambda file: "pytest.mark.bits" in file.read_text(),
        "aot": lambda file: "pytest.mark.aot" in file.read_text(),
    }.get(expression.split()[0] if expression else "")
    files = path.rglob("test_*.py") if path.is_dir() else [path]
    return chosen is None or any(map(chosen, files))


def _name(path: Path) -> str:
    return os.path.relpath(path, TESTS)
