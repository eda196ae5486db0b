"""What cannot be honoured is refused with the value and the way out, and changes nothing."""

from __future__ import annotations

import dataclasses
import math
import re

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxinfer.config import CacheConfig, EngineConfig, SamplingParams
from jaxinfer.engine.llm import LLM
from jaxinfer.model.cache import page_bytes
from jaxinfer.plan.cache import MemoryQuestion, plan_cache, resolve_max_model_len
from tests.engine.engines import GREEDY, SMALL, num_owned_pages

BAD_PROMPTS = {
    "empty text": ("", "empty"),
    "no token ids": ([], "empty"),
    "empty array": (np.array([], np.int32), "empty"),
    "too long": ([5] * 96, r"96 tokens.*max_model_len is 96.*shorten"),
    "too long text": ("a" * 300, r"300 tokens.*max_model_len is 96.*shorten"),
    "id past the vocabulary": ([5, 96], r"prompt\[1\] is 96.*from 0 to 95"),
    "negative id": ([5, 6, -1], r"prompt\[2\] is -1.*from 0 to 95"),
    "bool": ([True, 5], r"prompt\[0\] is True.*integers"),
    "numpy bool": (np.array([True, False]), r"prompt\[0\] is .*True.*integers"),
    "float": ([5, 6.0], r"prompt\[1\] is 6\.0.*integers"),
    "float array": (np.array([5.0]), r"prompt\[0\] is .*5\.0.*integers"),
    "NaN": ([math.nan], r"prompt\[0\] is nan.*integers"),
    "None inside": ([5, None], r"prompt\[1\] is None.*integers"),
    "huge id": ([2**70], rf"prompt\[0\] is {2**70}.*from 0 to 95"),
    "two dimensions": ([[5, 6], [7, 8]], r"prompt\[0\] is \[5, 6\].*integers"),
    "half a surrogate pair": ("a\ud800", "the prompt cannot be encoded: text has half a surrogate pair"),
}
LONG = {"list": [5] * (2**20 + 1), "array": np.full(2**20 + 1, 5), "range": range(2**40), "no len": range(2**70)}
WRONG_TYPES = {"None": None, "int": 5, "float": 0.5, "dict": {5: 6}, "bytes": b"\x05\x06", "set": {5, 6}}


@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS.values(), ids=BAD_PROMPTS)
def test_add_refuses_a_prompt_it_cannot_honour(llm, prompt, message):
    with pytest.raises(ValueError, match=message):
        llm.add(prompt, GREEDY)

    assert not llm.has_unfinished


@pytest.mark.parametrize("prompt", LONG.values(), ids=LONG)
@pytest.mark.parametrize("wrapped", [False, True], ids=["alone", "in a list"])
def test_the_length_of_a_prompt_has_the_models_bound_alone_and_in_a_list(llm, prompt, wrapped):
    with pytest.raises(ValueError, match=r"^prompt 0: prompt has \d{7,} tokens but max_model_len is 96"):
        llm.generate([prompt] if wrapped else prompt, GREEDY, show_progress=False)


@pytest.mark.parametrize("prompt", WRONG_TYPES.values(), ids=WRONG_TYPES)
@pytest.mark.parametrize("wrapped", [False, True], ids=["alone", "in a list"])
def test_generate_refuses_a_prompt_of_a_wrong_type(llm, prompt, wrapped):
    with pytest.raises((ValueError, TypeError), match="prompt"):
        llm.generate(["a", prompt] if wrapped else prompt, GREEDY, show_progress=False)


@pytest.mark.parametrize("prompt", WRONG_TYPES.values(), ids=WRONG_TYPES)
def test_add_refuses_a_prompt_of_a_wrong_type(llm, prompt):
    with pytest.raises((ValueError, TypeError), match="prompt"):
        llm.add(prompt, GREEDY)


@pytest.mark.parametrize("params", [{"temperature": 0}, {}, 0.5, "greedy"], ids=repr)
@pytest.mark.parametrize("method", ["add", "generate", "stream"])
def test_sampling_params_of_a_wrong_type_are_refused(llm, params, method):
    with pytest.raises((ValueError, TypeError), match="SamplingParams"):
        getattr(llm, method)([5, 6], params)


BAD_TERMS = [
    *(("cache_salt", value) for value in ("", 5, b"salt", ["a"])),
    *(("priority", value) for value in ("urgent", "", 1, None)),
    *(("tenant", value) for value in (None, 5, b"a")),
    *(("deadline", value) for value in (0, -1.0, math.inf, np.float16("inf"), math.nan, "soon", True)),
]


@pytest.mark.parametrize(("name", "value"), BAD_TERMS, ids=repr)
@pytest.mark.parametrize("method", ["add", "generate", "stream"])
def test_terms_that_cannot_be_honoured_are_refused(llm, method, name, value):
    with pytest.raises(ValueError, match=re.escape(f"{name}={value!r} is not allowed: give ")):
        getattr(llm, method)([5, 6], GREEDY, **{name: value})

    assert not llm.has_unfinished


@pytest.mark.parametrize("name", ["tenant", "cache_salt"])
def test_names_have_a_bound(llm, name):
    llm.abort(llm.add([5, 6], GREEDY, **{name: "a" * 4096}))
    llm.step()
    with pytest.raises(ValueError, match=f"^{name} has 4,097 characters, more than 4,096; give a shorter one"):
        llm.add([5, 6], GREEDY, **{name: "a" * 4097})

    assert not llm.has_unfinished


@pytest.mark.parametrize("method", ["add", "generate", "stream"])
def test_terms_that_do_not_exist_are_refused(llm, method):
    message = r"^unknown argument salt='a'; the terms of a request are priority, tenant, deadline, cache_salt"
    with pytest.raises(TypeError, match=message):
        getattr(llm, method)([5, 6], GREEDY, salt="a")

    assert not llm.has_unfinished


WRONG_ARGUMENTS = {
    "model": ({"model": 5}, "model=5 is not allowed: model must be a folder or Hub id"),
    "empty mapping": ({"config": {}}, r"config={} is not allowed: config must be an EngineConfig"),
    "sampling": ({"config": SamplingParams()}, r"config=SamplingParams\(.*must be an EngineConfig"),
    "processors": ({"logits_processors": ["a"]}, r"logits_processors=\['a'\] is not allowed.*mapping"),
    "no function": ({"logits_processors": {"a": 5}}, r"logits_processors\['a'\]=5 is not allowed.*a function"),
}


@pytest.mark.parametrize(("arguments", "message"), WRONG_ARGUMENTS.values(), ids=WRONG_ARGUMENTS)
def test_the_llm_refuses_arguments_of_wrong_types_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        LLM(**arguments)


WRONG_PROCESSORS = {
    "nothing": (lambda logits, tokens, length, argument: None, r"logits_processors\['p'\] returned None; return"),
    "one number": (lambda logits, *_: logits.max(), r"logits_processors\['p'\] returned .*return the logits, f32\["),
    "truth values": (lambda logits, *_: logits > 0, r"logits_processors\['p'\] returned .*return the logits, f32\["),
    "three arguments": (lambda logits, tokens, length: logits, r"logits_processors\['p'\] raised TypeError"),
    "a slice": (lambda logits, tokens, length, _: logits + tokens[:length].sum(), r"\['p'\] raised .*use jnp.where"),
    "a branch": (lambda logits, *others: logits if others[-1] > 0 else -logits, r"\['p'\] raised .*use jnp.where"),
}


@pytest.mark.parametrize(("processor", "message"), WRONG_PROCESSORS.values(), ids=WRONG_PROCESSORS)
def test_a_logits_processor_that_cannot_be_a_part_of_a_step_is_refused_by_name(checkpoint, processor, message):
    with pytest.raises(ValueError, match=message):
        LLM(checkpoint, config=EngineConfig(**SMALL), logits_processors={"p": processor})


def test_generate_refuses_what_is_no_truth_value(llm):
    with pytest.raises(ValueError, match="show_progress='no' is not allowed"):
        llm.generate([5], GREEDY, show_progress="no")


@pytest.mark.parametrize("array", [np.array, jnp.array, torch.tensor], ids=["numpy", "jax", "torch"])
def test_arrays_are_prompts(llm, array):
    expected = [llm.generate(prompt, GREEDY, show_progress=False)[0].token_ids for prompt in ([5, 6], [7, 8])]

    for prompts in ([array([5, 6]), array([7, 8])], array([[5, 6], [7, 8]])):
        assert [c.token_ids for c in llm.generate(prompts, GREEDY, show_progress=False)] == expected
    assert llm.generate(array([5, 6]), GREEDY, show_progress=False)[0].token_ids == expected[0]
    assert list(llm.stream(array([7, 8]), GREEDY))[-1].completion.token_ids == expected[1]


def test_one_bad_prompt_of_many_is_named_and_nothing_is_computed(llm):
    with pytest.raises(ValueError, match=r"prompt 2: prompt\[0\] is 96"):
        llm.generate(["a", "b", [96], "c"], GREEDY)

    assert not llm.has_unfinished


@pytest.mark.parametrize("bad", [["a", ""], [[5] * 96], [[-1]]], ids=["empty", "too long", "negative"])
def test_after_a_refusal_the_llm_works_as_before(llm, bad):
    expected = llm.generate("abc", GREEDY, show_progress=False)[0].token_ids

    with pytest.raises(ValueError, match="prompt"):
        llm.generate(bad, GREEDY)

    assert num_owned_pages(llm) == 0
    assert llm.generate("abc", GREEDY, show_progress=False)[0].token_ids == expected


@pytest.mark.parametrize(("num_params", "num_prompts"), [(1, 2), (3, 2), (0, 2), (2, 1), (1, 0)])
def test_a_wrong_number_of_sampling_params_is_refused(llm, num_params, num_prompts):
    with pytest.raises(ValueError, match=f"{num_params} SamplingParams for {num_prompts} prompts; give one"):
        llm.generate(["a"] * num_prompts, [GREEDY] * num_params)


@pytest.mark.parametrize(("name", "limit"), [("log_probs", 4), ("prompt_log_probs", 3)])
def test_more_log_probs_than_compiled_are_refused(llm, name, limit):
    message = rf"^{name}={limit + 1} is more than max_{name}={limit}; ask for fewer or raise EngineConfig.max_{name}"
    with pytest.raises(ValueError, match=message):
        llm.add("a", SamplingParams(**{name: limit + 1}))


@pytest.mark.parametrize("name", ["log_probs", "prompt_log_probs"])
def test_more_log_probs_than_the_vocabulary_has_tokens_are_refused(llm, name):
    params = dataclasses.replace(GREEDY, **{name: 97})
    with pytest.raises(ValueError, match=f"^{name}=97 is more than the vocabulary of 96; ask for fewer"):
        llm.add("a", params)


def test_a_text_that_no_tokens_could_spell_is_refused_before_it_is_encoded(llm, monkeypatch):
    encoded = []
    monkeypatch.setattr(llm.tokenizer, "encode", encoded.append)

    message = (
        r"prompt has 10,000 characters, and fewer than max_model_len=96 tokens of at most 5 characters cannot spell"
    )
    with pytest.raises(ValueError, match=message):
        llm.add("a" * 10_000, GREEDY)

    assert not encoded


@pytest.mark.parametrize("penalty", [51, -51.0, 1e308])
def test_a_length_penalty_beyond_any_float_is_refused(llm, penalty):
    with pytest.raises(ValueError, match=r"length_penalty=.* at least -50.0 and at most 50.0"):
        llm.beam_search([5], num_beams=2, max_tokens=3, length_penalty=penalty)


@pytest.mark.parametrize("name", ["n", "best_of"])
def test_more_samples_than_a_prompt_may_have_are_refused(llm, name):
    message = rf"^{name}=50000000 is more than max_samples=128; ask for fewer or raise EngineConfig.max_samples"
    with pytest.raises(ValueError, match=message):
        llm.add("x", dataclasses.replace(SamplingParams(max_tokens=1), **{name: 50_000_000}))

    assert not llm.has_unfinished


def test_min_tokens_that_the_model_has_no_room_for_are_refused(llm):
    llm.abort(llm.add([5] * 90, SamplingParams(min_tokens=6, max_tokens=99)))
    llm.step()

    with pytest.raises(
        ValueError, match=r"min_tokens=7 after a prompt of 90 tokens.*max_model_len=96 leaves; lower it"
    ):
        llm.add([5] * 90, SamplingParams(min_tokens=7, max_tokens=99))


@pytest.mark.parametrize("stop", ["x" * 4097, ["x" * 7] * 600], ids=["one", "many"])
def test_stop_strings_have_a_bound(stop):
    with pytest.raises(ValueError, match=r"stop has 4,\d+ characters in [\d,]+ strings; give at most 4,096 in all"):
        SamplingParams(stop=stop)


def test_those_of_prompts_are_refused_where_nothing_was_compiled_for_them(mute_llm):
    with pytest.raises(ValueError, match="prompt_log_probs=0 is more than max_prompt_log_probs=None; ask for fewer or"):
        mute_llm.add([5], SamplingParams(prompt_log_probs=0, max_tokens=1))


def test_as_many_log_probs_as_compiled_are_honoured(llm):
    completion = llm.generate("a", SamplingParams(log_probs=4, max_tokens=1), show_progress=False)[0]

    assert [len(top) for top in completion.top_log_probs] == [4]


def test_a_stop_token_outside_the_vocabulary_is_refused(llm):
    with pytest.raises(ValueError, match=r"stop_token_ids\[0\] is 96.*from 0 to 95"):
        llm.add("a", SamplingParams(stop_token_ids=(96,)))


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 2**31 - 1},
        {"temperature": 1e-50},
        {"temperature": 1e-40},
        {"temperature": 3e38},
        {"min_p": 1e-50},
        {"top_p": 1e-50},
        {"max_tokens": 2**31 - 1},
        {"seed": 2**64 - 1},
        {"seed": np.int64(7)},
        {"temperature": np.float32(0.5)},
        {"top_k": np.int64(3)},
    ],
    ids=repr,
)
def test_what_sampling_params_accept_the_engine_runs(llm, options):
    params = SamplingParams(**{"max_tokens": 4, "seed": 0, "ignore_eos": True, **options})

    completion = llm.generate("a", params, show_progress=False)[0]

    assert all(math.isfinite(x) for x in completion.log_probs)


@pytest.mark.parametrize("temperature", [1e-50, 1e-40, 1.2e-38, 1e-37, 1e-20, 1e-6])
def test_a_tiny_temperature_takes_the_most_probable_token(llm, temperature):
    greedy = llm.generate("a", GREEDY, show_progress=False)[0].token_ids
    params = SamplingParams(temperature=temperature, seed=0, max_tokens=8, ignore_eos=True)

    assert llm.generate("a", params, show_progress=False)[0].token_ids == greedy


def test_a_length_beyond_the_models_is_refused(llm):
    with pytest.raises(ValueError, match=r"max_model_len=257 is more than the model's 256 positions; lower it"):
        resolve_max_model_len(llm.model_config, EngineConfig(max_model_len=257))


def question_of(llm, config):
    return MemoryQuestion(model=llm.model_config, config=config, dtype="float32")


def test_a_cache_smaller_than_one_page_is_refused(llm):
    with pytest.raises(ValueError, match=r"cache_bytes=100 is less than one page of \d+ bytes; raise"):
        plan_cache(question_of(llm, EngineConfig(cache_bytes=100)))


def test_the_pool_fills_the_bytes_allowed(llm):
    one_page = page_bytes(llm.model_config, CacheConfig(num_pages=1, page_size=16))

    config = EngineConfig(cache_bytes=3 * one_page + 1, page_size=16)

    assert plan_cache(question_of(llm, config)).num_pages == 3


def test_the_pool_is_no_larger_than_all_rows_can_use(llm):
    config = EngineConfig(max_num_seqs=3, page_size=16, max_model_len=33)

    assert plan_cache(question_of(llm, config)).num_pages == 3 * 3


@pytest.mark.parametrize(("option", "value"), [("max_model_len", 257), ("cache_bytes", 100)])
def test_the_llm_refuses_a_configuration_that_the_model_does_not_fit(checkpoint, option, value):
    with pytest.raises(ValueError, match=f"{option}={value}"):
        LLM(checkpoint, config=EngineConfig(**{**SMALL, option: value}))


@pytest.mark.parametrize(("num_prompt_tokens", "max_tokens"), [(33, 1), (30, 4), (32, 2), (1, 33)])
def test_a_request_larger_than_the_pool_is_refused(mute_llm, num_prompt_tokens, max_tokens):
    with pytest.raises(ValueError, match=r"may need 33 slots of the cache, which has 32; lower max_tokens"):
        mute_llm.add([5] * num_prompt_tokens, SamplingParams(max_tokens=max_tokens))


@pytest.mark.parametrize(("num_prompt_tokens", "max_tokens"), [(32, 1), (30, 3), (1, 32)])
def test_a_request_that_just_fits_the_pool_is_honoured(mute_llm, num_prompt_tokens, max_tokens):
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)

    completion = mute_llm.generate([5] * num_prompt_tokens, params, show_progress=False)[0]

    assert len(completion.token_ids) == max_tokens


def test_text_is_refused_without_a_tokenizer(mute_llm):
    with pytest.raises(ValueError, match=r"no tokenizer\.json or tokenizer\.model; give token ids"):
        mute_llm.add("text")


def test_stop_strings_are_refused_without_a_tokenizer(mute_llm):
    with pytest.raises(ValueError, match=r"stop=\('a',\) needs a tokenizer"):
        mute_llm.add([5], SamplingParams(max_tokens=1, stop=("a",)))
