"""Products of each step: every product of tokens has one shape whatever the step is, and nothing else adds up."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr

from jaxinfer.config import CacheConfig, EngineConfig
from jaxinfer.engine.execution.step_compiler import StepCompiler
from jaxinfer.engine.execution.warm_up import plan_target
from jaxinfer.model.batch import make_batch
from jaxinfer.model.cache import abstract_cache
from jaxinfer.model.config import uniform_decoder
from jaxinfer.model.params import abstract_params
from jaxinfer.model.quantized_params import quantize_params
from jaxinfer.plan.cache import MemoryQuestion
from jaxinfer.plan.products import ProductShape, other_float_sums, product_shapes
from jaxinfer.plan.step_shapes import loop_steps
from jaxinfer.sampling.batch import make_sampling
from jaxinfer.steps.eagle import EagleHead
from jaxinfer.steps.medusa import MedusaHeads, chain_of, draft_from_states
from jaxinfer.steps.steps import StepOptions, draft_step
from kernels_pallas import row_products
from kernels_pallas.paged_attention import abstract_pages, paged_attention
from kernels_pallas.paged_attention.layout import LANES
from kernels_pallas.row_products import BY_MATRICES, BY_WEIGHTS, ROW_BLOCK, equal_row_counts, rows_by_weights
from scripts.kernels.named_calls import by_name
from tests.kernels.paged_attention.heads_and_pages import ALL_HEADS_AND_PAGES, SOME_HEADS_AND_PAGES

FLOAT = np.dtype("float32")


def shapes_of(function, *args, **options):
    return product_shapes(jax.make_jaxpr(functools.partial(function, **options))(*args))


def zeros(*shape: int, dtype: Any = np.float32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


# What the trace is made of.


def test_products_are_found_wherever_they_are_computed():
    def function(x, w):
        x = jax.lax.fori_loop(0, 3, lambda _, x: x @ w, x)
        x = jax.lax.cond(x.sum() > 0, lambda x: jnp.tanh(x @ w.T), lambda x: x, x)
        return jax.jit(lambda x: jax.lax.map(lambda row: row[None] @ w[:, :3], x))(x)

    shapes = shapes_of(function, zeros(5, 7), zeros(7, 7))

    found = {(shape.num_rows, shape.num_inputs, shape.num_outputs) for shape in shapes}
    assert found == {(5, 7, 7), (1, 7, 3)}
    assert {shape.form for shape in shapes} == {""}


def test_only_what_a_cpu_computes_is_found():
    def function(x, w):
        return jax.lax.platform_dependent(x, w, cpu=lambda x, w: x @ w, default=lambda x, w: (w.T @ x.T).T)

    (shape,) = shapes_of(function, zeros(5, 7), zeros(7, 3))
    assert shape == ProductShape("", 7, 3, 5, "float32")


def test_the_rows_are_those_of_the_tokens_whichever_operand_they_are():
    (shape,) = shapes_of(rows_by_weights, zeros(5, 30), zeros(11, 30))

    assert shape == ProductShape(BY_WEIGHTS, 30, 11, ROW_BLOCK, "float32")


def test_sums_of_floats_that_are_no_products_are_found():
    def function(x):
        y = jax.lax.platform_dependent(x, cpu=lambda x: x.sum(-1), default=lambda x: jnp.cumsum(x, -1)[:, -1])
        return y, jnp.cumsum(jnp.argmax(x, -1))

    assert other_float_sums(jax.make_jaxpr(function)(zeros(5, 7))) == {"reduce_sum"}


# What steps are made of. Sizes are of no other test, so that no trace of another one is found again.


@pytest.fixture
def no_trials(monkeypatch):
    """A machine on which no other number of rows has the bits of ROW_BLOCK rows."""
    monkeypatch.setattr(row_products, "equal_row_counts", lambda *_: frozenset())


SIZES: dict[str, Any] = {"hidden_size": 520, "intermediate_size": 530, "num_layers": 1, "max_position": 256}
ENGINE: dict[str, Any] = {"max_num_seqs": 40, "max_model_len": 256, "page_size": 32, "num_pages": 64}
MODELS: dict[str, dict[str, Any]] = {
    "one query head per KV head": {"num_heads": 3, "num_kv_heads": 3, "head_dim": 24},
    "groups of three": {"num_heads": 6, "num_kv_heads": 2, "head_dim": 64},
    "groups of seven, norms": {"num_heads": 7, "num_kv_heads": 1, "head_dim": 80, "has_qk_norm": True},
    "groups of sixteen": {"num_heads": 16, "num_kv_heads": 1, "head_dim": 128},
    "window, biases": {
        **{"num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "sliding_window": 40},
        **{"has_qkv_bias": True, "has_mlp_bias": True},
    },
}
ENGINES: dict[str, dict[str, Any]] = {
    "drafts": {"max_drafts": 7},
    "trees": {"max_drafts": 5, "draft_trees": True},
    "loops": {"decode_loop_steps": 4},
    "prompts": {"max_prompt_log_probs": 2, "max_log_probs": 3, "page_size": 16},
    "large steps": {"max_num_batched_tokens": 1000, "max_mixed_tokens": 48, "page_size": 128},
    "tiny steps": {"max_num_seqs": 3, "max_num_batched_tokens": 5, "max_drafts": 2, "page_size": 64},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
}
CASES = [("groups of three", engine) for engine in ENGINES] + [(model, "trees") for model in MODELS]


def model_config(model, vocab_size):
    return uniform_decoder(vocab_size=vocab_size, **SIZES, **MODELS[model])


def step_traces(model, engine, vocab_size) -> dict[str, ClosedJaxpr]:
    """Returns what each step of an engine computes, by the name of its shape."""
    config = EngineConfig(**{**ENGINE, **ENGINES[engine]})
    model_ = model_config(model, vocab_size)
    params = abstract_params(model_, FLOAT)
    if config.quantization is not None:
        bits, group_size = {"int8": (8, None), "int4": (4, 2)}[config.quantization]
        params = jax.eval_shape(
            functools.partial(quantize_params, config=model_, bits=bits, group_size=group_size), params
        )
    target = plan_target(params, MemoryQuestion(model=model_, config=config, dtype="float32"), {})
    compiler = StepCompiler(target, config.max_drafts if loop_steps(config) == 1 else 0)
    # A draw takes the logits of a step, and multiplies nothing.
    buckets = [bucket for bucket in compiler.buckets if not bucket.is_draw]
    return {bucket.name: compiler.trace(target.cache_config, bucket) for bucket in buckets}


def products_of(traces):
    return {name: product_shapes(trace) for name, trace in traces.items()}


def operands(shapes):
    return {(shape.form, shape.num_inputs, shape.num_outputs) for shape in shapes}


def check_one_shape(steps):
    """Asserts that all products have ROW_BLOCK rows, and that steps of the whole model have the same ones."""
    shapes = frozenset().union(*steps.values())
    assert {shape.form for shape in shapes} == {BY_WEIGHTS, BY_MATRICES}
    assert {shape.num_rows for shape in shapes} == {ROW_BLOCK}
    whole = {name: operands(found) for name, found in steps.items()}
    assert len(whole) > 1
    assert len({frozenset(found) for found in whole.values()}) == 1


@pytest.mark.parametrize(("model", "engine"), CASES)
def test_every_product_of_a_token_has_one_shape_in_every_step(model, engine, no_trials):
    traces = step_traces(model, engine, vocab_size=301)

    check_one_shape(products_of(traces))
    assert frozenset().union(*map(other_float_sums, traces.values())) == frozenset()


@pytest.mark.parametrize(
    ("model", "engine"), [("groups of three", "drafts"), ("groups of seven, norms", "large steps")]
)
def test_other_numbers_of_rows_are_those_that_were_tried(model, engine):
    steps = products_of(step_traces(model, engine, vocab_size=303))

    for shape in frozenset().union(*steps.values()):
        tried = (shape.form, shape.num_inputs, shape.num_outputs, FLOAT)
        form, *sizes = tried
        assert shape.num_rows == ROW_BLOCK or shape.num_rows in equal_row_counts(form, (shape.num_rows,), *sizes)


# Heads and models that draft: they decide no token, but have the same rule.


def traced_heads(heads, params, num_rows, depth):
    D, window = heads.hidden_size, heads.window
    windows, rows, tokens = (
        zeros(50, window, D),
        zeros(num_rows, dtype=np.int32),
        zeros(num_rows, window, dtype=np.int32),
    )
    sampling = replace(make_sampling([], num_rows=num_rows), processors=None)
    inputs = (params, heads, windows, rows, tokens, rows, sampling, rows)
    return product_shapes(draft_from_states.trace(*inputs, paths=chain_of(depth)).jaxpr)


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_every_product_of_a_draft_head_has_one_shape_for_any_number_of_rows(kind, no_trials):
    config = model_config("groups of three", vocab_size=307)
    params, D = abstract_params(config, FLOAT), config.hidden_size
    heads: Any = MedusaHeads(zeros(2, D, 2 * D))
    if kind == "eagle":
        layer = jax.tree.map(lambda x: zeros(*x.shape[1:]), params.layers[0])
        norms = {name: zeros(D) for name in ("embedding_norm", "hidden_norm", "final_norm")}
        heads = EagleHead(input=zeros(D, 2 * D), layer=layer, config=config, window=6, **norms)

    steps = {str(rows): traced_heads(heads, params, rows, depth=2) for rows in (1, 8, 40)}

    assert {shape.num_rows for shape in frozenset().union(*steps.values())} == {ROW_BLOCK}
    assert len(set(steps.values())) == 1


def test_every_product_of_a_draft_model_has_one_shape(no_trials):
    config = model_config("groups of seven, norms", vocab_size=309)
    cache = abstract_cache(config, CacheConfig(num_pages=20, page_size=32))
    steps, options = {}, StepOptions(config=config, max_drafts=3)
    for num_rows, num_tokens in ((1, 1), (8, 8), (8, 64), (3, 200)):
        batch = make_batch([], page_size=32, num_tokens=num_tokens, num_rows=num_rows, table_width=4)
        inputs = (abstract_params(config, FLOAT), cache, batch, make_sampling([], num_rows=num_rows))
        trace = draft_step.trace(*inputs, zeros(num_rows, dtype=np.int32), options=options)
        steps[f"{num_tokens} tokens of {num_rows}"] = product_shapes(trace.jaxpr)

    check_one_shape(steps)


# Attention by itself, for all heads and pages.

# tokens, rows, tokens in a row at most, trees: prefill, decoding, verification of 1 to 8 drafts
CALLS = [(128, 8, None, False), (5, 2, None, False), (1, 1, 1, False), (8, 8, 1, False), (40, 40, 1, False)]
CALLS += [(2 * q_len, 2, q_len, is_tree) for q_len in range(2, 10) for is_tree in (False, True)]
FEW_CALLS = [(128, 8, None, False), (8, 8, 1, False), (10, 2, 5, True)]


def attention_products(head_dim, group, page_size, call):
    num_tokens, num_rows, q_len, is_tree = call
    pages = abstract_pages(16, page_size, 2, head_dim, FLOAT, "cpu")
    arrays = {
        "block_tables": zeros(num_rows, 4, dtype=np.int32),
        "kv_lens": zeros(num_rows, dtype=np.int32),
        "cu_q_lens": zeros(num_rows + 1, dtype=np.int32),
        "tree_mask": zeros(num_tokens, 1, dtype=np.uint32) if is_tree else None,
    }
    q, kv = zeros(num_tokens, 2 * group, head_dim), zeros(num_tokens, 2, head_dim)
    attend = functools.partial(by_name(paged_attention), scale=1.0, q_len=q_len, implementation="reference")
    return product_shapes(jax.make_jaxpr(lambda arrays, *args: attend(*args, **arrays))(arrays, q, kv, kv, pages))


def check_attention(head_dim, group, page_size, calls):
    width = -(-head_dim // LANES) * LANES
    for call in calls:
        assert attention_products(head_dim, group, page_size, call) == {
            ProductShape(BY_MATRICES, width, page_size, ROW_BLOCK, "float32"),
            ProductShape(BY_MATRICES, page_size, width, ROW_BLOCK, "float32"),
        }, call


@pytest.mark.parametrize(("head_dim", "group", "page_size"), SOME_HEADS_AND_PAGES)
def test_every_product_of_attention_has_one_shape(head_dim, group, page_size, no_trials):
    check_attention(head_dim, group, page_size, FEW_CALLS)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("head_dim", "group", "page_size"), ALL_HEADS_AND_PAGES)
def test_every_product_of_attention_has_one_shape_for_all_heads_and_pages(head_dim, group, page_size, no_trials):
    check_attention(head_dim, group, page_size, CALLS)
