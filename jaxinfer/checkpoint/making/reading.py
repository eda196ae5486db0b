"""Reads the tensors of `Params`, packed ones as they are packed, and puts them on their devices."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import NamedSharding, Sharding

from jaxinfer.checkpoint.making.assemblies import Assembly, grid_of
from jaxinfer.checkpoint.safetensors_file import DTYPES, FLOAT8, INTEGERS
from jaxinfer.checkpoint.stored import (
    FP4,
    FP4_NUMBERS,
    NUMBERS_AT_ONCE,
    Blocks,
    Grid,
    Stored,
    StoredBlocks,
    StoredQuantized,
)
from jaxinfer.device import put_everywhere
from jaxinfer.model.quantized_params import quantize_weight, quantized_sharding
from jaxinfer.model.stages import num_stages
from jaxinfer.quantization import BLOCKS_ARE_WHOLE, PackedBlocks, QuantizedArray
from jaxinfer.quantization.planes import fit_planes, pack_planes
from jaxinfer.quantization.quantized_array import quantize

ALIGNMENT = 64
# Inputs that share a scale where a TPU has integers in place of blocks. Blocks have groups of 16 or 32. With 32 the
# kernel of a TPU would take five times as long as reading the weights (int4, compiled for a v6e).
REPACKED_GROUP_SIZE = 128
REPACKED_BYTES = 1 + 4 / REPACKED_GROUP_SIZE  # of a weight
Part = tuple[range, ...]  # of an array, on each of its axes
# The types of numbers that lie neither in planes nor in pairs, where they are not those of a grid's code.
WHOLE_CODES = {FP4: "int8", "int2": "int4", "int3": "int4", "int5": "int8", "int6": "int8", "int7": "int8"}


def empty_aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Returns memory that JAX for CPU uses as it is; it copies arrays that do not start at a multiple of 64 bytes."""
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + num_bytes].view(dtype).reshape(shape)


def assemble(
    assembly: Assembly,
    stored: Mapping[str, Stored],
    dtype: np.dtype,
    sharding: NamedSharding | None,
    *,
    quantization: str | None = None,
    packs_integers: bool = True,
) -> jax.Array | QuantizedArray | PackedBlocks:
    """Reads one tensor of `Params` and returns it when it is on its devices: as `dtype`, or as it is packed.

    Without a sharding it goes, uncommitted, to the default device. With one, each device's slice is read by itself;
    packed integers are read whole, and each device gets its slice. If the tensor is not `is_packable`, it becomes
    `dtype`. `quantization` ("int8", "int4") is that of `quantize_weight`, by which the host rounds numbers as it reads
    them. A TPU has 4 bits in a type of their own in place of two to a byte (`packs_integers`), and integers in place of
    the blocks of a GGUF, see `_repacked`.
    """
    if (grid := grid_of(assembly, stored)) is None:
        if quantization is None or not assembly.spec.num_inputs:
            return _assemble_floats(assembly, stored, dtype, sharding)
        options = {"spec": assembly.spec, "quantization": quantization, "is_packed": packs_integers}
        rounded = functools.partial(quantize_weight, **options)
        return _assemble_rounded(assembly, stored, dtype, sharding, rounded)
    assembly = assembly.packed
    packed: list[Any] = [stored[name] for name in assembly.names]
    if isinstance(grid, Blocks) and not packs_integers:
        return _assemble_rounded(assembly, stored, np.dtype(np.float32), sharding, _repacked(assembly))
    if isinstance(grid, Blocks):
        if sharding is not None and sharding.mesh.size > num_stages(sharding.mesh):
            raise ValueError(f"{BLOCKS_ARE_WHOLE} (type {grid.type})")
        blocks = _read_rows(assembly, [tensor.blocks for tensor in packed], sharding)
        return jax.block_until_ready(PackedBlocks(blocks, grid.type))
    at = QuantizedArray(None, None)
    if sharding is not None:
        shapes: Any = abstract(assembly, stored, dtype, packs_integers=packs_integers)
        at = quantized_sharding(shapes, sharding, assembly.shape[-1])
    of_groups, bits = assembly.of_groups(grid.num_groups), grid.bits_in_planes if packs_integers else None

    def read_values(tensor: StoredQuantized, rows: slice) -> np.ndarray:
        own = tensor.values(rows)
        if bits is not None:
            return pack_planes(own, bits, grid.num_groups)
        if grid.code in ("int4", FP4) and packs_integers:
            return pack_planes(own, 4, grid.num_groups).view(own.dtype)
        if grid.code == FP4:  # twice the numbers are integers
            return (2 * FP4_NUMBERS[own]).astype(np.int8)
        return own.astype(ml_dtypes.int4) if WHOLE_CODES.get(grid.code, grid.code) == "int4" else own

    def read_levels(name: str) -> jax.Array:
        """Reads the scales or zero points of each stored tensor, one at a time."""
        parts = (of_groups.view(getattr(tensor, name)()) for tensor in packed)
        is_halved = grid.code == FP4 and not packs_integers
        own = (_halves(part) if is_halved and part.dtype == np.uint8 else part for part in parts)
        if name == "scales":
            own = (part[..., :: _outputs_per_scale(assembly, grid), :] for part in own)
        if name == "zeros":
            own = (_packed_zeros(part, grid, packs_integers) for part in own)
        return _stacked(assembly, own, getattr(at, name))

    order = None
    if grid.has_order:
        orders = np.stack([tensor.order() for tensor in packed])
        order = put_everywhere(orders.reshape(*assembly.shape[: assembly.num_stacked], -1), at.order)

    def read_numbers(name: str, count: int, divisor: int = 1) -> jax.Array:
        """Reads a few numbers of each stored tensor."""
        numbers = np.stack([getattr(tensor, name)() for tensor in packed]) / np.float32(divisor)
        return put_everywhere(numbers.reshape(_shape_of_numbers(assembly, count)), getattr(at, name))

    has_range = grid.activations is not None and not grid.activations.is_dynamic
    array = QuantizedArray(
        values=_read_rows(assembly, [functools.partial(read_values, tensor) for tensor in packed], at.values),
        scales=read_levels("scales"),
        zeros=read_levels("zeros") if grid.has_zeros else None,
        order=order,
        multiplier=read_numbers("multiplier", 2, 1 if packs_integers else 2) if grid.has_multiplier else None,
        input_range=read_numbers("input_range", 3) if has_range else None,
        activations=grid.activations,
        bits=bits,
    )
    return jax.block_until_ready(array)


def _repacked(assembly: Assembly) -> Callable[[Any], QuantizedArray]:
    """Returns the function that makes integers of 8 bits of weights in blocks, for a TPU, whose kernels read those.

    Groups have REPACKED_GROUP_SIZE inputs if it divides them. A vocabulary has a scale per token, as in
    `quantize_weight`.
    """
    inputs = assembly.shape[-1]
    size = inputs if assembly.spec.is_of_vocabulary else math.gcd(inputs, REPACKED_GROUP_SIZE)
    return functools.partial(quantize, group_size=size)


def _outputs_per_scale(assembly: Assembly, grid: Grid) -> int:
    """Returns how many neighbours on our last axis of outputs have the same scales."""
    count = math.gcd(assembly.shape[-2], grid.block_outputs)
    if count == 1 or assembly.spec.is_of_vocabulary:
        return 1
    blocks = (assembly.rows // grid.block_outputs).reshape(-1, count)
    return count if (blocks == blocks[:, :1]).all() else 1


def _columns_of_zeros(grid: Grid, packs_integers: bool) -> tuple[int, str]:
    """Returns the number of columns that the zero points of a weight have on the device, and their type.

    A single one stays a byte. So do those of 2, 3, 5, 6 or 7 bits whose planes are no whole bytes.
    """
    groups, bits = grid.num_groups, grid.bits_in_planes
    if not packs_integers:
        return groups, WHOLE_CODES.get(grid.code, grid.code)
    if bits is not None and fit_planes(bits, groups):
        return groups * bits // 8, "uint8"
    return (-(-groups // 2) if grid.code == "int4" else groups), "int8"


def _packed_zeros(zeros: np.ndarray, grid: Grid, packs_integers: bool) -> np.ndarray:
    """Returns zero points i8[..., groups] as they lie on the device."""
    (columns, code), bits = _columns_of_zeros(grid, packs_integers), grid.bits_in_planes
    if bits is not None and code == "uint8":
        return pack_planes(zeros, bits, 1)
    if columns == grid.num_groups:
        return zeros.astype(ml_dtypes.int4) if code == "int4" else zeros
    even = np.pad(zeros, [(0, 0)] * (zeros.ndim - 1) + [(0, 2 * columns - grid.num_groups)])
    return pack_planes(even, 4, columns).view(np.int8)


def abstract(
    assembly: Assembly, stored: Mapping[str, Stored], dtype: Any, *, packs_integers: bool = True
) -> jax.ShapeDtypeStruct | QuantizedArray | PackedBlocks:
    """Returns the shapes and dtypes of what `assemble` returns."""
    if (grid := grid_of(assembly, stored)) is None:
        return jax.ShapeDtypeStruct(assembly.shape, dtype)
    assembly = assembly.packed
    *outputs, inputs = assembly.shape
    if isinstance(grid, Blocks) and not packs_integers:
        return jax.eval_shape(_repacked(assembly), jax.ShapeDtypeStruct(assembly.shape, np.float32))
    if isinstance(grid, Blocks):
        return PackedBlocks(jax.ShapeDtypeStruct((*outputs, grid.row_bytes), np.uint8), grid.type)
    is_packed, bits = grid.code in ("int4", FP4) and packs_integers, grid.bits_in_planes if packs_integers else None
    orders = (*assembly.shape[: assembly.num_stacked], inputs)
    if bits is not None:
        code, width = "uint8", inputs * bits // 8
    elif is_packed:
        code, width = "uint8" if grid.code == FP4 else "int8", inputs // 2
    else:
        code, width = WHOLE_CODES.get(grid.code, grid.code), inputs
    zero_columns, zero_code = _columns_of_zeros(grid, packs_integers)
    of_scales = (*outputs[:-1], outputs[-1] // _outputs_per_scale(assembly, grid), grid.num_groups)
    scale_dtype = (DTYPES | INTEGERS | FLOAT8)[grid.scale_dtype]
    if scale_dtype == np.uint8 and grid.code == FP4 and not is_packed:
        scale_dtype = np.dtype(ml_dtypes.bfloat16)

    def numbers(count: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(_shape_of_numbers(assembly, count), np.float32)

    return QuantizedArray(
        values=jax.ShapeDtypeStruct((*outputs, width), code),
        scales=jax.ShapeDtypeStruct(of_scales, scale_dtype),
        zeros=jax.ShapeDtypeStruct((*outputs, zero_columns), zero_code) if grid.has_zeros else None,
        order=jax.ShapeDtypeStruct(orders, np.int32) if grid.has_order else None,
        multiplier=numbers(2) if grid.has_multiplier else None,
        input_range=numbers(3) if grid.activations is not None and not grid.activations.is_dynamic else None,
        activations=grid.activations,
        bits=bits,
    )


def _shape_of_numbers(assembly: Assembly, count: int) -> tuple[int, ...]:
    """Returns the shape of what has a few numbers for each stored tensor, and the axes of the weight."""
    num_stacked = assembly.num_stacked
    return (*assembly.shape[:num_stacked], *(1,) * (len(assembly.shape) - num_stacked - 1), count)


def _halves(exponents: np.ndarray) -> np.ndarray:
    """Returns the halves of scales u8 that are exponents of 2, in bfloat16, which holds them."""
    return np.exp2(exponents.astype(np.float32) - 128).astype(ml_dtypes.bfloat16)


def _read_rows(
    assembly: Assembly, reads: Sequence[Callable[[slice], np.ndarray]], sharding: NamedSharding | None
) -> jax.Array:
    """Returns the rows of stored tensors on their devices, in our order and stacked.

    `reads` have one for each, which returns [rows, n] for some rows at once. They go where they stay, so that the host
    holds little more than the result.
    """
    stack, step = None, max(NUMBERS_AT_ONCE // assembly.shape[-1], 1)
    for i, read in enumerate(reads):
        for start in range(0, len(assembly.rows), step):
            rows = assembly.rows[start : start + step]
            own = rows[rows >= 0]  # only the last ones are padding
            if own.size:
                first = own.min()
                piece = read(slice(first, own.max() + 1))[own - first]
                if stack is None:
                    stack = empty_aligned((len(reads), len(assembly.rows), piece.shape[1]), piece.dtype)
                stack[i, start : start + own.size] = piece
            if own.size < rows.size:
                assert stack is not None
                stack[i, start + own.size : start + rows.size] = 0
    assert stack is not None
    return put_everywhere(stack.reshape(*assembly.shape[:-1], -1), sharding)


def _stacked(assembly: Assembly, tensors: Iterable[np.ndarray], sharding: NamedSharding | None = None) -> jax.Array:
    """Returns arrays of the stored tensors on their devices, stacked as they come."""
    stack = None
    for i, own in enumerate(tensors):
        if stack is None:
            stack = empty_aligned((len(assembly.names), *own.shape), own.dtype)
        stack[i] = own
    assert stack is not None
    return put_everywhere(stack.reshape(*assembly.shape[: assembly.num_stacked], *stack.shape[1:]), sharding)


def floats_of(stored: Stored, dtype: Any = np.float32) -> np.ndarray:
    """Returns the numbers of a stored tensor: as `dtype` if it is packed, else as they are stored."""
    return stored.floats(dtype) if isinstance(stored, StoredQuantized | StoredBlocks) else stored.map()


def _assemble_floats(
    assembly: Assembly, stored: Mapping[str, Stored], dtype: np.dtype, sharding: Sharding | None
) -> jax.Array:
    @functools.cache  # devices that have the same part share it
    def read(*part: range) -> np.ndarray:
        whole = empty_aligned(tuple(map(len, part)), dtype)
        for place, numbers in _floats_in_pieces(assembly, stored, dtype, part):
            np.copyto(whole[(*place, ...)], numbers, casting="unsafe")  # a view, of a single number too
        return whole

    array = jax.ShapeDtypeStruct(assembly.shape, dtype)
    # Otherwise transfers still under way would keep several tensors in host memory.
    return _placed(array, sharding, lambda part: read(*part)).block_until_ready()


def _assemble_rounded(
    assembly: Assembly,
    stored: Mapping[str, Stored],
    dtype: np.dtype,
    sharding: NamedSharding | None,
    rounded: Callable[[Any], QuantizedArray],
) -> QuantizedArray:
    """Reads a tensor as `dtype`, and rounds some outputs at a time: all inputs of an output decide on its scales."""
    num_inputs = assembly.shape[-1]
    shapes = jax.eval_shape(rounded, jax.ShapeDtypeStruct(assembly.shape, dtype))
    at = QuantizedArray(None, None) if sharding is None else quantized_sharding(shapes, sharding, num_inputs)

    @functools.cache
    def read(*outputs: range) -> QuantizedArray:
        sizes = tuple(map(len, outputs))
        whole = jax.tree.map(lambda of_all: empty_aligned((*sizes, of_all.shape[-1]), of_all.dtype), shapes)
        for place, numbers in _floats_in_pieces(assembly, stored, dtype, (*outputs, range(num_inputs))):
            own = rounded(numbers.astype(dtype, copy=False))
            whole.values[place], whole.scales[place] = own.values, own.scales
        return whole

    def placed(name: str) -> jax.Array:
        def read_part(part: Part) -> np.ndarray:
            *outputs, inputs = part
            return getattr(read(*outputs), name)[..., inputs.start : inputs.stop]

        return _placed(getattr(shapes, name), getattr(at, name), read_part)

    return jax.block_until_ready(QuantizedArray(placed("values"), placed("scales")))


def _placed(array: jax.ShapeDtypeStruct, sharding: Sharding | None, read: Callable[[Part], np.ndarray]) -> jax.Array:
    """Returns an array on the devices of a sharding, each of whose parts `read` returns."""
    whole = tuple(map(range, array.shape))
    if sharding is None:
        return jax.device_put(read(whole))

    def read_index(index: Any) -> np.ndarray:
        return read(tuple(axis[own] for axis, own in zip(whole, index, strict=True)))

    return jax.make_array_from_callback(array.shape, sharding, read_index, dtype=array.dtype)


def _floats_in_pieces(
    assembly: Assembly, stored: Mapping[str, Stored], dtype: np.dtype, part: Part
) -> Iterator[tuple[tuple[Any, ...], np.ndarray]]:
    """Yields the numbers of a part of our tensor, some outputs at a time, each with its place in the part.

    Stored tensors are read one after another: blocks and integers become floats as they are read.
    """
    num_stacked = assembly.num_stacked
    outputs, inputs = part[num_stacked:-1], part[num_stacked:][-1:]  # both are () for a number per layer
    cuts, room = [], NUMBERS_AT_ONCE // math.prod(map(len, inputs))
    for axis in reversed(outputs):
        step = max(room, 1)
        cuts.insert(0, [axis[start : start + step] for start in range(0, len(axis), step)])
        room //= len(axis)
    names = np.array(assembly.names).reshape(assembly.shape[:num_stacked])[_slices(part[:num_stacked])]
    for place, name in np.ndenumerate(names):
        whole = floats_of(stored[str(name)], dtype)
        for piece in itertools.product(*cuts):
            pairs = zip(piece, outputs, strict=True)
            own_place = (slice(own.start - axis.start, own.stop - axis.start) for own, axis in pairs)
            yield (*place, *own_place), assembly.view(whole, _slices((*piece, *inputs)))


def _slices(part: Part) -> tuple[slice, ...]:
    return tuple(slice(axis.start, axis.stop) for axis in part)
