"""`jaxinfer models`: lists the families of checkpoints, or says of one checkpoint if it can be read."""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from jaxinfer.cli.output import show

if TYPE_CHECKING:
    from jaxinfer.checkpoint import Checkpoint
    from jaxinfer.model.config import ModelConfig

EXIT_NO = 1
DESCRIPTION = (
    "Without a model: the families of checkpoints that can be read, with published ones of each. With a model: if it"
    " can be read, by its configuration and the headers of its files. Ends with 0 for yes and with 1 for no."
)
CLOSING = "`jaxinfer models MODEL` says of a Hub id, a folder or a GGUF file if it can be read."
# Of a repository on the Hub only these are downloaded.
SMALL_FILES = ("config.json", "tokenizer_config.json", "chat_template.jinja", "additional_chat_templates/*")
WEIGHTS = (".safetensors", ".gguf")
OTHER_COPIES = ("*/*", "consolidated*")  # of the same weights
MAX_LINES = 8  # of a reason
LEAST_BILLIONS = 1e8  # less is shown in millions

# A series of models, the model_types of its config.json files, and published checkpoints.
SERIES: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("Llama 1 to 3", ("llama",), ("meta-llama/Llama-3.2-1B-Instruct", "meta-llama/Llama-3.1-8B-Instruct")),
    (
        "Mistral, Mixtral",
        ("mistral", "mixtral", "mistral3", "ministral3"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistralai/Ministral-3-8B-Instruct-2512"),
    ),
    ("Qwen2, Qwen2.5", ("qwen2", "qwen2_moe"), ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-7B-Instruct")),
    ("Qwen3", ("qwen3", "qwen3_moe"), ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B")),
    (
        "Qwen3-VL",
        ("qwen3_vl", "qwen3_vl_text", "qwen3_vl_moe", "qwen3_vl_moe_text"),
        ("Qwen/Qwen3-VL-2B-Instruct", "Qwen/Qwen3-VL-30B-A3B-Instruct"),
    ),
    (
        "Qwen3-Next, 3.5",
        ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", "Qwen/Qwen3.5-4B"),
    ),
    (
        "Gemma 1 to 3",
        ("gemma", "gemma2", "gemma3", "gemma3_text"),
        ("google/gemma-2-2b-it", "google/gemma-3-1b-it", "google/gemma-3-4b-it"),
    ),
    ("Gemma 4", ("gemma4", "gemma4_text"), ("google/gemma-4-E2B-it", "google/gemma-4-26B-A4B-it")),
    ("Phi-3, Phi-4", ("phi3",), ("microsoft/Phi-3.5-mini-instruct", "microsoft/phi-4")),
    (
        "OLMo 2, 3, OLMoE",
        ("olmo2", "olmo3", "olmoe"),
        ("allenai/Olmo-3-7B-Instruct", "allenai/OLMoE-1B-7B-0125-Instruct"),
    ),
    ("EXAONE 4", ("exaone4",), ("LGAI-EXAONE/EXAONE-4.0-1.2B", "LGAI-EXAONE/EXAONE-4.0-32B")),
    (
        "SmolLM3, Seed-OSS",
        ("smollm3", "seed_oss"),
        ("HuggingFaceTB/SmolLM3-3B", "ByteDance-Seed/Seed-OSS-36B-Instruct"),
    ),
    (
        "Granite 3 and 4",
        ("granite", "granitemoe", "granitemoeshared", "granitemoehybrid"),
        ("ibm-granite/granite-3.3-2b-instruct", "ibm-granite/granite-4.0-h-tiny"),
    ),
    (
        "GLM-4",
        ("glm4", "glm4_moe", "glm4_moe_lite"),
        ("zai-org/GLM-4-9B-0414", "zai-org/GLM-4.5-Air", "zai-org/GLM-4.7-Flash"),
    ),
    ("GPT-OSS", ("gpt_oss",), ("openai/gpt-oss-20b", "openai/gpt-oss-120b")),
    (
        "DeepSeek, Kimi-K2",
        ("deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25"),
        ("deepseek-ai/DeepSeek-V3", "moonshotai/Kimi-K2-Instruct-0905"),
    ),
    ("MiniMax-M2", ("minimax_m2",), ("MiniMaxAI/MiniMax-M2",)),
    ("dots1, Solar-Open", ("dots1", "solar_open"), ("rednote-hilab/dots.llm1.inst", "upstage/Solar-Open-100B")),
    (
        "ERNIE, Hunyuan",
        ("ernie4_5", "ernie4_5_moe", "hunyuan_v1_dense"),
        ("baidu/ERNIE-4.5-21B-A3B-PT", "tencent/Hunyuan-7B-Instruct"),
    ),
    ("Apertus, Arcee", ("apertus", "arcee"), ("swiss-ai/Apertus-8B-Instruct-2509", "arcee-ai/AFM-4.5B")),
    (
        "Mamba, Nemotron-H",
        ("mamba", "mamba2", "nemotron_h"),
        ("state-spaces/mamba-130m-hf", "nvidia/NVIDIA-Nemotron-Nano-9B-v2"),
    ),
    ("Jamba, Falcon-H1", ("jamba", "falcon_h1"), ("ai21labs/Jamba-v0.1", "tiiuae/Falcon-H1-0.5B-Instruct")),
)


def add_options(command: argparse.ArgumentParser) -> None:
    """Adds the options of the command to its parser."""
    command.add_argument("name", nargs="?", metavar="MODEL", help="Hub id, folder, GGUF file, or a name of plan")


def run(arguments: argparse.Namespace) -> int:
    """Prints the list or the answer; returns 0, or 1 for a checkpoint that cannot be read."""
    if arguments.name is None:
        show(list_series())
        return 0
    try:
        lines = list(describe(arguments.name))
    except NotReadError as refusal:
        show(f"no: {_cut(str(refusal))}")
        return EXIT_NO
    show("\n".join(lines))
    return 0


def list_series() -> str:
    """Returns a line for each series of models, as text."""
    width = max(len(name) for name, _, _ in SERIES) + 2
    lines = [name.ljust(width) + ", ".join(published) for name, _, published in SERIES]
    return "\n".join((*lines, "", CLOSING))


class NotReadError(Exception):
    """A checkpoint is there and cannot be read; the message has the reason and the way out."""


def describe(name: str) -> Iterator[str]:
    """Yields the lines about a checkpoint that can be read; else NotReadError. ValueError if there is none.

    Of a Hub id the configuration is downloaded, and the sizes of its files are asked for.
    """
    from jaxinfer.checkpoint import open_checkpoint
    from jaxinfer.checkpoint.huggingface import has_all_weights, without_download
    from jaxinfer.checkpoint.published import PUBLISHED, published_config

    place = Path(name).expanduser()
    if not place.exists() and name.lower() in map(str.lower, PUBLISHED):
        config = published_config(name)
        model_type = next(PUBLISHED[known]["model_type"] for known in PUBLISHED if known.lower() == name.lower())
        yield f"yes: {model_type}, {_size(config)}, context {config.max_position:,} tokens; a built-in shape, for plans"
        yield f"next: jaxinfer plan {shlex.quote(name)} --device L4"
        return
    local = without_download(name)
    sizes = {} if place.exists() else _remote_sizes(name)
    _require_weights(name, sizes)
    checkpoint = open_checkpoint(local, SMALL_FILES)
    try:
        config = checkpoint.config
        is_whole = place.exists() or checkpoint.gguf is not None or has_all_weights(checkpoint.path)
        if is_whole:
            checkpoint.plan(config.regrouped((1,) * config.num_layers))
            sizes = dict(checkpoint.file_sizes())
        else:
            _check_packing(checkpoint)
    except (ValueError, NotImplementedError) as error:
        raise NotReadError(str(error)) from None
    num_bytes = sum(size for file, size in sizes.items() if file.endswith(WEIGHTS))
    yield "yes: " + ", ".join(_facts(checkpoint, config, num_bytes))
    if checkpoint.packing is None:
        n = _num_parameters(config)
        yield f"weights in memory: {_bytes(2 * n)} on a GPU or TPU (2 bytes each), {_bytes(4 * n)} on a CPU (float32)"
    if not is_whole:
        yield "only its configuration is here; the tensors are checked when they are loaded"
    yield f"next: {_next(name, checkpoint, config)}"


def _facts(checkpoint: Checkpoint, config: ModelConfig, num_bytes: int) -> Iterator[str]:
    from jaxinfer.checkpoint.config_json.family import is_classifier

    yield str(checkpoint.settings.get("model_type"))
    yield _size(config)
    if num_bytes:
        yield f"{_bytes(num_bytes)} as stored"
    if checkpoint.packing is not None:
        yield f"packed by {checkpoint.packing['quant_method']}"
    yield f"context {config.max_position:,} tokens"
    if "vision_config" in checkpoint.settings:
        yield "its text model alone, without images"
    if not config.has_logits:
        yield "a classifier" if is_classifier(checkpoint.settings) else "embeddings alone"


def _next(name: str, checkpoint: Checkpoint, config: ModelConfig) -> str:
    from jaxinfer.checkpoint.config_json.family import is_classifier
    from jaxinfer.validation import shown

    if not config.has_logits:
        call = "classify" if is_classifier(checkpoint.settings) else "embed"
        return f"LLM({shown(name)}).{call}([...]) in Python"
    if _has_chat_template(checkpoint):
        return f"jaxinfer chat {shlex.quote(name)}"
    return f'jaxinfer generate "Once upon a time" --model {shlex.quote(name)}'


def _has_chat_template(checkpoint: Checkpoint) -> bool:
    from jaxinfer.checkpoint.huggingface import read_json

    if checkpoint.gguf is not None:
        return "tokenizer.chat_template" in checkpoint.gguf.metadata
    folder, stated = checkpoint.path, checkpoint.path / "tokenizer_config.json"
    if (folder / "chat_template.jinja").is_file() or any((folder / "additional_chat_templates").glob("*.jinja")):
        return True
    return stated.is_file() and bool(read_json(stated).get("chat_template"))


def _size(config: ModelConfig) -> str:
    n = _num_parameters(config)
    return f"{n / 1e9:,.1f} B parameters" if n > LEAST_BILLIONS else f"{n / 1e6:,.1f} M parameters"


def _bytes(n: int) -> str:
    return f"{n / 1e9:,.1f} GB" if n > LEAST_BILLIONS else f"{n / 1e6:,.1f} MB"


def _num_parameters(config: ModelConfig) -> int:
    import jax

    from jaxinfer.model.params import abstract_params

    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract_params(config, "float32")))


def _check_packing(checkpoint: Checkpoint) -> None:
    """Raises ValueError if config.json alone says that the packed weights cannot be read."""
    from jaxinfer.checkpoint.formats.described import DescribedCheckpoint
    from jaxinfer.checkpoint.huggingface import read_json

    if checkpoint.packing is not None:
        DescribedCheckpoint(checkpoint.path, read_json(checkpoint.config_file)).headers  # noqa: B018


def _remote_sizes(name: str) -> dict[str, int]:
    """Returns the bytes of the files of a repository on the Hub; {} if it cannot be asked, or for a file of one."""
    import huggingface_hub

    from jaxinfer.checkpoint.huggingface import LOCAL_STARTS, read_hub_id

    repository, revision, file = read_hub_id(name)
    if file is not None or name.startswith(LOCAL_STARTS):
        return {}
    try:
        info = huggingface_hub.HfApi().model_info(repository, revision=revision, files_metadata=True)
    except Exception:  # of several libraries; the download of the configuration says what is wrong
        return {}
    return {file.rfilename: file.size or 0 for file in info.siblings or ()}


def _require_weights(name: str, sizes: dict[str, int]) -> None:
    """Raises NotReadError if the files of a repository have no weights in safetensors; drops other copies of them."""
    from jaxinfer.checkpoint.huggingface import IMAGE_PARTS

    for file in [file for file in sizes if any(fnmatch(file, pattern) for pattern in OTHER_COPIES)]:
        del sizes[file]
    if not sizes or any(file.endswith(".safetensors") for file in sizes):
        return
    files = [file for file in sizes if file.endswith(".gguf") and not file.startswith(IMAGE_PARTS)]
    if files:
        raise NotReadError(f"{name} has its weights in GGUF files; give one of them, such as {name}/{files[0]}")
    raise NotReadError(
        f"{name} has no weights in safetensors or GGUF; take another copy of the model, or write one by"
        " save_pretrained of transformers"
    )


def _cut(text: str) -> str:
    lines = text.splitlines()
    return "\n".join(lines[:MAX_LINES] + ([f"  … and {len(lines) - MAX_LINES} more"] if len(lines) > MAX_LINES else []))
