"""Calls of attention by the names of all that they have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from kernels_pallas.paged_attention.call import AttentionCall

_FIELDS = {field.name for field in fields(AttentionCall)}


def by_name(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an implementation of attention that takes the fields of its `AttentionCall` as named arguments."""

    def attend_by_name(*args: Any, **named: Any) -> Any:
        call = AttentionCall(**{name: value for name, value in named.items() if name in _FIELDS})
        others = {name: value for name, value in named.items() if name not in _FIELDS}
        return attend(*args, call=call, **others)

    attend_by_name.__name__ = getattr(attend, "__name__", "attend_by_name")  # the name of a jitted program
    return attend_by_name
