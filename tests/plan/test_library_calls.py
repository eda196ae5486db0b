"""In compiled steps no library computes an `exp` or another inexact function: its bits are not those of the compiler.

XLA for CPU gives products to a library, and reductions of 4,096 numbers or more, with what is computed beside them.
"""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.config import CacheConfig
from jaxinfer.model.batch import make_batch
from jaxinfer.model.cache import abstract_cache
from jaxinfer.model.components.attention import Attention
from jaxinfer.model.components.dense_and_experts import DenseAndExperts
from jaxinfer.model.components.latent_attention import LatentAttention
from jaxinfer.model.components.layer_embedding import LayerEmbedding
from jaxinfer.model.components.mlp import MLP
from jaxinfer.model.components.moe import MoE, Router
from jaxinfer.model.components.recurrent.gated_delta_net import GatedDeltaNet
from jaxinfer.model.components.recurrent.selective_scan import SelectiveScan
from jaxinfer.model.components.recurrent.state_space import StateSpace
from jaxinfer.model.components.rope import Rope
from jaxinfer.model.config import RMS_NORM, Layer, LayerGroup, ModelConfig
from jaxinfer.model.layer_parts import Mixer
from jaxinfer.model.params import abstract_params
from jaxinfer.sampling.batch import make_sampling
from jaxinfer.steps.steps import StepOptions, decode_step, prefill_step

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="bits are promised on CPU")

# What is rounded as IEEE 754 says in any implementation, and what moves numbers.
EXACT = {"add", "subtract", "multiply", "divide", "maximum", "minimum", "negate", "abs", "ceil", "floor", "convert"}
MOVES = {"parameter", "constant", "bitcast", "broadcast", "reshape", "transpose", "slice", "concatenate", "pad", "copy"}
ROPE = Rope(dim=8, max_position=256)
ATTENTION = Attention(num_heads=4, num_kv_heads=2, head_dim=8, rope=ROPE, softcap=3.0, has_sinks=True)
MIXERS: tuple[Mixer, ...] = (
    ATTENTION,
    LatentAttention(
        num_heads=4, q_lora_rank=None, kv_lora_rank=32, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, rope=ROPE
    ),
    StateSpace(num_heads=4, head_dim=8, num_groups=2, state_size=16, conv_size=4),
    SelectiveScan(inner_size=64, state_size=16, time_step_rank=8, conv_size=4),
    GatedDeltaNet(num_key_heads=2, num_value_heads=4, key_head_dim=8, value_head_dim=8, conv_size=4),
)
EXPERTS = MoE(num_experts=16, expert=MLP(intermediate_size=32), router=Router(num_chosen=2))
BESIDE = DenseAndExperts(
    dense=MLP(intermediate_size=32),
    experts=replace(EXPERTS, router=Router(num_chosen=2, has_expert_scales=True, norm=RMS_NORM)),
)
NUM_ROWS, VOCAB_SIZE, PAGE_SIZE = 16, 512, 16


def library_calls(program: str) -> list[set[str]]:
    """Returns the operations of each call of a library in a compiled program."""
    names = re.findall(r'calls=(%[\w.-]+).*"kind":"__\w+"', program)
    bodies = [re.search(rf"^{re.escape(name)} [^\n]*\{{\n(.*?)^\}}", program, re.M | re.S) for name in names]
    return [set(re.findall(r" = \S+ ([a-z-]+)\(", body[1])) for body in bodies if body]


@pytest.mark.parametrize(("step", "num_tokens"), [(prefill_step, 512), (decode_step, NUM_ROWS)])
def test_libraries_compute_products_and_maxima_alone(step, num_tokens):
    options: dict[str, Any] = {"embedding": LayerEmbedding(vocab_size=VOCAB_SIZE, size=16), "has_scale": True}
    layers = [Layer(mixer=mixer, feed_forward=EXPERTS, **options) for mixer in MIXERS]
    layers.append(Layer(mixer=replace(ATTENTION, source=0), feed_forward=BESIDE, **options))
    config = ModelConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, max_position=256, groups=(LayerGroup(tuple(layers), 1),)
    )
    batch = make_batch([], page_size=PAGE_SIZE, num_tokens=num_tokens, num_rows=NUM_ROWS, table_width=4)
    sampling = make_sampling([], num_rows=NUM_ROWS, vocab_size=VOCAB_SIZE)
    run = jax.jit(functools.partial(step, options=StepOptions(config=config, max_log_probs=4)))

    cache = abstract_cache(config, CacheConfig(num_pages=64, page_size=PAGE_SIZE))
    program = run.lower(abstract_params(config, jnp.float32), cache, batch, sampling).compile().as_text()

    assert program is not None
    calls = library_calls(program)
    assert any("dot" in call for call in calls)
    assert any("reduce" in call for call in calls)
    assert set().union(*calls) - EXACT - MOVES <= {"dot", "reduce"}
