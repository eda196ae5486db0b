"""Where pages and texts come from: what has to be the same for those that were computed elsewhere to be used here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import jax

from jaxinfer._version import __version__
from jaxinfer.checkpoint.fingerprint import fingerprint
from jaxinfer.config import CacheConfig, EngineConfig, ModelConfig
from jaxinfer.device import describe_cpu
from jaxinfer.engine.kv_cache.attention_window import AttentionWindow

if TYPE_CHECKING:
    from jaxinfer.engine.frontend.admission import Admission

DIGEST_LEN = 16  # hexadecimal digits


def page_identity(
    path: Path,
    model_config: ModelConfig,
    cache_config: CacheConfig,
    engine_config: EngineConfig,
    window: AttentionWindow | None = None,
) -> dict[str, str]:
    """Returns it by aspects. It holds across processes and machines of one kind, and reads the whole checkpoint."""
    # What the pages of an endless request hold depends on what its tokens did not see.
    seen = "all" if window is None or not window.num_sinks else f"{window.num_seen}, {window.num_sinks} of them sinks"
    return {
        "weights": fingerprint(path),
        "quantization": str(engine_config.quantization),
        "model": repr(model_config),
        "dtype": cache_config.dtype,
        "page_size": str(cache_config.page_size),
        "pages seen": seen,
        # Another CPU, other kernels or another version may add up in another order.
        "platform": _platform(engine_config),
        "versions": f"jaxinfer {__version__}, jax {jax.__version__}",
    }


def _platform(engine_config: EngineConfig) -> str:
    platform, attention = jax.default_backend(), engine_config.attention
    if platform == "cpu":
        return f"cpu: {describe_cpu()}"
    return platform if attention is None else f"{platform}, attention by the {attention}"


def text_identity(path: Path, admission: Admission) -> dict[str, str]:
    """Returns what the text of a request follows from beside the request, by aspects; it reads the whole checkpoint.

    The machine and the versions are left out, though they may change the last bits: work may go on elsewhere. So are
    logits processors, which nothing tells apart.
    """
    config = admission.engine_config
    # The tokens that an endless request sees go by pages.
    sinks = None if config.num_sink_tokens is None else f"{config.num_sink_tokens}, by pages of {config.page_size}"
    return {
        "model": fingerprint(path, ("tokenizer.json", "generation_config.json"))[:DIGEST_LEN],
        "dtype": admission.cache_config.dtype,
        "quantization": str(config.quantization),
        "max_model_len": str(admission.max_model_len),
        "num_sink_tokens": str(sinks),
    }
