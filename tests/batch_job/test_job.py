"""Jobs on an engine without a model: what is recorded, what a stop costs, which outputs are refused."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import multiprocessing
import os
import re
import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.batch_job import Summary, check_job, run_batch
from jaxinfer.batch_job.output import OutputFile
from jaxinfer.batch_job.records import InvalidLine, digest_of, error_line
from jaxinfer.config import SamplingParams
from jaxinfer.engine.request.completion import Delta
from tests.batch_job.fake_llm import FakeLLM


class Killed(BaseException):
    """Ends a run in the middle; unlike a real kill it unwinds, so files are closed."""


def write_requests(path: Path, num_requests: int = 12) -> None:
    """Requests of 1 to 4 tokens, with a blank line, a broken one, a repeated one and one that is too long."""
    rows = [{"custom_id": f"é{i}", "prompt": f"p{i % 3}", "max_tokens": 1 + i % 4} for i in range(num_requests)]
    rows[2] |= {"seed": 5, "log_probs": 2}
    rows[4] |= {"custom_id": "é3"}
    rows[6] |= {"prompt": "too long a prompt"}
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("\n".join([*lines[:1], "", "{", *lines[1:]]) + "\n", encoding="utf-8")


def run(folder: Path, llm: FakeLLM | None = None, **options: Any) -> Summary:
    job: Any = run_batch
    return job(llm or FakeLLM(), folder / "in.jsonl", folder / "out.jsonl", show_progress=False, **options)


def records_of(path: Path) -> list[Any]:
    return [json.loads(raw) for raw in path.read_bytes().splitlines()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_requests(tmp_path / "in.jsonl")
    return tmp_path


@pytest.fixture
def undisturbed(folder: Path) -> bytes:
    """The output of a run without interruption, which is then removed."""
    run(folder)
    content = (folder / "out.jsonl").read_bytes()
    (folder / "out.jsonl").unlink()
    return content


def test_every_request_has_a_record_and_every_broken_line_an_error(folder):
    summary = run(folder)
    records = records_of(folder / "out.jsonl")
    assert [record["line"] for record in records] == [1, *range(3, 15)]
    assert [record["line"] for record in records if "error" in record] == [3, 7, 9]
    assert [record["custom_id"] for record in records[:3]] == ["é0", None, "é1"]
    assert [len(r["token_ids"]) for r in records if "error" not in r] == [1, 2, 3, 4, 2, 4, 1, 2, 3, 4]
    assert (summary.num_requests, summary.num_completed, summary.num_errors, summary.num_tokens) == (
        13,
        10,
        3,
        26,
    )


def test_a_second_run_does_nothing(folder, undisturbed):
    (folder / "out.jsonl").write_bytes(undisturbed)
    llm = FakeLLM()
    summary = run(folder, llm)
    assert (folder / "out.jsonl").read_bytes() == undisturbed
    assert (llm.num_added, summary.num_done_before, summary.num_errors_before) == (0, 13, 3)


def test_a_job_resumes_from_every_byte_of_its_last_two_records(folder, undisturbed, monkeypatch):
    monkeypatch.setattr("os.fsync", lambda fd: None)  # it takes most of the time
    first, second, *others = undisturbed.splitlines(keepends=True)
    for cut in range(len(first) + len(second) + 1):
        (folder / "out.jsonl").write_bytes(b"".join(others) + (first + second)[:cut])
        assert run(folder).num_done_before == len(others) + (cut >= len(first)) + (cut == len(first + second))
        assert (folder / "out.jsonl").read_bytes() == undisturbed


@pytest.mark.parametrize("num_steps", range(11))
def test_a_job_ended_at_any_step_yields_what_an_undisturbed_one_does(folder, undisturbed, num_steps):
    with pytest.raises(Killed):
        run(folder, FakeLLM(num_steps, Killed()), max_in_flight=5)
    num_kept = (folder / "out.jsonl").read_bytes().count(b"\n")
    assert run(folder).num_done_before == num_kept
    assert (folder / "out.jsonl").read_bytes() == undisturbed


@pytest.mark.parametrize("num_steps", [0, 3, 6, 10, None])
def test_a_job_with_a_file_of_errors_resumes_from_both_files(folder, undisturbed, num_steps):
    errors = {"errors_path": folder / "errors.jsonl"}
    if num_steps is not None:
        with pytest.raises(Killed):
            run(folder, FakeLLM(num_steps, Killed()), max_in_flight=5, **errors)
    run(folder, **errors)

    records = undisturbed.splitlines(keepends=True)
    assert (folder / "out.jsonl").read_bytes() == b"".join(r for r in records if b'"error": ' not in r)
    assert (folder / "errors.jsonl").read_bytes() == b"".join(r for r in records if b'"error": ' in r)
    (folder / "errors.jsonl").unlink()
    assert run(folder, **errors).num_errors == 3


def test_a_record_in_the_wrong_file_is_refused_and_nothing_changes(folder, undisturbed):
    (folder / "out.jsonl").write_bytes(undisturbed)
    with pytest.raises(ValueError, match=r"out\.jsonl has an error of line 3, .* nothing was changed, delete"):
        run(folder, errors_path=folder / "errors.jsonl")
    assert (folder / "out.jsonl").read_bytes() == undisturbed


@pytest.mark.parametrize("name", ["in.jsonl", "out.jsonl"])
def test_errors_have_a_file_of_their_own(folder, name):
    with pytest.raises(ValueError, match=r"is the (input|output) itself"):
        run(folder, errors_path=folder / name)


def test_a_request_whose_record_is_deleted_is_done_again(folder, undisturbed):
    lines = undisturbed.splitlines(keepends=True)
    (folder / "out.jsonl").write_bytes(b"".join(lines[:3] + lines[4:]))
    assert run(folder).num_completed + run(folder).num_errors <= 1
    assert (folder / "out.jsonl").read_bytes() == undisturbed


@pytest.mark.parametrize("max_in_flight", [1, 4, 100])
def test_the_engine_never_has_more_requests_than_allowed(folder, undisturbed, max_in_flight):
    llm = FakeLLM()
    run(folder, llm, max_in_flight=max_in_flight)
    assert llm.max_unfinished == min(max_in_flight, 10)
    assert (folder / "out.jsonl").read_bytes() == undisturbed


def test_an_interrupt_says_how_to_go_on_and_leaves_the_engine_free(folder):
    run(folder)
    lines = (folder / "out.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "out.jsonl").write_bytes(b"".join(lines[:4]))
    llm = FakeLLM(2, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt) as caught:
        run(folder, llm)
    num_done = len((folder / "out.jsonl").read_bytes().splitlines())
    assert num_done > 4
    assert str(caught.value) == f"interrupted with {num_done} of 13 requests done; run it again to finish the rest"
    assert not llm.has_unfinished


@pytest.mark.parametrize("room", [1, 2])
def test_a_full_queue_is_waited_for(folder, undisturbed, room):
    run(folder, FakeLLM(room=room))
    assert (folder / "out.jsonl").read_bytes() == undisturbed


def test_a_request_for_which_an_idle_engine_has_no_room_gets_an_error(folder):
    (folder / "in.jsonl").write_text('{"custom_id": "a", "prompt": "p", "n": 3}\n{"custom_id": "b", "prompt": "p"}\n')
    run(folder, FakeLLM(room=2))
    records = records_of(folder / "out.jsonl")
    assert [record.get("error") for record in records] == ["3 more are too many", None]


class FailingLLM(FakeLLM):
    """Ends requests of three tokens in an error."""

    def submit(self, samples: Any, sink: Any) -> int:
        return super().submit(samples, lambda delta: sink(self._fail(delta)))

    def _fail(self, delta: Delta) -> Delta:
        if delta.completion is None or len(delta.completion.token_ids) != 3:
            return delta
        return delta._replace(completion=replace(delta.completion, finish_reason="error", error="NaN"))


def test_a_request_that_ends_in_an_error_counts_as_one_now_and_later(folder):
    summary, again = run(folder, FailingLLM()), run(folder, FailingLLM())
    records = records_of(folder / "out.jsonl")
    assert [record["line"] for record in records if record.get("error") == "NaN"] == [5, 13]
    assert (summary.num_completed, summary.num_errors, again.num_errors_before) == (8, 5, 5)


def test_requests_of_a_job_give_way_to_interactive_ones(folder):
    llm = FakeLLM()
    run(folder, llm)
    assert llm.priorities == {"batch"}


def test_a_line_may_give_its_request_another_priority(tmp_path):
    rows = [{"custom_id": "a", "prompt": "p"}, {"custom_id": "b", "prompt": "p", "priority": "interactive"}]
    llm = FakeLLM()
    for row in rows:
        (tmp_path / "in.jsonl").write_text(json.dumps(row))
        (tmp_path / "out.jsonl").unlink(missing_ok=True)
        run(tmp_path, llm)
    assert llm.priorities == {"batch", "interactive"}


class BrokenLLM(FakeLLM):
    """Fails in its third step, and refuses every use afterwards, as an LLM does that another thread uses meanwhile."""

    @contextlib.contextmanager
    def engine(self) -> Iterator[FakeLLM]:
        if self._steps_left is not None and self._steps_left < 0:
            raise RuntimeError("this LLM has failed")
        yield self


def test_what_made_an_engine_fail_is_what_is_raised(folder):
    with pytest.raises(MemoryError, match="9 GiB"):
        run(folder, BrokenLLM(2, MemoryError("9 GiB")))


def test_a_job_that_is_refused_the_engine_leaves_no_request_there(folder):
    llm = BrokenLLM(2, RuntimeError("another thread is using this LLM"))
    with pytest.raises(RuntimeError, match="another thread"):
        run(folder, llm)
    assert not llm.has_unfinished


def test_an_engine_with_aborted_requests_of_another_job_can_be_used(folder, undisturbed):
    llm = FakeLLM()
    llm.abort(llm.add("p", SamplingParams()))
    run(folder, llm)
    assert (folder / "out.jsonl").read_bytes() == undisturbed


def test_a_job_leaves_the_deltas_of_other_requests_to_their_callers(folder, undisturbed):
    llm = FakeLLM()
    ids = [llm.add("p", SamplingParams(max_tokens=count)) for count in (1, 3)]

    run(folder, llm)

    deltas = llm.step()
    assert [delta.request_id for delta in deltas] == [ids[0], *[ids[1]] * 3]
    assert (folder / "out.jsonl").read_bytes() == undisturbed


def test_progress_counts_requests_and_tokens(folder, lines_at_once, capsys):
    job: Any = run_batch
    job(FakeLLM(), folder / "in.jsonl", folder / "out.jsonl", show_progress=True)
    assert "13 of 13" in (shown := capsys.readouterr().err)
    assert "tokens/s" in shown


class OtherLLM(FakeLLM):
    def identity(self) -> dict[str, str]:
        return super().identity() | {"dtype": "bfloat16"}


def test_an_output_of_another_engine_is_refused_with_the_difference_and_not_touched(folder, undisturbed):
    (folder / "out.jsonl").write_bytes(undisturbed)
    difference = r"line 1 of .*out\.jsonl was made with dtype=float32, and this run has dtype=bfloat16"
    with pytest.raises(ValueError, match=f"{difference}; nothing was changed, go on with dtype=float32 or"):
        run(folder, OtherLLM())
    assert (folder / "out.jsonl").read_bytes() == undisturbed


@pytest.mark.parametrize(("before", "after"), [('"p0"', '"p1"'), ('"max_tokens": 1', '"max_tokens": 2')])
def test_a_line_that_was_changed_since_its_record_is_refused_and_not_touched(folder, undisturbed, before, after):
    (folder / "out.jsonl").write_bytes(undisturbed)
    text = (folder / "in.jsonl").read_text(encoding="utf-8")
    (folder / "in.jsonl").write_text(text.replace(before, after, 1), encoding="utf-8")
    with pytest.raises(
        ValueError, match=r"out\.jsonl has a record of another line 1 than .*in\.jsonl has now; nothing"
    ):
        run(folder)
    assert (folder / "out.jsonl").read_bytes() == undisturbed


def test_an_output_of_a_version_that_did_not_tell_what_made_it_is_refused(folder, undisturbed):
    records = map(json.loads, undisturbed.splitlines())
    old = [{name: value for name, value in record.items() if name != "made_by"} for record in records]
    (folder / "out.jsonl").write_text("".join(json.dumps(record) + "\n" for record in old))
    with pytest.raises(ValueError, match=r"line 1 of .* of an older version, .* made by; nothing was changed, give"):
        run(folder)


def without_digests(record: Any, **made_by: str) -> bytes:
    """A record as an earlier version wrote it: without a digest of itself, and with all adapters of the engine."""
    made_by = {**{name: value for name, value in record["made_by"].items() if name != "record"}, **made_by}
    return json.dumps({**record, "made_by": made_by}, ensure_ascii=False).encode() + b"\n"


def test_records_of_an_earlier_version_count(folder, undisturbed):
    records = [json.loads(raw) for raw in undisturbed.splitlines()]
    (folder / "out.jsonl").write_bytes(b"".join(map(without_digests, records)))
    assert run(folder).num_done_before == 13


FLIPS = [
    (b'"custom_id": "\xc3\xa90"', b'"custom_id": "\xc3\xa99"'),
    (b'"token_ids": [', b'"token_ids": [1'),
    (b'"seed": ', b'"seed": 1'),
    (b'"record": "', b'"record": "0'),
    (b'"record": "', b'"recore": "'),
    (b'"line": "', b'"line": "0'),
]


@pytest.mark.parametrize(("before", "after"), FLIPS)
def test_a_record_that_has_changed_is_refused_by_its_line_and_not_touched(folder, undisturbed, before, after):
    assert before in undisturbed
    changed = undisturbed.replace(before, after, 1)
    (folder / "out.jsonl").write_bytes(changed)
    with pytest.raises(ValueError, match=r"line 1 of .*out\.jsonl (is a damaged record|was made with)"):
        run(folder)
    assert (folder / "out.jsonl").read_bytes() == changed


@pytest.fixture
def adapted(tmp_path: Path) -> bytes:
    """The output of a job with lines of two adapters and one without, beside which only its input stays."""
    rows = [{"custom_id": name, "prompt": "p", "adapter": name, "max_tokens": 2} for name in ("poet", "clerk")]
    rows.append({"custom_id": "plain", "prompt": "p", "max_tokens": 2})
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run(tmp_path, with_adapters())
    content = (tmp_path / "out.jsonl").read_bytes()
    (tmp_path / "out.jsonl").unlink()
    return content


def with_adapters(poet: str = "poems", clerk: str = "letters", **others: str) -> FakeLLM:
    llm = FakeLLM()
    for name, path in {"poet": poet, "clerk": clerk, **others}.items():
        llm.load_adapter(name, path)
    return llm


def test_a_job_goes_on_whatever_other_adapters_are_loaded(tmp_path, adapted):
    for num_kept in range(4):
        (tmp_path / "out.jsonl").write_bytes(b"".join(adapted.splitlines(keepends=True)[:num_kept]))
        assert run(tmp_path, with_adapters(third="others")).num_done_before == num_kept
        assert (tmp_path / "out.jsonl").read_bytes() == adapted


def test_a_record_names_the_adapter_of_its_line_alone(adapted):
    made_by = [json.loads(raw)["made_by"].get("adapter") for raw in adapted.splitlines()]
    assert [name and name.partition("=")[0] for name in made_by] == ["poet", "clerk", None]


def test_a_job_goes_on_with_another_adapter_that_no_record_was_made_with(tmp_path, adapted):
    first = adapted.splitlines(keepends=True)[0]
    (tmp_path / "out.jsonl").write_bytes(first)
    run(tmp_path, with_adapters(clerk="other letters"))
    assert (tmp_path / "out.jsonl").read_bytes() != adapted


def test_a_job_is_refused_with_other_weights_under_the_name_of_an_adapter_of_its_records(tmp_path, adapted):
    (tmp_path / "out.jsonl").write_bytes(adapted)
    with pytest.raises(
        ValueError, match=r"line 2 of .* was made with adapter=clerk=\w+, and this run has adapter=clerk="
    ):
        run(tmp_path, with_adapters(clerk="other letters"))
    assert (tmp_path / "out.jsonl").read_bytes() == adapted


def test_a_job_is_refused_without_an_adapter_of_its_records(tmp_path, adapted):
    (tmp_path / "out.jsonl").write_bytes(adapted)
    llm = FakeLLM()
    llm.load_adapter("poet", "poems")
    with pytest.raises(ValueError, match=r"made with the adapter 'clerk', which is not loaded; nothing was changed"):
        run(tmp_path, llm)


def test_records_that_name_all_adapters_of_an_earlier_version_go_on_with_these_and_more(tmp_path, adapted):
    llm = with_adapters(third="others")
    loaded = ", ".join(f"{name}={llm.adapter_digests[name][:16]}" for name in ("clerk", "poet"))
    records = [json.loads(raw) for raw in adapted.splitlines()]
    for record in records:
        record["made_by"].pop("adapter", None)
    (tmp_path / "out.jsonl").write_bytes(b"".join(without_digests(record, adapters=loaded) for record in records))

    assert run(tmp_path, llm).num_done_before == 3
    with pytest.raises(ValueError, match=r"line 1 of .* was made with adapter=poet="):
        run(tmp_path, with_adapters(poet="other poems"))


class BreakingLLM(FakeLLM):
    """Raises an error for prompts that say so, as a defect would that only some lines meet."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def admit(self, prompt: Any, sampling_params: SamplingParams, **options: Any) -> Any:
        if prompt == "break":
            raise self._error
        return super().admit(prompt, sampling_params, **options)


OWN = [TypeError("got multiple values"), KeyError("role"), AttributeError("none"), RecursionError("too deep")]


@pytest.mark.parametrize("error", OWN, ids=repr)
@pytest.mark.parametrize("is_openai", [False, True])
def test_an_error_that_only_one_line_meets_is_its_record_and_the_job_goes_on(tmp_path, error, is_openai):
    rows = [{"custom_id": prompt, "prompt": prompt, "max_tokens": 2} for prompt in ("break", "p")]
    if is_openai:
        line = {"method": "POST", "url": "/v1/completions"}
        rows = [{"custom_id": row.pop("custom_id"), **line, "body": {**row, "model": "m"}} for row in rows]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))

    summary = run(tmp_path, BreakingLLM(error))

    assert (summary.num_errors, summary.num_completed) == (1, 1)
    failed = records_of(tmp_path / "out.jsonl")[0]
    if is_openai:
        assert failed["response"]["status_code"] == 500
    reason = failed["response"]["body"]["error"]["message"] if is_openai else failed["error"]
    assert str(error.args[0]) in reason


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.EMFILE, "x"), RuntimeError("the engine has failed")])
def test_a_failure_of_engine_or_machine_ends_the_job_and_no_line_has_it(tmp_path, error):
    rows = [{"custom_id": prompt, "prompt": prompt, "max_tokens": 2} for prompt in ("break", "p")]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))

    with pytest.raises(type(error)):
        run(tmp_path, BreakingLLM(error))

    assert (tmp_path / "out.jsonl").read_bytes() == b""
    assert run(tmp_path).num_completed == 2


def test_a_conversation_whose_variable_has_the_name_of_an_argument_fails_alone(tmp_path):
    talk = {"messages": [{"role": "user", "content": "p"}], "chat_template": "x", "max_tokens": 1}
    rows = [{"custom_id": "a", **talk, "chat_template_kwargs": {"self": 1}}, {"custom_id": "b", "prompt": "p"}]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))

    assert run(tmp_path).num_done_before == 0

    assert [record["custom_id"] for record in records_of(tmp_path / "out.jsonl")] == ["a", "b"]
    assert records_of(tmp_path / "out.jsonl")[1].get("error") is None


def test_lines_for_another_model_are_answered_under_the_names_that_the_job_is_given(tmp_path):
    line = {"method": "POST", "url": "/v1/completions"}
    body = {"prompt": "p", "max_tokens": 2, "seed": 1}
    rows = [{"custom_id": name, **line, "body": {**body, "model": name}} for name in ("m", "gpt-4o-mini", "o3", "poet")]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))

    run(tmp_path, with_adapters(), served_names=["gpt-4o-mini"])

    m, named, other, poet = (record["response"] for record in records_of(tmp_path / "out.jsonl"))
    assert named["body"]["model"] == "gpt-4o-mini"
    assert named["body"]["choices"] == m["body"]["choices"] == poet["body"]["choices"]
    assert (other["status_code"], other["body"]["error"]["code"]) == (404, "model_not_found")
    assert "give served_names (--served-name) the name" in other["body"]["error"]["message"]


@pytest.mark.parametrize(
    ("names", "message"), [(["poet"], "the name of an adapter"), ("m", "a list of names"), ([1], "a list of names")]
)
def test_names_that_the_model_cannot_have_are_refused(folder, names, message):
    with pytest.raises(ValueError, match=f"served_names.*{message}"):
        run(folder, with_adapters(), served_names=names)


def record_of(line: int, raw: bytes = b"") -> bytes:
    """A record as a job on FakeLLM would leave it of this line."""
    return error_line(
        InvalidLine(line=line, custom_id=None, digest=digest_of(raw), message=""), "e", FakeLLM().identity()
    )


FOREIGN = {
    "another line": record_of(3, b'{"custom_id": "x"}'),
    "a line that is blank": record_of(2, b"{"),
    "a line past the end": record_of(99),
    "a line done twice": record_of(3, b"{") * 2,
    "a line that is no record": b'{"custom_id": "\xc3\xa90", "prompt": "p"}\n',
    "a broken line not at the end": b'{"line": 1, "cust\n' + record_of(3, b"{"),
    "text without line end": b"a letter",
    "zeros": bytes(8),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_an_output_that_is_not_of_this_input_is_refused_and_not_touched(folder, kind):
    (folder / "out.jsonl").write_bytes(FOREIGN[kind])
    with pytest.raises(ValueError, match=r"out\.jsonl .*; nothing was changed, .*give another output"):
        run(folder)
    assert (folder / "out.jsonl").read_bytes() == FOREIGN[kind]


def test_an_input_used_as_output_is_refused_and_not_touched(folder):
    before = (folder / "in.jsonl").read_bytes()
    job: Any = run_batch
    with pytest.raises(ValueError, match="is the input itself"):
        job(FakeLLM(), folder / "in.jsonl", folder / "in.jsonl")
    assert (folder / "in.jsonl").read_bytes() == before


def test_an_input_that_is_missing_or_not_a_file_is_refused_before_there_is_an_output(tmp_path):
    for make in (lambda path: None, Path.mkdir):
        make(tmp_path / "in.jsonl")
        with pytest.raises(ValueError, match=r"in\.jsonl (does not exist|is not a regular file)"):
            run(tmp_path)
    assert not (tmp_path / "out.jsonl").exists()


def test_a_disk_that_is_full_is_named_with_the_way_out_and_the_job_resumes(folder, undisturbed):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(undisturbed) // 2, before[1]))
    try:
        with pytest.raises(OSError, match=r"out\.jsonl cannot be written \(.+\); .* run the job again"):
            run(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (folder / "out.jsonl").stat().st_size == len(undisturbed) // 2

    run(folder)

    assert (folder / "out.jsonl").read_bytes() == undisturbed


@pytest.mark.parametrize("output", ["folder", "/dev/full", "/proc/out.jsonl"])
def test_an_output_that_cannot_be_one_is_refused_with_its_paths(folder, output):
    (folder / "folder").mkdir()
    with pytest.raises(ValueError, match=rf"{output} .*; .*give"):
        check_job(folder / "in.jsonl", folder / output)


@pytest.mark.parametrize("max_in_flight", [0, math.nan, 1.5, True, "3", None], ids=repr)
def test_a_job_needs_room_for_a_whole_number_of_requests(folder, max_in_flight):
    message = re.escape(f"max_in_flight={max_in_flight!r} is not allowed: max_in_flight must be an integer from 1")
    with pytest.raises(ValueError, match=message):
        run(folder, max_in_flight=max_in_flight)


def test_an_output_has_one_job_at_a_time(folder):
    with OutputFile(folder / "out.jsonl"), pytest.raises(ValueError, match="another job is writing to"):
        run(folder)
    assert run(folder).num_requests == 13


def _hold(path: Path, is_held: Any) -> None:
    with OutputFile(path):
        is_held.set()
        multiprocessing.Event().wait()


def test_the_lock_vanishes_with_a_killed_process(folder):
    context = multiprocessing.get_context("spawn")
    is_held = context.Event()
    process = context.Process(target=_hold, args=(folder / "out.jsonl", is_held), daemon=True)
    process.start()
    assert is_held.wait(30)
    with pytest.raises(ValueError, match="another job is writing to"):
        run(folder)
    process.kill()
    process.join()
    assert run(folder).num_requests == 13


@pytest.mark.parametrize("code", ["ENOSYS", "ENOLCK", "EOPNOTSUPP", "EINVAL", "EIO"])
def test_an_output_on_a_file_system_without_locks_is_refused_with_the_way_out(folder, undisturbed, monkeypatch, code):
    def no_lock(*_: Any) -> None:
        number = getattr(errno, code)
        raise OSError(number, os.strerror(number))

    (folder / "out.jsonl").write_bytes(undisturbed)
    monkeypatch.setattr("fcntl.flock", no_lock)
    for start in (run, lambda folder: check_job(folder / "in.jsonl", folder / "out.jsonl")):
        with pytest.raises(ValueError, match=r"out\.jsonl cannot be locked \(.+\), .* file system with locks"):
            start(folder)
    assert (folder / "out.jsonl").read_bytes() == undisturbed


def test_a_long_input_is_read_as_the_engine_asks_for_it(tmp_path, monkeypatch):
    write_requests(tmp_path / "in.jsonl", 2000)
    reads = []
    from jaxinfer.batch_job import job as job_module

    original = job_module.read_requests

    def counted(*arguments: Any):
        for entry in original(*arguments):
            reads.append(entry.line)
            yield entry

    monkeypatch.setattr(job_module, "read_requests", counted)
    with pytest.raises(Killed):
        run(tmp_path, FakeLLM(3, Killed()), max_in_flight=10)
    assert len(reads) < 30


@pytest.mark.parametrize(
    ("source", "target", "name"), [("\0", "out", "input_path"), ("in.jsonl", "a\0", "output_path")]
)
def test_a_path_with_a_null_character_is_refused_by_its_argument(folder, source, target, name):
    with pytest.raises(ValueError, match=f"{name}=.*without null characters"):
        check_job(folder / source, folder / target)


def test_messages_are_rendered_by_the_chat_template(tmp_path):
    chat = {"messages": [{"role": "user", "content": "p1"}], "tools": [{"name": "f"}]}
    rows = [
        {"custom_id": "chat", **chat, "chat_template_kwargs": {"mood": "calm"}, "seed": 1, "max_tokens": 2},
        {"custom_id": "plain", "prompt": "p1", "seed": 1, "max_tokens": 2},
        {"custom_id": "empty", "messages": []},
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    llm = FakeLLM()
    run(tmp_path, llm)

    rendered = {
        "conversation": chat["messages"],
        "tools": chat["tools"],
        "documents": None,
        "variables": {"mood": "calm"},
    }
    rendered |= {"chat_template": None, "add_generation_prompt": True, "continue_final_message": False}
    assert llm.tokenizer.rendered == rendered
    records = {record["custom_id"]: record for record in records_of(tmp_path / "out.jsonl")}
    assert records["chat"]["token_ids"] == records["plain"]["token_ids"]
    assert records["chat"]["content"] == "2 tokens"
    assert "content" not in records["plain"]
    assert records["empty"]["error"] == "no messages"


def test_parameters_that_a_line_leaves_out_are_the_models(tmp_path):
    rows = [{"custom_id": "a", "prompt": "p"}, {"custom_id": "b", "prompt": "p", "max_tokens": 1}]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    llm = FakeLLM()
    llm.default_sampling_params = SamplingParams(max_tokens=3)
    run(tmp_path, llm)

    assert [len(record["token_ids"]) for record in records_of(tmp_path / "out.jsonl")] == [3, 1]
