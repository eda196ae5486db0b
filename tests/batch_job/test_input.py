"""Inputs of a job in other formats and encodings: decompressed, or refused before a model is loaded."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import zipfile
from pathlib import Path

import pytest

from jaxinfer import json_lines
from jaxinfer.batch_job import check_job, run_batch
from jaxinfer.batch_job.input import check_input
from jaxinfer.cli.main import main
from tests.batch_job.fake_llm import FakeLLM

ROWS = [{"custom_id": f"é{i}", "prompt": f"p{i}", "max_tokens": 2} for i in range(5)]
TEXT = "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS) + "\n"
PLAIN = TEXT.encode()


def zipped(content: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("in.jsonl", content)
    return file.getvalue()


def records(folder: Path, content: bytes, name: str = "in.jsonl") -> list[bytes]:
    (folder / name).write_bytes(content)
    run_batch(FakeLLM(), folder / name, folder / "out.jsonl", show_progress=False)  # pyright: ignore
    return (folder / "out.jsonl").read_bytes().splitlines()


@pytest.mark.parametrize("name", ["in.jsonl.gz", "in.jsonl"])
@pytest.mark.parametrize(
    "content",
    [
        gzip.compress(PLAIN),
        gzip.compress(PLAIN[:60]) + gzip.compress(PLAIN[60:]),  # as `cat` joins two files
        gzip.compress(PLAIN, compresslevel=0),
    ],
    ids=["one member", "two members", "stored"],
)
def test_an_input_compressed_by_gzip_has_the_records_of_the_plain_one(tmp_path, name, content):
    (tmp_path / "plain").mkdir()
    assert records(tmp_path, content, name) == records(tmp_path / "plain", PLAIN)


def test_a_job_goes_on_with_the_compressed_input_and_refuses_a_changed_one(tmp_path):
    whole = records(tmp_path, PLAIN)
    (tmp_path / "out.jsonl").write_bytes(b"\n".join(whole[:2]) + b"\n")
    assert records(tmp_path, gzip.compress(PLAIN), "in.jsonl.gz") == whole

    with pytest.raises(ValueError, match=r"record of another line 1 than .*in\.jsonl\.gz has now"):
        records(tmp_path, gzip.compress(PLAIN.replace(b'"p0"', b'"q"')), "in.jsonl.gz")


REFUSED = {
    "zstd": (b"\x28\xb5\x2f\xfd\x24\x00\x01\x00\x00", "is compressed by zstd; decompress it"),
    "bzip2": (bz2.compress(PLAIN), "is compressed by bzip2; decompress it"),
    "xz": (lzma.compress(PLAIN), "is compressed by xz; decompress it"),
    "zip": (zipped(PLAIN), "is a zip archive; decompress it"),
    "gzip twice": (gzip.compress(gzip.compress(PLAIN)), "is compressed by gzip twice; decompress it once"),
    "zstd in gzip": (gzip.compress(b"\x28\xb5\x2f\xfd\x24\x00"), "is compressed by zstd"),
    "Parquet damaged": (b"PAR1\x15\x04\x15", r"cannot be read as Parquet: it is damaged \(.+\); write it again"),
    "Parquet in gzip": (gzip.compress(b"PAR1"), "is a Parquet file in gzip; decompress it"),
    "Arrow": (b"ARROW1", r"is an Arrow file; write its rows to a Parquet file, or as JSON lines"),
    "gzip cut off": (gzip.compress(PLAIN)[:-12], r"cannot be decompressed \(.+\); compress it again"),
    "gzip damaged": (gzip.compress(PLAIN)[:-8] + bytes(8), r"cannot be decompressed \(CRC check failed"),
    "gzip with a tail": (gzip.compress(PLAIN) + b"tail", r"cannot be decompressed \(Not a gzipped file"),
    "UTF-16": (TEXT.encode("utf-16"), "is in UTF-16; convert it to UTF-8"),
    "UTF-16 LE": (TEXT.encode("utf-16-le"), "is in UTF-16; convert it"),
    "UTF-16 BE": (TEXT.encode("utf-16-be"), "is in UTF-16; convert it"),
    "UTF-16 BE with a mark": (b"\xfe\xff" + TEXT.encode("utf-16-be"), "is in UTF-16; convert it"),
    "UTF-32": (TEXT.encode("utf-32"), "is in UTF-32; convert it"),
    "UTF-32 BE": (b"\0\0\0\n" + TEXT.encode("utf-32-be"), "is in UTF-32; convert it"),
    "UTF-16 in gzip": (gzip.compress(TEXT.encode("utf-16")), "is in UTF-16; convert it"),
    "Latin-1": (TEXT.encode("latin-1"), r"line 1 of .* is not in UTF-8: byte 16 is 0xe9; convert the file"),
    "one line in Latin-1": (PLAIN + '{"custom_id": "è"}'.encode("latin-1"), "line 6 of .* is not in UTF-8: byte 16"),
    "Shift JIS": (PLAIN + '{"custom_id": "日"}'.encode("shift-jis") + b"\n", "line 6 of .* is not in UTF-8"),
    "Latin-1 in gzip": (gzip.compress(TEXT.encode("latin-1")), "line 1 of .* is not in UTF-8"),
    "an array": (json.dumps(ROWS).encode(), r"is one JSON array; give one .* as by `jq -c '\.\[\]' .*`"),
    "an array of prompts": (b'["a", "b"]\n', "is one JSON array"),
    "an array of lines": (b"[\n" + PLAIN.replace(b"}\n", b"},\n")[:-2] + b"\n]\n", "is one JSON array"),
    "an indented array": (b"\n \n" + json.dumps(ROWS, indent=1).encode(), "is one JSON array"),
    "an array after a mark": (b"\xef\xbb\xbf" + json.dumps(ROWS).encode(), "is one JSON array"),
    "an array in gzip": (gzip.compress(json.dumps(ROWS).encode()), "is one JSON array"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_an_input_of_another_format_or_encoding_is_refused_with_the_way_out(tmp_path, kind):
    content, message = REFUSED[kind]
    (tmp_path / "in.jsonl").write_bytes(content)

    start = "" if message.startswith("line") else r".*in\.jsonl "
    with pytest.raises(ValueError, match=f"^{start}{message}"):
        check_job(tmp_path / "in.jsonl", tmp_path / "out.jsonl")

    assert not (tmp_path / "out.jsonl").exists()


def test_the_command_refuses_an_array_before_it_loads_a_model(tmp_path, capsys):
    (tmp_path / "in.jsonl").write_bytes(json.dumps(ROWS).encode())

    status = main(["batch", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), "--model", "/nowhere"])

    assert status == 2
    assert "is one JSON array" in capsys.readouterr().err


def test_lines_that_are_requests_in_no_encoding_have_errors_of_their_own(tmp_path):
    lines = [b"\xff\xfe", b"\0", b"[]", b"[", b'{"custom_id": "\xe9', b"\xef\xbb\xbf{}", PLAIN.splitlines()[0]]
    *errors, last = map(json.loads, records(tmp_path, b"\n".join(lines)))

    assert [record["line"] for record in errors if "error" in record] == [1, 2, 3, 4, 5, 6]
    assert "not JSON in UTF-8 ('utf-8' codec can't decode byte 0xff" in errors[0]["error"]
    assert "error" not in last


def test_a_mark_of_utf_8_is_no_matter(tmp_path):
    (tmp_path / "plain").mkdir()
    marked = [json.loads(record) for record in records(tmp_path, b"\xef\xbb\xbf" + PLAIN)]
    plain = [json.loads(record) for record in records(tmp_path / "plain", PLAIN)]
    for record in (*marked, *plain):
        del record["made_by"]["line"], record["made_by"]["record"]
    assert marked == plain


def test_a_line_that_is_too_long_is_cut_inside_a_character_and_not_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(json_lines, "MAX_LINE_BYTES", 20)
    (tmp_path / "in.jsonl").write_bytes("é".encode() * 40 + b"\n" + b"{}\n")

    check_input(tmp_path / "in.jsonl")
