"""The choice among the implementations of an operation that falls back to plain JAX."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax


def call_best(
    implementations: Mapping[str, Callable[..., jax.Array]], name: str | None, operands: tuple[Any, ...]
) -> jax.Array:
    """Returns the result of the implementation of that name, or of the first that supports the call.

    Raises:
      ValueError: for an unknown name.
      NotImplementedError: if the named implementation cannot do this call, with its reason.
    """
    if name is not None and name not in implementations:
        raise ValueError(f"implementation={name!r:.80} is unknown; choose from {sorted(implementations)} or None")
    names = list(implementations) if name is None else [name]
    for candidate in names:
        try:
            return implementations[candidate](*operands)
        except NotImplementedError:
            if candidate == names[-1]:
                raise
    raise RuntimeError("no implementation is registered")
