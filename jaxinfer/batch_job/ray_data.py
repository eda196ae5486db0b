"""A stage of a Ray Data pipeline: each of its actors has an engine, and turns rows of requests into rows of records."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from jaxinfer.batch_job.files import as_file
from jaxinfer.batch_job.job import MAX_IN_FLIGHT, run_batch
from jaxinfer.batch_job.openai_lines import is_openai_line
from jaxinfer.batch_job.output import open_output
from jaxinfer.batch_job.parquet import fields_of, require_pyarrow, table_of
from jaxinfer.batch_job.records import seed_of
from jaxinfer.config import EngineConfig
from jaxinfer.validation import as_tuple, require_int, shown

DIGEST_BYTES = 16


class EngineStage:
    """Completes the rows of a Ray dataset, as the callable class of `Dataset.map_batches`.

    A row is a line of `run_batch` with a column for each key, such as "custom_id" and "prompt"; a null leaves the key
    out. It becomes a row with the keys of a record, "error" among them, and the columns that `kept` names. A row
    without "seed" gets one from its custom_id alone, so a record depends neither on the size of batches nor on the
    actor.

        dataset.map_batches(
            EngineStage, fn_constructor_kwargs={"model": "Qwen/Qwen3-0.6B", "records": "/shared/records"},
            batch_format="pyarrow", batch_size=1024, compute=ray.data.ActorPoolStrategy(size=2), num_gpus=1,
        )
    """

    def __init__(
        self,
        model: str | Path | None = None,
        config: EngineConfig | None = None,
        *,
        records: str | Path | None = None,
        kept: Sequence[str] = (),
        max_in_flight: int = MAX_IN_FLIGHT,
        adapters: Mapping[str, str | Path] | None = None,
    ) -> None:
        """Loads a model as `LLM` does, and the `adapters` by name.

        `records` is a folder, or a URL that fsspec knows, which all actors reach. There each batch has a file of its
        records, which grows as they come; an actor that gets the batch after a kill, or in a later run, computes only
        those that are missing. Without it, the records of an unfinished batch are lost with its actor. The engine has
        at most `max_in_flight` requests of a batch at a time.

        Raises ValueError if pyarrow is missing, the folder does not exist, or `LLM` refuses the model.
        """
        require_pyarrow()
        require_int("max_in_flight", max_in_flight, 1)
        self._kept, self._max_in_flight = as_tuple("kept", kept, "a list of names of columns"), max_in_flight
        columns = table_of(()).column_names
        for name in self._kept:
            if name in columns:
                raise ValueError(f"kept={shown(self._kept)}: records have {shown(name)} themselves; rename the column")
        self._records = None if records is None else _folder(records)
        from jaxinfer import LLM

        self._llm = LLM(model, config=config)
        for name, path in (adapters or {}).items():
            self._llm.load_adapter(name, path)

    def __call__(self, batch: Any) -> Any:
        """Returns the table of records for a table of rows, both of pyarrow and in the same order.

        Raises ValueError for a batch in another format, and for columns that are missing or that JSON cannot have.
        """
        import pyarrow as pa

        if not isinstance(batch, pa.Table):
            raise ValueError(f"the batch is a {type(batch).__name__}; give map_batches batch_format='pyarrow'")
        for name in self._kept:
            if name not in batch.column_names:
                raise ValueError(f"kept={shown(self._kept)}: the rows have no column {shown(name)}; name others")
        lines = [_line(fields) for fields in fields_of(batch.drop_columns([*self._kept]))]
        with tempfile.TemporaryDirectory() as own:
            source, output = Path(own) / "rows.jsonl", self._output(lines, own)
            source.write_bytes(b"".join(lines))
            run_batch(self._llm, source, output, show_progress=False, max_in_flight=self._max_in_flight)
            with open_output(as_file("output", output)) as file:
                file.read_done()
                table = table_of(file.records()).drop_columns("line")
        for name in self._kept:
            table = table.append_column(batch.schema.field(name), batch.column(name))
        return table

    def _output(self, lines: Sequence[bytes], own: str) -> str:
        """Returns the path or URL of the file for the records of a batch."""
        digest = blake2b(b"".join(lines), digest_size=DIGEST_BYTES).hexdigest()
        return f"{own if self._records is None else self._records}/{digest}.jsonl"


def _folder(records: str | Path) -> str:
    folder = as_file("records", records)
    if isinstance(folder, Path) and not folder.is_dir():
        raise ValueError(f"records={shown(str(records))} is no folder; create it where all actors reach it")
    return str(folder)


def _line(fields: dict[str, Any]) -> bytes:
    custom_id = fields.get("custom_id")
    if is_openai_line(fields):
        raise ValueError("OpenAI's batch format has no columns for its records; give prompt or messages in columns")
    if isinstance(custom_id, str) and fields.get("seed") is None:
        fields = {**fields, "seed": seed_of(0, custom_id)}
    if custom_id is None:  # the row's number in its batch would be that of others too
        fields = {**fields, "custom_id": None}
    return json.dumps(fields, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
