"""The choice among the implementations of an operation that falls back to plain JAX."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax

from kernels_pallas.device import device_at_hand


class NoGainError(NotImplementedError):
    """A call for which a kernel would gain nothing: plain JAX computes it without a warning."""


def call_best(
    implementations: Mapping[str, Callable[..., jax.Array]], name: str | None, operands: tuple[Any, ...]
) -> jax.Array:
    """Returns the result of the implementation of that name, or of the first that supports the call.

    A call that the device's own kernel does not support is computed by a later implementation, with a RuntimeWarning
    that gives the kernel's reason. Python's default filter shows each text once.

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
        except NotImplementedError as error:
            if candidate == names[-1]:
                raise
            if candidate == device_at_hand().platform and not isinstance(error, NoGainError):
                kernel = getattr(implementations[candidate], "__name__", candidate)
                warnings.warn(f"plain JAX takes the place of {kernel}: {error}", RuntimeWarning, stacklevel=2)
    raise RuntimeError("no implementation is registered")
