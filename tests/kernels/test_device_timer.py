"""Device times: by a profiler if there is one, else by calls inside one program."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scripts.kernels.on_device import timer


def plane(name, **lines):
    events = {
        line: [SimpleNamespace(start_ns=start, duration_ns=length) for start, length in each]
        for line, each in lines.items()
    }
    lines = [SimpleNamespace(name=line.replace("_", " "), events=each) for line, each in events.items()]
    return SimpleNamespace(name=name, lines=lines)


def test_the_loop_runs_every_call_of_every_round():
    calls = []

    def function(x):
        return jax.pure_callback(lambda x: (calls.append(int(x[0])), x)[1], x, x)

    timed = timer.device_seconds(function, [(jnp.ones(2, jnp.int32),), (jnp.full(2, 7, jnp.int32),)], repeats=5)

    assert timed.timer == "loop"
    assert timed.seconds > 0
    # One program to compile and three to time; in each the calls take turns.
    assert calls == [1, 7] * 5 * 4


def test_the_loop_computes_in_each_round_what_does_not_depend_on_its_smallest_argument():
    """A compiler would like to multiply the two matrices once, before the loop."""
    n = 256
    loop = timer.loop_of(lambda a, x: jnp.sin(a) @ a + x, repeats=4)

    text = loop.lower([(jnp.ones((n, n)), jnp.ones((1, 1)))], jnp.int32(0)).compile().as_text()

    entry = text[text.index("\nENTRY ") :]
    assert " while(" in entry
    for operation in (" dot(", " sine("):
        assert operation in text
        assert operation not in entry


@pytest.mark.parametrize(
    ("planes", "seconds"),
    [
        # Kernels that overlap count once; the host and other lines of the device do not count.
        (
            [
                plane("/host:CPU", python=[(0, 9e9)]),
                plane("/device:GPU:0", Stream_1=[(0, 2e9), (5e9, 1e9)], Stream_2=[(1e9, 2e9)], Steps=[(0, 9e9)]),
            ],
            4.0,
        ),
        ([plane("/device:TPU:0", XLA_Modules=[(1e9, 2e9)], XLA_Ops=[(0, 9e9)])], 2.0),
    ],
    ids=["gpu", "tpu"],
)
def test_busy_seconds_are_those_that_events_of_the_device_cover(planes, seconds):
    assert timer.busy_seconds_of(planes) == pytest.approx(seconds)


def test_a_profile_without_a_device_is_an_error():
    with pytest.raises(RuntimeError, match="no events of a device"):
        timer.busy_seconds(lambda: jax.block_until_ready(jnp.ones(3) + 1))


def test_the_profiler_counts_all_sets_of_arguments(monkeypatch):
    def profile(function, argument, repeats):
        np.testing.assert_array_equal(function(argument), [[2.0], [3.0]])
        return 6.0

    monkeypatch.setattr(timer, "PROFILERS", {"cpu": profile})

    timed = timer.device_seconds(lambda x: x + 1, [(jnp.ones(1),), (jnp.full(1, 2.0),)])

    assert timed == (3.0, "trace", "")


def test_a_loop_counts_where_the_profiler_fails_and_says_why(monkeypatch):
    def profile(function, argument, repeats):
        raise RuntimeError("no driver")

    monkeypatch.setattr(timer, "PROFILERS", {"cpu": profile})

    timed = timer.device_seconds(lambda x: x + 1, [(jnp.ones(1),)])

    assert timed[1:] == ("loop", "trace: RuntimeError: no driver")
    assert timed.seconds > 0


def test_errors_of_the_function_are_not_those_of_a_timer(monkeypatch):
    monkeypatch.setattr(timer, "PROFILERS", {"cpu": timer._by_trace})

    def refuse(x):
        raise NotImplementedError("not on this device")

    with pytest.raises(NotImplementedError, match="not on this device"):
        timer.device_seconds(refuse, [(jnp.ones(1),)])
