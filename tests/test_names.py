"""Names of other engines and misspelt ones: every door says what to write instead."""

from __future__ import annotations

import dataclasses
import re
import time
from typing import Any

import numpy as np
import pytest

from jaxinfer.cli.main import _parser, main
from jaxinfer.config import CacheConfig, EngineConfig, Parallelism, SamplingParams, with_fields
from jaxinfer.engine.async_llm import AsyncLLM
from jaxinfer.engine.frontend.admission import RequestOptions, check_names
from jaxinfer.engine.llm import LLM
from jaxinfer.names import ANSWERS, SAME, way_out
from jaxinfer.openai.bodies import ChatBody, CompletionBody


def options() -> set[str]:
    """The parameters of all commands."""
    (commands,) = (action for action in _parser()._actions if action.choices)
    assert commands.choices is not None
    parsers: Any = commands.choices
    return {option.lstrip("-").replace("-", "_") for each in parsers.values() for option in each._option_string_actions}


def foreign(**fields: Any) -> dict[str, Any]:
    """Fields that a type checker would refuse too."""
    return fields


def test_each_name_of_the_table_is_one_that_some_door_takes():
    known = {field.name for kind in (SamplingParams, EngineConfig) for field in dataclasses.fields(kind)}
    known |= options() | {*RequestOptions.__annotations__, "model", "speculation", "show_progress"}

    assert {*SAME.values()} <= known
    assert not {*SAME, *ANSWERS} & known


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: SamplingParams(**foreign(logprobs=1)),
            "SamplingParams has no parameter logprobs: logprobs is log_probs here",
        ),
        (lambda: SamplingParams(**foreign(max_tokns=1)), "did you mean max_tokens?"),
        (lambda: SamplingParams(**foreign(structured_outputs=1)), "give json_schema, regex, choices or grammar"),
        (lambda: SamplingParams(**foreign(nothing_like_it=1)), "it takes allowed_token_ids, bad_words"),
        (lambda: EngineConfig(**foreign(block_size=16)), "block_size is page_size here"),
        (lambda: CacheConfig(num_pages=1, **foreign(block_size=16)), "block_size is page_size here"),
        (lambda: Parallelism(**foreign(tensors=2)), "did you mean tensor?"),
        (lambda: dataclasses.replace(SamplingParams(), max_new_tokens=1), "max_new_tokens is max_tokens here"),
        (lambda: LLM("m", n_ctx=1), "LLM has no parameter n_ctx: n_ctx is max_model_len here"),
        (lambda: LLM("m", temperature=0), "temperature belongs to SamplingParams"),
        (lambda: LLM("m", logprobs=0), "log_probs belongs to SamplingParams"),
        (lambda: LLM("m", tensor_parallel_size=2), r"give parallelism=jaxinfer.config.Parallelism\(tensor=…\)"),
        (lambda: LLM("m", speculative_config={}), "speculative_config is speculation here"),
        (lambda: LLM("m", speculaton="ngram"), "did you mean speculation?"),
        (lambda: AsyncLLM("m", gpu_memory_utilization=0.9), "set the variable XLA_PYTHON_CLIENT_MEM_FRACTION"),
        (lambda: AsyncLLM("m", max_unread_token=1), "did you mean max_unread_tokens?"),
        (lambda: LLM("m", cpu_offload_gb=4), "weights stay on the device"),
        (lambda: check_names({"lora_request": 1}), "unknown argument lora_request=1; lora_request is adapter here"),
        (lambda: check_names({"use_tqdm": False}), "use_tqdm is show_progress here"),
        (lambda: check_names({"max_tokens": 1}), "max_tokens belongs to SamplingParams"),
    ],
)
def test_a_name_of_another_engine_has_a_way_out_in_python(call, message):
    with pytest.raises(TypeError, match=message):
        call()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--tensor-parallel-size", "2"], "--tensor-parallel-size is --tensor-parallel here"),
        (["serve", "--gpu-memory-utilization=0.9"], "--gpu-memory-utilization is --memory-fraction here"),
        (["serve", "--enable-prefix-caching"], "--enable-prefix-caching is --prefix-cache here"),
        (["serve", "--trust-remote-code"], "leave it out: no code of a checkpoint is run"),
        (["generate", "p", "--temp", "0"], "--temp is --temperature here"),
        (["generate", "p", "--max-tokns", "5"], "did you mean --max-tokens?"),
        (["generate", "p", "-n", "2"], "write --n"),
        (["batch", "a", "b", "--nothing-like-it"], "unrecognized arguments: --nothing-like-it (try"),
    ],
)
def test_an_option_of_another_engine_has_a_way_out(arguments, message, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.endswith(f"(try `jaxinfer {arguments[0]} --help`)\n")


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("guided_json", "guided_json is json_schema here"),
        ("max_new_tokens", "max_new_tokens is max_tokens here"),
        ("temperatur", "did you mean temperature?"),
        ("nothing_like_it", "leave it out"),
    ],
)
@pytest.mark.parametrize(("body", "given"), [(CompletionBody, {"prompt": "p"}), (ChatBody, {"messages": [{}]})])
def test_a_field_of_another_server_has_a_way_out(body, given, field, message):
    with pytest.raises(
        ValueError, match=re.escape(f"{field}: this field is unknown, and no field is ignored; {message}")
    ):
        body.model_validate({"model": "m", **given, field: 1})


def test_a_name_of_megabytes_is_not_compared_with_others():
    began = time.process_time()

    assert way_out("ab" * 2**21, ["abab"]) == ""
    assert time.process_time() - began < 1


def test_fields_of_the_configuration_may_be_keywords():
    config = EngineConfig(max_num_seqs=3, max_model_len=9)

    assert with_fields(LLM, None, {}) is None
    assert with_fields(LLM, None, {"max_num_seqs": 3, "max_model_len": 9}) == config
    assert with_fields(LLM, config, {"max_model_len": 8}) == EngineConfig(max_num_seqs=3, max_model_len=8)
    with pytest.raises(ValueError, match="config=3 is not allowed"):
        LLM("m", config=3, max_model_len=8)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="max_model_len=1 "):
        LLM("m", max_model_len=1)


def test_values_that_ask_for_nothing_are_those_of_a_parameter_that_is_left_out():
    asked: Any = {"top_k": -1, "seed": np.int64(-1), "max_tokens": None}
    params = SamplingParams(**asked)

    assert (params.top_k, params.seed) == (0, None)
    assert params == SamplingParams(max_tokens=-1)
    assert params.after(30, longest=100).max_tokens == 70


@pytest.mark.parametrize(
    ("size", "num_bytes"),
    [("17", 17), ("16GiB", 16 * 2**30), ("1.5gb", 1_500_000_000), ("2 KiB", 2048), ("3TB", 3 * 10**12)],
)
def test_sizes_have_units(size, num_bytes):
    assert _parser().parse_args(["generate", "p", "--memory-bytes", size]).memory_bytes == num_bytes


@pytest.mark.parametrize("size", ["16G", "GiB", "1.5", "1.2.3GB", "many", "9" * 330 + "GB"])
def test_a_size_of_another_form_is_refused_with_an_example(size, capsys):
    assert main(["generate", "p", "--memory-bytes", size]) == 2
    error = capsys.readouterr().err
    assert f"{size[:9]}" in error
    assert "is not of the form SIZE, such as 16GiB or 17179869184" in error


def test_the_model_may_stand_alone_but_not_twice(capsys):
    for command in ("chat", "serve", "bench", "warm-up", "doctor"):
        assert _parser().parse_args([command, "some/model"]).model == "some/model"
        assert _parser().parse_args([command, "-m", "some/model"]).model == "some/model"
        assert _parser().parse_args([command]).model is None
    assert main(["chat", "a", "--model", "b"]) == 2
    assert "the model is given twice, as b and as a; leave one out" in capsys.readouterr().err
