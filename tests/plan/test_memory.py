"""How many pages fit is arithmetic on what compiled functions need, whatever was guessed before."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.plan.memory import (
    UNTOLD_BYTES,
    MemoryPlan,
    fit_pages,
    num_bytes,
    step_bytes,
    usable_pages,
)

GUESS = MemoryPlan(resident_bytes=1000, step_bytes=500, page_bytes=10, num_pages=800, limit_bytes=5000)


def fit(needed, *, reserved=0, is_fixed=False, allowed=lambda num_pages: num_pages, **changes):
    """Returns the plan and for how many pages was compiled; `needed` says what that then needs."""
    compiled = []

    def compile_for(num_pages):
        compiled.append(num_pages)
        return num_pages, needed(num_pages)

    guess = GUESS.__class__(**{**vars(GUESS), **changes})
    last, plan = fit_pages(compile_for, guess, is_fixed=is_fixed, reserved=reserved, allowed=allowed)
    assert last == plan.num_pages == compiled[-1]
    return plan, compiled


def test_pages_take_what_parameters_and_steps_leave():
    plan, compiled = fit(lambda _: 500)

    assert plan.num_pages == 348  # (5000 - 1000 - 500) // 10, in steps of 256 // 64
    assert plan.total_bytes == 4980
    assert compiled == [348]


def test_a_limit_below_the_parameters_is_refused_with_what_makes_them_fewer():
    with pytest.raises(ValueError, match=r"the parameters alone do not fit: .* set EngineConfig.quantization"):
        fit(lambda _: 0, limit_bytes=900)


def test_a_guess_that_was_too_low_is_compiled_again_for_fewer_pages():
    plan, compiled = fit(lambda _: 1500)

    assert compiled == [348, 250]
    assert (plan.step_bytes, plan.total_bytes) == (1500, 5000)


def test_a_guess_that_wastes_memory_is_compiled_again_for_more_pages():
    plan, compiled = fit(lambda _: 100)

    assert compiled == [348, 388]
    assert plan.total_bytes == 4980


def test_what_a_guess_wastes_within_a_fiftieth_of_the_limit_is_not_worth_compiling_again():
    plan, compiled = fit(lambda _: 420)  # two steps of 4 pages of 10 bytes more

    assert compiled == [348]
    assert plan.total_bytes == 4900


def test_needs_that_grow_with_the_pages_are_met_as_well():
    plan, _ = fit(lambda num_pages: 500 + 2 * num_pages)

    # A fiftieth is not worth compiling again, and pages come in steps of at most 1/64 of them.
    assert (0.98 - 1 / 64) * 5000 <= plan.total_bytes <= 5000
    assert plan.step_bytes == 500 + 2 * plan.num_pages


@pytest.mark.parametrize("needed", [0, 100, 500])
def test_a_guess_that_is_enough_stays_reserved_for_steps_that_are_compiled_later(needed):
    plan, compiled = fit(lambda _: needed, reserved=GUESS.step_bytes)

    assert compiled == [348]
    assert (plan.step_bytes, plan.total_bytes) == (500, 4980)


def test_a_reserve_that_is_too_small_is_planned_again_and_kept():
    plan, compiled = fit(lambda num_pages: 1000 + 100 * (num_pages < 348), reserved=GUESS.step_bytes)

    assert compiled == [348, 300, 288]
    assert (plan.step_bytes, plan.total_bytes) == (1100, 4980)


def test_given_pages_that_fit_beside_the_need_are_kept_though_the_guess_leaves_less():
    plan, compiled = fit(lambda _: 100, reserved=GUESS.step_bytes, is_fixed=True, num_pages=380)

    assert compiled == [380]
    assert (plan.num_pages, plan.step_bytes, plan.total_bytes) == (380, 200, 5000)


def test_without_a_limit_the_plan_says_what_steps_need():
    plan, compiled = fit(lambda _: 700, limit_bytes=None)

    assert (compiled, plan.step_bytes, plan.num_pages) == ([800], 700, 800)


def test_a_reserve_without_room_for_a_page_is_refused():
    with pytest.raises(ValueError, match=r"memory_bytes=1505 is too little: .*; raise EngineConfig.memory_bytes"):
        fit(lambda _: 500, reserved=GUESS.step_bytes, limit_bytes=1505)


MANY: dict[str, Any] = {"resident_bytes": 16 * 10**9, "step_bytes": 10**9, "page_bytes": 2**21, "num_pages": 10**6}


def test_limits_that_differ_by_a_few_megabytes_have_the_same_number_of_pages():
    limits = [80 * 10**9 + megabytes * 10**6 for megabytes in (0, 1, 5, 40)]

    plans = [fit(lambda _: 10**9, limit_bytes=limit, **MANY)[0] for limit in limits]

    assert len({plan.num_fitting for plan in plans}) == 4
    assert {plan.num_pages for plan in plans} == {29_952}  # of 30,040 a multiple of 2^14 / 64


@pytest.mark.parametrize("num_fitting", [*range(1, 130), 255, 256, 257, 10_239, 10_240, 65_535, 65_537])
def test_steps_of_pages_leave_at_most_a_64th_of_them_unused(num_fitting):
    plan = MemoryPlan(resident_bytes=0, step_bytes=0, page_bytes=10, num_pages=1, limit_bytes=10 * num_fitting + 9)

    usable = usable_pages(plan, 10**6)

    assert num_fitting * 63 / 64 < usable <= num_fitting
    assert usable == num_fitting or num_fitting >= 128
    assert usable_pages(plan, num_fitting) == num_fitting  # the most that is of use


def test_a_number_of_pages_that_is_given_stays():
    assert fit(lambda _: 500, is_fixed=True, num_pages=349)[1] == [349]  # in steps it would be 348


def test_pages_that_no_kernel_can_use_are_left_out():
    plan, compiled = fit(lambda _: 100, allowed=lambda num_pages: min(num_pages, 300))

    assert (plan.num_pages, compiled) == (300, [300])


@pytest.mark.parametrize("changes", [{"num_pages": 20}, {"limit_bytes": None, "num_pages": 20}], ids=str)
def test_there_are_no_more_pages_than_are_of_use(changes):
    assert fit(lambda _: 500, **changes) == (MemoryPlan(**{**vars(GUESS), **changes}), [20])


@pytest.mark.parametrize(
    ("changes", "is_fixed"),
    [({"limit_bytes": 1505}, False), ({"num_pages": 351}, True)],
    ids=str,
)
def test_a_limit_without_room_is_refused(changes, is_fixed):
    with pytest.raises(
        ValueError, match=r"memory_bytes=\d+ is too little: .*; raise EngineConfig.memory_bytes or lower"
    ):
        fit(lambda _: 500, is_fixed=is_fixed, **changes)


def test_a_compiled_function_needs_its_temporaries_and_what_goes_in_and_out_of_two_calls():
    def function(state, x):
        return state.at[0].set(x.sum()), jnp.sort(jnp.outer(x, x))

    state, x = jnp.zeros(1000), np.ones(100, np.float32)
    compiled = jax.jit(function, donate_argnums=0).lower(state, x).compile()

    needed = step_bytes(compiled, [x])

    # In 400 bytes, out 40,000, and the state stays where it is; the product before it is sorted is as large.
    assert 2 * (400 + 40_000) <= needed <= 2 * (400 + 40_000) + 50_000
    assert num_bytes({"a": x, "b": jax.ShapeDtypeStruct((3, 2), jnp.bfloat16)}) == 400 + 12
    assert num_bytes(jax.ShapeDtypeStruct((3, 3), jnp.int4)) == 5  # two to a byte, as in a TPU's memory


def test_a_function_that_does_not_say_what_it_needs_has_a_reserve():
    class Silent:
        def memory_analysis(self):
            return None

    silent: Any = Silent()

    assert step_bytes(silent, []) == UNTOLD_BYTES
