"""Cases that only `-m exhaustive` runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def exhaustive_but(names: Iterable[str], in_every_run: Iterable[str]) -> list[Any]:
    """The names as parameters of a test; those that are not in `in_every_run` are marked `exhaustive`."""
    chosen = set(in_every_run)
    return [name if name in chosen else pytest.param(name, marks=pytest.mark.exhaustive) for name in names]
