"""The devices of an engine, and the part of each array that a device holds. No other module chooses devices."""

from __future__ import annotations

import functools
import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import keystr, tree_map_with_path

from jaxinfer.config import Parallelism
from jaxinfer.device import free_bytes, put_everywhere
from jaxinfer.model.cache import KVCache, cache_shardings, init_cache
from jaxinfer.model.components.experts import EXPERTS_AXIS, MLP_AXIS
from jaxinfer.model.components.layers import KV_HEADS, VOCABULARY, TensorSpec
from jaxinfer.model.config import ModelConfig
from jaxinfer.model.params import LAYERS, TENSOR_PARALLEL_RULES, Params, declare, shardings
from jaxinfer.model.quantized_params import quantized_sharding
from jaxinfer.model.stages import for_stages
from jaxinfer.parallel import hosts
from jaxinfer.quantization import BLOCKS_ARE_WHOLE, PACKED, PackedBlocks, QuantizedArray
from jaxinfer.validation import require
from jaxinfer.xla_options import SHARED_THREADS, has_threads_per_device
from kernels_pallas.mesh_axes import STAGES_AXIS, devices_per_stage, names_of

logger = logging.getLogger(__name__)

T = TypeVar("T")
ONE_DEVICE = "one device"
# The options of `Parallelism` by the mesh axis whose size each is, in the order of the mesh.
OPTIONS = {STAGES_AXIS: "stages", EXPERTS_AXIS: "experts", MLP_AXIS: "tensor"}


@dataclass(frozen=True)
class Placement:
    """A mesh and the parts of all arrays on it: heads, experts, hidden units and vocabulary are split over devices.

    All else is whole on every device. Without a mesh all arrays are on JAX's default device, and nothing has a
    sharding.
    """

    mesh: Mesh | None = None

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        parallelism: Parallelism | None = None,
        devices: Sequence[Any] | None = None,
    ) -> Placement:
        """Returns the placement of a model: on the first devices of this process unless `devices` names others.

        More devices than this process has are those of all processes of `jax.distributed`.
        Raises ValueError for devices that are not there, and for a model that they cannot share.
        """
        parallelism = Parallelism() if parallelism is None else parallelism
        sizes = {axis: getattr(parallelism, option) for axis, option in OPTIONS.items()}
        if sizes[STAGES_AXIS] == 1:
            del sizes[STAGES_AXIS]
        count = math.prod(sizes.values())
        if devices is None and count == 1:
            return cls()
        chosen = _first_devices(parallelism, count) if devices is None else _checked_devices(devices, count)
        if count > 1:
            refuse_undivided(config, sizes)
            if chosen[0].platform == "cpu" and not has_threads_per_device():
                raise ValueError(SHARED_THREADS)
        is_all = devices is None and count in (jax.local_device_count(), jax.device_count())
        # Of a whole slice of TPUs, JAX knows the order in which neighbours are linked. Stages are hosts, one after
        # another, as JAX lists devices.
        is_all = is_all and STAGES_AXIS not in sizes
        grid = mesh_utils.create_device_mesh((*sizes.values(),), chosen) if is_all else np.array(chosen)
        return cls(Mesh(grid.reshape((*sizes.values(),)), (*sizes,)))

    @classmethod
    def of_replicas(
        cls,
        config: ModelConfig,
        parallelism: Parallelism | None = None,
        devices: Sequence[Any] | None = None,
    ) -> list[Placement]:
        """Returns the placement of each replica of a model, one after another on the devices; raises as `of` does."""
        parallelism = Parallelism() if parallelism is None else parallelism
        if parallelism.stages > 1:
            _name_whole_layers(config, parallelism.stages)
        if parallelism.num_replicas == 1:
            return [cls.of(config, parallelism, devices)]
        each = parallelism.devices_per_replica
        count = each * parallelism.num_replicas
        chosen = _first_devices(parallelism, count) if devices is None else _checked_devices(devices, count)
        if not are_own(chosen):
            raise ValueError(
                f"{parallelism} has more devices than this process, and replicas are not for several processes; use"
                " replicas=1, or an engine with replicas in each process"
            )
        return [cls.of(config, parallelism, chosen[first : first + each]) for first in range(0, count, each)]

    @property
    def whole(self) -> NamedSharding | None:
        """The sharding of an array that every device has whole; None without a mesh."""
        return None if self.mesh is None else NamedSharding(self.mesh, PartitionSpec())

    @property
    def spans_processes(self) -> bool:
        """True if devices of other processes take part."""
        return self.mesh is not None and not are_own(self.mesh.devices.flat)

    def require_one_process(self, name: str) -> None:
        """Raises ValueError if devices of other processes take part, which a call of this name cannot have."""
        if self.spans_processes:
            raise ValueError(
                f"{name} needs parameters and pages that one process has, and this engine has devices of"
                f" {jax.process_count()}; use an engine with no more devices than a process has"
            )

    @property
    def num_devices(self) -> int:
        return 1 if self.mesh is None else self.mesh.size

    @property
    def first(self) -> Placement:
        """The placement on the first device alone."""
        if self.mesh is None or self.mesh.size == 1:
            return self
        ones = (1,) * self.mesh.devices.ndim
        return Placement(Mesh(self.mesh.devices.reshape(-1)[:1].reshape(ones), self.mesh.axis_names))

    def params(self, config: ModelConfig, params: Params) -> Params:
        """Returns abstract parameters with their shardings.

        Raises ValueError, with the name of the tensor, if devices would share a group of packed integers.
        """
        if self.mesh is None:
            return params
        is_split = devices_per_stage(self.mesh) > 1

        def split(path: Any, tensor: Any, spec: TensorSpec, sharding: NamedSharding) -> Any:
            if isinstance(tensor, PackedBlocks):
                if is_split:
                    raise ValueError(f"{BLOCKS_ARE_WHOLE}: {keystr(path)} has blocks of {tensor.type}")
                return jax.tree.map(lambda array: _placed(array, sharding), tensor)
            if not isinstance(tensor, QuantizedArray):
                return _placed(tensor, sharding)
            if "experts" in spec.axes and is_split:
                _refuse_own_inputs(keystr(path), tensor)
            if tensor.values.shape[-1] < spec.shape[-1]:
                _refuse_cut_groups(keystr(path), tensor, sharding)
            return jax.tree.map(_placed, tensor, quantized_sharding(tensor, sharding, spec.shape[-1]))

        trees = params, declare(config), shardings(config, self.mesh)
        return tree_map_with_path(split, *trees, is_leaf=lambda node: isinstance(node, PACKED))

    def cache(self, config: ModelConfig, cache: KVCache, kind: int | None = None) -> KVCache:
        """Returns an abstract cache, or a bundle of pages of a kind, with its shardings."""
        if self.mesh is None:
            return cache
        return jax.tree.map(_placed, cache, cache_shardings(cache, self.mesh, config=config, kind=kind))

    def init_cache(self, config: ModelConfig, cache_config: Any) -> KVCache:
        """Returns an empty cache. Each device makes its own part, so none has room for the whole."""
        if self.mesh is None:
            return init_cache(config, cache_config)
        make = functools.partial(init_cache, config, cache_config)
        return jax.jit(make, out_shardings=cache_shardings(jax.eval_shape(make), self.mesh, config=config))()

    def replicated(self, tree: T) -> T:
        """Returns the abstract arrays of a tree, each whole on every device; without a mesh the tree itself."""
        return tree if self.mesh is None else jax.tree.map(lambda array: _placed(array, self.whole), tree)

    def put(self, tree: T) -> T:
        """Returns the arrays of a tree whole on every device."""
        return jax.tree.map(lambda array: put_everywhere(array, self.whole), tree)

    def free_bytes(self) -> int | None:
        """Returns the free bytes of the device that has fewest; None if they report no limit, like CPUs.

        Over several processes it is the same number in each, and all have to call it.
        """
        if self.mesh is None:
            return free_bytes()
        free = free_bytes(device for device in self.mesh.devices.flat if device.process_index == jax.process_index())
        return hosts.of_this_process().least(free) if self.spans_processes else free

    def identity(self) -> str:
        """Returns the properties on which the bits of results and executables depend.

        They are the axes, the rules, and the kinds and the order of devices.
        """
        if self.mesh is None:
            return ONE_DEVICE
        axes = ", ".join(f"{axis} {size}" for axis, size in self.mesh.shape.items())
        devices = ", ".join(f"{device.device_kind} {device.id}" for device in self.mesh.devices.flat)
        rules = ", ".join(f"{logical} over {' and '.join(axes)}" for logical, axes in TENSOR_PARALLEL_RULES.items())
        return f"{axes} of {devices}; {rules}"


DEFAULT_DEVICE = Placement()


def possible_splits(config: ModelConfig) -> Iterator[Parallelism]:
    """Yields the ways to split a model over the first devices of this process, those of few devices first.

    Of one number of devices the first has the fewest groups of experts.
    """
    for count in range(1, jax.local_device_count() + 1):
        for experts in (n for n in range(1, count + 1) if count % n == 0):
            sizes = {EXPERTS_AXIS: experts, MLP_AXIS: count // experts}
            try:
                refuse_undivided(config, sizes)
            except ValueError:
                continue
            yield Parallelism(tensor=count // experts, experts=experts)


def identity_of(placements: Sequence[Placement]) -> str:
    """Returns the identity of the placements of all replicas, on which the bits of their results depend."""
    return " | ".join(placement.identity() for placement in placements)


def copied(params: Params, abstract: Params) -> Params:
    """Returns parameters copied to the devices of another replica, whose abstract parameters are given."""
    return jax.tree.map(lambda array, one: jax.device_put(array, one.sharding), params, abstract)


def _placed(array: Any, sharding: NamedSharding | None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


def are_own(devices: Iterable[Any]) -> bool:
    """True if all devices belong to this process."""
    return all(device.process_index == jax.process_index() for device in devices)


def _first_devices(parallelism: Parallelism, count: int) -> list[Any]:
    devices = jax.local_devices()
    if count > len(devices) and count == jax.device_count():
        return jax.devices()
    if count > len(devices):
        together = f" ({jax.device_count()} in all {jax.process_count()} processes)" if jax.process_count() > 1 else ""
        raise ValueError(
            f"{parallelism} needs {count} devices, and this process has {len(devices)}{together}; change"
            " EngineConfig.parallelism (--tensor-parallel, --expert-parallel, --stages, --replicas)"
        )
    return devices[:count]


def _checked_devices(devices: Any, count: int) -> list[Any]:
    required = f"{count} different devices of this process, for EngineConfig.parallelism has {count}"
    if jax.process_count() > 1:
        required = f"{required}; or all {jax.device_count()} devices of all processes"
    require(isinstance(devices, Sequence) and len(devices) == count, "devices", devices, required)
    are_there = any(set(devices) <= set(allowed) for allowed in (jax.local_devices(), jax.devices()))
    is_allowed = are_there and (are_own(devices) or count == jax.device_count())
    require(is_allowed and len({*devices}) == count, "devices", devices, required)
    return list(devices)


def name_idle_devices(used: Parallelism, widest: Parallelism) -> None:
    """Logs the devices of this process that a model leaves idle, if any, and the options that use them.

    `widest`: the split over the most devices that hold the model.
    """
    devices, count = jax.local_devices(), used.devices_per_replica
    if count == len(devices):
        return
    names, idle = (", ".join(map(str, some)) for some in (devices[:count], devices[count:]))
    ways = []
    if widest != used:
        ways.append(f"{_as_options(widest)}, splits it over {widest.devices_per_replica}")
    if (num_replicas := len(devices) // count) > 1:
        copies = replace(used, replicas=num_replicas)
        ways.append(f"{_as_options(copies)}, makes {num_replicas} copies of it")
    end = f": EngineConfig.parallelism={'; '.join(ways)}" if ways else ", for no split of it takes more"
    logger.warning("computes on %s, the fewest devices that hold the model, and leaves %s idle%s", names, idle, end)


def _name_whole_layers(config: ModelConfig, stages: int) -> None:
    """Logs the number of layers that every stage has to hold, if any."""
    staged = for_stages(config, stages, scans=False)
    groups = zip(staged.groups, staged.layer_groups, strict=True)
    num_shared = sum(num_layers for group, num_layers in groups if group.repeats > 1)
    if num_whole := config.num_layers - num_shared:
        counts = (stages, num_shared, config.num_layers, num_whole + num_shared // stages)
        logger.warning("stages=%d share %d of the %d layers, and each holds %d", *counts)


def _as_options(parallelism: Parallelism) -> str:
    """Returns the parts of a value that are not 1, as in Python and on the command line."""
    flags = {
        "tensor": "--tensor-parallel",
        "experts": "--expert-parallel",
        "stages": "--stages",
        "replicas": "--replicas",
    }
    given = {name: size for name in flags if (size := getattr(parallelism, name)) > 1}
    call = ", ".join(f"{name}={size}" for name, size in given.items())
    return f"Parallelism({call}), or {' '.join(f'{flags[name]} {size}' for name, size in given.items())}"


def refuse_undivided(config: ModelConfig, sizes: Mapping[str, int]) -> None:
    """Raises ValueError for a number of devices that a model's axes cannot be split over, with the numbers that can.

    Experts must be split by `experts`, heads and hidden units by `tensor`. If all devices together divide the latter,
    they share them; else those along `experts` have the same.
    """
    found: dict[str, set[tuple[int, str]]] = defaultdict(set)
    for spec in jax.tree.leaves(declare(config.for_devices(1)), is_leaf=lambda node: isinstance(node, TensorSpec)):
        for logical, size in zip(spec.axes, spec.units, strict=True):
            # `over_mesh` fits a vocabulary to any number, and KV heads to each that divides the query heads.
            # `for_stages` chooses the layers.
            if logical in TENSOR_PARALLEL_RULES and logical not in (KV_HEADS, VOCABULARY, LAYERS):
                found[TENSOR_PARALLEL_RULES[logical][-1]].add((size, logical))
    if (count := sizes.get(STAGES_AXIS, 1)) > 1:
        for_stages(config, count, scans=False)
    for axis, count in sizes.items():
        option, parts = OPTIONS[axis], found[axis]
        sizes_of = {logical: size for size, logical in sorted(parts, reverse=True) if size % count}  # the least of each
        undivided = [f"{logical} of size {size}" for logical, size in sorted(sizes_of.items())]
        if count > 1 and axis == EXPERTS_AXIS and not parts:
            raise ValueError(f"{option}={count} has nothing to split: the model has no experts; use {option}=1")
        if undivided:
            common = math.gcd(*(size for size, _ in parts))
            working = ", ".join(str(number) for number in range(1, common + 1) if common % number == 0)
            raise ValueError(
                f"{option}={count} cannot split {' and '.join(undivided)} evenly; the numbers that can are {working}"
            )


def _refuse_own_inputs(name: str, weights: QuantizedArray) -> None:
    """Raises ValueError for experts whose inputs have an order or a rounding of their own."""
    if weights.order is not None or weights.activations is not None:
        what = "an order of inputs (act-order)" if weights.order is not None else "inputs of 8 bits (W8A8)"
        raise ValueError(
            f"the experts {name} have {what}, which tensor and experts cannot split yet; load the model on one device,"
            " or give replicas or stages"
        )


def _refuse_cut_groups(name: str, weights: QuantizedArray, sharding: NamedSharding) -> None:
    """Raises ValueError if devices would share a group of inputs, whose numbers share bytes."""
    num_groups, bits = weights.scales.shape[-1], 4 if weights.bits is None else weights.bits
    count = sharding.mesh.shape[MLP_AXIS] if MLP_AXIS in names_of(sharding.spec[-1]) else 1
    if num_groups % count:
        working = ", ".join(str(number) for number in range(1, count) if num_groups % number == 0)
        raise ValueError(
            f"{OPTIONS[MLP_AXIS]}={count} cannot split the {num_groups} groups of inputs that share a scale in the"
            f" {bits}-bit weight {name}; smaller numbers that can are {working}"
        )
