"""The commands with any options, values and files: done, or refused in one line that says what is wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import re
import sys
from typing import Any
from unittest import mock

import hypothesis.strategies as st
import pytest
from hypothesis import given

import jaxinfer
from jaxinfer import simulation
from jaxinfer.cli import doctor
from jaxinfer.cli import main as cli
from jaxinfer.simulation.step_times import FEATURES
from jaxinfer.simulation.trace import MAX_LEN
from tests.batch_job.fake_llm import FakeLLM, FakeSamples
from tests.hostile.cases import cases, limits

MAX_SAMPLES = 1  # the engine without a model draws no more
MAX_MESSAGE = 3_000  # characters
STATUSES = (0, cli.EXIT_FAULTS, cli.EXIT_USAGE, cli.EXIT_INTERRUPTED)

# A word where a number is meant, a number where a word is, one that is too large, text that no terminal shows.
TEXTS = st.sampled_from(
    ["", " ", "-", "--", "0", "-1", "1.5", "2", "nan", "inf", "1e999", "9" * 30, "9" * 5_000, "a" * 10_000]
) | st.text(max_size=20)
NUMBERS = st.integers(-3, 3) | st.sampled_from([2**31, 2**63, 10**30, -(10**400)])
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=9,
)
JUNK = st.sampled_from(
    [
        *(b"", b"{", b"[]", b"null", b'"a"', b"\xff\xfe", b"\0", b"\xef\xbb\xbf{}", b"   "),
        b'{"custom_id": "a", "custom_id": "b"}',
        b'{"custom_id": "big", "prompt": "p", "seed": ' + b"9" * 5_000 + b"}",
        b'{"custom_id": "not a number", "prompt": "p", "temperature": NaN}',
        b"[" * 10_000,
        b'{"a":' * 10_000,
    ]
) | st.binary(max_size=30).filter(lambda junk: b"\n" not in junk)


def lines_of(fields: dict[str, st.SearchStrategy]) -> st.SearchStrategy[list[bytes]]:
    """Lines of JSON with these fields, some of them wrong, and lines of anything."""
    whole = st.fixed_dictionaries(fields)
    wrong = st.builds(lambda line, name, value: {**line, name: value}, whole, st.sampled_from([*fields, "x"]), JSON)
    encoded = (whole | whole | wrong).map(lambda line: json.dumps(line).encode())
    return st.lists(encoded | encoded | JUNK, max_size=8)


REQUESTS = lines_of(
    {
        "custom_id": st.sampled_from("abcdefghijklmnop"),
        "prompt": st.text("pq", min_size=1, max_size=3),
        "max_tokens": st.integers(1, 4),
    }
)
TRACE = lines_of(
    {
        "timestamp": st.integers(0, 9) | st.just(10**6),
        "input_length": st.integers(1, 40) | st.just(MAX_LEN),
        "output_length": st.integers(1, 9),
        "hash_ids": st.lists(st.integers(0, 3), max_size=2),
    }
)


class AnyLLM(FakeLLM):
    """Takes what `LLM` would be given, and ends each request soon."""

    engine_config = jaxinfer.EngineConfig()

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def warm_up(self, **_: Any) -> None:
        """Has nothing to compile."""

    def admit(self, prompt: Any, sampling_params: Any, **terms: Any) -> FakeSamples:
        if sampling_params.n > MAX_SAMPLES or (sampling_params.best_of or 1) > MAX_SAMPLES:
            raise ValueError(f"n={sampling_params.n} is more than max_samples={MAX_SAMPLES}")
        short = dataclasses.replace(sampling_params, max_tokens=min(sampling_params.max_tokens, 4), min_tokens=0)
        return super().admit(prompt, short, **terms)

    def stream(self, prompt: str, sampling_params: Any, **_: Any) -> Any:
        self.add(prompt[:8], dataclasses.replace(sampling_params, n=1, best_of=None))
        while self.has_unfinished:
            yield from self.step()


@pytest.fixture(scope="module", autouse=True)
def _no_device():
    """Commands on an engine without a model, or on one that is simulated."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxinfer, "LLM", AnyLLM)
        patch.setattr(doctor, "examine", lambda *_: iter(()))
        weights = (1e-3,) * len(FEATURES)
        times = simulation.StepTimes(decode=weights, prefill=weights)
        config = jaxinfer.EngineConfig(max_model_len=64, num_pages=16, page_size=16, max_num_seqs=4)
        patch.setattr(simulation, "RealEngine", lambda *_, **__: simulation.load_simulated_engine(None, config, times))
        yield


def run(*argv: str) -> tuple[int, str]:
    """Runs a command; returns its status and what it says of a mistake."""
    out, err = io.StringIO(), io.StringIO()
    stdin = mock.patch.object(sys, "stdin", io.StringIO("p\n/undo\nq\n"))
    with limits(), stdin, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli.main(argv)
    said = err.getvalue()
    assert status in STATUSES
    assert "Traceback" not in said
    assert len(said) < MAX_MESSAGE
    errors = re.findall(r"^jaxinfer: error: .{9,}$", said, re.MULTILINE)
    assert len(errors) == (status == cli.EXIT_USAGE), said
    return status, "".join(errors)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    weights = [1e-3] * len(FEATURES)
    (folder / "times.json").write_text(json.dumps({"features": FEATURES, "decode": weights, "prefill": weights}))
    (folder / "trace.jsonl").write_text('{"timestamp": 0, "input_length": 5, "output_length": 2}\n')
    (folder / "in.jsonl").write_text('{"custom_id": "a", "prompt": "p", "max_tokens": 2}\n')
    (folder / "empty").touch()
    (folder / "bytes").write_bytes(bytes(range(256)))
    return folder


def options_of(command: str) -> list[str]:
    """The options of a command that take a value, less those of how much it has to do."""
    commands: Any = next(action for action in cli._parser()._actions if action.choices)
    actions = commands.choices[command]._actions
    flags = [action.option_strings[0] for action in actions if action.option_strings and action.nargs != 0]
    return [flag for flag in flags if flag != "--num-requests"]


COMMANDS = {
    "generate": ["p", "--max-tokens", "3"],
    "chat": ["--max-tokens", "3"],
    "batch": ["in.jsonl", "out.jsonl"],
    "bench": ["--num-requests", "3", "--input-len", "5", "--output-len", "2"],
    "replay": ["trace.jsonl"],
    "simulate": ["trace.jsonl", "--step-times", "times.json"],
    "doctor": [],
}
FILES = ["missing", ".", "empty", "bytes", "/dev/null", "/dev/full", "in.jsonl", "times.json", "missing/folder"]


@pytest.mark.parametrize("command", COMMANDS)
def test_any_options(command, folder, monkeypatch):
    """A refusal names an option, or the beginning of its value."""
    monkeypatch.chdir(folder)
    own = {path.name: path.read_bytes() for path in folder.iterdir()}
    some = st.dictionaries(st.sampled_from(options_of(command)), TEXTS | st.sampled_from(FILES), min_size=1, max_size=2)

    @cases(0.005)
    @given(some)
    def test(options):
        argv = [f"{name}={value}" for name, value in options.items()]
        (folder / "out.jsonl").unlink(missing_ok=True)  # it is refused to a job with other options
        status, error = run(command, *COMMANDS[command], *argv, "--quiet")
        if status == cli.EXIT_USAGE:
            names = {name.removeprefix("--no-").strip("-") for name in options}
            words = {name.replace("-", mark) for name in names for mark in "-_"}
            beginnings = {text[:9] for value in options.values() if value for text in (value, repr(value)[1:-1])}
            assert any(word in error for word in words | beginnings)
        for name, content in own.items():
            if name not in options.values():
                assert (folder / name).read_bytes() == content
            (folder / name).write_bytes(content)

    test()


@pytest.mark.parametrize("command", ["generate", "batch", "replay", "simulate"])
def test_any_files(command, folder, monkeypatch):
    monkeypatch.chdir(folder)

    own = {path.name: path.read_bytes() for path in folder.iterdir()}

    @cases(0.0025)
    @given(st.sampled_from([*FILES, "", "-"]), st.sampled_from(FILES))
    def test(first, second):
        for name, content in own.items():
            (folder / name).write_bytes(content)
        arguments = {"generate": ["p", "--model", first], "batch": [first, second], "replay": [first, "--plot", second]}
        status, error = run(command, *arguments.get(command, [first, "--step-times", second]), "--quiet")
        if status == cli.EXIT_USAGE:
            assert first in error or second.partition("/")[0] in error

    test()


def test_any_requests(tmp_path):
    requests, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"

    @cases(0.02)
    @given(REQUESTS, st.integers(1, 12), st.integers(1, 4))
    def test(lines, num_steps, max_in_flight):
        requests.write_bytes(b"\n".join(lines))
        output.unlink(missing_ok=True)
        command = ["batch", str(requests), str(output), "--quiet", "--max-in-flight", str(max_in_flight)]
        status, _ = run(*command)
        undisturbed = sorted(output.read_bytes().splitlines())
        records = [json.loads(record) for record in undisturbed]
        assert status == any("error" in record for record in records)
        num_lines = sum(bool(line.strip()) for line in b"\n".join(lines).split(b"\n"))
        assert len({record["line"] for record in records}) == len(records) == num_lines
        assert all(len(record.get("error", "")) < MAX_MESSAGE for record in records)
        assert run(*command)[0] == status
        assert sorted(output.read_bytes().splitlines()) == undisturbed

        output.unlink()
        _run_interrupted(command, num_steps)
        assert run(*command)[0] == status
        assert sorted(output.read_bytes().splitlines()) == undisturbed

    test()


def _run_interrupted(command: list[str], num_steps: int) -> None:
    """Runs a job that somebody interrupts in a step, if it takes so many."""
    with pytest.MonkeyPatch.context() as patch:
        steps, step = iter(range(num_steps)), AnyLLM.step

        def interrupted(llm: AnyLLM) -> Any:
            if next(steps, None) is None:
                raise KeyboardInterrupt
            return step(llm)

        patch.setattr(AnyLLM, "step", interrupted)
        status, _ = run(*command)
        assert status in (0, cli.EXIT_FAULTS, cli.EXIT_INTERRUPTED)


@pytest.mark.parametrize("command", ["replay", "simulate"])
def test_any_trace(command, folder, tmp_path):
    trace = tmp_path / "trace.jsonl"
    more = ["--step-times", str(folder / "times.json"), "--max-model-len", "64", "--num-pages", "16"]

    @cases(0.01)
    @given(TRACE)
    def test(lines):
        trace.write_bytes(b"\n".join(lines))
        status, error = run(command, str(trace), *(more if command == "simulate" else []), "--quiet")
        if status == cli.EXIT_USAGE:
            assert str(trace) in error
            assert "line" in error or "no request" in error

    test()
