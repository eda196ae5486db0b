"""Scales of keys and values in FP8 that a checkpoint states (compressed-tensors' `kv_cache_scheme`).

A layer with them has k_scale and v_scale f[1] or f[], one for all its keys and one for all its values, by which numbers
are divided before they are rounded. A cache in fp8 uses them; one in another type keeps more than they would.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxinfer.checkpoint.config_json.family import CACHE_SCALES
from jaxinfer.checkpoint.formats.parts import SCALE_TYPES
from jaxinfer.checkpoint.safetensors_file import StoredTensor
from jaxinfer.checkpoint.stored import StoredScale, settings_error
from jaxinfer.model.components.attention import Attention
from jaxinfer.model.config import ModelConfig
from jaxinfer.model.layer_parts import Mixer, functions_of

KEY = "kv_cache_scheme"
ENDS = tuple(f".{name}" for name in CACHE_SCALES)
STATIC = "static"  # AutoFP8's word for the only scheme that it has
# Older ends of the names of scales, and what they mean: at first keys and values had one in common.
FORMER_ENDS: Mapping[str, tuple[str, ...]] = {
    ".kv_scale": ENDS,
    **{
        f".{letter}_proj.{end}": (f".{letter}_scale",) for letter in "kv" for end in ("output_scale", f"{letter}_scale")
    },
}
# Of FP8 with a scale per tensor. The other words of a scheme say how the scales were found.
HONOURED: Mapping[str, tuple[Any, ...]] = {
    "num_bits": (8,),
    "type": ("float",),
    "strategy": ("tensor",),
    "dynamic": (False, None),
    "symmetric": (True, None),
    "group_size": (None,),
    "block_structure": (None,),
    "actorder": (None, False),
}


def has_cache_scales(settings: Mapping[str, Any] | None) -> bool:
    """Returns True if the settings of a format state scales of keys and values in FP8.

    Raises ValueError for another scheme of keys and values.
    """
    scheme: Any = None if settings is None else settings.get(KEY)
    if settings is None or scheme in (None, {}):
        return False
    if settings.get("quant_method") == "fp8" and scheme == STATIC:
        return True
    if not isinstance(scheme, Mapping) or any(scheme.get(name) not in honoured for name, honoured in HONOURED.items()):
        way_out = "a static scale per tensor of FP8 is read; remove it, and use EngineConfig.cache_dtype"
        raise settings_error(str(settings.get("quant_method")), KEY, scheme, way_out)
    return True


def with_cache_scales(config: ModelConfig) -> ModelConfig:
    """Returns the model with scales of the keys and values of each attention layer.

    Raises ValueError for layers with latents, and for layers that read the keys and values of others.
    """

    def change(mixer: Mixer) -> Mixer:
        if isinstance(mixer, Attention) and mixer.source is None:
            return replace(mixer, has_cache_scales=True)
        if isinstance(mixer, Attention) or not functions_of(mixer).is_recurrent:
            what = "keys and values of other layers" if isinstance(mixer, Attention) else functions_of(mixer).name
            raise ValueError(f"{KEY} is not supported for layers with {what}; remove it, with its scales")
        return mixer

    groups = tuple(
        replace(group, layers=tuple(layer.map_mixers(change) for layer in group.layers)) for group in config.groups
    )
    return replace(config, groups=groups)


def with_present_names(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Returns the stored tensors, scales of keys and values under their present names; ValueError for two of one."""
    renamed: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        former = next((end for end in FORMER_ENDS if name.endswith(end)), None)
        names = [name] if former is None else [name.removesuffix(former) + end for end in FORMER_ENDS[former]]
        if twice := [own for own in names if own in renamed or (own in stored and own != name)]:
            raise ValueError(f"{twice[0]} is there twice, once as {name}; use files of one and the same checkpoint")
        renamed |= dict.fromkeys(names, tensor)
    return renamed


def stored_scales(stored: Mapping[str, StoredTensor]) -> dict[str, StoredScale]:
    """Returns the scales of keys and values among the stored tensors, by name; ValueError for those of other shapes."""
    scales = {name: StoredScale(name, tensor) for name, tensor in stored.items() if name.endswith(ENDS)}
    for name, scale in scales.items():
        if scale.tensor.shape not in ((), (1,)) or scale.tensor.dtype not in SCALE_TYPES:
            raise ValueError(
                f"{name} is {scale.tensor.dtype} {scale.tensor.shape}, not one number of {' or '.join(SCALE_TYPES)} as"
                f" {KEY} says; use files of one and the same checkpoint"
            )
    return scales
