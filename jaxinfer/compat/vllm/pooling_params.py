"""The parameters of an embedding."""

from __future__ import annotations

from dataclasses import dataclass

from jaxinfer.names import explains_names


@explains_names
@dataclass
class PoolingParams:
    """How states become a vector."""

    normalize: bool = True
