"""On which terms a request is computed, checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypedDict, cast, get_args

from jaxinfer.engine.request import Priority
from jaxinfer.validation import MAX_FLOAT, is_real, shown


class Terms(TypedDict, total=False):
    """On which terms a request is computed; none of them changes a token of it.

    `priority`: "interactive", the default, goes before "batch" and takes its place in a full engine. `tenant`: for
    whom it is; tenants have turns, so that nobody waits for all requests of another. `deadline`: seconds after which
    the request ends with what it has, finish reason "deadline"; close ones go first. `cache_salt`: keeps the cached
    prefixes of the request to those who give the same salt.
    """

    priority: Priority
    tenant: str
    deadline: float | None
    cache_salt: str | None


def check_names(terms: Mapping[str, Any]) -> None:
    """Raises TypeError for arguments that are no terms."""
    unknown = sorted(terms.keys() - Terms.__annotations__.keys())
    if unknown:
        raise TypeError(
            f"unknown argument {unknown[0]}={shown(terms[unknown[0]])}; the terms of a request are"
            f" {', '.join(Terms.__annotations__)}, and how its tokens are chosen is said by SamplingParams"
        )


def checked_priority(priority: Any) -> Priority:
    if not isinstance(priority, str) or priority not in get_args(Priority):
        raise ValueError(f"priority={shown(priority)} is not allowed: give one of {', '.join(get_args(Priority))}")
    return cast(Priority, priority)


def checked_tenant(tenant: Any) -> str:
    if not isinstance(tenant, str):
        raise ValueError(f"tenant={shown(tenant)} is not allowed: give a name as text, or leave it out")
    return tenant


def checked_time_limit(deadline: Any) -> float:
    if deadline is None:
        return math.inf
    if not is_real(deadline) or not 0 < deadline < MAX_FLOAT:
        raise ValueError(
            f"deadline={shown(deadline)} is not allowed: give seconds from now, above 0, or None for no end"
        )
    return float(deadline)
