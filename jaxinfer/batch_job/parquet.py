"""Tables of a job, in Parquet files and in memory: rows that are lines of its input, records as rows of its output."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from jaxinfer.batch_job.records import format_record

MAGIC = b"PAR1"
INDEX = re.compile(r"__index_level_\d+__")  # of a DataFrame: no column of its owner
ROWS_READ = 256  # at a time
KEPT = "kept"  # column with what lines have of their own, as JSON, which may be anything; earlier versions had none
# Rows are written when these are together, so that memory and the file depend on the records alone.
GROUP_ROWS = 1_024
GROUP_BYTES = 2**26  # of the records as JSON


def read_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yields each row as a line of JSON, without its nulls; ValueError if the file is damaged or has other types."""
    parquet = _open(file)
    types = _json_types(parquet.schema_arrow)
    for row in _rows(parquet, [*types]):
        yield json.dumps(_fields(row, types), ensure_ascii=False).encode() + b"\n"


def fields_of(table: Any) -> list[dict[str, Any]]:
    """Returns the rows of a table of Arrow as `read_lines` has them; ValueError for types that JSON does not have."""
    types = _json_types(table.schema)
    return [_fields(row, types) for row in table.select([*types]).to_pylist()]


def table_of(records: Iterable[bytes]) -> Any:
    """Returns a table of Arrow with records as rows, in the columns of `write_records`."""
    return _table([json.loads(record) for record in records])


def read_records(file: BinaryIO) -> Iterator[bytes]:
    """Yields the records that `write_records` has written; ValueError for a file of something else."""
    parquet, schema = _open(file), _schema()
    earlier = schema.remove(schema.get_field_index(KEPT))
    if not any(parquet.schema_arrow.equals(each) for each in (schema, earlier)):
        raise ValueError("its columns are not those of a batch job")
    names = parquet.schema_arrow.names
    for row in _rows(parquet, names):
        present = {name: value for name, value in row.items() if value is not None or name == "custom_id"}
        record = {name: _plain(value, schema.field(name).type) for name, value in present.items()}
        if KEPT in record:
            record[KEPT] = json.loads(record[KEPT])
        yield format_record(record)


def write_records(file: BinaryIO, records: Iterable[bytes]) -> None:
    """Writes records as rows."""
    import pyarrow.parquet as pq

    with pq.ParquetWriter(file, _schema(), compression="zstd") as writer:
        rows, num_bytes = [], 0
        for record in records:
            rows.append(json.loads(record))
            num_bytes += len(record)
            if len(rows) == GROUP_ROWS or num_bytes >= GROUP_BYTES:
                writer.write_table(_table(rows))
                rows, num_bytes = [], 0
        if rows:
            writer.write_table(_table(rows))


def require_pyarrow() -> None:
    """ValueError with the way out if pyarrow is missing."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise ValueError(f"Parquet files need pyarrow ({error}): pip install 'jaxinfer[parquet]'") from None


def _open(file: BinaryIO) -> Any:
    require_pyarrow()
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # Buffering would read Python's file in other threads, which may outlive the interpreter.
        return pq.ParquetFile(file, pre_buffer=False)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"it is damaged ({error}); write it again") from None


def _rows(parquet: Any, names: list[str]) -> Iterator[dict[str, Any]]:
    import pyarrow as pa

    try:
        for batch in parquet.iter_batches(ROWS_READ, columns=names, use_threads=False):
            yield from batch.to_pylist()
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"it is damaged ({error}); write it again") from None


def _json_types(schema: Any) -> dict[str, Any]:
    """Returns the type of each column that its owner has made; ValueError if JSON does not have it."""
    types = {name: schema.field(name).type for name in schema.names if not INDEX.fullmatch(name)}
    for name, kind in types.items():
        _require_json(name, kind)
    return types


def _fields(row: dict[str, Any], types: dict[str, Any]) -> dict[str, Any]:
    return {name: _plain(row[name], kind) for name, kind in types.items() if row[name] is not None}


def _table(rows: list[dict[str, Any]]) -> Any:
    import pyarrow as pa

    schema = _schema()
    rows = [row | {KEPT: json.dumps(row[KEPT], ensure_ascii=False)} if KEPT in row else row for row in rows]
    arrays = [pa.array([_arrow(row.get(f.name), f.type) for row in rows], f.type) for f in schema]
    return pa.Table.from_arrays(arrays, schema=schema)


def _schema() -> Any:
    """Returns the columns of an output. Keys that a record does not have are null; `made_by` has what made it."""
    import pyarrow as pa

    alternatives = pa.list_(pa.map_(pa.int32(), pa.float64()))
    sample = [
        ("text", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        ("log_probs", pa.list_(pa.float64())),
        ("sampling_log_probs", pa.list_(pa.float64())),
        ("top_log_probs", alternatives),
        ("prompt_log_probs", pa.list_(pa.float64())),
        ("prompt_top_log_probs", alternatives),
        ("content", pa.string()),
        ("reasoning", pa.string()),
        ("tool_calls", pa.list_(pa.struct([("name", pa.string()), ("arguments", pa.string())]))),
        ("finish_reason", pa.string()),
    ]
    samples = pa.list_(pa.struct([*sample, ("sample_index", pa.int32())]))
    ending = [
        ("samples", samples),
        ("num_prompt_tokens", pa.int32()),
        ("seed", pa.uint64()),
        (KEPT, pa.string()),
        ("error", pa.string()),
    ]
    made_by = ("made_by", pa.map_(pa.string(), pa.string()))
    return pa.schema([("line", pa.int64()), ("custom_id", pa.string()), *sample, *ending, made_by])


def _require_json(name: str, kind: Any) -> None:
    """ValueError if JSON does not have the type of a column."""
    from pyarrow import types

    if types.is_dictionary(kind) or _is_list(kind) or types.is_map(kind):
        return _require_json(name, kind.item_type if types.is_map(kind) else kind.value_type)
    if types.is_struct(kind):
        for field in kind:
            _require_json(f"{name}.{field.name}", field.type)
        return None
    is_number = types.is_integer(kind) or types.is_float32(kind) or types.is_float64(kind)
    if not (is_number or _is_text(kind) or types.is_boolean(kind) or types.is_null(kind)):
        raise ValueError(f"its column {name} has type {kind}, which JSON does not have; cast it to text or numbers")
    return None


def _is_list(kind: Any) -> bool:
    from pyarrow import types

    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)


def _plain(value: Any, kind: Any) -> Any:
    """Returns a value of Arrow as JSON has it: maps are objects, and objects leave out what is null."""
    from pyarrow import types

    if value is None:
        return None
    if types.is_map(kind):
        return {str(key): _plain(item, kind.item_type) for key, item in value}
    if _is_list(kind):
        return [_plain(item, kind.value_type) for item in value]
    if types.is_struct(kind):
        return {field.name: _plain(value[field.name], field.type) for field in kind if value[field.name] is not None}
    return value


def _arrow(value: Any, kind: Any) -> Any:
    """Returns a value of JSON as Arrow takes it: the reverse of `_plain`."""
    from pyarrow import types

    if value is None:
        return None
    if types.is_map(kind):
        has_text_keys = types.is_string(kind.key_type)
        return [(key if has_text_keys else int(key), _arrow(item, kind.item_type)) for key, item in value.items()]
    if types.is_list(kind):
        return [_arrow(item, kind.value_type) for item in value]
    if types.is_struct(kind):
        return {field.name: _arrow(value.get(field.name), field.type) for field in kind}
    # Arrow has no half of a surrogate pair.
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value
