"""Shards of a job on an engine without a model: merged, they are the file of one host."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.batch_job import check_job, merge_shards, run_batch, shard_path
from jaxinfer.batch_job.input import numbered_lines
from jaxinfer.batch_job.output import OutputFile
from jaxinfer.batch_job.records import custom_id_of
from jaxinfer.batch_job.shards import Shard, as_shard, shard_index
from jaxinfer.cli.main import main
from tests.batch_job.fake_llm import FakeLLM

COUNT = 3


class Killed(BaseException):
    """Ends a run in the middle."""


@pytest.fixture(autouse=True)
def _no_power_cuts(monkeypatch):
    monkeypatch.setattr("os.fsync", lambda fd: None)


def line(custom_id: str, **fields: Any) -> bytes:
    return json.dumps({"custom_id": custom_id, "prompt": "p", "max_tokens": 2} | fields).encode()


LINES = [line(f"é{i}", max_tokens=1 + i % 4) for i in range(12)]
LINES[3:3] = [b"", b"{", line("é1"), line("é2", prompt="too long a prompt"), b'{"prompt": "p"}']


def run(folder: Path, llm: FakeLLM | None = None, output: str = "out.jsonl", **options: Any) -> Any:
    job: Any = run_batch
    return job(llm or FakeLLM(), folder / "in.jsonl", folder / output, show_progress=False, **options)


def merge(folder: Path) -> bytes:
    merge_shards(folder / "in.jsonl", folder / "out.jsonl")
    return (folder / "out.jsonl").read_bytes()


def one_host(folder: Path) -> bytes:
    run(folder, output="one.jsonl")
    return (folder / "one.jsonl").read_bytes()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A job of which all shards are done."""
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(LINES))
    for index in range(1, COUNT + 1):
        run(tmp_path, shard=(index, COUNT))
    return tmp_path


IDS = st.sampled_from(["a", "b", "é", "\ud800", "", "line 1"])
ROWS = st.one_of(
    st.builds(
        line, IDS | st.text(max_size=4), max_tokens=st.integers(1, 3), prompt=st.sampled_from(["p", "too long a"])
    ),
    st.builds(lambda fields: json.dumps(fields).encode(), st.dictionaries(IDS, st.none() | st.integers(), max_size=2)),
    st.sampled_from([b"", b" \r", b"{", b"\xff", b"[]", b'{"custom_id": 1}']),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(ROWS, max_size=12), st.integers(1, 5), st.data())
def test_hosts_killed_at_any_step_and_merged_yield_the_file_of_one_host(rows, count, data):
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "in.jsonl").write_bytes(b"\n".join(rows))
        for index in data.draw(st.permutations(range(1, count + 1))):
            for num_steps in data.draw(st.lists(st.integers(0, 3), max_size=2)):
                with suppress(Killed):
                    run(folder, FakeLLM(num_steps, Killed()), shard=(index, count), max_in_flight=2)
            run(folder, shard=(index, count))
        if count > 1:
            merge(folder)
        assert (folder / "out.jsonl").read_bytes() == one_host(folder)


def test_errors_of_shards_are_merged_to_the_file_of_one_host(folder):
    (folder / "out.jsonl").unlink(missing_ok=True)
    for index in range(1, COUNT):  # and the last shard, of the fixture, has its errors in its output
        shard_file(folder, index).unlink()
        run(folder, shard=(index, COUNT), errors_path=folder / "errors.jsonl")

    merged = merge_shards(folder / "in.jsonl", folder / "out.jsonl", errors_path=folder / "errors.jsonl")

    run(folder, output="one.jsonl", errors_path=folder / "one_errors.jsonl")
    assert (folder / "out.jsonl").read_bytes() == (folder / "one.jsonl").read_bytes()
    assert (folder / "errors.jsonl").read_bytes() == (folder / "one_errors.jsonl").read_bytes()
    assert merged.num_errors == (folder / "errors.jsonl").read_bytes().count(b"\n") == 3


def test_each_line_is_in_one_shard_and_lines_of_one_id_are_in_the_same():
    lines = [*LINES, line("é1"), b'{"custom_id": "\xc3\xa91", "prompt": 7}'] * 3
    shards = [list(numbered_lines(lines, Shard(index, COUNT))) for index in range(1, COUNT + 1)]

    assert sorted(entry for shard in shards for entry in shard) == list(numbered_lines(lines))
    assert all(len(shard) > len(lines) / COUNT / 2 for shard in shards)
    assert sum("é1" in {custom_id_of(raw, line) for line, raw in shard} for shard in shards) == 1


def test_the_shard_of_a_line_is_the_same_in_every_process():
    digest = hashlib.blake2b("é".encode(), digest_size=8).digest()
    assert shard_index(5, "é", 7) == int.from_bytes(digest, "big") % 7 + 1
    assert shard_index(5, None, 7) == shard_index(9, "line 5", 7)


def test_a_host_of_one_shard_runs_nothing_twice(folder):
    llm = FakeLLM()
    summary = run(folder, llm, shard=(2, COUNT))
    assert (llm.num_added, summary.num_done_before) == (0, summary.num_requests)


def test_a_merge_can_be_repeated_after_a_record_was_computed_again(folder):
    expected = merge(folder)
    first = shard_file(folder, 1)
    first.write_bytes(b"".join(first.read_bytes().splitlines(keepends=True)[1:]))
    run(folder, shard=(1, COUNT))

    assert merge(folder) == expected == one_host(folder)


def test_the_job_of_one_host_goes_on_with_the_merged_file(folder):
    expected = merge(folder)
    llm = FakeLLM()
    run(folder, llm)
    assert (llm.num_added, (folder / "out.jsonl").read_bytes()) == (0, expected)


class OtherLLM(FakeLLM):
    def identity(self) -> dict[str, str]:
        return super().identity() | {"dtype": "bfloat16"}


def shard_file(folder: Path, index: int) -> Path:
    return Path(shard_path(folder / "out.jsonl", (index, COUNT)))


def lose_records(folder: Path) -> None:
    for index in (1, 3):
        path = shard_file(folder, index)
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[1:]) + b'{"line": 7, "cus')


def swap_shards(folder: Path) -> None:
    shard_file(folder, 1).rename(folder / "aside")
    shard_file(folder, 2).rename(shard_file(folder, 1))
    (folder / "aside").rename(shard_file(folder, 2))


def use_another_engine(folder: Path) -> None:
    shard_file(folder, 2).unlink()
    run(folder, OtherLLM(), shard=(2, COUNT))


def change_a_line(folder: Path) -> None:
    (folder / "in.jsonl").write_bytes(b"\n".join([*LINES[:-1], line("é11", max_tokens=9)]))


def divide_otherwise(folder: Path) -> None:
    shutil.copy(shard_file(folder, 1), shard_path(folder / "out.jsonl", (1, 4)))


def run_another_job(folder: Path) -> None:
    (folder / "out.jsonl").unlink()
    other = folder / "other"
    other.mkdir()
    (other / "in.jsonl").write_bytes(line("other"))
    run(other)
    (other / "out.jsonl").rename(folder / "out.jsonl")


WRONG = {
    "a shard that has not run": (
        lambda folder: shard_file(folder, 2).unlink(),
        r"records of 6 lines are missing: shard 2/3 lacks 6 of 6; run these shards again",
    ),
    "shards that are not finished": (lose_records, r"2 lines are missing: shard 1/3 lacks 1 of 4, 3/3 lacks 1 of 6;"),
    "a record in two shards": (
        lambda folder: shutil.copy(shard_file(folder, 1), shard_file(folder, 2)),
        r"2-of-3.jsonl and .*1-of-3.jsonl both have a record of line \d+; delete the file of another job",
    ),
    "records of another shard": (swap_shards, r"-of-3.jsonl has a record of line 1, .* for another shard; nothing"),
    "a changed line": (change_a_line, r"-of-3.jsonl has a record of line 17, .* has changed, .*; nothing was changed"),
    "another engine": (use_another_engine, r"2-of-3.jsonl was made with dtype=bfloat16, .* dtype=float32; nothing"),
    "two divisions": (divide_otherwise, r"out.jsonl has shards of-3 and of-4 beside it; move"),
    "no shards": (
        lambda folder: [shard_file(folder, index).unlink() for index in range(1, COUNT + 1)],
        r"out.jsonl has no shards beside it, such as .*out.jsonl.shard-1-of-8.jsonl; run them first",
    ),
    "an output of another job": (run_another_job, r"out.jsonl has a record of another line 1 than .*; nothing was"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_shards_that_are_not_all_of_this_job_are_refused_and_the_output_stays(folder, kind):
    merge(folder)
    spoil, message = WRONG[kind]
    spoil(folder)
    before = (folder / "out.jsonl").read_bytes()

    with pytest.raises(ValueError, match=message):
        merge(folder)

    assert (folder / "out.jsonl").read_bytes() == before


def test_a_merge_that_is_refused_creates_no_output(folder):
    shard_file(folder, 2).unlink()
    with pytest.raises(ValueError, match="are missing"):
        merge(folder)
    assert not (folder / "out.jsonl").exists()


def test_a_merge_waits_for_no_running_host(folder):
    with OutputFile(shard_file(folder, 2)), pytest.raises(ValueError, match=r"another job is writing to .*2-of-3"):
        merge(folder)


def broken_off(records: Iterator[bytes]) -> Iterator[bytes]:
    yield next(records)
    raise Killed


def test_a_merge_that_is_broken_off_leaves_the_old_output(folder, monkeypatch):
    run(folder, FakeLLM())
    before = (folder / "out.jsonl").read_bytes()
    from jaxinfer.batch_job import merge as module

    monkeypatch.setattr(module, "sorted_records", lambda file: broken_off(iter([b"{"])))
    with pytest.raises(Killed):
        merge(folder)
    assert (folder / "out.jsonl").read_bytes() == before
    assert {path.name for path in folder.iterdir()} == {
        "in.jsonl", "out.jsonl", *(shard_file(folder, index).name for index in range(1, COUNT + 1)),
    }  # fmt: skip


@pytest.mark.parametrize("shard", [(0, 3), (4, 3), (1, 2**16 + 1), (1,), (1, 2, 3), "1/3", (1.0, 3), (True, 3), 3])
def test_a_shard_is_a_pair_of_its_index_and_their_count(tmp_path, shard):
    with pytest.raises(ValueError, match=r"shard=.* must be a pair \(index, count\) with index from 1 to count"):
        check_job(tmp_path / "in.jsonl", tmp_path / "out.jsonl", shard=shard)


def test_the_whole_job_is_one_shard_of_one(tmp_path):
    assert as_shard(None) == as_shard([1, 1]) == Shard(1, 1)
    assert shard_path(tmp_path / "out.jsonl", (1, 1)) == tmp_path / "out.jsonl"


def test_the_command_runs_shards_and_merges_them(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("jaxinfer.cli.main._load", lambda arguments: FakeLLM())
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(LINES[:3]))
    paths = [str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl")]

    assert main(["batch", *paths, "--merge"]) == 2
    assert [main(["batch", *paths, "--quiet", "--shard", f"{index}/2"]) for index in (1, 2)] == [0, 0]
    assert main(["batch", *paths, "--merge"]) == 0
    assert "3 requests merged, 0 with an error" in capsys.readouterr().err
    assert (tmp_path / "out.jsonl").read_bytes() == one_host(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--shard", "0/2"], r"shard=\(0, 2\) is not allowed"),
        (["--shard", "2"], "'2' is not of the form I/N"),
        (["--shard", "1/2", "--merge"], "--merge: not allowed with argument --shard"),
        (["--merge", "--model", "m", "--max-num-seqs", "3"], "it takes no --max-num-seqs, --model; leave it out"),
    ],
)
def test_the_command_refuses_a_wrong_shard_and_options_that_a_merge_would_ignore(tmp_path, capsys, options, message):
    (tmp_path / "in.jsonl").write_bytes(LINES[0])
    assert main(["batch", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), *options]) == 2
    assert re.search(message, capsys.readouterr().err)
