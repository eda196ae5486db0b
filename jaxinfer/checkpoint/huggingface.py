"""Checkpoints in the Hugging Face layout, config.json beside safetensors, or in one GGUF file; here or on the Hub."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxinfer.checkpoint.safetensors_file import StoredTensor, read_header
from jaxinfer.gguf.file import SUFFIX, is_gguf
from jaxinfer.validation import require, shown

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Subfolders and Mistral's consolidated files hold the same weights once more, in other formats.
DOWNLOADED = ["*.safetensors", "*.json", "tokenizer*", "*.model", "*.tiktoken", "*.txt", "*.jinja"]
# All subfolders but additional_chat_templates, and the modules of sentence-transformers such as 1_Pooling.
NOT_DOWNLOADED = ["[!a0-9]*/*", "a[!d]*/*", "[0-9][!_]*/*", "consolidated*"]
ADAPTER_FILE = "adapter_config.json"
MISTRAL_FILES = ("params.json", "consolidated.safetensors")
IMAGE_PARTS = "mmproj"  # begins the names of GGUF files that a model has beside its own, for images
LOCAL_STARTS = (".", "/", "~")  # of a path, as no id of the Hub has
# The Hub's own references alone have slashes in their names.
REVISION_AND_FILE = re.compile(r"(refs/(?:pr|convert)/[^/]+|[^/]+)/(.+)")
MAX_LISTED = 5  # files in a message
MAX_JSON_BYTES = 2**26  # of a configuration or an index; the largest models' have some megabytes


def resolve_checkpoint(path_or_id: str | Path, patterns: Sequence[str] = DOWNLOADED) -> Path:
    """Returns the place of a checkpoint: a local directory or GGUF file, or else what a Hub id names, downloaded.

    A Hub id is that of a repository, or of a GGUF file in one, such as "owner/name/model.gguf". A revision may follow
    either behind an "@": a branch, a tag or a commit. Paths of hf:// have it before the file, which is read too:
    "owner/name@revision/model.gguf". Only files of a repository that match `patterns` are fetched: safetensors, JSON
    and tokenizer files by default. Raises ValueError if the text names no such place, or the Hub cannot be reached.
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
    is_local = str(path_or_id).startswith(LOCAL_STARTS)
    repository, revision, file = read_hub_id(str(path_or_id))
    if file is not None and (is_local or not all(repository.partition("/"))):
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
        if file is not None:
            return Path(huggingface_hub.hf_hub_download(repository, file, revision=revision))
        snapshot = huggingface_hub.snapshot_download(
            repository, revision=revision, allow_patterns=list(patterns), ignore_patterns=NOT_DOWNLOADED
        )
    # The Hub's own errors derive from these two; what is wrong (name, access, network) is in their message.
    except (OSError, ValueError) as error:
        raise ValueError(
            f"checkpoint {shown(str(path_or_id))} is neither a local directory nor reachable on the Hugging"
            f" Face Hub ({type(error).__name__}: {error}); give the path of an existing directory or GGUF file, or an"
            " id such as 'Qwen/Qwen3-0.6B' with network access or after downloading it once"
        ) from error
    return Path(snapshot)


class HubId(NamedTuple):
    """The parts of an id of the Hub; `file` is a GGUF file in the repository, None for the repository itself."""

    repository: str
    revision: str | None
    file: str | None


def read_hub_id(text: str) -> HubId:
    """Returns the parts of an id, with its revision at the end or, as in paths of hf://, before the file."""
    before, _, after = text.partition("@")
    if is_gguf(Path(before)):
        owner, name, file = [*before.split("/", 2), "", ""][:3]
        return HubId(f"{owner}/{name}", after or None, file) if file else HubId("", after or None, before)
    within = REVISION_AND_FILE.fullmatch(after) if is_gguf(Path(after)) else None
    return HubId(before, after or None, None) if within is None else HubId(before, within[1], within[2])


def without_download(path_or_id: str | Path) -> str | Path:
    """Returns the place of a GGUF file that was downloaded from the Hub; all that is no such file as it is.

    Raises ValueError for one that was not, because its metadata lie in the file, with its weights.
    """
    repository, revision, file = read_hub_id(str(path_or_id))
    is_local = str(path_or_id).startswith(LOCAL_STARTS) or Path(path_or_id).expanduser().exists()
    if is_local or file is None or not all(repository.partition("/")):
        return path_or_id
    import huggingface_hub

    place = huggingface_hub.try_to_load_from_cache(repository, file, revision=revision)
    if isinstance(place, str):
        return Path(place)
    option = "" if revision is None else f" --revision {revision}"
    raise ValueError(
        f"{path_or_id} is on the Hub, and its metadata lie in one file with its weights; download it first, by"
        f" `hf download {repository} {file}{option}`, or ask for the repository that it was made from"
    )


def gguf_files(folder: Path) -> list[Path]:
    """Returns the models in GGUF that a folder has, without the parts for images that lie beside some."""
    return sorted(file for file in folder.glob(f"*{SUFFIX}") if not file.name.startswith(IMAGE_PARTS))


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
    weight_map = _read_index(path)
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


def has_all_weights(path: Path) -> bool:
    """True if a folder has its one file of weights, or all files that its index names; ValueError for a bad index."""
    if (path / SINGLE_FILE).is_file():
        return True
    return (path / INDEX_FILE).is_file() and all((path / name).is_file() for name in _read_index(path).values())


def _read_index(path: Path) -> dict[str, str]:
    """Returns the file of each tensor of a folder, by the tensor's name."""
    weight_map = read_json(path / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{path / INDEX_FILE} has no weight_map of file names but {weight_map!r}; download it again")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not shard:
            raise ValueError(
                f"{path / INDEX_FILE} names no file for {name}: its weight_map says {shard!r}; download it again"
            )
    return weight_map
