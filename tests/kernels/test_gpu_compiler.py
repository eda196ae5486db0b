"""What is read of the CUDA compiler's files, and which of its wheels are known; see test_gpu_compile.py for itself."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kernels_pallas import gpu_compiler


def test_a_kernel_of_which_nothing_is_known_is_not_taken_for_one_that_needs_nothing(tmp_path):
    line = "000: kKernel attend grid: [4, 1, 1] threads: [128, 1, 1] shared_memory: 64 bytes"
    (tmp_path / "module_0.thunk_sequence.txt").write_text(line)

    with pytest.raises(RuntimeError, match="no PTX of kernel 'attend'"):
        gpu_compiler._launches(tmp_path, "sm_90a")


@pytest.mark.parametrize(
    ("plugin", "ptxas", "is_there"),
    [
        ("xla_cuda12", "cuda_nvcc/bin/ptxas", True),
        ("xla_cuda13", "cu13/bin/ptxas", True),
        ("xla_cuda13", "cu13/bin/other", False),
        ("xla_rocm", "cu13/bin/ptxas", False),
    ],
)
def test_the_wheels_of_both_generations_are_found(plugin, ptxas, is_there, tmp_path, monkeypatch):
    files = [tmp_path / "jax_plugins" / plugin / "__init__.py", tmp_path / "nvidia" / ptxas]
    for file in files:
        file.parent.mkdir(parents=True)
        file.touch()
    specs = {
        name: SimpleNamespace(submodule_search_locations=[str(tmp_path / name)]) for name in ("jax_plugins", "nvidia")
    }
    monkeypatch.setattr(gpu_compiler.importlib.util, "find_spec", specs.get)

    assert gpu_compiler.is_available() == is_there
