"""The strictest settings jax has: no silent promotion of types or ranks."""

import os

# The compilers of the extra `aot` are plugins that look for their devices; tests run on CPU unless told otherwise.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# One folder of compiled steps for all tests of a run, subprocesses included, unless the caller has chosen one.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.path.join(os.path.dirname(__file__), ".compilation_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")

import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
