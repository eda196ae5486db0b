"""A checkpoint of which only config.json is known: its tensors are those that its format stores of such a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jaxinfer.checkpoint.checkpoint import Checkpoint
from jaxinfer.checkpoint.config_json.family import Family, WeightTable, fields_of
from jaxinfer.checkpoint.formats import STATED_PARTS, logical_tensors, mxfp4, settings_of, without_settings
from jaxinfer.checkpoint.making.assemblies import Assembly, assemblies_of, plan_assembly
from jaxinfer.checkpoint.safetensors_file import StatedTensor, stated
from jaxinfer.checkpoint.stored import Stored
from jaxinfer.model.config import ModelConfig

# The types of floating-point tensors by their names in config.json.
FLOAT_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
StatedParts = Callable[[str, int, int], dict[str, StatedTensor] | None]


@dataclass(frozen=True, eq=False)
class DescribedCheckpoint(Checkpoint):
    """A checkpoint whose tensors follow from `hf`, its config.json; `path` is its name for messages.

    Its headers are read by the same code as those of files, so `abstract_params` has the bytes that `load` would have.
    Nothing can be loaded.
    """

    hf: Mapping[str, Any]

    @cached_property
    def config(self) -> ModelConfig:
        return self.stated_config

    @cached_property
    def headers(self) -> dict[str, StatedTensor]:
        """The tensors by name. Those that the format leaves in floating point have the type of config.json."""
        logical_tensors({}, self.packing)  # refuses settings that are not honoured
        weights = self.family.weights_among([*_names_of(self.family, is_mxfp4=self._method == "mxfp4")])
        plan = plan_assembly(self.config, weights)
        headers, dtype = dict[str, StatedTensor](), FLOAT_TYPES[stated_dtype(self)]
        for assembly in assemblies_of(plan):
            shape, names = assembly.stored_shape, [name for name in assembly.names if name not in headers]
            write = self._stated_parts if _is_of_product(assembly, shape) else None
            for name in names:
                headers |= _parts_of(name, shape, write, dtype)
        return headers

    @cached_property
    def _settings_and_packing(self) -> tuple[dict[str, Any], Mapping[str, Any] | None]:
        return without_settings(self.hf), settings_of(self.hf)

    @cached_property
    def _stored_and_states(self) -> tuple[dict[str, Stored], dict[Path, tuple[int, int]]]:
        return logical_tensors(self.headers, self.packing), {}

    @property
    def _method(self) -> str | None:
        return None if self.packing is None else self.packing["quant_method"]

    @cached_property
    def _stated_parts(self) -> StatedParts | None:
        """The parts of a weight by its module, outputs and inputs."""
        packing = self.packing
        if packing is None or self._method not in STATED_PARTS:
            return None
        # The scales of compressed-tensors have the model's type.
        write, dtype = STATED_PARTS[self._method], FLOAT_TYPES[stated_dtype(self)]
        return lambda module, outputs, inputs: write(module, outputs, inputs, packing, dtype)


def stated_dtype(checkpoint: Checkpoint) -> str:
    """Returns the type that config.json states for floating-point tensors; bfloat16 if it states none."""
    settings = checkpoint.settings
    places = checkpoint.family.text_settings(settings), settings
    values = [place.get(key) for place in places for key in ("dtype", "torch_dtype")]
    names = (str(value).removeprefix("torch.") for value in values)
    return next((name for name in names if name in FLOAT_TYPES), "bfloat16")


def _parts_of(name: str, shape: tuple[int, ...], write: StatedParts | None, dtype: str) -> dict[str, StatedTensor]:
    """Returns the stored parts of a tensor by name, written in a format or as they are, in `dtype`."""
    if name.endswith(mxfp4.BLOCKS):
        return mxfp4.stated_parts(name, shape)
    module = name.removesuffix(".weight")
    parts = None if write is None else write(module, *shape)
    return {name: stated(dtype, *shape)} if parts is None else {f"{module}.{part}": parts[part] for part in parts}


def _is_of_product(assembly: Assembly, shape: tuple[int, ...]) -> bool:
    """True for weights of an nn.Linear in transformers. Published checkpoints have routers in floating point."""
    spec, name = assembly.spec, assembly.names[0]
    is_of_product = spec.num_inputs > 0 or spec.is_matrix or name.endswith("lm_head.weight")
    return is_of_product and name.endswith(".weight") and len(shape) == 2


def _names_of(family: Family, *, is_mxfp4: bool) -> Iterator[str]:
    """Yields one name for each tensor that a family's table names twice: that of packed experts, or of a product."""
    last = mxfp4.BLOCKS if is_mxfp4 else ".weight"
    known: set[str] = set()
    weights: WeightTable = family.weights
    for name in sorted(weights, key=lambda name: not name.endswith(last)):
        fields = {*fields_of(weights[name])}
        if not fields <= known:
            known |= fields
            yield name
