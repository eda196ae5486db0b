"""Requests without parameters yield the tokens of `transformers.generate`, by generation_config.json."""

from __future__ import annotations

import json
import logging
import shutil
import warnings
from dataclasses import replace

import pytest
import torch
import transformers

from jaxinfer import SamplingParams
from jaxinfer.batch_job import run_batch
from jaxinfer.cli.main import main
from jaxinfer.engine.engine import BUNDLED_MODEL
from jaxinfer.sampling_params import TotalLength
from tests.checkpoint.renamed import edit_json
from tests.engine.engines import random_prompts, small_engine
from tests.on_demand import steps_on_demand
from tests.oracles import load_reference

GREEDY = {"do_sample": False, "pad_token_id": 0, "eos_token_id": 0}
PROMPTS = [[7], *random_prompts(4, max_len=30, seed=2), [20, 21, 22] * 9]
CASES = {
    "n-grams": {"no_repeat_ngram_size": 2, "max_new_tokens": 24},
    "single tokens": {"no_repeat_ngram_size": 1, "max_new_tokens": 12},
    "suppressed": {"suppress_tokens": [0, 17, -1, 40, *range(50, 70)], "max_new_tokens": 12},
    "words": {
        "bad_words_ids": [[0], [33], *([i, j] for i in range(60, 66) for j in (20, 48, 73))],
        "max_new_tokens": 16,
    },
    "biases": {"sequence_bias": [[[5], 4.0], [[48], -9.5], [[80], 3.5]], "max_new_tokens": 12},
    "penalty and end": {"repetition_penalty": 1.7, "eos_token_id": [3, 9, 21, 40, 48, 73], "max_new_tokens": 30},
    "least new tokens": {"min_new_tokens": 9, "eos_token_id": [*range(2, 60)], "max_new_tokens": 20},
    "total length": {"max_length": 34, "min_length": 30, "eos_token_id": [*range(2, 60)]},
    "most new, least total": {"max_new_tokens": 11, "min_length": 22, "eos_token_id": [*range(2, 60)]},
    "impossible lengths": {"max_length": 32, "min_new_tokens": 25, "eos_token_id": [*range(2, 60)]},
    # The last one is a special token, which ends no text here.
    "stop strings": {"stop_strings": ["a", "I4", "]", "<end>"], "max_new_tokens": 60, "eos_token_id": 95},
    "all at once": {
        **{"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "suppress_tokens": [17, 40], "min_length": 20},
        **{"bad_words_ids": [[5, 6], [48]], "sequence_bias": [[[73], -2.0]], "max_length": 40, "eos_token_id": [3, 9]},
        **{"length_penalty": 2.0, "early_stopping": True, "renormalize_logits": True, "top_p": 0.5, "temperature": 0.3},
    },
}


def generated(path, prompts):
    """Returns what `transformers.generate` adds to each prompt, with nothing but the checkpoint's own parameters."""
    model = load_reference(path)
    stop = model.generation_config.stop_strings
    options = {}
    if stop is not None:
        options["tokenizer"] = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json"))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Unfeasible length constraints")
        return [model.generate(torch.tensor([p]), **options)[0, len(p) :].tolist() for p in prompts]  # pyright: ignore


@pytest.fixture(scope="module")
def plain(checkpoint, tmp_path_factory):
    """The first 60 tokens of greedy decoding."""
    path = shutil.copytree(checkpoint, tmp_path_factory.mktemp("plain") / "checkpoint")
    edit_json(path, "generation_config.json", **{**GREEDY, "eos_token_id": None, "max_new_tokens": 60})
    return generated(path, PROMPTS)


@pytest.mark.parametrize("stated", CASES.values(), ids=CASES)
def test_requests_without_parameters_are_those_of_transformers(checkpoint, tmp_path, caplog, plain, stated):
    path = shutil.copytree(checkpoint, tmp_path / "copy")
    (path / "generation_config.json").write_text(json.dumps({**GREEDY, **stated}))
    expected = generated(path, PROMPTS)

    with caplog.at_level(logging.WARNING, logger="jaxinfer"), small_engine(path) as llm:
        completions = llm.generate(PROMPTS, show_progress=False)

    assert [list(completion.token_ids) for completion in completions] == expected
    assert "does not honour" not in caplog.text
    # So the case has an effect.
    assert expected != [tokens[: stated.get("max_new_tokens", 60)] for tokens in plain]


def test_what_a_start_does_not_honour_is_told_once(checkpoint, tmp_path, caplog):
    path = shutil.copytree(checkpoint, tmp_path / "copy")
    edit_json(path, "generation_config.json", num_beams=4)

    with caplog.at_level(logging.WARNING, logger="jaxinfer"), small_engine(path):
        pass

    assert caplog.text.count("does not honour num_beams=4") == 1


def test_a_special_token_among_the_stop_strings_is_a_stop_token(checkpoint, tmp_path):
    path = shutil.copytree(checkpoint, tmp_path / "copy")
    edit_json(path, "generation_config.json", stop_strings=["a", "<end>"])

    with small_engine(path) as llm:
        assert llm.default_sampling_params == SamplingParams(stop=["a", "<end>"], stop_token_ids=[0])


@pytest.fixture(scope="module")
def bounded(checkpoint, tmp_path_factory):
    """A checkpoint that bounds prompt and output together, and rules out a token."""
    path = shutil.copytree(checkpoint, tmp_path_factory.mktemp("bounded") / "checkpoint")
    stated = {"do_sample": False, "max_length": 34, "suppress_tokens": [48], "eos_token_id": None, "num_beams": 3}
    return edit_json(path, "generation_config.json", **stated)


@pytest.fixture(scope="module")
def bounded_llm(bounded):
    return small_engine(bounded)


def test_the_defaults_are_shown_and_may_be_given(bounded_llm):
    defaults = bounded_llm.default_sampling_params

    assert defaults == SamplingParams(temperature=0, max_tokens=TotalLength(34), bad_words=[[48]])
    given = bounded_llm.generate(PROMPTS, defaults, show_progress=False)
    default = bounded_llm.generate(PROMPTS, show_progress=False)
    assert [completion.token_ids for completion in given] == [completion.token_ids for completion in default]
    streamed = [token for delta in bounded_llm.stream(PROMPTS[1]) for token in delta.token_ids]
    assert tuple(streamed) == default[1].token_ids


def test_a_prompt_that_leaves_no_token_is_refused_as_by_transformers(bounded, bounded_llm):
    prompt = [5] * 34
    with pytest.raises(ValueError, match="max_length"):
        generated(bounded, [prompt])

    with pytest.raises(ValueError, match=r"prompt has 34 tokens, and max_tokens=TotalLength\(34\) counts them"):
        bounded_llm.generate([prompt], show_progress=False)

    (other,) = bounded_llm.generate([prompt], SamplingParams(max_tokens=3, ignore_eos=True), show_progress=False)
    assert len(other.token_ids) == 3


def test_a_total_length_is_cut_to_the_pool(bounded, bounded_llm):
    (whole,) = bounded_llm.generate([PROMPTS[0]], show_progress=False)

    with small_engine(bounded, num_pages=1, max_num_seqs=1) as llm:
        (cut,) = llm.generate([PROMPTS[0]], show_progress=False)
        too_long = pytest.raises(ValueError, match="may need 18 slots of the cache, which has 16; lower max_tokens")
        with too_long:
            llm.generate([[5] * 18], show_progress=False)

    assert len(whole.token_ids) == 33
    assert cut.token_ids == whole.token_ids[:16]  # the last token needs no slot
    assert cut.finish_reason == "length"


def test_a_line_of_a_job_replaces_the_parameters_that_it_gives(bounded_llm, tmp_path):
    prompt = PROMPTS[1]
    lines = [{"prompt": prompt}, {"prompt": prompt, "max_tokens": 40}, {"prompt": prompt, "bad_words": []}]
    lines = [{"custom_id": str(i), **line} for i, line in enumerate(lines)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    run_batch(bounded_llm, tmp_path / "in.jsonl", tmp_path / "out.jsonl", show_progress=False)

    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    lengths = {record["custom_id"]: len(record["token_ids"]) for record in records}
    assert lengths == {"0": 34 - len(prompt), "1": 40, "2": 34 - len(prompt)}


def test_an_option_of_the_command_line_replaces_the_parameter_that_it_gives(bounded, capsys):
    options = ["--model", str(bounded), "--max-model-len", "96", "--max-num-seqs", "1", "--num-pages", "2"]

    with steps_on_demand():
        assert main(["generate", "hello there", *options]) == 0
        default = capsys.readouterr().err
        assert main(["generate", "hello there", *options, "--max-tokens", "40"]) == 0
        given = capsys.readouterr().err

    assert "11 + 23 tokens" in default
    assert "11 + 40 tokens" in given


@pytest.mark.parametrize("stated", [[0], None], ids=str)
def test_a_text_ends_at_the_end_token_of_the_tokenizers_files_too(tmp_path, stated):
    path = shutil.copytree(BUNDLED_MODEL, tmp_path / "model")
    edit_json(path, "generation_config.json", eos_token_id=stated)
    edit_json(path, "tokenizer_config.json", eos_token=...)
    greedy = SamplingParams(temperature=0, max_tokens=12)
    with small_engine(path, max_num_seqs=2) as llm:
        (before,) = llm.generate("def add(a, b):", greedy, show_progress=False)
        assert llm.tokenizer is not None
        end = llm.tokenizer.id_to_token(before.token_ids[4])
    edit_json(path, "tokenizer_config.json", eos_token=end)

    with small_engine(path, max_num_seqs=2) as llm:
        (after,) = llm.generate("def add(a, b):", greedy, show_progress=False)
        (whole,) = llm.generate("def add(a, b):", replace(greedy, ignore_eos=True), show_progress=False)

    first = before.token_ids.index(before.token_ids[4])
    assert list(after.token_ids) == list(before.token_ids[: first + 1])
    assert after.finish_reason == "stop"
    assert whole.token_ids == before.token_ids
