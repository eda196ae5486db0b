"""The command for the first hour on a GPU or TPU, in small sizes on the CPU at hand."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas.grouped_matmul import api as grouped_api
from kernels_pallas.latent_attention import api as latent_api
from kernels_pallas.paged_attention import api
from kernels_pallas.paged_attention.api import IMPLEMENTATIONS
from scripts.kernels import device_check
from scripts.kernels.on_device import checks, engine, lines, torch_peers
from tests.exhaustive import exhaustive_but
from tests.on_demand import steps_on_demand

SOON = 1e9
GROUPS = ("0.6B", "8B", "0.6B, single steps", "8B, single steps")


@pytest.fixture
def run(tmp_path):
    return device_check.Run(tmp_path, is_tiny=True)


def test_every_line_and_every_kind_of_check_runs(run):
    records = list(device_check.records_of("kernels", run, time.time() + SOON))

    timed = [(f"{r['section']}, {r['case']}", r["implementation"]) for r in records if r["section"] != "check"]
    expected = [(line.name, name) for line in lines.kernel_lines(lines.TINY) for name in line.implementations]
    assert sorted(timed) == sorted(expected)
    assert [r["case"] for r in records if r["section"] == "check"] == list(checks.all_checks(is_tiny=True))
    assert all(r["seconds"] > 0 and r["timer"] == "loop" for r in records if r["section"] != "check")
    assert [r for r in records if not r.get("passes", True)] == []
    assert all(r["passes"] for r in records if r["section"] in ("check", "attention"))


def test_checks_have_every_page_size_and_every_number_of_heads_in_decode_and_in_mixed_steps():
    for kind in ("decode", "mixed"):
        sizes = [check.sizes for name, check in checks.CHECKS.items() if name.startswith(kind)]
        assert {one.get("page_size", 32) for one in sizes} == {16, 32, 64, 128, 256}
        groups = {one["num_heads"] // one["num_kv_heads"] for one in sizes if "num_kv_heads" in one}
        assert groups >= {*range(1, 9), 71}


def test_a_group_whose_time_is_over_names_every_case_and_computes_none(run, monkeypatch):
    monkeypatch.setattr(device_check, "measure_line", lambda line: pytest.fail("it was measured"))

    records = list(device_check.records_of("kernels", run, time.time() - 1))

    assert len(records) == len(lines.kernel_lines(lines.TINY)) + len(checks.all_checks(is_tiny=True))
    assert all(record["is_left_out"] for record in records)


@pytest.mark.parametrize("group", exhaustive_but(GROUPS, ("0.6B", "8B, single steps")))
def test_every_line_of_a_whole_model_runs(group, run):
    with steps_on_demand():
        records = list(device_check.records_of(group, run, time.time() + SOON))

    names = [f"{r['section']}, {r['case']}" for r in records]
    assert names == [line.name for line in engine.engine_lines(engine.TINY) if line.section == group]
    assert all(record["seconds"] > 0 for record in records)


def test_single_steps_are_single(run, monkeypatch):
    configs = []

    class Llm:
        def __init__(self, folder, config):
            configs.append(config)
            raise InterruptedError

    monkeypatch.setattr(engine, "LLM", Llm)
    for group in ("0.6B", "8B", "8B, single steps"):
        with pytest.raises(InterruptedError):
            list(device_check.records_of(group, run, time.time() + SOON))

    assert configs == [
        engine.EngineConfig(),
        engine.TINY.limits,
        replace(engine.TINY.limits, decode_loop_steps=1),
    ]


def test_a_request_that_ends_while_it_is_timed_is_an_error(run):
    sizes = engine.TINY._replace(max_tokens=6)

    with steps_on_demand(), pytest.raises(RuntimeError, match="raise max_tokens"):
        list(engine.measure_model("8B", run.checkpoint("8B"), sizes))


def test_the_started_process_prints_the_device_at_its_first_token(run, capsys):
    with steps_on_demand():
        device_check.work("start", run, 0.0)

    assert json.loads(capsys.readouterr().out)["about"]["platform"] == "cpu"


ANSWER = "print('{\"about\": 1}', flush=True); import time; time.sleep(0.3)"


def test_the_budgets_of_all_groups_fit_into_twelve_minutes_and_the_start_comes_first():
    graces = device_check.GRACE * len(device_check.GROUPS)

    assert sum(device_check.GROUPS.values()) + graces <= 12 * 60
    assert [*device_check.GROUPS][:3] == ["start", "elsewhere", "kernels"]


def test_steps_compiled_elsewhere_are_found_by_a_start_unless_their_key_is_another(run, monkeypatch):
    steps = run.scratch / "elsewhere"
    source = f"import pathlib; [pathlib.Path({str(steps)!r}, f'jaxinfer-{{i}}').touch() for i in range(2)]"
    steps.mkdir()
    monkeypatch.setattr(device_check, "compile_command", lambda *_: [sys.executable, "-c", source])
    for name, passes in (("jaxinfer-1", True), ("jaxinfer-9", False)):
        start = f"import os; open(os.environ['JAX_COMPILATION_CACHE_DIR'] + '/{name}', 'w'); {ANSWER}"
        monkeypatch.setattr(device_check, "worker_command", lambda *_, start=start: [sys.executable, "-c", start])

        compiled, _, started = device_check.run_group("elsewhere", run, time.time() + 60)

        assert compiled["seconds"] > 0
        assert started["passes"] is passes
        assert started["note"] == f"2 steps there, {0 if passes else 1} compiled anew"


@pytest.mark.parametrize(
    ("source", "note"),
    [("import time; time.sleep(60)", "left out: the time was spent"), ("raise SystemExit('no nvcc')", "no nvcc")],
)
def test_steps_that_cannot_be_compiled_elsewhere_cost_that_line_alone(source, note, run, monkeypatch):
    monkeypatch.setattr(device_check, "compile_command", lambda *_: [sys.executable, "-c", source])

    (record,) = device_check.run_group("elsewhere", run, time.time() + 2)

    assert record["note"].endswith(note)
    assert "passes" not in record


def test_a_start_that_is_stopped_after_its_first_token_was_timed(tmp_path):
    source = "import time; print('{}', flush=True); time.sleep(60)"

    seconds, about = engine.time_start([sys.executable, "-c", source], {}, timeout=1.0, log=tmp_path / "log")

    assert seconds < 1
    assert about == {}


def test_a_group_that_takes_its_time_leaves_the_later_ones_theirs(run, monkeypatch):
    ends, kept = {}, []

    def slow(group, run, deadline):
        ends[group] = deadline
        yield {"section": group, "case": "a case", "is_left_out": True}

    monkeypatch.setattr(device_check, "run_group", slow)
    began = time.time()
    device_check.measure_all(["start", "8B"], run, lambda _, records: kept.append(len(records)))

    budgets = device_check.GROUPS
    assert ends["start"] - began == pytest.approx(budgets["start"], abs=1)
    assert ends["8B"] - began == pytest.approx(budgets["start"] + budgets["8B"], abs=1)
    assert kept == [1, 2]  # the table is written after each line


def test_a_start_is_timed_up_to_the_first_line(tmp_path):
    began = time.perf_counter()

    seconds, about = engine.time_start([sys.executable, "-c", ANSWER], {}, timeout=60, log=tmp_path / "log")

    assert about == {"about": 1}
    assert 0 < seconds < time.perf_counter() - began - 0.3


@pytest.mark.parametrize(
    ("source", "timeout", "error"),
    [("import sys; sys.exit(3)", 60, RuntimeError), ("import time; time.sleep(60)", 0.1, subprocess.TimeoutExpired)],
)
def test_a_start_that_fails_or_takes_too_long_is_an_error(source, timeout, error, tmp_path):
    with pytest.raises(error):
        engine.time_start([sys.executable, "-c", source], {}, timeout=timeout, log=tmp_path / "log")


def test_a_start_that_takes_too_long_says_where_it_is(tmp_path):
    source = "import time\ntime.sleep(60)"

    with pytest.raises(subprocess.TimeoutExpired):
        engine.time_start([sys.executable, "-X", "faulthandler", "-c", source], {}, 1.0, tmp_path / "log")

    assert 'File "<string>", line 2 in <module>' in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (ANSWER, [("cold", None), ("from disk", None)]),
        ("import sys; sys.exit(3)", [("cold", "the process ended with 3"), ("from disk", "the process ended with 3")]),
    ],
)
def test_a_process_starts_twice(source, expected, run, monkeypatch):
    monkeypatch.setattr(device_check, "worker_command", lambda *args: [sys.executable, "-c", source])

    records = [r for r in device_check.run_group("start", run, time.time() + 60) if "case" in r]

    assert (run.scratch / "0.6B" / "config.json").exists()
    for record, (case, note) in zip(records, expected, strict=True):
        assert record["case"] == case
        assert (record["seconds"] > 0) if note is None else record["note"].startswith(note)
        assert record.get("passes") is (None if note is None else False)


@pytest.mark.parametrize(
    ("source", "seconds", "expected"),
    [
        ("print('{\"a\": 1}')", 60, [{"a": 1}]),
        ("print('{\"a\": 1}', flush=True); print('noise'); import sys; sys.exit('broken')", 60, [{"a": 1}, "broken"]),
        ("print('{\"a\": 1}', flush=True); import time; time.sleep(60)", -1.0, [{"a": 1}, "left out"]),
    ],
)
def test_a_group_that_breaks_or_takes_too_long_costs_its_last_records_alone(
    source, seconds, expected, run, monkeypatch
):
    monkeypatch.setattr(device_check, "worker_command", lambda *args: [sys.executable, "-c", source])
    if seconds < 0:  # the grace that a group gets after its time, so that Python can start
        monkeypatch.setattr(device_check, "GRACE", 2.0 - seconds)

    first, *last = device_check.run_group("kernels", run, time.time() + seconds)

    assert first == expected[0]
    assert len(last) == len(expected) - 1
    assert all(part in record["note"] for record, part in zip(last, expected[1:], strict=True))


def test_the_command_prints_everything_and_writes_it_down(tmp_path, capsys, monkeypatch):
    records = [
        {"about": {"device": "NVIDIA H200", "platform": "gpu", "jax": "1", "jaxlib": "1", "date": "today"}},
        {"section": "attention", "case": "decode, 2 x 40", "implementation": "ours", "seconds": 1.0, "passes": False},
        {"section": "check", "case": "decode", "is_left_out": True},
    ]
    monkeypatch.setattr(device_check, "run_group", lambda group, run, deadline: iter(records))
    # This process would take the memory of the device from the processes of the groups.
    monkeypatch.setattr(jax, "default_backend", lambda: pytest.fail("jax started on the device"))
    monkeypatch.setattr(jax, "devices", lambda: pytest.fail("jax started on the device"))

    code = device_check.main(
        ["--tiny", "--only", "kernels", "--json", str(tmp_path / "out.json"), "--table", str(tmp_path / "out.md")]
    )

    assert code == 1
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["device"] == "NVIDIA H200"
    line = {line.name: line for line in lines.kernel_lines(lines.TINY)}["attention, decode, 2 x 40"]
    attention = written["records"][0]
    assert (attention["num_bytes"], attention["flops"]) == line.work
    assert attention["roofline_seconds"] == pytest.approx(line.work.num_bytes / 4.8e12)
    printed = capsys.readouterr().out
    assert "predictions off by more than 20%: 1" in printed
    assert "left out, for the time was spent: 1\n  check, decode\n" in printed
    assert "wrong or broken: 1\n  attention, decode, 2 x 40\n" in printed
    assert "94.9 requests/s" in printed


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_peers_are_measured_on_their_platform(platform, monkeypatch):
    """They cannot run here, and say why."""
    (line, *_) = (lines.attention_line(lines.TINY, case) for case in lines.attention_cases(lines.TINY))
    monkeypatch.setattr(jax, "default_backend", lambda: platform)

    peers = list(device_check.measure_line(line._replace(implementations={})))

    assert [r["implementation"] for r in peers] == {"gpu": ["jax", "cudnn, no pages"], "tpu": ["jax"]}[platform]
    assert all(r["note"].startswith("not available") and "passes" not in r for r in peers)


def test_a_process_of_a_group_runs_by_itself(tmp_path, capsys):
    """Of the peers, because they need no compiler."""
    assert device_check.main(["--tiny", "--only", "peers", "--table", str(tmp_path / "out.md")]) == 0

    printed = capsys.readouterr().out
    assert "peers, flashinfer" in printed
    assert "peers, vllm" in printed


def test_a_peer_that_fails_says_why(run, monkeypatch):
    monkeypatch.setattr(torch_peers.importlib.util, "find_spec", lambda name: name)

    records = list(device_check.records_of("peers", run, time.time() + SOON))

    assert [record["note"][:13] for record in records] == ["not available"] * 2


def test_without_a_device_only_tiny_sizes_run(tmp_path):
    with pytest.raises(SystemExit, match="--tiny runs every line on a CPU"):
        device_check.work("kernels", device_check.Run(tmp_path, is_tiny=False), 0.0)


def test_tiny_figures_are_not_written(capsys):
    with pytest.raises(SystemExit):
        device_check.main(["--tiny", "--write"])

    assert "leave out --tiny" in capsys.readouterr().err


def test_a_wrong_kernel_is_told(monkeypatch):
    right = IMPLEMENTATIONS["reference"]

    def wrong(*args, **kwargs):
        out, pages = right(*args, **kwargs)
        return out + jnp.asarray(0.1, out.dtype), pages

    monkeypatch.setitem(IMPLEMENTATIONS, "reference", wrong)
    name, error_of = next(iter(checks.all_checks(is_tiny=True).items()))

    assert checks.run_check(name, error_of, "reference")["passes"] is False


@pytest.mark.parametrize(("offset", "passes"), [(0.0, True), (0.1, False)])
def test_the_results_that_are_timed_are_right(offset, passes, monkeypatch):
    kernel = IMPLEMENTATIONS["gpu_interpret"]

    def moved(*args, **kwargs):
        out, pages = kernel(*args, **kwargs)
        return out + jnp.asarray(offset, out.dtype), pages

    monkeypatch.setitem(IMPLEMENTATIONS, "gpu_interpret", moved)
    monkeypatch.setattr(lines, "kernel_of_platform", lambda: "gpu_interpret")
    chosen = [case for case in lines.attention_cases(lines.TINY) if case.family == "uneven decode"]

    ((record,),) = [list(device_check.measure_line(lines.attention_line(lines.TINY, case))) for case in chosen]

    assert record["passes"] is passes


@pytest.mark.parametrize(
    ("table", "error_of"),
    [
        (grouped_api.IMPLEMENTATIONS, functools.partial(checks.error_of_experts, (3, 0, 2), {})),
        (
            latent_api.IMPLEMENTATIONS,
            functools.partial(checks.error_of_latents, checks.Check([(1, 70)], 1, {"num_heads": 16})),
        ),
    ],
    ids=["experts", "latents"],
)
def test_results_of_other_kernels_that_are_wrong_are_told(table, error_of, monkeypatch):
    right = table["reference"]

    def wrong(*args, **kwargs):
        result = right(*args, **kwargs)  # of attention with the pages
        out = result[0] if isinstance(result, tuple) else result
        moved = out + jnp.asarray(0.1, out.dtype)
        return (moved, *result[1:]) if isinstance(result, tuple) else moved

    assert error_of("reference") < checks.TOLERANCE
    monkeypatch.setitem(table, "reference", wrong)

    assert error_of("reference") > checks.TOLERANCE


@pytest.mark.parametrize("name", checks.APPEND_CHECKS)
def test_the_launch_that_appends_products_is_right_and_a_wrong_one_is_told(name, monkeypatch):
    check, num_rotated = checks.APPEND_CHECKS[name]
    right = api.append_products_gpu

    def moved(*args, **kwargs):
        q, pages = right(*args, **kwargs)
        return q + jnp.asarray(0.1, q.dtype), pages

    def error_of():
        return checks.error_of_append(checks.tiny(check), num_rotated, "gpu_interpret")

    assert error_of() < checks.TOLERANCE
    monkeypatch.setattr(api, "append_products_gpu", moved)
    assert error_of() > checks.TOLERANCE


@pytest.mark.parametrize("sizes", [(1, 48, 64), (2, 32, 96)])
def test_dense_products_are_right_and_wrong_ones_and_other_bits_are_told(sizes, monkeypatch):
    def multiplied(x, weights, **options):
        return right(x, weights, **options) * (1 + 0.1 * (x.shape[0] > 1))

    right = checks.multiply
    assert checks.error_of_dense(sizes, 5, "gpu_interpret") < checks.TOLERANCE
    assert checks.rows_that_differ(sizes, (8, 64), "gpu_interpret") == 0
    monkeypatch.setattr(checks, "multiply", multiplied)
    assert checks.error_of_dense(sizes, 5, "gpu_interpret") > checks.TOLERANCE
    assert checks.rows_that_differ(sizes, (8, 64), "gpu_interpret") == 6


def test_a_kernel_that_refuses_a_check_is_not_wrong_but_says_why():
    def refuse():
        raise NotImplementedError("8-bit floats need another GPU")

    record = checks.run_check("decode", refuse, "gpu")

    assert "passes" not in record
    assert record["note"] == "refused: 8-bit floats need another GPU"


@pytest.mark.parametrize(("name", "passes"), [("ours", False), ("jax", None)])
def test_a_kernel_of_ours_that_cannot_be_timed_is_a_fault(name, passes):
    def fail(x):
        raise RuntimeError("out of shared memory")

    line = lines.Line("attention", "decode", "decode", lines.Work(1.0, 1.0), {name: lambda: (fail, [(jnp.ones(1),)])})

    (record,) = device_check.measure_line(line)

    assert record.get("passes") is passes
    assert record["note"] == "not available: RuntimeError: out of shared memory"
