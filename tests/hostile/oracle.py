"""A call with a wrong value is honoured as the value means, or refused by an error that helps."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection
from typing import Any

import jaxinfer
import kernels_pallas.paged_attention
from tests.hostile.cases import limits
from tests.hostile.values import OwnError

PACKAGES = (*jaxinfer.__path__, *kernels_pallas.paged_attention.__path__)
# A caller's mistake, a state in which the call is not allowed, a file that is not there.
REFUSALS = (ValueError, TypeError, NotImplementedError, RuntimeError)
LIBRARY = (*REFUSALS, OverflowError)
MAX_MESSAGE = 2_000  # characters
REFUSED = object()


def refused_or_returned(call: Callable[[], Any], names: Collection[str], *, is_passed_on: bool = False) -> Any:
    """Returns what the call returns, REFUSED where it raises an error that names one of the arguments.

    Any other error is a defect: one of a wrong type, one from the middle of the code, or one that says too little.
    `is_passed_on`: the error may be a library's own.
    """
    try:
        with limits():
            return call()
    except OwnError:
        return REFUSED
    except Exception as error:
        problem = _problem(error, names, is_passed_on)
        if problem is None:
            return REFUSED
        raise AssertionError(f"{type(error).__name__}: {str(error)[:500]!r} {problem}") from error


def _problem(error: Exception, names: Collection[str], is_passed_on: bool) -> str | None:
    """Returns what is wrong with an error, None if it helps."""
    message = str(error)
    if isinstance(error, OSError):
        return None if error.filename is not None else "names no file"
    if isinstance(error, RecursionError) or not isinstance(error, LIBRARY if is_passed_on else REFUSALS):
        return "is no refusal"
    if not any(name in message for name in names):
        return f"names none of {sorted(names)}"
    if len(message) > MAX_MESSAGE:
        return f"has {len(message)} characters"
    return None if is_passed_on or _is_ours(error) else f"comes from {traceback.format_exception(error)[-2]}"


def _is_ours(error: BaseException) -> bool:
    """True if code of the two packages has raised the error."""
    return traceback.extract_tb(error.__traceback__)[-1].filename.startswith(PACKAGES)
