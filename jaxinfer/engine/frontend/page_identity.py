"""Identity of pages and texts: the properties that must match before one engine may use another's results."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax

from jaxinfer._version import __version__
from jaxinfer.checkpoint import Checkpoint
from jaxinfer.config import CacheConfig, EngineConfig, Parallelism
from jaxinfer.device import describe_accelerator, describe_cpu
from jaxinfer.engine.kv_cache.attention_window import AttentionWindow
from jaxinfer.model.config import ModelConfig, scan_sizes
from jaxinfer.model.page_kinds import NUM_EXACT
from jaxinfer.parallel.placement import ONE_DEVICE

if TYPE_CHECKING:
    from jaxinfer.engine.frontend.admission import Admission

DEVICES = "devices"  # the aspect of pages in which a request may differ that is restored without its pages
DIGEST_LEN = 16  # hexadecimal digits
# Files beside the weights and config.json that a text depends on.
TEXT_FILES = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("generation_config.json", "chat_template.jinja"),
)


def page_identity(
    checkpoint: Checkpoint,
    dtype: str,
    model_config: ModelConfig,
    cache_config: CacheConfig,
    engine_config: EngineConfig,
    window: AttentionWindow | None = None,
    params_version: str = "",
    devices: str = ONE_DEVICE,
) -> dict[str, str]:
    """Returns the properties that determine the contents of pages, by name. Reads the whole checkpoint.

    `dtype` is that of the weights, `devices` the identity of their placement. Processes on machines of one kind get
    equal values.
    """
    # With attention sinks, the contents of a page depend on the tokens that were evicted before it.
    seen = "all" if window is None or not window.num_sinks else f"{window.num_seen}, {window.num_sinks} of them sinks"
    return {
        "weights": checkpoint.digest() + params_version,
        "quantization": str(engine_config.quantization),
        "model": repr(_for_any_mesh(model_config)),
        "dtype": describe_dtype(dtype, engine_config),
        "page_size": str(cache_config.page_size),
        "pages seen": seen,
        # Another CPU, kernel or version may sum in another order.
        "platform": _platform(engine_config),
        # Devices add up their parts of a sum, and other parts round in another way.
        DEVICES: devices,
        "versions": f"jaxinfer {__version__}, jax {jax.__version__}",
    }


def describe_dtype(dtype: str, config: EngineConfig) -> str:
    """Returns the dtype of the weights, and that of keys and values if it is another one."""
    return dtype if config.cache_dtype is None else f"{dtype}, keys and values in {config.cache_dtype}"


def _platform(engine_config: EngineConfig) -> str:
    platform, attention = jax.default_backend(), engine_config.attention
    if platform == "cpu":
        return f"cpu: {describe_cpu()}"
    if engine_config.exact:
        platform = f"{platform}, exact on {describe_accelerator()}"
    return platform if attention is None else f"{platform}, attention by the {attention}"


def _for_any_mesh(config: ModelConfig) -> ModelConfig:
    """Returns the model without what a mesh makes of it, for a request is restored on any mesh."""
    config = config.for_devices(1)
    return config.regrouped(scan_sizes(config.layers))


def text_identity(checkpoint: Checkpoint, admission: Admission) -> dict[str, str]:
    """Returns the properties that determine the text of a given request, by name. Reads the whole checkpoint.

    Machine and versions are left out although they may change the last bits, so another machine may continue a job
    on the same number of devices. The number of replicas changes no text. Adapters are left out because each request
    has its own or none, and logits processors because functions cannot be compared.
    """
    config, version = admission.engine_config, admission.params_version
    # A request with sinks evicts whole pages, so the page size determines its text.
    sinks = None if config.num_sink_tokens is None else f"{config.num_sink_tokens}, by pages of {config.page_size}"
    templates = [
        f"{file.parent.name}/{file.name}" for file in checkpoint.path.glob("additional_chat_templates/*.jinja")
    ]
    # One device has no entry, as in texts from before there was a choice.
    mesh = config.parallelism or Parallelism()
    is_one = mesh.devices_per_replica == 1
    stages = "" if mesh.stages == 1 else f", stages={mesh.stages}"
    shared = {} if is_one else {"parallelism": f"Parallelism(tensor={mesh.tensor}, experts={mesh.experts}{stages})"}
    if config.cache_dtype == "int2":  # what a token reads rounded depends on the size of pages
        shared |= {"rounded pages": f"of {config.page_size} tokens, {NUM_EXACT} exact before a token's own"}
    return shared | {
        "model": checkpoint.digest((*TEXT_FILES, *templates))[:DIGEST_LEN] + version,
        "dtype": describe_dtype(admission.dtype, config),
        "quantization": str(config.quantization),
        "max_model_len": str(admission.max_model_len),
        "num_sink_tokens": str(sinks),
    }
