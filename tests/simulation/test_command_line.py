"""`jaxinfer replay` measures a trace on an engine, and `jaxinfer simulate` runs it with what was measured."""

from __future__ import annotations

import json
import re
import sys

import pytest

from jaxinfer import cli
from jaxinfer.simulation.step_times import FEATURES
from tests.engine.engines import save_small_checkpoint
from tests.unoptimised import unoptimised_steps

ENGINE = ["--max-num-seqs", "4", "--max-num-batched-tokens", "32", "--max-model-len", "96", "--page-size", "16"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("simulation")
    save_small_checkpoint(folder / "model")
    lines = [{"timestamp": 5 * i, "input_length": 20 + i, "output_length": 1 + i} for i in range(20)]
    (folder / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def run(folder, command, *options):
    arguments = [command, str(folder / "trace.jsonl"), "--model", str(folder / "model"), "--quiet", *ENGINE, *options]
    with unoptimised_steps():
        return cli.main(arguments)


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


def run_bench(folder, *options):
    load = ["--num-requests", "9", "--input-len", "20-40", "--output-len", "5", "--rate", "1000"]
    return cli.main(["bench", "--model", str(folder / "model"), "--quiet", *load, *ENGINE, *options])


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


MISTAKES = [
    (["--num-requests", "0"], "num_requests=0 "),
    (["--rate", "nan"], "rate=nan have to be above 0"),
    (["--input-len", "9-3"], "9-3 is neither"),
    (["--plot", "no folder/load.png"], "no folder/load.png cannot be written"),
    (["--timeline", "no folder/load.json"], "no folder/load.json cannot be written"),
]


@pytest.mark.parametrize(("options", "message"), MISTAKES, ids=[" ".join(options) for options, _ in MISTAKES])
def test_a_mistake_in_a_bench_is_told_before_a_model_is_loaded(folder, capsys, options, message):
    assert run_bench(folder, "--model", "no such model", *options) == 2
    assert message in capsys.readouterr().err


def test_a_plot_without_matplotlib_is_refused_before_a_model_is_loaded(folder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    assert run_bench(folder, "--model", "no such model", "--plot", "load.png") == 2
    assert "pip install 'jaxinfer[plot]'" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["replay", "simulate"])
@pytest.mark.parametrize("wrong", ["no trace", "no step times", "bad line"])
def test_a_mistake_is_told_before_a_model_is_loaded(folder, tmp_path, capsys, command, wrong):
    trace, times = tmp_path / "trace.jsonl", tmp_path / "times.json"
    if wrong != "no trace":
        trace.write_text("{}\n" if wrong == "bad line" else "")
    if wrong != "no step times":
        times.write_text(json.dumps({"features": [], "decode": [], "prefill": []}))

    status = cli.main([command, str(trace), "--step-times", str(times), "--model", "no such model"])

    assert status == 2
    message = capsys.readouterr().err
    assert "no such model" not in message
    assert ("times.json" if command == "simulate" or wrong == "no step times" else "trace.jsonl") in message
