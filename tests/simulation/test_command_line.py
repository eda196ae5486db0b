"""`jaxinfer replay` measures a trace on an engine, and `jaxinfer simulate` runs it with what was measured."""

from __future__ import annotations

import json
import re

import pytest

from jaxinfer import cli
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

    assert run(folder, "replay", "--save-step-times", times, "--max-ttft", "0") == 0
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
