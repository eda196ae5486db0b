"""The Hopper kernel for prefill: right and free of races where it is interpreted, and chosen only where it can run."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.paged_attention import abstract_pages, tuned_tables
from kernels_pallas.paged_attention.gpu import prefill_choice
from kernels_pallas.paged_attention.gpu.prefill_choice import choose_prefill, reason_against_machine
from kernels_pallas.paged_attention.gpu.tiles import num_tiles, tile_table
from kernels_pallas.paged_attention.tuned_tables import tuned_table
from kernels_pallas.triton import Target
from tests.kernels.paged_attention.hopper_program import CASES, MUTATIONS
from tests.on_devices import run_on_devices

H200 = Target("NVIDIA H200", num_cores=132, capability=9.0)
GOOD_WHEELS = {"nvidia-cuda-nvcc-cu12": "12.9.86"}
# That of jax 0.10 has no `layout_cast`.
needs_interpreter = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="the Mosaic GPU interpreter of jax 0.10 lacks what the kernel needs"
)
PROGRAM = ("-m", "tests.kernels.paged_attention.hopper_program")


@pytest.fixture(scope="module")
def errors() -> dict[str, float]:
    return json.loads(run_on_devices(8, *PROGRAM).splitlines()[-1])


@needs_interpreter
@pytest.mark.parametrize("case", CASES)
def test_each_row_attends_to_its_own_context(case, errors):
    # Weights and results are rounded to 8 bits: values of order 1, of which few weigh most.
    assert errors[case] < 0.02


@needs_interpreter
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_of_the_kernel_is_caught(name):
    assert json.loads(run_on_devices(8, *PROGRAM, name).splitlines()[-1])[name] > 0.02


make_table = jax.jit(tile_table, static_argnums=(2, 3))


def tiles_one_by_one(kv_lens, q_lens, T: int, tile: int) -> list[tuple[int, int, int, int]]:
    """The tiles with queries as the table should have them, in the order of rows."""
    tiles, first = [], 0
    rows = [*zip(kv_lens, q_lens, strict=True), (0, T - sum(q_lens))]
    for row, (kv_len, q_len) in enumerate(rows):
        if q_len != 1 or row == len(q_lens):
            for offset in range(0, q_len, tile):
                tiles.append((row, first + offset, min(tile, q_len - offset), kv_len - q_len + offset))
        first += q_len
    return tiles


@pytest.mark.parametrize("seed", range(20))
def test_every_token_of_a_row_of_several_is_in_one_tile_and_the_longest_come_first(seed):
    generator = np.random.default_rng(seed)
    B, T, tile = 5, 60, 4
    q_lens = generator.choice([0, 1, 2, 4, 5, 11], B)
    kv_lens = q_lens + generator.integers(0, 30, B)
    cu_q_lens = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)

    table = np.asarray(make_table(kv_lens.astype(np.int32), cu_q_lens, T, tile))

    assert table.shape == (4, num_tiles(T, B, tile))
    tiles = [tuple(column) for column in table.T.tolist() if column[2] > 0]
    assert sorted(tiles) == sorted(tiles_one_by_one(kv_lens.tolist(), q_lens.tolist(), T, tile))
    ends = [max(position + queries, 0) for _, _, queries, position in tiles]
    assert ends == sorted(ends, reverse=True)
    assert (table[2, len(tiles) :] == 0).all()


def choose(name: str | None = None, *, machine: Any = None, **changes: Any) -> str:
    """Chooses for a call that Mosaic's kernel can do, but for `changes`."""
    call = {"T": 256, "dtype": "bfloat16", "page_dtype": "bfloat16", "head_dim": 128, "page_size": 128} | changes
    q = jax.ShapeDtypeStruct((call["T"], 32, call["head_dim"]), jnp.dtype(call["dtype"]))
    pages = abstract_pages(4, call["page_size"], 8, call["head_dim"], call["page_dtype"], "gpu")
    absent = {"tree_mask": changes.get("tree_mask"), "k_scale": changes.get("k_scale")}
    return choose_prefill(
        name,
        q,  # pyright: ignore[reportArgumentType]
        pages,
        scale=changes.get("scale", 0.1),
        absent=absent,
        target=machine or H200,
        interpret=changes.get("interpret", False),
    )


@pytest.fixture
def can_run(monkeypatch):
    """A machine with a jax and a compiler that build the kernel."""
    monkeypatch.setattr(prefill_choice, "compiler_wheels", lambda: GOOD_WHEELS)
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))


@pytest.fixture
def tabled(monkeypatch, tmp_path):
    """A table by which Mosaic's kernel was the faster for 32 heads of 128 on 8 KV heads in bfloat16."""
    entry = {"kernel": "ragged", "page_dtype": "bfloat16", "num_kv_heads": 8, "head_dim": 128, "num_groups": 4}
    monkeypatch.setattr(tuned_tables, "TABLES", tmp_path)
    (tmp_path / "gpu_nvidia_h200.json").write_text(json.dumps({"entries": [entry | {"prefill": "mosaic"}]}))
    tuned_table.cache_clear()
    yield
    tuned_table.cache_clear()


@pytest.mark.usefixtures("can_run")
def test_without_a_table_triton_computes_prefill():
    assert choose() == "triton"
    assert choose("mosaic") == "mosaic"


@pytest.mark.usefixtures("can_run", "tabled")
def test_a_table_chooses_for_its_device_and_heads():
    assert choose() == "mosaic"
    assert choose("triton") == "triton"
    assert choose(head_dim=64) == "triton"
    assert choose(machine=H200._replace(kind="NVIDIA H100 80GB HBM3")) == "triton"


REFUSED_CALLS = [
    ({"dtype": "float32", "page_dtype": "float32"}, "q.dtype=float32 is not supported .*bfloat16"),
    ({"page_dtype": "int8"}, "pages.dtype=int8 is not supported"),
    ({"page_dtype": "float8_e4m3fn"}, "pages.dtype=float8_e4m3fn is not supported"),
    ({"head_dim": 80}, "head_dim=80 is not supported .*64, 128"),
    ({"tree_mask": np.zeros((1, 1))}, "tree_mask=an array is not supported"),
    ({"k_scale": np.zeros(8)}, "k_scale=an array is not supported"),
    ({"T": 63}, "63 tokens are fewer than the 64"),
    ({"scale": -1.0}, "scale=-1.0 is not supported"),
]


@pytest.mark.usefixtures("can_run", "tabled")
@pytest.mark.parametrize(("changes", "reason"), REFUSED_CALLS)
def test_a_call_that_the_kernel_cannot_do_is_refused_by_name_and_else_left_to_triton(changes, reason):
    assert choose(**changes) == "triton"
    with pytest.raises(NotImplementedError, match=f"{reason}.*use the Triton kernel"):
        choose("mosaic", **changes)


@pytest.mark.parametrize(
    ("capability", "jax_version", "wheels", "reason"),
    [
        (8.0, (0, 11, 2), GOOD_WHEELS, "capability 8.0 .*needs 9.0"),
        (10.0, (0, 11, 2), GOOD_WHEELS, "capability 10.0 .*needs 9.0"),
        (9.0, (0, 10, 2), GOOD_WHEELS, "needs jax >= 0.11, not 0.10.2"),
        (9.0, (0, 11, 2), {}, r"needs to know its CUDA compiler.*pip install .*>=12\.9\.86"),
        (9.0, (0, 11, 2), {"nvidia-cuda-nvcc-cu12": "12.8.61"}, r"12\.8\.61.* miscompiles .*pip install .*>=12\.9\.86"),
        (9.0, (0, 11, 2), {"nvidia-cuda-nvcc-cu12": "12.9.41"}, r"12\.9\.41.* miscompiles .*pip install .*>=12\.9\.86"),
    ],
)
def test_a_machine_that_cannot_build_the_kernel_is_refused_by_name(capability, jax_version, wheels, reason):
    target = H200._replace(capability=capability)

    assert reason_against_machine(H200, (0, 11, 2), {"nvidia-cuda-nvcc": "13.0.88"} | GOOD_WHEELS) is None
    assert reason_against_machine(H200, (0, 11, 2), {"nvidia-cuda-nvcc-cu12": "12.6.85"}) is None
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(reason_against_machine(target, jax_version, wheels))


@pytest.mark.usefixtures("can_run", "tabled")
def test_a_table_that_the_compiler_stands_against_leaves_prefill_to_triton_with_a_warning(monkeypatch):
    monkeypatch.setattr(prefill_choice, "compiler_wheels", lambda: {"nvidia-cuda-nvcc-cu12": "12.8.93"})

    with pytest.warns(UserWarning, match=r"Triton computes prefill.*12\.8\.93.*miscompiles"):
        assert choose() == "triton"


def test_an_unknown_kernel_is_refused():
    with pytest.raises(ValueError, match="prefill='cutlass' is unknown.*triton.*mosaic"):
        choose("cutlass")
