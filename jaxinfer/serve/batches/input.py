"""The input of a batch: lines in OpenAI's batch file format, checked as a whole before any of them runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from jaxinfer.batch_job.input import GZIP, check_input, open_lines
from jaxinfer.batch_job.openai_lines import KEYS
from jaxinfer.batch_job.parquet import MAGIC
from jaxinfer.json_lines import parse_line
from jaxinfer.validation import shown

MAX_LINES = 50_000  # as in OpenAI's API
MAX_FAULTS = 100


class BatchFault(BaseModel):
    """A reason why a batch has failed as a whole."""

    code: str
    line: int | None = None
    message: str
    param: str | None = None


def faults_of(path: Path, name: str, endpoint: str) -> tuple[list[BatchFault], int]:
    """Returns the first faults of an input, and the number of its lines; `name` stands for the path in messages.

    A line has a fault if it is no request to `endpoint`. A request with a wrong body has none: it fails by itself.
    """
    with path.open("rb") as file:
        head = file.read(len(MAGIC))
    if head.startswith((GZIP, MAGIC)):  # either could be a thousand times as large in memory
        message = f"{name} is compressed or a Parquet file; upload plain JSON lines"
        return [BatchFault(code="invalid_file", message=message)], 0
    try:
        check_input(path)
    except ValueError as error:
        return [BatchFault(code="invalid_file", message=str(error).replace(str(path), name))], 0
    faults: list[BatchFault] = []
    num_lines = 0
    for fault in _line_faults(path, endpoint):
        num_lines += fault is None
        if fault is not None:
            faults.append(fault)
        if len(faults) == MAX_FAULTS or num_lines > MAX_LINES:
            break
    if num_lines > MAX_LINES:
        faults = [BatchFault(code="too_many_lines", message=f"{name} has more than {MAX_LINES:,} lines; cut it up")]
    if not faults and num_lines == 0:
        faults = [BatchFault(code="empty_file", message=f"{name} has no line; give one for each request")]
    return faults, num_lines


def _line_faults(path: Path, endpoint: str) -> Iterator[BatchFault | None]:
    """Yields the fault of each line, or None."""
    lines_by_id: dict[str, int] = {}
    with open_lines(path) as lines:
        for number, raw in lines:
            try:
                fields = parse_line(raw)
            except ValueError as error:
                yield BatchFault(code="invalid_json_line", line=number, message=str(error))
                continue
            fault = _fault_of(fields, endpoint)
            if fault is None and (first := lines_by_id.setdefault(fields["custom_id"], number)) != number:
                message = f"custom_id {shown(fields['custom_id'])} is that of line {first} too; give each its own"
                fault = ("duplicate_custom_id", "custom_id", message)
            yield fault and BatchFault(code=fault[0], line=number, param=fault[1], message=fault[2])


def _fault_of(fields: Any, endpoint: str) -> tuple[str, str | None, str] | None:
    """Returns the code, the parameter and the message of a line's fault, or None."""
    if not isinstance(fields, dict):
        return "invalid_json_line", None, "the line is no JSON object; give one"
    if unknown := sorted(fields.keys() - set(KEYS)):
        return "unknown_parameter", None, f"{shown(unknown[0])} is unknown; a line has {', '.join(KEYS)}"
    if missing := [key for key in KEYS if fields.get(key) is None]:
        return "missing_required_parameter", missing[0], f"{missing[0]} is missing; a line has {', '.join(KEYS)}"
    if not isinstance(fields["custom_id"], str):
        return "invalid_custom_id", "custom_id", "custom_id is no text; give each request a text of its own"
    if fields["method"] != "POST":
        return "invalid_method", "method", f"method is {shown(fields['method'])}; give POST"
    if fields["url"] != endpoint:
        return "mismatched_endpoint", "url", f"url is {shown(fields['url'])} in a batch to {endpoint}; give that"
    if not isinstance(fields["body"], dict):
        return "invalid_body", "body", "body is no JSON object; give the body of the request"
    return None
