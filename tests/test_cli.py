"""The command line on an engine without a model, and what it may import before its arguments are read."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import jaxinfer
from jaxinfer import cli
from jaxinfer.config import EngineConfig, SamplingParams
from tests.batch_job.fake_llm import FakeLLM


class StreamingLLM(FakeLLM):
    """Remembers what it was told; `stream` ends with `ends_with` when that is set."""

    told: dict[str, Any]
    ends_with: BaseException | None

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__()
        StreamingLLM.told = {"model": model} | options

    def stream(self, prompt: str, sampling_params: SamplingParams) -> Any:
        StreamingLLM.told |= {"prompt": prompt, "sampling_params": sampling_params}
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


def test_generate_writes_the_text_and_a_line_end_and_the_statistics_elsewhere(capsys):
    assert cli.main(["generate", "p", "--max-tokens", "3", "--seed", "9"]) == 0
    out, err = capsys.readouterr()
    assert out == "ééé\n"
    assert "1 + 3 tokens" in err
    assert "ended by length, seed 9" in err


def test_quiet_leaves_the_text_alone(capsys, llm):
    assert cli.main(["generate", "p", "--quiet"]) == 0
    assert capsys.readouterr().err == ""
    assert llm.told["show_progress"] is False


@pytest.mark.parametrize(("typed", "prompt"), [("p", "p"), ("p\n", "p"), ("p\n\n", "p\n")])
def test_a_prompt_left_out_is_standard_input_less_one_line_end(monkeypatch, llm, typed, prompt):
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    assert cli.main(["generate", "--quiet"]) == 0
    assert llm.told["prompt"] == prompt


SAMPLING = {
    "n": 2,
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
    "logits_processors": (("a", 1.5), ("b:c", -2.0)),
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
    "max_samples": 9,
    "max_log_probs": 2,
    "max_prompt_log_probs": 3,
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
    "ttft_target": 0.5,
    "tpot_target": 0.25,
    "quantization": "int4",
}
NEEDS = {"disk_cache_bytes": "disk_cache_path", "disk_cache_path": "disk_cache_bytes"}


def options_of(name: str, value: Any) -> list[str]:
    option = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [option if value else option.replace("--", "--no-", 1)]
    values = value if isinstance(value, tuple) else (value,)
    return [word for one in values for word in (option, written(name, one))]


def written(name: str, value: Any) -> str:
    separator = {"logit_bias": ":", "logits_processors": ":", "bad_words": ","}.get(name)
    return separator.join(map(str, value)) if separator else str(value)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(SamplingParams)])
def test_each_sampling_option_reaches_the_request(llm, name):
    assert cli.main(["generate", "p", *options_of(name, SAMPLING[name])]) == 0
    assert llm.told["sampling_params"] == SamplingParams(**{name: SAMPLING[name]})


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(EngineConfig)])
def test_each_engine_option_reaches_the_engine(llm, name):
    fields = {needed: ENGINE[needed] for needed in {name, NEEDS.get(name, name)}}
    options = itertools.chain(*(options_of(*field) for field in fields.items()))

    assert cli.main(["generate", "p", *options]) == 0

    assert llm.told["config"] == EngineConfig(**fields)


def test_model_dtype_and_drafter_reach_the_engine(llm):
    assert cli.main(["generate", "p", "--model", "m", "--dtype", "bfloat16", "--speculation", "ngram"]) == 0
    assert (llm.told["model"], llm.told["dtype"], llm.told["speculation"]) == ("m", "bfloat16", "ngram")


@pytest.mark.parametrize(
    ("options", "steps"), [([], 8), (["--decode-loop-steps", "2"], 2), (["--speculation", "ngram"], 1)], ids=str
)
def test_a_batch_job_decodes_in_loops_unless_told_otherwise(llm, tmp_path, options, steps):
    (tmp_path / "in.jsonl").write_text('{"custom_id": "a", "prompt": "p"}\n')

    assert cli.main(["batch", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), "--quiet", *options]) == 0

    assert llm.told["config"].decode_loop_steps == steps


def test_log_probs_are_printed_when_asked_for(capsys):
    assert cli.main(["generate", "p", "--quiet", "--log-probs", "1", "--max-tokens", "2", "--seed", "0"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in lines] == ["token", "token"]
    assert all("alternatives" in line for line in lines)


def test_those_of_the_prompt_are_printed_when_asked_for(capsys, llm):
    assert cli.main(["generate", "pq", "--quiet", "--prompt-log-probs", "1", "--seed", "0"]) == 0
    assert llm.told["config"].max_prompt_log_probs == 1
    assert capsys.readouterr().err.splitlines() == [
        "prompt token 0 -  alternatives ",
        "prompt token 1 -0.5000  alternatives 7:-0.2500",
    ]


MISTAKES = [
    ["generate", "p", "--top-p", "2"],
    ["generate", "p", "--top-p", "x"],
    ["generate", "p", "--seq", "1"],
    ["generate", "p", "--logit-bias", "5"],
    ["generate", "p", "--bad-words", "5,x"],
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
    assert cli.main(argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("jaxinfer: error: ")
    assert err.count("\n") == 1


def test_an_error_of_the_program_itself_keeps_its_traceback(llm):
    llm.ends_with = RuntimeError("broken invariant")
    with pytest.raises(RuntimeError, match="broken invariant"):
        cli.main(["generate", "p"])


def test_an_interrupt_is_status_130(capsys, llm):
    llm.ends_with = KeyboardInterrupt()
    assert cli.main(["generate", "p"]) == 130
    assert capsys.readouterr().err == "jaxinfer: interrupted\n"


def test_batch_runs_a_file_and_tells_what_it_did(tmp_path: Path, capsys):
    request = {"custom_id": "a", "prompt": "p", "max_tokens": 2}
    (tmp_path / "in.jsonl").write_text(json.dumps(request) + "\n{\n")
    argv = ["batch", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), "--max-in-flight", "1"]
    assert cli.main(argv) == 0
    assert "2 requests: 0 done before, 1 completed, 1 refused; 2 tokens" in capsys.readouterr().err
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 2


def test_batch_refuses_a_wrong_path_before_it_loads_a_model(tmp_path: Path, llm):
    llm.told = {}
    (tmp_path / "in.jsonl").write_text("")
    for paths in (["missing", "out.jsonl"], ["in.jsonl", "in.jsonl"], ["in.jsonl", "missing/out.jsonl"]):
        assert cli.main(["batch", *(str(tmp_path / path) for path in paths)]) == 2
    assert llm.told == {}


def test_version_is_that_of_the_package(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("jaxinfer ")


BEFORE = "import sys; from jaxinfer.cli import main; status = main({argv}); {check}"


def run_python(program: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=False, **options)


@pytest.mark.parametrize("argv", [["--help"], ["generate", "--help"], ["generate", "p", "--top-k", "x"]])
def test_arguments_are_read_before_jax_is_imported(argv):
    check = "sys.exit('jax' in sys.modules or 'tokenizers' in sys.modules)"
    assert run_python(BEFORE.format(argv=argv, check=check)).returncode == 0


def test_a_reader_that_leaves_ends_the_program_quietly():
    program = (
        "import sys, jaxinfer; from tests.test_cli import StreamingLLM; from jaxinfer.cli import main; "
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
