"""What all lines of a job have in common: parameters, a template, a system prompt, and the fields of records."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.batch_job import LineForm, run_batch
from jaxinfer.batch_job.line_form import RECORD_FIELDS
from jaxinfer.batch_job.parquet import KEPT, _schema, read_records, write_records
from jaxinfer.batch_job.records import InvalidLine, JobRequest, completion_line, parse_request, seed_of
from jaxinfer.config import SamplingParams
from tests.batch_job.fake_llm import FakeLLM
from tests.batch_job.test_records import COMPLETION


def parsed(form: LineForm, **line: Any) -> JobRequest | InvalidLine:
    return parse_request(json.dumps({"custom_id": "a", **line}).encode(), 1, SamplingParams(max_tokens=9), form)


def request(form: LineForm, **line: Any) -> JobRequest:
    entry = parsed(form, **line)
    assert isinstance(entry, JobRequest), entry
    return entry


def test_parameters_of_the_job_are_those_that_a_line_leaves_out():
    form = LineForm(sampling_params=SamplingParams(max_tokens=5, temperature=0.5))

    assert request(LineForm(), prompt="p").sampling_params.max_tokens == 9
    params = request(form, prompt="p", temperature=0).sampling_params
    assert (params.max_tokens, params.temperature) == (5, 0)


@pytest.mark.parametrize(
    ("job", "own", "seed"), [(None, {}, None), (3, {}, 3), (3, {"seed": 4}, 4), (None, {"seed": -1}, None)]
)
def test_the_seed_of_a_line_is_its_own_then_that_of_the_job_then_one_of_its_number(job, own, seed):
    form = LineForm(sampling_params=SamplingParams(seed=job))

    assert request(form, prompt="p", **own).sampling_params.seed == (seed_of(1, "a") if seed is None else seed)


@pytest.mark.parametrize(
    ("template", "line", "prompt"),
    [
        ("Sum up {text}", {"text": "a {b}"}, "Sum up a {b}"),
        ("{{{a}}} {b} {a}", {"a": 1, "b": 0.5}, "{1} 0.5 1"),
        ("{text}{known}", {"text": "", "known": True}, "True"),
    ],
)
def test_a_template_writes_the_prompt_from_keys_of_the_line(template, line, prompt):
    assert request(LineForm(prompt=template), **line).prompt == prompt


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({}, "the prompt needs text, which is None here; give text or a number"),
        ({"text": None}, "the prompt needs text, which is None"),
        ({"text": ["a"]}, r"the prompt needs text, which is ['a']"),
        ({"text": "a", "prompt": "b"}, "the line has a prompt, and so has the job; give one"),
        ({"text": "a", "messages": []}, "the line has a prompt, and so has the job; give one"),
        ({"text": "a", "other": 1}, "keys ['other'] are unknown"),
    ],
)
def test_a_line_that_the_template_does_not_fit_says_why(line, message):
    entry = parsed(LineForm(prompt="{text}"), **line)

    assert isinstance(entry, InvalidLine)
    assert message in entry.message


def messages_of(form: LineForm, **line: Any) -> Any:
    chat = request(form, **line).chat
    return None if chat is None else chat["messages"][0]


def test_a_system_prompt_makes_a_conversation_and_is_the_first_message_of_one():
    form, user = LineForm(system="s"), {"role": "user", "content": "p"}
    system = {"role": "system", "content": "s"}

    assert messages_of(form, prompt="p") == [system, user]
    assert messages_of(form, messages=[user]) == [system, user]
    assert messages_of(form, messages=[{"role": "developer", "content": "own"}, user])[0]["content"] == "own"
    assert messages_of(form, prompt=[1, 2]) is None
    assert messages_of(LineForm(), messages=[user]) == [user]
    assert messages_of(LineForm(system="s", prompt="{q}"), q="p") == [system, user]


def test_a_line_in_openais_format_says_all_itself():
    line = {"method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "p"}}

    assert request(LineForm(sampling_params=SamplingParams(temperature=0.5)), **line).sampling_params.temperature == 0.5
    for form in (LineForm(prompt="{a}"), LineForm(system="s"), LineForm(kept=["a"]), LineForm(fields=["text"])):
        entry = parsed(form, **line)
        assert isinstance(entry, InvalidLine)
        assert "takes no prompt, system, kept and fields of the job" in entry.message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": ""}, "prompt='' is not allowed"),
        ({"prompt": "no key"}, "text with keys of a line in braces"),
        ({"prompt": "{text"}, "text with keys of a line in braces"),
        ({"prompt": "{0}"}, "text with keys of a line in braces"),
        ({"prompt": "{a.b}"}, "text with keys of a line in braces"),
        ({"prompt": "{a!r}"}, "text with keys of a line in braces"),
        ({"prompt": "{a:>9999999999}"}, "text with keys of a line in braces"),
        ({"system": 3}, "system=3 is not allowed"),
        ({"kept": "label"}, "kept='label' is not allowed"),
        ({"kept": [""]}, "kept=.* is not allowed"),
        ({"fields": ["txt"]}, "fields='txt' is not allowed: .* did you mean text?"),
        ({"fields": ["logprobs"]}, "logprobs is log_probs here"),
        ({"sampling_params": {}}, "sampling_params={} is not allowed"),
    ],
)
def test_a_form_of_another_kind_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        LineForm(**fields)


def write(folder: Path) -> None:
    lines = [{"q": f"q{i}", "label": {"i": i}, "max_tokens": 1 + i} for i in range(3)]
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def run(folder: Path, form: LineForm, output: str = "out.jsonl", llm: FakeLLM | None = None) -> list[dict[str, Any]]:
    job: Any = run_batch
    job(llm or FakeLLM(), folder / "in.jsonl", folder / output, form=form)
    raw = b"" if output.endswith("parquet") else (folder / output).read_bytes()
    return [json.loads(record) for record in raw.splitlines()]


FORM = LineForm(prompt="{q}", kept=("label",), fields=("text", "finish_reason"))


def test_records_have_the_fields_and_the_keys_that_are_asked_for(tmp_path):
    write(tmp_path)
    everything = run(tmp_path, LineForm(prompt="{q}", kept=("label",)), "all.jsonl")

    records = run(tmp_path, FORM)

    assert [{*record} for record in records] == [{"line", "custom_id", "text", "finish_reason", "kept", "made_by"}] * 3
    assert [record["kept"] for record in records] == [{"label": {"i": i}} for i in range(3)]
    assert [record["text"] for record in records] == [record["text"] for record in everything]
    assert {*everything[0]} - {*records[0]} <= {*RECORD_FIELDS}


def test_a_key_is_kept_as_the_line_has_it():
    assert request(LineForm(system="s", kept=["prompt"]), prompt="p").kept == {"prompt": "p"}


def test_samples_of_a_line_have_the_fields_too():
    form = LineForm(fields=["text"])
    samples = [replace(COMPLETION, sample_index=index) for index in range(2)]

    record = json.loads(completion_line(request(form, prompt="p", n=2), samples, {"model": "m"}, form=form))

    assert [{*sample} for sample in record["samples"]] == [{"text", "sample_index"}] * 2
    assert {*record} == {"line", "custom_id", "samples", "made_by"}


def test_a_job_goes_on_after_a_kill_with_its_form_and_with_no_other(tmp_path):
    write(tmp_path)
    undisturbed = run(tmp_path, FORM, "one.jsonl")
    with pytest.raises(RuntimeError):
        run(tmp_path, FORM, llm=FakeLLM(steps_left=2, killed_by=RuntimeError()))
    begun = (tmp_path / "out.jsonl").read_bytes()
    assert begun

    for other in (LineForm(prompt="{q}"), LineForm(prompt="{q} ", kept=FORM.kept, fields=FORM.fields)):
        with pytest.raises(ValueError, match="lines"):
            run(tmp_path, other)
        assert (tmp_path / "out.jsonl").read_bytes() == begun

    assert run(tmp_path, FORM) == undisturbed


def test_a_parquet_output_has_what_is_kept_and_one_of_an_earlier_version_is_read(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    write(tmp_path)
    records = run(tmp_path, FORM)
    run(tmp_path, FORM, "out.parquet")

    with (tmp_path / "out.parquet").open("rb") as file:
        assert [json.loads(record) for record in read_records(file)] == records
    plain = {name: value for name, value in records[0].items() if name != KEPT}
    write_records(file := io.BytesIO(), [json.dumps(plain).encode()])
    earlier: Any = pq.read_table(pa.BufferReader(file.getvalue())).drop_columns([KEPT])
    pq.write_table(earlier, tmp_path / "earlier.parquet")
    with (tmp_path / "earlier.parquet").open("rb") as old:
        assert [json.loads(record) for record in read_records(old)] == [plain]


def test_records_have_the_columns_of_a_table():
    assert {*_schema().names} - {*RECORD_FIELDS} == {"line", "custom_id", "samples", KEPT, "error", "made_by"}
    assert {*RECORD_FIELDS} <= {*_schema().names}
