"""Cases that only `-m exhaustive` runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def exhaustive_but(cases: Iterable[Any], in_every_run: Iterable[Any]) -> list[Any]:
    """The cases as parameters of a test; those that are not in `in_every_run` are marked `exhaustive`.

    A case is the value of one parameter, or a tuple of the values of several.
    """
    chosen = set(in_every_run)

    def marked(case: Any) -> Any:
        values = case if isinstance(case, tuple) else (case,)
        return pytest.param(*values, marks=() if case in chosen else pytest.mark.exhaustive)

    return [marked(case) for case in cases]
