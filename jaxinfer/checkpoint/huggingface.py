"""Checkpoints in the Hugging Face layout, config.json beside safetensors, or in one GGUF file; here or on the Hub."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxinfer.checkpoint.safetensors_file import StoredTensor, read_header
from jaxinfer.gguf.file import SUFFIX, is_gguf
from jaxinfer.validation import require, shown

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Subfolders and Mistral's consolidated files hold the same weights once more, in other formats.
DOWNLOADED = ["*.safetensors", "*.json", "tokenizer*", "*.model", "*.tiktoken", "*.txt", "*.jinja"]
NOT_DOWNLOADED = ["[!a]*/*", "a[!d]*/*", "consolidated*"]  # all subfolders but additional_chat_templates
ADAPTER_FILE = "adapter_config.json"
MISTRAL_FILES = ("params.json", "consolidated.safetensors")
MAX_LISTED = 5  # files in a message
MAX_JSON_BYTES = 2**26  # of a configuration or an index; the largest models' have some megabytes


def resolve_checkpoint(path_or_id: str | Path, patterns: Sequence[str] = DOWNLOADED) -> Path:
    """Returns the place of a checkpoint: a local directory or GGUF file, or else what a Hub id names, downloaded.

    A Hub id is that of a repository, or of a GGUF file in one, such as "owner/name/model.gguf". A revision may follow
    an "@": a branch, a tag or a commit. A ValueError if it is neither; of a repository only files of these patterns are
    fetched: safetensors, JSON and tokenizer files unless told otherwise.
    """
    is_path = isinstance(path_or_id, str | Path) and str(path_or_id).isprintable() and bool(str(path_or_id))
    require(is_path, "checkpoint", path_or_id, "a folder, a GGUF file or a Hub id, as text or Path")
    place = Path(path_or_id).expanduser()
    if place.is_dir() or (place.is_file() and is_gguf(place)):
        return place
    if place.exists():
        raise ValueError(
            f"checkpoint {str(path_or_id)!r} is a file; give the directory that it is in, or a file {SUFFIX}"
        )
    is_local = str(path_or_id).startswith((".", "/", "~"))  # as no id of the Hub is
    hub_id, _, revision = str(path_or_id).partition("@")
    owner, name, file = [*hub_id.split("/", 2), "", ""][:3]
    if is_gguf(Path(hub_id)) and (is_local or not (owner and name and file)):
        raise ValueError(
            f"checkpoint {shown(str(path_or_id))} does not exist; give the path of a GGUF file, or its place on the"
            f" Hugging Face Hub, such as 'owner/name/model{SUFFIX}'"
        )
    if is_local:
        raise ValueError(
            f"checkpoint {shown(str(path_or_id))} does not exist; give the path of a folder or GGUF file that is there,"
            " or an id of the Hugging Face Hub, such as 'Qwen/Qwen3-0.6B'"
        )
    # Imported here: reading a local checkpoint needs neither the package nor the time to import it.
    import huggingface_hub

    try:
        if is_gguf(Path(hub_id)):
            return Path(huggingface_hub.hf_hub_download(f"{owner}/{name}", file, revision=revision or None))
        snapshot = huggingface_hub.snapshot_download(
            hub_id, revision=revision or None, allow_patterns=list(patterns), ignore_patterns=NOT_DOWNLOADED
        )
    # The Hub's own errors derive from these two; what is wrong (name, access, network) is in their message.
    except (OSError, ValueError) as error:
        raise ValueError(
            f"checkpoint {shown(str(path_or_id))} is neither a local directory nor reachable on the Hugging"
            f" Face Hub ({type(error).__name__}: {error}); give the path of an existing directory or GGUF file, or an"
            " id such as 'Qwen/Qwen3-0.6B' with network access or after downloading it once"
        ) from error
    return Path(snapshot)


def gguf_files(folder: Path) -> list[Path]:
    """Returns the models in GGUF that a folder has, without the parts for images that lie beside some."""
    return sorted(file for file in folder.glob(f"*{SUFFIX}") if not file.name.startswith("mmproj"))


def _way_out(folder: Path) -> str:
    """Returns how to load a model of a folder that is no checkpoint in the layout of Hugging Face, by its files."""
    if (folder / ADAPTER_FILE).is_file():
        base = read_json(folder / ADAPTER_FILE).get("base_model_name_or_path")
        return (
            f"it is an adapter: give its model as the model ({ADAPTER_FILE} says {shown(base)}), and this folder to"
            " LLM.load_adapter or --adapter"
        )
    if files := gguf_files(folder):
        return f"give one of its files: {', '.join(file.name for file in files[:MAX_LISTED])}"
    if mistral := [name for name in MISTRAL_FILES if (folder / name).is_file()]:
        return (
            f"it has {' and '.join(mistral)} in Mistral's own layout, which is not read; give a folder with config.json"
            f" and {SINGLE_FILE}, as most of these models have too, or convert it by convert_mistral_weights_to_hf.py"
            " of transformers"
        )
    return "give the directory of a complete Hugging Face checkpoint, or a GGUF file"


def read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise ValueError(f"{file.parent} has no {file.name}; {_way_out(file.parent)}")
    if file.stat().st_size > MAX_JSON_BYTES:
        raise ValueError(f"{file} has more than {MAX_JSON_BYTES:,} bytes; give the checkpoint's own")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON ({error}); download it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds a {type(content).__name__}, not an object; download it again")
    return content


def read_headers(path: Path) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor]]:
    """Returns the tensors of the checkpoint's file or files by name, and those that its index leaves out."""
    if (path / SINGLE_FILE).is_file():
        return read_header(path / SINGLE_FILE), {}
    if not (path / INDEX_FILE).is_file():
        others = sorted(file.name for file in path.glob("*.bin"))
        if others:
            convert = f"m = AutoModelForCausalLM.from_pretrained({str(path)!r}, dtype='auto')"
            raise ValueError(
                f"{path} has neither {SINGLE_FILE} nor {INDEX_FILE}, only {', '.join(others)}: pickles, which may run"
                " any code when they are read; use a checkpoint in safetensors, or where you trust this one, write them"
                f' beside it: python -c "from transformers import AutoModelForCausalLM; {convert};'
                f' m.save_pretrained({str(path)!r})"'
            )
        named = ", ".join(sorted(file.name for file in path.glob("*.safetensors"))[:MAX_LISTED])
        way_out = (
            f"if {named} has its weights, rename it to {SINGLE_FILE}" if named else "use a checkpoint in safetensors"
        )
        raise ValueError(f"{path} has neither {SINGLE_FILE} nor {INDEX_FILE}; {way_out}")
    weight_map = read_json(path / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{path / INDEX_FILE} has no weight_map of file names but {weight_map!r}; download it again")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not shard:
            raise ValueError(
                f"{path / INDEX_FILE} names no file for {name}: its weight_map says {shard!r}; download it again"
            )
    shards = sorted(set(weight_map.values()))
    absent = [name for name in shards if not (path / name).is_file()]
    if absent:
        raise ValueError(f"{path} lacks {', '.join(absent)}, named in {INDEX_FILE}; download the checkpoint again")
    headers = {shard: read_header(path / shard) for shard in shards}
    found = {name: tensor for header in headers.values() for name, tensor in header.items()}
    # A tensor that two files hold is taken from the one that the index names.
    found |= {name: headers[shard][name] for name, shard in weight_map.items() if name in headers[shard]}
    others = {name: tensor for name, tensor in found.items() if name not in weight_map}
    return {name: tensor for name, tensor in found.items() if name in weight_map}, others
