"""The parameters of an embedding."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class PoolingParams:
    """How states become a vector."""

    normalize: bool = True
