"""Which stored tensors a model needs, under which names, and what of them is missing, left over or of another shape."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from jaxinfer.checkpoint.config_json.family import WeightTable, fields_of
from jaxinfer.checkpoint.making.assemblies import assemblies_of
from jaxinfer.checkpoint.safetensors_file import DTYPES, StoredTensor
from jaxinfer.checkpoint.stored import Stored, StoredQuantized
from jaxinfer.model.config import ModelConfig
from jaxinfer.model.layer_parts import source_of

UNEMBEDDING = "lm_head.weight"  # the name, or its end
ROWS_COMPARED_AT_ONCE = 4096


def unread_keys_and_values(config: ModelConfig, weights: WeightTable) -> set[str]:
    """Returns the names of keys and values of layers that read those of an earlier layer.

    Published checkpoints have them, and `transformers` leaves them out.
    """
    readers = [
        i for i, layer in enumerate(config.layers) if any(source_of(mixer) is not None for mixer in layer.mixers)
    ]
    fields = {f"layers.mixer.{name}" for name in ("k", "k_bias", "k_norm", "v", "v_bias")}
    names = [name for name, targets in weights.items() if fields & {*fields_of(targets)}]
    return {name.format(layer=layer) for name in names for layer in readers}


def with_prefix(stored: Mapping[str, Stored], expected: Collection[str], prefix: str) -> dict[str, Stored]:
    """Returns the tensors under their expected names: each name may lack the prefix, as in transformers."""

    def expected_name(name: str) -> str:
        whole = prefix + name
        return whole if name not in expected and whole in expected and whole not in stored else name

    return {expected_name(name): tensor for name, tensor in stored.items()}


def expected_shapes(plan: Any) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each stored tensor that a tree of `Assembly` needs, by its name."""
    expected: dict[str, tuple[int, ...]] = {}
    for assembly in assemblies_of(plan):
        expected |= dict.fromkeys(assembly.names, assembly.stored_shape)
    return expected


def refuse_misfits(
    path: Path,
    plan: Any,
    stored: Mapping[str, Stored],
    *,
    needs_unembedding: bool = True,
    way_out: str | None = None,
) -> None:
    """Raises one ValueError that lists every missing, unexpected or mis-shaped tensor; `plan` is a tree of `Assembly`.

    A model that needs no unembedding may have one: one equal to the embedding, or that of a backbone.
    """
    expected = expected_shapes(plan)
    problems = [f"missing: {name} {shape}" for name, shape in expected.items() if name not in stored]
    for name, tensor in stored.items():
        if name not in expected:
            # The frequencies follow from the config.
            is_known = name.endswith("rotary_emb.inv_freq") or (not needs_unembedding and name.endswith(UNEMBEDDING))
            is_known |= _is_zero_bias(name, stored)
            problems += [] if is_known else [f"unexpected: {name} {tensor.shape}"]
        elif tensor.shape != expected[name]:
            problems.append(f"mis-shaped: {name} expected {expected[name]}, found {tensor.shape}")
        elif isinstance(tensor, StoredTensor) and tensor.dtype not in DTYPES:
            problems.append(f"unsupported dtype: {name} is {tensor.dtype}, not one of {', '.join(DTYPES)}")
    if problems:
        way_out = way_out or (
            "use the config.json and the safetensors of one and the same checkpoint, or correct the table of a family"
            " that you are adding"
        )
        listed = "\n  ".join(problems)
        raise ValueError(f"{len(problems)} tensors in {path} do not fit its config.json; {way_out}:\n  {listed}")


def _is_zero_bias(name: str, stored: Mapping[str, Stored]) -> bool:
    """True for a bias of zeros beside a packed weight, as AutoGPTQ writes for layers without a bias."""
    module, _, last = name.rpartition(".")
    bias = stored[name]
    is_of_packed = last == "bias" and isinstance(stored.get(f"{module}.weight"), StoredQuantized)
    return is_of_packed and isinstance(bias, StoredTensor) and bias.dtype in DTYPES and not bias.map().any()


def have_equal_values(one: Stored, other: Stored) -> bool:
    """True if two stored tensors [rows, columns] are equal; reads a few rows at a time. Packed ones are not."""
    if isinstance(one, StoredQuantized) or isinstance(other, StoredQuantized):
        return False
    if one.shape != other.shape or not {one.dtype, other.dtype} <= DTYPES.keys():
        return False
    ours, theirs = one.map(), other.map()
    starts = range(0, len(ours), ROWS_COMPARED_AT_ONCE)
    pieces = [slice(start, start + ROWS_COMPARED_AT_ONCE) for start in starts]
    return not any((ours[piece] != theirs[piece]).any() for piece in pieces)
