"""The command line on an engine without a model, and what it may import before its arguments are read."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import jaxinfer
from jaxinfer.cli.main import main
from jaxinfer.config import EngineConfig, Parallelism, SamplingParams
from jaxinfer.engine.request.completion import Delta
from jaxinfer.engine.request.request import QueueFullError
from tests.batch_job.fake_llm import FakeLLM


class StreamingLLM(FakeLLM):
    """Remembers what it was told; `stream` ends with `ends_with` when that is set."""

    told: dict[str, Any]
    loaded: dict[str, str]
    ends_with: BaseException | None
    is_closed: bool

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__()
        StreamingLLM.told, StreamingLLM.loaded = {"model": model} | options, self.loaded_adapters
        StreamingLLM.is_closed = False

    def warm_up(self, **options: Any) -> SimpleNamespace:
        StreamingLLM.told |= {"warm_up": options}
        return SimpleNamespace(compiled="7 executables ready in 2.0 s")

    def close(self) -> None:
        StreamingLLM.is_closed = True

    def stream(self, prompt: str, sampling_params: SamplingParams, *, adapter: str | None) -> Any:
        StreamingLLM.told |= {"prompt": prompt, "sampling_params": sampling_params, "adapter": adapter}
        self.add(prompt, sampling_params)
        while self.has_unfinished:
            yield from (delta._replace(text="é") for delta in self.step())
            if self.ends_with is not None:
                raise self.ends_with


@pytest.fixture(autouse=True)
def llm(monkeypatch) -> type[StreamingLLM]:
    StreamingLLM.ends_with = None
    monkeypatch.setattr(jaxinfer, "LLM", StreamingLLM)
    return StreamingLLM


@pytest.mark.parametrize(
    ("options", "adapters", "max_adapters"),
    [
        ([], {}, 0),
        (["--adapter", "a=some/folder=x"], {"a": "some/folder=x"}, 1),
        (["--adapter", "a=b", "--max-adapters", "3"], {"a": "b"}, 3),
    ],
    ids=["none", "one", "with room"],
)
def test_generate_loads_an_adapter_and_uses_it(options, adapters, max_adapters, llm):
    assert main(["generate", "p", "--max-tokens", "3", "--quiet", *options]) == 0
    assert llm.told["adapter"] == next(iter(adapters), None)
    assert llm.told["config"].max_adapters == max_adapters
    assert llm.loaded == adapters


def test_batch_loads_every_adapter(tmp_path, llm):
    (tmp_path / "in.jsonl").write_text('{"custom_id": "a", "prompt": "p"}\n')
    files = [str(tmp_path / name) for name in ("in.jsonl", "out.jsonl")]

    assert main(["batch", *files, "--quiet", "--adapter", "a=x", "--adapter", "b=y"]) == 0
    assert llm.loaded == {"a": "x", "b": "y"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--adapter", "a"], "--adapter a: give a name and a folder or id, as in NAME=PATH"),
        (["--adapter", "=a"], "--adapter =a: give a name"),
        (["--adapter", "a=b", "--adapter", "a=c"], "--adapter a=c: the name 'a' is given twice"),
        (["--adapter", "a=b", "--adapter", "c=d"], "--adapter is given 2 times, and this command computes one request"),
    ],
)
def test_adapters_in_another_form_are_refused_before_a_model_is_loaded(options, message, capsys):
    assert main(["generate", "p", *options]) == 2
    assert message in capsys.readouterr().err


def test_generate_writes_the_text_and_a_line_end_and_the_statistics_elsewhere(capsys):
    assert main(["generate", "p", "--max-tokens", "3", "--seed", "9"]) == 0
    out, err = capsys.readouterr()
    assert out == "ééé\n"
    assert "1 + 3 tokens" in err
    assert "ended by length, seed 9" in err


def test_quiet_leaves_the_text_alone(capsys, llm):
    assert main(["generate", "p", "--quiet"]) == 0
    assert capsys.readouterr().err == ""
    assert llm.told["show_progress"] is False


def write_job(folder: Path, *lines: str) -> list[str]:
    (folder / "in.jsonl").write_text("".join(line + "\n" for line in lines))
    return ["batch", str(folder / "in.jsonl"), str(folder / "out.jsonl")]


REQUEST = '{"custom_id": "a", "prompt": "p", "max_tokens": 2}'


@pytest.fixture(params=["generate", "batch"])
def command(request, tmp_path):
    return ["generate", "p"] if request.param == "generate" else write_job(tmp_path, REQUEST)


@pytest.mark.parametrize("grammar", ['start: "a" <|im_end|>', 'start: "a" <[300-400]>', "start: <think> /a+/"])
def test_a_grammar_that_names_tokens_is_left_to_the_model(grammar, llm):
    llm.told = {}
    assert main(["generate", "p", "--grammar", grammar, "--quiet"]) == 0
    assert llm.told["prompt"] == "p"


@pytest.mark.parametrize("start", [["generate", "p"], ["chat"]])
@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--json-schema", "{bad"], "json_schema="),
        (["--json-schema", '{"type": "strnig"}'], "json_schema is not a JSON schema"),
        (["--regex", "("], "regex="),
        (["--grammar", "start: missing"], "grammar="),
    ],
)
def test_a_structure_that_no_model_can_follow_is_refused_before_one_is_loaded(start, option, message, llm, capsys):
    llm.told = {}
    assert main([*start, *option]) == 2
    assert message in capsys.readouterr().err
    assert llm.told == {}


def test_nothing_is_compiled_for_later_starts_unless_asked(llm, command):
    assert main(command) == 0
    assert "warm_up" not in llm.told
    assert llm.is_closed

    assert main([*command, "--warm-up", "--quiet"]) == 0
    assert llm.told["warm_up"] == {"show_progress": False}


def test_warm_up_compiles_the_steps_of_a_model_with_these_limits(capsys, llm):
    assert main(["warm-up", "some/model", "--max-num-seqs", "3", "--dtype", "float32"]) == 0

    assert (llm.told["model"], llm.told["dtype"], llm.told["config"].max_num_seqs) == ("some/model", "float32", 3)
    assert llm.told["warm_up"] == {"show_progress": True}
    assert capsys.readouterr().out == "7 executables ready in 2.0 s\n"


@pytest.mark.parametrize(("typed", "prompt"), [("p", "p"), ("p\n", "p"), ("p\n\n", "p\n")])
def test_a_prompt_left_out_is_standard_input_less_one_line_end(monkeypatch, llm, typed, prompt):
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    assert main(["generate", "--quiet"]) == 0
    assert llm.told["prompt"] == prompt


def test_a_prompt_from_standard_input_has_an_end(capsys):
    command = [sys.executable, "-m", "jaxinfer", "generate"]
    with open("/dev/zero", "rb") as zeros:
        result = subprocess.run(command, stdin=zeros, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "jaxinfer: error: the prompt has more than 16,777,216 characters; give a shorter one\n"


def test_a_terminal_is_told_that_the_prompt_is_read_from_it(monkeypatch, capsys, llm):
    terminal = io.StringIO("p\n")
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", terminal)
    assert main(["generate", "--quiet"]) == 0
    assert "reads the prompt from standard input" in capsys.readouterr().err


@pytest.mark.parametrize(("errors", "argv"), [("strict", []), ("surrogateescape", []), ("strict", ["\udcff"])])
def test_a_prompt_that_is_no_text_is_refused_before_a_model_is_loaded(monkeypatch, capsys, llm, errors, argv):
    llm.told = {}
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff"), encoding="utf-8", errors=errors))
    assert main(["generate", *argv]) == 2
    assert capsys.readouterr().err == "jaxinfer: error: the prompt is not text in UTF-8; convert it\n"
    assert llm.told == {}


SAMPLING = {
    "n": 2,
    "sample_index": 3,
    "best_of": 3,
    "max_tokens": 3,
    "temperature": 0.5,
    "top_k": 2,
    "top_p": 0.25,
    "min_p": 0.125,
    "typical_p": 0.5,
    "repetition_penalty": 1.5,
    "presence_penalty": -0.5,
    "frequency_penalty": 0.25,
    "no_repeat_ngram_size": 2,
    "logit_bias": ((5, 2.5), (7, -1.0)),
    "bad_words": ((6, 7), (8,)),
    "allowed_token_ids": (9, 5),
    "min_tokens": 2,
    "json_schema": '{"type": "null"}',
    "regex": "[0-9]+",
    "choices": ("yes", "no"),
    "grammar": 'start: "a"',
    "seed": 2**64 - 1,
    "log_probs": 4,
    "prompt_log_probs": 3,
    "stop": ("x", "y z"),
    "stop_token_ids": (6, 7),
    "ignore_eos": True,
    "skip_special_tokens": False,
}
ENGINE = {
    "max_num_seqs": 3,
    "max_num_batched_tokens": 99,
    "max_model_len": 40,
    "num_sink_tokens": 16,
    "page_size": 16,
    "num_pages": 5,
    "memory_bytes": 9999,
    "cache_bytes": 4096,
    "cache_dtype": "int8",
    "max_samples": 9,
    "max_log_probs": 2,
    "max_prompt_log_probs": 3,
    "sampling_log_probs": True,
    "max_listed_tokens": 7,
    "prefix_cache": False,
    "max_mixed_tokens": 100,
    "max_waiting": 7,
    "host_cache_bytes": 1000,
    "disk_cache_bytes": 1000,
    "disk_cache_path": "pages",
    "max_drafts": 3,
    "adaptive_drafts": False,
    "draft_trees": True,
    "decode_loop_steps": 4,
    "quantization": "int4",
    "exact": True,
    "attention": "reference",
    "max_adapters": 2,
    "max_adapter_rank": 8,
    "parallelism": Parallelism(tensor=2, experts=3, replicas=4, prefill=1),
}
NEEDS = {"disk_cache_bytes": "disk_cache_path", "disk_cache_path": "disk_cache_bytes"}


def options_of(name: str, value: Any) -> list[str]:
    if isinstance(value, Parallelism):
        sizes = {"--tensor-parallel": value.tensor, "--expert-parallel": value.experts, "--replicas": value.replicas}
        sizes |= {"--prefill-replicas": value.prefill}
        return [word for option, size in sizes.items() for word in (option, str(size))]
    option = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [option if value else option.replace("--", "--no-", 1)]
    values = value if isinstance(value, tuple) else (value,)
    return [word for one in values for word in (option, written(name, one))]


def written(name: str, value: Any) -> str:
    separator = {"logit_bias": ":", "bad_words": ","}.get(name)
    return separator.join(map(str, value)) if separator else str(value)


def names_of(config: type, *missing: str) -> list[str]:
    return [field.name for field in dataclasses.fields(config) if field.name not in missing]


@pytest.mark.parametrize("name", names_of(SamplingParams, "logits_processors", "thinking_token_budget"))
def test_each_sampling_option_reaches_the_request(llm, name):
    assert main(["generate", "p", *options_of(name, SAMPLING[name])]) == 0
    assert llm.told["sampling_params"] == SamplingParams(**{name: SAMPLING[name]})


@pytest.mark.parametrize("name", names_of(EngineConfig, "ttft_target", "tpot_target"))
def test_each_engine_option_reaches_the_engine(llm, name):
    fields = {needed: ENGINE[needed] for needed in {name, NEEDS.get(name, name)}}
    options = itertools.chain(*(options_of(*field) for field in fields.items()))

    assert main(["generate", "p", *options]) == 0

    assert llm.told["config"] == EngineConfig(**fields)


def test_model_dtype_and_drafter_reach_the_engine(llm):
    assert main(["generate", "p", "--model", "m", "--dtype", "bfloat16", "--speculation", "ngram"]) == 0
    assert (llm.told["model"], llm.told["dtype"], llm.told["speculation"]) == ("m", "bfloat16", "ngram")


def test_log_probs_are_printed_when_asked_for(capsys):
    assert main(["generate", "p", "--quiet", "--log-probs", "1", "--max-tokens", "2", "--seed", "0"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(
        re.fullmatch(r"token (\d+) 't\1' -\S+  alternatives \1 't\1' -0.5000, 101 't101' -inf", line) for line in lines
    )


def test_those_of_the_prompt_are_printed_when_asked_for(capsys, llm):
    assert main(["generate", "pq", "--quiet", "--prompt-log-probs", "1", "--seed", "0"]) == 0
    assert llm.told["config"].max_prompt_log_probs == 1
    assert capsys.readouterr().err.splitlines() == [
        "prompt token 0 't0' -  alternatives ",
        "prompt token 1 't1' -0.5000  alternatives 7 't7' -0.2500",
    ]


MISTAKES = [
    ["generate", "p", "--top-p", "2"],
    ["generate", "p", "--top-p", "x"],
    ["generate", "p", "--seq", "1"],
    ["generate", "p", "--logit-bias", "5"],
    ["generate", "p", "--bad-words", "5,x"],
    ["generate", "p", "--logits-processors", "a:1"],
    ["generate", "p", "--max-num-seqs", "0"],
    ["generate", "too long a prompt"],
    ["batch", "missing.jsonl", "out.jsonl"],
    ["batch", "missing.jsonl"],
    ["nothing"],
    [],
]


@pytest.mark.parametrize("argv", MISTAKES, ids=" ".join)
def test_a_mistake_is_one_line_and_status_2(capsys, argv, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("jaxinfer: error: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("error", [MemoryError("9 GiB"), RuntimeError("RESOURCE_EXHAUSTED: 9 GiB")], ids=repr)
def test_too_little_memory_is_a_mistake_with_its_way_out(capsys, llm, error):
    llm.ends_with = error
    assert main(["generate", "p"]) == 2
    assert re.search(r"out of memory \(.*9 GiB\); lower .* --num-pages", capsys.readouterr().err)


@pytest.mark.parametrize("name", ["tpu", "cuda", "unknown"])
def test_a_platform_that_is_not_there_is_a_mistake(name):
    environment = os.environ | {"JAX_PLATFORMS": name}
    result = run_python(
        "from jaxinfer.cli.main import main; import sys; sys.exit(main(['generate', 'p']))", env=environment
    )
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith(f"jaxinfer: error: JAX_PLATFORMS={name} names no device".encode())


def test_an_error_of_the_program_itself_keeps_its_traceback(llm):
    llm.ends_with = RuntimeError("broken invariant")
    with pytest.raises(RuntimeError, match="broken invariant"):
        main(["generate", "p"])


class FailingLLM(StreamingLLM):
    """Ends requests in an error."""

    def _delta(self, *arguments: Any, **options: Any) -> Delta:
        delta = super()._delta(*arguments, **options)
        failed = delta.completion and dataclasses.replace(delta.completion, finish_reason="error", error="NaN")
        return delta._replace(completion=failed)


def test_a_request_that_ends_in_an_error_says_why_and_is_status_1(capsys, monkeypatch):
    monkeypatch.setattr(jaxinfer, "LLM", FailingLLM)
    assert main(["generate", "p", "--quiet"]) == 1
    assert capsys.readouterr().err == "jaxinfer: ended by an error: NaN\n"


def test_too_many_samples_for_the_queue_are_a_mistake(capsys, llm):
    llm.ends_with = QueueFullError("3 requests are too many;  raise max_waiting")
    assert main(["generate", "p", "--quiet"]) == 2
    assert capsys.readouterr().err.endswith("jaxinfer: error: 3 requests are too many; raise max_waiting\n")


def test_an_interrupt_is_status_130(capsys, llm):
    llm.ends_with = KeyboardInterrupt()
    assert main(["generate", "p"]) == 130
    assert capsys.readouterr().err == "jaxinfer: interrupted\n"


def test_batch_runs_a_file_and_tells_what_it_did(tmp_path: Path, capsys):
    argv = [*write_job(tmp_path, REQUEST, "{"), "--max-in-flight", "1"]
    assert main(argv) == 1
    told = capsys.readouterr().err
    assert "2 requests: 0 done before, 1 completed, 1 with an error; 2 tokens" in told
    records = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    (text,) = (record["text"] for record in records if "text" in record)
    assert f"\na:\n    p{text}\n" in told  # the prompt and its answer
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize(("lines", "status"), [([], 0), ([REQUEST], 0), (["{"], 1), ([REQUEST, "{"], 1)], ids=str)
def test_the_status_of_a_job_tells_of_errors_also_of_runs_before(tmp_path, capsys, lines, status):
    argv = [*write_job(tmp_path, *lines), "--quiet"]
    for _ in range(2):
        assert main(argv) == status
        told = capsys.readouterr().err
        message = f"1 of {len(lines)} requests have an error in {tmp_path / 'out.jsonl'}; correct"
        assert (message in told) == bool(status)


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        ([REQUEST], ["--prompt", "{prompt"], "prompt='{prompt' is not allowed: prompt must be text with keys"),
        ([REQUEST], ["--fields", "text,tokens"], "fields='tokens' is not allowed"),
        ([REQUEST], ["--regex", "("], "regex="),
        ([REQUEST], ["--max-tokens", "0"], "max_tokens=0 is not allowed"),
    ],
)
def test_batch_refuses_lines_and_options_before_it_loads_a_model(lines, options, message, tmp_path, llm, capsys):
    llm.told = {}
    assert main([*write_job(tmp_path, *lines), *options]) == 2
    assert message in capsys.readouterr().err
    assert llm.told == {}


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        (["{"] * 3, [], "3 of the first 3 lines are no requests; line 1: the line is not JSON"),
        ([REQUEST, '{"prompt": "p", "tempature": 1}'], [], "line 2: keys ['tempature'] are unknown; did you mean temp"),
        (['{"question": "p"}'], [], "keys ['question'] are unknown"),
        (['{"question": "p"}'], ["--prompt", "{answer}"], "keys ['question'] are unknown"),
    ],
)
def test_batch_says_before_it_loads_a_model_which_lines_are_wrong(
    lines, options, message, tmp_path, llm, monkeypatch, capsys
):
    def refuse(*_, **__):
        raise ValueError("the model is loaded")

    monkeypatch.setattr(llm, "__init__", refuse)
    assert main([*write_job(tmp_path, *lines), *options]) == 2
    told = capsys.readouterr().err
    assert told.index(message) < told.index("the model is loaded")


def test_batch_has_options_for_all_lines(tmp_path):
    lines = ['{"q": "a", "label": 3}', '{"q": "b", "max_tokens": 1}']
    options = ["--prompt", "Q {q}", "--keep", "label", "--fields", "text, seed", "--max-tokens", "2", "--seed", "5"]

    assert main([*write_job(tmp_path, *lines), *options, "--quiet"]) == 0

    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [[*record] for record in records] == [
        ["line", "custom_id", "text", "seed", "kept", "made_by"],
        ["line", "custom_id", "text", "seed", "made_by"],
    ]
    assert [(record["custom_id"], len(record["text"]), record["seed"]) for record in records] == [
        ("1", 2, 5),
        ("2", 1, 5),
    ]
    assert records[0]["kept"] == {"label": 3}


def test_batch_refuses_a_wrong_path_before_it_loads_a_model(tmp_path: Path, llm):
    llm.told = {}
    command, source, output = write_job(tmp_path)
    outputs = [source, str(tmp_path), str(tmp_path / "missing" / "out.jsonl"), "/dev/full"]
    for argv in ([str(tmp_path / "missing"), output], *([source, wrong] for wrong in outputs)):
        assert main([command, *argv]) == 2
    assert main([command, source, output, "--max-in-flight", "0"]) == 2
    assert llm.told == {}


def test_an_error_names_options_where_python_has_fields(llm, capsys, monkeypatch):
    def refuse(*_, **__):
        raise ValueError("raise EngineConfig.max_model_len, or leave out EngineConfig.parallelism")

    monkeypatch.setattr(llm, "stream", refuse)
    assert main(["generate", "p", "--quiet"]) == 2
    assert "raise --max-model-len, or leave out EngineConfig.parallelism" in capsys.readouterr().err


def test_version_is_that_of_the_package(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("jaxinfer ")


@pytest.mark.parametrize(("command", "groups"), [("generate", 12), ("batch", 13), ("bench", 5), ("doctor", 7)])
def test_help_groups_the_options_by_theme(capsys, command, groups):
    assert main([command, "--help"]) == 0
    titles = [line for line in capsys.readouterr().out.splitlines() if re.fullmatch(r"[a-z ]+:", line)]
    assert len(set(titles) - {"positional arguments:", "options:", "examples:"}) == groups
    assert len(titles) == len(set(titles))


def test_the_package_runs_as_the_command():
    result = subprocess.run([sys.executable, "-m", "jaxinfer", "--version"], capture_output=True, text=True, check=True)
    assert result.stdout == f"jaxinfer {jaxinfer.__version__}\n"


@pytest.mark.parametrize(("ends_with", "status"), [("KeyboardInterrupt()", 130), ("ValueError('x')", 2)])
def test_a_command_that_ends_early_does_not_wait_for_the_compiler(ends_with, status):
    program = (
        "import sys, threading, time, jaxinfer; "
        "from jaxinfer.cli.main import run; from tests.cli.test_cli import StreamingLLM; "
        "sys.argv = ['jaxinfer', 'generate', 'p', '--quiet']; jaxinfer.LLM = StreamingLLM; "
        "threading.Thread(target=time.sleep, args=(600,)).start(); "
        f"StreamingLLM.ends_with = {ends_with}; run()"
    )
    result = run_python(program)
    assert (result.returncode, result.stderr.count(b"\n")) == (status, 1)


BEFORE = "import sys; from jaxinfer.cli.main import main; status = main({argv}); {check}"


def run_python(program: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=False, **options)


@pytest.mark.parametrize("argv", [["--help"], ["generate", "--help"], ["generate", "p", "--top-k", "x"]])
def test_arguments_are_read_before_jax_is_imported(argv):
    check = "sys.exit('jax' in sys.modules or 'tokenizers' in sys.modules)"
    assert run_python(BEFORE.format(argv=argv, check=check)).returncode == 0


RUN = (
    "import jaxinfer, sys; from tests.cli.test_cli import StreamingLLM; from jaxinfer.cli.main import run; "
    "StreamingLLM.ends_with = None; jaxinfer.LLM = StreamingLLM; sys.argv = ['jaxinfer', *{argv}]; run()"
)


@pytest.mark.parametrize(
    ("to", "message"),
    [(">&-", "standard output is closed; leave it open"), (">/dev/full", "cannot be written (No space left on")],
)
@pytest.mark.parametrize("argv", [["generate", "p"], ["doctor", "--max-num-seqs", "1"]], ids=lambda argv: argv[0])
def test_output_that_goes_nowhere_is_a_mistake_in_one_line(argv, to, message):
    command = ["bash", "-c", f'exec "$0" -c "$1" {to}', sys.executable, RUN.format(argv=argv)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (result.returncode, result.stdout) == (2, "")
    assert re.fullmatch(r"jaxinfer: error: standard output .*\n", result.stderr)
    assert message in result.stderr


def test_what_is_said_goes_nowhere_where_nobody_listens():
    command = ["bash", "-c", 'exec "$0" -c "$1" 2>&-', sys.executable, RUN.format(argv=["generate", "p"])]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert re.fullmatch("é+\n", result.stdout)


@pytest.mark.parametrize("option", ["--plot=--", "--timeline=--", "--stop=--"])
def test_two_dashes_are_no_value(option, capsys):
    command = ["generate", "p"] if "stop" in option else ["simulate", "trace.jsonl", "--step-times", "x"]
    assert main([*command, option]) == 2
    assert re.search(rf"error: argument {option[:-3]}: expected .*", capsys.readouterr().err)


def test_a_reader_that_leaves_ends_the_program_quietly():
    program = (
        "import sys, jaxinfer; from tests.cli.test_cli import StreamingLLM; from jaxinfer.cli.main import main; "
        "StreamingLLM.ends_with = None; jaxinfer.LLM = StreamingLLM; "
        "sys.exit(main(['generate', 'p', '--quiet', '--max-tokens', '100000']))"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.read(2) == "é".encode()
    process.stdout.close()
    assert process.stderr is not None
    assert (process.stderr.read(), process.wait(60)) == (b"", 141)
    process.stderr.close()
