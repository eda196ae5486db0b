"""Compiled functions on disk: loads an executable that the same code has compiled on the same kind of machine.

JAX's own compilation cache needs the traced and lowered function for its key: half of a small model's start. Our key
hashes the inputs of tracing (source, versions, options, shapes), so a hit skips tracing too. The files lie in JAX's
cache folder or below its URL; disabling that cache disables this one.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import pickle
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax._src import config as jax_config
from jax.experimental.serialize_executable import deserialize_and_load, serialize

from jaxinfer.engine.execution.executable_files import Bucket, Folder, cache_place
from jaxinfer.engine.execution.executable_key import devices_of, executable_key
from kernels_pallas.gpu_products import PASSES, compiler_options, weight_itemsize

logger = logging.getLogger(__name__)

# Exceptions of the device, the disk or JAX when an executable cannot be written or read. Pickle raises AttributeError
# for a function that is local to another, such as a callback to Python.
_FAILURES = (
    *(OSError, ValueError, TypeError, AttributeError, NotImplementedError, pickle.PickleError),
    jax.errors.JaxRuntimeError,
)


def compile_or_load(function: Any, *args: Any, num_rows: int = 1, **statics: Any) -> jax.stages.Compiled:
    """Returns `function.lower(*args, **statics).compile()` for a jitted function of this package, from disk if cached.

    `num_rows`: the most rows of its products with the first argument, by which a GPU multiplies. Always compiles if
    options have logits processors of the user (`custom`), because no key shows their changes.
    """
    place, options = cache_place(), compiler_options(num_rows, weight_itemsize(args[:1]))
    if place is None or _has_custom(statics) or jax.process_count() > 1:
        return _compile(function, args, statics, options)
    name, devices = f"jaxinfer-{_key(function, args, statics, options)}", devices_of(args)
    found = place.identity(name)
    if (loaded := _load(place, name, devices)) is not None:
        return loaded
    with place.compiling_alone(name):
        # Another process may just have written it.
        if place.identity(name) != found and (loaded := _load(place, name, devices)) is not None:
            return loaded
        with _no_jax_entry():
            compiled = _compile(function, args, statics, options, without=[_no_pass()])
        try:
            place.write(name, pickle.dumps(serialize(compiled)))
        except _FAILURES as error:
            logger.warning("%s/%s cannot be kept for the next start: %s", place, name, error)
    return compiled


def _load(place: Folder | Bucket, name: str, devices: list[Any]) -> jax.stages.Compiled | None:
    """Returns the executable in a file; None if there is none that can be loaded."""
    try:
        return deserialize_and_load(*pickle.loads(place.read(name)), execution_devices=devices)
    except FileNotFoundError:
        pass
    except _FAILURES as error:
        logger.warning("%s/%s cannot be loaded and is made anew: %s", place, name, error)
    return None


def _has_custom(statics: dict[str, Any]) -> bool:
    return any(getattr(value, "custom", ()) for value in statics.values())


def _no_jax_entry() -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which this thread's compilations leave no entry in JAX's own cache.

    Such an entry would never be read: `_no_pass` gives each a key of its own.
    """
    # Options have a value per thread, but JAX exports no context manager for this one.
    min_seconds = getattr(jax_config, "persistent_cache_min_compile_time_secs", None)
    return contextlib.nullcontext() if min_seconds is None else min_seconds(math.inf)


def _no_pass() -> str:
    """Returns the name of no pass of XLA, with which JAX compiles anew instead of reading its own cache.

    XLA for CPU serialises an executable that it has itself read from a cache without the functions in it.
    """
    return f"no-pass-{os.urandom(8).hex()}"


def _beside_flags(options: Mapping[str, Any], without: Sequence[str]) -> dict[str, Any]:
    """Returns the options of a compilation that leaves out further passes; those in XLA_FLAGS stay as they are there.

    Passes are left out in addition to those of XLA_FLAGS.
    """
    flags = dict(re.findall(r"--(xla_\w+)(?:=(\S+))?", os.environ.get("XLA_FLAGS", "")))
    kept = {name: value for name, value in options.items() if name not in flags}
    lists = (flags.get(PASSES), options.get(PASSES), *without)
    passes = ",".join(names for names in lists if names)
    return kept | ({PASSES: passes} if passes else {})


def _compile(
    function: Any,
    args: Sequence[Any],
    statics: dict[str, Any],
    options: Mapping[str, Any],
    without: Sequence[str] = (),
) -> jax.stages.Compiled:
    compiled = function.lower(*args, **statics).compile(compiler_options=_beside_flags(options, without))
    # Otherwise JAX keeps all traces and executables until the process ends: thousands of memory maps per engine.
    function.clear_cache()
    return compiled


def _key(function: Any, args: Sequence[Any], statics: dict[str, Any], options: Mapping[str, Any]) -> str:
    return executable_key(function, args, statics, options, compiler=__name__)
