"""Sums in one order on a GPU: kernels against NumPy, a context of which jit knows, and what refuses by name."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from jaxinfer.model.batch import StepTokens
from jaxinfer.model.components.layers import Norm, product, rms_norm
from jaxinfer.quantization import QuantizedArray
from kernels_pallas.exact_sums import exact_sums, highest_enough, norm_rows, refuse_if_exact, sum_rows, sums_are_exact
from kernels_pallas.row_products import row_sum
from tests.checkpoint.test_format_table import kernels_of

H200 = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu"))


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@pytest.mark.parametrize("n", [1, 100, 4096, 4097, 9000])
def test_sums_of_rows_are_those_of_numpy(n):
    x = random(2, 3, n)

    result = sum_rows(jnp.asarray(x), interpret=True)

    np.testing.assert_allclose(result, x.astype(np.float64).sum(-1), atol=1e-5 * n**0.5, rtol=1e-6)


@pytest.mark.parametrize("n", [3, 6000])
def test_a_threshold_is_the_highest_whose_weights_are_enough(n):
    weights, keys = np.abs(random(3, n)).round(2), np.random.default_rng(1).integers(0, 2**32, (3, n), np.uint32)
    wanted = weights.sum(-1) * np.array([0.3, 0.9, 2.0])

    found = highest_enough(jnp.asarray(keys), jnp.asarray(weights), jnp.asarray(wanted, jnp.float32), interpret=True)

    for row in range(2):
        order = np.argsort(keys[row])[::-1]
        count = np.searchsorted(np.cumsum(weights[row][order].astype(np.float64)), wanted[row])
        assert found[row] == keys[row][order[count]]
    assert found[2] == 0  # more than all


@pytest.mark.parametrize("n", [64, 100, 5000])
@pytest.mark.parametrize(("has_weight", "adds_one"), [(False, False), (True, False), (True, True)])
def test_a_norm_of_rows_is_that_of_the_model(n, has_weight, adds_one):
    x, weight = jnp.asarray(random(3, 2, n)), jnp.asarray(random(n, seed=1)) if has_weight else None
    norm = Norm(epsilon=1e-5, adds_one=adds_one)

    result = norm_rows(x, weight, epsilon=norm.epsilon, adds_one=adds_one, interpret=True)

    np.testing.assert_allclose(result, rms_norm(x, weight, norm), rtol=2e-6, atol=2e-6)


def test_a_row_has_the_same_bits_among_others():
    x = jnp.asarray(random(37, 5000))

    np.testing.assert_array_equal(sum_rows(x, interpret=True)[9], sum_rows(x[9:10], interpret=True)[0])
    together, alone = (norm_rows(a, None, epsilon=1e-6, adds_one=False, interpret=True) for a in (x, x[9:10]))
    np.testing.assert_array_equal(together[9], alone[0])


def kernels_in(function, *arguments):
    return {*kernels_of(jax.make_jaxpr(function)(*arguments).jaxpr)}


def test_a_function_is_traced_anew_where_sums_must_be_exact():
    norm = jax.jit(lambda x: rms_norm(x, None, Norm()))
    sums = jax.jit(row_sum)
    x = jnp.ones((2, 8), jnp.bfloat16)

    with jax.sharding.use_abstract_mesh(H200):
        for is_wanted in (False, True, False):
            with exact_sums(is_wanted):
                assert sums_are_exact() == is_wanted
                assert kernels_in(norm, x) == ({"norm_rows"} if is_wanted else set())
                assert kernels_in(sums, x.astype(jnp.float32)) == ({"sum_rows"} if is_wanted else set())


def test_a_cpu_computes_as_always():
    x = jnp.ones((2, 8))

    with exact_sums(True):
        assert not sums_are_exact()
        assert kernels_in(lambda x: rms_norm(x, None, Norm()), x) == set()


def test_what_has_no_order_refuses_by_name_and_with_the_way_out():
    refuse_if_exact("anything")
    weights = QuantizedArray(jnp.ones((16, 48), jnp.int8), jnp.ones((16, 3)))

    with jax.sharding.use_abstract_mesh(H200), exact_sums(True):
        with pytest.raises(
            NotImplementedError, match=r"exact=True is not built for .* scales \(16, 3\) on a GPU; leave"
        ):
            jax.eval_shape(product, jnp.ones((8, 48), jnp.bfloat16), weights)
        with pytest.raises(
            NotImplementedError, match=r"a product of float32 \(8, 32\) by weights \(16, 32\) of float32"
        ):
            jax.eval_shape(product, jnp.ones((8, 32)), jnp.ones((16, 32)), StepTokens(jnp.int32(8)))
