"""The matrix products and other sums of a step on CPU, read from its trace."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxprs_in_params

from kernels_pallas.row_products import BY_MATRICES, BY_WEIGHTS

# Operations that add numbers up in an order of the compiler's.
SUMS = ("reduce_sum", "cumsum", "cumlogsumexp", "reduce_window_sum", "ragged_dot_general", "conv_general_dilated")


@dataclass(frozen=True, order=True)
class ProductShape:
    """`num_rows` rows of `num_inputs` numbers by an operand that makes `num_outputs` of each."""

    form: str  # a name of `row_products.PRODUCTS`; "" for a product that is none of them
    num_inputs: int
    num_outputs: int
    num_rows: int
    dtype: str


def product_shapes(trace: ClosedJaxpr) -> frozenset[ProductShape]:
    """Returns the shapes of all matrix products (`dot_general`) that a traced function may compute on CPU."""
    return frozenset(
        _shape_of(equation) for equation in _equations_in(trace.jaxpr) if equation.primitive.name == "dot_general"
    )


def other_float_sums(trace: ClosedJaxpr) -> frozenset[str]:
    """Returns the names of SUMS that a traced function may compute of floating-point numbers on CPU."""
    return frozenset(
        equation.primitive.name
        for equation in _equations_in(trace.jaxpr)
        if equation.primitive.name in SUMS and jnp.issubdtype(_shaped(equation.outvars[0]).dtype, jnp.floating)
    )


def _equations_in(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    for equation in jaxpr.eqns:
        yield equation
        platforms = equation.params.get("branches_platforms")  # of `jax.lax.platform_dependent`
        if platforms is None:
            parts = jaxprs_in_params(equation.params)
        else:
            branches = zip(platforms, equation.params["branches"], strict=True)
            parts = [branch.jaxpr for names, branch in branches if names is None or "cpu" in names][:1]
        for part in parts:
            yield from _equations_in(part)


def _shape_of(equation: JaxprEqn) -> ProductShape:
    left, right = map(_shaped, equation.invars)
    (summed, summed_right), (batch, batch_right) = equation.params["dimension_numbers"]
    num_left, num_right = (
        math.prod(size for axis, size in enumerate(array.shape) if axis not in others)
        for array, others in ((left, {*summed, *batch}), (right, {*summed_right, *batch_right}))
    )
    scope = str(equation.source_info.name_stack).split("/")
    form = next((form for form in (BY_WEIGHTS, BY_MATRICES) if form in scope), "")
    num_rows, num_outputs = (num_right, num_left) if form == BY_WEIGHTS else (num_left, num_right)
    num_inputs = math.prod(left.shape[axis] for axis in summed)
    return ProductShape(form, num_inputs, num_outputs, num_rows, left.dtype.name)


def _shaped(variable: Any) -> jax.ShapeDtypeStruct:
    return cast(jax.ShapeDtypeStruct, variable.aval)
