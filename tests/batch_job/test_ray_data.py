"""The stage for Ray Data: the rows of one batch, and those of two actors of which some are killed."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

import jaxinfer
from jaxinfer.batch_job import run_batch
from jaxinfer.batch_job.ray_data import EngineStage
from tests.batch_job.fake_llm import FakeLLM

# 2000 and 10 are for a change of the stage.
NUM_REQUESTS = int(os.environ.get("JAXINFER_RAY_REQUESTS", "24"))
NUM_KILLS = int(os.environ.get("JAXINFER_RAY_KILLS", "1"))
BATCH = 12


class KilledError(Exception):
    """In the place of a signal."""


def rows(n: int, **columns: Any) -> pa.Table:
    return pa.table({"custom_id": [f"r{i}" for i in range(n)], "prompt": [f"p{i % 5}" for i in range(n)], **columns})


def stage_on(llm: FakeLLM, monkeypatch: pytest.MonkeyPatch, **options: Any) -> EngineStage:
    monkeypatch.setattr(jaxinfer, "LLM", lambda *_, **__: llm)
    return EngineStage(**options)


def test_a_record_depends_neither_on_the_batch_nor_on_its_place(monkeypatch):
    stage = stage_on(FakeLLM(), monkeypatch, kept=["label"])
    table = rows(12, label=[f"l{i}" for i in range(12)], max_tokens=[3] * 12, seed=[7, *[None] * 11])

    whole = stage(table).to_pylist()
    parts = [row for part in (table.slice(5, 7), table.slice(0, 5)) for row in stage(part).to_pylist()]

    assert [row["label"] for row in whole] == [f"l{i}" for i in range(12)]
    assert [row["custom_id"] for row in whole] == [f"r{i}" for i in range(12)]
    assert all(len(row["token_ids"]) == 3 and row["error"] is None for row in whole)
    assert whole[0]["seed"] == 7
    assert len({row["seed"] for row in whole}) == 12
    strip = [{**row, "made_by": None} for row in (*parts[7:], *parts[:7])]
    assert strip == [{**row, "made_by": None} for row in whole]
    assert stage(table.slice(0, 0)).num_rows == 0


def test_records_are_found_again_after_a_kill(monkeypatch, tmp_path):
    table = rows(9, max_tokens=[2] * 9)
    expected = stage_on(FakeLLM(), monkeypatch)(table)
    with pytest.raises(KilledError):
        stage_on(FakeLLM(3, KilledError()), monkeypatch, records=tmp_path, max_in_flight=3)(table)
    (records,) = tmp_path.iterdir()
    num_found = len(records.read_bytes().splitlines())

    after, again = FakeLLM(), FakeLLM()
    assert stage_on(after, monkeypatch, records=str(tmp_path))(table).equals(expected)
    assert stage_on(again, monkeypatch, records=f"file://{tmp_path}")(table).equals(expected)
    assert (num_found > 0, after.num_added, again.num_added) == (True, 9 - num_found, 0)


def test_a_row_that_is_no_request_gets_a_record_with_its_error(monkeypatch):
    table = pa.table({"custom_id": ["a", None, "c"], "prompt": ["p", "q", None], "max_tokens": [0, 1, 1]})

    errors = stage_on(FakeLLM(), monkeypatch)(table)["error"].to_pylist()

    assert [error[:10] for error in errors] == ["max_tokens", "custom_id ", "prompt is "]


@pytest.mark.parametrize(
    ("options", "batch", "message"),
    [
        ({}, {"custom_id": ["a"]}, "the batch is a dict; give map_batches batch_format='pyarrow'"),
        ({"kept": ["x"]}, rows(1), r"kept=\('x',\): the rows have no column 'x'"),
        ({"kept": ["text"]}, rows(1, text=["a"]), "records have 'text' themselves"),
        ({}, rows(1, at=pa.array([0], pa.timestamp("s"))), "its column at has type timestamp"),
        ({}, rows(1, url=["/v1/completions"]), "OpenAI's batch format has no columns"),
        ({"records": "/none"}, rows(1), "records='/none' is no folder; create it"),
        ({"max_in_flight": 0}, rows(1), "max_in_flight=0"),
        ({"kept": "x"}, rows(1), "kept='x' is not allowed"),
    ],
)
def test_what_cannot_be_honoured_is_refused(options, batch, message, monkeypatch):
    with pytest.raises(ValueError, match=message):
        stage_on(FakeLLM(), monkeypatch, **options)(batch)


@pytest.fixture
def ray() -> Iterator[Any]:
    ray = pytest.importorskip("ray", reason="Ray has no wheel for this Python")
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=2**27, logging_level=logging.ERROR)
    yield ray
    ray.shutdown()


@pytest.mark.filterwarnings("default")  # Ray sets and warns of its own settings
def test_actors_that_are_killed_leave_each_record_once_and_as_one_engine_writes_it(ray, tmp_path):
    import ray.data

    config = jaxinfer.EngineConfig(max_num_seqs=4, max_model_len=128, max_num_batched_tokens=64, num_pages=64)
    fields = [
        {"custom_id": f"r{i}", "prompt": "def " * (1 + i % 7), "seed": i, "max_tokens": 16, "ignore_eos": True}
        for i in range(NUM_REQUESTS)
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(each) + "\n" for each in fields))
    run_batch(jaxinfer.LLM(config=config), tmp_path / "in.jsonl", tmp_path / "out.jsonl", show_progress=False)
    expected = {}
    for line in (tmp_path / "out.jsonl").read_text().splitlines():
        record = json.loads(line)
        expected[record["custom_id"]] = (record["text"], record["token_ids"], record["finish_reason"])
    records, kills = tmp_path / "records", tmp_path / "kills"
    records.mkdir()
    kills.mkdir()

    # Ray sends what a function defines itself; its actors cannot import this module.
    def records_size() -> int:
        return sum(file.stat().st_size for file in records.iterdir())

    class KilledStage(EngineStage):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            size = records_size()

            def kill(*_: Any) -> None:
                """Kills this actor once records have been added, unless all kills have been."""
                if records_size() > size and (num_killed := len(list(kills.iterdir()))) < NUM_KILLS:
                    try:
                        (kills / str(num_killed)).touch(exist_ok=False)
                    except FileExistsError:  # the other actor's
                        return
                    os.kill(os.getpid(), signal.SIGKILL)

            self._llm.on_step = kill

    found = ray.data.from_items(fields, override_num_blocks=2).map_batches(
        KilledStage,
        fn_constructor_kwargs={"config": config, "records": str(records)},
        batch_format="pyarrow",
        batch_size=BATCH,
        compute=ray.data.ActorPoolStrategy(size=2),
        num_cpus=0.5,
    )
    rows = found.take_all()

    assert len(list(kills.iterdir())) == NUM_KILLS
    assert sorted(row["custom_id"] for row in rows) == sorted(expected)
    for row in rows:
        assert (row["text"], list(row["token_ids"]), row["finish_reason"]) == expected[row["custom_id"]]
