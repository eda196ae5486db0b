"""Every public call, with one or two of its arguments replaced by any value, honours it or refuses it by name."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
from collections.abc import Callable, Collection
from typing import Any

import huggingface_hub
import hypothesis.strategies as st
import jax
import pytest
from hypothesis import given

import jaxinfer
from jaxinfer.checkpoint import load_checkpoint
from jaxinfer.config import CacheConfig, EngineConfig, SamplingParams
from jaxinfer.engine import assembly
from jaxinfer.engine.async_llm import AsyncLLM
from jaxinfer.engine.drafters.drafters import Drafter
from jaxinfer.engine.llm import LLM
from jaxinfer.engine.request.completion import Completion
from jaxinfer.engine.request.request import QueueFullError
from jaxinfer.engine.scheduling.drafts import DraftTree
from jaxinfer.model.batch import Row, make_batch
from jaxinfer.model.cache import init_cache
from jaxinfer.model.components.attention import Attention, QueryGrowth
from jaxinfer.model.components.dense_and_experts import DenseAndExperts
from jaxinfer.model.components.latent_attention import LatentAttention
from jaxinfer.model.components.layer_embedding import LayerEmbedding
from jaxinfer.model.components.layers import Norm
from jaxinfer.model.components.mlp import MLP
from jaxinfer.model.components.moe import MoE, Router
from jaxinfer.model.components.recurrent.gated_delta_net import GatedDeltaNet
from jaxinfer.model.components.recurrent.selective_scan import SelectiveScan
from jaxinfer.model.components.recurrent.state_space import StateSpace
from jaxinfer.model.components.rope import Rope, RopeScaling
from jaxinfer.model.config import Branch, Layer, LayerGroup, ModelConfig, uniform_decoder
from jaxinfer.model.params import abstract_params
from jaxinfer.sampling.batch import make_sampling
from jaxinfer.steps.log_probs import log_probs
from jaxinfer.steps.steps import StepOptions, decode_step, prefill_step
from tests.engine.engines import GREEDY, drain, num_owned_pages
from tests.engine.probe import is_idle, scheduler_of
from tests.hostile.cases import cases
from tests.hostile.oracle import REFUSED, refused_or_returned
from tests.hostile.values import leaves, values

MODEL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 4,
    "max_position": 64,
}
ATTENTION: dict[str, Any] = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 4}
LAYER = {"mixer": Attention(**ATTENTION), "feed_forward": MLP(intermediate_size=8)}
CONFIGS: dict[Any, dict[str, Any]] = {
    SamplingParams: {},
    EngineConfig: {},
    ModelConfig: {"vocab_size": 96, "hidden_size": 8, "max_position": 64, "groups": (LayerGroup((Layer(**LAYER),)),)},
    CacheConfig: {"num_pages": 2, "page_size": 16},
}
COMPONENTS: dict[Any, dict[str, Any]] = {
    uniform_decoder: MODEL,
    Layer: LAYER,
    Branch: {"mixer": Attention(**ATTENTION)},
    Attention: ATTENTION,
    QueryGrowth: {"beta": 0.1, "length": 16},
    MLP: {"intermediate_size": 8},
    Router: {"num_chosen": 2},
    MoE: {"num_experts": 4, "expert": MLP(intermediate_size=8), "router": Router(num_chosen=2)},
    DenseAndExperts: {
        "dense": MLP(intermediate_size=8),
        "experts": MoE(num_experts=4, expert=MLP(intermediate_size=8), router=Router(num_chosen=2)),
    },
    LayerEmbedding: {"vocab_size": 96, "size": 4},
    LatentAttention: {
        **{"num_heads": 2, "q_lora_rank": None, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4},
        **{"v_head_dim": 4, "rope": Rope(dim=4, max_position=64)},
    },
    StateSpace: {"num_heads": 2, "head_dim": 4, "num_groups": 1, "state_size": 4, "conv_size": 4},
    SelectiveScan: {"inner_size": 8, "state_size": 4, "time_step_rank": 2, "conv_size": 4},
    GatedDeltaNet: {
        **{"num_key_heads": 1, "num_value_heads": 2, "key_head_dim": 4, "value_head_dim": 4, "conv_size": 4},
    },
    Norm: {},
    Rope: {"dim": 4, "max_position": 64},
    RopeScaling: {"kind": "yarn", "factor": 2.0, "original_max_position": 64},
}
STRUCTURES = {"json_schema", "regex", "choices", "grammar"}  # compiled, and tested beside their compiler
CACHE = CacheConfig(**CONFIGS[CacheConfig])
TERMS = {"priority": "batch", "tenant": "a", "deadline": 60, "cache_salt": "a", "prediction": None, "adapter": None}
PROMPT = {"prompt": [5, 6], "sampling_params": GREEDY, **TERMS}
BATCH = {"rows": [Row([5], 0, [0])], "page_size": 16, "num_tokens": 2, "num_rows": 2, "table_width": 2}
SAMPLING = {
    "params": [GREEDY],
    "num_rows": 2,
    "seeds": [5],
    "sample_index": [0],
    "prompt_lens": [1],
    "stop_token_ids": [[0]],
    "max_listed_tokens": 4,
    "vocab_size": 96,
    "num_masks": 2,
    "custom": ("turns",),
}


def changes_of(names: Collection[str]) -> st.SearchStrategy[dict[str, Any]]:
    """One or two wrong arguments."""
    return st.dictionaries(st.sampled_from(sorted(names)), values, min_size=1, max_size=2)


def test_no_public_name_is_left_out():
    tested = {*CONFIGS, *FUNCTIONS.values(), *STEPS, StepOptions, log_probs, Row, DraftTree, LLM, AsyncLLM}
    not_called = {Completion, Drafter, QueueFullError, jaxinfer.__version__}

    assert {getattr(jaxinfer, name) for name in dir(jaxinfer)} == tested | not_called
    assert {name for name in vars(LLM) if not name.startswith("_")} == {*METHODS, "step", "close", "engine"} | VIEWS | {
        CLASSIFY
    }
    views = {
        "adapters",
        "identity",
        "metrics",
        "default_sampling_params",
        "failure",
        "is_open",
        "close",
        "call",
        "engine_thread",
        "labels",
        "read",
        CLASSIFY,
    }
    assert {name for name in vars(AsyncLLM) if not name.startswith("_")} == {*ASYNC_METHODS} | views


@pytest.mark.parametrize("config", CONFIGS | COMPONENTS, ids=lambda config: config.__name__)
def test_configurations(config):
    own = (CONFIGS | COMPONENTS)[config]

    @cases(0.06)
    @given(changes_of(set(inspect.signature(config).parameters) - STRUCTURES))
    def test(changes):
        made = refused_or_returned(lambda: config(**{**own, **changes}), [*changes, *NAMES.get("config", ())])
        if made is not REFUSED:
            assert dataclasses.replace(made) == made
            assert hash(made) == hash(dataclasses.replace(made))

    test()


def add(llm: LLM, **arguments: Any) -> None:
    llm.abort(llm.add(**arguments))


def stream(llm: LLM, **arguments: Any) -> None:
    list(llm.stream(**arguments))


CHAT = {
    "messages": [{"role": "user", "content": "a"}],
    "sampling_params": GREEDY,
    "tools": None,
    "tool_choice": None,
    "parallel_tool_calls": True,
    "answer_style": None,
    "documents": None,
    "chat_template": "{{ messages[0].content }}",
    "add_generation_prompt": True,
    "continue_final_message": False,
    "chat_template_kwargs": None,
    "show_progress": False,
}
EMBED = {"prompts": [[5], "a"], "pooling": "mean", "normalize": True, "show_progress": False}
SCORE = {
    **{"queries": "a", "documents": ["b", "c"], "instruction": "d", "answer_tokens": ("y", "n"), "activate": True},
    "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
    "show_progress": False,
}
CLASSIFY = "classify"  # refused for a model without labels, whatever is given
# Without arguments.
VIEWS = {"on_step", "has_unfinished", "identity", "metrics", "default_sampling_params", "adapters", "labels"}
COMPLETION = Completion(
    request_id=0,
    prompt_token_ids=(5,),
    text="a",
    token_ids=(5,),
    log_probs=(-1.0,),
    top_log_probs=({5: -1.0},),
    finish_reason="length",
    seed=0,
)
METHODS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "add": (add, PROMPT),
    "show": (LLM.show, {"completion": COMPLETION}),
    "stream": (stream, PROMPT),
    "generate": (LLM.generate, {"prompts": [[5], "a"], "sampling_params": GREEDY, "show_progress": False, **TERMS}),
    "chat": (LLM.chat, {**CHAT, **TERMS}),
    "beam_search": (
        LLM.beam_search,
        {"prompt": [5], "num_beams": 2, "max_tokens": 3, "length_penalty": 1.0, "skip_special_tokens": False},
    ),
    "abort": (LLM.abort, {"request_id": 0}),
    "drop": (LLM.drop, {"request_id": 0}),
    "fork": (LLM.fork, {"request_id": 0, "seed": 5}),
    "rewind": (LLM.rewind, {"request_id": 0, "num_tokens": 1, "seed": 5}),
    "save": (LLM.save, {"request_id": 0, "path": "request"}),
    "restore": (LLM.restore, {"path": "request"}),
    "embed": (LLM.embed, {**EMBED, **TERMS}),
    "score": (LLM.score, {**SCORE, **TERMS}),
    "agreement": (LLM.agreement, {"texts": [[5, 6], COMPLETION], "show_progress": False}),
    "update_params": (LLM.update_params, {"params": None}),
    "load_adapter": (LLM.load_adapter, {"name": "a", "path": "request"}),
    "unload_adapter": (LLM.unload_adapter, {"name": "a"}),
    "warm_up": (LLM.warm_up, {"show_progress": False, "description": "a"}),
    "timeline": (LLM.timeline, {"max_steps": 5}),
}
# What else a message may name: of a pair of arguments, or of an item of a list, the one that is at fault.
NAMES = {
    "config": ("max_num_seqs", "num_heads", "has_mlp_bias"),
    "request_id": ("request",),
    "num_tokens": ("request",),
    "seed": ("request",),
    "path": ("request", "adapter"),
    "name": ("adapter",),
    "prompts": ("prompt", "sampling_params"),
    "texts": ("prompt",),
    "messages": ("prompt", "template"),
    "chat_template": ("template", "messages", "prompt"),
    "chat_template_kwargs": ("chat_template",),
    "tools": ("template",),
    "tool_choice": ("tools",),
    "documents": ("template",),
    "model": ("checkpoint",),
    "speculation": ("checkpoint",),
    "path_or_id": ("checkpoint", "config.json"),
    "rows": ("row",),
    "sampling_params": ("prompts",),
}


def names_of(changes: Collection[str]) -> list[str]:
    return [*changes, *(name for change in changes for name in NAMES.get(change, ()))]


@pytest.mark.parametrize("name", METHODS)
def test_methods_of_an_llm(llm, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    method, arguments = METHODS[name]

    @cases(0.02)
    @given(changes_of(arguments), st.booleans())
    def test(changes, has_run):
        own = dict(arguments)
        if "request_id" in own:
            own["request_id"] = llm.add([5, 6, 7], GREEDY)
            if has_run:
                llm.step()
        refused_or_returned(lambda: method(llm, **{**own, **changes}), names_of(changes))
        for request_id in list(scheduler_of(llm)._requests):
            llm.abort(request_id)
        drain(llm)
        assert num_owned_pages(llm) == 0
        assert is_idle(llm)

    test()


def without_progress(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name != "show_progress"}


async def read(llm: AsyncLLM, **arguments: Any) -> None:
    async for _ in llm.stream(**arguments):
        pass


async def open_and_read(llm: AsyncLLM, **arguments: Any) -> None:
    async with await llm.open(**arguments) as stream:
        async for _ in stream:
            pass


ASYNC_METHODS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "stream": (read, PROMPT),
    "generate": (AsyncLLM.generate, without_progress(METHODS["generate"][1])),
    "chat": (AsyncLLM.chat, without_progress(METHODS["chat"][1])),
    "render": (AsyncLLM.render, {name: CHAT[name] for name in CHAT.keys() - {"sampling_params", "show_progress"}}),
    **{name: (getattr(AsyncLLM, name), without_progress(METHODS[name][1])) for name in ("embed", "score")},
    "open": (open_and_read, without_progress(METHODS["generate"][1])),
    "tokenize": (AsyncLLM.tokenize, {"text": "a", "add_special_tokens": True}),
    "load_adapter": (AsyncLLM.load_adapter, METHODS["load_adapter"][1]),
    "unload_adapter": (AsyncLLM.unload_adapter, METHODS["unload_adapter"][1]),
    "warm_up": (AsyncLLM.warm_up, {"show_progress": False}),
}


@pytest.mark.parametrize("name", ASYNC_METHODS)
def test_methods_of_an_async_llm(async_llm, name):
    method, arguments = ASYNC_METHODS[name]

    @cases(0.02)
    @given(changes_of(arguments))
    def test(changes):
        refused_or_returned(lambda: asyncio.run(method(async_llm, **{**arguments, **changes})), names_of(changes))
        metrics = async_llm.metrics()
        assert (metrics.num_running, metrics.num_waiting, metrics.num_owned_pages) == (0, 0, 0)

    test()


@pytest.mark.parametrize("name", ["prompt", "sampling_params"])
def test_no_value_changes_what_an_llm_answers_later(llm, name):
    expected = llm.generate([5, 6, 7], GREEDY, show_progress=False)[0].token_ids

    @cases(0.01)
    @given(changes_of({name}))
    def test(changes):
        refused_or_returned(lambda: add(llm, **{"prompt": [5, 6], **changes}), changes)
        drain(llm)
        assert llm.generate([5, 6, 7], GREEDY, show_progress=False)[0].token_ids == expected

    test()


class AcceptedError(Exception):
    """Raised in place of loading a model, when all arguments have been looked at."""


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)


@pytest.mark.parametrize(("kind", "more"), [(LLM, {}), (AsyncLLM, {"max_unread_tokens": 5})], ids=["LLM", "AsyncLLM"])
def test_an_llm(checkpoint, monkeypatch, no_network, kind, more):
    def accept(*_: Any, **__: Any) -> None:
        raise AcceptedError

    monkeypatch.setattr(assembly, "load_target", accept)
    monkeypatch.setattr(assembly, "load_and_compile", accept)

    def make(**arguments: Any) -> None:
        with pytest.raises(AcceptedError):
            kind(**arguments)

    own = {"model": checkpoint, "config": None, "dtype": None, "logits_processors": None, "speculation": None, **more}

    @cases(0.04)
    @given(changes_of({*own, "show_progress"}))
    def test(changes):
        refused_or_returned(lambda: make(**{**own, **changes}), names_of(changes))

    test()


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "make_batch": make_batch,
    "make_sampling": make_sampling,
    "init_cache": init_cache,
    "load_checkpoint": load_checkpoint,
}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "make_batch": BATCH,
    "make_sampling": SAMPLING,
    "init_cache": {"config": uniform_decoder(**MODEL), "cache_config": CACHE, "layout": None},
    "load_checkpoint": {"dtype": None, "layer_cuts": (), "quantization": None, "show_progress": False},
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name, checkpoint, no_network):
    own = {"path_or_id": checkpoint} if name == "load_checkpoint" else {}

    @cases(0.04)
    @given(changes_of({*own, *ARGUMENTS[name]}))
    def test(changes):
        refused_or_returned(lambda: FUNCTIONS[name](**{**own, **ARGUMENTS[name], **changes}), names_of(changes))

    test()


def test_rows():
    @cases(0.04)
    @given(changes_of(Row._fields))
    def test(changes):
        row = Row(**{"token_ids": [5], "start": 0, "page_ids": [0], **changes})
        refused_or_returned(lambda: make_batch(**{**BATCH, "rows": [row]}), [*changes, "row"])

    test()


def test_draft_trees():
    @cases(0.04)
    @given(changes_of({"token_ids", "parents"}))
    def test(changes):
        refused_or_returned(lambda: DraftTree(**{"token_ids": [5, 6], "parents": [-1, 0], **changes}), changes)

    test()


STEPS = (prefill_step, decode_step)


@pytest.mark.parametrize("step", STEPS, ids=["prefill_step", "decode_step"])
def test_steps(step):
    config = uniform_decoder(**MODEL)
    own: dict[str, Any] = {
        "params": abstract_params(config, "float32"),
        "cache": jax.eval_shape(lambda: init_cache(config, CACHE)),
        "batch": make_batch(**BATCH),
        "sampling": make_sampling([GREEDY], num_rows=2),
    }
    options: dict[str, Any] = {
        "config": config,
        "form": "full",
        "max_log_probs": 0,
        "max_prompt_log_probs": 0,
        "sampling_log_probs": False,
        "custom": (),
        "kept_layers": (),
        "implementation": None,
        "mesh": None,
        "q_len": None,
        "num_steps": None,
        "max_drafts": None,
        "vocab_size": None,
        "exact": False,
    }
    assert set(options) == {field.name for field in dataclasses.fields(StepOptions)}

    def lower(changes: dict[str, Any]) -> Any:
        arguments = {name: changes.get(name, value) for name, value in own.items()}
        statics = {name: changes.get(name, value) for name, value in options.items()}
        return step.lower(**arguments, options=changes.get("options", StepOptions(**statics)))

    @cases(0.02)
    @given(st.dictionaries(st.sampled_from(sorted([*own, *options, "options"])), leaves, min_size=1, max_size=2))
    def test(changes):
        refused_or_returned(lambda: lower(changes), [*changes, "static arguments"], is_passed_on=True)

    test()


def test_log_probs():
    config = uniform_decoder(**MODEL)
    own: dict[str, Any] = {
        "params": abstract_params(config, "float32"),
        "tokens": jax.ShapeDtypeStruct((2, 5), "int32"),
        "sampling": make_sampling([GREEDY] * 2, num_rows=2),
        "config": config,
        "page_size": 16,
        "implementation": None,
        "mesh": None,
        "custom": (),
    }

    @cases(0.02)
    @given(st.dictionaries(st.sampled_from(sorted(own)), leaves, min_size=1, max_size=2))
    def test(changes):
        names = [*changes, "static arguments"]
        refused_or_returned(lambda: log_probs.lower(**{**own, **changes}), names, is_passed_on=True)

    test()


TOKENIZER: dict[str, dict[str, Any]] = {
    "from_path": {"checkpoint_dir": "nowhere"},
    "encode": {"text": "a"},
    "decode": {"token_ids": [5], "skip_special_tokens": False},
    "text_of": {"token_id": 5},
    "token_to_id": {"token": "a"},
    "id_to_token": {"token_id": 5},
    "has_text": {"token_id": 5, "skip_special_tokens": False},
    "token_bytes": {"token_id": 5, "skip_special_tokens": False},
}


@pytest.mark.parametrize("name", TOKENIZER)
def test_methods_of_a_tokenizer(llm, name):
    @cases(0.01)
    @given(changes_of(TOKENIZER[name]))
    def test(changes):
        refused_or_returned(lambda: getattr(llm.tokenizer, name)(**{**TOKENIZER[name], **changes}), changes)

    test()
