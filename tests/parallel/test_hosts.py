"""One engine over two processes with two CPU devices each, against one process with four."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import pytest

from jaxinfer.checkpoint import Checkpoint
from jaxinfer.config import EngineConfig
from jaxinfer.engine.assembly import given_facts, refuse_over_processes
from jaxinfer.parallel.hosts import Hosts
from jaxinfer.parallel.placement import DEFAULT_DEVICE
from tests.checkpoint.packing import WRITERS
from tests.on_devices import ROOT, with_devices
from tests.oracles import save_random_checkpoint
from tests.parallel.engine_program import save_adapter

# A hang is the usual way in which such programs fail.
MAX_SECONDS = 600
ENDS_WITHIN = 30


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return str(free.getsockname()[1])


def start(num_processes: int, *arguments: str) -> list[subprocess.Popen]:
    """Starts the program in each process, with four devices in all."""
    port = free_port()
    own = [["tests.parallel.hosts_program", str(i), str(num_processes), port] for i in range(num_processes)]
    return start_all([[*command, *arguments] for command in own])


def start_command(num_processes: int, *arguments: str) -> list[subprocess.Popen]:
    """Starts the command line in each process, with four devices in all."""
    options = ["--coordinator", f"localhost:{free_port()}", "--num-processes", str(num_processes), "--process-id"]
    own = [[*options, str(i)] if num_processes > 1 else [] for i in range(num_processes)]
    return start_all([["jaxinfer", *arguments, *given] for given in own])


def start_all(modules: list[list[str]]) -> list[subprocess.Popen]:
    """Starts modules of Python with their arguments."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return [
        subprocess.Popen([sys.executable, "-m", *own], cwd=ROOT, env=with_devices(4 // len(modules)), **pipes)
        for own in modules
    ]


def finish(processes: list[subprocess.Popen]) -> list[tuple[int, str, str]]:
    """The return code and outputs of each process; all are killed if one takes too long."""
    end = time.monotonic() + MAX_SECONDS
    try:
        outputs = [process.communicate(timeout=max(end - time.monotonic(), 1)) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


def own_lines(error: str) -> list[str]:
    """The lines of standard error in which a process says how it ends."""
    return [line for line in error.splitlines() if line.startswith("jaxinfer: ")]


def results_of_one_and_two(*arguments: str) -> Any:
    """The results of one process, and those of two, which run at the same time."""
    ended = finish([*start(1, *arguments), *start(2, *arguments)])
    assert [code for code, *_ in ended] == [0, 0, 0], [error[-3000:] for *_, error in ended]
    # Gloo writes to standard output as well.
    one, two, none = ([line for line in output.splitlines() if line.startswith("{")] for _, output, _ in ended)
    assert none == []
    return [json.loads(line) for line in (*one, *two)]


# Whole groups of 32 inputs for each of four devices.
GROUPS = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 128, "num_key_value_heads": 4}
LLAMA = {"num_hidden_layers": 2}
GPT_OSS = {"num_local_experts": 4, "num_hidden_layers": 2}
# The family, changes to it, the format that packs it and its options, devices by tensor and by experts, and settings.
CASES: dict[str, tuple[str, dict[str, Any], str | None, dict[str, Any], tuple[str, ...]]] = {
    "llama with drafts and adapters, GPTQ in act-order": (
        "llama",
        {**LLAMA, **GROUPS},
        "gptq",
        {"is_symmetric": False, "has_order": True},
        ("4", "1", "speculation=ngram", "max_drafts=3", "max_adapters=1", "max_adapter_rank=4"),
    ),
    "gpt-oss": ("gpt_oss", GPT_OSS, None, {}, ("2", "2")),
    "llama, a stage on each": ("llama", {"num_hidden_layers": 3}, None, {}, ("2", "1", "stages=2")),
}
EXHAUSTIVE: dict[str, tuple[str, dict[str, Any], str | None, dict[str, Any], tuple[str, ...]]] = {
    "llama": ("llama", LLAMA, None, {}, ("4", "1")),
    "gpt-oss in int8": ("gpt_oss", GPT_OSS, None, {}, ("2", "2", "quantization=int8")),
    **{
        f"llama in {writer} {options}": ("llama", {**LLAMA, **GROUPS}, writer, options, ("4", "1"))
        for writer, options in (
            ("gptq", {"bits": 3}),
            ("gptq", {"bits": 8, "has_order": True}),
            ("awq", {}),
            ("fp8", {}),
            ("fp8", {"block": None}),
            ("compressed w8a8", {"is_dynamic": False, "is_symmetric": False}),
            ("compressed floats", {"kind": "NVFP4A16"}),
        )
    },
    "mixtral in int4": ("mixtral", {"num_local_experts": 4, **GROUPS}, None, {}, ("1", "4", "quantization=int4")),
}


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.exhaustive) for case in EXHAUSTIVE)])
def test_two_processes_give_the_bits_of_one(case, tmp_path):
    family, changes, writer, options, settings = {**CASES, **EXHAUSTIVE}[case]
    checkpoint = save_random_checkpoint(tmp_path / "checkpoint", family, **changes)
    if "max_adapters=1" in settings:
        (tmp_path / "both" / "adapter").mkdir(parents=True)
        save_adapter(str(checkpoint), tmp_path / "both" / "adapter")
    if writer is not None:
        checkpoint = WRITERS[writer](checkpoint, tmp_path / "both", **options).path

    one, two = results_of_one_and_two("same bits", str(checkpoint), *settings)

    assert one == two
    assert (one["drafts"] > 0) == ("speculation=ngram" in settings)


@pytest.mark.parametrize(
    ("victim", "way", "reason"),
    [
        (1, "kill", "nothing was heard of it"),
        (1, "leave", "has ended before process 0"),
        pytest.param(0, "kill", "has ended or cannot be reached", marks=pytest.mark.exhaustive),
        pytest.param(1, "interrupt", "has failed: KeyboardInterrupt", marks=pytest.mark.exhaustive),
        pytest.param(0, "raise", "LookupError: a mistake of the user", marks=pytest.mark.exhaustive),
        # The digest of its launches differs.
        pytest.param(1, "raise", "is not that of process 0", marks=pytest.mark.exhaustive),
    ],
)
def test_no_process_outlives_another_and_each_names_the_one_that_ended_first(victim, way, reason, tmp_path):
    checkpoint = save_random_checkpoint(tmp_path / "checkpoint", "llama", num_hidden_layers=1)
    processes = start(2, "disturbed", str(checkpoint), str(victim), way)

    codes = []
    try:
        processes[victim].wait(MAX_SECONDS)
        began = time.monotonic()
        processes[1 - victim].wait(ENDS_WITHIN)
        assert time.monotonic() - began < ENDS_WITHIN
    finally:
        codes = finish(processes)

    code, _, error = codes[1 - victim]
    assert code != 0
    last = own_lines(error)[-1]
    assert f"process {victim} of 2" in last
    assert reason in last


def test_sigterm_at_any_process_ends_the_first_and_the_others_with_it(tmp_path):
    checkpoint = save_random_checkpoint(tmp_path / "checkpoint", "llama", num_hidden_layers=1)

    (first, *_), (second, _, error) = finish(start(2, "disturbed", str(checkpoint), "1", "terminate"))

    assert first == -signal.SIGTERM
    assert second not in (0, -signal.SIGTERM)
    assert "process 0 of 2" in own_lines(error)[-1]


ABORTED_WHILE_IT_ENDS = """
import ctypes, os, threading
from jaxinfer.parallel.hosts import Hosts

class Client:  # JAX's, which aborts in the thread that would answer
    def key_value_set(self, *_, **__):
        aborting = threading.Thread(target=ctypes.CDLL(None).abort)
        aborting.start()
        aborting.join()

hosts = Hosts()
hosts._client = Client()
hosts._explain_aborts()
hosts._end("process 0 of 2 has ended")
"""


def test_a_process_that_is_aborted_while_it_ends_does_not_hang():
    ended = subprocess.run([sys.executable, "-c", ABORTED_WHILE_IT_ENDS], cwd=ROOT, capture_output=True, timeout=60)

    assert ended.returncode == -signal.SIGABRT
    assert own_lines(ended.stderr.decode()) == ["jaxinfer: process 0 of 2 has ended; process 0 of 1 ends with it"]


def test_a_process_with_another_configuration_is_refused_by_name(tmp_path):
    checkpoint = save_random_checkpoint(tmp_path / "checkpoint", "llama", num_hidden_layers=1)
    options = ["--coordinator", f"localhost:{free_port()}", "--num-processes", "2", "--tensor-parallel", "4"]
    command = ["jaxinfer", "generate", "x", "--model", str(checkpoint), *options]
    # Of an engine without it, the processes compare their devices' memory.
    own = [["--process-id", "0"], ["--process-id", "1", "--memory-bytes", "1000000000"]]

    ended = finish(start_all([[*command, *given] for given in own]))

    for code, _, error in ended:
        assert code != 0
        assert "process 1 has another EngineConfig than process 0" in error


def test_a_process_without_the_distributed_service_is_told_to_connect_it_first():
    with pytest.raises(ValueError, match=r"jax\.distributed\.initialize"):
        Hosts.join()


def test_processes_compare_the_files_that_an_engine_reads(tmp_path):
    checkpoint = save_random_checkpoint(tmp_path / "checkpoint", "llama", num_hidden_layers=1)

    def facts() -> dict[str, str]:
        return given_facts(Checkpoint(checkpoint), EngineConfig(), "float32", (), None, DEFAULT_DEVICE)

    before = facts()
    (checkpoint / "original").mkdir()
    (checkpoint / "notes.json").symlink_to(tmp_path / "missing")

    assert facts() == before
    with (checkpoint / "config.json").open("a") as file:
        file.write(" ")
    assert [name for name, value in facts().items() if value != before[name]] == [
        "checkpoint (names and sizes of files)"
    ]


@pytest.mark.parametrize(
    ("name", "options", "speculation"),
    [
        ("host_cache_bytes", {"host_cache_bytes": 2**20}, None),
        ("disk_cache_path", {"host_cache_bytes": None, "disk_cache_path": "x", "disk_cache_bytes": 2**20}, None),
        ("speculation='mtp'", {}, "mtp"),
        ("speculation='some/model'", {}, "some/model"),
    ],
)
def test_what_needs_all_devices_in_one_process_is_refused_by_name(name, options, speculation):
    with pytest.raises(ValueError, match=name):
        refuse_over_processes(EngineConfig(**options), speculation)


@pytest.mark.exhaustive
def test_a_job_whose_processes_are_killed_goes_on_to_the_bytes_of_one_process(tmp_path):
    checkpoint = save_random_checkpoint(tmp_path / "checkpoint", "llama", num_hidden_layers=1)
    rows = [{"custom_id": str(i), "prompt": [2 + i % 50, 3, 4], "max_tokens": 4 + i % 20, "seed": i} for i in range(60)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({**row, "log_probs": 1}) + "\n" for row in rows))
    limits = ["--tensor-parallel", "4", "--max-num-seqs", "4", "--max-model-len", "64", "--decode-loop-steps", "1"]
    command = ["batch", str(tmp_path / "in.jsonl"), "--quiet", "--model", str(checkpoint), *limits]
    output, undisturbed = tmp_path / "out.jsonl", tmp_path / "undisturbed.jsonl"

    for victim in (0, 1):
        processes = start_command(2, *command, str(output))
        size = output.stat().st_size if output.exists() else 0
        while not output.exists() or output.stat().st_size == size:
            assert all(process.poll() is None for process in processes)
            time.sleep(0.01)
        processes[victim].kill()
        assert all(code != 0 for code, *_ in finish(processes))
    for count, path in ((2, output), (1, undisturbed)):
        ended = finish(start_command(count, *command, str(path)))
        assert [code for code, *_ in ended] == [0] * count, ended

    assert output.read_bytes() == undisturbed.read_bytes()


@pytest.mark.exhaustive
def test_a_thousand_steps_of_requests_that_come_and_go_at_random_keep_the_bits_of_one_process():
    one, two = results_of_one_and_two("at random", "1000")

    assert two["steps"] >= 1000
    assert two["drafts"] > 0
    assert {"abort", "deadline", "length"} <= two["reasons"].keys()
    for i, (token_ids, log_probs) in two["found"].items():
        assert [own[: len(token_ids)] for own in one["found"][i]] == [token_ids, log_probs]
