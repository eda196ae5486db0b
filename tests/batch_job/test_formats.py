"""Jobs on an engine without a model: outputs in gzip, inputs and outputs in Parquet and on remote file systems."""

from __future__ import annotations

import gzip
import io
import json
import sys
from pathlib import Path
from typing import Any

import fsspec
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractBufferedFile
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.batch_job import check_job, formats, merge_shards, output, run_batch
from jaxinfer.batch_job.files import RemoteFile, as_file
from jaxinfer.batch_job.output import open_output
from jaxinfer.batch_job.parquet import read_records, write_records
from jaxinfer.batch_job.records import format_record
from tests.batch_job.fake_llm import FakeLLM

ROWS = [{"custom_id": f"é{i}", "prompt": f"p{i}", "max_tokens": 1 + i % 4} for i in range(10)]
ROWS[2] |= {"seed": 5, "log_probs": 2}
ROWS[4] |= {"prompt": "too long a prompt"}
ROWS[6] |= {"custom_id": "\ud800"}
ROWS[7] |= {"n": 1, "prompt_log_probs": 1, "stop": ["x"]}


class Killed(BaseException):
    """Ends a run in the middle; unlike a real kill it unwinds, so files are closed."""


class FarFile(AbstractBufferedFile):
    """A file whose ranges are fetched, as those of object stores are."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        return Path(self.path).read_bytes()[start:end]


class FarFileSystem(LocalFileSystem):
    """The local file system as one without locks, with folders that must be made, and with fsspec's own files."""

    protocol = "far"

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        return FarFile(self, path, mode) if mode == "rb" else super()._open(path, mode, **options)

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return super()._strip_protocol(path.removeprefix("far://") if isinstance(path, str) else path)


fsspec.register_implementation("far", FarFileSystem, clobber=True)


@pytest.fixture(autouse=True)
def _no_power_cuts(monkeypatch):
    monkeypatch.setattr("os.fsync", lambda fd: None)


@pytest.fixture(params=["local", "memory", "far"])
def place(request, tmp_path: Path) -> str:
    """A folder, by path or URL, with a job in it."""
    (tmp_path / "in.jsonl").write_bytes("\n".join(map(json.dumps, ROWS)).encode())
    if request.param == "memory":
        memory = fsspec.filesystem("memory")
        memory.store.clear()
        memory.pipe_file("/job/in.jsonl", (tmp_path / "in.jsonl").read_bytes())
        return "memory://job"
    return str(tmp_path) if request.param == "local" else f"far://{tmp_path}"


def run(place: str, name: str, llm: FakeLLM | None = None, **options: Any) -> Any:
    job: Any = run_batch
    return job(llm or FakeLLM(), f"{place}/in.jsonl", f"{place}/{name}", show_progress=False, **options)


def content(place: str, name: str) -> bytes:
    with as_file("path", f"{place}/{name}").open("rb") as file:
        return file.read()


def records_of(place: str, name: str) -> list[Any]:
    """The records of an output, as another program reads them."""
    raw = content(place, name)
    if name.endswith(".parquet"):
        rows = pq.ParquetFile(io.BytesIO(raw), pre_buffer=False).read(use_threads=False).to_pylist()
        return [{key: value for key, value in row.items() if value is not None} for row in rows]
    return [json.loads(line) for line in (gzip.decompress(raw) if name.endswith(".gz") else raw).splitlines()]


def names(place: str) -> set[str]:
    """All files of a folder and below, but for the input."""
    file_system, path = fsspec.core.url_to_fs(place)
    return {found.removeprefix(path + "/") for found in file_system.find(path)} - {"in.jsonl"}


def plain(folder: Path) -> list[Any]:
    folder.mkdir()
    (folder / "in.jsonl").write_bytes("\n".join(map(json.dumps, ROWS)).encode())
    run(str(folder), "out.jsonl")
    return records_of(str(folder), "out.jsonl")


NAMES = ["out.jsonl", "out.jsonl.gz", "out.parquet"]


def undisturbed(place: str, name: str) -> bytes:
    """The output of a run without interruption, which is then removed."""
    run(place, name)
    whole = content(place, name)
    remove(place, name)
    return whole


def remove(place: str, name: str) -> None:
    file_system, path = fsspec.core.url_to_fs(f"{place}/{name}")
    file_system.rm(path)


@pytest.mark.parametrize("name", NAMES)
def test_a_job_ended_at_any_step_yields_the_file_of_an_undisturbed_one(place, name, monkeypatch):
    expected = undisturbed(place, name)
    monkeypatch.setattr(output, "PART_SECONDS", 0.0)  # each record is a part
    for num_steps in range(7):
        with pytest.raises(Killed):
            run(place, name, FakeLLM(num_steps, Killed()), max_in_flight=3)
        summary = run(place, name)
        assert (summary.num_done_before > 0) == (num_steps > 0)
        assert content(place, name) == expected
        assert names(place) == {name}
        assert run(place, name).num_done_before == len(ROWS)
        remove(place, name)


@pytest.mark.parametrize("name", NAMES)
def test_other_programs_read_what_the_plain_output_has(place, name, tmp_path):
    run(place, name)
    for record, other in zip(records_of(place, name), plain(tmp_path / "plain"), strict=True):
        for key in ("line", "text", "token_ids", "log_probs", "prompt_log_probs", "finish_reason", "seed", "error"):
            assert record.get(key) == other.get(key)
        assert dict(record["made_by"]) == other["made_by"]


@pytest.mark.parametrize("name", NAMES)
def test_shards_are_merged_to_the_file_of_one_host(place, name):
    expected = undisturbed(place, name)
    for index in (1, 2, 3):
        run(place, name, shard=(index, 3))

    merge_shards(f"{place}/in.jsonl", f"{place}/{name}")

    assert content(place, name) == expected
    assert names(place) == {name, *(f"{name}.shard-{index}-of-3.jsonl" for index in (1, 2, 3))}


@pytest.mark.parametrize("name", ["out.jsonl.gz", "out.parquet"])
def test_a_record_that_is_deleted_is_computed_again(place, name, tmp_path):
    expected = undisturbed(place, name)
    run(place, name)
    with as_file("path", f"{place}/{name}").open("rb") as file:
        records = list(formats.read_records(file, Path(name)))
    with (tmp_path / "fewer").open("wb") as file:
        formats.write_records(file, Path(name), records[:3] + records[4:])
    file_system, path = fsspec.core.url_to_fs(f"{place}/{name}")
    file_system.put_file(str(tmp_path / "fewer"), path)

    assert run(place, name).num_done_before == len(ROWS) - 1
    assert content(place, name) == expected


@pytest.mark.parametrize("lost", [1, 30, 500])
def test_a_part_or_journal_that_is_cut_off_loses_only_its_end(place, lost, monkeypatch):
    name = "out.jsonl.gz"
    expected = undisturbed(place, name)
    with pytest.raises(Killed):
        run(place, name, FakeLLM(4, Killed()), max_in_flight=3)
    (part,) = names(place)
    file_system, path = fsspec.core.url_to_fs(f"{place}/{part}")
    file_system.pipe_file(path, file_system.cat_file(path)[:-lost])

    run(place, name)

    assert content(place, name) == expected


@pytest.mark.parametrize("place", ["memory", "far"], indirect=True)
def test_a_real_kill_loses_what_was_not_uploaded_and_another_host_computes_it_again(place, monkeypatch):
    expected = undisturbed(place, "out.jsonl")
    monkeypatch.setattr(output, "PART_BYTES", 900)
    with monkeypatch.context() as patch:
        patch.setattr(output.RemoteParts, "__exit__", lambda *_: None)
        with pytest.raises(Killed):
            run(place, "out.jsonl", FakeLLM(4, Killed()), max_in_flight=3)
    kept = len(names(place))

    summary = run(place, "out.jsonl")

    assert 0 < kept <= summary.num_done_before < len(ROWS)
    assert content(place, "out.jsonl") == expected


@pytest.mark.parametrize("place", ["memory", "far"], indirect=True)
def test_two_hosts_that_run_one_remote_job_do_no_harm(place, monkeypatch):
    expected = undisturbed(place, "out.jsonl")
    slow = open_output(as_file("path", f"{place}/out.jsonl"))
    with slow:
        done = slow.read_done()
        run(place, "out.jsonl")
        assert not done
        slow.append(expected.splitlines(keepends=True)[0])

    assert len(names(place)) == 2
    assert run(place, "out.jsonl").num_done_before == len(ROWS)
    assert content(place, "out.jsonl") == expected
    assert names(place) == {"out.jsonl"}


@pytest.mark.parametrize("name", ["out.jsonl.gz", "out.parquet"])
@pytest.mark.parametrize("raw", [b"", b"a letter", gzip.compress(b"a letter")], ids=["empty", "text", "gzip"])
def test_an_output_that_is_not_of_a_job_is_refused_and_not_touched(place, name, raw):
    if raw == b"" and name.endswith(".gz"):
        raw = gzip.compress(b"x" * 99)[:-9]
    file_system, path = fsspec.core.url_to_fs(f"{place}/{name}")
    file_system.pipe_file(path, raw)

    with pytest.raises(ValueError, match=rf"{name} .*; nothing was changed, .*give another output"):
        run(place, name)

    assert content(place, name) == raw
    assert names(place) == {name}


def test_a_parquet_file_of_other_columns_is_no_output(tmp_path):
    pd.DataFrame({"line": [1]}).to_parquet(tmp_path / "out.parquet")
    (tmp_path / "in.jsonl").write_text("")
    with pytest.raises(ValueError, match="its columns are not those of a batch job"):
        run(str(tmp_path), "out.parquet")


def test_a_compressed_output_has_one_job_at_a_time(tmp_path):
    (tmp_path / "in.jsonl").write_text("")
    with open_output(tmp_path / "out.gz"), pytest.raises(ValueError, match="another job is writing to"):
        run(str(tmp_path), "out.gz")
    check_job(tmp_path / "in.jsonl", tmp_path / "out.gz")
    assert names(str(tmp_path)) == set()
    run(str(tmp_path), "out.gz")
    assert gzip.decompress((tmp_path / "out.gz").read_bytes()) == b""


TEXT = st.text(max_size=5)
LOG_PROBS = st.lists(st.none() | st.floats(allow_nan=False, allow_infinity=False), max_size=3)
ALTERNATIVES = st.lists(
    st.dictionaries(st.integers(0, 2**31 - 1).map(str), st.none() | st.floats(-9, 0), max_size=3), max_size=2
)
SAMPLE = {
    "text": TEXT,
    "token_ids": st.lists(st.integers(0, 2**31 - 1), max_size=3),
    "log_probs": LOG_PROBS,
}
OPTIONAL = {"top_log_probs": ALTERNATIVES, "prompt_log_probs": LOG_PROBS, "prompt_top_log_probs": ALTERNATIVES}
REASON = {"finish_reason": st.sampled_from(["stop", "length", "error"])}
BEGINNING = {"line": st.integers(1, 2**40), "custom_id": TEXT}
ENDING = {"num_prompt_tokens": st.integers(0, 2**31 - 1), "seed": st.integers(0, 2**64 - 1)}
MADE_BY = {"made_by": st.dictionaries(TEXT, TEXT, max_size=3)}


def in_order(record: dict[str, Any]) -> dict[str, Any]:
    keys = [*BEGINNING, *SAMPLE, *OPTIONAL, *REASON, "sample_index", "samples", *ENDING, "error", "made_by"]
    return {key: record[key] for key in keys if key in record}


INDEX = {"sample_index": st.integers(0, 9)}
SAMPLES = st.fixed_dictionaries(SAMPLE | REASON | INDEX, optional=OPTIONAL).map(in_order)
RECORDS = st.one_of(
    st.fixed_dictionaries(BEGINNING | SAMPLE | REASON | ENDING | MADE_BY, optional=OPTIONAL | {"error": TEXT}),
    st.fixed_dictionaries(
        {
            **BEGINNING,
            "samples": st.lists(
                st.fixed_dictionaries(SAMPLE | REASON | {"sample_index": st.integers(0, 9)}, optional=OPTIONAL).map(
                    in_order
                ),
                max_size=2,
            ),
            **ENDING,
            **MADE_BY,
        }
    ),
    st.fixed_dictionaries({"line": st.integers(1, 9), "custom_id": st.none() | TEXT, "error": TEXT, **MADE_BY}),
).map(in_order)


@settings(max_examples=100, deadline=None)
@given(st.lists(RECORDS, max_size=5), st.integers(1, 3))
def test_parquet_keeps_every_byte_of_a_record(records, group_rows):
    raws = [format_record(record) for record in records]
    file = io.BytesIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxinfer.batch_job.parquet.GROUP_ROWS", group_rows)
        write_records(file, raws)
    assert list(read_records(io.BytesIO(file.getvalue()))) == raws


def requests(folder: Path) -> list[Any]:
    """The records of a job on `in.parquet`, without the digests of its lines."""
    run_batch(FakeLLM(), folder / "in.parquet", folder / "out.jsonl", show_progress=False)  # pyright: ignore
    return [{**record, "made_by": None} for record in records_of(str(folder), "out.jsonl")]


def test_rows_of_parquet_are_requests_without_their_nulls(tmp_path):
    rows = [row for row in ROWS if row["custom_id"] != "\ud800"]
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pq.write_table(
        pa.Table.from_pylist([dict.fromkeys(set().union(*rows)) | row for row in rows]), tmp_path / "in.parquet"
    )
    run(str(tmp_path / "plain"), "out.jsonl")

    expected = records_of(str(tmp_path / "plain"), "out.jsonl")
    assert requests(tmp_path) == [{**record, "made_by": None} for record in expected]


def test_a_data_frame_may_have_an_index_categories_lists_and_objects(tmp_path):
    frame = pd.DataFrame(
        {
            "custom_id": ["a", "b", "c"],
            "messages": [[{"role": "user", "content": "p"}]] * 3,
            "finish": pd.Categorical(["x"] * 3),
        }
    )
    table = pa.Table.from_pandas(frame[frame.custom_id != "b"].drop(columns="finish"))
    biases = pa.array([[("5", 1.0)], None], pa.map_(pa.string(), pa.float64()))
    priorities = pa.array(["batch", "interactive"]).dictionary_encode()
    pq.write_table(
        table.append_column("logit_bias", biases).append_column("priority", priorities), tmp_path / "in.parquet"
    )

    assert [record.get("error") for record in requests(tmp_path)] == [None, None]


@pytest.mark.parametrize(
    "column",
    [pa.array([b"x"]), pa.array([0], pa.timestamp("s")), pa.array([[{"a": [b"x"]}]]), pa.array([1.5], pa.float16())],
    ids=lambda column: str(column.type),
)
def test_a_column_that_json_does_not_have_is_refused_by_its_name(tmp_path, column):
    pq.write_table(pa.table({"custom_id": ["a"], "extra": column}), tmp_path / "in.parquet")
    with pytest.raises(
        ValueError, match=r"in.parquet cannot be read as Parquet: its column extra.* has type .*; cast it"
    ):
        check_job(tmp_path / "in.parquet", tmp_path / "out.jsonl")


def test_a_damaged_page_of_parquet_is_found_before_a_model_is_loaded(tmp_path):
    pd.DataFrame({"custom_id": [f"{i}" for i in range(999)], "prompt": "p"}).to_parquet(tmp_path / "in.parquet")
    raw = bytearray((tmp_path / "in.parquet").read_bytes())
    raw[4:300] = bytes(296)
    (tmp_path / "in.parquet").write_bytes(raw)
    with pytest.raises(ValueError, match="in.parquet cannot be read as Parquet: it is damaged"):
        check_job(tmp_path / "in.parquet", tmp_path / "out.jsonl")


def test_without_pyarrow_parquet_is_refused_with_the_way_out(tmp_path, monkeypatch):
    (tmp_path / "in.jsonl").write_text("")
    (tmp_path / "in.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    for source, target in (("in.jsonl", "out.parquet"), ("in.parquet", "out.jsonl")):
        with pytest.raises(ValueError, match=r"need pyarrow \(.+\): pip install 'jaxinfer\[parquet\]'"):
            check_job(tmp_path / source, tmp_path / target)


def test_a_url_of_this_machine_is_a_path(tmp_path):
    for url in (f"file://{tmp_path}/out.jsonl", f"local://{tmp_path}/out.jsonl", f"{tmp_path}/out.jsonl"):
        assert as_file("output_path", url) == tmp_path / "out.jsonl"


WRONG_URLS = {
    "foo://a/in.jsonl": "names no file .*[Pp]rotocol.*give a path, or a URL that fsspec knows",
    "memory://job/": "names no file; end it with the name of one",
    "memory://": "names no file; end it with the name of one",
    "memory://job/missing": "does not exist",
}


@pytest.mark.parametrize("url", WRONG_URLS)
def test_a_url_of_no_file_is_refused(tmp_path, url):
    with pytest.raises(ValueError, match=WRONG_URLS[url]):
        check_job(url, tmp_path / "out.jsonl")


def test_a_file_system_whose_package_is_missing_is_named(monkeypatch):
    def fail(url: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.core.url_to_fs", fail)
    with pytest.raises(ValueError, match=r"'s3://b/x' needs a package .*Install s3fs.* 'jaxinfer\[remote\]'"):
        RemoteFile("s3://b/x")


def test_a_file_system_that_fails_is_an_error_with_the_url(place, monkeypatch):
    if "://" not in place:
        return
    run(place, "out.jsonl")

    class HttpError(Exception):
        """As some file systems raise."""

    def fail(*_: Any, **__: Any) -> None:
        raise HttpError("403")

    file = as_file("path", f"{place}/in.jsonl")
    monkeypatch.setattr(type(file._fs), "isfile", fail)  # pyright: ignore
    with pytest.raises(OSError, match=r"in.jsonl cannot be reached \(403\); correct the URL or the credentials"):
        run(place, "out.jsonl")


def test_an_input_as_output_is_refused_on_a_remote_file_system(place):
    with pytest.raises(ValueError, match="is the input itself"):
        run(place, "in.jsonl")
