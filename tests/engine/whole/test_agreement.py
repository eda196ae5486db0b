"""An engine's log-probabilities are those that training differentiates, and an agreement says if they are not."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxinfer import SamplingParams, load_checkpoint, log_probs
from tests.display.test_html import Page
from tests.engine.engines import generate, small_engine

# Texts of at most 16 and of at most 64 tokens, with their samples: two gradients are compiled.
PROMPTS = [[*range(5, 14)], [*range(1, 40)], "a b c d e"]
SAMPLED = SamplingParams(temperature=0.8, top_k=20, seed=3, max_tokens=7, ignore_eos=True)


def agreement(llm, texts):
    return llm.agreement(texts, show_progress=False)


@pytest.fixture
def completions(llm):
    return generate(llm, PROMPTS, SAMPLED)


def moved(values, index, num_ulps):
    """The values with one of them moved by a number of floats towards 0."""
    values = np.array(values, np.float32)
    for _ in range(num_ulps):
        values[index] = np.nextafter(values[index], np.float32(0))
    return tuple(values.tolist())


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="bits are promised on CPU")
def test_on_a_cpu_they_are_equal_for_prompts_and_for_sampled_tokens(llm, completions):
    described = generate(llm, PROMPTS, replace(SAMPLED, prompt_log_probs=0))

    of_prompts, of_samples, of_both = (agreement(llm, texts) for texts in (PROMPTS, completions, described))

    assert [text.num_tokens for text in of_prompts.texts] == [8, 38, 8]
    assert [text.num_tokens for text in of_samples.texts] == [7, 7, 7]
    assert [text.num_tokens for text in of_both.texts] == [15, 45, 15]
    for result in (of_prompts, of_samples, of_both):
        assert (result.max_ulps, result.max_difference, result.dtype) == (0, 0.0, "float32")
        assert result.device == jax.devices()[0].device_kind


def test_a_difference_is_found_with_its_place(llm, completions):
    first, second, third = completions
    changed = replace(second, log_probs=moved(moved(second.log_probs, 2, 3), 6, 40))
    slightly = replace(third, log_probs=moved(third.log_probs, 0, 1))

    result = agreement(llm, [first, changed, slightly])

    assert [text.max_ulps for text in result.texts] == [0, 40, 1]
    assert (result.worst, result.max_ulps) == (1, 40)
    text = result.texts[1]
    assert (text.position, text.token_id) == (39 + 6, second.token_ids[6])
    assert (text.engine_log_prob, text.training_log_prob) == (changed.log_probs[6], second.log_probs[6])
    assert result.max_difference == text.max_difference == abs(changed.log_probs[6] - second.log_probs[6])
    assert repr(result).startswith("<Agreement of 21 log-probabilities in 3 texts: at most 40 ulps and ")
    assert f"attext 1, position 45, token {text.token_id}" in Page(result._repr_html_()).text


def test_it_compares_with_the_present_parameters(checkpoint):
    """As training would after a step of its own: the text's tokens come from older parameters."""
    params, config = load_checkpoint(checkpoint, "float32")
    scaled = jax.tree.map(lambda array: array * 1.01, params)
    with small_engine(checkpoint) as llm:
        (completion,) = generate(llm, PROMPTS[:1], SAMPLED)
        llm.update_params(scaled)
        result = agreement(llm, completion)

    tokens = np.array([completion.prompt_token_ids + completion.token_ids], np.int32)
    values = np.asarray(log_probs(scaled, tokens, config=config, page_size=16))[0, 8:]
    assert result.max_difference == pytest.approx(np.abs(values - np.array(completion.log_probs)).max(), rel=1e-3)
    assert result.max_ulps > 1000


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([], "texts is empty; give at least one"),
        ([[5, 6], [7]], r"texts\[1\] has no log-probabilities to compare: no token of it follows another one"),
        ([[5, 96]], "prompt 0: prompt.* token ids of this model are integers from 0 to 95"),
    ],
)
def test_texts_without_log_probabilities_are_refused(llm, texts, message):
    with pytest.raises(ValueError, match=message):
        agreement(llm, texts)


def test_an_engine_that_describes_no_prompts_says_what_to_raise(checkpoint):
    with (
        small_engine(checkpoint) as llm,
        pytest.raises(ValueError, match=r"raise EngineConfig\.max_prompt_log_probs"),
    ):
        agreement(llm, [[5, 6]])


def test_quantized_weights_are_refused(checkpoint):
    with small_engine(checkpoint, quantization="int8") as llm:
        (completion,) = generate(llm, [[5, 6]], SAMPLED)
        with pytest.raises(ValueError, match="quantized weights have no gradient"):
            agreement(llm, completion)
