"""Log-probabilities of texts are those of the engine to the bit; their gradient is that of another framework."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from jaxinfer import EngineConfig, SamplingParams, load_checkpoint, log_probs
from jaxinfer.engine.engine import BUNDLED_MODEL
from jaxinfer.engine.llm import LLM
from tests.exhaustive import exhaustive_but
from tests.on_demand import steps_on_demand
from tests.on_devices import run_on_devices
from tests.oracles import load_reference, save_random_checkpoint

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="bits are promised on CPU")

LIMITS = EngineConfig(max_num_seqs=3, max_num_batched_tokens=16, max_model_len=96, page_size=16)
# Tied weights and plain layers, softcaps and windows, two ropes, shared keys and values with embeddings for each layer,
# experts, sinks, latents with a shared expert, state spaces, some of them beside attention, selective scans, gated
# delta nets, the same with gated attention.
FAMILIES = (
    *("llama", "gemma2", "gemma3_text", "gemma4_text", "mixtral", "gpt_oss", "deepseek_v3"),
    *("falcon_h1", "jamba", "mamba", "mamba2", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
)
# Gradients of these are compared in every run, those of the others with `-m exhaustive`.
IN_EVERY_RUN = ("gemma3_text", "gemma4_text", "gpt_oss", "deepseek_v3", "jamba", "qwen3_next")
OVERRIDES = {
    "llama": {"tie_word_embeddings": True},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"]},
    "gemma4_text": {"num_hidden_layers": 4},
    **{family: {"full_attention_interval": 2} for family in ("qwen3_5_text", "qwen3_5_moe_text")},
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return {
        family: save_random_checkpoint(
            tmp_path_factory.mktemp(family), family, **{"num_hidden_layers": 2, **OVERRIDES.get(family, {})}
        )
        for family in FAMILIES
    }


def test_bits_are_those_that_the_engine_reports():
    """Of the bundled model; `tests/engine/exactness/test_families.py` has those of every family."""
    params, config = load_checkpoint(BUNDLED_MODEL, "float32")
    prompts = [[5, 6, 7], [*range(1, 40)], [9]]
    sampling = [SamplingParams(temperature=t, seed=3, max_tokens=24, ignore_eos=True) for t in (0, 1, 0.7)]
    with steps_on_demand(), LLM(BUNDLED_MODEL, dtype="float32", config=LIMITS) as llm:
        completions = llm.generate(prompts, sampling, show_progress=False)
    texts = [[*prompt, *c.token_ids] for prompt, c in zip(prompts, completions, strict=True)]
    width = max(map(len, texts))
    tokens = np.array([[*text, *[1] * (width - len(text))] for text in texts], np.int32)

    computed = np.asarray(log_probs(params, tokens, config=config, page_size=16))

    for row, prompt, text, completion in zip(computed, prompts, texts, completions, strict=True):
        assert row[len(prompt) - 1 : len(text) - 1].tolist() == np.array(completion.log_probs, np.float32).tolist()


def mean_log_prob(params, tokens, config):
    return log_probs(params, tokens, config=config, page_size=16).mean()


@pytest.mark.parametrize("family", exhaustive_but(FAMILIES, IN_EVERY_RUN))
def test_the_gradient_is_that_of_torch(family, checkpoints, tmp_path):
    params, config = load_checkpoint(checkpoints[family], "float32")
    tokens = np.random.default_rng(0).integers(1, 96, (2, 40)).astype(np.int32)
    model = load_reference(checkpoints[family])
    for name, buffer in model.named_buffers():
        buffer.requires_grad_(name.endswith("layer_scalar"))
    inputs = torch.tensor(tokens, dtype=torch.long)
    expected_log_probs = torch.log_softmax(model(inputs, use_cache=False).logits[:, :-1], -1)
    expected = expected_log_probs.gather(-1, inputs[:, 1:, None]).mean()
    expected.backward()

    step = jax.jit(jax.value_and_grad(mean_log_prob), static_argnums=2)
    value, gradient = step(params, tokens, config)

    assert abs(value - expected.item()) < 1e-5 * abs(expected.item())
    leaves = jax.tree.leaves(gradient_of(model, tmp_path))
    for (path, ours), theirs in zip(jax.tree_util.tree_leaves_with_path(gradient), leaves, strict=True):
        name = jax.tree_util.keystr(path)
        if name.endswith("choice_bias"):  # decides between experts only, and is no parameter in torch
            assert not ours.any()
        elif name == f".layers[{config.num_layers - 1}].scale":  # the final norm undoes it
            assert np.abs([ours, theirs]).max() < 1e-6
        else:
            assert np.abs(ours - theirs).max() < 1e-4 * np.abs(theirs).max(), name


def gradient_of(model, folder):
    """The gradient of torch as `Params`: written like a checkpoint and loaded like one."""
    with torch.no_grad():
        for parameter in (*model.parameters(), *(buffer for buffer in model.buffers() if buffer.requires_grad)):
            assert parameter.grad is not None
            parameter.copy_(parameter.grad)
    model.save_pretrained(folder)
    return load_checkpoint(folder, "float32")[0]


def test_gradient_descent_makes_a_text_more_probable():
    params, config = load_checkpoint(BUNDLED_MODEL, "float32")
    text = "class Queue:\n    def __init__(self):\n        self.items = []\n"
    tokens = np.array([Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json")).encode(text).ids], np.int32)

    @jax.jit
    def descend(params):
        loss, gradient = jax.value_and_grad(lambda params: -mean_log_prob(params, tokens, config))(params)
        return loss, jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)

    losses = []
    for _ in range(4):
        loss, params = descend(params)
        losses.append(float(loss))

    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.9 * losses[0]


def test_later_tokens_and_other_rows_change_no_bit(checkpoints):
    params, config = load_checkpoint(checkpoints["gpt_oss"], "float32")
    rng = np.random.default_rng(1)
    tokens = rng.integers(1, 96, (3, 50)).astype(np.int32)
    changed = tokens.copy()
    changed[0], changed[:, 33:] = rng.integers(1, 96, 50), 1

    before, after = (np.asarray(log_probs(params, t, config=config, page_size=16)) for t in (tokens, changed))
    alone = np.asarray(log_probs(params, tokens[1:2, :33], config=config, page_size=16))

    assert before[1:, :32].tolist() == after[1:, :32].tolist()
    assert before[1:2, :32].tolist() == alone.tolist()


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (np.ones((2, 1), np.int32), r"tokens='int32\[2, 1\]' is not allowed: tokens must be token ids i32\[B, T\]"),
        (np.ones(5, np.int32), r"tokens='int32\[5\]' is not allowed"),
        (np.ones((1, 5), np.float32), r"tokens='float32\[1, 5\]' is not allowed"),
        (np.ones((1, 257), np.int32), r"T from 2 to the model's 256"),
    ],
)
def test_wrong_tokens_are_refused(tokens, message, checkpoints):
    params, config = load_checkpoint(checkpoints["llama"], "float32")

    with pytest.raises(ValueError, match=message):
        log_probs(params, tokens, config=config, page_size=16)


PROGRAM = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from jaxinfer import load_checkpoint, log_probs
from jaxinfer.model.params import shardings
params, config = load_checkpoint(sys.argv[1], "float32")
mesh = jax.sharding.Mesh(np.array(jax.devices()), (sys.argv[2],))
tokens = np.arange(1, 41, dtype=np.int32).reshape(2, 20)
def loss(params, mesh):
    values = log_probs(params, tokens, config=config, page_size=16, mesh=mesh)
    return values.mean(), values
grad = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=1)
one, split = grad(params, None), grad(jax.device_put(params, shardings(config, mesh)), mesh)
def error(a, b):
    a, b = np.asarray(a), np.asarray(b)
    return float(np.abs(a - b).max() / np.abs(a).max())
errors = jax.tree.map(error, one, split)
up = split[1].layers[0].feed_forward.experts.up
print(json.dumps({"error": max(jax.tree.leaves(errors)), "shape": up.sharding.shard_shape(up.shape)}))
"""


@pytest.mark.parametrize(("axis", "experts", "size"), [("model", 6, 24), ("experts", 3, 48)])
def test_parameters_may_be_split_over_a_mesh(axis, experts, size, checkpoints):
    seen = json.loads(run_on_devices(2, "-c", PROGRAM, str(checkpoints["gpt_oss"]), axis).splitlines()[-1])

    assert seen["shape"] == [1, experts, size, 32]
    assert seen["error"] < 1e-4
