"""The matrix products of a step, read from its trace."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxprs_in_params

from kernels_pallas.row_products import BY_MATRICES, BY_WEIGHTS


@dataclass(frozen=True, order=True)
class ProductShape:
    """`num_rows` rows of `num_inputs` numbers by an operand that makes `num_outputs` of each."""

    form: str  # a name of `row_products.PRODUCTS`; "" for a product that is none of them
    num_inputs: int
    num_outputs: int
    num_rows: int
    dtype: str


def product_shapes(trace: ClosedJaxpr) -> frozenset[ProductShape]:
    """Returns the shapes of all products that a traced function may compute on CPU."""
    return frozenset(_shape_of(equation) for equation in _products_in(trace.jaxpr))


def _products_in(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation
        platforms = equation.params.get("branches_platforms")  # of `jax.lax.platform_dependent`
        if platforms is None:
            parts = jaxprs_in_params(equation.params)
        else:
            branches = zip(platforms, equation.params["branches"], strict=True)
            parts = [next(branch.jaxpr for names, branch in branches if names is None or "cpu" in names)]
        for part in parts:
            yield from _products_in(part)


def _shape_of(equation: JaxprEqn) -> ProductShape:
    left, right = (cast(jax.ShapeDtypeStruct, variable.aval) for variable in equation.invars)
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
