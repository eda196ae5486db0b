"""vLLM's interface: a script written for it with another import line, and what is refused by name."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import jaxinfer
from jaxinfer.compat.vllm import LLM, PoolingParams, SamplingParams, TextPrompt, TokensPrompt
from jaxinfer.compat.vllm.lora.request import LoRARequest
from jaxinfer.compat.vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from tests.adapters import save_adapter
from tests.oracles import save_random_checkpoint

LIMITS: dict[str, Any] = {
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "num_gpu_blocks_override": 32,
    "max_listed_tokens": 200,  # a field of EngineConfig that vLLM has not
}


@pytest.fixture(scope="module")
def llm():
    with LLM(**LIMITS, seed=7, enforce_eager=True, swap_space=4, trust_remote_code=False) as llm:
        yield llm


def native(llm, prompts, **params):
    return llm.native.generate(prompts, jaxinfer.SamplingParams(**params), show_progress=False)


def test_a_prompt_yields_one_output_with_its_samples(llm):
    params = SamplingParams(n=2, temperature=0.8, top_p=0.9, top_k=-1, seed=1, max_tokens=6)

    outputs = llm.generate(["def add(", "import "], params, use_tqdm=False)

    expected = native(llm, ["def add(", "import "], n=2, temperature=0.8, top_p=0.9, seed=1, max_tokens=6)
    assert [output.prompt for output in outputs] == ["def add(", "import "]
    samples = [sample for output in outputs for sample in output.outputs]
    assert [(s.index, s.text, s.token_ids) for s in samples] == [
        (c.sample_index, c.text, list(c.token_ids)) for c in expected
    ]
    assert all(output.finished and sample.finished() for output in outputs for sample in output.outputs)
    assert samples[0].logprobs is None
    assert samples[0].cumulative_logprob is None


def test_defaults_are_those_of_vllm(llm):
    (output,) = llm.generate("def ", SamplingParams(ignore_eos=True))

    assert len(output.outputs[0].token_ids) == 16
    assert output.outputs[0].finish_reason == "length"


def test_unseeded_requests_are_the_same_in_each_start_of_a_seed():
    def texts(seed):
        with LLM(**LIMITS, seed=seed) as fresh:
            return [o.outputs[0].token_ids for o in fresh.generate(["x = ", "x = "], SamplingParams(min_tokens=16))]

    first, again, another = texts(0), texts(0), texts(1)

    assert first == again
    assert first != another
    assert first[0] != first[1]


def test_each_form_of_a_prompt_is_taken(llm):
    params = SamplingParams(temperature=0, max_tokens=4)
    ids = llm.native.tokenizer.encode("def add(")

    outputs = [
        *llm.generate("def add(", params),
        *llm.generate([TextPrompt(prompt="def add("), TokensPrompt(prompt_token_ids=ids)], [params, params]),
        *llm.generate(np.array(ids), params),
        *llm.generate(prompt_token_ids=[ids], sampling_params=params),
    ]

    assert len({output.outputs[0].text for output in outputs}) == 1
    assert {tuple(output.prompt_token_ids) for output in outputs} == {tuple(ids)}
    assert [output.prompt for output in outputs] == ["def add(", "def add(", None, None, None]


def test_log_probabilities_list_the_token_itself_and_the_most_probable_ones(llm):
    params = SamplingParams(temperature=1.0, seed=3, logprobs=2, prompt_logprobs=1, max_tokens=5)

    (output,) = llm.generate("import numpy as np", params)

    (expected,) = native(
        llm, "import numpy as np", seed=3, log_probs=2, prompt_log_probs=1, max_tokens=5, temperature=1.0
    )
    sample = output.outputs[0]
    for token_id, value, listed, top in zip(
        sample.token_ids, expected.log_probs, sample.logprobs, expected.top_log_probs, strict=True
    ):
        assert next(iter(listed)) == token_id
        assert listed[token_id].logprob == value
        assert listed[token_id].decoded_token == llm.native.tokenizer.text_of(token_id)
        assert {i: item.logprob for i, item in listed.items() if item.rank} == top
        assert sorted(item.rank for item in listed.values() if item.rank) == [1, 2]
    assert sample.cumulative_logprob == pytest.approx(sum(expected.log_probs))
    assert output.prompt_logprobs[0] is None
    own = [listed[i].logprob for i, listed in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)]
    assert own == list(expected.prompt_log_probs[1:])
    assert math.isclose(
        max(item.logprob for item in output.prompt_logprobs[1].values()), max(expected.prompt_top_log_probs[1].values())
    )


def test_log_probabilities_of_the_tokens_alone(llm):
    (output,) = llm.generate("x = ", SamplingParams(temperature=0, logprobs=0, prompt_logprobs=0, max_tokens=2))

    assert [list(listed) for listed in output.outputs[0].logprobs] == [[i] for i in output.outputs[0].token_ids]
    assert [list(listed) for listed in output.prompt_logprobs[1:]] == [[i] for i in output.prompt_token_ids[1:]]


def test_the_stop_that_ended_a_text_is_named(llm):
    whole = llm.generate("import ", SamplingParams(temperature=0, max_tokens=12))[0].outputs[0]
    stop, token = whole.text[4:6], whole.token_ids[3]

    def ended(**params):
        return llm.generate("import ", SamplingParams(temperature=0, max_tokens=12, **params))[0].outputs[0]

    by_text, with_stop, by_token = (
        ended(stop=["never", stop]),
        ended(stop=stop, include_stop_str_in_output=True),
        ended(stop_token_ids=[token]),
    )

    assert (by_text.finish_reason, by_text.stop_reason) == ("stop", stop)
    assert ended(stop=np.array(["never", stop]), stop_token_ids=np.array([], int)).stop_reason == stop
    assert by_text.text == whole.text[: whole.text.index(stop)]
    assert with_stop.text == by_text.text + stop
    assert (by_token.stop_reason, by_token.token_ids[-1]) == (token, token)
    assert ended().stop_reason is None
    assert ended(detokenize=False).text == ""


@pytest.mark.parametrize(
    ("structure", "pattern"),
    [
        ({"regex": "[ab]{3}"}, "[ab]{3}"),
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"json": {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}}, r'\{.*"a".*\}'),
        ({"json_object": True}, r"\{.*\}"),
    ],
)
def test_a_structure_binds_the_output(llm, structure, pattern):
    own = StructuredOutputsParams(**structure)
    for name in ("structured_outputs", "guided_decoding"):
        params = SamplingParams(max_tokens=100, seed=2, temperature=0.7)
        setattr(params, name, own)
        (output,) = llm.generate("x = ", params)
        if output.outputs[0].finish_reason == "stop":
            assert re.fullmatch(pattern, output.outputs[0].text, re.DOTALL)
        else:
            assert "json_object" in structure  # a text of any length


def test_words_are_ruled_out_in_both_spellings(llm):
    text = llm.generate("import ", SamplingParams(temperature=0, max_tokens=1))[0].outputs[0].text
    encode = llm.native.tokenizer.encode

    ruled_out = SamplingParams(bad_words=[text.strip()]).native(llm.native.tokenizer).bad_words

    assert tuple(encode(text.strip(), add_special_tokens=False)) in ruled_out
    without = llm.generate("import ", SamplingParams(temperature=0, max_tokens=4, bad_words=[text.strip()]))
    assert not without[0].outputs[0].text.startswith(text)


def test_a_conversation_is_rendered_by_its_template_with_tools(llm):
    turns = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    template = turns + "{% if tools %}{{ tools | tojson }}{% endif %}>"
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]

    outputs = llm.chat([messages, messages], SamplingParams(max_tokens=2), chat_template=template, tools=tools)

    assert outputs[0].prompt.startswith("<user>Hi")
    assert json.loads(outputs[0].prompt[len("<user>Hi") : -1]) == tools
    assert outputs[0].prompt_token_ids == outputs[1].prompt_token_ids
    assert outputs[0].prompt_token_ids == llm.native.tokenizer.encode(outputs[0].prompt, add_special_tokens=False)


def test_a_special_token_that_is_a_stop_string_is_named(llm):
    (name, token_id), *_ = llm.native.tokenizer.special_tokens.items()
    params = SamplingParams(stop=[name], allowed_token_ids=[token_id], ignore_eos=True, include_stop_str_in_output=True)

    (output,) = llm.generate("def ", params)

    assert (output.outputs[0].stop_reason, output.outputs[0].text) == (name, name)


def test_embeddings(llm):
    outputs = llm.embed(
        ["def add(", {"prompt": "import ", "prompt_token_ids": None}], pooling_params=[PoolingParams()] * 2
    )
    raw = llm.embed("def add(", pooling_params=PoolingParams(normalize=False))

    vector = np.array(outputs[0].outputs.embedding)
    assert len(outputs) == 2
    assert np.linalg.norm(vector) == pytest.approx(1)
    assert outputs[0].outputs.hidden_size == llm.native.model_config.hidden_size
    np.testing.assert_allclose(vector, np.array(raw[0].outputs.embedding) / np.linalg.norm(raw[0].outputs.embedding))


def test_adapters_are_loaded_when_a_prompt_names_them(tmp_path):
    base = save_random_checkpoint(tmp_path / "base", "llama", num_hidden_layers=1)
    loras = [LoRARequest(f"a{i}", i, str(save_adapter(tmp_path / f"a{i}", base, rank=2, seed=i))) for i in range(2)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(base, **LIMITS, enable_lora=True, max_lora_rank=4) as llm:
        prompt = TokensPrompt(prompt_token_ids=[5, 6, 7])
        mixed = llm.generate([prompt] * 4, params, lora_request=[loras[0], None, loras[1], loras[0]])
        alone = [llm.generate(prompt, params, lora_request=lora)[0] for lora in (*loras, None)]

    tokens = [output.outputs[0].token_ids for output in mixed]
    first, second, plain = (output.outputs[0].token_ids for output in alone)
    assert tokens == [first, plain, second, first]
    assert len({tuple(first), tuple(second), tuple(plain)}) == 3
    assert mixed[2].lora_request == loras[1]
    assert [int(output.request_id) for output in mixed] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tokenizer": "another"}, ValueError, "the tokenizer is that of the checkpoint"),
        ({"quantization": "awq"}, ValueError, "the checkpoint is not packed; leave it out"),
        ({"cpu_offload_gb": 4}, ValueError, "cpu_offload_gb=4 is not allowed: give 0"),
        ({"pipeline_parallel_size": 2}, ValueError, r"stages=2\) needs 2 devices, and this process has 1"),
        ({"kv_cache_dtype": "fp8_e5m2"}, ValueError, "kv_cache_dtype='fp8_e5m2' is not allowed"),
        ({"speculative_config": {"method": "ngram", "acceptance_method": "x"}}, ValueError, "acceptance_method"),
        ({"speculative_config": {}}, ValueError, "names no model"),
        ({"limit_mm_per_prompt": {"image": 1}}, TypeError, "no parameter limit_mm_per_prompt"),
        ({"max_modle_len": 5}, TypeError, "did you mean max_model_len"),
        ({"tensor_paralel_size": 2}, TypeError, "did you mean tensor_parallel_size"),
        ({"load_format": "dummy"}, ValueError, "load_format='dummy' is not allowed"),
        ({"disable_log_stats": False}, ValueError, "disable_log_stats=False is not allowed"),
        ({"revision": "v1"}, ValueError, "needs a model on the Hub"),
        ({"gpu_memory_utilization": 1.5}, ValueError, "gpu_memory_utilization=1.5"),
        ({"dtype": "float8"}, ValueError, "dtype"),
        ({"model": "owner/no-such-model-at-all", "revision": "v1"}, ValueError, "owner/no-such-model-at-all@v1"),
    ],
)
def test_what_cannot_be_honoured_is_refused_before_a_model_is_loaded(options, error, message, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(error, match=message):
        LLM(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"best_of": 3}, "no parameter best_of"),
        ({"logits_processors": [len]}, "no parameter logits_processors"),
        ({"max_new_tokens": 3}, "max_new_tokens is max_tokens here"),
        ({"logprobs": -1}, "logprobs=-1"),
        ({"spaces_between_special_tokens": 1}, "spaces_between_special_tokens=1"),
        ({"detokenize": False, "stop": "x"}, "needs text"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"bad_words": "word"}, "a list of words"),
        ({"bad_words": ["word", " "]}, "a list of words"),
        ({"structured_outputs": StructuredOutputsParams()}, "0 kinds of structure"),
        (
            {
                "structured_outputs": StructuredOutputsParams(regex="a"),
                "guided_decoding": StructuredOutputsParams(regex="b"),
            },
            "are both given",
        ),
        ({"structured_outputs": StructuredOutputsParams(regex="a", json_object=True)}, "2 kinds of structure"),
    ],
)
def test_parameters_are_refused_by_name(options, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        SamplingParams(**options)


def test_what_a_call_does_not_take_is_refused_by_name(llm):
    with pytest.raises(TypeError, match="priority"):
        llm.generate("x", priority=[1])
    with pytest.raises(ValueError, match="enable_lora=True"):
        llm.generate("x", lora_request=LoRARequest("a", 1, "path"))
    with pytest.raises(TypeError, match="max_tokens belongs to SamplingParams"):
        llm.generate("x", max_tokens=16)
    for given in ([SamplingParams()], []):
        with pytest.raises(ValueError, match=f"sampling_params has {len(given)} items for 2 prompts"):
            llm.generate(["x", "y"], given)
    for own in (jaxinfer.SamplingParams(), {"temperature": 0}, "greedy"):
        with pytest.raises(ValueError, match="sampling_params"):
            llm.generate("x", own)
    with pytest.raises(ValueError, match="lora_request='a'"):
        llm.generate("x", lora_request="a")
    unknown: dict[str, Any] = {"dimensions": 5}
    with pytest.raises(TypeError, match="dimensions"):
        StructuredOutputsParams(**unknown)
    with pytest.raises(TypeError, match="dimensions"):
        PoolingParams(**unknown)
    with pytest.raises(ImportError, match=r"jaxinfer\.AsyncLLM serves an event loop"):
        from jaxinfer.compat.vllm import AsyncLLMEngine  # noqa: F401
    with pytest.raises(AttributeError, match=r"llm\.embed"):
        llm.encode(["x"])
    with pytest.raises(ValueError, match="are both given"):
        llm.generate("x", prompt_token_ids=[1])
    with pytest.raises(ValueError, match="leave out multi_modal_data"):
        llm.generate({"prompt": "x", "multi_modal_data": {"image": None}})
    assert llm.generate([]) == []


def test_facts_that_scripts_read(llm):
    params = llm.get_default_sampling_params()
    params.max_tokens = 3
    params.output_kind = RequestOutputKind.FINAL_ONLY

    params.stop_token_ids.append(5)
    assert llm.llm_engine.model_config.max_model_len == 256
    assert llm.generate("x", params.clone())[0].outputs[0].finish_reason in ("stop", "length")


STANDS_IN = """
import importlib.metadata, importlib.util
from jaxinfer.compat.vllm.stand_in import stand_in
stand_in()
stand_in()
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.lora.request import LoRARequest
from vllm.renderers.hf import resolve_chat_template
from vllm.tokenizers import get_tokenizer
import vllm.sampling_params, vllm.logprobs
from vllm.entrypoints.llm import LLM as same
assert same is LLM and vllm.logprobs.Logprob
assert importlib.util.find_spec("vllm") is not None
assert importlib.metadata.version("vllm") == vllm.__version__
print(LLM.__module__)
"""


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM itself is installed")
def test_programs_that_import_vllm_find_this_package():
    ended = subprocess.run([sys.executable, "-c", STANDS_IN], capture_output=True, text=True, timeout=120)

    assert (ended.returncode, ended.stdout) == (0, "jaxinfer.compat.vllm.llm\n"), ended.stderr
