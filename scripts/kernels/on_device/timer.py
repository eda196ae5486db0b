"""Seconds for which a device computes: by its profiler if there is one, else by many calls inside one program.

A clock around one call also measures its launch, 50 to 75 µs on a GPU, and so ranks the noise of short kernels.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

REPEATS = 10
# A number that no result has. The loop compares a result with it, so the compiler must compute the result.
IMPOSSIBLE = 1.2345e30
Arguments = tuple[Any, ...]


class Timed(NamedTuple):
    """The device's seconds for one call, and the timer that measured them."""

    seconds: float
    timer: str  # "trace" or "loop"
    note: str = ""  # the reason why the profiler did not


def device_seconds(
    function: Callable,
    argument_sets: Sequence[Arguments],
    *,
    repeats: int = REPEATS,
    options: Mapping[str, Any] | None = None,
) -> Timed:
    """Returns the median seconds of one call of a pure function, compiled with these options of XLA.

    Each round calls it once for each of `argument_sets`. If these together exceed the caches, each call reads from
    memory. Raises the function's own errors.
    """
    options = None if options is None else dict(options)
    refusal = ""
    if profile := PROFILERS.get(jax.default_backend()):
        call_all = jax.jit(lambda sets: [function(*arguments) for arguments in sets], compiler_options=options)
        jax.block_until_ready(call_all(argument_sets))
        try:
            return Timed(profile(call_all, argument_sets, repeats) / len(argument_sets), "trace")
        except Exception as error:  # the loop needs nothing of the driver
            refusal = f"trace: {type(error).__name__}: {str(error)[:80]}"
    return Timed(_by_loop(function, argument_sets, repeats, options) / len(argument_sets), "loop", refusal)


def _by_trace(function: Callable, argument: Any, repeats: int) -> float:
    """Returns the mean over calls of the device's busy seconds."""

    def run() -> None:
        jax.block_until_ready([function(argument) for _ in range(repeats)][-1])

    return busy_seconds(run) / repeats


# By platform. Not Mosaic's profiler: on an H200 (jax 0.11.2) it ended the process when it lost a record.
PROFILERS: dict[str, Callable[[Callable, Any, int], float]] = {"gpu": _by_trace, "tpu": _by_trace}


def busy_seconds(run: Callable[[], Any]) -> float:
    """Returns the seconds of `run` in which the device computes or copies, by the profiler of jax.

    Raises RuntimeError if the profile has no device.
    """
    with tempfile.TemporaryDirectory(prefix="profile-") as folder:
        with jax.profiler.trace(folder):
            run()
        files = sorted(Path(folder).rglob("*.xplane.pb"))
        if not files:
            raise RuntimeError("the profiler wrote no file")
        return busy_seconds_of(jax.profiler.ProfileData.from_file(str(files[-1])).planes)


def busy_seconds_of(planes: Iterable[Any]) -> float:
    """Returns the seconds that the events of a device cover; raises RuntimeError if no plane is a device's.

    A TPU has a line of whole programs. A GPU has a line for each stream, with a kernel or a copy as an event.
    """
    events: list[tuple[float, float]] = []
    for plane in planes:
        if plane.name.startswith("/device:"):
            lines = [line for line in plane.lines if line.name == "XLA Modules"]
            lines = lines or [line for line in plane.lines if line.name.startswith("Stream")]
            events += [(e.start_ns, e.start_ns + e.duration_ns) for line in lines for e in line.events]
    if not events:
        raise RuntimeError("the profile has no events of a device")
    covered, last = 0.0, float("-inf")
    for start, end in sorted(events):
        covered += max(end - max(start, last), 0.0)
        last = max(last, end)
    return covered / 1e9


def _by_loop(
    function: Callable, argument_sets: Sequence[Arguments], repeats: int, options: dict[str, Any] | None
) -> float:
    """Returns the least time of a round among three runs of the loop, the launch of the loop included."""
    program = loop_of(function, repeats, options)
    zero = program(argument_sets, jnp.int32(0)).block_until_ready()
    times = []
    for _ in range(3):
        start = time.perf_counter()
        program(argument_sets, zero).block_until_ready()
        times.append((time.perf_counter() - start) / repeats)
    return min(times)


def loop_of(function: Callable, repeats: int, options: dict[str, Any] | None = None) -> Any:
    """Returns a jitted (argument_sets, i32 zero) -> i32 zero, which calls the function `repeats` times for each set."""

    def run(argument_sets: Sequence[Arguments], zero: jax.Array) -> jax.Array:
        def run_round(_: Any, zero: jax.Array) -> jax.Array:
            for arguments in argument_sets:
                zero = _zero_of(function(*_after(arguments, zero)))
            return zero

        # A constant number of rounds lets a GPU run the loop without the host.
        return jax.lax.fori_loop(0, repeats, run_round, zero)

    return jax.jit(run, compiler_options=options)


def _after(arguments: Arguments, zero: jax.Array) -> Arguments:
    """Returns the arguments, which now depend on `zero`: no call can leave the loop or run beside another."""
    arguments, zero = jax.lax.optimization_barrier((arguments, zero))
    leaves, tree = jax.tree.flatten(arguments)
    smallest = min(range(len(leaves)), key=lambda i: leaves[i].size)
    leaves[smallest] = leaves[smallest] + zero.astype(leaves[smallest].dtype)
    return jax.tree.unflatten(tree, leaves)


def _zero_of(results: Any) -> jax.Array:
    """Returns an i32 zero that the compiler cannot know without the results."""
    first = jax.lax.optimization_barrier(jax.tree.leaves(results))[0]
    return (jnp.ravel(first)[0].astype(jnp.float32) == jnp.float32(IMPOSSIBLE)).astype(jnp.int32)
