"""Published draft layers: EAGLE-3 heads and multi-token prediction draft as references over the whole context do."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from jaxinfer.checkpoint import Checkpoint, load_checkpoint
from jaxinfer.checkpoint.draft_layers import load_mtp
from jaxinfer.config import EngineConfig, SamplingParams
from jaxinfer.engine.llm import LLM
from jaxinfer.engine.request.completion import Completion
from jaxinfer.engine.speculation.load import plan_speculation
from tests.engine.engines import (
    ScriptedDrafter,
    content_of,
    crowded_engine,
    drafts_from,
    forget_prefixes,
    poison_cache,
    recorded_steps,
    run_with_arrivals,
    small_engine,
)
from tests.exhaustive import exhaustive_but
from tests.oracles import load_reference, save_random_checkpoint, stack_experts

V, D, N, K, H, F, DRAFTED = 96, 32, 4, 2, 10, 40, 41
EPSILON, THETA = 1e-5, 5_000.0
NUM_LAYERS = 4  # of the target of EAGLE-3 heads
MTP_LAYERS = 2  # of a target, before its layer for multi-token prediction
MTP_PREFIX = f"model.layers.{MTP_LAYERS}."  # of that layer's tensors
EAGLE3: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": D,
    "target_hidden_size": D,
    "intermediate_size": F,
    "num_attention_heads": N,
    "num_key_value_heads": K,
    "head_dim": H,
    "num_hidden_layers": 1,
    "rms_norm_eps": EPSILON,
    "rope_theta": THETA,
    "vocab_size": V,
    "draft_vocab_size": DRAFTED,
    "max_position_embeddings": 256,
}
LIMITS: dict[str, Any] = {
    "max_num_seqs": 1,
    "max_num_batched_tokens": 12,
    "adaptive_drafts": False,
    "max_drafts": 3,
}
RANDOM = np.random.default_rng(0)
PROMPTS = [RANDOM.integers(0, V, size).tolist() for size in (3, 40, 17, 26)]
GREEDY = SamplingParams(temperature=0, seed=1, max_tokens=20, ignore_eos=True, log_probs=2)
PARAMS = [GREEDY, GREEDY, SamplingParams(temperature=0.9, seed=4, max_tokens=20, ignore_eos=True, log_probs=2), GREEDY]


# ---- EAGLE-3: a reference in NumPy


def eagle3_tensors(seed: int = 1) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)

    def weight(*shape: int) -> np.ndarray:
        return (random.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32)

    def norm() -> np.ndarray:
        return (1 + 0.3 * random.standard_normal(D)).astype(np.float32)

    ids = np.sort(random.permutation(V)[:DRAFTED])
    return {
        "fc.weight": weight(D, 3 * D),
        "midlayer.hidden_norm.weight": norm(),
        "midlayer.input_layernorm.weight": norm(),
        "midlayer.post_attention_layernorm.weight": norm(),
        "midlayer.self_attn.q_proj.weight": weight(N * H, 2 * D),
        "midlayer.self_attn.k_proj.weight": weight(K * H, 2 * D),
        "midlayer.self_attn.v_proj.weight": weight(K * H, 2 * D),
        "midlayer.self_attn.o_proj.weight": weight(D, N * H),
        "midlayer.mlp.gate_proj.weight": weight(F, D),
        "midlayer.mlp.up_proj.weight": weight(F, D),
        "midlayer.mlp.down_proj.weight": weight(D, F),
        "norm.weight": norm(),
        "lm_head.weight": weight(DRAFTED, D),
        "d2t": (ids - np.arange(DRAFTED)).astype(np.int64),
        "t2d": np.isin(np.arange(V), ids),
    }


def save_eagle3(path: Path, tensors: dict[str, np.ndarray] | None = None, **changes: Any) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({**EAGLE3, **changes}))
    save_file(eagle3_tensors() if tensors is None else tensors, path / "model.safetensors")
    return path


def normed(x, weight):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON) * weight


def rotated(x):
    """x [T, heads, H], turned by its place."""
    angles = np.arange(len(x))[:, None] * THETA ** (-np.arange(0, H, 2) / H)
    both = (x[..., : H // 2] + 1j * x[..., H // 2 :]) * np.exp(1j * angles)[:, None]
    return np.concatenate([both.real, both.imag], -1)


def eagle3_layer(w, states, tokens, embedding, adds_normed):
    """The last state after the layer, before the norm, for states [T, D] and the tokens [T] sampled from them."""
    told, seen = normed(embedding[tokens], w["input_layernorm"]), normed(states, w["hidden_norm"])
    h, T = np.concatenate([told, seen], -1), len(tokens)
    q = rotated((h @ w["self_attn.q_proj"].T).reshape(T, N, H))[-1]
    k = rotated((h @ w["self_attn.k_proj"].T).reshape(T, K, H))
    v = (h @ w["self_attn.v_proj"].T).reshape(T, K, H)
    attended = []
    for i in range(N):
        scores = np.exp(k[:, i // (N // K)] @ q[i] / H**0.5)
        attended.append(scores @ v[:, i // (N // K)] / scores.sum())
    x = (seen if adds_normed else states)[-1] + w["self_attn.o_proj"] @ np.concatenate(attended)
    h = normed(x, w["post_attention_layernorm"])
    gate = w["mlp.gate_proj"] @ h
    return x + w["mlp.down_proj"] @ (gate / (1 + np.exp(-gate)) * (w["mlp.up_proj"] @ h))


def eagle3_drafts(reference, tensors, tokens, count, *, layers, adds_normed=False):
    """The drafts after tokens by definition, of a head that takes states after these numbers of layers."""
    w = {name.removeprefix("midlayer.").removesuffix(".weight"): np.float64(t) for name, t in tensors.items()}
    embedding = np.float64(reference.model.embed_tokens.weight.detach().numpy())
    with torch.no_grad():
        hidden = reference(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
    states = np.concatenate([np.float64(hidden[layer][0].numpy()) for layer in layers], -1) @ w["fc"].T
    told, drafts = list(tokens[1:]), []
    for _ in range(count):
        state = eagle3_layer(w, states, np.array(told), w.get("embed_tokens", embedding), adds_normed)
        best = int((w["lm_head"] @ normed(state, w["norm"])).argmax())
        drafts.append(best + int(tensors["d2t"][best]) if "d2t" in tensors else best)
        told.append(drafts[-1])
        states = np.concatenate([states, state[None]])
    return drafts


# ---- multi-token prediction: the layer is the last one of a transformers model with one layer more


def save_mtp(path: Path, family: str, *, seed: int = 1, copies: bool = False) -> Path:
    """Saves a random checkpoint and a layer for multi-token prediction, by the names of DeepSeek-V3 and GLM-4-MoE."""
    is_qwen = family.startswith("qwen")
    kinds: dict[str, Any] = {"layer_types": QWEN_KINDS} if is_qwen else {}
    save_random_checkpoint(path, family, num_hidden_layers=MTP_LAYERS + 1, seed=seed, **kinds)
    config = json.loads((path / "config.json").read_text())
    config |= {"num_hidden_layers": MTP_LAYERS, "num_nextn_predict_layers": 1}
    if is_qwen:
        config["layer_types"] = QWEN_KINDS[:MTP_LAYERS]
    (path / "config.json").write_text(json.dumps(config))
    random, tensors = np.random.default_rng(seed), load_file(path / "model.safetensors")
    tensors[f"{MTP_PREFIX}eh_proj.weight"] = (random.standard_normal((D, 2 * D)) / (2 * D) ** 0.5).astype(np.float32)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        weight = 0.3 * random.standard_normal(D) + (not is_qwen)  # Qwen stores norms less 1
        tensors[f"{MTP_PREFIX}{name}.weight"] = weight.astype(np.float32)
    if copies:
        tensors[f"{MTP_PREFIX}embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
        head = tensors["lm_head.weight"] + 0.5 * random.standard_normal((V, D))
        tensors[f"{MTP_PREFIX}shared_head.head.weight"] = head.astype(np.float32)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


QWEN_KINDS = ["linear_attention", "full_attention", "full_attention"]  # of layers, the one that drafts last
# Qwen's names of the same tensors, after `mtp.`.
QWEN_NAMES = {
    "eh_proj": "fc",
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "shared_head.norm": "norm",
}


def as_qwen_publishes(saved: Path, path: Path) -> Path:
    """Writes a checkpoint of `save_mtp` with Qwen's names, Qwen3.5 as one that reads images too, experts stacked."""
    config, tensors = json.loads((saved / "config.json").read_text()), load_file(saved / "model.safetensors")
    del config["num_nextn_predict_layers"]
    names = {f"{MTP_PREFIX}{name}.": f"mtp.{theirs}." for name, theirs in QWEN_NAMES.items()}
    for own, theirs in (names | {MTP_PREFIX: "mtp.layers.0."}).items():
        tensors = {name.replace(own, theirs): tensor for name, tensor in tensors.items()}
    if config["model_type"].startswith("qwen3_5"):
        model_type = config["model_type"].removesuffix("_text")
        tensors = stack_experts(tensors)
        tensors = {name.replace("model.", "model.language_model."): tensor for name, tensor in tensors.items()}
        architecture = (
            "Qwen3_5MoeForConditionalGeneration" if "moe" in model_type else "Qwen3_5ForConditionalGeneration"
        )
        text = {**config, "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
        config = {"model_type": model_type, "architectures": [architecture], "text_config": text}
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


class MTPReference:
    """The target of a checkpoint of `save_mtp` and its layer for multi-token prediction in transformers."""

    def __init__(self, path: Path, scratch: Path) -> None:
        shutil.copytree(path, scratch)
        config = json.loads((scratch / "config.json").read_text())
        config["num_hidden_layers"] = MTP_LAYERS + 1
        self.is_qwen = config["model_type"].startswith("qwen")
        if self.is_qwen:
            config["layer_types"] = QWEN_KINDS
        (scratch / "config.json").write_text(json.dumps(config))
        self.model: Any = load_reference(scratch)
        self.layer = self.model.model.layers[MTP_LAYERS]
        self.own = {
            name.removeprefix(MTP_PREFIX).removesuffix(".weight"): torch.tensor(tensor)
            for name, tensor in load_file(path / "model.safetensors").items()
            if name.startswith(MTP_PREFIX)
        }
        self.head = self.own.get("shared_head.head", self.model.lm_head.weight)

    def norm(self, x, name):
        epsilon, weight = self.model.config.rms_norm_eps, self.own[name] + self.is_qwen
        return x * torch.rsqrt((x**2).mean(-1, keepdim=True) + epsilon) * weight

    def drafts(self, tokens, count):
        model = self.model.model
        with torch.no_grad():
            hidden = model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
            states, told, drafts = model.norm(hidden[MTP_LAYERS][0]), list(tokens[1:]), []
            for _ in range(count):
                told_states = self.norm(model.embed_tokens(torch.tensor(told)), "enorm")
                both = torch.cat([told_states, self.norm(states, "hnorm")], -1)
                x, places = (both @ self.own["eh_proj"].T)[None], torch.arange(len(told))[None]
                mask = torch.full((len(told), len(told)), -torch.inf).triu(1)[None, None]
                angles = model.rotary_emb(x, places)
                x = self.layer(x, attention_mask=mask, position_ids=places, position_embeddings=angles)
                state = self.norm((x[0] if isinstance(x, tuple) else x)[0, -1], "shared_head.norm")
                drafts.append(int((self.head @ state).argmax()))
                told.append(drafts[-1])
                states = torch.cat([states, state[None]])
        return drafts


# ---- engines


@contextlib.contextmanager
def closed(llm: LLM) -> Iterator[LLM]:
    try:
        yield llm
    finally:
        llm.close()


def one_by_one(llm: LLM) -> list[Completion]:
    forget_prefixes(llm)
    return [llm.generate(*pair, show_progress=False)[0] for pair in zip(PROMPTS, PARAMS, strict=True)]


def contents(completions: list[Completion]) -> list[dict]:
    return [content_of(completion) for completion in completions]


def greedy_drafts(steps):
    """The tokens before the drafts of each chunk, and the drafts."""
    chunks = [chunk for step in steps for chunk in step.chunks if chunk.drafts]
    return [
        (chunk.request.token_ids[: chunk.start + 1], list(chunk.drafts))
        for chunk in chunks
        if chunk.request.sampling.temperature == 0
    ]


def check_drafts(llm: LLM, reference: Callable[[list[int], int], list[int]]) -> list[Completion]:
    """Drafts for requests alone equal the reference's; returns their completions."""
    with recorded_steps(llm) as steps:
        completions = one_by_one(llm)
    drafts = greedy_drafts(steps)
    assert len(drafts) > 30
    assert sum(len(own) == 3 for _, own in drafts) > 15
    for tokens, own in drafts:
        assert own == reference(tokens, len(own)), len(tokens)
    return completions


def check_bits(llm: LLM, plain: list[Completion]) -> None:
    """Requests in chunks of 5 tokens, with preemptions and shared prefixes, yield what each yields alone."""
    forget_prefixes(llm)
    poison_cache(llm)
    before = llm.metrics()

    first = run_with_arrivals(llm, PROMPTS, PARAMS, mean_arrivals=9.0)
    again = run_with_arrivals(llm, PROMPTS, PARAMS, seed=1, mean_arrivals=0.3)

    after = llm.metrics()
    assert contents(first) == contents(again) == contents(plain)
    assert after.num_drafted_tokens > before.num_drafted_tokens + 50
    assert after.num_preemptions > before.num_preemptions
    assert after.num_found_tokens > before.num_found_tokens


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return save_random_checkpoint(
        tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=NUM_LAYERS, eos_token_id=None
    )


def test_an_eagle3_head_drafts_by_its_definition_and_changes_no_bit(target, tmp_path):
    head = save_eagle3(tmp_path / "head", eagle_aux_hidden_state_layer_ids=[0, 2, 3])
    model = load_reference(target)
    with closed(small_engine(target, max_num_seqs=1)) as llm:
        plain = one_by_one(llm)

    with closed(crowded_engine(target, speculation=str(head))) as llm:
        drafted = check_drafts(llm, partial(eagle3_drafts, model, eagle3_tensors(), layers=(0, 2, 3)))
        assert contents(drafted) == contents(plain)
        check_bits(llm, plain)


@pytest.mark.parametrize(("num_layers", "layers"), [(7, (2, 3, 4)), (32, (2, 16, 29))])
def test_an_eagle3_head_takes_a_low_a_middle_and_a_high_layer_unless_it_names_them(tmp_path, num_layers, layers):
    target = save_random_checkpoint(tmp_path / "target", "llama", num_hidden_layers=num_layers)
    head = save_eagle3(tmp_path / "head")

    planned = plan_speculation(head, EngineConfig(), "float32", target=Checkpoint(target))

    assert planned is not None
    assert planned.layer_cuts == layers


def test_an_eagle3_head_may_name_its_layers_as_sglang_counts_them(target, tmp_path):
    head = save_eagle3(tmp_path / "head", eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 3]})
    model, hook = load_reference(target), []
    model.model.layers[-1].register_forward_hook(lambda *args: hook.append(args[2]))

    with closed(small_engine(target, speculation=head, **LIMITS)) as llm:
        reference = partial(eagle3_drafts, Unnormed(model, hook), eagle3_tensors(), layers=(2, 3, 4))
        check_drafts(llm, reference)


def test_an_eagle3_head_in_the_format_of_speculators_has_its_own_embedding(target, tmp_path):
    nested = {key: value for key, value in EAGLE3.items() if key not in ("draft_vocab_size", "target_hidden_size")}
    changes = {"transformer_layer_config": nested, "eagle_aux_hidden_state_layer_ids": [0, 1, 3]}
    tensors = eagle3_tensors()
    tensors["embed_tokens.weight"] = np.random.default_rng(5).standard_normal((V, D)).astype(np.float32)
    stored = {key.replace("midlayer", "layers.0"): tensor for key, tensor in tensors.items()}
    head = save_eagle3(tmp_path / "head", stored, **changes, architectures=["Eagle3Speculator"])

    with closed(small_engine(target, speculation=head, **LIMITS)) as llm:
        model = load_reference(target)
        check_drafts(llm, partial(eagle3_drafts, model, tensors, layers=(0, 1, 3), adds_normed=True))


class Unnormed:
    """A transformers model whose last hidden state is that before the final norm."""

    def __init__(self, model: Any, outputs: list[Any]) -> None:
        self.model, self._call, self._outputs = model.model, model, outputs

    def __call__(self, *args: Any, **options: Any) -> Any:
        output = self._call(*args, **options)
        last = self._outputs.pop()
        output.hidden_states = (*output.hidden_states[:-1], last[0] if isinstance(last, tuple) else last)
        return output


@pytest.mark.parametrize(
    ("family", "copies"),
    [
        ("deepseek_v3", False),
        ("deepseek_v3", True),
        pytest.param("glm4_moe", False, marks=pytest.mark.exhaustive),
        pytest.param("glm4_moe", True, marks=pytest.mark.exhaustive),
        pytest.param("glm4_moe_lite", False, marks=pytest.mark.exhaustive),
        pytest.param("qwen3_next", False, marks=pytest.mark.exhaustive),
        pytest.param("qwen3_5_text", False, marks=pytest.mark.exhaustive),
        pytest.param("qwen3_5_moe_text", False, marks=pytest.mark.exhaustive),
    ],
)
def test_a_layer_for_multi_token_prediction_drafts_by_its_definition_and_changes_no_bit(tmp_path, family, copies):
    path = save_mtp(tmp_path / "model", family, copies=copies)
    reference = MTPReference(path, tmp_path / "reference").drafts
    if family.startswith("qwen"):
        path = as_qwen_publishes(path, tmp_path / "published")
    if copies:
        with closed(small_engine(path, speculation="mtp", **LIMITS)) as llm:
            check_drafts(llm, reference)
        return

    with closed(crowded_engine(path, speculation="mtp")) as llm:
        with drafts_from(llm, ScriptedDrafter(0)):
            plain = one_by_one(llm)
        assert contents(check_drafts(llm, reference)) == contents(plain)
        check_bits(llm, plain)


def copied_target(path: Path, family: str) -> Path:
    """A target whose layers add nothing, and a layer for multi-token prediction that does the same with the token."""
    save_mtp(path, family)
    tensors = load_file(path / "model.safetensors")
    eye = np.eye(D, dtype=np.float32)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            tensors[name] = np.zeros_like(tensor)
    tensors[f"{MTP_PREFIX}eh_proj.weight"] = np.concatenate([eye, 0 * eye], axis=1)
    tensors[f"{MTP_PREFIX}enorm.weight"] = np.full(D, not family.startswith("qwen"), np.float32)
    tensors[f"{MTP_PREFIX}shared_head.norm.weight"] = tensors["model.norm.weight"]
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.mark.parametrize("family", exhaustive_but(("glm4_moe", "qwen3_5_moe_text"), ["glm4_moe"]))
def test_the_drafts_of_a_layer_that_copies_the_target_are_accepted(tmp_path, family):
    path = copied_target(tmp_path / "model", family)
    if family.startswith("qwen"):
        path = as_qwen_publishes(path, tmp_path / "published")

    with closed(small_engine(path, speculation="mtp", **{**LIMITS, "max_num_seqs": 2})) as llm:
        llm.generate(PROMPTS, PARAMS, show_progress=False)

        metrics = llm.metrics()
    assert metrics.num_drafted_tokens > 40
    assert metrics.num_accepted_tokens == metrics.num_drafted_tokens


@pytest.mark.exhaustive
def test_draft_trees_of_an_eagle3_head_change_no_token(target, tmp_path):
    head = save_eagle3(tmp_path / "head")
    with closed(small_engine(target, max_num_seqs=1)) as llm:
        plain = one_by_one(llm)

    with closed(small_engine(target, speculation=head, draft_trees=True, **{**LIMITS, "max_num_seqs": 2})) as llm:
        completions = llm.generate(PROMPTS, PARAMS, show_progress=False)

        assert llm.metrics().num_drafted_tokens > 40
    assert [c.token_ids for c in completions] == [c.token_ids for c in plain]


# ---- heads and layers that do not fit


def changed(tensors: dict[str, np.ndarray], **changes: np.ndarray | None) -> dict[str, np.ndarray]:
    changes = {name.replace("__", "."): tensor for name, tensor in changes.items()}
    return {name: tensor for name, tensor in (tensors | changes).items() if tensor is not None}


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


UNFIT_HEADS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "hidden size": ({"target_hidden_size": 48}, {}, r"config.json: .*target_hidden_size=48, and .* has 32; use"),
    "vocabulary": ({"vocab_size": 97}, {}, r"config.json: .*vocab_size=97, and .* has 96; use"),
    "layers": ({"num_hidden_layers": 2}, {}, r"config.json: num_hidden_layers=2 is not supported"),
    "states": ({"eagle_config": {"use_aux_hidden_state": False}}, {}, r"use_aux_hidden_state=False is not supported"),
    "norm": ({"norm_before_fc": True}, {}, r"norm_before_fc=True is not supported"),
    "no such layer": (
        {"eagle_aux_hidden_state_layer_ids": [2, 5]},
        {},
        r"layer_ids=\[2, 5\] are no layers of a target of 4 layers",
    ),
    "no ids": ({"eagle_aux_hidden_state_layer_ids": "all"}, {}, r"layer_ids='all' are no layers"),
    "draft vocabulary": (
        {"draft_vocab_size": 40},
        {},
        r"d2t in .*model.safetensors is I64 \(41,\), and draft_vocab_size=40 in config.json needs integers \(40,\)",
    ),
    "rows of the unembedding": ({}, {"lm_head__weight": zeros(40, D)}, r"lm_head.weight expected \(41, 32\), found"),
    "reduction": ({}, {"fc__weight": zeros(D, 2 * D)}, r"fc.weight expected \(32, 96\), found \(32, 64\)"),
    "queries": (
        {},
        {"midlayer__self_attn__q_proj__weight": zeros(N * H, D)},
        r"midlayer.self_attn.q_proj.weight expected \(40, 64\), found \(40, 32\)",
    ),
    "missing": ({}, {"midlayer__hidden_norm__weight": None}, r"missing: midlayer.hidden_norm.weight \(32,\)"),
    "unexpected": ({}, {"input_norm__weight": zeros(D)}, r"unexpected: input_norm.weight \(32,\)"),
    "no offsets": ({}, {"d2t": None}, r"has no tensor d2t, though its draft_vocab_size=41 is not the target's 96"),
    "offsets past the end": ({}, {"d2t": np.full(DRAFTED, 60)}, r"d2t in .* leads to ids from 60 to 100"),
    "offsets to one id": ({}, {"d2t": -np.arange(DRAFTED)}, r"d2t in .* from 0 to 0, 1 different ones; 41 different"),
    "offsets that are no integers": ({}, {"d2t": zeros(DRAFTED)}, r"d2t in .* is F32 \(41,\)"),
}


@pytest.mark.parametrize("name", UNFIT_HEADS)
def test_an_eagle3_head_that_does_not_fit_is_refused(target, tmp_path, name):
    settings, tensors, message = UNFIT_HEADS[name]
    head = save_eagle3(tmp_path / "head", changed(eagle3_tensors(), **tensors), **settings)

    with pytest.raises(ValueError, match=message):
        plan_speculation(head, EngineConfig(), "float32", target=Checkpoint(target))


def test_an_eagle3_head_of_another_hidden_size_needs_its_own_embedding(tmp_path):
    target = save_random_checkpoint(tmp_path / "target", "llama", hidden_size=48, head_dim=12)
    tensors = changed(eagle3_tensors(), fc__weight=zeros(D, 3 * 48))
    head = save_eagle3(tmp_path / "head", tensors, target_hidden_size=48)

    with pytest.raises(ValueError, match=r"missing: embed_tokens.weight \(96, 32\)"):
        plan_speculation(head, EngineConfig(), "float32", target=Checkpoint(target))

    save_eagle3(tmp_path / "head", {**tensors, "embed_tokens.weight": zeros(V, D)}, target_hidden_size=48)
    planned = plan_speculation(head, EngineConfig(), "float32", target=Checkpoint(target))
    assert planned is not None
    assert planned.layer_cuts == (0, 1, 2)


UNFIT_LAYERS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "none stated": ({"num_nextn_predict_layers": 0}, {}, r"config.json says num_nextn_predict_layers=0; leave out"),
    "not stated": ({"num_nextn_predict_layers": None}, {}, r"config.json says num_nextn_predict_layers=None"),
    "not stored": ({"num_hidden_layers": 3}, {}, r"has no tensors model.layers.3.\*; .*layers=1, so download"),
    "missing": ({}, {"eh_proj": None}, r"missing: model.layers.2.eh_proj.weight \(32, 64\)"),
    "shape": ({}, {"eh_proj": zeros(D, D)}, r"model.layers.2.eh_proj.weight expected \(32, 64\), found \(32, 32\)"),
    "norm": ({}, {"shared_head__norm": zeros(9)}, r"model.layers.2.shared_head.norm.weight expected \(32,\)"),
    "of the layer": ({}, {"self_attn__o_proj": None}, r"missing: model.layers.2.self_attn.o_proj.weight"),
    "vocabulary": ({}, {"shared_head__head": zeros(95, D)}, r"model.layers.2.shared_head.head.weight expected \(96,"),
    "unexpected": ({}, {"extra": zeros(1)}, r"unexpected: model.layers.2.extra.weight \(1,\)"),
}


@pytest.mark.parametrize("name", UNFIT_LAYERS)
def test_a_layer_for_multi_token_prediction_that_does_not_fit_is_refused(tmp_path, name):
    settings, tensors, message = UNFIT_LAYERS[name]
    path = save_mtp(tmp_path, "glm4_moe")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | settings))
    changes = {f"{MTP_PREFIX}{part}.weight": tensor for part, tensor in tensors.items()}
    tensors = changed(load_file(path / "model.safetensors"), **changes)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})

    with pytest.raises(ValueError, match=message):
        plan_speculation("mtp", EngineConfig(), "float32", target=Checkpoint(path))


# The tensors of a published layer of Qwen3.5, beside those of its feed-forward network. Public code for inference reads
# these names, and finds no embedding or head among them.
OF_ANY_QWEN3_5 = {
    *("mtp.fc.weight", "mtp.norm.weight", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight"),
    *(f"mtp.layers.0.{norm}_layernorm.weight" for norm in ("input", "post_attention")),
    *(f"mtp.layers.0.self_attn.{part}.weight" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
}
GATED = [f"{part}_proj.weight" for part in ("gate", "up", "down")]
OF_FEED_FORWARD = {
    "qwen3_5_text": GATED,
    "qwen3_5_moe_text": [
        *("gate.weight", "experts.gate_up_proj", "experts.down_proj", "shared_expert_gate.weight"),
        *(f"shared_expert.{name}" for name in GATED),
    ],
}


@pytest.mark.parametrize("family", OF_FEED_FORWARD)
def test_a_layer_of_qwen3_5_is_read_from_the_tensors_that_are_published(tmp_path, family):
    saved = save_mtp(tmp_path / "saved", family)
    path = as_qwen_publishes(saved, tmp_path / "published")
    stored = load_file(path / "model.safetensors")
    one_by_one = shutil.copytree(path, tmp_path / "one by one")
    own = {
        name.replace(MTP_PREFIX, "mtp.layers.0."): tensor
        for name, tensor in load_file(saved / "model.safetensors").items()
        if name.startswith(f"{MTP_PREFIX}mlp.experts.")
    }
    kept = {
        name: tensor for name, tensor in stored.items() if not (own and name.startswith("mtp.layers.0.mlp.experts."))
    }
    save_file(kept | own, one_by_one / "model.safetensors", {"format": "pt"})

    heads = [load_mtp(Checkpoint(folder), "float32") for folder in (path, one_by_one)]

    names = {f"mtp.layers.0.mlp.{name}" for name in OF_FEED_FORWARD[family]}
    assert {name for name in stored if name.startswith("mtp.")} == OF_ANY_QWEN3_5 | names
    jax.tree.map(np.testing.assert_array_equal, *heads)
    assert heads[0].embedding is heads[0].unembedding is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mtp_num_hidden_layers": 0}, r"config.json says mtp_num_hidden_layers=0; leave out speculation"),
        ({"mtp_use_dedicated_embeddings": True}, r"missing: mtp.embed_tokens.weight \(96, 32\)"),
        ({"mtp_use_dedicated_embeddings": 2}, "mtp_use_dedicated_embeddings=2"),
    ],
    ids=str,
)
def test_a_layer_that_is_not_as_the_settings_of_the_text_model_say_is_refused(tmp_path, settings, message):
    path = as_qwen_publishes(save_mtp(tmp_path / "saved", "qwen3_5_text"), tmp_path / "published")
    config = json.loads((path / "config.json").read_text())
    config["text_config"] |= settings
    (path / "config.json").write_text(json.dumps(config))

    with pytest.raises(ValueError, match=message):
        plan_speculation("mtp", EngineConfig(), "float32", target=Checkpoint(path))


def test_a_target_of_a_family_without_multi_token_prediction_is_refused(target):
    with pytest.raises(ValueError, match=r"is of model_type='llama'; these may have one: deepseek_v3, glm4_moe, glm4_"):
        plan_speculation("mtp", EngineConfig(), "float32", target=Checkpoint(target))


def test_a_checkpoint_with_a_layer_for_multi_token_prediction_loads_without_speculation(tmp_path):
    path = save_mtp(tmp_path, "deepseek_v3", copies=True)

    _, config = load_checkpoint(path)

    assert config.num_layers == MTP_LAYERS
