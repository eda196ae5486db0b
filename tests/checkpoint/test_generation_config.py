"""generation_config.json becomes the defaults of requests; one warning names all that cannot be honoured."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest
import transformers

from jaxinfer.checkpoint import Checkpoint, read_sampling_defaults
from jaxinfer.checkpoint.generation_config import FIELDS, FILTERS, OTHERS
from jaxinfer.config import SamplingParams
from jaxinfer.sampling_params import TotalLength

DEFAULTS = SamplingParams()


def read(path, *, limits=None, **stated):
    (path / "generation_config.json").write_text(json.dumps(stated))
    return read_sampling_defaults(Checkpoint(path), **(limits or {}))


HONOURED = {
    "temperature": ({"temperature": 0.6}, {"temperature": 0.6}),
    "greedy": ({"do_sample": False, "temperature": 0.6, "top_k": 20}, {"temperature": 0, "top_k": 20}),
    "sampling": ({"do_sample": True}, {}),
    "filters": (
        {"top_k": 20, "top_p": 0.8, "min_p": 0.1, "typical_p": 0.9},
        {"top_k": 20, "top_p": 0.8, "min_p": 0.1, "typical_p": 0.9},
    ),
    "penalties": (
        {"repetition_penalty": 1.1, "presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"repetition_penalty": 1.1, "presence_penalty": 1.5, "frequency_penalty": 0.5},
    ),
    "no_repeat_ngram_size": ({"no_repeat_ngram_size": 3}, {"no_repeat_ngram_size": 3}),
    "suppress_tokens": ({"suppress_tokens": [7, -1, 9, 7, 96]}, {"bad_words": [[7], [9]]}),
    "bad_words_ids": ({"bad_words_ids": [[5, 6], [2], [3], [5, 96]]}, {"bad_words": [[5, 6], [3]]}),
    "both": ({"suppress_tokens": [2, 7], "bad_words_ids": [[5, 6]]}, {"bad_words": [[2], [7], [5, 6]]}),
    "sequence_bias": ({"sequence_bias": [[[5], 2.5], [[96], 1.0], [[6], -9.0]]}, {"logit_bias": {5: 2.5, 6: -9.0}}),
    "new tokens": ({"max_new_tokens": 900, "min_new_tokens": 200}, {"max_tokens": 900, "min_tokens": 200}),
    "lengths": (
        {"max_length": 900, "min_length": 200},
        {"max_tokens": TotalLength(900), "min_tokens": TotalLength(200)},
    ),
    "new tokens count more": (
        {"max_length": 900, "min_length": 200, "max_new_tokens": 50, "min_new_tokens": 20},
        {"max_tokens": 50, "min_tokens": 20},
    ),
    "mixed lengths": ({"max_length": 900, "min_new_tokens": 5}, {"max_tokens": TotalLength(900), "min_tokens": 5}),
    "the most counts more": ({"max_new_tokens": 5, "min_new_tokens": 9}, {"max_tokens": 5, "min_tokens": 5}),
    "the least alone": ({"min_new_tokens": 500}, {"min_tokens": DEFAULTS.max_tokens}),
    "stop_strings": ({"stop_strings": ["\n\n", "User:"]}, {"stop": ("\n\n", "User:")}),
    "one stop string": ({"stop_strings": "User:"}, {"stop": "User:"}),
}


@pytest.mark.parametrize(("stated", "expected"), HONOURED.values(), ids=HONOURED)
def test_a_field_that_requests_know_becomes_their_default(tmp_path, caplog, stated, expected):
    defaults = read(tmp_path, eos_token_id=[2, 4], **stated, limits={"vocab_size": 96})

    assert defaults == replace(DEFAULTS, **expected)
    assert caplog.text == ""


NEUTRAL = {
    **{"num_beams": 1, "num_beam_groups": 1, "length_penalty": 2.0, "early_stopping": True, "diversity_penalty": 0.5},
    **{"guidance_scale": 1.0, "penalty_alpha": 0.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0, "top_h": 1.0},
    **{"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "min_length": 0, "bad_words_ids": [], "stop_strings": []},
    **{"suppress_tokens": [], "begin_suppress_tokens": [], "sequence_bias": [], "remove_invalid_values": False},
    **{"encoder_repetition_penalty": 3.0, "encoder_no_repeat_ngram_size": 2, "decoder_start_token_id": 5},
    **{"renormalize_logits": True, "use_cache": False, "cache_implementation": "hybrid", "num_assistant_tokens": 5},
    **{"prompt_lookup_num_tokens": 3, "return_dict_in_generate": True, "output_scores": True, "token_healing": False},
    **{"transformers_version": "4.51.0", "_from_model_config": True, "bos_token_id": 1, "pad_token_id": [0]},
    **{"chat_format": "chatml", "max_window_size": 6144, "num_return_sequences": 1, "max_time": None},
}


def test_neutral_values_and_fields_that_change_no_token_are_silent(tmp_path, caplog):
    assert read(tmp_path, **NEUTRAL) == DEFAULTS
    assert caplog.text == ""


def test_the_defaults_of_transformers_are_neutral_but_for_their_number_of_tokens_and_filter(tmp_path, caplog):
    stated = transformers.GenerationConfig._get_default_generation_params()

    defaults = read(tmp_path, **stated)

    assert defaults == replace(DEFAULTS, temperature=0, top_k=50, max_tokens=TotalLength(20))
    assert caplog.text == ""


CHANGING = {
    **{"num_beams": 4, "num_return_sequences": 2, "penalty_alpha": 0.6, "dola_layers": "high", "constraints": [1]},
    **{"force_words_ids": [[5]], "guidance_scale": 1.5, "watermarking_config": {"bias": 2.0}, "token_healing": True},
    **{"begin_suppress_tokens": [5], "forced_bos_token_id": 0, "forced_eos_token_id": 2, "max_time": 5.0},
    **{"exponential_decay_length_penalty": [5, 1.1], "remove_invalid_values": True},
    **{"top_h": 0.5, "epsilon_cutoff": 3e-4, "eta_cutoff": 1e-3},
    **{"xtc_probability": 0.5, "mirostat": 2, "penalty_last_n": 64},
}


def test_every_field_that_cannot_be_honoured_has_a_case():
    assert CHANGING.keys() == OTHERS.keys() | FILTERS.keys()
    known = {*FIELDS, *OTHERS, *FILTERS} - {"presence_penalty", "frequency_penalty"}  # of other libraries
    known -= {"xtc_probability", "mirostat", "penalty_last_n"}  # of GGUF
    assert known <= vars(transformers.GenerationConfig()).keys()


@pytest.mark.parametrize("name", CHANGING)
def test_a_field_that_cannot_be_honoured_is_named_with_its_value(tmp_path, caplog, name):
    assert read(tmp_path, **{name: CHANGING[name]}) == DEFAULTS

    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"{tmp_path / 'generation_config.json'}: " in record.getMessage()
    assert f"does not honour {name}={CHANGING[name]!r}" in record.getMessage()


@pytest.mark.parametrize("name", FILTERS)
def test_a_filter_does_not_matter_to_greedy_decoding(tmp_path, caplog, name):
    read(tmp_path, **{name: CHANGING[name]}, do_sample=False)

    assert caplog.text == ""


def test_one_warning_names_all_of_them(tmp_path, caplog):
    read(tmp_path, **CHANGING)

    (record,) = caplog.records
    assert all(f"{name}=" in record.getMessage() for name in CHANGING)


PARTS = {
    "biases of several tokens": ({"sequence_bias": [[[5, 6], 1.0], [[7], 1.0]]}, "sequence_bias=", {}),
    "biases beyond the range": ({"sequence_bias": [[[5], 101.0]]}, "sequence_bias=", {}),
    "infinite biases": ({"sequence_bias": [[[5], float("-inf")]]}, "sequence_bias=", {}),
    "too many biases": ({"sequence_bias": [[[i], 1.0] for i in range(5)]}, "sequence_bias=", {}),
    "too many tokens": ({"suppress_tokens": [1, 2, 3, 4, 5], "bad_words_ids": [[7, 8]]}, "suppress_tokens=[1,", {7}),
    "together too many": ({"suppress_tokens": [1, 2, 3], "bad_words_ids": [[7, 8]]}, "bad_words_ids=[[7,", {1, 2, 3}),
    # transformers looks for a stop string among the first tokens too.
    "stop strings after some tokens": ({"stop_strings": ["a"], "min_new_tokens": 3}, "stop_strings=['a']", {}),
}


@pytest.mark.parametrize(("stated", "named", "first_tokens"), PARTS.values(), ids=PARTS)
def test_a_list_that_cannot_be_honoured_is_named_and_others_are_kept(tmp_path, caplog, stated, named, first_tokens):
    defaults = read(tmp_path, **stated, limits={"max_listed_tokens": 4})

    assert caplog.text.count("does not honour") == 1
    assert f"does not honour {named}" in caplog.text
    assert {word[0] for word in defaults.bad_words} == set(first_tokens)
    assert defaults.logit_bias == ()


WRONG = {
    **{"temperature": "hot", "top_k": 1.5, "top_p": 1.2, "min_p": -0.1, "typical_p": 0, "repetition_penalty": 0},
    **{"presence_penalty": 3, "frequency_penalty": "a", "no_repeat_ngram_size": -1, "do_sample": "no"},
    **{"max_new_tokens": 0, "min_new_tokens": -1, "max_length": "512", "min_length": 1.5, "stop_strings": [""]},
    **{"suppress_tokens": [5, "6"], "bad_words_ids": [5], "sequence_bias": {"5": 1.0}},
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_is_refused_by_file_and_field(tmp_path, caplog, name):
    with pytest.raises(ValueError, match="is not allowed: ") as refusal:
        read(tmp_path, **{name: WRONG[name]})

    assert str(refusal.value).startswith(f"{tmp_path / 'generation_config.json'}: {name}={WRONG[name]!r}")


def test_no_file_means_no_defaults(tmp_path):
    assert read_sampling_defaults(Checkpoint(tmp_path)) == DEFAULTS


@pytest.mark.parametrize(
    ("params", "num_prompt_tokens", "expected"),
    [
        ({"max_tokens": TotalLength(20)}, 15, (5, 0)),
        ({"max_tokens": TotalLength(20), "min_tokens": TotalLength(18)}, 15, (5, 3)),
        ({"max_tokens": TotalLength(20), "min_tokens": TotalLength(10)}, 15, (5, 0)),
        ({"max_tokens": TotalLength(20), "min_tokens": 9}, 15, (5, 5)),
        ({"max_tokens": 7, "min_tokens": TotalLength(40)}, 15, (7, 7)),
        ({"max_tokens": 7, "min_tokens": 2}, 15, (7, 2)),
    ],
)
def test_a_total_length_leaves_the_output_what_the_prompt_does_not_take(params, num_prompt_tokens, expected):
    after = SamplingParams(**params).after(num_prompt_tokens)

    assert (after.max_tokens, after.min_tokens) == expected
    assert not {type(after.max_tokens), type(after.min_tokens)} & {TotalLength}
    assert after.after(num_prompt_tokens) == after


def test_a_prompt_of_the_total_length_is_refused():
    with pytest.raises(
        ValueError, match=r"prompt has 20 tokens, and max_tokens=TotalLength\(20\) counts them, so none"
    ):
        SamplingParams(max_tokens=TotalLength(20)).after(20)


def test_total_lengths_are_not_taken_for_numbers_of_new_tokens():
    assert TotalLength(20) != 20
    assert TotalLength(20) != 20
    assert SamplingParams(max_tokens=TotalLength(20)) != SamplingParams(max_tokens=20)
    assert hash(TotalLength(20)) == hash(TotalLength(20))
    assert replace(SamplingParams(max_tokens=TotalLength(20)), max_tokens=4).after(19).max_tokens == 4
    with pytest.raises(ValueError, match=r"max_tokens=TotalLength\(0\) is not allowed"):
        SamplingParams(max_tokens=TotalLength(0))
    with pytest.raises(ValueError, match=r"min_tokens=TotalLength\(6\) is not allowed: .* max_tokens=TotalLength\(5\)"):
        SamplingParams(max_tokens=TotalLength(5), min_tokens=TotalLength(6))
