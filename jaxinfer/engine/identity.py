"""Whose pages they are: what has to be the same for a page that was computed elsewhere to be a page here."""

from __future__ import annotations

from pathlib import Path

import jax

from jaxinfer._version import __version__
from jaxinfer.checkpoint.fingerprint import fingerprint
from jaxinfer.config import CacheConfig, ModelConfig
from jaxinfer.device import describe_cpu
from jaxinfer.engine.page_window import PageWindow


def page_identity(
    path: Path,
    model_config: ModelConfig,
    cache_config: CacheConfig,
    quantization: str | None,
    window: PageWindow | None = None,
) -> dict[str, str]:
    """Returns it by aspects. It holds across processes and machines of one kind, and reads the whole checkpoint."""
    # What the pages of an endless request hold depends on what its tokens did not see.
    seen = "all" if window is None or not window.num_sinks else f"{window.num_seen}, {window.num_sinks} of them sinks"
    return {
        "weights": fingerprint(path),
        "quantization": str(quantization),
        "model": repr(model_config),
        "dtype": cache_config.dtype,
        "page_size": str(cache_config.page_size),
        "pages seen": seen,
        # Another CPU or another version may add up in another order.
        "platform": f"cpu: {describe_cpu()}" if jax.default_backend() == "cpu" else jax.default_backend(),
        "versions": f"jaxinfer {__version__}, jax {jax.__version__}",
    }
