"""The moments of a product's inputs in each layer, against the inputs that `transformers` gives its own modules."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxinfer.checkpoint import Checkpoint, read_config
from jaxinfer.checkpoint.checkpoint import read_tensors
from jaxinfer.checkpoint.making.assemblies import Assembly
from jaxinfer.model.calibration import embed_texts, input_moments, run_layer
from tests.checkpoint.renamed import read_tensors as read_tensors_of
from tests.oracles import load_reference, save_random_checkpoint

# Layers with an embedding each, of which one reads another's keys; branches with a recurrent one; and experts.
FAMILIES = {
    "gemma4_text": {"layer_types": ["full_attention"] * 2, "num_kv_shared_layers": 1, "enable_moe_block": False},
    "falcon_h1": {},
    "qwen3_moe": {},
}
TEXTS = np.random.default_rng(0).integers(0, 96, (2, 24))


def inputs_of_modules(path):
    """Returns the inputs [B * T, in] of each module that has one, by name, in a pass over TEXTS."""
    model, inputs, handles = load_reference(path), {}, []
    for name, module in model.named_modules():

        def keep(_, args, name=name):
            if args and isinstance(args[0], torch.Tensor):
                inputs[name] = args[0].detach().reshape(-1, args[0].shape[-1]).numpy()

        handles.append(module.register_forward_pre_hook(keep))
    with torch.no_grad():
        model(torch.tensor(TEXTS), use_cache=False)
    return inputs


def moments_of_layers(path):
    """Yields the stored names and the moments of each weight of a product, layer by layer."""
    config = read_config(path)
    config = config.regrouped((1,) * config.num_layers)
    plan, stored = Checkpoint(path).plan(config)
    params = read_tensors(plan, stored, np.float32)
    activations = embed_texts(params, jnp.asarray(TEXTS, jnp.int32), config=config)
    for index, layer in enumerate(plan.layers):
        assemblies = jax.tree.leaves(layer, is_leaf=lambda node: isinstance(node, Assembly))
        observed = tuple(
            (i, a.num_stacked)
            for i, a in enumerate(assemblies)
            if a.is_packable and a.spec.num_inputs and len(a.stored_shape) == 2
        )
        moments = input_moments(params.layers[index], activations, observed, config=config, index=index)
        for i, own in moments.items():
            size = own.products.shape[-1]
            yield assemblies[i].names, own.products.reshape(-1, size, size), own.num_inputs.reshape(-1)
        activations = run_layer(params.layers[index], activations, config=config, index=index)


def inputs_of_experts(path, name, inputs):
    """Returns the inputs of expert weights, from those of the whole network and the weights, in NumPy."""
    stored = {stored: tensor.numpy() for stored, tensor in read_tensors_of(path).items()}
    network, _, rest = name.partition(".experts.")
    expert, which, _ = rest.split(".")
    x = inputs[network].astype(np.float64)
    scores = x @ stored[f"{network}.gate.weight"].T
    chosen = np.argsort(-scores, axis=1)[:, :2]
    own = x[(chosen == int(expert)).any(1)]
    if which != "down_proj":
        return own
    gate, up = (own @ stored[f"{network}.experts.{expert}.{part}_proj.weight"].T for part in ("gate", "up"))
    return gate / (1 + np.exp(-gate)) * up


@pytest.mark.parametrize("family", FAMILIES)
def test_moments_are_those_of_the_inputs_of_each_module(family, tmp_path):
    path = save_random_checkpoint(tmp_path / family, family, num_hidden_layers=2, **FAMILIES[family])
    inputs = inputs_of_modules(path)
    num_compared = 0

    for names, products, counts in moments_of_layers(path):
        for name, product, count in zip(names, products, counts, strict=True):
            module = name.removesuffix(".weight")
            x = inputs_of_experts(path, name, inputs) if ".experts." in name else inputs[module].astype(np.float64)
            expected = x.T @ x
            # float32 through up to four layers
            np.testing.assert_allclose(product, expected, rtol=0, atol=1e-4 * np.abs(expected).max(initial=1e-6))
            assert count == len(x), name
            num_compared += 1
    assert num_compared > 10
