"""Stands in for the package `vllm` in programs whose imports are not one's own, such as lm-eval."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from jaxinfer.compat import vllm

# Modules of vLLM, and those here that have the same names.
MODULES: Mapping[str, str] = MappingProxyType(
    {
        **{name: name for name in ("inputs", "lora", "lora.request", "outputs", "pooling_params", "sampling_params")},
        "logprobs": "outputs",
        "entrypoints.llm": "llm",
        **dict.fromkeys(("tokenizers", "transformers_utils", "transformers_utils.tokenizer"), "tokenizers"),
        **dict.fromkeys(("entrypoints", "entrypoints.chat_utils", "renderers", "renderers.hf"), "tokenizers"),
    }
)


class _Distribution(importlib.metadata.Distribution):
    """Names the interface's version to `importlib.metadata.version("vllm")`."""

    def read_text(self, filename: str) -> str | None:
        return f"Name: vllm\nVersion: {vllm.__version__}\n" if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(f"{path}: vllm is stood in for by jaxinfer")


class _Finder:
    """Finds the distribution above, and no module."""

    def find_spec(self, *_: Any) -> None:
        return None

    def find_distributions(self, context: Any = None) -> Iterator[importlib.metadata.Distribution]:
        if context is not None and context.name == "vllm":
            yield _Distribution()


def stand_in() -> None:
    """Lets every later `import vllm` of this process take `jaxinfer.compat.vllm`.

    Raises RuntimeError if vLLM itself is installed.
    """
    if sys.modules.get("vllm") is vllm:
        return
    if importlib.util.find_spec("vllm") is not None:
        raise RuntimeError("vLLM itself is installed here; remove it, or import jaxinfer.compat.vllm by its own name")
    sys.modules["vllm"] = vllm
    for name, ours in MODULES.items():
        module = importlib.import_module(f"jaxinfer.compat.vllm.{ours}")
        sys.modules[f"vllm.{name}"] = module
        if "." not in name:
            setattr(vllm, name, module)
    sys.meta_path.append(_Finder())
