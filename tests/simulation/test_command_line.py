"""`jaxinfer replay` measures a trace on an engine, and `jaxinfer simulate` runs it with what was measured."""

from __future__ import annotations

import json
import re
import sys

import pytest

from jaxinfer.cli.bench import SAMPLE_TRACE
from jaxinfer.cli.main import main
from jaxinfer.engine.engine import BUNDLED_MODEL
from jaxinfer.simulation.step_times import FEATURES
from tests.engine.engines import save_small_checkpoint

ENGINE = ["--max-num-seqs", "4", "--max-num-batched-tokens", "32", "--max-model-len", "96", "--page-size", "16"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("simulation")
    save_small_checkpoint(folder / "model")
    lines = [{"timestamp": 5 * i, "input_length": 20 + i, "output_length": 1 + i} for i in range(20)]
    (folder / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def run(folder, command, *options):
    return run_trace(folder, command, folder / "trace.jsonl", *options)


def run_trace(folder, command, trace, *options):
    arguments = [command, str(trace), "--model", str(folder / "model"), "--quiet", *ENGINE, *options]
    return main(arguments)


def test_a_trace_is_replayed_and_simulated(folder, capsys):
    times = str(folder / "times.json")

    assert run(folder, "replay", "--save-step-times", times, "--ttft-target", "0") == 0
    replayed = capsys.readouterr().out
    assert run(folder, "simulate", "--step-times", times) == 0
    simulated = capsys.readouterr().out
    assert run(folder, "replay", "--step-times", times) == 0
    compared = capsys.readouterr().out

    assert "20 requests" in replayed
    assert "goodput 0.000 requests/s" in replayed
    assert "20 requests" in simulated
    assert "goodput 0.000 requests/s" not in simulated
    assert "simulated: 20 requests" in compared
    assert re.search(r"off by [+-]\S+% in mean TTFT, [+-]\S+% in mean TPOT, [+-]\S+% in makespan", compared)


def test_too_short_a_trace_is_named_as_the_reason_why_nothing_is_saved(folder, tmp_path, capsys):
    (tmp_path / "trace.jsonl").write_text('{"timestamp": 0, "input_length": 5, "output_length": 2}\n')
    times = tmp_path / "times.json"

    status = run_trace(folder, "replay", tmp_path / "trace.jsonl", "--save-step-times", str(times))

    assert status == 2
    reason = "the trace is too short to fit step times, 1 decode steps of it were measured"
    message = f"--save-step-times='{times}' is not written: {reason}"
    assert message in capsys.readouterr().err


def test_a_model_without_a_name_is_refused_by_the_name_of_its_option(tmp_path, capsys):
    weights = [0.001] * len(FEATURES)
    (tmp_path / "times.json").write_text(json.dumps({"features": FEATURES, "decode": weights, "prefill": weights}))

    status = main(["simulate", str(SAMPLE_TRACE), "--step-times", str(tmp_path / "times.json"), "--model", ""])

    assert status == 2
    assert "model='' is not allowed" in capsys.readouterr().err


def test_the_sample_trace_is_served_whole_and_shares_prefixes(tmp_path, capsys):
    weights = [0.001] * len(FEATURES)
    (tmp_path / "times.json").write_text(json.dumps({"features": FEATURES, "decode": weights, "prefill": weights}))

    assert main(["simulate", str(SAMPLE_TRACE), "--step-times", str(tmp_path / "times.json"), "--quiet"]) == 0

    figures = capsys.readouterr().out
    assert "24 requests" in figures
    assert " 0 refused" in figures
    (share,) = re.findall(r"([0-9.]+)% of prompt tokens cached", figures)
    assert float(share) > 30


NOT_OFFERED = {
    "bench": ["--max-drafts", "--draft-trees", "--max-log-probs", "--max-prompt-log-probs", "--max-listed-tokens"],
    "replay": ["--max-drafts", "--no-adaptive-drafts", "--max-log-probs"],
    "simulate": ["--quantization", "--decode-loop-steps", "--memory-bytes", "--host-cache-bytes", "--max-drafts"],
}


@pytest.mark.parametrize(("command", "option"), [(c, option) for c in NOT_OFFERED for option in NOT_OFFERED[c]])
def test_an_option_that_a_load_has_no_use_for_is_not_offered(capsys, command, option):
    assert main([command, "--help"]) == 0
    assert not re.search(rf"{option}\b", capsys.readouterr().out)


def run_bench(folder, *options):
    load = ["--num-requests", "9", "--input-len", "20-40", "--output-len", "5", "--rate", "1000"]
    return main(["bench", "--model", str(folder / "model"), "--quiet", *load, *ENGINE, *options])


def test_a_bench_prints_figures_and_leaves_a_plot_and_a_timeline(folder, tmp_path, capsys):
    plot, timeline = tmp_path / "load.png", tmp_path / "load.json"

    assert run_bench(folder, "--plot", str(plot), "--timeline", str(timeline)) == 0

    printed = capsys.readouterr().out
    assert re.search(r"9 requests in .*output tokens/s.*ttft .* p99 .*tpot .* p99 ", printed, re.DOTALL)
    assert plot.read_bytes().startswith(b"\x89PNG")
    events = json.loads(timeline.read_text())["traceEvents"]
    assert len({event["tid"] for event in events if event["name"] == "decode" and event["pid"] == 2}) == 9


def test_a_simulation_leaves_a_plot_as_well(folder, tmp_path):
    weights = [0.001] * len(FEATURES)
    (tmp_path / "times.json").write_text(json.dumps({"features": FEATURES, "decode": weights, "prefill": weights}))

    options = ["--step-times", str(tmp_path / "times.json"), "--plot", str(tmp_path / "load.png")]

    assert run(folder, "simulate", *options) == 0
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")


HUGE = b'{"timestamp": 1' + b"0" * 400 + b', "input_length": 5, "output_length": 2}'


def with_weight(weight):
    weights = ", ".join([weight, *["0"] * (len(FEATURES) - 1)])
    return f'{{"features": {json.dumps(FEATURES)}, "decode": [{weights}], "prefill": [{weights}]}}'.encode()


@pytest.mark.parametrize("option", ["--timeline", "--plot"])
def test_a_disk_that_is_full_is_told_with_the_file(folder, tmp_path, capsys, option):
    (tmp_path / "times.json").write_bytes(with_weight("0.001"))

    assert run(folder, "simulate", "--step-times", str(tmp_path / "times.json"), option, "/dev/full") == 2
    assert "/dev/full cannot be written (No space left on device); give another file" in capsys.readouterr().err


MISTAKES = [
    (["--num-requests", "0"], "num_requests=0 "),
    (["--rate", "nan"], "rate=nan have to be above 0"),
    (["--input-len", "99999999"], "input_len=99999999 is more than a load may have; give at most 16,777,216"),
    (["--input-len", "9-3"], "9-3 is neither"),
    (["--input-len", "1-2-3"], "1-2-3 is neither"),
    (["--plot", "no folder/load.png"], "no folder/load.png cannot be written"),
    (["--timeline", "no folder/load.json"], "no folder/load.json cannot be written"),
    (["--timeline", "/proc/load.json"], "/proc/load.json cannot be written"),
    (["--plot", "/"], "/ cannot be written (Is a directory); give another file"),
]


@pytest.mark.parametrize(("options", "message"), MISTAKES, ids=[" ".join(options) for options, _ in MISTAKES])
def test_a_mistake_in_a_bench_is_told_before_a_model_is_loaded(folder, capsys, options, message):
    assert run_bench(folder, "--model", "no such model", *options) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--plot", "--timeline"])
def test_a_load_that_fails_leaves_no_file_and_changes_none(folder, tmp_path, option):
    new, old = tmp_path / "new", tmp_path / "old"
    old.write_text("as it was")

    assert [run_bench(folder, "--model", "no such model", option, str(path)) for path in (new, old)] == [2, 2]

    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert old.read_text() == "as it was"


def test_a_plot_without_matplotlib_is_refused_before_a_model_is_loaded(folder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    assert run_bench(folder, "--model", "no such model", "--plot", "load.png") == 2
    assert "pip install 'jaxinfer[plot]'" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["replay", "simulate"])
@pytest.mark.parametrize("content", [None, b"", b"\n", b"{}\n", b"\xff\n", b"[" * 100_000, HUGE], ids=range(7))
def test_a_mistake_in_a_trace_is_told_before_a_model_is_loaded(tmp_path, capsys, command, content):
    model = {"replay": "no such model", "simulate": BUNDLED_MODEL}[command]  # of which simulate loads no weights
    times, weights = tmp_path / "times.json", [0.001] * len(FEATURES)
    times.write_text(json.dumps({"features": FEATURES, "decode": weights, "prefill": weights}))
    if content is not None:
        (tmp_path / "trace.jsonl").write_bytes(content)

    status = main([command, str(tmp_path / "trace.jsonl"), "--step-times", str(times), "--model", str(model)])

    assert status == 2
    assert capsys.readouterr().err.startswith(f"jaxinfer: error: {tmp_path / 'trace.jsonl'}")


NO_TIMES = [
    None,
    b"",
    b"\xff",
    b"[" * 100_000,
    b"[]",
    b"{}",
    with_weight("NaN"),
    with_weight("-1"),
    with_weight("1e999"),
]


@pytest.mark.parametrize("command", ["replay", "simulate"])
@pytest.mark.parametrize("content", NO_TIMES, ids=range(len(NO_TIMES)))
def test_a_mistake_in_step_times_is_told_before_a_model_is_loaded(folder, tmp_path, capsys, command, content):
    times = tmp_path / "times.json"
    if content is not None:
        times.write_bytes(content)

    status = main([command, str(SAMPLE_TRACE), "--step-times", str(times), "--model", "no such model"])

    assert status == 2
    message = capsys.readouterr().err
    assert message.startswith(f"jaxinfer: error: step_times='{times}'")
    assert "jaxinfer replay" in message


@pytest.mark.parametrize("option", ["--plot", "--timeline"])
def test_a_null_character_in_a_file_name_is_refused_by_its_option(capsys, option):
    assert main(["bench", f"{option}=\0"]) == 2

    assert rf"argument {option}: '\x00' is no name of a file" in capsys.readouterr().err
